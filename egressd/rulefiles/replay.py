"""Recorded attempts judged by rules again: what would come out, and how sure that is.

Everything here works on one record at a time, so that a journal of any length takes the same memory; what is counted is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from egressd.policy.attempt import Attempt, Decision, RequestAttempt
from egressd.policy.compile import CompiledPolicy
from egressd.rulefiles.claims import judge
from egressd.rulefiles.recorded import Recorded, readings
from egressd.rulefiles.requestline import Asked

MOST_REMEMBERED = 20_000
"""Decisions that a judge keeps: most traffic asks for the same few things."""


def query_pairs(policy: CompiledPolicy, attempt: Attempt) -> list[str]:
    """Return every `key=value` that a rule on the attempt's host names."""
    if not isinstance(attempt, RequestAttempt):
        return []
    host = attempt.host
    levels = policy.levels_of_name(host) if isinstance(host, tuple) else policy.levels_of_address(host)
    found = (
        pair
        for level in levels
        for rule in level
        for pattern in rule.patterns
        if pattern.query is not None
        for pair in pattern.query.pairs
    )
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class Judge:
    """Judges recorded attempts by one policy at one time, and remembers."""

    policy: CompiledPolicy
    now: float
    known: OrderedDict[tuple[object, ...], Decision] = field(default_factory=OrderedDict)

    def decision(self, attempt: Attempt, dns_type: str = "A") -> Decision:
        """Return the decision on an attempt; total."""
        key = (attempt, dns_type)
        found = self.known.get(key)
        if found is None:
            found = judge(self.policy, Asked("", attempt, dns_type), self.now)
            self.known[key] = found
            if len(self.known) > MOST_REMEMBERED:
                self.known.popitem(last=False)
        return found

    def decisions(self, recorded: Recorded) -> list[Decision]:
        """Return the decisions on all that a record may stand for."""
        pairs = query_pairs(self.policy, recorded.attempt) if recorded.has_query else []
        return [self.decision(one, recorded.dns_type) for one in readings(recorded, pairs)]
