"""One rule against one attempt: whether it covers it, how specifically, and how near it comes. Pure and total."""

from __future__ import annotations

from collections.abc import Iterable

from egressd.policy.attempt import RequestAttempt
from egressd.policy.compile import DEFAULT_PORTS, Rule
from egressd.policy.paths import Target
from egressd.policy.reasons import Reason
from egressd.policy.requests import is_carried

MAX_TARGET = 8 * 1024
MAX_WEB_TARGET = 2 * 1024

NEAREST = (
    Reason.QUERY_NOT_ALLOWED,
    Reason.METHOD_NOT_ALLOWED,
    Reason.UPGRADE_NOT_ALLOWED,
    Reason.PATH_NOT_ALLOWED,
    Reason.SCHEME_NOT_ALLOWED,
    Reason.PORT_NOT_ALLOWED,
)
"""How near a rule came that did not cover the attempt: the nearest miss is what the client is told."""


def rank(rule: Rule, attempt: RequestAttempt, target: Target) -> int | None:
    """Return the specificity of the rule's most specific pattern that covers the request, None when none does."""
    if rule.is_opaque or not rule.covers(attempt.scheme, attempt.port):
        return None
    covering = [
        pattern.path.rank
        for pattern in rule.patterns
        if pattern.refuses(attempt.method, attempt.upgrade, target) is None
    ]
    return min(covering, default=None)


def spells(winner: Rule | None, attempt: RequestAttempt, target: Target) -> bool:
    """Say whether a pattern of the rule that covers the request spells its whole path: its writer meant just this."""
    return winner is not None and any(
        pattern.path.rank == 0 and pattern.refuses(attempt.method, attempt.upgrade, target) is None
        for pattern in winner.patterns
    )


def broken_law(attempt: RequestAttempt, winner: Rule | None) -> Reason | None:
    """Return what no rule can allow about a request, also in observe mode."""
    if not is_carried(attempt.method):
        return Reason.METHOD_NOT_ALLOWED
    if attempt.upgrade not in (None, "websocket"):
        return Reason.UPGRADE_NOT_ALLOWED
    if attempt.method in ("GET", "HEAD"):
        if attempt.body:
            return Reason.BODY_NOT_ALLOWED
        most = MAX_WEB_TARGET if winner is not None and winner.entry.public_web else MAX_TARGET
        if len(attempt.target.encode("utf-8", "surrogatepass")) > most:
            return Reason.TARGET_TOO_LONG
    return None


def request_miss(rule: Rule, attempt: RequestAttempt, target: Target) -> Reason | None:
    """Return why a rule that permits does not cover the request, None when it does."""
    if not rule.covers(attempt.scheme, attempt.port):
        return lane_miss(rule, attempt.scheme, attempt.port)
    if rule.is_opaque:
        return None
    misses = [pattern.refuses(attempt.method, attempt.upgrade, target) for pattern in rule.patterns]
    return None if None in misses else nearest(misses)


def lane_miss(rule: Rule, scheme: str, port: int) -> Reason | None:
    """Return why the rule does not speak of this scheme and port, None when it does."""
    if rule.covers(scheme, port):
        return None
    if rule.ports is not None and port in rule.ports:
        return Reason.SCHEME_NOT_ALLOWED
    usual = DEFAULT_PORTS.get(scheme) == port and scheme not in rule.schemes
    return Reason.SCHEME_NOT_ALLOWED if usual else Reason.PORT_NOT_ALLOWED


def deny_miss(rule: Rule, attempt: RequestAttempt) -> Reason | None:
    """Return why a denial does not cover the request, None when it does."""
    lane = lane_miss(rule, attempt.scheme, attempt.port)
    if lane is not None or not rule.patterns:
        return lane
    target = Target(attempt.target)
    denies = any(pattern.denies(attempt.method, attempt.upgrade, target) for pattern in rule.patterns)
    return None if denies else Reason.PATH_NOT_ALLOWED


def nearest(misses: Iterable[Reason | None]) -> Reason:
    """Return the miss that came nearest, `not_allowed` where no rule came near at all."""
    seen = set(misses)
    return next((reason for reason in NEAREST if reason in seen), Reason.NOT_ALLOWED)
