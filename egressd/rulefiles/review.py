"""What a person who reviews the rules looks at: what nobody uses, what ends, what nobody owns, what is widest, what has keys.

A rule that several profiles share is one subject. How often it decided is known from a journal alone: requests, connections that
nobody reads, and whatever it denied or, while it observes, would deny.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any, Literal

from egressd.policy.effective import EffectiveEntry
from egressd.rulefiles.load import Rules
from egressd.rulefiles.narrowing import request_patterns
from egressd.rulefiles.networks import is_public
from egressd.rulefiles.origins import Origins
from egressd.rulefiles.source import GROUPS, ORGANISATION, PROFILES

type Section = Literal["unused", "expiring", "ownerless", "widest", "credentialed"]

SECTIONS: tuple[Section, ...] = ("unused", "expiring", "ownerless", "widest", "credentialed")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_MOST_POINTS_OF_A_COUNT = 10


@dataclass(slots=True)
class Use:
    """How often a rule decided, and when last (as records have it)."""

    times: int = 0
    last: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to look at; `use` is None where no journal was given."""

    section: Section
    what: str
    place: str
    profiles: tuple[str, ...]
    owner: str | None
    detail: str
    use: Use | None = None


@dataclass(slots=True)
class Usage:
    """Counts what rules decided in recorded traffic, in memory that does not grow with it."""

    rules: Rules
    uses: dict[tuple[str, str], Use] = field(default_factory=dict)
    first: str = ""

    def __post_init__(self) -> None:
        """Know every rule."""
        for profile in self.rules.profiles:
            for entry in self.rules.effective(profile).entries:
                self.uses.setdefault((profile, entry.id), Use())

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record. Total."""
        time = fields.get("time")
        told = time[:40] if isinstance(time, str) else ""
        if told and (not self.first or told < self.first):
            self.first = told
        if not _counts(fields):
            return
        count = fields.get("count")
        times = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1
        for key in ("rule", "would_rule"):
            profile, rule = fields.get("profile"), fields.get(key)
            use = (
                self.uses.get((profile, rule)) if isinstance(profile, str) and isinstance(rule, str) else None
            )
            if use is not None:
                use.times += times
                use.last = max(use.last, told)


@dataclass(frozen=True, slots=True)
class _Subject:
    """A rule, wherever it is named."""

    entries: tuple[EffectiveEntry, ...]
    profiles: tuple[str, ...]

    @property
    def one(self) -> EffectiveEntry:
        return self.entries[0]


def review(
    rules: Rules, today: dt.date, *, usage: Usage | None = None, soon: dt.timedelta = dt.timedelta(days=30)
) -> list[Row]:
    """Return every row, section by section, the most telling first in each. Without `usage` nothing is unused."""
    subjects = list(_subjects(rules))
    reviewer = _Reviewer(rules, Origins(rules.source), usage)
    return [
        *(reviewer.unused(subjects) if usage is not None else ()),
        *reviewer.expiring(subjects, today, soon),
        *reviewer.ownerless(),
        *reviewer.widest(subjects),
        *reviewer.credentialed(subjects),
    ]


def openness(entries: Iterable[EffectiveEntry]) -> tuple[int, list[str]]:
    """Return points for what a rule opens, and what they are for: a measure to sort by and nothing else."""
    found: dict[str, int] = {}
    for entry in entries:
        for reason, points in _opens(entry):
            found[reason] = max(points, found.get(reason, 0))
    ordered = sorted(found.items(), key=lambda one: (-one[1], one[0]))
    return sum(found.values()), [reason for reason, _ in ordered]


def _opens(entry: EffectiveEntry) -> Iterator[tuple[str, int]]:
    if entry.public_web:
        yield "the whole public web", 60
    if entry.treatment != "inspect":
        yield f"a {entry.treatment}, which nobody reads", 40 if entry.treatment == "relay" else 30
    wild = sum(host.startswith("*.") for host in entry.hosts)
    if wild:
        yield f"{wild} wildcard{'s' if wild > 1 else ''}", 25
    if len(entry.hosts) > 1:
        yield f"{len(entry.hosts)} hosts", min(len(entry.hosts) // 10, _MOST_POINTS_OF_A_COUNT)
    if len(entry.ports) > 1:
        yield f"{len(entry.ports)} ports", min(len(entry.ports), _MOST_POINTS_OF_A_COUNT)
    if "http" in entry.schemes and entry.treatment == "inspect":
        yield "in the clear", 5
    if any(not is_public(ip_network(text)) for text in entry.addresses):
        yield "into private networks", 10
    yield from _asks(entry)


def _asks(entry: EffectiveEntry) -> Iterator[tuple[str, int]]:
    patterns = request_patterns(entry)
    writing = [one for one in patterns if one.methods is None or not one.methods <= _READING]
    if any(one.methods is None for one in patterns):
        yield "any method", 20
    elif writing:
        yield "methods that write", 10
    if any(one.websocket for one in patterns):
        yield "WebSockets", 5
    if any(one.path.is_everything for one in writing):
        yield "writes on every path", 15
    elif any(one.path.is_everything for one in patterns):
        yield "every path", 5


@dataclass(frozen=True, slots=True)
class _Reviewer:
    rules: Rules
    origins: Origins
    usage: Usage | None

    def unused(self, subjects: list[_Subject]) -> Iterator[Row]:
        for one in subjects:
            use = self._use(one)
            if use is not None and not use.times:
                yield self._row("unused", one, f"{one.one.effect}: decided nothing")

    def expiring(self, subjects: list[_Subject], today: dt.date, soon: dt.timedelta) -> Iterator[Row]:
        rows: list[tuple[dt.date, Row]] = []
        for one in subjects:
            for day, what in ((one.one.expires, "ends"), (one.one.observe_until, "observes until")):
                if day is not None and day - today <= soon:
                    rows.append((day, self._row("expiring", one, _when(day, what, today))))
        for name in self.rules.profiles:
            last = self.rules.effective(name).observe_until
            if last is not None and last - today <= soon:
                place = self.origins.of_profile(name, "observe_until")
                owner = self.rules.effective(name).owner
                row = Row("expiring", name, place, (name,), owner, _when(last, "observes until", today))
                rows.append((last, row))
        yield from (row for _, row in sorted(rows, key=lambda one: (one[0], one[1].what)))

    def ownerless(self) -> Iterator[Row]:
        profiles = [f"{PROFILES}/{name}.yaml" for name in self.rules.profiles]
        for path in (ORGANISATION, *self.rules.source.below(GROUPS), *profiles):
            document = self.origins.document(path)
            if document is not None and "owner" not in document.root.keys:
                name = path.rpartition("/")[2].removesuffix(".yaml")
                named = (name,) if path.startswith(PROFILES) else ()
                yield Row("ownerless", name, f"{path}:1", named, None, "nobody can be asked about this file")

    def widest(self, subjects: list[_Subject]) -> Iterator[Row]:
        rows = []
        for one in subjects:
            points, reasons = openness(one.entries)
            if one.one.effect != "deny" and points:
                asked = " (asked for each time)" if one.one.effect == "ask" else ""
                rows.append((points, self._row("widest", one, f"{points}: {', '.join(reasons)}{asked}")))
        yield from (row for _, row in sorted(rows, key=lambda one: (-one[0], one[1].what, one[1].place)))

    def credentialed(self, subjects: list[_Subject]) -> Iterator[Row]:
        rows = []
        for one in subjects:
            names = dict.fromkeys(entry.credential for entry in one.entries if entry.credential is not None)
            hosts = dict.fromkeys(
                host for entry in one.entries if entry.credential is not None for host in entry.hosts
            )
            for name in names:
                rows.append((name, self._row("credentialed", one, f"{name}: {_some([*hosts])}")))
        yield from (row for _, row in sorted(rows, key=lambda one: (one[0], one[1].what)))

    def _use(self, one: _Subject) -> Use | None:
        if self.usage is None:
            return None
        uses = [self.usage.uses[profile, one.one.id] for profile in one.profiles]
        return Use(sum(use.times for use in uses), max((use.last for use in uses), default=""))

    def _row(self, section: Section, one: _Subject, detail: str) -> Row:
        profiles = one.profiles if one.one.origin == "profile" else ()  # the organisation's are everybody's
        return Row(section, one.one.id, one.one.place, profiles, self._owner(one), detail, self._use(one))

    def _owner(self, one: _Subject) -> str | None:
        """Whose the file is in which the rule stands, else whose the profiles are that name it."""
        document = self.origins.document(one.one.place.rpartition(":")[0])
        said = (document.root.fields or {}).get("owner") if document is not None else None
        if said is not None and isinstance(said.scalar, str):
            return said.scalar
        owners = dict.fromkeys(filter(None, (self.rules.effective(name).owner for name in one.profiles)))
        return _some([*owners]) if owners else None


def _subjects(rules: Rules) -> Iterator[_Subject]:
    entries: dict[tuple[str, str], list[EffectiveEntry]] = {}
    profiles: dict[tuple[str, str], dict[str, None]] = {}
    for profile in rules.profiles:
        mine: set[tuple[str, str]] = set()
        for entry in rules.effective(profile).entries:
            key = (entry.place, entry.id)
            if profile not in profiles.setdefault(key, {}) or key in mine:
                mine.add(key)
                profiles[key][profile] = None
                if next(iter(profiles[key])) == profile:
                    entries.setdefault(key, []).append(entry)
    for key, made in entries.items():
        yield _Subject(tuple(made), tuple(profiles[key]))


def _counts(fields: Mapping[str, Any]) -> bool:
    """Whether the record is one of a rule's own: look-ups and read connections name a rule on behalf of requests to come."""
    layer = fields.get("layer")
    if fields.get("verdict") == "deny" or layer == "request":
        return True
    return layer == "connection" and fields.get("treatment") in ("tunnel", "relay")


def _when(day: dt.date, what: str, today: dt.date) -> str:
    left = (day - today).days
    if left < 0:
        return f"{what} {day}, over for {-left} day{'s' if left < -1 else ''}"
    return f"{what} {day}, {'today' if left == 0 else f'{left} day{"s" if left > 1 else ""} left'}"


def _some(texts: list[str], most: int = 4) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
