"""The gateway and the sidecar as a daemon offers them, over a kernel that only writes down."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar

import pytest

from egressd.control import gateway as offered
from egressd.control.gateway import GatewayWiring
from egressd.control.sidecar import SidecarWiring
from egressd.control.sources import SharedListeners
from egressd.control.wirings import NotWired, Order
from egressd.wiring import sidecar
from egressd.wiring.errors import WiringError
from egressd.wiring.gateway_rules import Binding
from egressd.wiring.namespace import Listener
from egressd.wiring.ruleset import Counted

MAC = "82:67:be:50:0c:8c"
BRIDGES = {"br0": ("a", "b"), "br1": ("c",)}


class Kernel:
    """Stands for `wiring.gateway.Gateway`."""

    made: ClassVar[dict[str, Kernel]] = {}

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.bridged = interface in BRIDGES
        self.bound: list[Binding] = [Binding("10.90.0.250")]
        self.problems: list[str] = []
        self.fails = False
        self.made[interface] = self

    def wire(self) -> list[str]:
        if self.fails:
            raise WiringError("iptables", "not there")
        return []

    def check(self) -> list[str]:
        found, self.problems = self.problems, []
        return found

    def ports(self) -> tuple[str, ...]:
        return BRIDGES.get(self.interface, ())

    def bindings(self) -> tuple[Binding, ...]:
        return tuple(self.bound)

    def bind(self, binding: Binding) -> None:
        self.bound.append(binding)

    def stop(self, source: str) -> None:
        if self.fails:
            raise WiringError("iptables", "not there")
        self.bound = [each for each in self.bound if each.source != source]

    def release(self, source: str, binding: Binding | None = None) -> Counted:
        if self.fails:
            raise WiringError("iptables", "not there")
        self.bound = [each for each in self.bound if each.source != source]
        return Counted(connections=3)

    def listeners(self) -> tuple[Listener, ...]:
        return ()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    Kernel.made = {}
    monkeypatch.setattr(offered, "Gateway", Kernel)
    monkeypatch.setattr(offered, "say", lambda text: None)
    return Kernel.made


def order(**place: Any) -> Order:
    return Order("sbx-1", 1, "p", **place)


def gateways(*names: str) -> tuple[GatewayWiring, list[SharedListeners]]:
    shared: list[SharedListeners] = []

    async def share(listeners: SharedListeners) -> None:
        shared.append(listeners)

    async def unshare(name: str) -> None:
        shared[:] = [each for each in shared if each.id != name]

    return GatewayWiring(names, share, unshare), shared


def test_a_predecessor_s_sources_are_let_go_before_anybody_is_heard(kernel: dict[str, Kernel]) -> None:
    wiring, shared = gateways("br0", "tap0")
    asyncio.run(wiring.begin())
    assert [each.bound for each in kernel.values()] == [[], []]
    assert [(each.id, each.interface) for each in shared] == [("gateway-br0", "br0"), ("gateway-tap0", "tap0")]  # fmt: skip
    asyncio.run(wiring.end())
    assert shared == []


@pytest.mark.parametrize(
    ("place", "interface", "binding"),
    [
        pytest.param({"mac": MAC, "port": "b"}, "br0", Binding("10.90.0.5", MAC, "b"), id="the port of a bridge"),
        pytest.param({"mac": MAC, "port": "c"}, "br1", Binding("10.90.0.5", MAC, "c"), id="the port of another"),
        pytest.param({"mac": MAC.upper(), "port": "a"}, "br0", Binding("10.90.0.5", MAC, "a"), id="a MAC address in capitals"),
        pytest.param({"port": "tap0"}, "tap0", Binding("10.90.0.5"), id="an interface of its own"),
    ],
)  # fmt: skip
def test_a_source_is_bound_where_it_is(
    kernel: dict[str, Kernel], place: dict[str, str], interface: str, binding: Binding
) -> None:
    wiring, _ = gateways("br0", "br1", "tap0")

    async def live() -> None:
        await wiring.begin()
        made = await wiring.make(order(source="10.90.0.5", **place))
        assert (made.source, made.interface) == ("10.90.0.5", interface)
        assert kernel[interface].bound == [binding]
        await made.close()
        await made.close()
        assert kernel[interface].bound == []

    asyncio.run(live())


@pytest.mark.parametrize(
    "place",
    [
        pytest.param({}, id="no source"),
        pytest.param({"source": "10.90.0.5"}, id="no port, and several interfaces"),
        pytest.param({"source": "10.90.0.5", "mac": MAC, "port": "eth0"}, id="a port of somebody else's"),
        pytest.param({"source": "10.90.0.5", "mac": MAC, "port": "br0"}, id="the bridge itself"),
        pytest.param({"source": "not-an-address", "mac": MAC, "port": "a"}, id="no address"),
        pytest.param({"source": "fd00::5", "mac": MAC, "port": "a"}, id="IPv6"),
        pytest.param({"source": "10.90.0.5", "mac": "01:00:5e:00:00:01", "port": "a"}, id="a group's MAC address"),
    ],
)  # fmt: skip
def test_what_cannot_be_bound_is_the_order_s_fault(kernel: dict[str, Kernel], place: dict[str, str]) -> None:
    wiring, _ = gateways("br0", "br1")
    with pytest.raises(NotWired) as refused:
        asyncio.run(wiring.make(order(**place)))
    assert refused.value.asked
    assert refused.value.hint


def test_what_is_missing_is_told_and_put_back(kernel: dict[str, Kernel]) -> None:
    wiring, _ = gateways("br0")
    kernel["br0"].problems = ["a rule"]
    assert asyncio.run(wiring.look()) == ["a rule"]
    assert asyncio.run(wiring.look()) == []
    kernel["br0"].problems, kernel["br0"].fails = ["a rule"], True
    assert asyncio.run(wiring.look()) == ["iptables: not there"]


def test_a_source_that_cannot_be_released_ends_nothing_else(kernel: dict[str, Kernel]) -> None:
    wiring, _ = gateways("br0")

    async def live() -> None:
        made = await wiring.make(order(source="10.90.0.5", mac=MAC, port="a"))
        kernel["br0"].fails = True
        assert await made.close() is None

    asyncio.run(live())


# the sidecar


def inherited(*kinds: str) -> list[Listener]:
    return [Listener(kind, 4, socket.socket()) for kind in kinds]  # type: ignore[arg-type]  # any kind


ALL = ("transparent", "dns-udp", "dns-tcp", "nflog")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[int, str | None]:
    """What trying the rules finds, by family."""
    found: dict[int, str | None] = {4: None, 6: None}
    monkeypatch.setattr(sidecar, "unproved", found.get)
    return found


def test_a_sidecar_has_one_sandbox_at_a_time(tried: dict[int, str | None]) -> None:
    wiring = SidecarWiring(inherited(*ALL))

    async def live() -> None:
        await wiring.begin()
        first = await wiring.make(order())
        with pytest.raises(NotWired, match="one sandbox"):
            await wiring.make(order())
        for listener in first.listeners:
            listener.socket.close()
        await first.close()
        second = await wiring.make(order())
        assert [each.kind for each in second.listeners] == list(ALL)
        assert all(each.socket.fileno() >= 0 for each in second.listeners)
        for listener in second.listeners:
            listener.socket.close()
        await wiring.end()

    asyncio.run(live())


def test_it_is_not_ready_where_the_rules_are_not_seen_at_work(tried: dict[int, str | None]) -> None:
    wiring = SidecarWiring(inherited(*ALL))
    tried[6] = "IPv6: a datagram that the rules refuse was not refused"

    async def live() -> None:
        assert await wiring.look() == [tried[6]]
        for step in (wiring.begin(), wiring.make(order())):
            with pytest.raises(WiringError, match="was not refused"):
                await step
        await wiring.end()

    asyncio.run(live())


def test_it_is_not_ready_without_sockets(tried: dict[int, str | None]) -> None:
    with pytest.raises(WiringError, match="no sockets"):
        asyncio.run(SidecarWiring(()).begin())
