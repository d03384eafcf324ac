from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

from egressd.gate import dialer as dialer_module
from egressd.gate.dialer import (
    Dialed,
    Dialer,
    DialFailed,
    OwnAddresses,
    connect,
    describe,
    interleave,
    is_own_address,
)
from egressd.gate.dns.upstream import ResolveFailed
from egressd.gate.permission import Unplaced
from egressd.policy.attempt import Address, Decision, Name
from egressd.policy.decide import permit_address
from egressd.policy.reasons import Reason
from tests.gate.dns.ground import policy

API: Name = ("api", "allowed", "test")
LOOP = IPv4Address("127.0.0.1")
OTHER = IPv4Address("127.0.0.2")
SIX = IPv6Address("::1")


@dataclass
class Resolver:
    """Answers in turn what it was given, and counts how often it was asked."""

    answers: list[tuple[Address, ...] | ResolveFailed | Exception]
    timeout: float = 0.5
    asked: list[Name] = field(default_factory=list)

    async def resolve(self, name: Name) -> tuple[Address, ...] | ResolveFailed:
        self.asked.append(name)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def nobody(_: Address) -> bool:
    return False


def anything(_: Address) -> Reason | None:
    return None


def dialer(
    *answers: tuple[Address, ...] | ResolveFailed | Exception,
    own: Callable[[Address], bool] = nobody,
    timeout: float = 5.0,
) -> Dialer:
    return Dialer(Resolver(list(answers)), timeout, own=own)


@asynccontextmanager
async def listening(*addresses: Address, port: int = 0) -> AsyncIterator[int]:
    """Listen on each address at one port."""
    socks: list[socket.socket] = []
    try:
        for address in addresses:
            sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
            socks.append(sock)
            sock.bind((str(address), port))
            sock.listen(16)
            port = sock.getsockname()[1]
        yield port
    finally:
        for sock in socks:
            sock.close()


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def close(dialed: Dialed | DialFailed) -> Address | DialFailed:
    if isinstance(dialed, DialFailed):
        return dialed
    dialed.sock.close()
    assert not isinstance(dialed.address, Unplaced)
    return dialed.address


# what is dialled


def test_a_name_is_dialled_at_its_checked_address() -> None:
    async def scenario() -> None:
        async with listening(LOOP) as port:
            dialed = await dialer((LOOP,)).dial(API, port, anything)
            assert isinstance(dialed, Dialed)
            with dialed.sock as sock:
                assert dialed.address == LOOP
                assert sock.getpeername() == ("127.0.0.1", port)
                assert not sock.getblocking()
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert not sock.get_inheritable()

    asyncio.run(scenario())


def test_ip_13_a_name_is_resolved_once_and_never_again() -> None:
    async def scenario() -> None:
        resolver = Resolver([(LOOP,), (OTHER,)])
        seen: list[Address] = []

        def permit(address: Address) -> Reason | None:
            seen.append(address)
            return None

        async with listening(LOOP) as port:
            assert close(await Dialer(resolver, 5, own=nobody).dial(API, port, permit)) == LOOP
        assert resolver.asked == [API]
        assert seen == [LOOP]

    asyncio.run(scenario())


def test_an_address_is_judged_as_a_resolved_one_is() -> None:
    async def scenario() -> None:
        resolver = Resolver([])
        async with listening(LOOP) as port:
            assert close(await Dialer(resolver, 5, own=nobody).dial(LOOP, port, anything)) == LOOP
        found = await Dialer(resolver, 5, own=nobody).dial(LOOP, 80, lambda _: Reason.FLOOR_LOOPBACK)
        assert isinstance(found, DialFailed)
        assert found.reason is Reason.FLOOR_LOOPBACK
        assert resolver.asked == []

    asyncio.run(scenario())


def test_refused_addresses_are_dropped_and_the_others_dialled() -> None:
    async def scenario() -> None:
        def permit(address: Address) -> Reason | None:
            return Reason.SPECIAL_ADDRESS if address == OTHER else None

        async with listening(LOOP) as port, listening(OTHER, port=port):
            assert close(await dialer((OTHER, LOOP)).dial(API, port, permit)) == LOOP

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["169.254.169.254"], Reason.FLOOR_METADATA),
        (["10.0.0.5", "169.254.169.254"], Reason.SPECIAL_ADDRESS),
        (["127.0.0.1"], Reason.FLOOR_LOOPBACK),
        (["0.0.0.0"], Reason.FLOOR_UNSPECIFIED),
        (["::ffff:169.254.169.254"], Reason.FLOOR_METADATA),
        (["64:ff9b::a9fe:a9fe"], Reason.FLOOR_METADATA),
        (["100.64.0.10"], Reason.SPECIAL_ADDRESS),
        (["198.18.1.0"], Reason.FLOOR_OWN_ADDRESS),
        (["fd00::1"], Reason.SPECIAL_ADDRESS),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_ip_12_a_name_that_leads_inside_is_not_dialled(addresses: list[str], reason: Reason) -> None:
    allowed = Decision("allow", Reason.RULE)
    rules = policy("api.allowed.test")

    async def scenario() -> None:
        found = await dialer(tuple(map(ip_address, addresses))).dial(
            API, 443, lambda address: permit_address(rules, allowed, address)
        )
        assert isinstance(found, DialFailed)
        assert found.reason is reason
        assert all(address in found.detail for address in addresses)

    asyncio.run(scenario())


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
def test_a_port_that_is_none_is_not_dialled(port: int) -> None:
    assert asyncio.run(dialer((LOOP,)).dial(API, port, anything)) == DialFailed(
        Reason.BAD_PORT, "a port that is none"
    )


def test_no_proxy_of_the_environment_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with listening(LOOP) as port, listening(LOOP) as proxy:
            for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
            dialed = await dialer((LOOP,)).dial(API, port, anything)
            assert isinstance(dialed, Dialed)
            with dialed.sock as sock:
                assert sock.getpeername()[1] == port

    asyncio.run(scenario())


def test_the_text_of_an_address_is_never_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the host's resolver was asked")

    monkeypatch.setattr(socket, "getaddrinfo", forbidden)

    async def scenario() -> None:
        async with listening(LOOP) as port:
            assert close(await dialer((LOOP,)).dial(API, port, anything)) == LOOP

    asyncio.run(scenario())


# failures


def test_a_failed_look_up_keeps_its_reason() -> None:
    failed = ResolveFailed(Reason.UPSTREAM_DNS, "NXDOMAIN")
    assert asyncio.run(dialer(failed).dial(API, 443, anything)) == DialFailed(Reason.UPSTREAM_DNS, "NXDOMAIN")
    assert asyncio.run(dialer(()).dial(API, 443, anything)) == DialFailed(
        Reason.UPSTREAM_DNS, "the name has no address"
    )


def test_a_closed_port_is_unreachable_and_says_refused() -> None:
    port = unused_port()
    found = asyncio.run(dialer((LOOP, OTHER)).dial(API, port, anything))
    assert found == DialFailed(
        Reason.UPSTREAM_UNREACHABLE, f"port {port}: 127.0.0.1 refused, 127.0.0.2 refused"
    )


def broken(*_: object) -> Reason | None:
    raise ZeroDivisionError


def broken_own(_: Address) -> bool:
    raise ZeroDivisionError


def test_law_1_whatever_raises_is_a_failed_dial_and_nothing_is_dialled() -> None:
    async def scenario() -> None:
        error = DialFailed(Reason.INTERNAL_ERROR, "ZeroDivisionError")
        async with listening(LOOP) as port:
            assert await dialer((LOOP,)).dial(API, port, broken) == error
            assert await dialer((LOOP,), own=broken_own).dial(API, port, anything) == error
            assert await dialer(ZeroDivisionError()).dial(API, port, anything) == error

    asyncio.run(scenario())


def test_a_resolver_that_never_returns_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Resolver):
        async def resolve(self, name: Name) -> tuple[Address, ...] | ResolveFailed:
            await asyncio.Event().wait()
            return ()

    monkeypatch.setattr(dialer_module, "SLACK", 0.01)
    found = asyncio.run(Dialer(Hanging([], timeout=0.02), 0.02, own=nobody).dial(API, 443, anything))
    assert isinstance(found, DialFailed)
    assert found.reason is Reason.UPSTREAM_TIMEOUT


# the race: which address wins is scripted, sockets are real


@dataclass
class Script:
    """For each address: seconds until it connects, or the error it fails with at once; None hangs."""

    outcomes: dict[Address, float | OSError | None]
    tried: list[Address] = field(default_factory=list)
    made: list[socket.socket] = field(default_factory=list)

    async def connect(self, address: Address, _port: int) -> Dialed:
        self.tried.append(address)
        outcome = self.outcomes[address]
        if isinstance(outcome, OSError):
            raise outcome
        if outcome is None:
            await asyncio.Event().wait()
        elif outcome:
            await asyncio.sleep(outcome)
        sock = socket.socket()
        self.made.append(sock)
        return Dialed(sock, address)


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
UNREACHABLE = OSError(errno.ENETUNREACH, "unreachable")
A1, A2, A3 = (IPv4Address(f"11.0.0.{number}") for number in (1, 2, 3))
B1, B2 = IPv6Address("2600::1"), IPv6Address("2600::2")


@pytest.mark.parametrize(
    ("outcomes", "winner", "tried"),
    [
        ({A1: 0, A2: 0}, A1, [A1]),
        ({A1: REFUSED, A2: 0}, A2, [A1, A2]),
        ({A1: None, A2: 0}, A2, [A1, A2]),
        ({A1: 0.06, A2: None}, A1, [A1, A2]),
        ({A1: None, A2: REFUSED, A3: 0}, A3, [A1, A2, A3]),
        ({A1: 0, B1: 0}, B1, [B1]),
        ({A1: 0, B1: None}, A1, [B1, A1]),
        ({B1: UNREACHABLE, B2: UNREACHABLE, A1: 0}, A1, [B1, A1]),
    ],
    ids=[
        "the first that answers at once is the only one tried",
        "a refusal starts the next at once",
        "silence starts the next after the stagger",
        "a slow first one may still win",
        "silence, refusal, success",
        "IPv6 goes first",
        "a broken IPv6 costs one stagger",
        "no IPv6 route costs nothing",
    ],
)
def test_the_race_has_the_right_winner(
    outcomes: dict[Address, float | OSError | None],
    winner: Address,
    tried: list[Address],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(outcomes)
    monkeypatch.setattr(dialer_module, "connect", script.connect)
    monkeypatch.setattr(dialer_module, "STAGGER", 0.03)

    async def scenario() -> None:
        assert close(await dialer(tuple(outcomes)).dial(API, 443, anything)) == winner
        await asyncio.sleep(0)
        assert script.tried == tried
        assert all(sock.fileno() == -1 for sock in script.made)

    asyncio.run(scenario())


def test_all_silent_is_a_timeout_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({A1: REFUSED, A2: None})
    monkeypatch.setattr(dialer_module, "connect", script.connect)
    found = asyncio.run(dialer((A1, A2), timeout=0.05).dial(API, 443, anything))
    assert found == DialFailed(Reason.UPSTREAM_TIMEOUT, "port 443: 11.0.0.1 refused, 11.0.0.2 silent")


def test_the_kernels_own_timeout_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({A1: TimeoutError(errno.ETIMEDOUT, "timed out")})
    monkeypatch.setattr(dialer_module, "connect", script.connect)
    found = asyncio.run(dialer((A1,)).dial(API, 443, anything))
    assert found == DialFailed(Reason.UPSTREAM_TIMEOUT, "port 443: 11.0.0.1 timed out")


def test_two_winners_at_once_leave_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({A1: 0, A2: 0})
    monkeypatch.setattr(dialer_module, "STAGGER", 0.01)

    async def scenario() -> None:
        started: list[Address] = []
        gate = asyncio.Event()

        async def both(address: Address, port: int) -> Dialed:
            started.append(address)
            if len(started) == 2:
                gate.set()
            await gate.wait()
            return await script.connect(address, port)

        monkeypatch.setattr(dialer_module, "connect", both)
        dialed = await dialer((A1, A2)).dial(API, 443, anything)
        assert isinstance(dialed, Dialed)
        await asyncio.sleep(0)
        assert len(script.made) == 2
        assert [sock for sock in script.made if sock.fileno() != -1] == [dialed.sock]
        dialed.sock.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_a_cancelled_dial_leaves_no_socket(turns: int) -> None:
    async def scenario() -> None:
        async with listening(LOOP) as port:
            task = asyncio.create_task(dialer((LOOP, OTHER)).dial(API, port, anything))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            [found] = await asyncio.gather(task, return_exceptions=True)
            if isinstance(found, Dialed):
                found.sock.close()
            for _ in range(5):
                await asyncio.sleep(0)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(scenario())
    gc.collect()  # a leaked socket would be a ResourceWarning, which is an error
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_connection_to_another_address_than_dialled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with listening(LOOP) as port:
            monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("127.0.0.9", port))
            found = await dialer((LOOP,)).dial(API, port, anything)
            assert found == DialFailed(Reason.UPSTREAM_UNREACHABLE, f"port {port}: 127.0.0.1 EPROTO")

    asyncio.run(scenario())


def test_ipv6_is_dialled() -> None:
    async def scenario() -> None:
        try:
            async with listening(SIX) as port:
                dialed = await connect(SIX, port)
                with dialed.sock as sock:
                    assert sock.getpeername()[:2] == ("::1", port)
        except OSError as error:
            pytest.skip(f"no IPv6 loopback: {error}")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("addresses", "order"),
    [
        ([], []),
        ([A1, A2], [A1, A2]),
        ([A1, A2, A3, B1, B2], [B1, A1, B2, A2, A3]),
        ([A1, B1, B2], [B1, A1, B2]),
    ],
)
def test_families_take_turns(addresses: Sequence[Address], order: list[Address]) -> None:
    assert interleave(addresses) == order


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (REFUSED, "refused"),
        (UNREACHABLE, "unreachable"),
        (OSError(errno.EHOSTUNREACH, ""), "unreachable"),
        (OSError(errno.EADDRNOTAVAIL, ""), "unreachable"),
        (TimeoutError(), "timed out"),
        (OSError(errno.EACCES, ""), "EACCES"),
        (OSError("no number"), "OSError"),
        (ValueError(), "ValueError"),
    ],
)
def test_errors_have_words(error: BaseException, words: str) -> None:
    assert describe(error) == words


# own addresses


def test_ip_16_own_addresses_are_known_live() -> None:
    assert is_own_address(LOOP)
    assert is_own_address(IPv4Address("0.0.0.0"))
    assert not is_own_address(IPv4Address("192.0.2.1"))
    assert not is_own_address(IPv6Address("2001:db8::1"))
    own = OwnAddresses()
    assert own(LOOP)
    assert own(IPv6Address("::ffff:127.0.0.1"))
    assert not own(A1)


def test_ip_16_an_own_address_is_refused_even_where_a_rule_covers_it() -> None:
    async def scenario() -> None:
        async with listening(LOOP) as port:
            found = await Dialer(Resolver([(LOOP,)]), 5).dial(API, port, anything)
            assert found == DialFailed(
                Reason.FLOOR_OWN_ADDRESS, "no address may be dialled: 127.0.0.1 floor_own_address"
            )

    asyncio.run(scenario())


def test_ip_16_listed_addresses_are_own_too() -> None:
    own = OwnAddresses(["11.0.0.1", "2600::1", "fe80::1%lo"])
    assert own(A1)
    assert own(IPv6Address("::ffff:11.0.0.1"))
    assert own(B1)
    assert own(IPv6Address("fe80::1"))
    assert not own(A2)


def test_an_error_that_does_not_say_not_mine_counts_as_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket, "socket", no_descriptor)
    assert is_own_address(A1)


def test_where_any_address_can_be_bound_the_list_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer_module, "is_own_address", lambda address: address.version == 4)
    own = OwnAddresses(["11.0.0.1"])
    assert own(A1)
    assert not own(A2)
    with pytest.raises(ValueError, match="must be listed"):
        OwnAddresses()


@pytest.mark.root
def test_ip_16_own_global_addresses_and_nonlocal_bind_in_a_namespace_of_its_own() -> None:
    """A host with a global-looking address of its own; then one that lets any address be bound."""
    program = """
import ctypes, os, pathlib, subprocess
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x40000000) == 0, ctypes.get_errno()  # CLONE_NEWNET: gone with this process
for command in ("link set lo up", "addr add 11.0.0.9/32 dev lo", "-6 addr add 2600::9/128 dev lo nodad"):
    subprocess.run(["ip", *command.split()], check=True)
from egressd.gate.dialer import OwnAddresses
from ipaddress import ip_address as at
own = OwnAddresses()
assert [own(at(text)) for text in ("11.0.0.9", "2600::9", "11.0.0.8", "2600::8")] == [True, True, False, False]
subprocess.run("ip addr add 11.0.0.8/32 dev lo".split(), check=True)
assert own(at("11.0.0.8")), "an address that came later is own at once"
pathlib.Path("/proc/sys/net/ipv4/ip_nonlocal_bind").write_text("1")
try:
    OwnAddresses()
except ValueError as error:
    print(error)
own = OwnAddresses(["11.0.0.9"])
assert [own(at(text)) for text in ("11.0.0.9", "11.0.0.7", "2600::9")] == [True, False, True]
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "must be listed" in result.stdout
