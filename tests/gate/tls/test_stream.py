"""Streams: the order of events, the end in all its forms, flat memory, and what each failure is called."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

import pytest

from egressd.gate.tls.bytestream import HIGH_WATER, PIECE
from egressd.gate.tls.stream import (
    ByteStream,
    ClientRejectedCa,
    ClientTlsError,
    TlsStream,
    UpstreamTlsError,
    accept_plain,
    accept_tls,
    connect_plain,
    connect_tls,
)

from .authority import client_context, make_authority
from .peers import (
    AUTHORITY,
    DEADLINE,
    LEAVES,
    NAME,
    BlockingServer,
    Recorder,
    blocking,
    run,
    tcp_pair,
    tls_pair,
)


def trusting(**changes: Any) -> ssl.SSLContext:
    context = client_context(AUTHORITY.root_pem)
    for name, value in changes.items():
        setattr(context, name, value)
    return context


async def pair(tls: bool, server: Recorder, client: Recorder) -> tuple[ByteStream, ByteStream]:
    if tls:
        return await tls_pair(server, client)
    loop = asyncio.get_running_loop()
    accepted, connected = tcp_pair()
    streams = await accept_plain(loop, accepted, b"", server), await connect_plain(loop, connected)
    streams[1].owner = client
    return streams


def reset(sock: socket.socket) -> None:
    """Make the next close a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
class TestBothKinds:
    def test_bytes_cross_both_ways_and_the_events_come_in_order(self, tls: bool) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await pair(tls, ours, theirs)
            client.write(b"ping")
            await ours.told("data")
            server.write(bytearray(b"po"))
            server.write(memoryview(b"ng"))
            server.write(b"")
            await theirs.until(lambda: bytes(theirs.data) == b"pong")
            client.close()
            await ours.told("eof")
            server.close()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))
            assert ours.data == b"ping"
            assert ours.events == ["ready", "data", "eof", "lost"]
            assert theirs.events[0] == "ready"
            assert theirs.events[-1] == "lost"
            assert (ours.error, theirs.error) == (None, None)
            assert (server.tls, server.clean, server.closed) == (tls, True, True)

        run(talk())

    def test_half_close_lets_the_other_side_go_on(self, tls: bool) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await pair(tls, ours, theirs)
            client.write(b"request")
            client.write_eof()
            client.write(b"never sent")
            await ours.told("eof")
            assert server.clean is True
            server.write(b"answer" * 10_000)
            server.close()
            await theirs.told("eof")
            assert (bytes(ours.data), len(theirs.data)) == (b"request", 60_000)
            client.close()
            await theirs.told("lost")
            assert theirs.error is None

        run(talk())

    def test_half_close_with_unread_data_loses_none_of_it(self, tls: bool) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await pair(tls, ours, theirs)
            await asyncio.gather(ours.told("ready"), theirs.told("ready"))
            server.pause_reading()
            client.write(b"x" * 200_000)
            client.write_eof()
            server.write_eof()
            await theirs.told("eof")
            server.resume_reading()
            await ours.told("eof")
            assert len(ours.data) == 200_000
            server.close()
            client.close()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))

        run(talk())

    def test_a_paused_stream_tells_nothing_until_it_is_resumed(self, tls: bool) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(data=lambda stream: stream.pause_reading()), Recorder()
            server, client = await pair(tls, ours, theirs)
            client.write(b"y" * 300_000)
            client.write_eof()
            await ours.told("data")
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(ours.data) <= PIECE
            while len(ours.data) < 300_000:
                had = len(ours.data)
                server.resume_reading()
                assert len(ours.data) == had, "nothing is told inside resume_reading"
                await ours.until(lambda had=had: len(ours.data) > had)  # type: ignore[misc] # had is bound now
            server.resume_reading()
            await ours.told("eof")
            assert ours.largest <= PIECE
            server.abort()
            client.abort()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))

        run(talk())

    def test_data_waits_for_an_owner_and_is_bounded(self, tls: bool) -> None:
        async def talk() -> None:
            theirs = Recorder()
            loop = asyncio.get_running_loop()
            if tls:
                server, client = (await tls_pair(None, theirs))[::1]
            else:
                accepted, connected = tcp_pair()
                server = await accept_plain(loop, accepted, b"")  # type: ignore[assignment] # either kind
                client = await connect_plain(loop, connected)  # type: ignore[assignment] # either kind
                client.owner = theirs
            await theirs.told("ready")
            for _ in range(100):
                client.write(b"z" * PIECE)
            await theirs.until(lambda: client.paused)
            assert kept(server) <= 2 * PIECE
            ours = Recorder()
            server.owner = ours
            await ours.until(lambda: len(ours.data) == 100 * PIECE)
            assert ours.events[:2] == ["ready", "data"]
            client.close()
            await ours.told("eof")
            server.close()
            await ours.told("lost")

        run(talk())

    def test_a_stream_that_died_without_an_owner_tells_the_next_one_all(self, tls: bool) -> None:
        async def talk() -> None:
            theirs = Recorder()
            if tls:
                server, client = await tls_pair(None, theirs)
                client.write(b"last words")
                client.close()
                await theirs.told("lost")
                ours = Recorder()
                server.owner = ours
                await ours.told("eof")
            else:
                loop = asyncio.get_running_loop()
                accepted, connected = tcp_pair()
                plain = await accept_plain(loop, accepted, b"")
                connected.sendall(b"last words")
                connected.close()
                ours = Recorder()
                plain.owner = ours
                await ours.told("eof")
                plain.close()
            if tls:
                server.close()
            await ours.told("lost")
            assert (bytes(ours.data), ours.events) == (b"last words", ["ready", "data", "eof", "lost"])

        run(talk())

    def test_a_reset_is_told_once_with_its_error(self, tls: bool) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await pair(tls, ours, theirs)
            await asyncio.gather(ours.told("ready"), theirs.told("ready"))
            reset(client.socket)
            client.abort()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))
            assert isinstance(ours.error, ConnectionResetError)
            assert theirs.error is None, "our own abort is no error"
            assert ours.events == ["ready", "lost"]
            for call in (server.close, server.abort, server.write_eof, server.linger, server.resume_reading):
                call()
            server.write(b"into the void")
            await asyncio.sleep(0)
            assert ours.events.count("lost") == 1

        run(talk())

    def test_back_pressure_is_told_and_memory_stays_flat(self, tls: bool) -> None:
        async def talk() -> None:
            total, piece = 16 * 1024 * 1024, b"m" * (48 * 1024)
            sent = waiting = received = behind = 0

            def fill(stream: ByteStream) -> None:
                nonlocal sent, waiting
                while sent < total and not stream.paused:
                    stream.write(piece)
                    sent += len(piece)
                    waiting = max(waiting, stream.waiting)
                if sent >= total:
                    stream.close()

            ours = Recorder(ready=fill, resume=fill)
            _, client = await (tls_pair(ours, None, 32_768) if tls else _small_plain(ours))
            loop = asyncio.get_running_loop()

            class Slow(Recorder):
                """Takes a piece, then rests for a turn of the loop."""

                def on_data(self, stream: ByteStream, data: bytes) -> None:
                    nonlocal received, behind
                    received += len(data)
                    behind = max(behind, kept(stream))
                    stream.pause_reading()
                    loop.call_soon(stream.resume_reading)
                    self._note("data", stream)

            theirs = Slow()
            client.owner = theirs
            async with asyncio.timeout(60):
                await theirs.told("eof")
            client.close()
            await theirs.told("lost")
            assert received == sent >= total
            assert waiting <= HIGH_WATER + 2 * PIECE
            assert behind <= 2 * PIECE
            assert {"pause", "resume"} <= set(ours.events)

        run(talk())

    @pytest.mark.parametrize("event", ["ready", "data", "eof", "pause"])
    def test_an_owner_that_raises_aborts_the_stream(self, tls: bool, event: str) -> None:
        async def talk() -> None:
            def fail(stream: ByteStream) -> None:
                raise LookupError("bug")

            ours = Recorder(**{event: fail})
            theirs = Recorder()
            _, client = await pair(tls, ours, theirs)
            await theirs.told("ready")
            if event == "pause":
                theirs_reads_nothing(client)
                server = _
                await ours.told("ready")
                while "lost" not in ours.events and not server.closed:
                    server.write(b"p" * PIECE)
                    await asyncio.sleep(0)
            client.write(b"data")
            client.write_eof()
            await ours.told("lost")
            assert isinstance(ours.error, LookupError)
            client.abort()
            await theirs.told("lost")

        run(talk())

    def test_a_last_word_arrives_although_the_peer_still_sends(self, tls: bool) -> None:
        async def talk() -> None:
            def refuse(stream: ByteStream) -> None:
                stream.write(b"refused")
                stream.linger()

            ours = Recorder(data=refuse)
            theirs = Recorder()
            _, client = await pair(tls, ours, theirs)
            await theirs.told("ready")
            client.write(b"u" * 3 * PIECE)
            await theirs.told("eof")
            assert theirs.data == b"refused"
            client.close()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))
            assert ours.events == ["ready", "data", "lost"]

        run(talk())

    def test_lingering_ends_when_the_peer_sends_for_ever(self, tls: bool) -> None:
        async def talk() -> None:
            ours = Recorder(data=lambda stream: stream.linger(seconds=60, limit=100_000))
            theirs = Recorder(pause=lambda stream: None)
            _, client = await pair(tls, ours, theirs)
            await theirs.told("ready")
            for _ in range(64):
                client.write(b"u" * PIECE)
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))

        run(talk())

    def test_lingering_ends_with_its_time(self, tls: bool) -> None:
        async def talk() -> None:
            ours = Recorder(ready=lambda stream: stream.linger(seconds=0.05))
            theirs = Recorder()
            _, client = await pair(tls, ours, theirs)
            await ours.told("lost")
            client.abort()
            await theirs.told("lost")

        run(talk())

    def test_small_writes_are_not_delayed(self, tls: bool) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            for stream in await pair(tls, ours, theirs):
                assert stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                stream.abort()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))

        run(talk())


async def _small_plain(owner: Recorder) -> tuple[ByteStream, ByteStream]:
    loop = asyncio.get_running_loop()
    accepted, connected = tcp_pair(32_768)
    return await accept_plain(loop, accepted, b"", owner), await connect_plain(loop, connected)


def theirs_reads_nothing(stream: ByteStream) -> None:
    stream.pause_reading()


def kept(stream: ByteStream) -> int:
    """Return the received bytes that a stream holds; a test may look inside."""
    size = sum(map(len, stream._stash))
    if isinstance(stream, TlsStream):
        size += stream._incoming.pending + stream._object.pending()
    return size


def test_a_stream_may_be_closed_by_the_news_that_it_is_empty_again() -> None:
    """asyncio ends a transport twice that is closed from within its resume_writing."""

    async def talk() -> None:
        accepted, connected = tcp_pair()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 1024 * 1024)
        ours = Recorder(resume=lambda stream: stream.close())
        stream = await accept_plain(asyncio.get_running_loop(), accepted, b"", ours)
        await ours.told("ready")
        sent = 0
        while not stream.paused:
            stream.write(b"w" * PIECE)
            sent += PIECE
        connected.settimeout(DEADLINE)
        received = 0
        while received < sent - stream.waiting:  # the kernel's buffers are empty, so the rest goes at once
            received += len(connected.recv(1024 * 1024))
        await ours.told("lost")
        while data := connected.recv(1024 * 1024):
            received += len(data)
        assert received == sent
        connected.close()

    run(talk())


class TestAccepting:
    @pytest.mark.parametrize("lowest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_bytes_read_before_are_fed_in(self, lowest: ssl.TLSVersion) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            context = trusting(minimum_version=lowest, maximum_version=lowest)
            ours = Recorder(data=lambda stream: stream.write(b"hello back"))

            def speak() -> bytes:
                connected.settimeout(DEADLINE)
                with context.wrap_socket(connected, server_hostname=NAME) as client:
                    client.sendall(b"hello")
                    return client.recv(100)

            peer = asyncio.ensure_future(blocking(speak))
            loop = asyncio.get_running_loop()
            accepted.setblocking(False)
            first = await loop.sock_recv(accepted, 100)
            first += await loop.sock_recv(accepted, 10)
            stream = await accept_tls(loop, accepted, LEAVES.context_for(NAME), first, DEADLINE, ours)
            assert await peer == b"hello back"
            assert (stream.alpn, stream.tls_version) == (
                b"http/1.1",
                lowest.name.replace("_", ".").replace("v", "v"),
            )
            assert stream.cipher
            await ours.told("eof")
            stream.close()
            await ours.told("lost")
            assert ours.error is None

        run(talk())

    @pytest.mark.parametrize("lowest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_a_client_that_does_not_trust_us_is_told_apart(self, lowest: ssl.TLSVersion) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            context = client_context(make_authority().root_pem)
            context.minimum_version = lowest

            def speak() -> None:
                connected.settimeout(DEADLINE)
                with pytest.raises(ssl.SSLCertVerificationError):
                    context.wrap_socket(connected, server_hostname=NAME)
                connected.close()

            peer = asyncio.ensure_future(blocking(speak))
            with pytest.raises(ClientRejectedCa) as caught:
                await accept_tls(
                    asyncio.get_running_loop(), accepted, LEAVES.context_for(NAME), b"", DEADLINE
                )
            assert caught.value.detail.endswith("alert_unknown_ca")
            await peer

        run(talk())

    def test_distrust_that_comes_after_the_handshake_is_told_at_the_end(self) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await tls_pair(ours, theirs)
            await ours.told("ready")
            server._bad = _ssl_error("SSLV3_ALERT_CERTIFICATE_UNKNOWN")  # as OpenSSL says it while reading
            client.write(b"wake up")
            await ours.told("lost")
            assert isinstance(ours.error, ClientRejectedCa)
            client.close()
            await theirs.told("lost")

        run(talk())

    @pytest.mark.parametrize(
        ("bytes_sent", "kind", "detail"),
        [
            (b"", "closed", ""),
            (b"\x16\x03\x01\x00", "closed", ""),
            (b"GET / HTTP/1.1\r\n\r\n", "handshake", "http_request"),
            (b"\x15\x03\x01\x00\x02\x02\x28", "handshake", "unexpected_message"),
            (b"\x16\x03\x01\x00\x05hello", "handshake", ""),
        ],
    )
    def test_what_is_no_handshake_has_a_name(self, bytes_sent: bytes, kind: str, detail: str) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            connected.sendall(bytes_sent)
            connected.shutdown(socket.SHUT_WR)
            with pytest.raises(ClientTlsError) as caught:
                await accept_tls(
                    asyncio.get_running_loop(), accepted, LEAVES.context_for(NAME), b"", DEADLINE
                )
            assert (caught.value.kind, detail in caught.value.detail) == (kind, True)
            assert accepted.fileno() == -1 or await _closes(accepted)
            connected.close()

        run(talk())

    def test_a_client_that_hangs_up_on_our_certificate(self) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = trusting().wrap_bio(incoming, outgoing, server_hostname=NAME)
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            connected.sendall(outgoing.read())

            def hang_up() -> None:
                connected.settimeout(DEADLINE)
                assert connected.recv(65536)
                connected.close()

            peer = asyncio.ensure_future(blocking(hang_up))
            with pytest.raises(ClientTlsError) as caught:
                await accept_tls(
                    asyncio.get_running_loop(), accepted, LEAVES.context_for(NAME), b"", DEADLINE
                )
            assert (caught.value.kind, caught.value.detail) == ("closed", "after_certificate")
            await peer

        run(talk())

    def test_a_silent_client_is_dropped_in_time(self) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            with pytest.raises(ClientTlsError) as caught:
                await accept_tls(asyncio.get_running_loop(), accepted, LEAVES.context_for(NAME), b"", 0.05)
            assert caught.value.kind == "timeout"
            assert await _closes(accepted)
            connected.close()

        run(talk())

    def test_cancelling_closes_the_socket(self) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            loop = asyncio.get_running_loop()
            task = asyncio.ensure_future(accept_tls(loop, accepted, LEAVES.context_for(NAME), b"", DEADLINE))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await _closes(accepted)
            connected.close()

        run(talk())

    def test_a_stream_cut_without_close_notify_is_not_clean(self) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await tls_pair(ours, theirs)
            client.write(b"half an ans")
            await ours.told("data")
            client._transport.write_eof()  # a FIN, and no close_notify
            await ours.told("eof")
            assert server.clean is False
            server.close()
            client.abort()
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))

        run(talk())

    @pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n", b"\x17\x03\x03\x00\x20" + b"\x00" * 32])
    def test_bytes_that_are_no_record_end_the_stream_after_what_was_true(self, junk: bytes) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            _, client = await tls_pair(ours, theirs)
            client.write(b"true")
            client._transport.write(junk)
            await asyncio.gather(ours.told("lost"), theirs.told("lost"))
            assert ours.data == b"true"
            assert isinstance(ours.error, ClientTlsError)
            assert ours.error.kind == "broken"
            assert isinstance(theirs.error, UpstreamTlsError)
            assert theirs.error.kind == "broken"

        run(talk())

    def test_data_behind_close_notify_is_not_read(self) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await tls_pair(ours, theirs)
            client.write_eof()
            client._transport.write(b"\x17\x03\x03\x00\x20" + b"\x00" * 32)
            await ours.told("eof")
            server.close()
            client.close()
            await ours.told("lost")
            assert (bytes(ours.data), ours.error, server.clean) == (b"", None, True)

        run(talk())

    def test_renegotiation_is_refused(self) -> None:
        assert LEAVES.context_for(NAME).options & ssl.OP_NO_RENEGOTIATION

    def test_a_peer_that_asks_and_does_not_read_is_dropped(self) -> None:
        async def talk() -> None:
            ours, theirs = Recorder(), Recorder()
            server, client = await tls_pair(ours, theirs)
            await ours.told("ready")
            server.paused = True
            server._unread_replies = 64 * 1024
            server._outgoing.write(b"a reply that OpenSSL makes while reading")
            client.write(b"x")
            await ours.told("lost")
            assert "asks and does not read" in str(ours.error)
            client.abort()

        run(talk())


def _ssl_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


async def _closes(sock: socket.socket) -> bool:
    async with asyncio.timeout(DEADLINE):
        while sock.fileno() != -1:  # noqa: ASYNC110 # nothing tells when asyncio closes a socket
            await asyncio.sleep(0.001)
    return True


def server_context(name: str = NAME) -> ssl.SSLContext:
    return LEAVES.context_for(name)


def wanting_a_certificate(version: ssl.TLSVersion, mode: ssl.VerifyMode) -> ssl.SSLContext:
    from egressd.gate.tls.leaves import Leaves

    context = Leaves(AUTHORITY.issuer).context_for(NAME)
    context.minimum_version = context.maximum_version = version
    context.verify_mode = mode
    return context


def say_hi(sock: ssl.SSLSocket) -> None:
    sock.sendall(b"hi")
    sock.unwrap()


class TestConnecting:
    def connect(
        self,
        server: ssl.SSLContext,
        client: ssl.SSLContext,
        name: str = NAME,
        then: Callable[[ssl.SSLSocket], object] | None = None,
        owner: Callable[[], Recorder] = Recorder,
    ) -> tuple[TlsStream | UpstreamTlsError, Recorder]:
        """Connect to a server of Python's own; return the stream, its life over, or the error."""

        async def talk() -> tuple[TlsStream | UpstreamTlsError, Recorder]:
            accepted, connected = tcp_pair()
            peer = BlockingServer(accepted, server, then)
            ours = owner()
            try:
                stream = await connect_tls(asyncio.get_running_loop(), connected, client, name, DEADLINE)
            except UpstreamTlsError as error:
                await blocking(peer.join)
                return error, ours
            stream.owner = ours
            await ours.until(lambda: bool({"eof", "lost"} & set(ours.events)))
            stream.close()
            await ours.told("lost")
            await blocking(peer.join)
            return stream, ours

        return run(talk())

    def test_a_trusted_server(self) -> None:
        stream, ours = self.connect(server_context(), trusting(), then=say_hi)
        assert isinstance(stream, TlsStream)
        assert (bytes(ours.data), stream.clean, stream.tls_version) == (b"hi", True, "TLSv1.3")
        assert stream.alpn == b"http/1.1"

    @pytest.mark.parametrize(
        ("server", "client", "name", "detail"),
        [
            (lambda: server_context("b.test"), trusting, NAME, "Hostname mismatch"),
            (
                server_context,
                lambda: client_context(make_authority().root_pem),
                NAME,
                "unable to get local issuer",
            ),
            (server_context, lambda: client_context(None), NAME, "unable to get local issuer"),
            (server_context, trusting, "192.0.2.1", "IP address mismatch"),
        ],
        ids=["another name", "another authority", "no authority", "an address"],
    )
    def test_an_untrusted_server_is_refused_before_any_byte_is_sent(
        self,
        server: Callable[[], ssl.SSLContext],
        client: Callable[[], ssl.SSLContext],
        name: str,
        detail: str,
    ) -> None:
        error, ours = self.connect(server(), client(), name)
        assert isinstance(error, UpstreamTlsError)
        assert error.kind == "certificate"
        assert detail in error.detail
        assert ours.events == []

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_a_server_that_wants_a_certificate_of_ours(self, version: ssl.TLSVersion) -> None:
        context = wanting_a_certificate(version, ssl.CERT_REQUIRED)
        found, ours = self.connect(context, trusting(), then=lambda s: s.recv(1))
        error = found if isinstance(found, UpstreamTlsError) else ours.error
        assert isinstance(error, UpstreamTlsError)
        assert error.kind == "client_cert_wanted"

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_a_server_that_would_like_one_is_served(self, version: ssl.TLSVersion) -> None:
        context = wanting_a_certificate(version, ssl.CERT_OPTIONAL)
        stream, _ = self.connect(context, trusting(), then=lambda s: s.unwrap())
        assert isinstance(stream, TlsStream)

    def test_no_common_version(self) -> None:
        old = trusting(maximum_version=ssl.TLSVersion.TLSv1_2)
        new = wanting_a_certificate(ssl.TLSVersion.TLSv1_3, ssl.CERT_NONE)
        error, _ = self.connect(new, old)
        assert isinstance(error, UpstreamTlsError)
        assert error.kind == "handshake"
        assert "protocol_version" in error.detail

    @pytest.mark.parametrize(
        ("answer", "kind"),
        [(b"", "closed"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "handshake"), (None, "timeout")],
    )
    def test_what_is_no_tls_server(self, answer: bytes | None, kind: str) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            if answer is not None:
                accepted.sendall(answer)
                accepted.shutdown(socket.SHUT_WR)
            seconds = DEADLINE if answer is not None else 0.05
            with pytest.raises(UpstreamTlsError) as caught:
                await connect_tls(asyncio.get_running_loop(), connected, trusting(), NAME, seconds)
            assert caught.value.kind == kind
            assert await _closes(connected)
            accepted.close()

        run(talk())

    @pytest.mark.parametrize("name", [".leading.dot", "nul\x00.test", "a" * 300])
    def test_a_name_that_openssl_cannot_ask_for(self, name: str) -> None:
        async def talk() -> None:
            accepted, connected = tcp_pair()
            with pytest.raises(UpstreamTlsError) as caught:
                await connect_tls(asyncio.get_running_loop(), connected, trusting(), name, 1)
            assert caught.value.kind in ("handshake", "closed", "timeout")
            assert connected.fileno() == -1 or await _closes(connected)
            accepted.close()

        run(talk())

    def test_errors_of_both_sides_are_connection_errors(self) -> None:
        for error in (UpstreamTlsError("certificate", "x"), ClientTlsError("closed"), ClientRejectedCa("x")):
            assert isinstance(error, ConnectionError)
