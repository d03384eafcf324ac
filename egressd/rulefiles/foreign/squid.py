"""A squid.conf: its `acl` lines and its `http_access` lines, in their order, as far as they say which sites may be reached.

`dstdomain .name` (and `ssl::server_name`) is the name and all below it, `name` the name alone. The first `http_access` line
decides whose conditions all hold; with us a denial wins always, so a denial behind an allowance is narrower here, and noted.
`deny !list` confines what the allowances behind it let through. Who asks (`src`, `proxy_auth`), when and how often is not a
profile's matter: it is for the sandboxes that are given it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from egressd.rulefiles.foreign.allowlist import EVERYTHING, NotReadable, Permission, Section, address, host

_SITES = frozenset({"dstdomain", "ssl::server_name"})
_WHO = frozenset(
    {
        "src",
        "srcdomain",
        "srcdom_regex",
        "proxy_auth",
        "proxy_auth_regex",
        "ident",
        "arp",
        "myportname",
        "localport",
        "localip",
        "time",
    }
)
_REGEX = "a pattern of characters; name the hosts, and paths as `requests`"
_WHY = {
    "dstdom_regex": _REGEX,
    "url_regex": _REGEX,
    "urlpath_regex": _REGEX,
    "ssl::server_name_regex": _REGEX,
    "dst": "where names lead; `addresses` beside `hosts` says where a host may lead",
    "external": "asks a program; `ask` asks a person",
    "maxconn": "`limits: {connections: N}` bounds these",
}
_OTHER = {
    "ssl_bump": "ours inspects every host; `treatment: tunnel` is for what pins its certificates",
    "request_body_max_size": "`limits: {upload: …}` bounds bytes, not one body",
    "reply_body_max_size": "`limits: {download: …}` bounds bytes, not one body",
    "http_reply_access": "replies are not judged",
    "external_acl_type": "asks a program",
    "url_rewrite_program": "nothing is rewritten",
    "cache_peer": "egressd.yaml has `upstream.proxy`",
    "include": "another file, which was not read",
    "delay_access": "`limits:` bound bytes over time",
}
_BUILT_IN: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {
    "all": ("all", ()),
    "manager": ("manager", ()),
    "localhost": ("src", ()),
    "to_localhost": ("to_localhost", ()),
    "to_linklocal": ("to_linklocal", ()),
    "CONNECT": ("method", (("CONNECT", 0),)),
}
"""What newer versions define by themselves."""
_METHODS = re.compile(r"[A-Z][A-Z0-9_-]*\Z")
_USUAL = frozenset({80, 443})

type Open = Callable[[str], str | None]
"""Returns the text of a file that an `acl` line names, None where it cannot be read."""


@dataclass(slots=True)
class Acl:
    """What one name stands for: its type, and each value with its line."""

    kind: str
    values: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Reading:
    """A configuration being read; `confined` are the hosts beyond which nothing passes any more."""

    section: Section
    acls: dict[str, Acl]
    confined: dict[str, int] | None = None
    allowed: bool = False


def read(text: str, opened: Open = lambda _name: None) -> list[Section]:
    """Return the one section of a file; raises NotReadable."""
    section = Section("imported-squid")
    reading = _Reading(section, {name: Acl(kind, list(values)) for name, (kind, values) in _BUILT_IN.items()})
    rules: list[tuple[int, str, list[str]]] = []
    for line, words in _lines(text):
        if words[0] == "acl" and len(words) >= 3:
            _acl(reading, words, line, opened)
        elif words[0] == "http_access" and len(words) >= 3 and words[1] in ("allow", "deny"):
            rules.append((line, words[1], words[2:]))
        elif words[0] in _OTHER:
            section.note(line, " ".join(words), _OTHER[words[0]])
    if not rules:
        raise NotReadable("no http_access line in it, as a squid.conf has")
    for line, verb, names in rules:
        if all(name.removeprefix("!") in reading.acls for name in names):
            (_allow if verb == "allow" else _deny)(reading, names, line)
        else:
            section.note(
                line,
                f"http_access {verb} {' '.join(names)}",
                "names an acl that is not defined",
                wider=verb == "deny",
            )
    if rules[-1][1] == "deny" and rules[-1][2] != ["all"]:
        section.note(
            rules[-1][0],
            "the end",
            "squid lets through what no line decides, as its last line is a denial; ours does not",
        )
    return [section]


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each line's words; a backslash at its end joins the next."""
    joined, began = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        began = began or number
        joined += raw
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        lexer = shlex.shlex(joined, posix=False)
        lexer.whitespace_split, lexer.commenters, lexer.quotes = True, "#", '"'
        try:
            words = list(lexer)
        except ValueError:
            words = joined.split()
        if words:
            yield began, words
        joined, began = "", 0


def _acl(reading: _Reading, words: list[str], line: int, opened: Open) -> None:
    name, kind, values = words[1], words[2], [word for word in words[3:] if not word.startswith("-")]
    acl = reading.acls.setdefault(name, Acl(kind))
    if acl.kind != kind or name == "all":
        reading.section.note(line, " ".join(words), f"{name} is a {acl.kind} already")
        return
    for value in values:
        if not value.startswith('"'):
            acl.values.append((value, line))
            continue
        content = opened(value.strip('"'))
        if content is None:
            reading.section.note(line, value, "the file cannot be read: its lines are missing here")
        else:
            rows = (row.split("#", 1)[0].split() for row in content.splitlines())
            acl.values += [(row[0], line) for row in rows if row]


def _allow(reading: _Reading, names: list[str], line: int) -> None:
    section, text = reading.section, f"http_access allow {' '.join(names)}"
    hosts = dict(reading.confined) if reading.confined is not None else None
    methods: list[str] = []
    for name in names:
        acl = reading.acls[name.removeprefix("!")]
        if name.startswith("!"):
            section.note(line, text, f"{name}: allows all but a list; ours has lists of what is allowed")
            return
        if acl.kind in _SITES:
            found = _hosts(reading, acl)
            hosts = found if hosts is None else {one: at for one, at in found.items() if _within(one, hosts)}
        elif acl.kind == "method":
            methods += [value for value, _ in acl.values if _METHODS.fullmatch(value)]
        elif acl.kind in _WHO:
            section.note(line, name, "who asks, and when: give the profile to the sandboxes that it is for")
        elif acl.kind in ("port", "all"):
            _odd_ports(section, acl, line)
        else:
            section.note(line, text, f"{name}: {_WHY.get(acl.kind, f'an acl of the type {acl.kind}')}")
            return
    if hosts is None:
        section.note(
            line,
            text,
            "every host: ours has no such entry; `public_web: read` or `mode: observe` are for that",
        )
        return
    readable = [method for method in dict.fromkeys(methods) if method not in ("CONNECT", "TRACE")]
    requests = (f"{','.join(readable)} /**",) if readable else (EVERYTHING,)
    addresses = {one: at for one, at in hosts.items() if "/" in one}
    names_ = {one: at for one, at in hosts.items() if "/" not in one}
    if names_ or addresses:
        ports = (443,) if methods and not readable else ()  # a CONNECT is how a client begins TLS
        section.allowed.append(Permission(names_, addresses, requests, ports))
    reading.allowed = True


def _deny(reading: _Reading, names: list[str], line: int) -> None:
    section, text = reading.section, f"http_access deny {' '.join(names)}"
    kinds = [reading.acls[name.removeprefix("!")].kind for name in names]
    if kinds == ["all"]:
        return
    if len(names) == 1 and names[0].startswith("!") and kinds[0] in _SITES:
        found = _hosts(reading, reading.acls[names[0][1:]])
        before = reading.confined
        reading.confined = (
            found if before is None else {h: at for h, at in found.items() if _within(h, before)}
        )
    elif len(names) == 1 and kinds[0] in _SITES:
        if reading.allowed:
            section.note(line, text, "behind an allowance, which goes before it there; here the denial wins")
        for one, at in _hosts(reading, reading.acls[names[0]], permits=False).items():
            section.denied.setdefault(one, at)
    elif set(kinds) <= {"port", "method"} and any(name.startswith("!") for name in names):
        for name in names:  # squid's own `deny !Safe_ports`, `deny CONNECT !SSL_ports`
            _odd_ports(section, reading.acls[name.removeprefix("!")], line)
    elif set(kinds) <= _WHO | {"manager", "to_localhost", "to_linklocal"}:
        section.note(line, text, "who asks: give the profile to the sandboxes that it is for")
    else:
        why = next((_WHY[kind] for kind in kinds if kind in _WHY), "conditions that ours cannot put together")
        section.note(line, text, why, wider=True)


def _odd_ports(section: Section, acl: Acl, line: int) -> None:
    odd = [
        value
        for value, _ in acl.values
        if acl.kind == "port" and not (value.isdigit() and int(value) in _USUAL)
    ]
    if odd:
        section.note(
            line,
            f"ports {' '.join(odd)}",
            "here 443 and 80; other ports are written with the hosts that need them",
        )


def _hosts(reading: _Reading, acl: Acl, *, permits: bool = True) -> dict[str, int]:
    found: dict[str, int] = {}
    for raw, line in acl.values:
        literal = address(raw, line, reading.section) if permits else None
        if literal is not None:
            if literal:
                found[literal] = line
            continue
        bare = raw.removeprefix(".")
        for spelled in (bare, f"*.{bare}") if bare != raw else (raw,):
            one = host(spelled, line, reading.section, permits=permits)
            if one is not None:
                found.setdefault(one, line)
    return found


def _within(one: str, hosts: dict[str, int]) -> bool:
    """Whether a pattern lies in a list."""
    name = one.removeprefix("*.")
    labels = name.split(".")
    above = (f"*.{'.'.join(labels[cut:])}" for cut in range(0 if one != name else 1, len(labels)))
    return one in hosts or any(pattern in hosts for pattern in above)
