"""The gateway wiring as a daemon offers it: one interface, shared listeners, and a bound source for each sandbox behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from egressd.control.sandboxes import SandboxListener
from egressd.control.sources import SharedListeners, normal_source
from egressd.control.voice import say
from egressd.control.wirings import NotWired, Order, Plain, WiringName
from egressd.wiring.errors import WiringError
from egressd.wiring.gateway import Gateway
from egressd.wiring.gateway_rules import Binding
from egressd.wiring.ruleset import Counted


class GatewayWiring:
    """Sandboxes behind `interface`. `share` and `unshare` are the supervisor's, who owns the listeners from then on."""

    name: WiringName = "gateway"

    def __init__(
        self,
        interface: str,
        share: Callable[[SharedListeners], Awaitable[None]],
        unshare: Callable[[str], Awaitable[None]],
    ) -> None:
        """ValueError for what cannot be the name of one interface."""
        self._gateway = Gateway(interface)
        self._share = share
        self._unshare = unshare
        self._id = f"gateway-{interface}"
        self._changing = asyncio.Lock()  # what is made from what was read must still be true

    @property
    def interface(self) -> str:
        """The interface that the sandboxes are behind."""
        return self._gateway.interface

    async def begin(self) -> None:
        """Put the rules in place, let nobody in whom a predecessor knew, and listen; raises WiringError."""
        for note in await asyncio.to_thread(self._begin):
            say(note)
        listeners = await asyncio.to_thread(self._gateway.listeners)
        shared = [SandboxListener(each.kind, each.family, each.socket) for each in listeners]
        await self._share(SharedListeners(self._id, shared, self.interface))

    def _begin(self) -> list[str]:
        notes = self._gateway.wire()
        for binding in self._gateway.bindings():
            self._gateway.release(binding.source)
        if problems := self._gateway.check():
            raise WiringError(
                self.interface, "; ".join(problems), "see `iptables-save`; `egressd wire gateway --check`"
            )
        return notes

    async def problems(self) -> list[str]:
        """What is not in place now, for readiness: while it is, nothing is promised. Never raises."""
        try:
            return await asyncio.to_thread(self._gateway.check)
        except (WiringError, OSError) as error:
            return [str(error)]

    def traces(self, order: Order) -> Mapping[str, str]:
        """The binding, by its source: rules, neighbours and flows go with it."""
        return {"source": order.source} if order.source is not None else {}

    async def make(self, order: Order) -> BoundSource:
        """Bind the source of an order, and nothing of who had it before; raises NotWired, WiringError."""
        if order.source is None:
            raise NotWired(
                "a sandbox behind a gateway needs its source address", "name it: source", asked=True
            )
        try:
            source = normal_source(order.source)
            async with self._changing:
                await asyncio.to_thread(self._gateway.bind, Binding(source, order.mac, order.port))
        except ValueError as error:
            raise NotWired(str(error), "see docs/wirings.md, gateway", asked=True) from None
        return BoundSource(source=source, interface=self.interface, wiring=self)

    async def sweep(self, traces: Mapping[str, str]) -> None:
        """Release what a predecessor bound; raises WiringError."""
        if "source" in traces:
            await self.release(traces["source"])

    async def release(self, source: str) -> None:
        """Let a source in no longer, and forget its flows; raises WiringError."""
        async with self._changing:
            await asyncio.to_thread(self._gateway.release, source)

    async def end(self) -> None:
        """Close the listeners. The rules stay: without them the sandboxes' packets would be the host's to judge."""
        await self._unshare(self._id)


@dataclass(slots=True)
class BoundSource(Plain):
    """A sandbox behind the gateway: a source, bound until `close`."""

    wiring: GatewayWiring | None = None

    async def halt(self, why: str) -> None:  # noqa: ARG002 -- as the protocol says
        """Let nothing in any more: what comes from now on is nobody's."""
        await self.close()

    async def close(self) -> Counted | None:
        """Release the source, once; what cannot be released now is told, and again at the next start."""
        wiring, self.wiring = self.wiring, None
        if wiring is not None and self.source is not None:
            try:
                await wiring.release(self.source)
            except (WiringError, OSError) as error:
                self.wiring = wiring
                say(f"the source {self.source} of a sandbox that is gone is still bound: {error}")
        return None
