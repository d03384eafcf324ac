"""The gateway wiring as a daemon offers it: shared listeners at each interface, and a bound source for each sandbox behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from egressd.control.sandboxes import SandboxListener
from egressd.control.sources import SharedListeners, normal_source
from egressd.control.voice import say
from egressd.control.wirings import NotWired, Order, Plain, WiringName
from egressd.wiring.errors import WiringError
from egressd.wiring.gateway import Gateway
from egressd.wiring.gateway_rules import Binding
from egressd.wiring.ruleset import Counted

_HINT = "see `egressd wire gateway --check`"


class GatewayWiring:
    """Sandboxes behind interfaces. `share` and `unshare` are the supervisor's, who owns the listeners from then on."""

    name: WiringName = "gateway"

    def __init__(
        self,
        interfaces: Sequence[str],
        share: Callable[[SharedListeners], Awaitable[None]],
        unshare: Callable[[str], Awaitable[None]],
    ) -> None:
        """ValueError for what cannot be the name of one interface."""
        self._gateways = {name: Gateway(name) for name in interfaces}
        self._share = share
        self._unshare = unshare
        self._changing = asyncio.Lock()  # what is made from what was read must still be true

    async def begin(self) -> None:
        """Put the rules in place, let nobody in whom a predecessor knew, and listen; raises WiringError."""
        for name, gateway in self._gateways.items():
            for note in await asyncio.to_thread(_begin, gateway):
                say(note)
            made = await asyncio.to_thread(gateway.listeners)
            listeners = [SandboxListener(each.kind, each.family, each.socket) for each in made]
            await self._share(SharedListeners(_share(name), listeners, name))

    async def look(self) -> list[str]:
        """Return what is not in place, after putting back what was missing; never raises."""
        found: list[str] = []
        async with self._changing:
            for gateway in self._gateways.values():
                found += await asyncio.to_thread(_look, gateway)
        return found

    def traces(self, order: Order) -> Mapping[str, str]:
        """The binding, by interface and source: its rule, neighbours and flows go with it."""
        if order.source is None:
            return {}
        return {"source": order.source} | ({"port": order.port} if order.port is not None else {})

    async def make(self, order: Order) -> BoundSource:
        """Bind the source of an order, and nothing of who had it before; raises NotWired, WiringError."""
        if order.source is None:
            raise NotWired(
                "a sandbox behind a gateway needs its source address", "name it: source", asked=True
            )
        try:
            source = normal_source(order.source)
            async with self._changing:
                gateway, port = await asyncio.to_thread(self._place, order.port)
                mac = order.mac.lower() if order.mac is not None else None
                binding = Binding(source, mac, port)
                await asyncio.to_thread(gateway.bind, binding)
        except ValueError as error:
            raise NotWired(str(error), "see docs/wirings.md, gateway", asked=True) from None
        return BoundSource(source=source, interface=gateway.interface, wiring=self, binding=binding)

    def _place(self, port: str | None) -> tuple[Gateway, str | None]:
        """Return the gateway that a port belongs to, and the port if it is one of a bridge; raises ValueError."""
        if port in self._gateways and not self._gateways[port].bridged:
            return self._gateways[port], None
        for gateway in self._gateways.values():
            if port is not None and port in gateway.ports():
                return gateway, port
        if port is None and len(self._gateways) == 1:
            return next(iter(self._gateways.values())), None
        names = ", ".join(self._gateways)
        raise ValueError(f"{port or 'a source without a port'} is at none of the interfaces {names}")

    async def sweep(self, traces: Mapping[str, str]) -> None:
        """Nothing is left: `begin` has released every source that a predecessor bound."""

    async def stop(self, interface: str, source: str) -> None:
        """Let a source in no longer; raises WiringError."""
        async with self._changing:
            await asyncio.to_thread(self._gateways[interface].stop, source)

    async def release(self, interface: str, binding: Binding) -> Counted | None:
        """Forget a source and its flows; what was counted of it. Raises WiringError."""
        async with self._changing:
            gateway = self._gateways[interface]
            return await asyncio.to_thread(gateway.release, binding.source, binding)

    async def end(self) -> None:
        """Close the listeners. The rules stay: without them the sandboxes' packets would be the host's to judge."""
        for name in self._gateways:
            await self._unshare(_share(name))


@dataclass(slots=True)
class BoundSource(Plain):
    """A sandbox behind a gateway: a source, bound until `close`."""

    wiring: GatewayWiring | None = None
    binding: Binding | None = None

    async def halt(self, why: str) -> None:
        """Let nothing of it in any more."""
        if self.wiring is not None and self.source is not None:
            try:
                await self.wiring.stop(self.interface, self.source)
            except (WiringError, OSError) as error:
                say(
                    f"the source {self.source} of a sandbox that ends ({why}) still sends, to nobody: {error}"
                )

    async def close(self) -> Counted | None:
        """Release the source, once; what cannot be released is told, and gone at the next start."""
        wiring, self.wiring = self.wiring, None
        if wiring is not None and self.binding is not None:
            try:
                counted = await wiring.release(self.interface, self.binding)
                if counted is None:
                    say(f"what {self.source} sent was not counted: rules of this wiring were gone meanwhile")
                return counted
            except (WiringError, OSError) as error:
                say(f"the source {self.source} of a sandbox that is gone is still bound: {error}")
        return None


def _share(interface: str) -> str:
    return f"gateway-{interface}"


def _begin(gateway: Gateway) -> list[str]:
    notes = gateway.wire()
    for binding in gateway.bindings():
        gateway.release(binding.source)
    if problems := gateway.check():
        raise WiringError(gateway.interface, "; ".join(problems), _HINT)
    return notes


def _look(gateway: Gateway) -> list[str]:
    """What was missing, put back or not: nobody knows what went by meanwhile."""
    try:
        problems = gateway.check()
        if problems:
            gateway.wire()
    except (WiringError, OSError) as error:
        return [str(error)]
    return problems
