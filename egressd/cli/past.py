"""An attempt of the past, found in the journal: what was decided on it, and the attempt itself to be judged by today's rules."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from egressd.cli.recordings import configured_journal, recorded
from egressd.cli.rows import printable, row_of
from egressd.policy.reasons import WORDS, Reason

if TYPE_CHECKING:  # see check.py
    from egressd.rulefiles.load import Rules
    from egressd.rulefiles.requestline import Asked

ATTEMPT_ID = re.compile(r"[0-9a-f]{28}")


@dataclass(frozen=True, slots=True)
class Past:
    """One decision record."""

    fields: Mapping[str, Any]

    @property
    def profile(self) -> str | None:
        """The profile that it was judged under."""
        found = self.fields.get("profile")
        return found if isinstance(found, str) else None

    @property
    def verdict(self) -> str:
        """What was decided."""
        return str(self.fields.get("verdict"))

    @property
    def moment(self) -> float:
        """When, in Unix seconds; now, where the record does not say."""
        try:
            return dt.datetime.fromisoformat(str(self.fields.get("time"))).timestamp()
        except ValueError:
            return dt.datetime.now(dt.UTC).timestamp()

    def asked(self, rules: Rules, profile: str, now: float) -> Asked | None:
        """Return the attempt as it was, of several that the record may stand for the one that the rules decide likewise.

        None where no rule decides such an attempt.
        """
        from egressd.rulefiles.claims import judge
        from egressd.rulefiles.recorded import Unplayable, read_recorded, readings
        from egressd.rulefiles.replay import query_pairs
        from egressd.rulefiles.requestline import Asked

        found = read_recorded(self.fields)
        if isinstance(found, Unplayable):
            return None
        policy = rules.compiled(profile)
        all_of_them = [
            Asked(found.text, attempt, found.dns_type)
            for attempt in readings(found, query_pairs([policy], found.attempt))
        ]
        for one in all_of_them:
            decision = judge(policy, one, now)
            rule = decision.entry.id if decision.entry is not None else None
            if (decision.verdict, rule) == (found.verdict, found.rule):
                return one
        return all_of_them[0]

    def lines(self, rules: Rules | None = None) -> list[str]:
        """Return what was decided, for people; a line says so where the rules are no longer the same."""
        row = row_of(self.fields)
        reason = self._text("reason")
        words = WORDS[Reason(reason)].says if reason in set(Reason) else "unknown to this egressd"
        lines = [
            f"recorded: {row.mark}: {row.what}",
            f"  when:   {row.time}, sandbox {row.sandbox}, profile {printable(str(self.profile))}",
            f"  reason: {reason} ({words})",
            f"  rule:   {row.rule or 'none'}",
        ]
        if "query" in self.fields:
            lines.append(
                "  note:   the values of its query are not recorded; it is judged as they were, if a rule tells"
            )
        if rules is None:
            return [*lines, "  note:   no rule decided this, so there is nothing to explain from the rules"]
        if self.profile in rules.profiles and not self._same(rules):
            lines.append("  note:   the rules have changed since; below is what they say now")
        return [*lines, ""]

    def as_json(self, rules: Rules | None = None) -> dict[str, object]:
        """Return the record, and whether it was judged by the same rules."""
        same = self._same(rules) if rules is not None and self.profile in rules.profiles else None
        return {"record": dict(self.fields), "same_rules": same}

    def _same(self, rules: Rules) -> bool:
        return self.fields.get("policy") == rules.effective(self.profile or "").digest()

    def _text(self, name: str) -> str:
        return printable(str(self.fields.get(name, "")))


def find(attempt_id: str, journal: str | None) -> Past | None:
    """Return the decision on an attempt; raises BadJournal."""
    fields = next(
        (f for f in recorded(journal or configured_journal()) if f.get("attempt_id") == attempt_id), None
    )
    return Past(fields) if fields is not None else None
