"""Whether rules allow no more than others do: the organisation's ceiling, and profiles that extend one another.

The answer "no more" is sure; the answer "more" may be too careful, where two patterns cover the same in different words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network

from egressd.policy.attempt import Name
from egressd.policy.bodies import is_within, show
from egressd.policy.compile import DEFAULT_PORTS, looks_registrable
from egressd.policy.effective import EffectiveEntry, EntryLimits, Rate
from egressd.policy.names import HostPattern, format_pattern
from egressd.policy.requests import DEFAULT_REQUESTS, RequestPattern, parse_request_pattern
from egressd.rulefiles.networks import is_public
from egressd.rulefiles.overlaps import patterns, request_covers

type Lane = tuple[str, int]
type Network = IPv4Network | IPv6Network

_OPENNESS = {"inspect": 0, "tunnel": 1, "relay": 2}
"""What is less read may carry more."""

LIMITS = (
    "requests",
    "upload",
    "download",
    "upload_per_host",
    "download_per_host",
    "new_hosts",
    "names",
    "new_connections",
    "connections",
)


class Envelope:
    """Rules that others must lie within, found by host."""

    def __init__(self, entries: Iterable[EffectiveEntry]) -> None:
        self._exact: dict[Name, list[EffectiveEntry]] = defaultdict(list)
        self._wild: dict[Name, list[EffectiveEntry]] = defaultdict(list)
        self._web: list[EffectiveEntry] = []
        self._literal: list[EffectiveEntry] = []
        for entry in entries:
            for pattern in patterns(entry.hosts):
                (self._wild if pattern.wildcard else self._exact)[pattern.name].append(entry)
            if entry.public_web:
                self._web.append(entry)
            elif not entry.hosts:
                self._literal.append(entry)

    def excess(self, entry: EffectiveEntry) -> str | None:
        """Return the first thing that `entry` permits and no rule here does, in words; None when there is none."""
        if entry.public_web:
            return _lacking(entry, self._web, "public_web")
        if not entry.hosts:
            return self._literal_excess(entry)
        seen: dict[tuple[int, ...], str | None] = {}  # a list of hosts mostly meets the same rules
        for pattern in patterns(entry.hosts):
            wide = list(self._around(pattern))
            key = tuple(map(id, wide))
            if key not in seen:
                seen[key] = _lacking(entry, wide, format_pattern(pattern))
            if seen[key] is not None:
                return _lacking(entry, wide, format_pattern(pattern))
        return None

    def _around(self, pattern: HostPattern) -> Iterator[EffectiveEntry]:
        name = pattern.name
        if not pattern.wildcard:
            yield from self._exact.get(name, ())
        for depth in range(0 if pattern.wildcard else 1, len(name)):
            yield from self._wild.get(name[depth:], ())
        if looks_registrable(name):
            yield from self._web

    def _literal_excess(self, entry: EffectiveEntry) -> str | None:
        for text in entry.addresses:
            wide = [one for one in self._literal if _holds_network(one.addresses, text)]
            if (lacking := _lacking(entry, wide, text)) is not None:
                return lacking
        return None


def lanes(entry: EffectiveEntry) -> list[Lane]:
    """Return each scheme and port that an allow or ask covers; of a relay the scheme is `tcp`."""
    if entry.treatment == "relay":
        return [("tcp", port) for port in entry.ports]
    alone = len(entry.schemes) == 1 or entry.treatment == "tunnel"
    own = {port: scheme for scheme, port in DEFAULT_PORTS.items()}
    return [
        (scheme, port)
        for port in entry.ports
        for scheme in entry.schemes
        if alone or own.get(port, scheme) == scheme
    ]


def request_patterns(entry: EffectiveEntry) -> list[RequestPattern]:
    """Return what an allow or ask lets through on an inspected connection; of an opaque one nothing is said."""
    if entry.treatment != "inspect":
        return []
    parsed = map(parse_request_pattern, entry.requests or DEFAULT_REQUESTS)
    return [pattern for pattern in parsed if isinstance(pattern, RequestPattern)]


def is_tighter(one: EntryLimits, other: EntryLimits) -> str | None:
    """Return the name of a limit of `one` that is wider than that of `other`, or missing; None when all hold."""
    for name in LIMITS:
        most, given = getattr(other, name), getattr(one, name)
        if most is not None and (given is None or not _at_most(given, most)):
            return name
    return None


def tightest(one: EntryLimits, other: EntryLimits) -> EntryLimits:
    """Return the limits of `one`, and those of `other` where it has none."""
    chosen = {name: getattr(one, name) or getattr(other, name) for name in LIMITS}
    return EntryLimits.model_validate(chosen)


def _at_most(given: Rate | int, most: Rate | int) -> bool:
    if isinstance(given, Rate) and isinstance(most, Rate):
        # a bucket lets through its amount at once and its rate for good: both must be at most the other's
        return given.amount <= most.amount and given.amount * most.seconds <= most.amount * given.seconds
    return isinstance(given, int) and isinstance(most, int) and given <= most


def _lacking(entry: EffectiveEntry, wide: list[EffectiveEntry], host: str) -> str | None:
    """Return what of `entry` on one host no rule of `wide` carries, in words."""
    fitting = [
        one
        for one in wide
        if _OPENNESS[one.treatment] >= _OPENNESS[entry.treatment] and _addresses_hold(entry, one)
    ]
    if not fitting:
        opaque = f", as a {entry.treatment}" if entry.treatment != "inspect" else ""
        inside = f", in {', '.join(entry.addresses)}" if entry.addresses and entry.hosts else ""
        return f"{host}{opaque}{inside}" if wide else host
    for lane in lanes(entry):
        on_lane = [one for one in fitting if _on_lane(one, lane)]
        if not on_lane:
            return f"{lane[0]} on port {lane[1]} of {host}"
        readable = [one for one in on_lane if one.treatment == "inspect"]
        if len(readable) < len(on_lane):
            continue  # one of them does not look at requests at all
        alike = [one for one in readable if is_within(entry.body, one.body)]
        theirs = [pattern for one in alike for pattern in request_patterns(one)]
        for pattern in request_patterns(entry):
            if not any(request_covers(other, pattern) for other in theirs):
                bodies = f" with `json: {show(entry.body)}`" if entry.body else ""
                return f'"{pattern.text}"{bodies or " with any body" if len(alike) < len(readable) else ""} on {host}'
    return None


def _on_lane(entry: EffectiveEntry, lane: Lane) -> bool:
    if entry.treatment == "relay":
        return lane[1] in entry.ports
    return lane in lanes(entry)


def _addresses_hold(entry: EffectiveEntry, wide: EffectiveEntry) -> bool:
    """Whether the names of `entry` may resolve nowhere that those of `wide` may not."""
    if not entry.hosts:
        return True
    if wide.addresses:
        return bool(entry.addresses) and all(_holds_network(wide.addresses, text) for text in entry.addresses)
    return all(is_public(ip_network(text)) for text in entry.addresses)


def _holds_network(wide: Iterable[str], text: str) -> bool:
    return any(network_within(ip_network(text), ip_network(one)) for one in wide)


def network_within(one: Network, other: Network) -> bool:
    """Return whether every address of `one` is one of `other`."""
    if isinstance(one, IPv4Network):
        return isinstance(other, IPv4Network) and one.subnet_of(other)
    return isinstance(other, IPv6Network) and one.subnet_of(other)
