"""Encrypted lines to one DNS server: opened when a question needs one, shared by all questions, closed when idle.

Only a server that proves to be the configured one is asked anything, in TLS 1.2 or later; there is no way from
here to a transport in clear (RFC 8310 §5, strict; DNS-28). Questions on one line do not wait for each other's
answers (RFC 7766 §6.2.1.1). A line that ends, falls silent or talks nonsense is replaced; a question that a
used line took with it is asked once more, as servers close idle lines when they like (RFC 7766 §6.2.3).

Every message here has id 0: a line whose protocol needs ids gives its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import ClassVar, Final

from egressd.gate.dns.servers import Upstream
from egressd.gate.tls.stream import ByteStream, TlsStream, UpstreamTlsError, connect_tls

IDLE: Final = 20.0
"""Seconds after the last answer at which a line is closed, before servers and address translators forget it."""
ASKED: Final = 32
"""Questions under way to one server; more wait for their turn."""
GIVEN_UP: Final = 16
"""Questions on one line whose answers nobody waits for any more, before another line is opened."""
UNANSWERED: Final = 128 * 1024
"""Bytes that a server may send without completing an answer; HTTP/2 has many ways to say nothing."""
MAX_MESSAGE: Final = 0xFFFF
"""A DNS message's most bytes; TCP has no room for more in its length (RFC 1035 §4.2.2), nor has anybody else here."""


class ReplyError(Exception):
    """A server's reply cannot be used, or there is none; the text says why, in our words."""


class LineLost(ReplyError):
    """The line ended before the answer came: on another line the question may be asked again."""


class QuestionRefused(LineLost):
    """The server did not look at the question: the line is good, and asking again is safe."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A DNS message in wire form and how many seconds a cache on the way has kept it."""

    wire: bytes
    age: int = 0


class Line:
    """One TLS connection to a server and the questions under way on it; the owner of its stream.

    A protocol says in `_send` how a question is written and calls `_complete` when `_receive` has put an
    answer together. What either raises ends the line.
    """

    alpn: ClassVar[str]
    must_agree: ClassVar[bool]
    """The server must choose our protocol; otherwise it may as well say nothing of it."""

    def __init__(self, stream: TlsStream, server: Upstream) -> None:
        self.asked = self.answered = 0
        self.retired = False
        """Takes no more questions, and ends when those under way are answered."""
        self.ended = asyncio.Event()
        """The connection is gone."""
        self._stream = stream
        self._server = server
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()
        self._unanswered = 0
        self._lost: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rest()

    async def ask(self, query: bytes) -> Answer:
        """Return the answer to a query with id 0; raises ReplyError, LineLost where asking again may help."""
        self.asked += 1
        answered = self.answered
        key: int | None = None
        try:
            while self._lost is None and not self._has_room():
                self._changed.clear()
                await self._changed.wait()
            key, future = self._put(query)
            return await future
        except asyncio.CancelledError:
            if key is not None and self._waiting.pop(key, None) is not None:
                self._give_up(key)
            if self.answered == answered:  # not a word meanwhile: it may be dead
                self.retired = True
            raise
        finally:
            self._changed.set()
            if not self._waiting:
                self._rest()

    def is_open(self) -> bool:
        """Tell whether the line takes questions."""
        return not self.retired and self._lost is None and not self._stream.closed

    def retire(self) -> None:
        """Take no more questions."""
        self.retired = True
        if not self._waiting:
            self._rest()

    def fail(self, why: str) -> None:
        """End at once; questions under way are lost, for the first reason given."""
        if self._lost is not None:
            return
        self._lost = why
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()
        self._stream.abort()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(LineLost(why))

    # for the protocols

    def _has_room(self) -> bool:
        """Tell whether the protocol takes one more question at this time."""
        return True

    def _send(self, query: bytes) -> int:
        """Write a question; returns the key of its answer."""
        raise NotImplementedError

    def _receive(self, data: bytes) -> None:
        """Take bytes of the server; raises for what is no protocol of ours."""
        raise NotImplementedError

    def _give_up(self, key: int) -> None:
        """Note that nobody waits for an answer any more."""
        raise NotImplementedError

    def _goodbye(self) -> None:
        """Write what the protocol says before an orderly end, if anything."""

    def _complete(self, key: int, answer: Answer | ReplyError) -> bool:
        """Hand over an answer; False when nobody waits for one by that key."""
        future = self._waiting.pop(key, None)
        if future is None:
            return False
        self._note_answer()
        if not future.done():
            if isinstance(answer, Answer):
                future.set_result(answer)
            else:
                future.set_exception(answer)
        return True

    def _note_answer(self) -> None:
        self.answered += 1
        self._unanswered = 0

    # the stream's owner

    def on_ready(self, stream: ByteStream) -> None:
        """Nothing: the line is made of a stream that is ready."""

    def on_data(self, stream: ByteStream, data: bytes) -> None:  # noqa: ARG002 StreamOwner's signature
        """Take bytes."""
        if self._lost is not None:
            return
        self._unanswered += len(data)
        try:
            self._receive(data)
        except ReplyError as error:
            self.fail(str(error))
        except Exception as error:  # noqa: BLE001 hostile bytes in a library: no closed set, and the line is over
            self.fail(f"the server breaks the protocol ({type(error).__name__})")
        if self._unanswered > UNANSWERED:
            self.fail("the server sends and does not answer")
        self._changed.set()

    def on_eof(self, stream: ByteStream) -> None:  # noqa: ARG002 StreamOwner's signature
        """The server says no more, so there is nothing to wait for."""
        self.fail("the server closed the connection")

    def on_lost(self, stream: ByteStream, exc: Exception | None) -> None:  # noqa: ARG002 StreamOwner's signature
        """End."""
        self.fail(tls_problem(exc) if isinstance(exc, UpstreamTlsError) else "the connection was lost")
        self.ended.set()

    def on_pause(self, stream: ByteStream) -> None:  # noqa: ARG002 StreamOwner's signature
        """Questions are small and few: what piles up is what the server makes us say."""
        self.fail("the server does not read")

    def on_resume(self, stream: ByteStream) -> None:
        """Nothing: there is no writing on after a pause."""

    # inside

    def _put(self, query: bytes) -> tuple[int, asyncio.Future[Answer]]:
        """Send a question; returns its key and what its answer will be in."""
        if self._lost is not None:
            raise LineLost(self._lost)
        if self._timer is not None:
            self._timer.cancel()
        try:
            key = self._send(query)
        except Exception as error:  # noqa: BLE001 what a protocol library raises is no closed set
            why = f"the question cannot be sent ({type(error).__name__})"
            self.fail(why)
            raise LineLost(why) from None
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        return key, future

    def _rest(self) -> None:
        """With no question under way: wait for the next one, for a while."""
        if self._timer is not None:
            self._timer.cancel()
        if self._lost is None:
            self._timer = asyncio.get_running_loop().call_later(0.0 if self.retired else IDLE, self._end)

    def _end(self) -> None:
        if self._lost is None:
            self._lost = "the line was idle"
            self._changed.set()
            self._goodbye()
            self._stream.close()


class Lines:
    """The way to one server: at most one line that takes questions, and those that still have some to answer.

    `context` verifies the server (see `gate.tls`), `timeout` bounds an opening, in seconds. Used in one event
    loop.
    """

    def __init__(
        self, server: Upstream, protocol: type[Line], context: ssl.SSLContext, timeout: float
    ) -> None:
        self._server = server
        self._protocol = protocol
        self._context = context
        self._timeout = timeout
        self._turns = asyncio.Semaphore(ASKED)
        self._line: Line | None = None
        self._open: set[Line] = set()
        self._opening: asyncio.Task[Line | ReplyError] | None = None

    async def ask(self, query: bytes) -> Answer:
        """Return the server's answer to a query with id 0; raises ReplyError, and never asks in clear."""
        async with self._turns:
            line, used = await self._get()
            try:
                return await line.ask(query)
            except LineLost as error:
                if not used and not isinstance(error, QuestionRefused):
                    raise
            line, _ = await self._get()
            return await line.ask(query)

    async def close(self) -> None:
        """Close every line; questions under way are lost."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
            self._opening = None
        for line in tuple(self._open):
            line.fail("egressd closed the line")
            await line.ended.wait()
        self._open.clear()

    async def _get(self) -> tuple[Line, bool]:
        """Return a line that takes questions, and whether it has been used before."""
        if self._line is not None:
            if self._line.is_open():
                return self._line, self._line.asked > 0
            self._line.retire()
            self._line = None
        if self._opening is None:  # whoever else needs a line now waits for the same one
            self._opening = asyncio.get_running_loop().create_task(self._try_opening())
        opened = await asyncio.shield(self._opening)
        if isinstance(opened, ReplyError):
            raise ReplyError(str(opened))
        return opened, False

    async def _try_opening(self) -> Line | ReplyError:
        """Open a line; a failure is a value, as everybody who waited may have left."""
        try:
            self._open = {line for line in self._open if not line.ended.is_set()}
            async with asyncio.timeout(self._timeout):
                sock = await connect(self._server)
                stream = await connect_tls(
                    asyncio.get_running_loop(), sock, self._context, self._server.identity, self._timeout
                )
        except TimeoutError:
            return ReplyError("no connection in time")
        except UpstreamTlsError as error:
            return ReplyError(tls_problem(error))
        except OSError as error:
            return ReplyError(os_problem(error))
        else:
            return self._admit(stream)
        finally:
            self._opening = None

    def _admit(self, stream: TlsStream) -> Line | ReplyError:
        agreed = None if stream.alpn is None else stream.alpn.decode("ascii", "replace")
        if agreed != self._protocol.alpn and (self._protocol.must_agree or agreed is not None):
            stream.abort()
            return ReplyError(f"the server does not agree to speak {self._protocol.alpn}")
        self._line = self._protocol(stream, self._server)
        self._open.add(self._line)
        stream.owner = self._line
        return self._line


def os_problem(error: OSError) -> str:
    """Return what the kernel says; asyncio's own words would repeat the address."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


def tls_problem(error: UpstreamTlsError) -> str:
    """Return what went wrong with TLS: our words and OpenSSL's, none of the server's."""
    if error.kind == "timeout":
        return "no TLS in time"
    if error.kind == "certificate":
        return f"its certificate is refused: {error.detail}"
    return f"TLS failed: {error.kind}{f' ({error.detail})' if error.detail else ''}"


def open_socket(server: Upstream, kind: socket.SocketKind) -> socket.socket:
    """Return a new, non-blocking socket of the server's address family."""
    family = socket.AF_INET6 if isinstance(server.address, IPv6Address) else socket.AF_INET
    sock = socket.socket(family, kind)
    sock.setblocking(False)
    return sock


def sockaddr(server: Upstream) -> tuple[str, int] | tuple[str, int, int, int]:
    """Return the address as the kernel takes it: a zone is an interface number, and text is never resolved."""
    address = server.address
    if isinstance(address, IPv4Address):
        return str(address), server.port
    zone = socket.if_nametoindex(address.scope_id) if address.scope_id else 0
    return str(IPv6Address(int(address))), server.port, 0, zone


async def connect(server: Upstream) -> socket.socket:
    """Return a TCP socket that is connected to the server as configured; raises OSError."""
    sock = open_socket(server, socket.SOCK_STREAM)
    try:
        await asyncio.get_running_loop().sock_connect(sock, sockaddr(server))
        # On one machine a port that nobody listens on may be the one that this very socket was given.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        sock.close()
        raise
    return sock
