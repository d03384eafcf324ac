"""Exchanges with nobody, so that everything libraries load late is loaded: later the worker has no file system."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, cast

from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.dialer import Dialed
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.inspector.engine import Engine
from egressd.gate.inspector.http2.engine import Http2Engine
from egressd.gate.inspector.http2.events import Head
from egressd.gate.inspector.http2.link import Link, Terms
from egressd.gate.inspector.upstream import Opened, trusted
from egressd.gate.limits import Budget
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.gate.tls.stream import accept_plain
from egressd.journal.record import Record
from egressd.policy.attempt import Address, Decision, Name
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.names import parse_name
from egressd.policy.reasons import Reason

if TYPE_CHECKING:
    from egressd.gate.dialer import Dialer
    from egressd.gate.tls.leaves import Leaves

_NAME: Name = ("warm", "example", "com")
_ADDRESS = IPv4Address("192.0.2.1")
_REQUESTS = (
    b"POST /warm?a=b HTTP/1.1\r\nHost: warm.example.com\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    b"4\r\nwarm\r\n0\r\n\r\n"
    b"GET / HTTP/1.1\r\nHost: other.example.com\r\nAccept: application/json\r\n\r\n"
)
_RESPONSE = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n"


class _Unheard:
    """A recorder for records of nothing."""

    def put(self, record: Record) -> None:
        """Make the record, as a real one would, and drop it."""
        record.as_dict()

    async def commit(self, record: Record) -> None:
        """Count as written."""
        record.as_dict()


class _Inward:
    """A dialer that reaches nothing but this function."""

    def __init__(self, upstream: socket.socket) -> None:
        self._upstream = upstream

    async def dial(
        self, _host: Name | Address, _port: int, permit: Callable[[Address], Reason | None]
    ) -> Dialed:
        """Hand out the one end."""
        permit(_ADDRESS)
        return Dialed(self._upstream, _ADDRESS)


def warm(settings: Settings | None = None) -> None:
    """Carry allowed and refused exchanges between socket pairs, by every engine, and read the certificates that
    upstreams are verified by.

    The certificates are read only if `settings` are given (`upstream_ca`). Raises RuntimeError when the engine does not do
    what it should: better here than at the first request. Not to be called while an event loop runs.
    """
    if settings is not None:
        trusted(settings.upstream_ca)
    parse_name("xn--bcher-kva.example")  # the punycode codec
    for codec in ("idna", "punycode", "latin_1", "unicode_escape"):
        "a".encode(codec).decode(codec)
    with asyncio.Runner() as runner:
        said = runner.run(_exchange(settings or Settings()))
        statuses = runner.run(_exchange_http2(settings or Settings()))
    if statuses != {1: b"200", 3: b"403"}:
        raise RuntimeError("the HTTP/2 engine does not work")
    if not (said.startswith(b"HTTP/1.1 100 ") and b"\r\nok\r\n" in said and b"authority_mismatch" in said):
        raise RuntimeError("the HTTP engine does not work")


@asynccontextmanager
async def _ends() -> AsyncIterator[tuple[socket.socket, ...]]:
    """Two pairs of sockets: what the client and the engine hold of one, the engine and the origin of the other."""
    ends = *socket.socketpair(), *socket.socketpair()
    try:
        for sock in ends:
            sock.setblocking(False)
        async with asyncio.timeout(10):
            yield ends
    finally:
        for sock in ends:
            sock.close()


async def _exchange(settings: Settings) -> bytes:
    loop = asyncio.get_running_loop()
    async with _ends() as (outer, inner, upstream, origin):
        connection = _connection(settings, upstream)
        stream = await accept_plain(loop, inner, b"")
        engine = asyncio.ensure_future(Engine(connection, stream).run(_REQUESTS))
        said = heard = b""
        try:
            while not heard.endswith(b"0\r\n\r\n"):
                heard += await loop.sock_recv(origin, 65536)
            await loop.sock_sendall(origin, _RESPONSE)
            while more := await loop.sock_recv(outer, 65536):
                said += more
            outer.close()
            await engine
        finally:
            engine.cancel()
    return said


async def _exchange_http2(settings: Settings) -> dict[int, bytes]:
    """Have one stream answered and one refused; returns the status that each was told."""
    loop = asyncio.get_running_loop()
    terms = Terms(settings.head_bytes, 65536, 65536, 131072)
    client, server = Link(terms, server=False), Link(terms, server=True)
    statuses: dict[int, bytes] = {}
    async with _ends() as (outer, inner, upstream, origin):
        connection = _connection(settings, upstream, tls=True)
        stream = await accept_plain(loop, inner, b"")
        opened = Opened(await accept_plain(loop, upstream, b""), _ADDRESS, "warm", ".".join(_NAME), 443, None)
        engine = asyncio.ensure_future(Http2Engine(connection, stream, opened).run())
        try:
            for host in (_NAME, ("other", *_NAME[1:])):
                asked = client.open()
                client.send_head(asked, _request(".".join(host).encode()), end=True)
                await loop.sock_sendall(outer, client.take())
                if host == _NAME:
                    await _answer_http2(origin, server)
                while asked not in statuses:
                    for event in client.receive(await loop.sock_recv(outer, 65536), 0.0):
                        if isinstance(event, Head):
                            statuses.setdefault(event.stream, dict(event.fields).get(b":status", b""))
            outer.close()
            await engine
        finally:
            engine.cancel()
    return statuses


def _request(authority: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":authority", authority),
        (b":path", b"/warm?a=b"),
    ]


async def _answer_http2(origin: socket.socket, server: Link) -> None:
    """Be the origin for one request: headers, data and trailers."""
    loop = asyncio.get_running_loop()
    asked = None
    while asked is None:
        events = server.receive(await loop.sock_recv(origin, 65536), 0.0)
        asked = next((event.stream for event in events if isinstance(event, Head)), None)
    server.send_head(asked, [(b":status", b"200")])
    server.send_data(asked, b"ok")
    server.send_head(asked, [(b"x-sum", b"1")], end=True)
    await loop.sock_sendall(origin, server.take())


def _connection(settings: Settings, upstream: socket.socket, *, tls: bool = False) -> Connection:
    entry = EffectiveEntry(
        id="warm",
        place="warm:1",
        effect="allow",
        hosts=(".".join(_NAME),),
        schemes=("http", "https"),
        ports=(80, 443),
        addresses=(f"{_ADDRESS}/32",),
        requests=("GET,POST /**",),
    )
    policy = compile_policy(EffectivePolicy(profile="warm", entries=(entry,)))
    sandbox = Sandbox("warm", policy, SyntheticNames(1), Budget(settings))
    services = Services(settings, _Unheard(), cast("Dialer", _Inward(upstream)), cast("Leaves", None))
    connection = Connection(sandbox, services, "transparent", Destination(443 if tls else 80, proved=_NAME))
    connection.host, connection.tls = _NAME, tls
    connection.decision = Decision("allow", Reason.RULE, entry)
    return connection
