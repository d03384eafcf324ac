"""Both sides in TLS: the judged name is what is asked for and verified upstream, and a cut stream ends no body."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from egressd.gate.connection import Connection, Destination
from egressd.gate.inspector import upstream
from egressd.gate.inspector.engine import Engine
from egressd.gate.settings import Settings
from egressd.gate.tls.leaves import Leaves
from egressd.gate.tls.stream import SessionCache, accept_tls
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import DEADLINE, HOST, NAME, Client, Lab, entry, laboratory, run
from tests.gate.inspector.origin import PathOrigin
from tests.gate.tls.authority import client_context, make_authority

AUTHORITY = make_authority()
LEAVES = Leaves(AUTHORITY.issuer)
RULE = entry(schemes=("https",), ports=(443,))


@pytest.fixture(autouse=True)
def no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_SESSIONS", SessionCache())


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    file = tmp_path / "ca.pem"
    file.write_text(AUTHORITY.root_pem)
    yield Settings(upstream_ca=str(file))
    upstream._contexts.cache_clear()


class TlsOrigin:
    """An origin behind TLS, as `host`; what it was told in the handshake is kept."""

    def __init__(self, pages: PathOrigin, host: str = HOST, context: ssl.SSLContext | None = None) -> None:
        self.pages = pages
        self.context = context or LEAVES.context_for(host)
        self.writer: asyncio.StreamWriter | None = None
        self.ragged = False
        self.resumed: list[bool] = []
        self.alpn: list[str | None] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await writer.start_tls(self.context)
            found = writer.get_extra_info("ssl_object")
            self.resumed.append(found.session_reused)
            self.alpn.append(found.selected_alpn_protocol())
            if self.ragged:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of")
                await writer.drain()
                raw = writer.get_extra_info("socket")
                copy = socket.socket(fileno=raw.fileno())
                copy.shutdown(socket.SHUT_WR)  # a FIN without close_notify
                copy.detach()
                await reader.read()
            else:
                await self.pages(reader, writer)


@contextlib.asynccontextmanager
async def tls_client(lab: Lab, connection: Connection | None = None) -> AsyncIterator[Client]:
    """A client in TLS, through the accepting side that the door uses."""
    loop = asyncio.get_running_loop()
    if connection is None:
        connection = lab.connection()
        connection.destination = Destination(443, proved=NAME)
        connection.tls, connection.sni = True, HOST
    outer, inner = socket.socketpair()
    outer.setblocking(False)
    accepting = asyncio.ensure_future(accept_tls(loop, inner, LEAVES.context_for(HOST), b"", DEADLINE))
    reader, writer = await asyncio.open_connection(
        sock=outer, ssl=client_context(AUTHORITY.root_pem), server_hostname=HOST
    )
    engine = Engine(connection, await accepting)
    lab.engines.append(engine)
    task = loop.create_task(engine.run())
    lab.tasks.append(task)
    client = Client(reader, writer, task)
    lab.clients.append(client)
    yield client
    await client.over()


def test_both_sides_speak_tls_and_the_judged_name_is_verified(settings: Settings) -> None:
    async def test() -> None:
        pages = PathOrigin()
        origin = TlsOrigin(pages)
        async with laboratory(origin, RULE, settings=settings) as lab, tls_client(lab) as client:
            assert [(await client.ask("GET /n")).body for _ in range(2)] == [b"1", b"2"]
            assert (await client.ask("GET /n", host="evil.example.com")).status == 403
            assert await client.closed() == b""
            assert lab.dialer.dials == [(NAME, 443)]
            assert origin.alpn == ["http/1.1"]
            assert {record.scheme for record in lab.records.all} == {"https"}

    run(test())


def test_a_certificate_for_another_name_gets_no_byte_of_the_request(settings: Settings) -> None:
    async def test() -> None:
        pages = PathOrigin()
        async with (
            laboratory(TlsOrigin(pages, "evil.example.com"), RULE, settings=settings) as lab,
            tls_client(lab) as client,
        ):
            answer = await client.ask("GET /n")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (502, "upstream_tls")
            assert pages.heads == b""
            end = lab.records.of("end")[0]
            assert (end.reason, end.bytes_up) == ("upstream_tls", 0)
            assert end.detail is not None
            assert end.detail.startswith("certificate: ")

    run(test())


def test_a_certificate_that_nobody_we_trust_has_signed_gets_no_byte_of_the_request(tmp_path: Path) -> None:
    file = tmp_path / "other.pem"
    file.write_text(make_authority().root_pem)

    async def test() -> None:
        pages = PathOrigin()
        own = Settings(upstream_ca=str(file))
        async with laboratory(TlsOrigin(pages), RULE, settings=own) as lab, tls_client(lab) as client:
            assert (await client.ask("GET /n")).headers["x-egressd-reason"] == "upstream_tls"
            assert pages.heads == b""

    run(test())
    upstream._contexts.cache_clear()


def test_a_host_that_wants_a_client_certificate_is_named_as_such(settings: Settings) -> None:
    context = Leaves(AUTHORITY.issuer).context_for(HOST)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=AUTHORITY.root_pem)

    def shake(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # asyncio's own server side would not send the alert
            context.wrap_socket(sock, server_side=True).close()

    async def origin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined] # it is a read transport too
        sock = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        sock.settimeout(DEADLINE)
        await asyncio.to_thread(shake, sock)
        sock.close()

    async def test() -> None:
        async with laboratory(origin, RULE, settings=settings) as lab, tls_client(lab) as client:
            answer = await client.ask("GET /n")
            assert answer.headers["x-egressd-reason"] == "upstream_wants_client_certificate"

    run(test())


def test_a_host_that_speaks_no_tls_is_an_upstream_error(settings: Settings) -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def test() -> None:
        async with laboratory(plain, RULE, settings=settings) as lab, tls_client(lab) as client:
            assert (await client.ask("GET /n")).headers["x-egressd-reason"] == "upstream_tls"

    run(test())


def test_a_host_that_never_finishes_the_handshake_times_out(settings: Settings) -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def test() -> None:
        slow = settings.model_copy(update={"handshake_timeout": 0.2})
        async with laboratory(silent, RULE, settings=slow) as lab, tls_client(lab) as client:
            answer = await client.ask("GET /n")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (504, "upstream_timeout")

    run(test())


def test_a_stream_that_is_cut_ends_no_body(settings: Settings) -> None:
    async def test() -> None:
        origin = TlsOrigin(PathOrigin())
        origin.ragged = True
        async with laboratory(origin, RULE, settings=settings) as lab, tls_client(lab) as client:
            with pytest.raises(asyncio.IncompleteReadError):
                await client.ask("GET /n")
            assert lab.records.ends() == ["upstream_closed"]

    run(test())


def test_a_session_is_resumed_for_the_same_sandbox_and_no_other(settings: Settings) -> None:
    async def test() -> None:
        origin = TlsOrigin(PathOrigin())
        async with laboratory(origin, RULE, settings=settings) as lab:
            for sandbox in ("sb-1", "sb-1", "sb-2"):
                lab.sandbox.id = sandbox
                async with tls_client(lab) as client:
                    assert (await client.ask("GET /n")).status == 200
            assert origin.resumed == [False, True, False]

    run(test())


@pytest.mark.parametrize("target", ["http://" + HOST + "/n", "http://evil.example.com/n"])
def test_an_absolute_target_in_the_clear_does_not_agree_with_a_tls_connection(
    target: str, settings: Settings
) -> None:
    async def test() -> None:
        pages = PathOrigin()
        async with laboratory(TlsOrigin(pages), RULE, settings=settings) as lab, tls_client(lab) as client:
            assert (await client.ask(f"GET {target}")).headers["x-egressd-reason"] == "authority_mismatch"
            assert pages.heads == b""

    run(test())


def test_a_denied_connection_is_explained_inside_its_tls(settings: Settings) -> None:
    async def test() -> None:
        async with laboratory(TlsOrigin(PathOrigin()), RULE, settings=settings) as lab:
            connection = lab.connection()
            connection.tls, connection.sni = True, HOST
            connection.destination = Destination(443, proved=NAME)
            connection.decision = Decision("deny", Reason.DENIED_BY_RULE, RULE)
            async with tls_client(lab, connection) as client:
                answer = await client.ask("GET /n")
                assert answer.headers["x-egressd-reason"] == "denied_by_rule"
            assert lab.records.of("decision")[0].rule == "origin"
            assert lab.dialer.dials == []

    run(test())
