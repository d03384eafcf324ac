"""What the rules in force lead the probes of `egressd verify` to: a request that they allow, and names just beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, zip_longest

from egressd.policy.attempt import ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import BadHost, HostPattern, format_name, parse_name, parse_pattern
from egressd.verify.scene import Allowed, Edge

MOST_EDGES = 60
"""More rules have more edges; each kind of each rule gets its turn until there are so many."""
_MOST_HOSTS = 200
_FILLER = "verify"
_DEFAULT_REQUESTS = ("GET,HEAD /**",)


def allowed_request(
    policy: CompiledPolicy, now: float, served: Mapping[str, frozenset[int]]
) -> Allowed | None:
    """Return a request that is allowed, inspected, without credential and to an ordinary address, or None.

    An exact name is preferred; below a wildcard a name is made up. `served` are the ports of each scheme that somebody
    will answer on.
    """
    plain = [entry for entry in policy.effective.entries if _is_plain(entry)]
    patterns = [(entry, pattern) for entry in plain for pattern in _patterns(entry)][:_MOST_HOSTS]
    for entry, pattern in sorted(patterns, key=lambda each: each[1].wildcard):
        name = (_FILLER, *pattern.name) if pattern.wildcard else pattern.name
        for scheme in sorted(entry.schemes, reverse=True):
            for port in sorted(served[scheme] & set(entry.ports)):
                for target in dict.fromkeys(_targets(entry)):
                    decision = decide(policy, RequestAttempt(name, port, scheme, "GET", target), now)
                    connection = decide(policy, ConnectionAttempt(name, port, scheme), now)
                    if decision.allowed and connection.allowed and connection.treatment == "inspect":
                        return Allowed(format_name(name), port, scheme, "GET", target)
    return None


def _is_plain(entry: EffectiveEntry) -> bool:
    opaque = entry.treatment != "inspect" or entry.credential is not None
    return entry.effect == "allow" and not opaque and not entry.addresses


def _patterns(entry: EffectiveEntry) -> Iterator[HostPattern]:
    for host in entry.hosts:
        pattern = parse_pattern(host)
        if not isinstance(pattern, BadHost):
            yield pattern


def _targets(entry: EffectiveEntry) -> Iterator[str]:
    for request in entry.requests or _DEFAULT_REQUESTS:
        methods, _, target = request.partition(" ")
        if {"GET", "ANY"} & set(methods.split(",")):
            path, mark, query = target.partition("?")
            filled = path.replace("/**", f"/{_FILLER}").replace("*", _FILLER)
            fixed = "&".join(piece for piece in query.split("&") if piece != "*")
            yield filled + (f"?{fixed.replace('*', _FILLER)}" if mark and fixed else "")


def wildcard_suffix(policy: CompiledPolicy, now: float) -> str:
    """Return a domain below which any name may be asked for, or ""."""
    for entry in policy.effective.entries:
        if entry.effect == "allow":
            for pattern in _patterns(entry):
                name = (_FILLER, *pattern.name)
                if pattern.wildcard and decide(policy, DnsQuestion(name), now).allowed:
                    return format_name(pattern.name)
    return ""


def is_allowed(policy: CompiledPolicy, text: str, now: float) -> bool:
    """Whether a rule allows some connection to the name. What observe mode lets through no rule allows."""
    name = parse_name(text)
    if isinstance(name, BadHost):
        return False
    decision = decide(policy, DnsQuestion(name), now)
    return decision.allowed and not decision.would_deny


def edges(policy: CompiledPolicy, evil: str, now: float) -> list[Edge]:
    """Return names just beside what the rules allow which they do not allow; at most MOST_EDGES, `evil` a stranger's domain."""
    allowed = [entry for entry in policy.effective.entries if entry.effect == "allow"]
    each_rule = [list(_beside(pattern, evil)) for entry in allowed for pattern in _patterns(entry)]
    turns = chain.from_iterable(zip_longest(*each_rule))
    found: dict[str, Edge] = {}
    for edge in turns:
        if edge is not None and edge.name not in found and _is_edge(policy, edge.name, now):
            found[edge.name] = edge
            if len(found) == MOST_EDGES:
                break
    return list(found.values())


def _beside(pattern: HostPattern, evil: str) -> Iterator[Edge]:
    name = format_name(pattern.name)
    first, *rest = pattern.name
    if pattern.wildcard:
        yield Edge(name, f"the apex of *.{name}")
    else:
        yield Edge(f"{_FILLER}.{name}", f"below {name}")
    yield Edge(".".join((f"{_FILLER}{first}", *rest)), f"ends as {name} does")
    yield Edge(".".join((f"{_FILLER}-{first}", *rest)), f"ends as {name} does, behind a hyphen")
    yield Edge(f"{name}.{evil}", f"begins as {name} does")
    if len(rest) > 1:
        yield Edge(".".join(rest), f"above {name}")


def _is_edge(policy: CompiledPolicy, text: str, now: float) -> bool:
    name = parse_name(text)
    return not isinstance(name, BadHost) and len(name) > 1 and not is_allowed(policy, text, now)
