"""A decision in the journal as an attempt again: what can be judged anew, what cannot, and how sure that is.

A record holds the keys of a query and the length of each value, never a value. So it may stand for several attempts: `readings`
are all that matter to the rules at hand. Where they are judged differently, nobody can say more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from egressd.policy.attempt import Address, Attempt, ConnectionAttempt, DnsQuestion, Name, RequestAttempt
from egressd.policy.names import BadHost, format_host, parse_host
from egressd.policy.reasons import Reason

MOST_READINGS = 16

_CLIPPED = re.compile(r"…\[\d+ bytes, sha256 [0-9a-f]{16}\]\Z")
_PART = re.compile(r"([^=]*)=<(\d{1,6})>|<(\d{1,6})>")
_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_FILLER = "0"

BY_RULES = frozenset(
    {
        *(Reason.RULE, Reason.GRANT, Reason.OBSERVED, Reason.EXPLAINED, Reason.NOT_ALLOWED),
        *(Reason.DENIED_BY_RULE, Reason.DENIED_BY_ORGANISATION, Reason.APPROVAL_REQUIRED),
        *(Reason.PORT_NOT_ALLOWED, Reason.SCHEME_NOT_ALLOWED, Reason.METHOD_NOT_ALLOWED),
        *(
            Reason.PATH_NOT_ALLOWED,
            Reason.QUERY_NOT_ALLOWED,
            Reason.PATH_AMBIGUOUS,
            Reason.UPGRADE_NOT_ALLOWED,
        ),
        *(Reason.IP_LITERAL, Reason.TARGET_TOO_LONG, Reason.RATE_LIMITED, Reason.TOO_MANY_CONNECTIONS),
        *(Reason.FLOOR_METADATA, Reason.FLOOR_LOOPBACK, Reason.FLOOR_LINK_LOCAL, Reason.FLOOR_UNSPECIFIED),
        *(Reason.FLOOR_MULTICAST, Reason.FLOOR_OWN_ADDRESS, Reason.FLOOR_NAME),
    }
)
"""Reasons that come from names, methods, paths and limits; the others (broken bytes, upstreams, leases) no rule would change."""

_BY_VALUE = frozenset(reason.value for reason in BY_RULES)

type Verdict = Literal["allow", "deny", "ask"]


@dataclass(frozen=True, slots=True)
class Unplayable:
    """A record that cannot be judged anew, and why: one of a few fixed phrases."""

    why: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decision that can: `attempt` has a query without values, `query` its keys with the length of each value.

    `times` is how many attempts the record stands for. `would_deny` is an allow of observe mode.
    """

    attempt: Attempt
    verdict: Verdict
    reason: str
    rule: str | None
    profile: str
    sandbox: str
    times: int
    query: tuple[tuple[str | None, int], ...] = ()
    has_query: bool = False
    would_deny: bool = False
    dns_type: str = "A"

    @property
    def text(self) -> str:
        """The attempt as a person writes it; a value of a query is shown by its length."""
        return request_text(self.attempt, self.query if self.has_query else None, self.dns_type)


def read_recorded(fields: Mapping[str, object]) -> Recorded | Unplayable:
    """Return the attempt of a decision record. Total: a journal holds what hostile programs sent."""
    verdict, profile = fields.get("verdict"), fields.get("profile")
    if verdict not in ("allow", "deny", "ask") or not isinstance(profile, str):
        return Unplayable("no decision under a profile")
    if fields.get("layer") == "packet":
        return Unplayable("a packet, which no rule judges")
    reason = fields.get("reason")
    if not isinstance(reason, str) or reason not in _BY_VALUE:
        return Unplayable("decided by something else than rules")
    host = fields.get("host") or fields.get("address")
    parsed = parse_host(host, bracketed=host.startswith("[")) if isinstance(host, str) else None
    if parsed is None or isinstance(parsed, BadHost):
        return Unplayable("without a host")
    rule, count = fields.get("rule"), fields.get("count")
    base = Recorded(
        attempt=DnsQuestion(parsed) if isinstance(parsed, tuple) else ConnectionAttempt(parsed, 443, "https"),
        verdict=verdict,
        reason=reason,
        rule=rule if isinstance(rule, str) else None,
        profile=profile,
        sandbox=str(fields.get("sandbox", "unknown")),
        times=count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1,
        would_deny=fields.get("would_deny") is True,
    )
    if fields.get("layer") == "dns":
        kind = fields.get("qtype")
        return replace(base, dns_type=kind) if isinstance(kind, str) else base
    port, scheme = fields.get("port"), fields.get("scheme")
    if not isinstance(port, int) or scheme not in ("https", "http"):
        return Unplayable("folded with others, without what was asked for")
    secure: Literal["https", "http"] = "https" if scheme == "https" else "http"
    if fields.get("layer") == "connection":
        raw = fields.get("treatment") == "relay" and verdict != "deny"
        return replace(base, attempt=ConnectionAttempt(parsed, port, "tcp" if raw else secure))
    return _request(base, fields, parsed, port, secure)


def _request(
    base: Recorded,
    fields: Mapping[str, object],
    host: Name | Address,
    port: int,
    scheme: Literal["https", "http"],
) -> Recorded | Unplayable:
    method, path, query = fields.get("method"), fields.get("path"), fields.get("query")
    if not isinstance(method, str) or not isinstance(path, str) or not _METHOD.fullmatch(method):
        return Unplayable("folded with others, without what was asked for")
    if _CLIPPED.search(path) or (isinstance(query, str) and _CLIPPED.search(query)):
        return Unplayable("too long to have been kept whole")
    pairs: list[tuple[str | None, int]] = []
    for part in query.split("&") if isinstance(query, str) and query else ():
        match = _PART.fullmatch(part)
        if match is None:
            return Unplayable("too long to have been kept whole")
        pairs.append((match[1], int(match[2] or match[3])))
    upgrade = "websocket" if base.reason == Reason.UPGRADE_NOT_ALLOWED else None
    made = RequestAttempt(host, port, scheme, method, path, upgrade)
    if not isinstance(query, str):
        return _with(base, made)
    return replace(_with(base, made), query=tuple(pairs), has_query=True)


def _with(base: Recorded, attempt: Attempt) -> Recorded:
    """The record of another attempt: what `replace` does, in a third of the time, once for each line of a journal."""
    return Recorded(
        attempt,
        base.verdict,
        base.reason,
        base.rule,
        base.profile,
        base.sandbox,
        base.times,
        would_deny=base.would_deny,
    )


def readings(recorded: Recorded, pairs: Iterable[str]) -> Iterator[Attempt]:
    """Yield the attempts that the record may stand for; `pairs` are the `key=value` that rules on the host name.

    The first has values that no rule names. At most `MOST_READINGS`, the rest of a crowd being left out.
    """
    attempt = recorded.attempt
    if not isinstance(attempt, RequestAttempt) or not recorded.has_query:
        yield attempt
        return
    choices = [_values(key, length, pairs) for key, length in recorded.query]
    for chosen in itertools.islice(itertools.product(*choices), MOST_READINGS):
        yield replace(attempt, target=f"{attempt.target}?{'&'.join(chosen)}")


def _values(key: str | None, length: int, pairs: Iterable[str]) -> list[str]:
    if key is None:
        whole = [pair for pair in pairs if len(pair) == length and "=" not in pair]
        return [_FILLER * length, *whole]
    named = [
        pair for pair in pairs if pair.partition("=")[0] == key and len(pair.partition("=")[2]) == length
    ]
    return [f"{key}={_FILLER * length}", *(pair for pair in named if pair != f"{key}={_FILLER * length}")]


def request_text(
    attempt: Attempt, query: Iterable[tuple[str | None, int]] | None = None, dns_type: str = "A"
) -> str:
    """Return an attempt as REQUEST; of a query that was recorded, each value is shown as `<length>`."""
    if isinstance(attempt, DnsQuestion):
        return f"dns:{format_host(attempt.name)}" + ("" if dns_type == "A" else f"/{dns_type}")
    host = format_host(attempt.host)
    if isinstance(attempt, ConnectionAttempt):
        return f"{attempt.scheme}://{host}:{attempt.port}"
    usual = {"https": 443, "http": 80}[attempt.scheme] == attempt.port
    method = "WEBSOCKET" if attempt.upgrade else attempt.method
    shown = (
        ""
        if query is None
        else "?" + "&".join(f"<{length}>" if key is None else f"{key}=<{length}>" for key, length in query)
    )
    return f"{method} {attempt.scheme}://{host}{'' if usual else f':{attempt.port}'}{attempt.target}{shown}"
