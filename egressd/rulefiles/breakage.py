"""What would break were these rules enforced today: recorded traffic that passed, judged by them as if nothing only observed.

Counted are requests, and connections that nobody reads; look-ups and read connections follow from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from egressd.policy.compile import compile_policy
from egressd.rulefiles.load import Rules
from egressd.rulefiles.replay import Impact, Kind, with_record

MOST_SANDBOXES = 1000
"""Sandboxes that are told apart for one break."""

_BREAKS: tuple[Kind, ...] = ("denied", "asked", "uncertain")


@dataclass(frozen=True, slots=True)
class Break:
    """What is asked for, under which profile, and why it would not pass: `rule` is `id (place)`, or none for the default."""

    kind: Kind
    profile: str
    what: str
    reason: str
    rule: str | None


@dataclass(slots=True)
class Met:
    """How often, by whom, and an attempt that shows it."""

    times: int = 0
    sandboxes: set[str] = field(default_factory=set)
    example: str = ""


class Breakage:
    """Takes records of any number, in bounded memory."""

    def __init__(self, rules: Rules, now: float) -> None:
        """Judge by `rules`, enforced, as of `now`."""
        enforced = {name: compile_policy(rules.effective(name).enforced()) for name in rules.profiles}
        self.rules = rules
        self._noted, self._others = (Impact(with_record(enforced, now)) for _ in range(2))

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record. Total."""
        if fields.get("verdict") != "allow" or fields.get("layer") not in ("request", "connection"):
            return
        if fields.get("layer") == "connection" and fields.get("treatment") == "inspect":
            return
        (self._noted if fields.get("would_deny") is True else self._others).take(fields)

    @property
    def noted(self) -> int:
        """How many attempts passed only because something observed, as it was noted then."""
        return (
            self.settled
            + sum(self._noted.total(kind) for kind in _BREAKS)
            + sum(self._noted.skipped.values())
        )

    @property
    def settled(self) -> int:
        """How many of those these rules let through by now."""
        return self._noted.same

    @property
    def unjudged(self) -> Counter[str]:
        """How many attempts were not judged, by why."""
        return self._noted.skipped + self._others.skipped

    def total(self, kind: Kind) -> int:
        """Return how many attempts would break in this way."""
        return self._noted.total(kind) + self._others.total(kind)

    def breaks(self) -> dict[Break, Met]:
        """Return what would break, the most frequent first."""
        found: dict[Break, Met] = {}
        for impact in (self._noted, self._others):
            for row, seen in impact.rows.items():
                if row.kind not in _BREAKS:
                    continue
                met = found.setdefault(Break(row.kind, row.profile, row.what, row.reason, row.rule), Met())
                met.times += seen.times
                met.example = met.example or seen.example
                if len(met.sandboxes) < MOST_SANDBOXES:
                    met.sandboxes.add(row.sandbox)
        order = sorted(
            found.items(), key=lambda one: (_BREAKS.index(one[0].kind), -one[1].times, one[0].what)
        )
        return dict(order)

    def owner(self, profile: str) -> str | None:
        """Return whom to ask about a profile, if that is said."""
        return self.rules.effective(profile).owner if profile in self.rules.policies else None
