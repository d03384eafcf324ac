"""Opaque bytes: both directions, half-close, long streams, cuts, idleness; nothing left open."""

import asyncio
import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from egressd.gate.buckets import Meter, TokenBucket
from egressd.gate.door.splice import SPLICE_AFTER, Splice
from egressd.policy.reasons import Reason


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected TCP sockets, the second non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    near.setblocking(False)
    far.setblocking(False)
    return far, near


async def joined(
    body: Callable[[socket.socket, socket.socket, Splice], Awaitable[None]],
    *,
    first: bytes = b"",
    idle: float = 5.0,
    upload: Meter | None = None,
    download: Meter | None = None,
) -> Splice:
    client, ours = pair()
    origin, upstream = pair()
    with client, origin:
        splice = Splice(ours, upstream, idle, upload=upload or Meter(), download=download or Meter())
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(splice.run(first))
            await body(client, origin, splice)
    return splice


async def read_all(sock: socket.socket) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    while part := await loop.sock_recv(sock, 1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("size", [0, 1, SPLICE_AFTER - 1, SPLICE_AFTER + 1, 9_000_000])
def test_both_directions_arrive_whole_and_are_counted(size: int) -> None:
    up, down = os.urandom(size), os.urandom(size)

    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()

        async def send(sock: socket.socket, data: bytes) -> None:
            await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)

        _, _, got_up, got_down = await asyncio.gather(
            send(client, up), send(origin, down), read_all(origin), read_all(client)
        )
        assert hashlib.sha256(got_up).digest() == hashlib.sha256(b"hello" + up).digest()
        assert hashlib.sha256(got_down).digest() == hashlib.sha256(down).digest()

    splice = asyncio.run(joined(body, first=b"hello"))
    assert (splice.up, splice.down, splice.reason) == (size + 5, size, Reason.COMPLETED)


def test_half_close_leaves_the_other_direction_open() -> None:
    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"ask")
        client.shutdown(socket.SHUT_WR)
        assert await read_all(origin) == b"ask"
        await loop.sock_sendall(origin, b"answer")
        assert await loop.sock_recv(client, 100) == b"answer"
        origin.shutdown(socket.SHUT_WR)

    assert asyncio.run(joined(body)).reason is Reason.COMPLETED


def test_a_cut_resets_both_sides_at_once() -> None:
    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"x")
        await loop.sock_recv(origin, 1)
        splice.cut(Reason.REVOKED)
        for sock in (client, origin):
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(sock, 1)

    assert asyncio.run(joined(body)).reason is Reason.REVOKED


def test_a_reset_of_one_side_reaches_the_other() -> None:
    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"x")
        await loop.sock_recv(origin, 1)
        origin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        origin.close()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(client, 1)

    assert asyncio.run(joined(body)).reason is Reason.UPSTREAM_CLOSED


def test_silence_on_both_sides_ends_it() -> None:
    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        with pytest.raises(ConnectionResetError):
            await asyncio.get_running_loop().sock_recv(client, 1)

    assert asyncio.run(joined(body, idle=0.05)).reason is Reason.IDLE_TIMEOUT


def test_a_slow_reader_stops_the_sender_and_loses_nothing() -> None:
    data = os.urandom(30_000_000)

    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(loop.sock_sendall(client, data))
        done, _ = await asyncio.wait({sending}, timeout=0.3)
        assert not done, "30 MB were taken although nobody reads them"
        digest, left = hashlib.sha256(), len(data)
        while left:
            part = await loop.sock_recv(origin, 1 << 18)
            digest.update(part)
            left -= len(part)
        assert digest.digest() == hashlib.sha256(data).digest()
        await sending
        client.shutdown(socket.SHUT_WR)
        origin.shutdown(socket.SHUT_WR)

    assert asyncio.run(joined(body)).reason is Reason.COMPLETED


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    test_both_directions_arrive_whole_and_are_counted(SPLICE_AFTER * 3)
    assert len(os.listdir("/proc/self/fd")) == before


# limits


def day(amount: int) -> Meter:
    """So many bytes and, for the length of a test, no more."""
    return Meter((TokenBucket(amount, 10**9),))


@pytest.mark.parametrize("limit", [100, 70_000, SPLICE_AFTER + 70_000], ids=["at once", "copied", "spliced"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_limit_cuts_a_connection_at_its_last_byte(way: str, limit: int) -> None:
    got: list[bytes] = []

    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()
        source, sink = (client, origin) if way == "up" else (origin, client)

        async def send() -> None:
            with contextlib.suppress(OSError):
                await loop.sock_sendall(source, bytes(2_000_000))

        async def receive() -> None:
            with contextlib.suppress(ConnectionResetError):
                while part := await loop.sock_recv(sink, 1 << 16):
                    got.append(part)

        await asyncio.gather(send(), receive())

    meter = day(limit)
    up, down = (meter, None) if way == "up" else (None, meter)
    splice = asyncio.run(joined(body, upload=up, download=down))
    assert splice.reason is Reason.RATE_LIMITED
    assert sum(map(len, got)) <= (splice.up if way == "up" else splice.down) <= limit
    assert meter.room(time.monotonic(), 10) == 0


def test_as_many_bytes_as_a_limit_has_pass_and_the_end_too() -> None:
    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, bytes(1000))
        client.shutdown(socket.SHUT_WR)
        assert len(await read_all(origin)) == 1005
        await loop.sock_sendall(origin, bytes(500))
        origin.shutdown(socket.SHUT_WR)
        assert len(await read_all(client)) == 500

    splice = asyncio.run(joined(body, first=b"hello", upload=day(1005), download=day(500)))
    assert (splice.up, splice.down, splice.reason) == (1005, 500, Reason.COMPLETED)


def test_what_was_read_before_is_counted_too() -> None:
    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert len(await read_all(origin)) <= 4

    splice = asyncio.run(joined(body, first=b"hello", upload=day(4)))
    assert (splice.up, splice.reason) == (4, Reason.RATE_LIMITED)


def test_a_fast_limit_slows_down_and_does_not_cut() -> None:
    size = 700_000
    took = 0.0

    async def body(client: socket.socket, origin: socket.socket, splice: Splice) -> None:
        nonlocal took
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def send() -> None:
            await loop.sock_sendall(client, bytes(size))
            client.shutdown(socket.SHUT_WR)

        _, got = await asyncio.gather(send(), read_all(origin))
        took = loop.time() - began
        assert len(got) == size
        origin.shutdown(socket.SHUT_WR)

    splice = asyncio.run(joined(body, upload=Meter((TokenBucket(400_000, 1),))))
    assert (splice.up, splice.reason) == (size, Reason.COMPLETED)
    assert took >= 0.7, "300,000 bytes at 400,000 a second"
