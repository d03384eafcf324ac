"""The namespace wiring as a daemon offers it for containers that run already: their network namespaces are wired from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from egressd.control.sandboxes import SandboxListener
from egressd.control.voice import say
from egressd.control.wirings import NotWired, Order, Plain, WiringName
from egressd.wiring import container, occupants, target
from egressd.wiring.container import Container
from egressd.wiring.errors import WiringError
from egressd.wiring.occupants import Place
from egressd.wiring.ruleset import Counted

_HINT = "see docs/wirings.md, namespace"
_SECONDS = 20.0


class ContainerWiring:
    """Containers that were made without a network. `over` is told of one (by sandbox) that is a sandbox no more, and why."""

    name: WiringName = "namespace"

    def __init__(self, over: Callable[[str, str], None]) -> None:
        """Nothing is looked at before there is a sandbox."""
        self._over = over
        self._held: dict[Place, Attached] = {}

    async def begin(self) -> None:
        """Nothing is shared."""

    def traces(self, order: Order) -> Mapping[str, str]:
        """Where the rules are put: who has that place, told from whoever has its number or name later."""
        if order.pid is not None:
            return {"pid": str(order.pid), "started": target.started(order.pid)}
        return {"netns": order.netns} if order.netns is not None else {}

    async def make(self, order: Order) -> Attached:
        """Wire the container of an order; raises NotWired, WiringError."""
        if order.pid is None and order.netns is None:
            raise NotWired(
                "a sandbox of the wiring namespace is made by `egressd run`, or is a container that runs already",
                "name the container: its pid, or its netns",
                asked=True,
            )
        try:
            made = await Container.make(order.pid, order.netns, timeout=_SECONDS)
        except ValueError as error:
            raise NotWired(str(error), _HINT, asked=True) from None
        attached = Attached(made, order.id, self)
        self._held[made.place] = attached
        attached.watch()
        return attached

    def lose(self, sandbox: str, why: str) -> None:
        """A container is a sandbox no more."""
        self._over(sandbox, why)

    def forget(self, place: Place) -> None:
        """It is looked at no more."""
        self._held.pop(place, None)

    async def sweep(self, traces: Mapping[str, str]) -> None:
        """Take the rules of a killed predecessor away, where their place is still what it was. Raises WiringError."""
        pid = traces.get("pid")
        if pid is not None and (not pid.isdigit() or target.started(int(pid)) != traces.get("started")):
            return  # it has ended, and its network with it
        try:
            found = target.find(int(pid) if pid is not None else None, traces.get("netns"))
        except ValueError:
            return
        try:
            await container.release(found)
        finally:
            found.close()

    async def look(self) -> list[str]:
        """End what is a sandbox no more; nothing is shared that could be out of place. Raises WiringError."""
        if self._held:
            census = await asyncio.to_thread(occupants.census)
            for attached in tuple(self._held.values()):
                if (why := attached.container.trouble(census)) is not None:
                    self.lose(attached.sandbox, why)
        return []

    async def end(self) -> None:
        """Nothing is shared."""


class Attached(Plain):
    """A container as a sandbox."""

    def __init__(self, made: Container, sandbox: str, wiring: ContainerWiring) -> None:
        """From here on it is looked at."""
        super().__init__([SandboxListener(each.kind, each.family, each.socket) for each in made.listeners])
        self.container, self.sandbox, self._wiring = made, sandbox, wiring
        self._place = made.place
        self._gone: asyncio.Future[None] | None = None
        self._closed = False

    def watch(self) -> None:
        """Hear of the container's end as soon as the kernel says so."""
        self._gone = self.container.gone()
        self._gone.add_done_callback(self._ended)

    def _ended(self, gone: asyncio.Future[None]) -> None:
        if not gone.cancelled():
            self._wiring.lose(self.sandbox, "the container has ended")

    async def halt(self, why: str) -> None:  # noqa: ARG002 -- as the protocol says
        """Have nothing new sent by the container."""
        try:
            await self.container.end()
        except WiringError as error:
            say(f"{self.sandbox}: its container still sends, to nobody: {error}")

    async def close(self) -> Counted | None:
        """Take everything out of the container's network; what the kernel counted by then."""
        if self._closed:
            return None
        self._closed = True
        self._wiring.forget(self._place)
        if self._gone is not None:
            self._gone.cancel()
        counted = None
        try:
            counted = await self.container.counted()
        except WiringError as error:
            say(f"{self.sandbox}: the kernel's counts could not be read: {error}")
        try:
            await self.container.destroy()
        except WiringError as error:
            say(f"{self.sandbox}: {error}")
        return counted
