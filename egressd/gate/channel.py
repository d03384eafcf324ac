"""The channel between control and one worker: fixed-schema, length-capped JSON datagrams, with descriptors beside them.

A worker parses hostile bytes and may fall to them, so control believes nothing here that the schema does not say: every message
is one of `gate.messages`, at most `MESSAGE_LIMIT` bytes, on a SOCK_SEQPACKET pair (unix(7)) where a datagram is whole or not
there. What is larger than a message travels as a sealed memfd (memfd_create(2), F_ADD_SEALS) whose descriptor comes with it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

MESSAGE_LIMIT = 64 * 1024
"""Largest message in bytes, in both directions."""
DESCRIPTOR_LIMIT = 32
"""Most descriptors beside one message (the kernel's own limit is SCM_MAX_FD, 253)."""
QUEUE_LIMIT = 16_384
"""Messages that wait for the other side to read; one that has more waiting reads no longer, and is given up."""
_TURN = 0.005
"""Seconds for which one side's messages are read without looking at anybody else's."""
PAYLOAD_LIMIT = 64 * 1024 * 1024
"""Largest sealed payload in bytes: a policy of 100,000 hosts takes about 12 MiB."""

_SENT_LOOK = 0.01
PATIENCE = 0.25
"""Seconds that `press` stands still for one backlog, in all."""
_PEER_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN})


class ChannelBroken(Exception):
    """The other side is gone or sent what no message is."""


def sealed(payload: bytes) -> int:
    """Return a descriptor of a memfd that holds `payload` and can neither grow, shrink nor be written again."""
    fd = os.memfd_create("egressd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(payload)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unsealed(fd: int) -> bytes:
    """Return the payload of a sealed memfd and close it; raises ChannelBroken when it is larger than PAYLOAD_LIMIT."""
    try:
        size = os.fstat(fd).st_size
        if size > PAYLOAD_LIMIT:
            raise ChannelBroken(f"payload of {size} bytes")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


def receive[M](sock: socket.socket, adapter: TypeAdapter[M]) -> tuple[M, list[int]]:
    """Return the next message and its descriptors (close-on-exec).

    Raises ChannelBroken, or BlockingIOError when there is none.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MESSAGE_LIMIT, socket.CMSG_SPACE(DESCRIPTOR_LIMIT * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            got = array.array("i")
            got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
            fds.extend(got)
    try:
        if not data:
            raise ChannelBroken("closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ChannelBroken("message too large")
        return adapter.validate_json(data), fds
    except (ChannelBroken, ValidationError) as broken:
        for fd in fds:
            os.close(fd)
        if isinstance(broken, ValidationError):  # its text would repeat what the other side sent
            raise ChannelBroken(f"{broken.error_count()} schema errors") from None
        raise


class Channel[In: BaseModel]:
    """One end of the pair on an event loop: messages out in order, messages in by callback.

    `on_message(message, descriptors)` owns the descriptors. `on_closed(reason)` is called once, when the other side is gone,
    sent something malformed, or `on_message` raised; the socket is closed before it is called.
    """

    def __init__(
        self,
        sock: socket.socket,
        adapter: TypeAdapter[Any],
        on_message: Callable[[In, list[int]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Take over `sock`, a SOCK_SEQPACKET socket, and start reading."""
        self._sock = sock
        self._adapter = adapter
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._open = True
        self._patience = PATIENCE
        self._deaf = False  # the other side is gone and takes nothing more
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: BaseModel, descriptors: Sequence[int] = ()) -> None:
        """Queue a message; the descriptors are duplicated at once, so the caller keeps its own.

        Raises ChannelBroken, or OSError when they cannot be duplicated.
        """
        data = message.model_dump_json().encode()
        if not self._open or self._deaf:
            raise ChannelBroken("closed")
        if len(data) > MESSAGE_LIMIT:
            raise ChannelBroken(f"message of {len(data)} bytes")
        if len(self._queue) >= QUEUE_LIMIT:
            self._loop.call_soon(self._fail, "reads nothing")
            raise ChannelBroken("the other side reads nothing")
        copies: list[int] = []
        try:
            copies.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in descriptors)
        except OSError:  # out of descriptors: nothing is queued, and none of ours stays open
            for fd in copies:
                os.close(fd)
            raise
        self._queue.append((data, copies))
        if len(self._queue) == 1:
            self._flush()

    def close(self) -> None:
        """Close this end without calling `on_closed`."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._lose_queue()

    def press(self) -> bool:
        """Stand still until the kernel has all that was sent, PATIENCE at most for one backlog; returns whether it has.

        What the kernel has is read by the other side even when this process is killed in the next moment.
        """
        if self._queue and self._open:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            while self._patience > 0:
                began, before = time.monotonic(), len(self._queue)
                poll.poll(self._patience * 1000)
                self._flush()
                self._patience -= time.monotonic() - began
                if not self._queue or len(self._queue) == before:  # no more is taken, whatever the reason
                    break
        return not self._queue

    async def sent(self) -> None:
        """Return once the other side can read all that was sent, or will read nothing more."""
        while self._queue and self._open:  # noqa: ASYNC110 -- at the end of a life, once
            await asyncio.sleep(_SENT_LOOK)

    def finish(self) -> None:
        """Read what the other side said before its end, and close this one, without calling `on_closed`."""
        self._on_closed = _nothing
        while self._open and self._readable():
            pass
        self.close()

    def _lose_queue(self) -> None:
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._on_closed(reason)

    def _flush(self) -> None:
        while self._queue and self._open:
            data, fds = self._queue[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._sock.sendmsg([data], rights)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    self._loop.call_later(0.01, self._flush)
                    return
                if error.errno in _PEER_GONE:
                    self._lose_queue()
                    self._loop.remove_writer(self._sock.fileno())
                    self._deaf = True  # what the other side said before its end is still read
                    return
                self._fail(os.strerror(error.errno or 0))
                return
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        if not self._queue:
            self._patience = PATIENCE
        if self._open:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> bool:
        """Take what has come; returns whether there may be more."""
        until = self._loop.time() + _TURN
        for _ in range(64):
            if not self._open or self._loop.time() > until:
                return self._open
            try:
                message, fds = receive(self._sock, self._adapter)
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionResetError:  # told once, before what the other side sent and we have not read
                continue
            except (ChannelBroken, OSError) as error:
                self._fail(str(error) or type(error).__name__)
                return False
            try:
                self._on_message(message, fds)
            except Exception as error:  # noqa: BLE001 -- the two sides disagree: end the pair
                for fd in fds:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                self._fail(f"{type(error).__name__}: {error}")
                return False
        return True


def _nothing(_reason: str) -> None:
    """Hear of nothing."""
