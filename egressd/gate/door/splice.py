"""Opaque bytes between two connected sockets: copy first, then splice(2) inside the kernel, half-close respected.

A direction starts by copying (cheap for the few kilobytes of a handshake); once `SPLICE_AFTER` bytes have passed it goes on
through a pipe with splice(2), which never brings the bytes into this process. Both directions are driven by the event loop's
readiness callbacks; each wake-up moves at most `CHUNK` bytes, so that neither direction nor another connection starves.

Bytes are counted against the limits of their direction before they go on, and none are read that may not. Where there is
no room, the direction waits if there soon will be, and else the connection is cut as `rate_limited`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import socket
import time

from egressd.gate.buckets import Meter
from egressd.policy.reasons import Reason

CHUNK = 256 * 1024
SPLICE_AFTER = 128 * 1024
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_UNBOUND = Meter()
_LEAST_WAIT = 0.05
"""Seconds between two looks: many transfers that share a limit would else wake at each other's every piece."""


class _Half:
    """One direction: bytes read from `source` and written to `sink`, as `meter` lets them."""

    __slots__ = (
        "_held",
        "_held_count",
        "_pipe",
        "_rest",
        "_timer",
        "done",
        "loop",
        "meter",
        "moved",
        "sink",
        "source",
        "splice",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        sink: socket.socket,
        splice: Splice,
        meter: Meter,
    ) -> None:
        self.loop = loop
        self.source = source
        self.sink = sink
        self.splice = splice
        self.meter = meter
        self.moved = 0
        self.done = False
        self._rest = b""  # read by others, and not yet counted
        self._held = b""  # copied but not yet written
        self._held_count = 0  # bytes in the pipe
        self._pipe: tuple[int, int] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, first: bytes) -> None:
        self._rest = first
        self._next()

    def _next(self) -> None:
        """Go on with what was read before this, as far as there is room for it, then with what is to be read."""
        if self.done:  # the other direction has ended both
            return
        if not self._rest:
            self.loop.add_reader(self.source, self._read)
            return
        now = time.monotonic()
        room = self.meter.room(now, len(self._rest))
        if not room:
            self._wait(self.meter.pause(now, len(self._rest)))
            return
        self.meter.take(now, room)
        self._held, self._rest = self._rest[:room], self._rest[room:]
        self._write()

    def _read(self) -> None:
        try:
            now = time.monotonic()
            room = self.meter.room(now, CHUNK)
            if not room:
                self._read_nothing(now)
            elif self.moved >= SPLICE_AFTER and self._open_pipe():
                self._read_spliced(now, room)
            else:
                self._read_copied(now, room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.splice.broken(upstream=self.source is self.splice.upstream)

    def _read_copied(self, now: float, room: int) -> None:
        self._held = self.source.recv(min(room, CHUNK))
        self._took(now, len(self._held))

    def _read_spliced(self, now: float, room: int) -> None:
        assert self._pipe is not None
        self._held_count = os.splice(self.source.fileno(), self._pipe[1], min(room, CHUNK), flags=_FLAGS)
        self._took(now, self._held_count)

    def _took(self, now: float, count: int) -> None:
        self.splice.touched = now
        if not count:
            self._end()
            return
        self.meter.take(now, count)
        self.loop.remove_reader(self.source)
        self._write()

    def _read_nothing(self, now: float) -> None:
        """There is something to read, and no room: only the end needs none."""
        if not self.source.recv(1, socket.MSG_PEEK):
            self._end()
            return
        self.loop.remove_reader(self.source)
        self._wait(self.meter.pause(now, CHUNK))

    def _wait(self, seconds: float) -> None:
        if math.isinf(seconds):
            self.splice.cut(Reason.RATE_LIMITED)
        else:
            self._timer = self.loop.call_later(max(seconds, _LEAST_WAIT), self._next)

    def _write(self) -> None:
        try:
            while self._held:
                sent = self.sink.send(self._held)
                self.moved += sent
                self._held = self._held[sent:]
            while self._held_count:
                assert self._pipe is not None
                sent = os.splice(self._pipe[0], self.sink.fileno(), self._held_count, flags=_FLAGS)
                self.moved += sent
                self._held_count -= sent
        except (BlockingIOError, InterruptedError):
            self.loop.add_writer(self.sink, self._write)
            return
        except OSError:
            self.splice.broken(upstream=self.sink is self.splice.upstream)
            return
        self.splice.touched = time.monotonic()
        self.loop.remove_writer(self.sink)
        self._next()

    def _open_pipe(self) -> bool:
        if self._pipe is None:
            try:
                self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # out of descriptors: copying still works
                return False
            with contextlib.suppress(OSError):  # over pipe-user-pages-soft: the default size does
                fcntl.fcntl(self._pipe[1], fcntl.F_SETPIPE_SZ, CHUNK)
        return True

    def _end(self) -> None:
        self.loop.remove_reader(self.source)
        self.done = True
        with contextlib.suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)
        self.splice.half_done()

    def close(self) -> None:
        self.done = True
        if self._timer is not None:
            self._timer.cancel()
        if self._pipe is not None:
            for fd in self._pipe:
                os.close(fd)
            self._pipe = None


class Splice:
    """Two sockets joined until both have ended, one has broken, the idle time has passed or `cut` is called.

    `up` and `down` count payload bytes from and to the client; `reason` says how it ended once `wait` has returned.
    """

    def __init__(
        self,
        client: socket.socket,
        upstream: socket.socket,
        idle_timeout: float,
        *,
        upload: Meter = _UNBOUND,
        download: Meter = _UNBOUND,
    ) -> None:
        """Take two connected non-blocking sockets; they are closed when `wait` returns."""
        self.client = client
        self.upstream = upstream
        self.idle_timeout = idle_timeout
        self.touched = time.monotonic()
        self.reason = Reason.INTERNAL_ERROR
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._over: asyncio.Future[None] = loop.create_future()
        self._up = _Half(loop, client, upstream, self, upload)
        self._down = _Half(loop, upstream, client, self, download)

    @property
    def up(self) -> int:
        """Payload bytes moved from the client to the upstream."""
        return self._up.moved

    @property
    def down(self) -> int:
        """Payload bytes moved from the upstream to the client."""
        return self._down.moved

    async def run(self, first: bytes = b"") -> Reason:
        """Send `first` upstream, carry both directions to their end, close both sockets, return how it ended."""
        try:
            self._up.start(first)
            self._down.start(b"")
            while not self._over.done():
                left = self.touched + self.idle_timeout - time.monotonic()
                if left <= 0:
                    self._finish(Reason.IDLE_TIMEOUT, reset=True)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await asyncio.shield(self._over)
        except asyncio.CancelledError:
            self._finish(Reason.SHUTDOWN, reset=True)
            raise
        finally:
            self._finish(Reason.INTERNAL_ERROR, reset=True)
        return self.reason

    def half_done(self) -> None:
        """One direction has ended; both ended means completed."""
        if self._up.done and self._down.done:
            self._finish(Reason.COMPLETED, reset=False)

    def broken(self, *, upstream: bool) -> None:
        """A socket failed: reset the other one too, since the stream cannot be whole any more."""
        self._finish(Reason.UPSTREAM_CLOSED if upstream else Reason.CLIENT_CLOSED, reset=True)

    def cut(self, reason: Reason) -> None:
        """End both sides at once."""
        self._finish(reason, reset=True)

    def _finish(self, reason: Reason, *, reset: bool) -> None:
        if self._over.done():
            return
        self.reason = reason
        self._over.set_result(None)
        for half in (self._up, self._down):
            half.close()
        for sock in (self.client, self.upstream):
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            if reset:
                reset_on_close(sock)
            sock.close()


def reset_on_close(sock: socket.socket) -> None:
    """Make the next close send a reset instead of a FIN (SO_LINGER with time zero, socket(7))."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
