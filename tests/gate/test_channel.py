"""The channel between control and worker: whole messages, descriptors, and an end at the first malformed one."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from egressd.gate.channel import MESSAGE_LIMIT, PATIENCE, Channel, ChannelBroken, sealed, unsealed
from egressd.gate.messages import TO_CONTROL, TO_WORKER, ListenerSpec, Ready, Records, Serve, Spent


class End:
    """One end that remembers what came."""

    def __init__(self, sock: socket.socket, adapter: Any) -> None:
        self.messages: list[tuple[Any, list[int]]] = []
        self.reason: str | None = None
        self.moved = asyncio.Event()
        self.channel: Channel[Any] = Channel(sock, adapter, self.got, self.closed)

    def got(self, message: Any, fds: list[int]) -> None:
        self.messages.append((message, fds))
        self.moved.set()

    def closed(self, reason: str) -> None:
        self.reason = reason
        self.moved.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.moved.clear()
                await self.moved.wait()


def with_pair(body: Callable[[socket.socket, End], Awaitable[None]], adapter: Any = TO_CONTROL) -> None:
    async def run() -> None:
        far, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end = End(near, adapter)
        try:
            await body(far, end)
        finally:
            far.close()
            end.channel.close()

    asyncio.run(run())


def test_messages_arrive_in_order_with_their_descriptors() -> None:
    async def body(far: socket.socket, end: End) -> None:
        sender = End(far, TO_CONTROL)
        payload = sealed(b"policy")
        sender.channel.send(
            Serve(sandbox="s", listeners=(ListenerSpec(kind="transparent", family=4),)), (payload,)
        )
        os.close(payload)
        for batch in range(500):
            sender.channel.send(Serve(sandbox=f"s{batch}", listeners=()))
        await end.until(lambda: len(end.messages) == 501)
        message, fds = end.messages[0]
        assert message.sandbox == "s"
        assert unsealed(fds[0]) == b"policy"
        assert [m.sandbox for m, _ in end.messages[1:]] == [f"s{n}" for n in range(500)]
        sender.channel.close()

    with_pair(body, TO_WORKER)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"{}", id="no type"),
        pytest.param(b'{"type":"ready","more":1}', id="unknown field"),
        pytest.param(b'{"type":"serve","sandbox":"x","listeners":[]}', id="a message of the other direction"),
        pytest.param(b'{"type":"pair","pair":"x","sandbox":"a","name":"b","address":"c"}', id="wrong type"),
        pytest.param(b"\xff\x00", id="no JSON"),
        pytest.param(b"[" * 60_000, id="deep"),
        pytest.param(b"x" * (MESSAGE_LIMIT + 1), id="too large"),
    ],
)
def test_a_malformed_message_ends_the_channel_and_says_nothing_of_it(data: bytes) -> None:
    async def body(far: socket.socket, end: End) -> None:
        far.sendall(data)
        await end.until(lambda: end.reason is not None)
        assert not end.messages
        assert end.reason is not None
        assert len(end.reason) < 100
        assert far.recv(10) == b""

    with_pair(body)


def test_the_other_side_gone_is_told_once() -> None:
    async def body(far: socket.socket, end: End) -> None:
        far.close()
        await end.until(lambda: end.reason is not None)
        assert end.reason == "closed"
        with pytest.raises(ChannelBroken):
            end.channel.send(Ready())

    with_pair(body)


def test_a_handler_that_raises_ends_the_channel() -> None:
    async def body(far: socket.socket, end: End) -> None:
        def refuse(message: Any, fds: list[int]) -> None:
            raise ValueError("no")

        end.channel._on_message = refuse  # the fault is injected where control would raise
        far.sendall(Ready().model_dump_json().encode())
        await end.until(lambda: end.reason is not None)
        assert end.reason == "ValueError: no"

    with_pair(body)


def test_a_message_over_the_limit_is_not_sent() -> None:
    async def body(far: socket.socket, end: End) -> None:
        with pytest.raises(ChannelBroken):
            end.channel.send(Records(batch=1, records=({"detail": "x" * MESSAGE_LIMIT},)))

    with_pair(body)


def test_a_sealed_payload_cannot_be_changed_by_who_receives_it() -> None:
    fd = sealed(b"abc")
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert unsealed(fd) == b"abc"


def test_what_a_worker_said_before_its_death_is_read_though_it_cannot_be_answered() -> None:
    async def body(far: socket.socket, end: End) -> None:
        spent = [Spent(sandbox="sbx-1", owner="api", kind="upload", tokens=n) for n in range(200)]
        seen = 0

        def answer(message: Any, fds: list[int]) -> None:
            nonlocal seen
            seen += 1
            with contextlib.suppress(ChannelBroken):
                end.channel.send(Ready())
            end.got(message, fds)

        end.channel._on_message = answer
        end.channel.send(Ready())  # unread at the other end when it dies: the kernel tells that as a reset
        far.setblocking(False)
        for message in spent:
            far.send(message.model_dump_json().encode())
        far.close()
        await end.until(lambda: end.reason is not None)
        assert seen == 200
        assert [message.tokens for message, _ in end.messages] == list(range(200))
        assert end.reason == "closed"
        with pytest.raises(ChannelBroken):
            end.channel.send(Ready())

    with_pair(body)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param('"owner":"api","kind":"upload","tokens":1e999', id="an infinite level"),
        pytest.param('"owner":"api","kind":"bytes","tokens":1', id="a kind that there is not"),
        pytest.param('"owner":7,"kind":"upload","tokens":1', id="an owner that is no text"),
        pytest.param('"owner":"api","kind":"upload","tokens":1,"age":0', id="more than is asked"),
    ],
)
def test_a_level_that_is_none_ends_the_worker(fields: str) -> None:
    async def body(far: socket.socket, end: End) -> None:
        far.send(b'{"type":"spent","sandbox":"sbx-1",%s}' % fields.encode())
        await end.until(lambda: end.reason is not None)
        assert not end.messages

    with_pair(body)


def test_what_was_said_before_the_end_is_read_at_the_end() -> None:
    async def body(far: socket.socket, end: End) -> None:
        for _ in range(100):
            far.send(b'{"type":"ready"}')
        far.close()
        end.channel.finish()
        assert len(end.messages) == 100
        assert end.reason is None, "who closes need not be told"

    with_pair(body)


def test_an_end_does_not_wait_for_what_was_not_said() -> None:
    async def body(far: socket.socket, end: End) -> None:
        far.send(b'{"type":"ready"}')
        end.channel.finish()
        assert len(end.messages) == 1
        with pytest.raises(ChannelBroken):
            end.channel.send(Ready())

    with_pair(body)


def test_one_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.channel.QUEUE_LIMIT", 50)

    async def body(far: socket.socket, end: End) -> None:
        def flood() -> None:
            for _ in range(5_000):
                end.channel.send(Ready())

        with pytest.raises(ChannelBroken, match="reads nothing"):
            flood()
        await end.until(lambda: end.reason is not None)
        assert end.reason == "reads nothing"

    with_pair(body)


def test_one_side_s_flood_leaves_the_loop_to_others() -> None:
    async def body(far: socket.socket, end: End) -> None:
        message = (
            Records(batch=1, records=tuple({"k": "v" * 100} for _ in range(400))).model_dump_json().encode()
        )
        far.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                far.send(message)
                sent += 1
        turns = 0
        while len(end.messages) < sent:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 1
        assert end.reason is None

    with_pair(body)


def test_the_end_waits_for_what_the_other_side_still_reads() -> None:
    async def body(far: socket.socket, end: End) -> None:
        for _ in range(2_000):
            end.channel.send(Ready())
        waiting = asyncio.create_task(end.channel.sent())
        await asyncio.sleep(0)
        assert not waiting.done()
        other = End(far, TO_CONTROL)
        await waiting
        await other.until(lambda: len(other.messages) == 2_000)

    with_pair(body)


def records(number: int) -> Records:
    return Records(batch=number, records=({"detail": "x" * 8000},))


def test_pressing_stands_still_until_the_kernel_has_everything() -> None:
    async def body(far: socket.socket, end: End) -> None:
        count = 0
        taken: list[bytes] = []
        while not end.channel._queue:
            end.channel.send(records(count := count + 1))
        reader = threading.Thread(target=lambda: taken.extend(far.recv(MESSAGE_LIMIT) for _ in range(count)))
        reader.start()
        assert end.channel.press()
        assert end.channel._queue == deque()
        reader.join(30)
        assert len(taken) == count

    with_pair(body)


def test_pressing_on_a_side_that_reads_nothing_is_over_soon_and_only_once_a_backlog() -> None:
    async def body(far: socket.socket, end: End) -> None:
        while len(end.channel._queue) < 3:
            end.channel.send(records(1))
        began = time.monotonic()
        assert not end.channel.press()
        first = time.monotonic() - began
        assert not any(end.channel.press() for _ in range(1000))
        assert first > PATIENCE / 2
        assert time.monotonic() - began - first < first * 10
        while end.channel._queue:  # it reads again: the next backlog is waited for anew
            far.recv(MESSAGE_LIMIT)
            end.channel._flush()
        assert end.channel._patience == PATIENCE

    with_pair(body)


def test_pressing_on_a_side_that_is_gone_returns() -> None:
    async def body(far: socket.socket, end: End) -> None:
        while not end.channel._queue:
            end.channel.send(records(1))
        far.close()
        assert end.channel.press()  # nothing waits any more

    with_pair(body)
