"""Request patterns of rules, `"GET,HEAD /path?query"`, and what they say of one request.

Methods are case-sensitive tokens. `ANY` is every method but CONNECT and TRACE, which are never carried, and
no upgrade; a WebSocket needs `WEBSOCKET /path`. Without `?` any query goes; `?k=v` is that key exactly once
and no other; `?k=v&*` lets others in; a bare `?` lets in none. Keys and values compare as they stand (escapes
in upper case), never decoded, so that what the origin reads is what the rule spells; to count a key, however,
every spelling of it that some origin takes for it counts.

A deny reads wider: methods without case, GET also for HEAD and for the handshake of a WebSocket, and `?k=v`
wherever the key has that value in any spelling, other keys beside it or not. Otherwise one more `&x=1` would
be the way round it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from egressd.policy.paths import BadPattern, PathPattern, Target, decode, parse_path_pattern, upper_escapes
from egressd.policy.reasons import Reason

DEFAULT_REQUESTS = ("GET,HEAD /**",)

_METHOD = re.compile(r"[A-Z][A-Z0-9_-]*")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_QUERY = re.compile(r"[A-Za-z0-9._~!$'()*+,:@%/?=&-]*")
_NOT_CARRIED = frozenset({"CONNECT", "TRACE"})


@dataclass(frozen=True, slots=True)
class QueryPattern:
    """The parameters that a rule names, as they stand, each with its key as origins read it; `open` lets
    others in beside them.
    """

    pairs: tuple[str, ...]
    keys: frozenset[str]
    open: bool

    def allows(self, query: str | None) -> bool:
        """Say whether an allow covers the query: each named pair once, its key in no other spelling, others
        only if `open`.
        """
        given = query.split("&") if query else []
        others = [piece for piece in given if piece not in self.pairs]
        if len(given) - len(others) != len(self.pairs) or not set(self.pairs) <= set(given):
            return False
        if not self.open:
            return not others
        # `;` separates parameters for some origins.
        return not any(";" in piece or _key(piece) in self.keys for piece in others)

    def denies(self, query: str | None) -> bool:
        """Say whether a deny covers the query: each named pair occurs, in any spelling."""
        pieces = query.split("&") + re.split("[&;]", query) if query else []
        given = {_pair(piece) for piece in pieces}
        return all(_pair(pair) in given for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class RequestPattern:
    """One `requests` line of a rule. `methods` is None for `ANY`; `websocket` covers the handshakes of
    WebSockets.
    """

    text: str
    methods: frozenset[str] | None
    websocket: bool
    path: PathPattern
    query: QueryPattern | None

    def refuses(self, method: str, upgrade: str | None, target: Target) -> Reason | None:
        """Return why an allow or ask with this pattern does not cover the request, or None when it does.

        `upgrade` is None or `websocket`. The path is looked at first, then the method, then the query: the
        later the reason, the nearer the miss.
        """
        if not self.path.allows(target):
            return Reason.PATH_NOT_ALLOWED
        if upgrade is not None:
            if not self.websocket:
                return Reason.UPGRADE_NOT_ALLOWED
            if method != "GET":
                return Reason.METHOD_NOT_ALLOWED
        elif not self._has_method(method):
            return Reason.METHOD_NOT_ALLOWED
        if self.query is not None and not self.query.allows(target.query):
            return Reason.QUERY_NOT_ALLOWED
        return None

    def denies(self, method: str, upgrade: str | None, target: Target) -> bool:
        """Say whether a deny with this pattern covers the request."""
        if self.methods is not None and not (upgrade is not None and self.websocket):
            folded = method.upper()
            if folded not in self.methods and not (folded == "HEAD" and "GET" in self.methods):
                return False
        return self.path.denies(target) and (self.query is None or self.query.denies(target.query))

    def _has_method(self, method: str) -> bool:
        return is_carried(method) if self.methods is None else method in self.methods


def is_carried(method: str) -> bool:
    """Say whether a method can be allowed at all: a token, and not CONNECT or TRACE in any case."""
    return _TOKEN.fullmatch(method) is not None and method.upper() not in _NOT_CARRIED


def parse_request_pattern(raw: str) -> RequestPattern | BadPattern:
    """Return the pattern that a `requests` line spells, or what is wrong with it."""
    head, space, rest = raw.partition(" ")
    if not space or not head or not rest.startswith("/"):
        return BadPattern("a request is written like 'GET,HEAD /path'", _propose_shape(raw))
    names = head.split(",")
    problem = _bad_methods(names, rest)
    if problem is not None:
        return problem
    path_text, mark, query_text = rest.partition("?")
    path = parse_path_pattern(path_text)
    if isinstance(path, BadPattern):
        proposal = f"{head} {path.proposal}{mark}{query_text}" if path.proposal else None
        return BadPattern(path.detail, proposal)
    query = _parse_query(upper_escapes(query_text)) if mark else None
    if isinstance(query, BadPattern):
        return query
    methods = None if "ANY" in names else frozenset(names) - {"WEBSOCKET"}
    return RequestPattern(
        f"{head} {path.text}{mark}{upper_escapes(query_text)}", methods, "WEBSOCKET" in names, path, query
    )


def _propose_shape(raw: str) -> str | None:
    match = re.fullmatch(r"\s*([A-Za-z]+(?:\s*,\s*[A-Za-z]+)*)?\s*(/\S*)?\s*", raw)
    if match is None or not (match[1] or match[2]):
        return None
    methods = re.sub(r"\s", "", match[1] or "GET,HEAD").upper()
    proposal = f"{methods} {match[2] or '/**'}"
    return proposal if proposal != raw else None


def _bad_methods(names: list[str], rest: str) -> BadPattern | None:
    for name in names:
        if not _METHOD.fullmatch(name):
            upper = [other.upper() for other in names]
            proposal = f"{','.join(upper)} {rest}" if all(map(_METHOD.fullmatch, upper)) else None
            return BadPattern("a method is a word in capitals, several are joined by commas", proposal)
        if name in _NOT_CARRIED:
            return BadPattern(f"{name} is never carried, so no rule can name it")
    if len(set(names)) < len(names):
        return BadPattern("a method stands twice", f"{','.join(dict.fromkeys(names))} {rest}")
    if "ANY" in names and set(names) - {"ANY", "WEBSOCKET"}:
        return BadPattern("'ANY' covers every other method", f"ANY {rest}")
    return None


def _parse_query(text: str) -> QueryPattern | BadPattern:
    pairs = text.split("&") if text else []
    opened = bool(pairs) and pairs[-1] == "*"
    if opened:
        pairs.pop()
    if opened and not pairs:
        return BadPattern("'?*' lets every query in; so does leaving the query out")
    if not _QUERY.fullmatch(text) or "" in pairs:
        return BadPattern("a query is written like '?key=value' or '?key=value&*', escaped as on the wire")
    if any("*" in pair for pair in pairs):
        return BadPattern("'*' in a query stands only at the end, for other parameters: '?key=value&*'")
    keys = frozenset(map(_key, pairs))
    if len(keys) < len(pairs):
        return BadPattern("a query parameter stands twice; a pattern names each key once")
    return QueryPattern(tuple(pairs), keys, opened)


def _key(piece: str) -> str:
    """The key of a parameter as the most lenient origin reads it: decoded, without case, `k[]` and `k.` and `
    k` being `k`.
    """
    key = decode(piece.partition("=")[0].replace("+", " ")).partition("\0")[0]
    return key.strip().partition("[")[0].replace(".", "_").replace(" ", "_")


def _pair(piece: str) -> tuple[str, str]:
    """Key and value as the most lenient origin reads them."""
    return _key(piece), decode(piece.partition("=")[2].replace("+", " "))
