"""The life of a sandbox in a daemon: creating → ready → ending → gone, in this order and never back.

Who it is does not change while it lives, and its id is nobody's afterwards. Whatever goes wrong on the way to `ready` leads to
`gone`: there is no state in which a sandbox is half there.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from egressd.control.keyring import Keyring
from egressd.control.sandboxes import SandboxState
from egressd.control.wirings import Wired, WiringName
from egressd.journal.record import Record, new_id
from egressd.wiring.spec import SandboxSpec

type Stage = Literal["creating", "ready", "ending", "gone"]
type Ending = Literal["revoked", "expired", "ended", "failed", "drained"]
"""Why a life is over: somebody ended it, its time was up, it ended by itself, it could not be made, or the daemon ended."""


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class Life:
    """One sandbox. Times are Unix seconds; `until` is the monotonic reading at which it expires."""

    id: str
    generation: int
    profile: str
    wiring: WiringName
    keyring: Keyring
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    expires: float | None = None
    until: float | None = None
    created: float = field(default_factory=time.time)
    stage: Stage = "creating"
    ending: Ending | None = None
    ended: float | None = None
    wired: Wired | None = None
    state: SandboxState | None = None
    """What its worker is given; None before there is anything to carry."""
    spec: SandboxSpec | None = None
    """What it was made of, where it was made on this host by `egressd run`."""
    made: asyncio.Event = field(default_factory=_set)
    """Not set while its wiring is being made, which is not interrupted."""
    timer: asyncio.TimerHandle | None = None
    over: asyncio.Task[None] | None = None
    """Ends it; set once."""

    @property
    def source(self) -> str | None:
        """The address that it comes from, once that is known."""
        return self.state.source if self.state is not None else None

    @property
    def policy(self) -> str:
        """The digest of what it lives under."""
        return self.keyring.policy.digest()

    @property
    def canary(self) -> str | None:
        """The profile that it lives under in place of its own, for its labels; None where that is its own."""
        under = self.keyring.policy.profile
        return under if under != self.profile else None

    def expired(self) -> bool:
        """Whether its time is up, by whichever clock says so first: the wall's may be set, the other may have slept."""
        if self.expires is None or self.until is None:
            return False
        return time.time() >= self.expires or time.monotonic() >= self.until

    def note(self, detail: str) -> dict[str, Any]:
        """Return the record of something that happened to it."""
        attempt_id = new_id()
        return Record(
            event="sandbox",
            sandbox=self.id,
            attempt_id=attempt_id,
            root_id=attempt_id,
            profile=self.canary or self.profile,
            policy=self.policy,
            labels=self.labels or None,
            traceparent=self.traceparent,
            source=self.source,
            detail=detail,
        ).as_dict()
