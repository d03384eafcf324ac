"""The one seam between a socket and whoever carries its bytes: the same for plain connections and for TLS.

A stream tells its owner, in this order: `on_ready` once, then `on_data` any number of times, at most one
`on_eof`, and at the very end `on_lost` exactly once; nothing comes after that. Between them `on_pause` and
`on_resume` say that what was written piles up here: an owner that stops writing then (by `pause_reading` on
the stream its bytes come from) has flat memory.

A stream without an owner keeps at most one read of data and stops reading; whoever becomes its owner gets
that first. Streams of one event loop may not be used from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from typing import Final, Protocol

PIECE: Final = 64 * 1024
"""The most that one read takes from a socket, one `on_data` brings, and TLS encrypts before it is sent on."""

HIGH_WATER: Final = 256 * 1024
"""Bytes waiting for the peer above which the owner is asked to stop; it is told to go on below LOW_WATER."""

LOW_WATER: Final = 64 * 1024

FLUSH_SECONDS: Final = 30.0
"""How long a closed stream may take to deliver what was written before."""


class StreamOwner(Protocol):
    """Who carries a stream's bytes. A method that raises aborts the stream, and `on_lost` gets the
    exception."""

    def on_ready(self, stream: ByteStream) -> None:
        """The stream can be written to; its TLS facts are final."""

    def on_data(self, stream: ByteStream, data: bytes) -> None:
        """Bytes came, as received or as decrypted: at most PIECE, but for what was read before the stream
        was."""

    def on_eof(self, stream: ByteStream) -> None:
        """The peer sends no more; `stream.clean` tells whether it said so. Writing goes on."""

    def on_lost(self, stream: ByteStream, exc: Exception | None) -> None:
        """The stream is gone: None after our own close or the peer's orderly one."""

    def on_pause(self, stream: ByteStream) -> None:
        """More than HIGH_WATER bytes wait for the peer; what is written nevertheless is kept."""

    def on_resume(self, stream: ByteStream) -> None:
        """The peer has read: write on."""


class _Receiving(threading.local):
    """One buffer a thread: a read is over before the next begins, so streams share it."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE))


_RECEIVING: Final = _Receiving()


class ByteStream(asyncio.BufferedProtocol):
    """What plain and TLS streams share: ownership, order, back-pressure and the end."""

    tls: bool = False
    alpn: bytes | None = None
    tls_version: str | None = None
    cipher: str | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, first: bytes = b"") -> None:
        self.ready = False
        self.paused = False
        """More than HIGH_WATER bytes wait for the peer."""
        self.closed = False
        """Nothing can be written any more: closed or aborted here, or lost."""
        self.clean: bool | None = None
        """None until the peer has ended; then whether it said so (always for plain, close_notify for TLS)."""
        self.first_owner: StreamOwner | None = None
        """Who becomes the owner as soon as the stream is ready; to be set before it has a transport."""
        self._loop = loop
        self._first = first
        self._owner: StreamOwner | None = None
        self._transport: asyncio.Transport
        self._stash: deque[bytes] = deque()
        self._held = False  # by the owner's pause_reading
        self._fin = False
        self._write_ended = False
        self._dropping = False  # we closed: nobody wants what still comes
        self._linger_left: int | None = None
        self._lost = False
        self._error: Exception | None = None
        self._told_ready = self._told_eof = self._told_lost = False
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "lost" if self._lost else "closed" if self.closed else "open" if self.ready else "opening"
        return f"{type(self).__name__}({state}{', paused' if self.paused else ''})"

    # for the owner

    @property
    def owner(self) -> StreamOwner | None:
        """Who gets this stream's events; a new owner gets everything that was not told yet, and reads
        `paused` itself."""
        return self._owner

    @owner.setter
    def owner(self, owner: StreamOwner | None) -> None:
        self._owner = owner
        if owner is not None:
            self._loop.call_soon(self._pump)

    @property
    def socket(self) -> socket.socket:
        """The socket below, to ask for its addresses; not to be read or written."""
        found = self._transport.get_extra_info("socket")
        assert found is not None
        return found  # type: ignore[no-any-return] # get_extra_info has no types

    @property
    def waiting(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; after the end of writing it is dropped."""
        raise NotImplementedError

    def write_eof(self) -> None:
        """Say that no more will be written, and go on reading."""
        if not self.closed and not self._write_ended:
            self._write_ended = True
            self._end_writing()

    def close(self) -> None:
        """Send what was written, say goodbye and close; data that still comes is dropped."""
        if self.closed:
            return
        self._stop()
        self._close_transport()

    def linger(self, seconds: float = 2.0, limit: int = 1024 * 1024) -> None:
        """Close after a last word, so that it arrives: drop up to `limit` bytes of what the peer still sends.

        Unread bytes would turn the close into a reset, and the peer might lose the answer it is about to
        read.
        """
        if self.closed:
            return
        if self._fin:
            self.close()
            return
        self._stop()
        self._linger_left = limit
        self._shut_down()
        self._timer = self._loop.call_later(seconds, self._transport.abort)
        self._adjust()

    def abort(self) -> None:
        """Close at once: what was not sent yet is lost, and the peer may see a reset."""
        self.closed = self._dropping = True
        self._transport.abort()

    def pause_reading(self) -> None:
        """Ask for no more data; the peer will be slowed down by TCP."""
        self._held = True
        self._adjust()

    def resume_reading(self) -> None:
        """Ask for data again; nothing is told before this returns."""
        self._held = False
        if self._pending() or self._fin or self.clean is not None:
            self._loop.call_soon(self._pump)
        else:
            self._adjust()

    # what plain and TLS streams do differently

    def _begin(self) -> None:
        """Start on a new transport; `_first` is what was read from the socket before."""
        raise NotImplementedError

    def _receive(self, data: memoryview | bytes) -> None:
        """Take bytes from the socket."""
        raise NotImplementedError

    def _pending(self) -> bool:
        """Tell whether received bytes may wait for the owner."""
        return bool(self._stash)

    def _next_piece(self) -> bytes:
        """Return the next bytes for the owner, b"" when none are there."""
        return self._stash.popleft() if self._stash else b""

    def _end_writing(self) -> None:
        raise NotImplementedError

    def _fin_before_ready(self) -> None:
        """The peer closed before the stream was ready."""

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER, low=LOW_WATER)
        with contextlib.suppress(OSError):  # no TCP socket, or already reset: then reading says so
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begin()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 # asyncio's signature
        """Lend the thread's buffer for one read."""
        return _RECEIVING.view

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        if self._dropping:
            self._drop(nbytes)
            return
        self._receive(_RECEIVING.view[:nbytes])
        self._pump()

    def eof_received(self) -> bool:
        """Note the peer's FIN; True keeps our side open."""
        if self._dropping:
            return False
        self._fin = True
        if not self.ready:
            self._fin_before_ready()
            return False
        self._pump()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
        if self._error is None and not self._dropping:
            self._error = exc
        self.closed = self._lost = True
        if self._held:
            self._stash.clear()
            self._dropping = True
        self._pump()

    def pause_writing(self) -> None:
        """Pass on that the peer does not keep up."""
        self.paused = True
        if self._told_ready and self._owner is not None:
            self._tell(lambda owner: owner.on_pause(self))

    def resume_writing(self) -> None:
        """Pass on that the peer has caught up."""
        self.paused = False
        # Not from within: asyncio, which is sending just now, ends a transport twice that is closed in this call.
        self._loop.call_soon(self._tell_resume)

    # inside

    def _pump(self) -> None:
        """Tell the owner everything that is there, in order, as far as it wants it."""
        if self._pumping or self._told_lost:
            return
        if self._owner is not None and self.ready:
            self._pumping = True
            try:
                self._tell_all()
            except Exception as error:  # noqa: BLE001 # an owner that raised cannot be trusted with more: fail closed
                self._break(error)
            finally:
                self._pumping = False
        if self._lost and self._owner is not None and not self._told_lost:
            self._told_lost = True
            owner, self._owner = self._owner, None
            if self._told_ready:
                owner.on_lost(self, self._error)
        elif not self._lost:
            self._adjust()

    def _tell_all(self) -> None:
        if not self._told_ready:
            self._told_ready = True
            assert self._owner is not None
            self._owner.on_ready(self)
        while not self._held and not self._dropping and self._owner is not None:
            if data := self._next_piece():
                self._owner.on_data(self, data)
                continue
            if self._fin and self.clean is None:
                self.clean = not self.tls
            if self.clean is not None and not self._told_eof and not self._dropping:
                self._told_eof = True
                self._owner.on_eof(self)
            break

    def _tell_resume(self) -> None:
        if not self.paused and not self._lost and self._told_ready and self._owner is not None:
            self._tell(lambda owner: owner.on_resume(self))

    def _tell(self, message: _Message) -> None:
        assert self._owner is not None
        try:
            message(self._owner)
        except Exception as error:  # noqa: BLE001 # as in _pump
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Abort because of our own fault or the owner's; `on_lost` will carry the error."""
        self._error = self._error or error
        self.abort()

    def _stop(self) -> None:
        """End writing in the protocol's own way and want nothing more."""
        if self.ready and not self._write_ended and not self._lost:
            self._write_ended = True
            self._say_goodbye()
        self.closed = self._dropping = True
        self._stash.clear()

    def _say_goodbye(self) -> None:
        """Send what the protocol says before a close, if anything."""

    def _close_transport(self) -> None:
        """Let the transport flush, but not for ever."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(FLUSH_SECONDS, self._transport.abort)

    def _shut_down(self) -> None:
        """Send a FIN behind what was written."""
        with contextlib.suppress(OSError):  # already reset: connection_lost is on its way
            self._transport.write_eof()

    def _become_ready(self) -> None:
        self.ready = True
        if self.first_owner is not None:
            self.owner, self.first_owner = self.first_owner, None

    def _drop(self, nbytes: int) -> None:
        if self._linger_left is None:
            return
        self._linger_left -= nbytes
        if self._linger_left < 0:
            self._transport.abort()

    def _adjust(self) -> None:
        """Read from the socket exactly while somebody takes what is read."""
        if self._dropping:
            wanted = self._linger_left is not None
        elif self._owner is None and self.ready:
            wanted = not self._pending()
        else:
            wanted = not self.ready or not self._held
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()


class _Message(Protocol):
    def __call__(self, owner: StreamOwner, /) -> None: ...


class PlainStream(ByteStream):
    """A TCP connection as it is."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; after the end of writing it is dropped."""
        if data and not self.closed and not self._write_ended:
            self._transport.write(data)

    def _begin(self) -> None:
        if self._first:
            self._stash.append(self._first)
            self._first = b""
        self._become_ready()

    def _receive(self, data: memoryview | bytes) -> None:
        self._stash.append(bytes(data))

    def _end_writing(self) -> None:
        self._shut_down()
