"""TLS over a plain asyncio transport, by `ssl.SSLObject` on memory BIOs.

asyncio's own TLS starts from a socket that nobody has read; here the hello was read and judged first, and its
bytes are fed in. The rest follows from who is on the other side: a client that does not trust us is told
apart from one that hung up, a stream cut without close_notify from one that ended, and no peer can make this
side keep more than a few pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Final, Literal

from egressd.gate.tls.bytestream import (
    HIGH_WATER,
    LOW_WATER,
    PIECE,
    ByteStream,
    PlainStream,
    StreamOwner,
)
from egressd.gate.tls.upstream import SessionCache, UpstreamKind, UpstreamTlsError, upstream_context

__all__ = [
    "HIGH_WATER",
    "LOW_WATER",
    "PIECE",
    "ByteStream",
    "ClientKind",
    "ClientRejectedCa",
    "ClientTlsError",
    "PlainStream",
    "SessionCache",
    "StreamOwner",
    "TlsStream",
    "UpstreamKind",
    "UpstreamTlsError",
    "accept_plain",
    "accept_tls",
    "connect_plain",
    "connect_tls",
    "upstream_context",
]

type ClientKind = Literal["handshake", "timeout", "closed", "rejected_ca", "broken"]

_RECORD: Final = 16 * 1024  # SSL_read gives one record at a time
_MAX_UNREAD_REPLIES: Final = 64 * 1024
_MAX_FLIGHT: Final = 64 * 1024
_CERTIFICATE_REQUEST: Final = 13

# The alerts by which clients say that they do not trust the issuer (RFC 8446 section 6.2); which one depends
# on the library.
_DISTRUST: Final = ("ALERT_UNKNOWN_CA", "ALERT_CERTIFICATE_UNKNOWN", "ALERT_BAD_CERTIFICATE")
# What a TLS 1.2 server answers to an empty certificate (RFC 5246 section 7.4.6 leaves the choice to it).
_NO_CERTIFICATE: Final = ("ALERT_HANDSHAKE_FAILURE", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN")


class ClientTlsError(ConnectionError):
    """TLS with a sandbox's client failed.

    `handshake`: no common version or cipher, or a malformed message. `closed`: it hung up; with the detail
    `after_certificate` it had seen our certificate, which often is distrust without an alert. `broken`: an
    alert or a bad record after the handshake.
    """

    def __init__(self, kind: ClientKind, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind: ClientKind = kind
        self.detail = detail


class ClientRejectedCa(ClientTlsError):
    """The client answered our certificate with the alert named by `detail`: it does not trust egressd's
    authority."""

    def __init__(self, detail: str) -> None:
        super().__init__("rejected_ca", detail)


class TlsStream(ByteStream):
    """A TLS connection, of either side; owners get and give plain text."""

    tls = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext,
        *,
        first: bytes = b"",
        server_hostname: str | None = None,
        session: ssl.SSLSession | None = None,
    ) -> None:
        super().__init__(loop, first)
        self.server_side = server_hostname is None
        self.resumed = False
        """The handshake was abbreviated: no certificate was shown."""
        self.opened: asyncio.Future[None] = loop.create_future()
        """Done when the handshake is; fails with ClientTlsError or UpstreamTlsError."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=self.server_side,
            server_hostname=server_hostname,
            session=session,
        )
        self._flight = bytearray()
        self._answered = False
        self._unread_replies = 0
        self._bad: ssl.SSLError | None = None

    @property
    def session(self) -> ssl.SSLSession | None:
        """A session for `SessionCache`, once the server has given one (in TLS 1.3 with its first data)."""
        session = self._object.session
        usable = session is not None and (
            session.has_ticket or (session.id and self.tls_version == "TLSv1.2")
        )
        return session if usable else None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; after the end of writing it is dropped."""
        if self.closed or self._write_ended or not data:
            return
        if not self.ready:
            raise RuntimeError("the handshake is not over")
        view = memoryview(data)
        at = 0
        try:
            while at < len(view):
                at += self._object.write(view[at : at + PIECE])
                if self._outgoing.pending >= PIECE:
                    self._flush()
        except ssl.SSLError as error:
            self._fail(error)
        else:
            self._flush()

    # the handshake

    def _begin(self) -> None:
        if self._first:
            self._incoming.write(self._first)
            self._first = b""
        elif self.server_side:
            return
        self._shake()

    def _shake(self) -> None:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:  # a certificate's refusal too
            self._flush()  # the alert
            self._end_handshake(self._explain(error))
            return
        self._flush()
        self.tls_version = self._object.version()
        cipher = self._object.cipher()
        self.cipher = cipher[0] if cipher else None
        alpn = self._object.selected_alpn_protocol()
        self.alpn = alpn.encode() if alpn is not None else None
        self.resumed = bool(self._object.session_reused)
        self._flight.clear()
        self._become_ready()
        if not self.opened.done():
            self.opened.set_result(None)

    def _end_handshake(self, error: ClientTlsError | UpstreamTlsError) -> None:
        self._error = error
        self.closed = self._dropping = True
        self._close_transport()
        if not self.opened.done():
            self.opened.set_exception(error)

    def _fin_before_ready(self) -> None:
        if self.server_side:
            detail = "after_certificate" if self._answered else ""
            self._end_handshake(ClientTlsError("closed", detail))
        else:
            self._end_handshake(UpstreamTlsError("closed"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End; a handshake that was under way has failed."""
        if not self.opened.done():
            self._fin_before_ready()
        super().connection_lost(exc)

    # reading

    def _receive(self, data: memoryview | bytes) -> None:
        self._incoming.write(data)
        if self.ready:
            return
        if not self.server_side and len(self._flight) < _MAX_FLIGHT:
            self._flight += data
        self._shake()

    def _pending(self) -> bool:
        return bool(self._stash or self._incoming.pending or self._object.pending() or self._bad)

    def _next_piece(self) -> bytes:
        if self._stash:
            return self._stash.popleft()
        data = self._decrypt()
        if not data and self._bad is not None:
            self._fail(self._bad)
        return data

    def _decrypt(self) -> bytes:
        """Return up to PIECE bytes of plain text; notes the peer's close_notify and keeps its alert for
        later."""
        if self.clean is not None or self._bad is not None:
            return b""
        pieces: list[bytes] = []
        left = PIECE
        try:
            while left > 0 and (self._incoming.pending or self._object.pending()):
                data = self._object.read(min(left, _RECORD))
                if not data:  # only close_notify: the memory BIO itself never ends
                    self.clean = True
                    break
                pieces.append(data)
                left -= len(data)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # close_notify again, when ours is out already
            self.clean = True
        except ssl.SSLError as error:
            self._bad = error
        if self._outgoing.pending:
            self._flush_replies()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _flush_replies(self) -> None:
        """Send what reading made OpenSSL say: key updates, alerts. A peer that asks for them must also read
        them."""
        if self.paused:
            self._unread_replies += self._outgoing.pending
            if self._unread_replies > _MAX_UNREAD_REPLIES:
                self._break(self._broken("peer asks and does not read"))
                return
        self._flush()

    def resume_writing(self) -> None:
        """Pass on that the peer has caught up."""
        self._unread_replies = 0
        super().resume_writing()

    # the end

    def _end_writing(self) -> None:
        # unwrap() also reads; plain text that it would meet must be out of its way.
        while data := self._decrypt():
            self._stash.append(data)
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        # It fails when theirs is still to come, or data came first; ours is written all the same.
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()
        self._flush()

    def _fail(self, error: ssl.SSLError) -> None:
        """End because TLS cannot go on; what OpenSSL wants to say about it is sent."""
        if self._error is None:
            self._error = self._explain(error)
        self._write_ended = True
        self._flush()
        self.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._answered = True
            self._transport.write(self._outgoing.read())

    def _explain(self, error: ssl.SSLError) -> ClientTlsError | UpstreamTlsError:
        reason = error.reason or type(error).__name__
        if self.server_side:
            if reason.endswith(_DISTRUST):
                return ClientRejectedCa(reason.lower())
            return self._broken(reason.lower()) if self.ready else ClientTlsError("handshake", reason.lower())
        if isinstance(error, ssl.SSLCertVerificationError):
            return UpstreamTlsError("certificate", error.verify_message)
        asked = reason.endswith(_NO_CERTIFICATE) and not self.ready and _asks_for_certificate(self._flight)
        if asked or reason.endswith("ALERT_CERTIFICATE_REQUIRED"):
            return UpstreamTlsError("client_cert_wanted", reason.lower())
        return self._broken(reason.lower()) if self.ready else UpstreamTlsError("handshake", reason.lower())

    def _broken(self, detail: str) -> ClientTlsError | UpstreamTlsError:
        return ClientTlsError("broken", detail) if self.server_side else UpstreamTlsError("broken", detail)


def _asks_for_certificate(flight: bytes | bytearray) -> bool:
    """Tell whether a TLS 1.2 server's first flight, still in the clear, holds a CertificateRequest. Total."""
    messages = bytearray()
    at = 0
    while len(flight) - at >= 5 and flight[at] == 22:
        length = int.from_bytes(flight[at + 3 : at + 5])
        messages += flight[at + 5 : at + 5 + length]
        at += 5 + length
    at = 0
    while len(messages) - at >= 4:
        if messages[at] == _CERTIFICATE_REQUEST:
            return True
        at += 4 + int.from_bytes(messages[at + 1 : at + 4])
    return False


async def accept_tls(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    context: ssl.SSLContext,
    first: bytes,
    timeout: float,  # noqa: ASYNC109 # bounds the handshake; a caller's own deadline is another
    owner: StreamOwner | None = None,
) -> TlsStream:
    """Finish a handshake as the server on an accepted socket of which `first` was already read.

    `timeout` in seconds. Without `owner` one is attached later. Raises ClientRejectedCa or ClientTlsError;
    the socket is the stream's from the call on, and closed after an error.
    """
    stream = TlsStream(loop, context, first=first)
    stream.first_owner = owner
    try:
        await _open(loop, sock, stream, timeout)
    except TimeoutError:
        raise ClientTlsError("timeout") from None
    return stream


async def connect_tls(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    context: ssl.SSLContext,
    server_hostname: str,
    timeout: float,  # noqa: ASYNC109 # bounds the handshake; a caller's own deadline is another
    session: ssl.SSLSession | None = None,
) -> TlsStream:
    """Finish a handshake as the client on a connected socket; the server's certificate must be for
    `server_hostname`.

    `timeout` in seconds; `session` comes from a SessionCache for the same context. The owner is attached
    later. Raises UpstreamTlsError; the socket is the stream's from the call on, and closed after an error.
    """
    try:
        stream = TlsStream(loop, context, server_hostname=server_hostname, session=session)
    except (
        ValueError,
        TypeError,
        ssl.SSLError,
    ) as error:  # a name that OpenSSL cannot ask for, a session of another context
        sock.close()
        raise UpstreamTlsError("handshake", str(error)) from None
    try:
        await _open(loop, sock, stream, timeout)
    except TimeoutError:
        raise UpstreamTlsError("timeout") from None
    return stream


async def accept_plain(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, first: bytes, owner: StreamOwner | None = None
) -> PlainStream:
    """Return a stream on an accepted socket of which `first` was already read; the owner gets that first."""
    stream = PlainStream(loop, first)
    stream.first_owner = owner
    await _attach(loop, sock, stream)
    return stream


async def connect_plain(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> PlainStream:
    """Return a stream on a connected socket; the owner is attached later."""
    return await accept_plain(loop, sock, b"")


async def _open(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, stream: TlsStream, seconds: float
) -> None:
    """Attach and finish the handshake, or close the socket and raise."""
    try:
        async with asyncio.timeout(seconds):
            await _attach(loop, sock, stream)
            await stream.opened
    except BaseException:
        if not stream.opened.cancel() and not stream.opened.cancelled():
            stream.opened.exception()  # seen, whoever was told
        if not stream.closed:
            stream.abort()
        raise


async def _attach(loop: asyncio.AbstractEventLoop, sock: socket.socket, stream: ByteStream) -> None:
    sock.setblocking(False)
    try:
        await loop.connect_accepted_socket(lambda: stream, sock)
    except BaseException:
        sock.close()
        raise
