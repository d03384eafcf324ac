"""The sidecar wiring as a daemon offers it: one sandbox, in the network namespace that the daemon itself lives in.

The rules were put in place, and the sockets made, by `egressd wire sidecar` before this process became its uid; no capability is
left here, so that the rules are not read but tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from egressd.control.sandboxes import SandboxListener
from egressd.control.voice import say
from egressd.control.wirings import NotWired, Order, Plain, WiringName
from egressd.wiring import drops, sidecar
from egressd.wiring.drops import Dropped
from egressd.wiring.errors import WiringError
from egressd.wiring.namespace import Listener
from egressd.wiring.ruleset import Family
from egressd.wiring.tables import FAMILIES

_HINT = "run egressd by `egressd wire sidecar --uid UID -- egressd serve`, with CAP_NET_ADMIN, CAP_SETUID and CAP_SETGID"


class SidecarWiring:
    """The sandbox beside this daemon. `listeners` are the sockets that this process was given (`wiring.inherited`)."""

    name: WiringName = "sidecar"

    def __init__(self, listeners: Sequence[Listener]) -> None:
        """Nothing is tried before `begin`."""
        self._listeners = listeners
        self._beside: Beside | None = None

    async def begin(self) -> None:
        """See that there is something to listen on and that the rules are at work; raises WiringError."""
        if not {"transparent", "dns-udp", "dns-tcp"} <= {each.kind for each in self._listeners}:
            raise WiringError("LISTEN_FDS", "this process was given no sockets to listen on", _HINT)
        if problems := await self.look():
            raise WiringError("wire sidecar", "; ".join(problems), _HINT)

    async def look(self) -> list[str]:
        """Return what is not at work now; to put it back is not in this process's power. Never raises."""
        tried = await asyncio.gather(*(asyncio.to_thread(_tried, family) for family in FAMILIES))
        return [problem for problem in tried if problem is not None]

    def traces(self, order: Order) -> Mapping[str, str]:  # noqa: ARG002 -- as the protocol says
        """Nothing is made that outlives this process."""
        return {}

    async def make(self, order: Order) -> Beside:  # noqa: ARG002 -- there is but one place
        """Give the sandbox the listeners; raises NotWired while another has them."""
        if self._beside is not None and not self._beside.closed:
            raise NotWired("a sidecar has one sandbox, and it lives", "revoke it first", asked=True)
        if problems := await self.look():
            raise WiringError("wire sidecar", "; ".join(problems), _HINT)
        own = [SandboxListener(each.kind, each.family, each.socket.dup()) for each in self._listeners]
        self._beside = Beside(own, self._listeners)
        return self._beside

    async def sweep(self, traces: Mapping[str, str]) -> None:
        """Nothing is ever left."""

    async def end(self) -> None:
        """Close the sockets."""
        for listener in self._listeners:
            listener.socket.close()


class Beside(Plain):
    """The sandbox beside the daemon. `ours` are the sockets that all who are beside it one after the other meet."""

    closed = False

    def __init__(self, listeners: Sequence[SandboxListener], ours: Sequence[Listener]) -> None:
        """From here on what is dropped is dropped of its."""
        super().__init__(listeners)
        self._ours, self._before = ours, _dropped(ours)

    async def close(self) -> Dropped | None:
        """Make room for the next; what is sent until then waits in the sockets' queues, or is refused."""
        if self.closed:
            return None
        self.closed = True
        now = _dropped(self._ours)
        return now.since(self._before) if now is not None and self._before is not None else None


def _dropped(listeners: Sequence[Listener]) -> Dropped | None:
    try:
        return drops.dropped(listeners)
    except OSError as error:
        say(f"what the kernel drops at egressd's sockets cannot be read: {error.strerror}")
        return None


def _tried(family: Family) -> str | None:
    try:
        return sidecar.unproved(family)
    except OSError as error:
        return f"IPv{family}: {error}"
