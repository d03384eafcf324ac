"""Why an attempt is decided as it is: the deciding rule, what each other rule on the host says, and the narrowest change.

Only `decide` decides here too; the rest is told around its answer, from the same compiled rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from egressd.policy import internal
from egressd.policy.attempt import (
    Address,
    Attempt,
    ConnectionAttempt,
    Decision,
    DnsQuestion,
    Name,
    RequestAttempt,
)
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.decide import Trial, trials
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import format_host
from egressd.policy.reasons import WORDS, Reason
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.attachment import Attachment, attachment
from egressd.rulefiles.claims import judge
from egressd.rulefiles.load import Rules
from egressd.rulefiles.requestline import Asked

MOST_TRIED = 20
MOST_RELATED = 5
_SHORT_QUERY = 80

type Standing = Literal["decides", "covers", "misses", "expired", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Tried:
    """One rule and what it says of the attempt; `elsewhere` is a rule on related hosts only."""

    entry: EffectiveEntry
    standing: Standing
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with everything that a person needs to agree or to change it.

    `tried` is bounded; `untold` counts the rules left out. `change` is YAML for the profile, or a sentence, or empty.
    `attachment` says which credential goes with a request, None where there is nothing to say about credentials.
    """

    profile: str
    asked: Asked
    decision: Decision
    tried: tuple[Tried, ...]
    untold: int
    change: str
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
            "treatment": self.treatment,
            "rule": entry.id if entry else None,
            "place": entry.place if entry else None,
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
            "change": self.change or None,
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
    change = _change(policy, asked, decision, told, now, rules.root)
    goes: Attachment | None = None
    if isinstance(asked.attempt, RequestAttempt):
        goes = attachment(decision, asked.attempt, rules.known, rules.root, observes=policy.observes(now))
    return Explanation(profile, asked, decision, tuple(told), untold, change, goes)


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
        return Tried(entry, "decides", WORDS[decision.reason].says)
    if trial.outcome == "expired":
        return Tried(entry, "expired", f"expired on {entry.expires}")
    if trial.why is not None:
        return Tried(entry, "misses", f"{trial.why}: {_in_words(trial.why, entry)}")
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


def _change(
    policy: CompiledPolicy, asked: Asked, decision: Decision, tried: list[Tried], now: float, root: str
) -> str:
    """Return the narrowest change that would allow a denied attempt, when there is an easy one that surely does."""
    entry = decision.entry
    if _host(asked.attempt) == internal.NAME:
        return (
            "" if decision.allowed else f"egressd itself answers GET and HEAD of {', '.join(internal.PAGES)}"
        )
    if decision.verdict == "ask":
        who = f" by {', '.join(entry.approvers)}" if entry is not None and entry.approvers else ""
        return f"an approval{who} is needed"
    if decision.allowed:
        return ""
    if decision.reason in (Reason.DENIED_BY_RULE, Reason.DENIED_BY_ORGANISATION) and entry is not None:
        return f"a deny wins over every allow; it stands at {root}/{entry.place}"
    if decision.reason.startswith("floor_"):
        return "no rule can allow this"
    expired = next(
        (one.entry for one in tried if one.standing == "expired" and one.entry.effect != "deny"), None
    )
    if expired is not None:
        return f"{expired.id} has expired; renew it ({root}/{expired.place})"
    proposal = _proposal(asked.attempt)
    otherwise = WORDS[decision.reason].hint
    if proposal is None:
        return otherwise
    widened = policy.effective.model_copy(update={"entries": (*policy.effective.entries, proposal)})
    try:
        allowed = judge(compile_policy(widened), asked, now).allowed
    except ValueError:  # a path that no pattern can spell
        allowed = False
    if not allowed:
        return otherwise
    missed = (one.entry for one in tried if one.standing == "misses" and _takes(one.entry, proposal))
    near = next(missed, None)
    if near is not None:
        return f'add "{proposal.requests[0]}" to the requests of {near.id} ({root}/{near.place})'
    return _as_yaml(proposal)


def _proposal(attempt: Attempt) -> EffectiveEntry | None:
    """Return the narrowest entry for an attempt on a name; a literal address is better asked for by name."""
    host = _host(attempt)
    if not isinstance(host, tuple):
        return None
    narrow = EffectiveEntry(id="proposal", place="", effect="allow", hosts=(format_host(host),))
    if isinstance(attempt, DnsQuestion):
        return narrow
    if isinstance(attempt, ConnectionAttempt):
        treatment: Literal["relay", "inspect"] = "relay" if attempt.scheme == "tcp" else "inspect"
        return narrow.model_copy(update={"ports": (attempt.port,), "treatment": treatment})
    method = "WEBSOCKET" if attempt.upgrade else attempt.method
    path, _, query = attempt.target.partition("?")
    request = f"{method} {path}"
    if (
        query
        and len(query) <= _SHORT_QUERY
        and isinstance(parse_request_pattern(f"{request}?{query}"), RequestPattern)
    ):
        request = f"{request}?{query}"
    return narrow.model_copy(
        update={"ports": (attempt.port,), "schemes": (attempt.scheme,), "requests": (request,)}
    )


def _takes(entry: EffectiveEntry, proposal: EffectiveEntry) -> bool:
    """Whether the proposal's request could stand in the entry without widening anything else: a service's text is shared by
    profiles, and a credential must not go out with more requests than were thought of.
    """
    same_lane = entry.ports == proposal.ports and entry.schemes == proposal.schemes
    own = entry.via is None and entry.credential is None and len(entry.hosts) == 1
    return entry.effect == "allow" and same_lane and own and bool(entry.requests and proposal.requests)


def _as_yaml(entry: EffectiveEntry) -> str:
    default_port = 80 if entry.schemes == ("http",) else 443
    lines = ["allow:", f"  - hosts: [{entry.hosts[0]}]"]
    if entry.schemes != ("https",):
        lines.append("    schemes: [http]")
    if entry.treatment == "relay":
        lines.append("    treatment: relay")
    if entry.treatment == "relay" or entry.ports != (default_port,):
        lines.append(f"    ports: [{entry.ports[0]}]")
    if entry.requests:
        lines.append(f'    requests: ["{entry.requests[0]}"]')
    return "\n".join(lines)
