"""Entries as their file has them, with what each came to: what is judged of several rules together points into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from egressd.policy.effective import Effect, EffectiveEntry
from egressd.policy.model import Additions, GroupFile, OrganisationFile, ProfileFile
from egressd.rulefiles.document import Step
from egressd.rulefiles.entries import AnyEntry, Reader
from egressd.rulefiles.problems import Code

_EFFECTS: tuple[Effect, ...] = ("deny", "allow", "ask")

type Holder = ProfileFile | GroupFile | OrganisationFile | Additions


@dataclass(frozen=True, slots=True)
class Written:
    """One entry: the steps to it in its file, what it says, and the effective entries that it came to."""

    effect: Effect
    where: tuple[Step, ...]
    said: AnyEntry
    entries: list[EffectiveEntry]
    reader: Reader

    @property
    def id(self) -> str | None:
        """The rule's id; None where the entry has a problem."""
        return self.entries[0].id if self.entries else self.said.id

    @property
    def line(self) -> int:
        """The line where it begins."""
        return self.reader.document.place(*self.where).line

    def note(self, step: Step | None, code: Code, message: str, hint: str = "", *, key: bool = False) -> None:
        """Add a problem with the entry, or with one key of it."""
        steps = self.where if step is None else (*self.where, step)
        self.reader.note(steps, code, message, hint, key=key)


def written(reader: Reader, model: Holder, below: tuple[Step, ...] = ()) -> Iterator[Written]:
    """Yield the entries in the order in which the file has them; `below` are the steps to where `model` stands."""
    found: list[tuple[Effect, tuple[Step, ...], AnyEntry]] = []
    for effect in _EFFECTS:
        said: list[AnyEntry] = list(getattr(model, effect, ()))
        found += [(effect, (*below, effect, index), entry) for index, entry in enumerate(said)]
    found.sort(key=lambda one: reader.document.place(*one[1]))
    for effect, where, entry in found:
        yield Written(effect, where, entry, reader.read(effect, entry, where), reader)
