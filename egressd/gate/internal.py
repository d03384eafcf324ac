"""egressd.internal: what egressd tells a sandbox about itself, and about nobody else. Pure: request → page or refusal.

The name leads to an address of its own inside the sandbox. What answers there knows one sandbox: who it is, what its rules
allow, what it was refused lately, and the certificate that its clients must trust. Nothing asked here ever leaves: no name
is resolved, no connection opened. Left out on purpose: everything of other sandboxes and of the host, upstream addresses,
credentials down to their names, and what operators wrote for each other (owner, approvers, tickets, `because`).
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Final

from egressd.gate import access
from egressd.gate.pages import Asked as Asked  # as for what stands below
from egressd.gate.pages import Facts, Plea
from egressd.gate.pages import Page as Page
from egressd.gate.pages import Unanswered as Unanswered
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.internal import ACCESS as ACCESS
from egressd.policy.internal import NAME as NAME  # the gate asks this module for its name and its judgement
from egressd.policy.internal import judge as judge
from egressd.policy.internal import unanswered
from egressd.policy.reasons import WORDS, Reason

if TYPE_CHECKING:  # the sandbox knows its names, and these know this one: at run time only values come in
    from egressd.gate.sandbox import Sandbox

ADDRESS: Final = IPv4Address("198.18.0.3")
"""Where the name leads; no rule can name either (both are floor), so that this module alone judges them."""

MOST_ENTRIES = 400
MOST_HOSTS = 40
MOST_REQUESTS = 60
"""What is shown of a long policy; how much is left out is said."""


def answer(asked: Asked, sandbox: Sandbox, certificate: bytes, now: float) -> Page | Plea | Unanswered:
    """Return the page for a request of this very sandbox, what it pleads for, or why there is nothing; total.

    `certificate` is the public certificate of the authority, PEM; `now` is Unix seconds, by which rules expire.
    """
    here = "See http://egressd.internal/ for what is here."
    reason = unanswered(asked.method, asked.target, body=asked.body, upgrade=asked.upgrade)
    if reason is Reason.METHOD_NOT_ALLOWED:
        allowed = "GET, HEAD, POST" if asked.target.partition("?")[0] == ACCESS else "GET, HEAD"
        return Unanswered(reason, 405, f"Only {allowed.replace(', ', ' and ')} are answered here.", allowed)
    if reason is Reason.BODY_NOT_ALLOWED or reason is Reason.UPGRADE_NOT_ALLOWED:
        what = "Ask with a plain GET." if asked.method != "POST" else f"Send no body: {access.HOW_TO_ASK}"
        return Unanswered(reason, 400, what)
    path = asked.target.partition("?")[0]
    if path == "/ca.crt" and certificate:
        return Page("application/x-pem-file", certificate)
    if asked.method == "POST":
        return access.plea_of(asked.target)
    view = _VIEWS.get(path)
    if view is None:
        return Unanswered(Reason.PATH_NOT_ALLOWED, 404, here)
    facts, tell = view
    content = facts(sandbox, now)
    if asked.json:
        return Page("application/json", json.dumps(content, ensure_ascii=True, indent=1).encode() + b"\n")
    lines = "".join(f"{line}\n" for line in tell(content))
    return Page("text/plain; charset=utf-8", lines.encode("ascii", "backslashreplace"))


# /

_INDEX: Final[Facts] = {
    "what": "egressd is the only way out of this sandbox. It judges every DNS query, connection and HTTP request by this"
    " sandbox's rules, refuses at once what they do not allow, and writes every attempt down. This page is egressd"
    " itself; nothing asked here leaves the sandbox.",
    "pages": {
        "/whoami": "which sandbox this is",
        "/policy": "what can be reached from here",
        "/denials": "what was refused lately, why, and what to do about it",
        "/access": "how requests for access stand, and how to make one",
        "/ca.crt": "the certificate that clients in here must trust (PEM)",
    },
    "reading_a_denial": [
        "HTTP: a status of 400 or above with the fields x-egressd-reason and x-egressd-attempt, and a body that begins"
        " with 'egressd:'. A site's own answer never has these fields.",
        "DNS: the name leads to egressd, which answers http and https with the denial; or it does not exist (NXDOMAIN).",
        "Anything else: a TLS alert, a reset, or 'administratively prohibited'. The reason is then in /denials.",
        "The reason is one word of a fixed list, such as not_allowed or path_not_allowed.",
    ],
    "what_to_do": [
        "Look at /denials for the reason and its hint, and at /policy for what is allowed instead.",
        "Where the hint says to correct the request, correct it.",
        "Where no rule allows it, or it needs an approval, ask for it at /access: the request, and what it is for.",
        "Do not repeat a refused request unchanged, and do not look for another way out: there is none.",
    ],
}


def _index(_sandbox: Sandbox, _now: float) -> Facts:
    return _INDEX


def _tell_index(facts: Facts) -> Iterable[str]:
    yield from (facts["what"], "", "Pages (JSON for those who ask with Accept: application/json):")
    yield from (f"  http://egressd.internal{path:9}  {text}" for path, text in facts["pages"].items())
    yield from ("", "How a denial looks:", *(f"  * {line}" for line in facts["reading_a_denial"]))
    yield from ("", "What to do about one:", *(f"  * {line}" for line in facts["what_to_do"]))


# /whoami


def _whoami(sandbox: Sandbox, _now: float) -> Facts:
    return {
        "sandbox": sandbox.id,
        "profile": sandbox.policy.profile,
        "policy": sandbox.policy.digest,
        "labels": dict(sandbox.labels),
    }


def _tell_whoami(facts: Facts) -> Iterable[str]:
    yield from (f"{name}: {facts[name]}" for name in ("sandbox", "profile", "policy"))
    # quoted: a label is whatever the operator wrote, line breaks included
    yield from (f"label {json.dumps(key)}: {json.dumps(value)}" for key, value in facts["labels"].items())


# /denials


def _denials(sandbox: Sandbox, _now: float) -> Facts:
    told = []
    for denial in sandbox.denials.latest():
        words = WORDS[denial.reason]
        facts = {
            "time": denial.time,
            "layer": denial.layer,
            "what": denial.what,
            "count": denial.count,
            "reason": denial.reason.value,
            "says": words.says,
            "hint": words.hint,
            "rule": denial.rule,
            "place": denial.place,
            "attempt": denial.attempt_id,
        }
        told.append({key: value for key, value in facts.items() if value not in (None, "")})
    return {"sandbox": sandbox.id, "denials": told}


def _tell_denials(facts: Facts) -> Iterable[str]:
    if not facts["denials"]:
        yield "Nothing was refused lately."
        return
    yield "What this sandbox was refused, the latest first:"
    for denial in facts["denials"]:
        times = f" ({denial['count']} times)" if denial["count"] > 1 else ""
        yield from ("", f"{denial['time']} {denial['what']}{times}")
        yield f"  reason: {denial['reason']}: {denial['says']}"
        if "hint" in denial:
            yield f"  hint: {denial['hint']}"
        if "rule" in denial:
            yield f"  rule: {denial['rule']} ({denial.get('place', '')})"
        yield f"  attempt: {denial['attempt']}"


# /policy


def _policy(sandbox: Sandbox, now: float) -> Facts:
    policy: EffectivePolicy = sandbox.policy.effective
    today = dt.datetime.fromtimestamp(now, dt.UTC).date()
    live = [entry for entry in policy.entries if _is_live(entry, today)]
    live.sort(key=lambda entry: _EFFECTS.index(entry.effect))
    facts: Facts = {
        "profile": policy.profile,
        "policy": sandbox.policy.digest,
        "otherwise": "allow" if sandbox.policy.observes(now) else "deny",
        "limits": _limits(policy.limits),
        "entries": [_entry(entry) for entry in live[:MOST_ENTRIES]],
        "entries_left_out": max(0, len(live) - MOST_ENTRIES),
    }
    return {key: value for key, value in facts.items() if value not in ([], 0)}


def _is_live(entry: EffectiveEntry, today: dt.date) -> bool:
    """Whether the entry changes what passes today: a denial that only observes does not, an allow only while it does."""
    if entry.expires is not None and entry.expires < today:
        return False
    observes = entry.mode == "observe" and entry.observe_until is not None and entry.observe_until >= today
    return observes is (entry.effect != "deny") if entry.mode == "observe" else True


_EFFECTS: Final = ("allow", "ask", "deny")


def _entry(entry: EffectiveEntry) -> Facts:
    # Beside hosts, `addresses` confine where these may resolve: the network's business, not the sandbox's.
    hosts = entry.hosts or (("any public web site",) if entry.public_web else entry.addresses)
    requests: Sequence[str] = entry.requests
    # A deny that has no more than an entry's defaults covers its hosts whole (policy.compile).
    whole = entry.effect == "deny" and (entry.schemes, entry.ports) == (("https",), (443,))
    if not requests and entry.treatment == "inspect" and entry.effect != "deny":
        requests = ("GET,HEAD /**",)
    facts: Facts = {
        "effect": entry.effect,
        "hosts": list(hosts[:MOST_HOSTS]),
        "hosts_left_out": max(0, len(hosts) - MOST_HOSTS),
        "schemes": ["tcp"]
        if entry.treatment == "relay"
        else []
        if entry.effect == "deny"
        else list(entry.schemes),
        "ports": list(entry.ports) if not whole else [],
        "treatment": entry.treatment if entry.effect != "deny" else None,
        "requests": list(requests[:MOST_REQUESTS]),
        "requests_left_out": max(0, len(requests) - MOST_REQUESTS),
        "limits": _limits(entry.limits),
        "expires": entry.expires.isoformat() if entry.expires is not None else None,
        "rule": entry.id,
        "place": entry.place,
    }
    return {key: value for key, value in facts.items() if value not in (None, [], 0)}


_UNITS: Final = {1: "second", 60: "minute", 3600: "hour", 86400: "day"}


def _limits(limits: EntryLimits) -> list[str]:
    rates = (
        ("requests", limits.requests),
        ("new hosts", limits.new_hosts),
        ("names looked up", limits.names),
        ("new connections", limits.new_connections),
    )
    told = [f"{rate.amount} {what} a {_unit(rate)}" for what, rate in rates if rate is not None]
    volumes = (
        ("up", limits.upload),
        ("down", limits.download),
        ("up to each host", limits.upload_per_host),
        ("down from each host", limits.download_per_host),
    )
    told += [f"{rate.amount} bytes {way} a {_unit(rate)}" for way, rate in volumes if rate is not None]
    if limits.connections is not None:
        told.append(f"{limits.connections} connections at a time")
    return told


def _unit(rate: Rate) -> str:
    return _UNITS.get(rate.seconds, f"{rate.seconds} seconds")


_TREATMENTS: Final = {
    "inspect": "every request is judged",
    "tunnel": "TLS that is not opened",
    "relay": "bytes that are not read",
}
_VERBS: Final = {"allow": "ALLOWED", "ask": "NEEDS A PERSON'S APPROVAL", "deny": "DENIED"}


def _tell_policy(facts: Facts) -> Iterable[str]:
    yield f"What can be reached from this sandbox (profile {facts['profile']}, policy {facts['policy']})."
    yield "A denial wins over everything; then the most specific entry wins."
    if facts["otherwise"] == "allow":
        yield "What is not listed is let through and noted: the profile only observes."
    else:
        yield "What is not listed is denied."
    yield "In a path, * stands for characters within a segment, ** for any number of segments."
    yield from (f"limit: {limit}" for limit in facts.get("limits", ()))
    for entry in facts.get("entries", ()):
        yield from ("", *_tell_entry(entry))
    if "entries_left_out" in facts:
        yield from ("", f"... and {facts['entries_left_out']} more entries")


def _tell_entry(entry: Facts) -> Iterable[str]:
    more = f" and {entry['hosts_left_out']} more" if "hosts_left_out" in entry else ""
    yield f"{_VERBS[entry['effect']]}: {', '.join(entry['hosts'])}{more}"
    if entry["effect"] != "deny":
        ports = ", ".join(map(str, entry["ports"]))
        yield f"  {' and '.join(entry['schemes'])} on port {ports}; {_TREATMENTS[entry['treatment']]}"
    elif "ports" in entry:
        yield f"  on port {', '.join(map(str, entry['ports']))}"
    yield from (f"  {request}" for request in entry.get("requests", ()))
    if "requests_left_out" in entry:
        yield f"  ... and {entry['requests_left_out']} more"
    yield from (f"  limit: {limit}" for limit in entry.get("limits", ()))
    if "expires" in entry:
        yield f"  until the end of {entry['expires']} (UTC)"
    yield f"  rule: {entry['rule']} ({entry['place']})"


_VIEWS: Final[dict[str, tuple[Callable[[Sandbox, float], Facts], Callable[[Facts], Iterable[str]]]]] = {
    "/": (_index, _tell_index),
    "/whoami": (_whoami, _tell_whoami),
    "/denials": (_denials, _tell_denials),
    "/access": (access.facts, access.tell),
    "/policy": (_policy, _tell_policy),
}
