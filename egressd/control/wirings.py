"""What a wiring is to the daemon: how a sandbox's packets get to a worker, from its making to the last trace of it.

The daemon asks a `Wiring` for each sandbox that it is to make (`make`), has what comes of it carried (`Supervisor.add`), and
closes it when the sandbox ends, whatever ended it. What outlives the daemon's own process (packet rules, files) a wiring names
in `traces` before it makes it; the daemon keeps those on disk, and hands them to `sweep` when a predecessor was killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from egressd.control.sandboxes import SandboxListener
from egressd.wiring.drops import Dropped
from egressd.wiring.ruleset import Counted

type WiringName = Literal["namespace", "sidecar", "gateway", "explicit"]


class NotWired(Exception):
    """A sandbox could not be wired; `hint` says what a person can do. `asked` says that the order is at fault, not the host."""

    def __init__(self, text: str, hint: str = "", *, asked: bool = False) -> None:
        super().__init__(text)
        self.hint, self.asked = hint, asked


@dataclass(frozen=True, slots=True)
class Order:
    """A sandbox that is to be wired.

    `id` was never anybody's; `generation` is greater than that of every sandbox before it, restarts included: state that
    outlives a sandbox is keyed by it, never by an address. `source` is the address that it will come from, where that is known;
    behind a bridge `mac` and `port` say where that address belongs; where there are several interfaces, `port` names one too.
    `place` is where it is, as its caller says: a process of its network namespace (`pid`), or the namespace's path.
    """

    id: str
    generation: int
    profile: str
    labels: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    mac: str | None = None
    port: str | None = None
    pid: int | None = None
    netns: str | None = None


class Wired(Protocol):
    """One sandbox's wiring, made. The daemon closes `listeners` itself, once the sandbox is gone."""

    @property
    def listeners(self) -> Sequence[SandboxListener]:
        """Its own listeners; none where it comes by shared ones."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What its clients need to find egressd; shown once, to who made the sandbox, and kept nowhere."""

    @property
    def token(self) -> str | None:
        """The SHA-256 (hex) of what it proves itself with at shared listeners."""

    @property
    def source(self) -> str | None:
        """The address that it comes from, in normal form: nobody else's while it lives."""

    @property
    def interface(self) -> str:
        """The interface at which that address means this sandbox, as in `messages.Serve`."""

    @property
    def answers(self) -> Literal["synthetic", "self"]:
        """What an allowed name leads to, as in `messages.Serve`."""

    @property
    def own(self) -> tuple[str, ...]:
        """egressd's addresses to it, as in `messages.Serve`."""

    async def halt(self, why: str) -> None:
        """Keep it from sending, where that is in the wiring's power; returns at once. The worker cuts its flows meanwhile."""

    async def close(self) -> Counted | Dropped | None:
        """Undo everything; returns what the kernel counted, None where it counts nothing. Never raises, may be called again.

        Where rules that count cannot be read, what was dropped at our sockets is all that is known.
        """


class Wiring(Protocol):
    """A kind of wiring that the daemon offers."""

    @property
    def name(self) -> WiringName:
        """What an order asks for it by."""

    async def begin(self) -> None:
        """Make what all its sandboxes share; raises WiringError."""

    def traces(self, order: Order) -> Mapping[str, str]:
        """Name what making this one may leave behind if this process is killed; kept on disk before `make`."""

    async def make(self, order: Order) -> Wired:
        """Wire a sandbox, or leave nothing behind; raises NotWired, WiringError."""

    async def sweep(self, traces: Mapping[str, str]) -> None:
        """Undo what a killed predecessor left of a sandbox; what is not there is no problem. Raises WiringError."""

    async def look(self) -> Sequence[str]:
        """Return what all its sandboxes rely on and was not in place, for people; asked again and again.

        What can be put back is put back.
        """

    async def end(self) -> None:
        """Close what all its sandboxes share, when none is left."""


@dataclass(slots=True)
class Plain:
    """A `Wired` of listeners, a token or a source alone, with nothing to undo."""

    listeners: Sequence[SandboxListener] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    source: str | None = None
    interface: str = ""
    answers: Literal["synthetic", "self"] = "synthetic"
    own: tuple[str, ...] = ()

    async def halt(self, why: str) -> None:
        """Nothing can be kept from sending: it meets closed listeners."""

    async def close(self) -> Counted | Dropped | None:
        """Nothing was made."""
        return None
