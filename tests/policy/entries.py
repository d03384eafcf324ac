"""How these tests write entries and policies: the fields that matter, the rest as a rule file would fill it in."""

from __future__ import annotations

import datetime as dt
from itertools import count
from typing import Any

from egressd.policy.attempt import ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.effective import Effect, EffectiveEntry, EffectivePolicy
from egressd.policy.names import BadHost, parse_authority, parse_name

_LINES = count(1)

NOON = dt.datetime(2027, 3, 31, 12, tzinfo=dt.UTC).timestamp()


def entry(effect: Effect, *hosts: str, **fields: Any) -> EffectiveEntry:
    """An entry on `hosts` (or on what `fields` says), its id given by `id` or made up."""
    line = next(_LINES)
    return EffectiveEntry(
        **{"id": f"r{line}", "place": f"p.yaml:{line}", "effect": effect, "hosts": hosts, **fields}
    )


def allow(*hosts: str, **fields: Any) -> EffectiveEntry:
    return entry("allow", *hosts, **fields)


def deny(*hosts: str, **fields: Any) -> EffectiveEntry:
    """A deny of the whole host, as a file means it that names no scheme and no port."""
    return entry("deny", *hosts, **{"schemes": ("https", "http"), "ports": (), **fields})


def ask(*hosts: str, **fields: Any) -> EffectiveEntry:
    return entry("ask", *hosts, **fields)


def policy(*entries: EffectiveEntry, observe_until: dt.date | None = None) -> CompiledPolicy:
    mode = "enforce" if observe_until is None else "observe"
    return compile_policy(
        EffectivePolicy.model_validate(
            {"profile": "agent", "entries": entries, "mode": mode, "observe_until": observe_until}
        )
    )


def request(
    line: str, *, body: bool = False, upgrade: str | None = None, doh: bool = False
) -> RequestAttempt:
    """`GET https://host[:port]/path`, the target exactly as written behind the authority."""
    method, _, url = line.partition(" ")
    scheme, _, rest = url.partition("://")
    text, slash, path = rest.partition("/")
    found = parse_authority(text, 443 if scheme == "https" else 80)
    assert not isinstance(found, BadHost), found
    assert scheme in ("https", "http")
    return RequestAttempt(
        found.host,
        found.port,
        "https" if scheme == "https" else "http",
        method,
        slash + path,
        upgrade=upgrade,
        body=body,
        doh=doh,
    )


def connection(url: str) -> ConnectionAttempt:
    """`https://host[:port]`, `http://…` or `tcp://host:port`."""
    scheme, _, text = url.partition("://")
    found = parse_authority(text, {"https": 443, "http": 80}.get(scheme))
    assert not isinstance(found, BadHost), found
    return ConnectionAttempt(
        found.host, found.port, "tcp" if scheme == "tcp" else "https" if scheme == "https" else "http"
    )


def question(name: str) -> DnsQuestion:
    found = parse_name(name)
    assert isinstance(found, tuple), found
    return DnsQuestion(found)
