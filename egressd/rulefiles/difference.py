"""What differs between two sets of rules: not their text, but what they decide, profile by profile.

Hosts whose rules are the same on both sides are passed by; on the others, attempts that stand for every pattern are judged by
both (`witnesses`). Moving a rule to another file, renaming it or splitting it in two is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal

from egressd.policy.attempt import Address, Decision, Name
from egressd.policy.bodies import show
from egressd.policy.compile import CompiledPolicy, Level, Rule, compile_policy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectivePolicy
from egressd.rulefiles.load import Rules
from egressd.rulefiles.sightings import Sightings
from egressd.rulefiles.witnesses import SAMPLE, levels, witnesses

type Kind = Literal[
    "allowed", "asked", "denied", "inspected", "not inspected", "credential", "addresses", "body", "terms"
]

KINDS: tuple[Kind, ...] = (
    *("allowed", "asked", "denied", "not inspected", "inspected", "credential", "addresses", "body"),
    "terms",
)
MOST_ROWS = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One difference: what it is about, how it was decided before and after, and by which rule (`id (place)`, or none)."""

    kind: Kind
    what: str
    before: str
    after: str
    rule: str | None


@dataclass(slots=True)
class Difference:
    """All differences of one profile; `only` says on which side alone it exists, `left_out` counts rows beyond the most."""

    profile: str
    rows: list[Row] = field(default_factory=list)
    only: Literal["before", "after"] | None = None
    left_out: int = 0

    def add(self, row: Row) -> None:
        """Keep one row, once."""
        if row in self.rows:
            return
        if len(self.rows) < MOST_ROWS:
            self.rows.append(row)
        else:
            self.left_out += 1


def difference(before: Rules, after: Rules, now: float) -> list[Difference]:
    """Return what differs at `now`, for each profile in which something does."""
    found = []
    for profile in sorted({*before.profiles, *after.profiles}):
        old, new = before.policies.get(profile), after.policies.get(profile)
        nothing = compile_policy(EffectivePolicy(profile=profile))
        made = Difference(profile)
        if old is None or new is None:
            made.only = "after" if old is None else "before"
        was, becomes = (_canary(rules, profile) for rules in (before, after))
        if was != becomes:
            made.add(Row("terms", "canary of the profile", was, becomes, None))
        _compare(old or nothing, new or nothing, now, made)
        if made.rows or made.only is not None:
            made.rows.sort(key=lambda row: (KINDS.index(row.kind), row.what))
            found.append(made)
    return found


def change_of(old: Decision, new: Decision) -> Kind | None:
    """Return in what kind two decisions on one attempt differ; None when they let the same through in the same way."""
    if old.verdict != new.verdict:
        return {"allow": "allowed", "ask": "asked", "deny": "denied"}[new.verdict]  # type: ignore[return-value]  # three of the kinds
    if new.verdict == "deny":
        return None
    if old.treatment != new.treatment:
        return "inspected" if new.treatment == "inspect" else "not inspected"
    mine, theirs = old.entry, new.entry
    if (mine.credential if mine else None) != (theirs.credential if theirs else None):
        return "credential"
    if (mine.addresses if mine else ()) != (theirs.addresses if theirs else ()):
        return "addresses"
    if (mine.body if mine else ()) != (theirs.body if theirs else ()):
        return "body"
    return None


def _canary(rules: Rules, profile: str) -> str:
    canary = rules.canaries.get(profile)
    if canary is None:
        return "none"
    labels = ", ".join(f"{key}={value}" for key, value in canary.labels.items())
    return f"{labels}: {canary.profile}"


def _compare(old: CompiledPolicy, new: CompiledPolicy, now: float, made: Difference) -> None:
    for key in ("mode", "observe_until", "limits"):
        was, becomes = getattr(old.effective, key), getattr(new.effective, key)
        if was != becomes:
            made.add(Row("terms", f"{key} of the profile", _shown(was), _shown(becomes), None))
    _terms(old.effective, new.effective, made)
    for host in _touched(old, new):
        rules = [rule for policy in (old, new) for level in levels(policy, host) for rule in level]
        found = Sightings(host)
        for witness in witnesses(host, rules):
            was, becomes = decide(old, witness.attempt, now), decide(new, witness.attempt, now)
            kind = change_of(was, becomes)
            if kind is not None:
                told = (kind, _told(was, kind), _told(becomes, kind), _rule(becomes, was))
                found.add(witness, told)
        for (kind, before, after, rule), what in found.summed_up():
            made.add(Row(kind, what, before, after, rule))


def _terms(old: EffectivePolicy, new: EffectivePolicy, made: Difference) -> None:
    """Note rules that decide as before, but under other limits, until another day, or with other approvers."""
    before = {(entry.id, entry.via): entry for entry in old.entries}
    for entry in new.entries:
        was = before.get((entry.id, entry.via))
        if was is None:
            continue
        for key in ("limits", "expires", "approvers", "mode", "observe_until"):
            if getattr(was, key) != getattr(entry, key):
                what = f"{key} of {entry.id}"
                rule = f"{entry.id} ({entry.place})"
                made.add(Row("terms", what, _shown(getattr(was, key)), _shown(getattr(entry, key)), rule))


def _touched(old: CompiledPolicy, new: CompiledPolicy) -> Iterator[Name | Address]:
    """Yield hosts that may be decided differently: with other rules of their own, or below a wildcard that has others."""
    exact = _unlike(old.exact, new.exact)
    below = _unlike(old.below, new.below)
    names = {**dict.fromkeys(old.exact), **dict.fromkeys(new.exact)}
    wild = {**dict.fromkeys(old.below), **dict.fromkeys(new.below)}
    web = [_said(rule) for rule in old.web] != [_said(rule) for rule in new.web]
    found = dict.fromkeys(exact)
    if web:
        found |= names
        yield (SAMPLE, "com")
    roots = frozenset(wild if web else below)
    found |= dict.fromkeys(name for name in names if any(part in roots for part in _above(name)))
    found |= {
        f"{SAMPLE}.{suffix}": None
        for suffix in wild
        if suffix in roots or any(p in roots for p in _above(suffix))
    }
    for text in found:
        yield tuple(text.split("."))
    shelves = {(version, length): shelf for version, length, shelf in old.networks}
    others = {(version, length): shelf for version, length, shelf in new.networks}
    for key in {**shelves, **others}:
        bits = 32 if key[0] == 4 else 128
        for value in _unlike(shelves.get(key, {}), others.get(key, {})):
            number = value << (bits - key[1])
            yield ip_address(number.to_bytes(bits // 8, "big"))


def _unlike[K](old: Mapping[K, Level], new: Mapping[K, Level]) -> list[K]:
    keys = dict.fromkeys([*old, *new])
    return [key for key in keys if [*map(_said, old.get(key, ()))] != [*map(_said, new.get(key, ()))]]


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _said(rule: Rule) -> tuple[object, ...]:
    """What a rule says, wherever it stands and whatever it is called."""
    entry = rule.entry
    texts = tuple(pattern.text for pattern in rule.patterns)
    reach = (rule.schemes, rule.ports, texts, entry.treatment, entry.addresses, rule.end)
    return (entry.effect, entry.origin, *reach, entry.body, entry.credential, entry.mode, entry.observe_until)


def _told(decision: Decision, kind: Kind) -> str:
    entry = decision.entry
    if kind == "credential":
        return (entry.credential if entry is not None else None) or "none"
    if kind == "body":
        return f"json: {show(entry.body)}" if entry is not None and entry.body else "any body"
    if kind == "addresses":
        return ", ".join(entry.addresses) if entry is not None and entry.addresses else "any public one"
    if decision.verdict == "deny":
        return f"deny ({decision.reason})"
    return f"{decision.verdict} ({decision.treatment})" + (", only observed" if decision.would_deny else "")


def _rule(new: Decision, old: Decision) -> str | None:
    entry = new.entry or old.entry
    return f"{entry.id} ({entry.place})" if entry is not None else None


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    limits = getattr(value, "model_dump", None)
    if limits is None:
        return str(value)
    found = limits(exclude_none=True)
    parts = (
        f"{key} {amount['amount']}/{amount['seconds']}s" if isinstance(amount, dict) else f"{key} {amount}"
        for key, amount in found.items()
    )
    return ", ".join(parts) or "none"
