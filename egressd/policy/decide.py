"""The decision: one pure function from a policy, an attempt and a time to a verdict with its reason and its rule.

The theory, in the order of the code (law 6). A host that is no name, or lies below the floor, is denied whatever the rules say.
Then denials, the organisation's first. Then, of the rules that allow or ask and cover the attempt, the most specific level of the
host decides, in it the most specific path, and of those an ask before an allow, else the first in the file. Else the default: a
deny that tells how near the nearest rule came, or in observe mode an allow that says it would have been a deny. Where this
comes to an ask, or to the default deny, a grant that covers the attempt makes an allow of it, under the terms of the rule that
asks, and where there is none under those of a rule for this request alone, without a credential.

A rule that only observes changes none of that: a denial comes out as if it were enforced. Only then is the attempt judged again
without the denials that observe, and what is then denied by default once more, by the allows that observe. What passes so is
noted as what would be denied, with the reason for which it would.

A connection comes before its requests and is judged without them. Where the most specific rule is a tunnel or a relay nobody will
see requests, so the connection's decision is final, also for a request that asks. Where it is inspected, the connection is
allowed if any rule could allow a request on it, and each request is judged on its own, by inspected rules only.

The functions are total: every value of the attempt types has a decision, and none raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from egressd.policy.addresses import Network, classify, is_floor_name
from egressd.policy.attempt import (
    Address,
    Attempt,
    ConnectionAttempt,
    Decision,
    DnsQuestion,
    Name,
    RequestAttempt,
)
from egressd.policy.compile import CompiledPolicy, Level, Rule, networks_of
from egressd.policy.effective import EffectiveEntry
from egressd.policy.grants import Held, find
from egressd.policy.matching import (
    NEAREST,
    broken_law,
    deny_miss,
    lane_miss,
    nearest,
    rank,
    request_miss,
    spells,
)
from egressd.policy.names import is_name
from egressd.policy.paths import Target
from egressd.policy.reasons import Reason

_BY_DEFAULT = frozenset({Reason.NOT_ALLOWED, Reason.IP_LITERAL, *NEAREST})
"""What the default deny says; where no rule is named beside it."""


def decide(policy: CompiledPolicy, attempt: Attempt, now: float) -> Decision:
    """Return the decision on `attempt` at `now` (Unix seconds)."""
    host = _host_of(attempt)
    floor = _floor_of(host)
    if floor is not None:
        return Decision("deny", floor)
    bench = _bench(policy, host, now)
    found = _judged(bench, attempt)
    return _observed(bench, attempt, found) if policy.has_observers and found.verdict == "deny" else found


def permit_address(
    policy: CompiledPolicy,
    decision: Decision,
    address: Address,
    *,
    port: int | None = None,
    now: float | None = None,
) -> Reason | None:
    """Return why `address` may not be dialled for an attempt so decided, or None when it may.

    The floor comes first; then denials of networks, of `port` and in force at `now` where these are given and all of them
    otherwise; then the addresses of the deciding entry, within which a special address may be dialled and beyond which nothing
    may; without them, public addresses alone.
    """
    if not decision.allowed:
        return decision.reason
    found = classify(address)
    if found.kind == "floor":
        return found.reason
    for rule in _denials(policy.levels_of_address(address)):
        in_force = not rule.patterns and (now is None or rule.is_live(now))
        if in_force and (port is None or rule.ports is None or port in rule.ports):
            return _refusal(rule).reason
    if decision.entry is not None and decision.entry.addresses:
        inside = any(
            address.version == net.version and address in net for net in _confines(decision.entry.addresses)
        )
        return None if inside else Reason.ADDRESS_OUTSIDE_RULE
    return found.reason


@dataclass(frozen=True, slots=True)
class Trial:
    """What one rule that speaks of the attempt's host says of the attempt; `why` is set where it misses."""

    entry: EffectiveEntry
    outcome: Literal["covers", "misses", "expired"]
    why: Reason | None = None


def trials(policy: CompiledPolicy, attempt: Attempt, now: float) -> tuple[Trial, ...]:
    """Return what each rule on the attempt's host says of it, the most specific first: for explanations.

    Several may cover it; which one decided, and whether the floor did, `decide` tells.
    """
    host = _host_of(attempt)
    if _floor_of(host) is Reason.BAD_HOST:
        return ()
    return tuple(_trial(rule, attempt, now) for level in _levels(policy, host) for rule in level)


@dataclass(frozen=True, slots=True)
class _Bench:
    """The rules in force that speak of one host: denials, the organisation's first, and by level those that allow or ask."""

    literal: bool
    denials: tuple[Rule, ...]
    levels: tuple[Level, ...]
    observes: bool
    grants: tuple[Held, ...] = ()
    now: float = 0.0
    observing: tuple[Level, ...] = ()

    @property
    def looks_at_paths(self) -> bool:
        return any(rule.looks_at_paths for rule in self.denials) or any(
            rule.looks_at_paths for level in self.levels for rule in level
        )

    def grant_for(self, scheme: str, port: int, *, opaque: bool) -> Held | None:
        """A grant that could let something through on this scheme and port."""
        for held in self.grants:
            unread = held.grant.scope == "connection"
            if held.lane == (scheme, port) and unread is opaque and held.lives(self.now):
                return held
        return None

    def grant_of(self, attempt: RequestAttempt, target: Target) -> Held | None:
        """The grant that lets a request through: the one that it holds, else one for many before one for a single request."""
        found = [
            held
            for held in self.grants
            if held.lives(self.now, attempt.redeemed) and held.covers(attempt, target)
        ]
        return min(found, key=lambda held: (held.grant.id != attempt.redeemed, held.grant.once), default=None)


def _bench(policy: CompiledPolicy, host: Name | Address, now: float) -> _Bench:
    live = [tuple(rule for rule in level if rule.is_live(now)) for level in _levels(policy, host)]
    levels = tuple(tuple(rule for rule in level if not rule.is_deny) for level in live)
    observing: tuple[Level, ...] = ()
    if policy.has_observers:
        observing = tuple(tuple(rule for rule in level if rule.is_trial) for level in levels)
        levels = tuple(tuple(rule for rule in level if not rule.is_trial) for level in levels)
    # A bare address is a name error, not a default deny: observing does not let it through.
    literal = not isinstance(host, tuple)
    grants = find(policy.grants, host) if isinstance(host, tuple) else ()
    return _Bench(
        literal, _denials(live), levels, not literal and policy.observes(now), grants, now, observing
    )


def _judged(bench: _Bench, attempt: Attempt) -> Decision:
    if isinstance(attempt, DnsQuestion):
        return _question(bench)
    if isinstance(attempt, ConnectionAttempt):
        return _connection(bench, attempt.scheme, attempt.port)
    return _request(bench, attempt)


def _observed(bench: _Bench, attempt: Attempt, enforced: Decision) -> Decision:
    """What becomes of a denial where rules only observe: an allow that is noted as what would be denied, or a denial still."""
    found = enforced
    binding = replace(bench, denials=tuple(rule for rule in bench.denials if not rule.observes(bench.now)))
    if len(binding.denials) < len(bench.denials):
        found = _judged(binding, attempt)
    by_default = found.entry is None and found.reason in _BY_DEFAULT
    if found.verdict == "deny" and (by_default or isinstance(attempt, DnsQuestion)) and any(bench.observing):
        tried = _judged(_on_trial(binding, attempt), attempt)
        if tried.allowed:
            found = replace(tried, reason=Reason.OBSERVED)
    if found.verdict == "deny":
        return found
    return replace(found, would_deny=True, would_reason=enforced.reason, would_entry=enforced.entry)


def _on_trial(bench: _Bench, attempt: Attempt) -> _Bench:
    """The allows that observe in the place of the others; a connection that an enforced rule has read stays read."""
    levels = bench.observing
    if isinstance(attempt, RequestAttempt) and _carrier(bench, attempt.scheme, attempt.port) is not None:
        levels = tuple(tuple(rule for rule in level if not rule.is_opaque) for level in levels)
    return replace(bench, levels=levels, observes=False, grants=())


def _levels(policy: CompiledPolicy, host: Name | Address) -> list[Level]:
    return policy.levels_of_name(host) if isinstance(host, tuple) else policy.levels_of_address(host)


def _denials(levels: Iterable[Level]) -> tuple[Rule, ...]:
    """Return the denials; `order` puts the organisation's first, since they are compiled first."""
    return tuple(
        sorted((rule for level in levels for rule in level if rule.is_deny), key=lambda rule: rule.order)
    )


def _host_of(attempt: Attempt) -> Name | Address:
    return attempt.name if isinstance(attempt, DnsQuestion) else attempt.host


def _floor_of(host: Name | Address) -> Reason | None:
    if isinstance(host, tuple):
        return is_floor_name(host) if is_name(host) else Reason.BAD_HOST
    found = classify(host)
    return found.reason if found.kind == "floor" else None


def _question(bench: _Bench) -> Decision:
    """A name may be looked up if some connection to it could be allowed, or could be asked for."""
    best: Decision | None = None
    lanes = {lane: None for level in bench.levels for rule in level for lane in rule.lanes()}
    for scheme, port in lanes | {held.lane: None for held in bench.grants}:
        decision = _connection(bench, scheme, port)
        if decision.allowed:
            return decision
        if best is None or decision.verdict == "ask":
            best = decision
    if best is not None and (best.verdict == "ask" or not bench.observes):
        return best
    for rule in bench.denials:
        if rule.denies_everything:
            return _refusal(rule)
    found = _default(bench, Reason.NOT_ALLOWED)
    if best is None or not found.would_deny:
        return found
    return replace(found, would_reason=best.reason, would_entry=best.entry)


def _connection(bench: _Bench, scheme: str, port: int) -> Decision:
    denied = _denied(bench, scheme, port)
    if denied is not None:
        return denied
    winner = _carrier(bench, scheme, port)
    if winner is None:
        found = _default(
            bench,
            nearest(lane_miss(rule, scheme, port) for level in bench.levels for rule in level),
            scheme,
        )
        return _unless_granted(
            found, bench.grant_for(scheme, port, opaque=False) if scheme != "tcp" else None
        )
    if winner.is_opaque:
        return _opaque(bench, winner, scheme, port)
    readers = [
        rule for level in bench.levels for rule in level if not rule.is_opaque and rule.covers(scheme, port)
    ]
    found = _approval(next((rule for rule in readers if rule.entry.effect == "allow"), readers[0]))
    return _unless_granted(found, bench.grant_for(scheme, port, opaque=False))


def _request(bench: _Bench, attempt: RequestAttempt) -> Decision:
    scheme, port = attempt.scheme, attempt.port
    denied = _denied(bench, scheme, port)
    if denied is not None:
        return denied
    carrier = _carrier(bench, scheme, port)
    target = Target(attempt.target)
    readable = target.is_origin_form and (target.is_canonical or not bench.looks_at_paths)
    if readable:
        for rule in bench.denials:
            if rule.covers(scheme, port) and any(
                pattern.denies(attempt.method, attempt.upgrade, target) for pattern in rule.patterns
            ):
                return _refusal(rule)
    elif carrier is not None or bench.observes:
        return Decision("deny", Reason.PATH_AMBIGUOUS)
    if carrier is not None and carrier.is_opaque:
        decision, broken = _opaque(bench, carrier, scheme, port), broken_law(attempt, carrier)
        return decision if broken is None else Decision("deny", broken, decision.entry)
    winner = _winner(bench, attempt, target) if readable else None
    broken = broken_law(attempt, winner)
    if broken is None and attempt.doh and not spells(winner, attempt, target):
        broken = Reason.DOH
    if winner is None:
        misses = (request_miss(rule, attempt, target) for level in bench.levels for rule in level)
        found = _default(bench, nearest(misses), broken=broken)
        return _unless_granted(found, bench.grant_of(attempt, target) if broken is None else None)
    if broken is not None:
        return Decision("deny", broken, winner.entry)
    return _unless_granted(_approval(winner), bench.grant_of(attempt, target))


def _denied(bench: _Bench, scheme: str, port: int) -> Decision | None:
    """The denial of everything on this scheme and port, if there is one."""
    for rule in bench.denials:
        if not rule.patterns and rule.covers(scheme, port):
            return _refusal(rule)
    return None


def _carrier(bench: _Bench, scheme: str, port: int) -> Rule | None:
    """The rule whose treatment a connection gets: of the most specific level that covers it, the first."""
    for level in bench.levels:
        for rule in level:
            if rule.covers(scheme, port):
                return rule
    return None


def _opaque(bench: _Bench, winner: Rule, scheme: str, port: int) -> Decision:
    """A connection that will not be read: a deny or an ask that needs reading denies or asks as a whole."""
    for rule in bench.denials:
        if rule.covers(scheme, port):
            return _refusal(rule)
    level = next(level for level in bench.levels if winner in level)
    asking = (rule for rule in level if rule.entry.effect == "ask" and rule.covers(scheme, port))
    return _unless_granted(_approval(next(asking, winner)), bench.grant_for(scheme, port, opaque=True))


def _winner(bench: _Bench, attempt: RequestAttempt, target: Target) -> Rule | None:
    for level in bench.levels:
        best: tuple[int, bool, int] | None = None
        winner: Rule | None = None
        for rule in level:
            place = rank(rule, attempt, target)
            if place is None:
                continue
            standing = (place, rule.entry.effect != "ask", rule.order)
            if best is None or standing < best:
                best, winner = standing, rule
        if winner is not None:
            return winner
    return None


def _default(
    bench: _Bench, reason: Reason, scheme: str = "https", *, broken: Reason | None = None
) -> Decision:
    """What holds when no rule covers the attempt. Only https and http are observed: an unread relay always needs a rule."""
    if bench.literal and reason is Reason.NOT_ALLOWED:
        return Decision("deny", Reason.IP_LITERAL)
    if not bench.observes or scheme == "tcp":
        return Decision("deny", reason)
    return (
        Decision("deny", broken)
        if broken is not None
        else Decision("allow", Reason.OBSERVED, would_deny=True, would_reason=reason)
    )


def _approval(rule: Rule) -> Decision:
    if rule.entry.effect == "ask":
        return Decision("ask", Reason.APPROVAL_REQUIRED, rule.entry, rule.entry.treatment)
    return Decision("allow", Reason.RULE, rule.entry, rule.entry.treatment)


def _unless_granted(found: Decision, held: Held | None) -> Decision:
    """What a decision becomes where a grant covers the attempt. Only an ask and the default deny are ever handed in here."""
    if held is None or found.allowed:
        return found
    grant = held.grant
    if found.verdict == "ask" and found.entry is not None:
        return Decision("allow", Reason.GRANT, found.entry, found.treatment, grant=grant.id, once=grant.once)
    if found.entry is not None or held.grant.scope == "connection":
        return found
    return Decision("allow", Reason.GRANT, held.entry, grant=grant.id, once=grant.once)


def _refusal(rule: Rule) -> Decision:
    organisation = rule.entry.origin == "organisation"
    return Decision(
        "deny", Reason.DENIED_BY_ORGANISATION if organisation else Reason.DENIED_BY_RULE, rule.entry
    )


def _trial(rule: Rule, attempt: Attempt, now: float) -> Trial:
    if not rule.is_live(now):
        return Trial(rule.entry, "expired")
    why: Reason | None = None
    if isinstance(attempt, ConnectionAttempt):
        why = lane_miss(rule, attempt.scheme, attempt.port)
    elif isinstance(attempt, RequestAttempt):
        why = (
            deny_miss(rule, attempt) if rule.is_deny else request_miss(rule, attempt, Target(attempt.target))
        )
    return Trial(rule.entry, "covers" if why is None else "misses", why)


@lru_cache(maxsize=1024)
def _confines(addresses: tuple[str, ...]) -> tuple[Network, ...]:
    """The networks of an entry, parsed once; of an entry that `compile_policy` never saw, nothing lies inside."""
    try:
        return networks_of(addresses)
    except ValueError:
        return ()
