"""Out through the operator's own proxy: CONNECT to what was judged, and nothing else of the proxy reaches a sandbox."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest

from egressd.gate.dialer import Dialed, Dialer, DialFailed
from egressd.gate.dns.upstream import ResolveFailed
from egressd.gate.permission import UNPLACED, Permission, is_confined, permit_place, read_place
from egressd.gate.settings import UpstreamProxy
from egressd.gate.via import Established, Via, parse_proxy_url, read_credentials, read_reply
from egressd.policy.attempt import Address, Decision, Name
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.reasons import Reason

API: Name = ("api", "allowed", "test")
PUBLIC, SECOND, SIX = IPv4Address("11.0.0.20"), IPv4Address("11.0.0.21"), IPv6Address("2600:11::20")
INNER = IPv4Address("10.0.0.5")
OK = b"HTTP/1.1 200 OK\r\n\r\n"


@dataclass
class Resolver:
    answer: tuple[Address, ...] | ResolveFailed
    timeout: float = 1.0
    asked: list[Name] = field(default_factory=list)

    async def resolve(self, name: Name) -> tuple[Address, ...] | ResolveFailed:
        self.asked.append(name)
        if name == ("proxy", "corp", "test"):
            return (IPv4Address("127.0.0.1"),)
        return self.answer


@dataclass
class Proxy:
    """An operator's proxy on loopback: hears a head, answers what it is told to, and keeps what it heard."""

    port: int
    heads: list[bytes] = field(default_factory=list)
    open: int = 0

    @property
    def targets(self) -> list[str]:
        return [head.split(b" ")[1].decode() for head in self.heads]


@asynccontextmanager
async def proxying(*answers: bytes | None) -> AsyncIterator[Proxy]:
    """Serve; an answer of None is silence, the last one is given from then on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy.open += 1
        try:
            proxy.heads.append(await reader.readuntil(b"\r\n\r\n"))
            answer = answers[min(len(proxy.heads), len(answers)) - 1]
            if answer is None:
                await reader.read()
            else:
                for byte in answer:
                    writer.write(bytes((byte,)))
                    await writer.drain()
                if answer.startswith(b"HTTP/1.1 2"):
                    writer.write(b"echo " + await reader.read(100))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            proxy.open -= 1
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    async with server:
        yield proxy


def dialing(
    proxy: Proxy,
    *answer: Address,
    connect: Any = "address",
    authorization: bytes | None = None,
    host: str = "127.0.0.1",
    timeout: float = 5.0,
    resolver: Resolver | None = None,
    own: Callable[[Address], bool] = lambda _: False,
) -> Dialer:
    resolver = resolver or Resolver(answer)
    via = Via(UpstreamProxy(host=host, port=proxy.port, connect=connect), resolver, authorization)
    return Dialer(resolver, timeout, own=own, via=via)


def permission(*extra: EffectiveEntry, decided: int = 0, **changes: Any) -> tuple[CompiledPolicy, Permission]:
    entry = EffectiveEntry(
        id="api", place="p:1", effect="allow", hosts=("api.allowed.test",), requests=("GET /**",)
    )
    entry = entry.model_copy(update=changes)
    policy = compile_policy(EffectivePolicy(profile="p", entries=(entry, *extra)))
    return policy, Permission(policy, Decision("allow", Reason.RULE, entry, entry.treatment), 443)


PERMIT = permission()[1]


async def said(dialed: Dialed | DialFailed) -> bytes:
    assert isinstance(dialed, Dialed)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        await loop.sock_sendall(dialed.sock, b"hello")
        got = b""
        while part := await loop.sock_recv(dialed.sock, 100):
            got += part
    dialed.sock.close()
    return got


def test_the_proxy_is_asked_for_the_checked_address_and_its_server_may_speak_first() -> None:
    async def body() -> None:
        async with proxying(OK + b"220 first ") as proxy:
            dialed = await dialing(proxy, PUBLIC).dial(API, 443, PERMIT)
            assert isinstance(dialed, Dialed)
            assert dialed.address == PUBLIC
            assert await said(dialed) == b"220 first echo hello"
            assert proxy.heads == [b"CONNECT 11.0.0.20:443 HTTP/1.1\r\nHost: 11.0.0.20:443\r\n\r\n"]

    asyncio.run(body())


def test_by_name_nothing_is_resolved_here() -> None:
    async def body() -> None:
        async with proxying(OK) as proxy:
            resolver = Resolver(ResolveFailed(Reason.UPSTREAM_DNS, "no DNS here"))
            dialed = await dialing(proxy, connect="name", resolver=resolver).dial(API, 443, PERMIT)
            assert isinstance(dialed, Dialed)
            assert dialed.address == UNPLACED
            assert await said(dialed) == b"echo hello"
            assert proxy.targets == ["api.allowed.test:443"]
            assert resolver.asked == []

    asyncio.run(body())


WIDE = ("*.allowed.test",)
CONFINED = [
    pytest.param({"addresses": ("11.0.0.0/24",)}, (), id="a rule names addresses"),
    pytest.param({"hosts": WIDE, "treatment": "tunnel", "requests": ()}, (), id="IP-12 an unread wildcard"),
    pytest.param({"hosts": WIDE, "schemes": ("https", "http"), "ports": (443, 80)}, (), id="IP-12 a wildcard in clear"),
    pytest.param(
        {}, (EffectiveEntry(id="no", place="p:2", effect="deny", addresses=("11.6.0.0/16",)),), id="addresses are denied",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "extra"), CONFINED)
def test_where_addresses_matter_the_name_is_resolved_here_all_the_same(
    changes: dict[str, Any], extra: tuple[EffectiveEntry, ...]
) -> None:
    policy, permit = permission(*extra, **changes)
    assert is_confined(policy, permit.decision)
    assert permit(UNPLACED) is Reason.ADDRESS_OUTSIDE_RULE

    async def body() -> None:
        async with proxying(OK) as proxy:
            dialed = await dialing(proxy, PUBLIC, connect="name").dial(API, 443, permit)
            assert isinstance(dialed, Dialed)
            dialed.sock.close()
            assert proxy.targets == ["11.0.0.20:443"]
            failed = await dialing(proxy, INNER, connect="name").dial(API, 443, permit)
            assert isinstance(failed, DialFailed)
            assert proxy.targets == ["11.0.0.20:443"]

    asyncio.run(body())


def test_who_only_observes_or_does_not_say_is_confined() -> None:
    policy = permission()[0]
    assert is_confined(policy, Decision("allow", Reason.OBSERVED))
    assert not is_confined(policy, PERMIT.decision)
    assert (
        permit_place(policy, Decision("deny", Reason.NOT_ALLOWED), UNPLACED, port=443, now=0)
        is Reason.NOT_ALLOWED
    )

    async def body() -> None:
        async with proxying(OK) as proxy:
            dialed = await dialing(proxy, PUBLIC, connect="name").dial(API, 443, lambda _: None)
            assert isinstance(dialed, Dialed)
            dialed.sock.close()
            assert proxy.targets == ["11.0.0.20:443"]

    asyncio.run(body())


@pytest.mark.parametrize("connect", ["address", "name"])
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        pytest.param(IPv4Address("169.254.169.254"), Reason.FLOOR_METADATA, id="META-01 metadata"),
        pytest.param(IPv4Address("127.0.0.1"), Reason.FLOOR_LOOPBACK, id="loopback"),
        pytest.param(IPv6Address("64:ff9b::a9fe:a9fe"), Reason.FLOOR_METADATA, id="IP-07 metadata by NAT64"),
        pytest.param(INNER, Reason.SPECIAL_ADDRESS, id="an inner address"),
        pytest.param(IPv4Address("11.0.0.2"), Reason.FLOOR_OWN_ADDRESS, id="IP-16 our own address"),
    ],
)
def test_law_5_the_floor_binds_what_sandboxes_ask_for_through_a_proxy_too(
    host: Address, reason: Reason, connect: str
) -> None:
    async def body() -> None:
        async with proxying(OK) as proxy:
            dialer = dialing(proxy, connect=connect, own=lambda address: str(address) == "11.0.0.2")
            failed = await dialer.dial(host, 80, PERMIT)
            assert isinstance(failed, DialFailed)
            assert failed.reason is reason
            assert proxy.heads == []

    asyncio.run(body())


def test_the_proxy_itself_is_dialled_as_configured_by_name_too() -> None:
    async def body() -> None:
        async with proxying(OK) as proxy:
            dialed = await dialing(proxy, PUBLIC, host="proxy.corp.test").dial(API, 443, PERMIT)
            assert await said(dialed) == b"echo hello"

    asyncio.run(body())


def test_its_credentials_go_to_the_proxy_alone() -> None:
    authorization = read_credentials(b"ann:s3:cret\n")

    async def body() -> None:
        async with proxying(OK) as proxy:
            dialed = await dialing(proxy, PUBLIC, authorization=authorization).dial(API, 443, PERMIT)
            assert b"s3" not in await said(dialed)
            assert base64.b64encode(b"ann:s3:cret") in proxy.heads[0]

    asyncio.run(body())


@pytest.mark.parametrize(
    "payload", [b"", b"nocolon", b"a:b\nc:d", b"a:b\0", b"\xff:x", b":x", b"a:" + b"x" * 5000]
)
def test_credentials_that_would_break_a_header_are_refused_unseen(payload: bytes) -> None:
    with pytest.raises(ValueError, match="user:password") as raised:
        read_credentials(payload)
    assert "nocolon" not in str(raised.value)


@pytest.mark.parametrize(
    ("answers", "addresses", "asked"),
    [
        pytest.param((b"HTTP/1.1 502 x\r\n\r\n", OK), (PUBLIC, SECOND), ["11.0.0.20", "11.0.0.21"], id="the next address"),
        pytest.param((b"HTTP/1.1 503 x\r\n\r\n", OK), (PUBLIC, SIX), ["[2600:11::20]", "11.0.0.20"], id="the other family"),
    ],
)  # fmt: skip
def test_an_address_that_the_proxy_cannot_reach_is_not_the_last(
    answers: tuple[bytes, ...], addresses: tuple[Address, ...], asked: list[str]
) -> None:
    async def body() -> None:
        async with proxying(*answers) as proxy:
            dialed = await dialing(proxy, *addresses).dial(API, 443, PERMIT)
            assert await said(dialed) == b"echo hello"
            assert proxy.targets == [f"{host}:443" for host in asked]

    asyncio.run(body())


@pytest.mark.parametrize("connect", ["address", "name"])
@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        pytest.param(b"HTTP/1.1 407 Who\r\n\r\n", "the proxy answered 407 (its credentials)", id="407"),
        pytest.param(b"HTTP/1.1 403 <b>no</b>\r\n\r\nbody", "the proxy answered 403", id="403"),
        pytest.param(b"HTTP/1.1 500 x\r\n\r\n", "the proxy answered 500", id="500"),
        pytest.param(b"HTTP/1.1 302 x\r\nLocation: http://evil.test/\r\n\r\n", "the proxy answered 302", id="a redirect"),
        pytest.param(b"HTTP/1.1 100 x\r\n\r\nHTTP/1.1 200 x\r\n\r\n", "the proxy answered 100", id="an interim answer"),
        pytest.param(b"SSH-2.0-x\r\n", "the proxy does not speak HTTP", id="SSH"),
        pytest.param(b"", "the proxy does not speak HTTP", id="it hangs up"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000, "the proxy does not speak HTTP", id="a head without end"),
        pytest.param(None, "the proxy did not answer in time", id="silence"),
    ],
)  # fmt: skip
def test_what_a_proxy_says_instead_is_an_upstream_error(
    answer: bytes | None, detail: str, connect: str
) -> None:
    async def body() -> None:
        async with proxying(answer) as proxy:
            failed = await dialing(proxy, PUBLIC, connect=connect, timeout=0.3 if answer is None else 5).dial(
                API, 443, PERMIT
            )
            assert isinstance(failed, DialFailed)
            assert failed.reason is (Reason.UPSTREAM_PROXY if answer is not None else Reason.UPSTREAM_TIMEOUT)
            assert failed.detail == detail
            async with asyncio.timeout(5):
                while proxy.open:  # noqa: ASYNC110 -- plain state, nothing sets an event
                    await asyncio.sleep(0.01)

    asyncio.run(body())


def test_a_proxy_that_is_not_there_is_an_upstream_error() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        failed = await dialing(Proxy(port), PUBLIC).dial(API, 443, PERMIT)
        assert isinstance(failed, DialFailed)
        assert failed.reason is Reason.UPSTREAM_PROXY
        assert "refused" in failed.detail

    asyncio.run(body())


def test_a_dial_that_is_cancelled_leaves_nothing_open() -> None:
    async def body() -> None:
        async with proxying(None) as proxy:
            task = asyncio.ensure_future(dialing(proxy, PUBLIC).dial(API, 443, PERMIT))
            async with asyncio.timeout(5):
                while not proxy.heads:  # noqa: ASYNC110 -- as above
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while proxy.open:  # noqa: ASYNC110 -- as above
                    await asyncio.sleep(0.01)

    asyncio.run(body())


def test_a_proxy_s_url_is_read_as_every_authority_is() -> None:
    assert parse_proxy_url("http://PROXY.corp.test:3128/") == UpstreamProxy(host="proxy.corp.test", port=3128)
    assert parse_proxy_url("http://[fd00::1]:8080", "name") == UpstreamProxy(
        host="fd00::1", port=8080, connect="name"
    )
    assert Via(parse_proxy_url("http://[fd00::1]:8080"), Resolver(())).by_name is False


def test_a_place_has_one_spelling() -> None:
    assert read_place(str(UNPLACED)) == UNPLACED
    assert read_place(str(SIX)) == SIX


def test_every_prefix_of_a_reply_asks_for_more() -> None:
    reply = b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\n"
    assert [isinstance(read_reply(reply[:end]), Established) for end in range(len(reply) + 1)] == [
        False
    ] * len(reply) + [True]
