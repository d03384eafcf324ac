"""The effective policy of one sandbox: flat, resolved entries, the form in which policy travels from control to worker.

`rulefiles` makes it from a profile, its services and the organisation file; `compile` makes a `CompiledPolicy` of it.
It is plain data in normal form (names as `parse_pattern` prints them, requests as written, networks without host bits), so that
its canonical JSON has a digest that stands for the policy in every record.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import weakref
from collections.abc import Generator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from egressd.policy.bodies import Conditions

Effect = Literal["allow", "deny", "ask"]
Scheme = Literal["https", "http"]
Treatment = Literal["inspect", "tunnel", "relay"]
Mode = Literal["enforce", "observe"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rate(_Frozen):
    """A token bucket: `amount` units per `seconds`; bytes where the limit counts bytes."""

    amount: int = Field(gt=0)
    seconds: int = Field(gt=0)


class EntryLimits(_Frozen):
    """Limits of one entry or of the whole profile; None means no limit of that kind."""

    requests: Rate | None = None
    upload: Rate | None = None
    download: Rate | None = None
    upload_per_host: Rate | None = None
    download_per_host: Rate | None = None
    new_hosts: Rate | None = None
    names: Rate | None = None
    new_connections: Rate | None = None
    connections: int | None = Field(default=None, gt=0)


class EffectiveEntry(_Frozen):
    """One rule after resolution; `body` is what the body of every request of it must be (`bodies`).

    `place` is `file:line` of the entry in the profile or organisation file; `via` that of the service or list it came from.
    Exactly one of `hosts`, `public_web`, or `addresses` alone selects the destination; `addresses` beside `hosts` confines where
    the hosts may resolve. `ports` is filled in (443 for https, 80 for http where the file says nothing), but for a
    deny that names none: it binds every port and scheme. `requests` empty on an inspected allow means `GET,HEAD /**`, on a
    deny everything. Until `observe_until`, a deny in mode observe only notes what it would deny, and from then on it denies; an
    allow in mode observe stands in for the default deny, noted as such, and is absent from then on.
    """

    id: str
    place: str
    effect: Effect
    origin: Literal["profile", "organisation"] = "profile"
    via: str | None = None
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    public_web: bool = False
    schemes: tuple[Scheme, ...] = ("https",)
    ports: tuple[int, ...] = (443,)
    treatment: Treatment = "inspect"
    requests: tuple[str, ...] = ()
    body: Conditions = ()
    credential: str | None = None
    limits: EntryLimits = EntryLimits()
    expires: dt.date | None = None
    mode: Mode = "enforce"
    observe_until: dt.date | None = None
    because: str | None = None
    approvers: tuple[str, ...] = ()


class EffectivePolicy(_Frozen):
    """Everything that binds one sandbox, in file order (organisation entries first)."""

    schema_version: Literal[1] = 1
    profile: str
    owner: str | None = None
    mode: Mode = "enforce"
    observe_until: dt.date | None = None
    entries: tuple[EffectiveEntry, ...] = ()
    limits: EntryLimits = EntryLimits()

    def enforced(self) -> EffectivePolicy:
        """Return the policy as if nothing of it only observed: denials deny, and an allow that observes is not there."""
        entries = tuple(
            entry.model_copy(update={"mode": "enforce", "observe_until": None})
            for entry in self.entries
            if entry.mode == "enforce" or entry.effect == "deny"
        )
        return self.model_copy(update={"mode": "enforce", "observe_until": None, "entries": entries})

    def digest(self) -> str:
        """Return the first 16 hex digits of the SHA-256 of the canonical JSON: the policy's name in records."""
        known = _DIGESTS.get(id(self))
        if known is None:
            known = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
            _DIGESTS[id(self)] = known
            weakref.finalize(self, _DIGESTS.pop, id(self), None).atexit = False
        return known

    def lines(self) -> bytes:
        """Return the policy as it travels: its JSON without entries on a line, then each entry's; `from_lines` reads it."""
        head = self.model_dump_json(exclude={"entries"})
        return "\n".join((head, *(entry.model_dump_json() for entry in self.entries))).encode()


_DIGESTS: dict[int, str] = {}
"""The digests of policies that live, by `id`: a large one is asked for its own at every record about it."""


def from_lines(payload: bytes) -> Generator[None, None, EffectivePolicy]:
    """Read what `EffectivePolicy.lines` wrote, a step for each entry; ValueError for anything else."""
    head, *rest = payload.split(b"\n")
    entries = []
    for line in rest:
        entries.append(EffectiveEntry.model_validate_json(line))
        yield
    policy = EffectivePolicy.model_validate_json(head)
    if policy.entries:
        raise ValueError("entries stand on lines of their own")
    return policy.model_copy(update={"entries": tuple(entries)})
