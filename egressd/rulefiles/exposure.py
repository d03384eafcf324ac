"""Which rule would decide in place of one that is taken away: the law of precedence, read backwards.

Careful, never lax: a rule that might decide counts as one that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_network

from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import HostPattern
from egressd.rulefiles.narrowing import lanes, network_within, request_patterns
from egressd.rulefiles.overlaps import HostIndex, covers, patterns, patterns_meet


def exposed(
    gone: Iterable[EffectiveEntry], rest: list[EffectiveEntry], order: Mapping[int, int]
) -> EffectiveEntry | None:
    """Return a rule of `rest` that could permit what one of `gone` has decided so far; None when none could.

    `order` has the place of each entry, by identity, in the file order; one that is not in it stands behind.
    """
    index = HostIndex(rest)
    for old in gone:
        for other in _near(old, index, rest):
            if _may_follow(old, other, order):
                return other
    return None


def overtaken(
    changed: Iterable[EffectiveEntry], rest: list[EffectiveEntry], order: Mapping[int, int]
) -> EffectiveEntry | None:
    """Return a rule of `rest` that has decided before one of `changed`: narrowed, that may become the more specific one."""
    index = HostIndex(rest)
    for one in changed:
        for other in _near(one, index, rest):
            if _lanes_meet(other, one) and _precedes(other, one, order):
                return other
    return None


def beside(changed: Iterable[EffectiveEntry], rest: list[EffectiveEntry]) -> EffectiveEntry | None:
    """Return a rule of `rest` on a host and port that one of `changed` speaks of too; None when there is none.

    A rule that begins to be inspected begins to decide requests that a more specific one kept from it while it was opaque.
    """
    index = HostIndex(rest)
    for one in changed:
        for other in _near(one, index, rest):
            if _lanes_meet(one, other):
                return other
    return None


def spells_paths(entry: EffectiveEntry) -> bool:
    """Return whether the entry has any path but `/**`, so that ambiguous paths are refused on its hosts."""
    return any(not pattern.path.is_everything for pattern in request_patterns(entry))


def _near(old: EffectiveEntry, index: HostIndex, rest: list[EffectiveEntry]) -> Iterable[EffectiveEntry]:
    if old.public_web:
        return [one for one in rest if one.hosts]
    if not old.hosts:
        return [one for one in rest if not one.hosts and not one.public_web]
    met = {id(one): one for pattern in patterns(old.hosts) for one in index.meeting(pattern)}
    return [*met.values(), *(one for one in rest if one.public_web)]


def _may_follow(old: EffectiveEntry, other: EffectiveEntry, order: Mapping[int, int]) -> bool:
    """Whether `other` may let out what was decided otherwise while `old` was there."""
    spelled = any(not one.path.is_everything for one in request_patterns(old))
    if spelled and (
        other.treatment != "inspect" or any(p.path.is_everything for p in request_patterns(other))
    ):
        return True  # a rule with paths makes ambiguous ones refused on its whole host, on every port
    return _lanes_meet(old, other) and _precedes(old, other, order)


def _precedes(old: EffectiveEntry, other: EffectiveEntry, order: Mapping[int, int]) -> bool:
    """Whether some request that both speak of is decided by `old`, and `other` is not merely the stricter one."""
    same, below = _standing(old, other)
    if old.treatment != "inspect" or other.treatment != "inspect":
        return same or below  # what is not read is decided as a whole, by the most specific
    if other.effect == "ask" and old.effect == "allow":
        return False  # what was allowed is asked for
    for one in request_patterns(old):
        for two in request_patterns(other):
            if not patterns_meet(one, two):
                continue
            if below:
                return True
            rank, against = (one.path.rank, old.effect != "ask"), (two.path.rank, other.effect != "ask")
            earlier = order.get(id(old), len(order)) < order.get(id(other), len(order))
            if same and (rank < against or (rank == against and earlier)):
                return True
    return False


def _standing(old: EffectiveEntry, other: EffectiveEntry) -> tuple[bool, bool]:
    """Return whether they share a level of specificity anywhere, and whether `other` is on a less specific one anywhere."""
    if other.public_web:
        return False, True
    if not old.hosts:
        mine, theirs = map(ip_network, old.addresses), [*map(ip_network, other.addresses)]
        pairs = [(one, two) for one in mine for two in theirs]
        return any(one == two for one, two in pairs), any(
            one != two and network_within(one, two) for one, two in pairs
        )
    same = bool({*old.hosts} & {*other.hosts})
    wild = [pattern for pattern in patterns(other.hosts) if pattern.wildcard]
    return same, any(_lies_below(pattern, wild) for pattern in patterns(old.hosts))


def _lies_below(pattern: HostPattern, wild: list[HostPattern]) -> bool:
    return any(one != pattern and covers(one, pattern) for one in wild)


def _lanes_meet(one: EffectiveEntry, other: EffectiveEntry) -> bool:
    if "relay" in (one.treatment, other.treatment):
        return bool({port for _, port in lanes(one)} & {port for _, port in lanes(other)})
    return bool({*lanes(one)} & {*lanes(other)})
