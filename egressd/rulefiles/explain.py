"""Why an attempt is decided as it is: the deciding rule, what each other rule on the host says, and what would change it.

Only `decide` decides here too; the rest is told around its answer, from the same compiled rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from egressd.policy.attempt import (
    Address,
    Attempt,
    Decision,
    DnsQuestion,
    Name,
    RequestAttempt,
)
from egressd.policy.bodies import show
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import Trial, trials
from egressd.policy.effective import EffectiveEntry
from egressd.policy.reasons import WORDS, Reason
from egressd.rulefiles.attachment import Attachment, attachment
from egressd.rulefiles.changes import Case, Change, changes
from egressd.rulefiles.claims import judge
from egressd.rulefiles.load import Rules
from egressd.rulefiles.requestline import Asked

MOST_TRIED = 20
MOST_RELATED = 5

type Standing = Literal["decides", "covers", "misses", "expired", "elsewhere", "observes"]


@dataclass(frozen=True, slots=True)
class Tried:
    """One rule and what it says of the attempt; `elsewhere` is a rule on related hosts only."""

    entry: EffectiveEntry
    standing: Standing
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with everything that a person needs to agree or to change it.

    `tried` is bounded; `untold` counts the rules left out. `changes` would allow it, the narrowest first, or are advice.
    `attachment` says which credential goes with a request, None where there is nothing to say about credentials.
    """

    profile: str
    asked: Asked
    decision: Decision
    tried: tuple[Tried, ...]
    untold: int
    changes: tuple[Change, ...]
    attachment: Attachment | None = None

    @property
    def treatment(self) -> str | None:
        """How the attempt is carried, if it is; egressd's own page is not."""
        carried = self.decision.allowed and self.decision.reason is not Reason.INTERNAL_PAGE
        return self.decision.treatment if carried else None

    @property
    def says(self) -> str:
        """The reason in words."""
        return WORDS[self.decision.reason].says

    def as_json(self) -> dict[str, object]:
        """Return it as plain values with stable keys."""
        entry = self.decision.entry
        return {
            "request": self.asked.text,
            "profile": self.profile,
            "verdict": self.decision.verdict,
            "reason": self.decision.reason.value,
            "says": self.says,
            "would_deny": self.decision.would_deny,
            "would_reason": self.decision.would_reason.value if self.decision.would_reason else None,
            "would_rule": self.decision.would_entry.id if self.decision.would_entry else None,
            "would_place": self.decision.would_entry.place if self.decision.would_entry else None,
            "treatment": self.treatment,
            "rule": entry.id if entry else None,
            "place": entry.place if entry else None,
            "body": {key: list(values) for key, values in entry.body} if entry and entry.body else None,
            "via": entry.via if entry else None,
            "tried": [
                {
                    "rule": tried.entry.id,
                    "effect": tried.entry.effect,
                    "place": tried.entry.place,
                    "via": tried.entry.via,
                    "standing": tried.standing,
                    "why": tried.why,
                }
                for tried in self.tried
            ],
            "untold": self.untold,
            "change": self.changes[0].text if self.changes else None,
            "changes": [{"what": change.what or None, "change": change.text} for change in self.changes],
            "credential": self.attachment.as_json() if self.attachment else None,
        }


def explain(rules: Rules, profile: str, asked: Asked, now: float) -> Explanation:
    """Return the explanation of one request under one profile; KeyError when there is no such profile."""
    policy = rules.compiled(profile)
    decision = judge(policy, asked, now)
    tried = list(_tried(policy, asked.attempt, decision, now))
    told = tried[:MOST_TRIED]
    distinct = {(entry.id, entry.via) for entry in policy.effective.entries}
    untold = len(distinct - {(one.entry.id, one.entry.via) for one in told})
    missed = tuple(one.entry for one in told if one.standing == "misses")
    ended = next(
        (one.entry for one in told if one.standing == "expired" and one.entry.effect != "deny"), None
    )
    ways = changes(Case(rules, policy, asked, decision, missed, ended, now))
    goes: Attachment | None = None
    if isinstance(asked.attempt, RequestAttempt):
        goes = attachment(decision, asked.attempt, rules.known, rules.root, observes=policy.observes(now))
    return Explanation(profile, asked, decision, tuple(told), untold, ways, goes)


def _tried(policy: CompiledPolicy, attempt: Attempt, decision: Decision, now: float) -> Iterator[Tried]:
    met = trials(policy, attempt, now)
    ordered = sorted(met, key=lambda trial: trial.entry is not decision.entry)
    for trial in ordered:
        yield _told(trial, decision)
    seen = {id(trial.entry) for trial in met}
    host = _host(attempt)
    if isinstance(host, tuple):
        yield from _related(policy, host, seen)


def _told(trial: Trial, decision: Decision) -> Tried:
    entry = trial.entry
    if entry is decision.entry:
        bodies = f", if its body is JSON with {show(entry.body)}" if entry.body else ""
        return Tried(entry, "decides", WORDS[decision.reason].says + bodies)
    if trial.outcome == "expired":
        ended = f"expired on {entry.expires}" if entry.expires else f"observed until {entry.observe_until}"
        return Tried(entry, "expired", ended)
    if trial.why is not None:
        return Tried(entry, "misses", f"{trial.why}: {_in_words(trial.why, entry)}")
    if entry is decision.would_entry:
        return Tried(entry, "observes", f"would deny it, and only observes until {entry.observe_until}")
    if decision.verdict == "deny" and entry.effect != "deny":
        return Tried(entry, "covers", f"covers it, but {decision.reason} comes first")
    return Tried(entry, "covers", "covers it, but a more specific or an earlier rule decides")


def _in_words(why: Reason, entry: EffectiveEntry) -> str:
    if why is Reason.PORT_NOT_ALLOWED:
        return f"its ports are {', '.join(map(str, entry.ports)) or 'all'}"
    if why is Reason.SCHEME_NOT_ALLOWED:
        return f"its schemes are {', '.join(entry.schemes)}"
    shown = ", ".join(f'"{request}"' for request in entry.requests[:4]) or '"GET,HEAD /**"'
    more = f" and {len(entry.requests) - 4} more" if len(entry.requests) > 4 else ""
    return f"its requests are {shown}{more}"


def _related(policy: CompiledPolicy, host: Name, seen: set[int]) -> Iterator[Tried]:
    """Yield rules on sibling names: whoever is refused `www.example.org` wants to know of the rule on `example.org`."""
    domain = ".".join(host[-2:])
    ending = f".{domain}"
    found = 0
    for entry in policy.effective.entries:
        near = next((text for text in entry.hosts if text == domain or text.endswith(ending)), None)
        if near is None or id(entry) in seen:
            continue
        yield Tried(
            entry,
            "elsewhere",
            f"is for {near}" + (" (never the name itself)" if near == f"*.{domain}" else ""),
        )
        found += 1
        if found == MOST_RELATED:
            return


def _host(attempt: Attempt) -> Name | Address:
    return attempt.name if isinstance(attempt, DnsQuestion) else attempt.host
