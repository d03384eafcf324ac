"""What a profile is made of: its own entries, the groups it names, and the profile that it extends.

A profile that extends another has all of its rules and limits. It may tighten one by an entry with the same id, leave one out
(`without`), and deny more; whatever goes beyond stands below `adds`, where a reviewer looks. Denials are never lost on the way.
Leaving a rule out can open a wider one that it hid (an `ask` before an `allow`): that is refused, for a `deny` says it safely.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from egressd.policy.effective import EffectiveEntry, EntryLimits
from egressd.policy.model import GroupFile, ProfileFile
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.entries import Library, Reader, check_limits
from egressd.rulefiles.exposure import beside, exposed, overtaken, spells_paths
from egressd.rulefiles.narrowing import Envelope, is_tighter, tightest
from egressd.rulefiles.problems import Code, Findings
from egressd.rulefiles.shape import did_you_mean
from egressd.rulefiles.written import Written, written

_BEYOND = "what goes beyond the extended profile stands below `adds`"
_DENY = "leave it as it is and `deny` what is not wanted"


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that profiles share."""

    model: GroupFile
    written: tuple[Written, ...]


@dataclass(frozen=True, slots=True)
class Composed:
    """A profile with all that it takes from elsewhere, in the order in which its rules stand; `sound` if nothing was wrong."""

    model: ProfileFile
    reader: Reader
    written: tuple[Written, ...]
    groups: frozenset[str]
    limits: EntryLimits
    sound: bool = True


def read_group(
    model: GroupFile,
    document: Document,
    library: Library,
    above: Iterable[EffectiveEntry],
    findings: Findings,
) -> Group:
    """Return a group whose entries have been read once, for every profile that names it."""
    reader = Reader(document, library, findings)
    reader.ids = {entry.id: entry.place for entry in above}
    return Group(model, tuple(written(reader, model)))


def compose(
    model: ProfileFile,
    document: Document,
    library: Library,
    above: Iterable[EffectiveEntry],
    groups: Mapping[str, Group],
    base: Composed | None,
    findings: Findings,
) -> Composed:
    """Return the profile put together, `base` being what it extends; problems are added to `findings`."""
    before = findings.count
    reader = Reader(document, library, findings)
    reader.ids = {entry.id: entry.place for entry in above}
    own = list(written(reader, model))
    added = list(written(reader, model.adds, ("adds",))) if model.adds is not None else []
    check_limits(model.limits, reader, ("limits",))
    limits = model.limits.resolved() if model.limits else EntryLimits()
    kept: list[Written] = []
    taken: frozenset[str] = frozenset()
    if base is not None:
        kept, own = _inherited(base, own, model, reader)
        limits, taken = _limits(limits, base, reader), base.groups
    else:
        for key in ("without", "adds"):
            if getattr(model, key) is not None:
                reader.note((key,), Code.NOT_TOGETHER, f"`{key}` without `extends`", key=True)
    shared = _shared(model, groups, taken, reader)
    entries = (*kept, *own, *added, *shared)
    _check_ids(entries, reader)
    named = taken | frozenset(model.groups or ())
    return Composed(model, reader, entries, named, limits, findings.count == before)


def _inherited(
    base: Composed, own: list[Written], model: ProfileFile, reader: Reader
) -> tuple[list[Written], list[Written]]:
    """Return what is left of the extended profile, tightened where this one says so, and the denials that are new."""
    theirs = {one.id: one for one in base.written}
    without = {name: index for index, name in enumerate(model.without or ())}
    for name, index in without.items():
        _check_left_out(name, theirs.get(name), base, (index, reader))
    tightened: dict[str | None, Written] = {}
    fresh: list[Written] = []
    for one in own:
        old = theirs.get(one.id)
        if one.effect == "deny":
            fresh.append(one)
        elif old is None or old.effect == "deny" or one.id in without:
            message = f"{base.model.profile} has no such rule: an entry here tightens the one with its id"
            one.note(None, Code.NOT_NARROWER, message, _BEYOND)
        else:
            tightened[one.id] = one
            _check_tightened(one, old)
    kept = [tightened.get(one.id, one) for one in base.written if one.id not in without]
    _check_exposed(base, kept, tightened, without, reader)
    return kept, fresh


def _check_left_out(name: str, old: Written | None, base: Composed, where: tuple[int, Reader]) -> None:
    index, reader = where
    steps: tuple[Step, ...] = ("without", index)
    if old is None:
        known = [one.id or "" for one in base.written]
        message = f"{base.model.profile} has no rule {name!r}{did_you_mean(name, known)}"
        reader.note(steps, Code.UNKNOWN_RULE, message)
    elif old.effect == "deny":
        message = f"{name!r} is a denial, and what extends a profile keeps them all"
        reader.note(steps, Code.NOT_NARROWER, message, "extend another profile, or write this one out")


def _check_tightened(one: Written, old: Written) -> None:
    if not one.entries or not old.entries:
        return
    wider = _wider(one, old)
    if wider is not None:
        place = old.entries[0].place
        one.note(None, Code.NOT_NARROWER, f"{one.id!r} goes beyond {place}: {wider}", _BEYOND)


def _wider(one: Written, old: Written) -> str | None:
    """Return in what an entry permits more than the one whose place it takes."""
    new, was = one.entries[0], old.entries[0]
    if was.effect == "ask" and new.effect == "allow":
        return "it allows what is asked for there"
    if was.effect == "ask" and was.approvers and not (new.approvers and {*new.approvers} <= {*was.approvers}):
        return "other people may approve it"
    if (name := is_tighter(new.limits, was.limits)) is not None:
        return f"its limit for {name} is wider, or missing"
    if (new.mode, was.mode) == ("enforce", "observe"):
        return "it allows what is only observed there"
    if new.mode == "observe" and (was.mode == "enforce" or _after(new.observe_until, was.observe_until)):
        return "it observes what is enforced there" if was.mode == "enforce" else "it observes for longer"
    if was.expires is not None and (new.expires is None or new.expires > was.expires):
        return f"it lasts longer than {was.expires}"
    if any(map(spells_paths, old.entries)) and not all(map(spells_paths, one.entries)):
        return "without a path spelled out, ambiguous ones would pass"
    return next(filter(None, (_beyond(entry, old.entries) for entry in one.entries)), None)


def _after(day: dt.date | None, other: dt.date | None) -> bool:
    return other is not None and (day is None or day > other)


def _beyond(entry: EffectiveEntry, old: Iterable[EffectiveEntry]) -> str | None:
    """Return what an entry reaches that those of the old ones do not which attach the same credential, or none as well."""
    alike = [other for other in old if other.credential == entry.credential]
    return Envelope(alike).excess(entry) if alike else "its credential is another"


def _check_exposed(
    base: Composed,
    kept: list[Written],
    tightened: Mapping[str | None, Written],
    without: Mapping[str, int],
    reader: Reader,
) -> None:
    """Refuse to take away, or to make more specific, what stands before or behind a rule that may be wider."""
    left = [(one, entry) for one in kept for entry in one.entries]
    order = {id(entry): index for index, entry in enumerate(e for one in base.written for e in one.entries)}
    for old in base.written:
        new = tightened.get(old.id)
        changed = old.id in without if new is None else _reach(new) != _reach(old)
        if old.effect == "deny" or not changed:
            continue
        rest = [entry for one, entry in left if one is not new and entry.effect != "deny"]
        if new is not None and _treatments(new) != _treatments(old):
            other, how = beside(old.entries, rest), "as another `treatment` it would decide beside"
        elif new is not None and (before := overtaken(old.entries, rest, order)) is not None:
            other, how = before, "more specific, it could decide before"
        else:
            other, how = exposed(old.entries, rest, order), "without it, or a part of it, this would decide:"
        if other is None:
            continue
        message = f"{old.id!r} ({old.entries[0].place}): {how} {other.id!r} ({other.place})"
        if new is None:
            reader.note(("without", without[old.id or ""]), Code.NOT_NARROWER, message, _DENY)
        else:
            new.note(None, Code.NOT_NARROWER, message, _DENY)


def _treatments(one: Written) -> set[str]:
    return {entry.treatment for entry in one.entries}


def _reach(one: Written) -> list[tuple[object, ...]]:
    """What decides whether the entry meets a request at all."""
    return [
        (e.hosts, e.addresses, e.public_web, e.schemes, e.ports, e.treatment, e.requests, e.expires)
        for e in one.entries
    ]


def _limits(own: EntryLimits, base: Composed, reader: Reader) -> EntryLimits:
    limits = tightest(own, base.limits)
    wide = is_tighter(limits, base.limits)
    if wide is not None:
        message = f"the limit for {wide} is wider than that of {base.model.profile}"
        reader.note(
            ("limits", wide), Code.NOT_NARROWER, message, "a profile may only tighten what it extends"
        )
    return limits


def _shared(
    model: ProfileFile, groups: Mapping[str, Group], taken: frozenset[str], reader: Reader
) -> list[Written]:
    found: list[Written] = []
    for index, name in enumerate(model.groups or ()):
        if name in taken or name in (model.groups or [])[:index]:
            message = f"the group {name!r} is here already"
            reader.note(("groups", index), Code.DUPLICATE_ITEM, message, "remove it")
        elif name in groups:
            found += groups[name].written
        elif name not in reader.library.group_names:
            message = f"there is no group {name!r}{did_you_mean(name, sorted(reader.library.group_names))}"
            reader.note(("groups", index), Code.UNKNOWN_GROUP, message, f"groups/{name}.yaml would be it")
    return found


def _check_ids(entries: Iterable[Written], reader: Reader) -> None:
    """Records name rules by id, so no two in one profile share one, wherever they come from."""
    first: dict[str, Written] = {}
    for one in entries:
        if one.id is None:
            continue
        other = first.setdefault(one.id, one)
        if other is one or other.reader is one.reader:
            continue  # in one file, the reader has said so
        own = one if one.reader is reader else other
        theirs = other if own is one else one
        place = theirs.entries[0].place if theirs.entries else theirs.reader.document.path
        own.note(None, Code.DUPLICATE_ID, f"the id {one.id!r} is taken ({place})", "give one of them another")
