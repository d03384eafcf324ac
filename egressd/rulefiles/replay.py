"""Recorded attempts judged again: by other rules than those that decided them, or by two sets of rules side by side.

Everything here works on one record at a time, so that a journal of any length takes the same memory; what is kept is bounded. A
record may stand for several attempts (`recorded`); where those come out differently, the change is counted as uncertain.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from egressd.policy.attempt import Attempt, Decision, RequestAttempt
from egressd.policy.compile import CompiledPolicy
from egressd.policy.grants import PREFIX as GRANT_PREFIX
from egressd.policy.reasons import Reason
from egressd.rulefiles.claims import judge
from egressd.rulefiles.recorded import Recorded, Unplayable, read_recorded, readings, request_text
from egressd.rulefiles.requestline import Asked

MOST_REMEMBERED = 20_000
"""Decisions, and records, that are remembered: most traffic asks for the same few things."""
MOST_ROWS = 5_000
"""Different changes that are told apart; what comes after is counted by sandbox alone."""

type Kind = Literal["allowed", "asked", "denied", "inspected", "not inspected", "credential", "uncertain"]

KINDS: tuple[Kind, ...] = (
    *("allowed", "asked", "denied", "not inspected", "inspected", "credential", "uncertain"),
)

_KEY = (
    *("layer", "verdict", "reason", "rule", "profile", "host", "address", "port", "scheme", "method", "path"),
    *("query", "qtype", "treatment", "would_deny"),
)
_LIMITS = frozenset({Reason.RATE_LIMITED.value, Reason.TOO_MANY_CONNECTIONS.value})
_VERBS: dict[str, Kind] = {"allow": "allowed", "ask": "asked", "deny": "denied"}


@dataclass(frozen=True, slots=True)
class Turn:
    """How one record comes out: `kind` is None where nothing changes; `decision` is the new one."""

    kind: Kind | None
    decision: Decision | None = None


type Comparison = Callable[[Recorded], Turn | Unplayable]


@dataclass(frozen=True, slots=True)
class Row:
    """A change: for whom, what, and by which rule now (`id (place)`, or none)."""

    kind: Kind
    profile: str
    sandbox: str
    what: str
    reason: str
    rule: str | None


@dataclass(slots=True)
class Seen:
    """How often a change was met, and one attempt that shows it."""

    times: int = 0
    example: str = ""


@dataclass(slots=True)
class Impact:
    """Counts what changes over a journal; `same` are attempts that nothing changes for, `skipped` those not judged, by why."""

    compare: Comparison
    rows: dict[Row, Seen] = field(default_factory=dict)
    same: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    known: OrderedDict[tuple[object, ...], tuple[Recorded, Turn] | Unplayable] = field(
        default_factory=OrderedDict
    )

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record. Total."""
        found = self._turn(fields)
        count = fields.get("count")
        times = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1
        if isinstance(found, Unplayable):
            self.skipped[found.why] += times
            return
        recorded, turn = found
        if turn.kind is None:
            self.same += times
            return
        entry = turn.decision.entry if turn.decision is not None else None
        rule = f"{entry.id} ({entry.place})" if entry is not None else None
        reason = turn.decision.reason.value if turn.decision is not None else ""
        sandbox = str(fields.get("sandbox", "unknown"))[:100]
        row = Row(turn.kind, recorded.profile, sandbox, _brief(recorded), reason, rule)
        if row not in self.rows and len(self.rows) >= MOST_ROWS:
            row = Row(turn.kind, recorded.profile, "others", "other attempts", "", None)
        seen = self.rows.setdefault(row, Seen(example=str(fields.get("attempt_id", ""))[:64]))
        seen.times += times

    def total(self, kind: Kind) -> int:
        """Return how many attempts change in this way."""
        return sum(seen.times for row, seen in self.rows.items() if row.kind == kind)

    def _turn(self, fields: Mapping[str, Any]) -> tuple[Recorded, Turn] | Unplayable:
        key = tuple(map(fields.get, _KEY))
        try:
            found = self.known.get(key)
        except TypeError:  # a list where a text belongs
            return self._compared(fields)
        if found is None:
            found = self.known[key] = self._compared(fields)
            if len(self.known) > MOST_REMEMBERED:
                self.known.popitem(last=False)
        return found

    def _compared(self, fields: Mapping[str, Any]) -> tuple[Recorded, Turn] | Unplayable:
        recorded = read_recorded(fields)
        if isinstance(recorded, Unplayable):
            return recorded
        turn = self.compare(recorded)
        return turn if isinstance(turn, Unplayable) else (recorded, turn)


def with_record(policies: Mapping[str, CompiledPolicy], now: float, profile: str | None = None) -> Comparison:
    """Return what compares a record's own verdict with that of the rules; `profile` stands in for the recorded one."""

    def compare(recorded: Recorded) -> Turn | Unplayable:
        policy = policies.get(profile or recorded.profile)
        if policy is None:
            return Unplayable("a profile that these rules do not have")
        decisions = [_judged(policy, one, recorded, now) for one in _readings(recorded, [policy])]
        before = _verdict_by_rules(recorded)
        changed = [decision for decision in decisions if decision.verdict != before]
        if not changed:
            return Turn(None)
        if len(changed) < len(decisions) or len({decision.verdict for decision in changed}) > 1:
            return Turn("uncertain", changed[0])
        shook_hands = _as_websocket(recorded) if before == "allow" else None
        if shook_hands is not None and _judged(policy, shook_hands, recorded, now).verdict == before:
            return Turn(None)
        return Turn(_VERBS[changed[0].verdict], changed[0])

    return compare


def between(old: Mapping[str, CompiledPolicy], new: Mapping[str, CompiledPolicy], now: float) -> Comparison:
    """Return what compares the decisions of two sets of rules on a record, whatever was decided then."""

    def compare(recorded: Recorded) -> Turn | Unplayable:
        before, after = old.get(recorded.profile), new.get(recorded.profile)
        if before is None and after is None:
            return Unplayable("a profile that neither side has")
        policies = [policy for policy in (before, after) if policy is not None]
        pairs = []
        for one in _readings(recorded, policies):
            was = _judged(before, one, recorded, now) if before is not None else _NOTHING
            becomes = _judged(after, one, recorded, now) if after is not None else _NOTHING
            pairs.append((was, becomes))
        likely = [pair for pair in pairs if _is_as_recorded(pair[0], recorded)] or pairs
        kinds = {_kind(was, becomes) for was, becomes in likely}
        if len(kinds) > 1:
            return Turn("uncertain", likely[0][1])
        return Turn(kinds.pop(), likely[0][1])

    return compare


def query_pairs(policies: Iterable[CompiledPolicy], attempt: Attempt) -> list[str]:
    """Return every `key=value` that a rule on the attempt's host names."""
    if not isinstance(attempt, RequestAttempt):
        return []
    host = attempt.host
    found = (
        pair
        for policy in policies
        for level in (
            policy.levels_of_name(host) if isinstance(host, tuple) else policy.levels_of_address(host)
        )
        for rule in level
        for pattern in rule.patterns
        if pattern.query is not None
        for pair in pattern.query.pairs
    )
    return list(dict.fromkeys(found))


def _brief(recorded: Recorded) -> str:
    """Return an attempt with what is behind the first segment of its path left out: the example has it whole."""
    attempt = recorded.attempt
    if not isinstance(attempt, RequestAttempt):
        return recorded.text[:300]
    first, slash, _ = attempt.target[1:].partition("/")
    return request_text(replace(attempt, target=f"/{first[:60]}{'/…' if slash else ''}"))


_NOTHING = Decision("deny", Reason.NOT_ALLOWED)


def _readings(recorded: Recorded, policies: list[CompiledPolicy]) -> list[Attempt]:
    pairs = query_pairs(policies, recorded.attempt) if recorded.has_query else []
    return list(readings(recorded, pairs))


def _judged(policy: CompiledPolicy, attempt: Attempt, recorded: Recorded, now: float) -> Decision:
    return judge(policy, Asked("", attempt, recorded.dns_type), now)


def _verdict_by_rules(recorded: Recorded) -> str:
    """What the rules said, where a limit or an approval had the last word."""
    if recorded.reason in _LIMITS:
        return "allow"
    if recorded.reason == Reason.GRANT:
        return "deny" if _is_alone(recorded) else "ask"
    return recorded.verdict


def _is_alone(recorded: Recorded) -> bool:
    """Whether an approval allowed what no rule speaks of: then it is the rule that is named."""
    return recorded.reason == Reason.GRANT and (recorded.rule or "").startswith(GRANT_PREFIX)


def _is_as_recorded(decision: Decision, recorded: Recorded) -> bool:
    rule = decision.entry.id if decision.entry is not None else None
    return decision.verdict == _verdict_by_rules(recorded) and (
        recorded.rule is None or _is_alone(recorded) or rule == recorded.rule
    )


def _as_websocket(recorded: Recorded) -> Attempt | None:
    """Return the request as the handshake of a WebSocket, which a record does not tell from any other GET."""
    attempt = recorded.attempt
    if (
        not isinstance(attempt, RequestAttempt)
        or attempt.method != "GET"
        or attempt.upgrade
        or recorded.has_query
    ):
        return None
    return replace(attempt, upgrade="websocket")


def _kind(was: Decision, becomes: Decision) -> Kind | None:
    if was.verdict != becomes.verdict:
        return _VERBS[becomes.verdict]
    if becomes.verdict == "deny":
        return None
    if was.treatment != becomes.treatment:
        return "inspected" if becomes.treatment == "inspect" else "not inspected"
    mine, theirs = was.entry, becomes.entry
    same = (mine.credential if mine else None) == (theirs.credential if theirs else None)
    return None if same else "credential"
