"""ALPN at the door: a client is offered what the server speaks, after the decision; who speaks HTTP/2 alone is told in it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded

from egressd.gate.dialer import DialFailed
from egressd.gate.door import entering
from egressd.gate.door import passage as passaging
from egressd.gate.door.visit import Visit
from egressd.gate.inspector import upstream
from egressd.gate.settings import Settings
from egressd.gate.tls.leaves import Leaves
from egressd.lab.streams import Connection as StreamsConnection
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import DEADLINE, HOST, NAME, Lab, entry, laboratory, run, wait_until
from tests.gate.inspector.origin import PathOrigin
from tests.gate.tls.authority import client_context, make_authority

AUTHORITY = make_authority()
RULE = entry(schemes=("https",), ports=(443,))
BOTH = ("h2", "http/1.1")


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    file = tmp_path / "ca.pem"
    file.write_text(AUTHORITY.root_pem)
    yield Settings(upstream_ca=str(file))
    upstream._contexts.cache_clear()


@dataclass
class Origin:
    """A TLS server that agrees to one protocol; `lost` is set when its last connection ends."""

    alpn: str
    agreed: list[str | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await writer.start_tls(Leaves(AUTHORITY.issuer).context_for(HOST, self.alpn))
            protocol = writer.get_extra_info("ssl_object").selected_alpn_protocol()
            self.agreed.append(protocol)
            if protocol == "h2":
                await StreamsConnection(
                    reader, writer, lambda seen: self.asked.append(seen.target), {}, lambda _: None
                ).serve()
            else:
                pages = PathOrigin()
                await pages(reader, writer)
                self.asked += [
                    line.split(" ")[1] for line in pages.heads.decode().split("\r\n") if " HTTP/" in line
                ]
        self.lost.set()


@contextlib.asynccontextmanager
async def door(
    monkeypatch: pytest.MonkeyPatch,
    lab: Lab,
    offers: tuple[str, ...],
    *,
    host: str = HOST,
    destination: IPv4Address | None = None,
    trusts: bool = True,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's TLS connection through a visit of its own."""
    if destination is None:
        reserved = lab.sandbox.names.reserve(NAME)
        assert isinstance(reserved, IPv4Address)
        lab.sandbox.names.confirm(NAME)
        destination = reserved
    monkeypatch.setattr(entering, "original_destination", lambda _: (destination, 443))
    lab.services.leaves = Leaves(AUTHORITY.issuer)
    context = client_context(AUTHORITY.root_pem, offers)
    if not trusts:
        context = ssl.create_default_context()
        context.set_alpn_protocols(list(offers))
    outer, inner = socket.socketpair()
    outer.setblocking(False)
    inner.setblocking(False)
    visit = asyncio.ensure_future(Visit(inner, lab.sandbox, lab.services).run())
    try:
        async with asyncio.timeout(DEADLINE):
            reader, writer = await asyncio.open_connection(sock=outer, ssl=context, server_hostname=host)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    finally:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(visit, return_exceptions=True)


def agreed(writer: asyncio.StreamWriter) -> str | None:
    found: str | None = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    return found


async def ask_http2(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str = HOST
) -> tuple[int, bytes]:
    client = H2Connection(H2Configuration(header_encoding=False))
    client.initiate_connection()
    client.send_headers(
        1, [(":method", "GET"), (":scheme", "https"), (":authority", host), (":path", "/n")], end_stream=True
    )
    writer.write(client.data_to_send())
    status, body = 0, b""
    async with asyncio.timeout(DEADLINE):
        while data := await reader.read(65536):
            for event in client.receive_data(data):
                if isinstance(event, ResponseReceived):
                    status = int(dict(event.headers)[b":status"])
                elif isinstance(event, DataReceived):
                    body += event.data
                elif isinstance(event, StreamEnded):
                    return status, body
    return status, body


async def ask_http1(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str = HOST
) -> tuple[int, bytes]:
    writer.write(f"GET /n HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(DEADLINE):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


Ask = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[tuple[int, bytes]]]
MIRRORED = [
    pytest.param("h2", BOTH, "h2", id="both speak it"),
    pytest.param("h2", ("h2",), "h2", id="the client speaks nothing else"),
    pytest.param("http/1.1", BOTH, "http/1.1", id="the server does not"),
    pytest.param("h2", ("http/1.1",), "http/1.1", id="the client does not"),
    pytest.param("h2", (), None, id="the client offers nothing"),
]


@pytest.mark.parametrize(("speaks", "offers", "chosen"), MIRRORED)
def test_the_client_is_offered_what_the_server_speaks(
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
    speaks: str,
    offers: tuple[str, ...],
    chosen: str | None,
) -> None:
    async def test() -> None:
        origin = Origin(speaks)
        async with laboratory(origin, RULE, settings=settings) as lab:
            async with door(monkeypatch, lab, offers) as (reader, writer):
                assert agreed(writer) == chosen
                ask: Ask = ask_http2 if chosen == "h2" else ask_http1
                assert await ask(reader, writer) == (200, b"1")
            assert lab.dialer.dials == [(NAME, 443)], "the upstream of the handshake serves the first request"
            assert origin.agreed == [chosen if chosen == "h2" else None if speaks == "h2" else "http/1.1"]
            assert lab.records.decisions() == [("allow", "rule"), ("allow", "rule")]
            assert [record.alpn for record in lab.records.of("decision")] == [None, chosen]
            await wait_until(lambda: len(lab.records.ends()) == 2)

    run(test())


def test_the_connection_is_recorded_before_anything_leaves_and_no_request_leaves_before_its_own_record(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    async def test() -> None:
        origin = Origin("h2")
        async with laboratory(origin, RULE, settings=settings) as lab:
            lab.records.gate = asyncio.Event()
            async with contextlib.AsyncExitStack() as stack:
                opening = asyncio.ensure_future(stack.enter_async_context(door(monkeypatch, lab, BOTH)))
                for _ in range(20):
                    await asyncio.sleep(0.005)
                assert lab.dialer.dials == []
                lab.records.gate.set()
                reader, writer = await opening
                assert lab.records.decisions() == [("allow", "rule")]
                lab.records.gate = asyncio.Event()
                answer = asyncio.ensure_future(ask_http2(reader, writer))
                for _ in range(20):
                    await asyncio.sleep(0.005)
                assert origin.asked == []
                lab.records.gate.set()
                assert (await answer)[0] == 200

    run(test())


def test_a_client_that_offers_no_http2_dials_nothing_before_it_asks(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    async def test() -> None:
        async with (
            laboratory(Origin("h2"), RULE, settings=settings) as lab,
            door(monkeypatch, lab, ("http/1.1",)),
        ):
            assert lab.dialer.dials == []

    run(test())


def test_a_client_that_speaks_http2_alone_is_told_that_the_server_does_not(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    async def test() -> None:
        origin = Origin("http/1.1")
        async with laboratory(origin, RULE, settings=settings) as lab:
            async with door(monkeypatch, lab, ("h2",)) as (reader, writer):
                assert agreed(writer) == "h2"
                status, body = await ask_http2(reader, writer)
                assert (status, b"upstream_no_http2" in body) == (502, True)
            async with asyncio.timeout(DEADLINE):
                await origin.lost.wait()
            assert origin.asked == []
            assert lab.records.decisions() == [("allow", "rule"), ("allow", "rule")]
            assert "upstream_no_http2" in lab.records.ends()

    run(test())


@pytest.mark.parametrize(("offers", "ask"), [(BOTH, ask_http1), (("h2",), ask_http2)])
def test_a_server_that_cannot_be_reached_is_told_in_what_the_client_speaks(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, offers: tuple[str, ...], ask: Ask
) -> None:
    async def test() -> None:
        async with laboratory(Origin("h2"), RULE, settings=settings) as lab:
            lab.dialer.failure = DialFailed(Reason.UPSTREAM_UNREACHABLE, "refused")
            async with door(monkeypatch, lab, offers) as (reader, writer):
                status, body = await ask(reader, writer)
                assert (status, b"upstream_unreachable" in body) == (502, True)
            assert len(lab.dialer.dials) == 1

    run(test())


@pytest.mark.parametrize(("offers", "ask"), [(BOTH, ask_http1), (("h2",), ask_http2)])
def test_without_a_record_nothing_is_dialled_and_the_client_is_told(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, offers: tuple[str, ...], ask: Ask
) -> None:
    async def test() -> None:
        async with laboratory(Origin("h2"), RULE, settings=settings) as lab:
            lab.records.broken = True
            async with door(monkeypatch, lab, offers) as (reader, writer):
                status, body = await ask(reader, writer)
                assert (status, b"audit_unavailable" in body) == (503, True)
            assert lab.dialer.dials == []
            assert lab.records.decisions()[0] == ("deny", "audit_unavailable")

    run(test())


@pytest.mark.parametrize(("offers", "ask"), [(BOTH, ask_http1), (("h2",), ask_http2), ((), ask_http1)])
def test_a_denied_name_is_explained_in_what_the_client_speaks(
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
    offers: tuple[str, ...],
    ask: Callable[..., Awaitable[tuple[int, bytes]]],
) -> None:
    async def test() -> None:
        async with laboratory(Origin("h2"), RULE, settings=settings) as lab:
            denied = "evil.example.com"
            async with door(monkeypatch, lab, offers, host=denied, destination=IPv4Address("198.18.0.2")) as (
                reader,
                writer,
            ):
                status, body = await ask(reader, writer, denied)
                assert (status, b"not_allowed" in body) == (403, True)
            assert lab.dialer.dials == []

    run(test())


@pytest.mark.parametrize("offers", [("acme-tls/1",), ("foo", "bar"), ("h3",)])
def test_tls_18_a_protocol_that_is_no_http_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, offers: tuple[str, ...]
) -> None:
    async def test() -> None:
        async with laboratory(Origin("h2"), RULE, settings=settings) as lab:
            with pytest.raises(ssl.SSLError, match="no application protocol"):
                async with door(monkeypatch, lab, offers):
                    pass
            assert lab.records.decisions() == [("deny", "unknown_protocol")]
            assert lab.dialer.dials == []

    run(test())


def test_a_client_that_does_not_trust_us_lets_the_upstream_go(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    async def test() -> None:
        origin = Origin("h2")
        async with laboratory(origin, RULE, settings=settings) as lab:
            with pytest.raises(ssl.SSLCertVerificationError):
                async with door(monkeypatch, lab, BOTH, trusts=False):
                    pass
            async with asyncio.timeout(DEADLINE):
                await origin.lost.wait()
            assert origin.asked == []
            assert lab.records.decisions() == [("allow", "rule")]

    run(test())


def test_a_cut_while_the_upstream_is_opened_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    async def test() -> None:
        async with laboratory(Origin("h2"), RULE, settings=settings) as lab:
            opened = asyncio.Event()

            async def never(*_: object) -> None:
                opened.set()
                await asyncio.sleep(60)

            monkeypatch.setattr(passaging, "open_early", never)

            async def client() -> None:
                with contextlib.suppress(OSError):
                    async with door(monkeypatch, lab, BOTH):
                        pytest.fail("the handshake was finished")

            waiting = asyncio.ensure_future(client())
            await opened.wait()
            for live in tuple(lab.sandbox.live):
                live.cut(Reason.REVOKED)
            await waiting
            await wait_until(lambda: not lab.sandbox.live)
            assert lab.records.ends() == ["revoked"]

    run(test())
