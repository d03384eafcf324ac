"""Who may approve: people and their groups, and by what each is known.

A person is known by a uid on the control socket, by the name in a client certificate over TLS, or by a token of his own. What
somebody merely says of himself is never enough: two people are two only where each has proved who he is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from egressd.rulefiles.problems import Problems
from egressd.rulefiles.yaml import load_model

MOST: Final = 1_000

type _Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PersonEntry(_Section):
    """One person: the groups, and by what he is known; one of the three at least."""

    groups: list[_Word] = Field(default_factory=list, max_length=100)
    uid: int | None = Field(default=None, ge=0, lt=2**32 - 1)
    certificate: str | None = Field(default=None, min_length=1, max_length=128)
    token_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class PeopleFile(_Section):
    """The file of `approvals.people`."""

    schema_version: Literal[1] = Field(alias="schema")
    people: dict[_Word, PersonEntry] = Field(min_length=1, max_length=MOST)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the API has found out: in words for a record, and by what he can be known. `token` is what he has shown."""

    told: str
    uid: int | None = None
    certificate: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody of the file."""

    name: str
    groups: frozenset[str]

    def is_one_of(self, wanted: Iterable[str]) -> bool:
        """Whether a rule's `approvers` mean this person, by name or by group."""
        return any(word == self.name or word in self.groups for word in wanted)


class BadPeople(Exception):
    """The file cannot be used; its text says why, with places."""


class People:
    """Those of one file; where there is none, nobody."""

    def __init__(self, file: PeopleFile | None = None) -> None:
        """Raises BadPeople where two cannot be told apart, or one cannot be known."""
        entries = dict(file.people) if file is not None else {}
        for name, entry in entries.items():
            if entry.uid is None and entry.certificate is None and entry.token_sha256 is None:
                raise BadPeople(f"{name}: by what is he known? give a uid, a certificate or a token_sha256")
        known = [("uid", entry.uid) for entry in entries.values() if entry.uid is not None]
        names = [
            ("certificate", entry.certificate) for entry in entries.values() if entry.certificate is not None
        ]
        tokens = [
            ("token_sha256", entry.token_sha256)
            for entry in entries.values()
            if entry.token_sha256 is not None
        ]
        for (kind, _), times in Counter[tuple[str, object]]([*known, *names, *tokens]).items():
            if times > 1:
                raise BadPeople(f"two people have the same {kind}, so nobody could tell them apart")
        self._entries = entries

    def __bool__(self) -> bool:
        return bool(self._entries)

    def who(self, caller: Caller) -> Person | str | None:
        """Return the person that a caller is, None where he is nobody of the file; a text where what he shows is wrong.

        A token that is shown decides alone: whoever shows another's is not let in as himself.
        """
        if caller.token is not None:
            digest = hashlib.sha256(caller.token.encode("utf-8", "surrogateescape")).hexdigest()
            found = [
                name
                for name, entry in self._entries.items()
                if entry.token_sha256 is not None and hmac.compare_digest(entry.token_sha256, digest)
            ]
            return self._person(found[0]) if found else "the token is nobody's of approvals.people"
        for name, entry in self._entries.items():
            by_uid = caller.uid is not None and caller.uid == entry.uid
            if by_uid or (caller.certificate is not None and caller.certificate == entry.certificate):
                return self._person(name)
        return None

    def _person(self, name: str) -> Person:
        return Person(name, frozenset(self._entries[name].groups))


def read_people(path: Path | None) -> People:
    """Return the people of a file, nobody where there is no such key; raises BadPeople."""
    if path is None:
        return People()
    loaded = load_model(path, PeopleFile)
    if isinstance(loaded, Problems):
        raise BadPeople(str(loaded))
    try:
        return People(loaded)
    except BadPeople as bad:
        raise BadPeople(f"{path}: {bad}") from None
