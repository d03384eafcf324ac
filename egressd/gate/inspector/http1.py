"""HTTP/1 connections for mitmproxy's layers: the same states, events and commands as its own, with our parsers in them.

Different from mitmproxy's `Http1Server` and `Http1Client`, whose places they take: heads and bodies are read by
`head` and `body`; interim responses and trailers pass; whether a connection goes on is decided by the heads as
they arrived, not by the fields that are left after an addon; and whatever goes wrong is reported to the engine
as a command (`Rejected`, `Failed`, …) instead of as a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from mitmproxy import http
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator
from mitmproxy.proxy.layers.http._base import HttpEvent, ReceiveHttp
from mitmproxy.proxy.layers.http._events import (
    ErrorCode,
    RequestData,
    RequestEndOfMessage,
    RequestHeaders,
    RequestProtocolError,
    ResponseData,
    ResponseEndOfMessage,
    ResponseHeaders,
    ResponseProtocolError,
    ResponseTrailers,
)
from mitmproxy.proxy.layers.http._http1 import Http1Connection

from egressd.credentials.attach import Refused
from egressd.gate.inspector.body import BodyReader, Broken, End, HeadBuffer, Piece, reader_of
from egressd.gate.inspector.credential import Sealed
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.fields import onward_trailers
from egressd.gate.inspector.head import (
    BadHead,
    Field,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
)
from egressd.gate.inspector.messages import (
    framed_body,
    head_of,
    is_chunked,
    request_head_of,
    request_of,
    response_of,
)
from egressd.gate.inspector.outcomes import (
    Answered,
    ClientLeft,
    Failed,
    HalfClosed,
    Interim,
    Rejected,
    Upgraded,
)
from egressd.gate.inspector.outgoing import Outgoing
from egressd.gate.inspector.veil import Veil
from egressd.policy.reasons import Reason

MAX_INTERIM: Final = 16
"""Interim responses (1xx) before a final one."""

RESPONSE_HEAD_BYTES: Final = 256 * 1024


class _Side(Http1Connection):
    """What both sides share: the reading of bodies."""

    buf: HeadBuffer
    reader: BodyReader
    state: Callable[[Any], CommandGenerator[None]]
    closing: bool = False
    """The connection closes after the current exchange."""
    unclean: bool = False
    """The connection was lost rather than closed, so that its end ends no body."""

    broken_body: Reason
    """Why an exchange failed whose body, coming from this side, cannot be read."""
    gone: Reason
    """Why an exchange failed when this side closed in the middle of it."""

    def read_body(self, event: events.Event) -> CommandGenerator[None]:
        """Pass on what arrived of a body."""
        assert self.stream_id is not None
        if isinstance(event, events.ConnectionClosed):
            if self.unclean or not self.reader.whole_at_close():
                self.state = self.done
                yield Failed(self.gone, "closed before the end of the body")
                return
            yield from self.body_done(())
            return
        while (part := self.reader.read(self.buf)) is not None:
            if isinstance(part, Piece):
                yield ReceiveHttp(self.ReceiveData(self.stream_id, part.data))
                continue
            if isinstance(part, End):
                yield from self.body_done(part.trailers)
            else:
                assert isinstance(part, Broken)
                self.state = self.done
                yield Failed(self.broken_body, part.detail)
            return

    def body_done(self, trailers: tuple[Field, ...]) -> CommandGenerator[None]:
        """Pass on the end of a body."""
        raise NotImplementedError

    def done(self, _: events.Event) -> CommandGenerator[None]:
        """Take no notice of whatever still comes."""
        yield from ()


class Server(_Side):
    """The side of the sandbox: reads requests, writes responses."""

    ReceiveProtocolError = RequestProtocolError
    ReceiveData = RequestData
    ReceiveEndOfMessage = RequestEndOfMessage
    stream_id: int
    broken_body = Reason.BAD_FRAMING
    gone = Reason.CLIENT_CLOSED

    def __init__(self, context: Context, head_bytes: int) -> None:
        """Heads of more than `head_bytes` are refused."""
        super().__init__(context, context.client)
        self.buf = HeadBuffer(head_bytes)
        self.stream_id = 1
        self.trailers_dropped = False
        self.half_closes = not context.client.tls
        """Whether the client may end its side and still get its answer. In TLS nobody does: whoever says close_notify leaves."""
        self.client_ended = False
        self.veil: Veil | None = None
        """What the next response passes through; it is taken off behind it."""
        self._trailers: tuple[Field, ...] = ()

    def read_headers(self, event: events.ConnectionEvent) -> CommandGenerator[None]:
        """Read one request head; nothing after it is looked at before this request is decided."""
        if isinstance(event, events.ConnectionClosed):
            self.state = self.done
            yield ClientLeft(partial=len(self.buf) > 0)
            return
        raw = self.buf.take_head()
        if raw is None:
            return
        head = raw if isinstance(raw, BadHead) else self._agreeing(parse_request_head(raw))
        if isinstance(head, BadHead):
            self.state = self.done
            yield Rejected(head)
            return
        self.request = request_of(head)
        self.closing = head.close
        self.trailers_dropped = False
        self._trailers = ()
        self.reader = reader_of(head.length)
        yield ReceiveHttp(RequestHeaders(self.stream_id, self.request, head.length == 0))
        self.state = self.read_body
        yield from self.read_body(events.DataReceived(self.conn, b""))

    @property
    def begun(self) -> bool:
        """Whether the head of the response has been written, so that no other answer is possible."""
        return self.response is not None

    @property
    def framed(self) -> bool:
        """Whether the client can see that the response that was begun is incomplete."""
        return self.response is not None and bool(
            {"content-length", "transfer-encoding"} & {name.lower() for name in self.response.headers}
        )

    def last_word(self, _: Reason) -> bytes:
        """Return what still can be said behind a response that was begun: nothing."""
        return b""

    def _agreeing(self, head: RequestHead | BadHead) -> RequestHead | BadHead:
        """An absolute-form target has the scheme that its connection has."""
        scheme = b"https" if self.conn.tls else b"http"
        if isinstance(head, RequestHead) and head.scheme not in (b"", scheme):
            reason = Reason.AUTHORITY_MISMATCH if self.conn.tls else Reason.BAD_REQUEST
            return BadHead(
                reason, "the scheme of the target is not the connection's", head.method, head.target
            )
        return head

    def body_done(self, trailers: tuple[Field, ...]) -> CommandGenerator[None]:
        """End the request; its trailers are not passed on: no rule judged them (RFC 9110 §6.5.1 lets them be dropped)."""
        self.trailers_dropped = bool(trailers)
        yield ReceiveHttp(RequestEndOfMessage(self.stream_id))
        yield from self.mark_done(request=True)

    def send(self, event: HttpEvent) -> CommandGenerator[None]:
        """Write a response, or report why there is none."""
        if isinstance(event, ResponseHeaders) and event.response.status_code < 200:
            yield commands.SendData(
                self.conn, b"HTTP/1.1 100 Continue\r\n\r\n"
            )  # the only one that layers send of themselves
        elif isinstance(event, ResponseHeaders):
            yield from self._send_head(event.response)
        elif isinstance(event, ResponseData):
            yield from self._send_body((event.data,) if self.veil is None else self.veil.body(event.data))
        elif isinstance(event, ResponseTrailers):
            fields = event.trailers.fields
            self._trailers = fields if self.veil is None else self.veil.fields(fields)
        elif isinstance(event, ResponseEndOfMessage):
            if (yield from self.end_response()):
                yield from self.mark_done(response=True)
        elif isinstance(event, ResponseProtocolError):
            reason, detail = _PROTOCOL_ERRORS.get(event.code, (Reason.UPSTREAM_PROTOCOL, "no usable answer"))
            yield Failed(reason, detail)
        else:
            raise AssertionError(f"unexpected {type(event).__name__}")

    def _send_head(self, response: http.Response) -> CommandGenerator[None]:
        assert self.request is not None
        problem = self.veil.head(response, self.request.method) if self.veil is not None else None
        if problem is not None:
            self.state = self.done
            yield Failed(Reason.UNSCANNABLE, problem)
            return
        self.response = response
        self._frame(response)
        yield commands.SendData(self.conn, head_of(response))

    def _send_body(self, pieces: Iterable[bytes | Broken]) -> CommandGenerator[bool]:
        """Write pieces of the body as they are; returns whether all of them could be."""
        assert self.response is not None
        for piece in pieces:
            if isinstance(piece, Broken):
                self.state = self.done
                yield Failed(Reason.UPSTREAM_PROTOCOL, piece.detail)
                return False
            if piece:
                yield commands.SendData(self.conn, framed_body(self.response, piece))
        return True

    def end_response(self) -> CommandGenerator[bool]:
        """Write what ends the body of the response; returns whether it could be ended."""
        assert self.request is not None
        assert self.response is not None
        veil, self.veil = self.veil, None
        if veil is not None and not (yield from self._send_body(veil.end())):
            return False
        if self.request.method != "HEAD" and is_chunked(self.response):
            fields = b"".join(b"%s: %s\r\n" % field for field in self._trailers)
            yield commands.SendData(self.conn, b"0\r\n" + fields + b"\r\n")
        return True

    def _frame(self, response: http.Response) -> None:
        """Give the response our own version and a framing that the client can see the end of."""
        assert self.request is not None
        response.http_version = "HTTP/1.1"
        status = response.status_code
        if status in (204, 304):
            response.headers.pop("transfer-encoding", None)
        elif not ({"content-length", "transfer-encoding"} & {name.lower() for name in response.headers}):
            if self.request.http_version == "HTTP/1.0":
                self.closing = True
            elif self.request.method != "HEAD":
                response.headers["transfer-encoding"] = "chunked"
        if self.closing:
            response.headers["connection"] = "close"

    def mark_done(self, *, request: bool = False, response: bool = False) -> CommandGenerator[None]:
        """Go on to the next request once both messages of this exchange are complete."""
        self.request_done = self.request_done or request
        self.response_done = self.response_done or response
        if not self.response_done:
            self.state = self.wait
            return
        if not self.request_done:
            return
        yield Answered()
        if self.closing:
            self.state = self.done
            yield commands.CloseConnection(self.conn)
            return
        self.request_done = self.response_done = False
        self.request = self.response = None
        self.stream_id += 2
        self.state = self.read_headers
        if self.buf:
            yield from self.read_headers(events.DataReceived(self.conn, b""))
        if self.client_ended and self.state in (self.read_headers, self.read_body):
            yield from self.state(events.ConnectionClosed(self.conn))

    def wait(self, event: events.Event) -> CommandGenerator[None]:
        """Keep pipelined requests for later, and the end of what the client sends for after them."""
        if not isinstance(event, events.ConnectionClosed):
            return
        if self.half_closes:
            self.client_ended = True
            yield HalfClosed()
        else:
            self.state = self.done
            yield Failed(Reason.CLIENT_CLOSED, "closed before the end of the response")


class Client(_Side):
    """The side of the origin: writes requests, reads responses."""

    ReceiveProtocolError = ResponseProtocolError
    ReceiveData = ResponseData
    ReceiveEndOfMessage = ResponseEndOfMessage
    broken_body = Reason.UPSTREAM_PROTOCOL
    gone = Reason.UPSTREAM_CLOSED

    def __init__(self, context: Context) -> None:
        """Nothing has been asked yet."""
        super().__init__(context, context.server)
        self.buf = HeadBuffer(RESPONSE_HEAD_BYTES)
        self.exchange: Exchange | None = None
        """Whose request comes next; set before it does."""
        self._outgoing: Outgoing
        self._interim = 0

    @property
    def idle(self) -> bool:
        """Whether the connection waits for a request and nothing speaks against giving it one."""
        return self.state == self.read_headers and self.request is None and not self.buf

    def send(self, event: HttpEvent) -> CommandGenerator[None]:
        """Write a request."""
        if isinstance(event, RequestHeaders):
            assert self.exchange is not None
            self.stream_id = event.stream_id
            self.request = event.request
            self.closing = False
            self._interim = 0
            self._outgoing = Outgoing(self.exchange)
            if not self._outgoing.waits:
                yield from self._send_head(self._outgoing.head(event.request))
        elif isinstance(event, RequestData):
            yield from self._send_body(self._outgoing.body(event.data))
        elif isinstance(event, RequestEndOfMessage):
            yield from self._send_end()
        elif isinstance(event, RequestProtocolError):
            self.state = self.done
            yield commands.CloseConnection(self.conn)
        else:
            raise AssertionError(f"unexpected {type(event).__name__}")

    def _send_head(self, sealed: Sealed | Refused) -> CommandGenerator[None]:
        """Write a head; what it was made of is not kept."""
        assert self.request is not None
        if isinstance(sealed, Refused):
            yield from self._refuse(sealed)
        else:
            yield commands.SendData(self.conn, request_head_of(self.request, sealed.target, sealed.fields))

    def _send_body(self, data: bytes | Refused) -> CommandGenerator[None]:
        assert self.request is not None
        if isinstance(data, Refused):
            yield from self._refuse(data)
        elif data:
            yield commands.SendData(self.conn, framed_body(self.request, data))

    def _send_end(self) -> CommandGenerator[None]:
        assert self.request is not None
        last = self._outgoing.end(self.request)
        if isinstance(last, Refused):
            yield from self._refuse(last)
            return
        head, data = last
        if head is not None:
            yield from self._send_head(head)
        yield from self._send_body(data)
        if is_chunked(self.request):
            yield commands.SendData(self.conn, b"0\r\n\r\n")
        yield from self.mark_done(request=True)

    def _refuse(self, refused: Refused) -> CommandGenerator[None]:
        """Send nothing more of a request that may not go on."""
        self.state = self.done
        yield Failed(refused.reason, refused.detail)

    def read_headers(self, event: events.ConnectionEvent) -> CommandGenerator[None]:
        """Read response heads up to the final one."""
        if isinstance(event, events.ConnectionClosed):
            self.state = self.done
            yield commands.CloseConnection(self.conn)
            if self.request is not None:
                yield Failed(Reason.UPSTREAM_CLOSED, "closed before a response")
            return
        if self.request is None:
            self.state = (
                self.done
            )  # bytes that answer nothing: the next request must not take them for its answer
            yield commands.CloseConnection(self.conn)
            return
        assert self.stream_id is not None
        head = self._next_head()
        while isinstance(head, ResponseHead) and head.status < 200:
            if head.status == 101:
                self.state = self.done
                yield Upgraded(head, self.buf.take(len(self.buf)))
                return
            yield from self._pass_interim(head)
            head = self._next_head()
        if head is None:
            return
        if isinstance(head, BadHead):
            self.state = self.done
            yield Failed(Reason.UPSTREAM_PROTOCOL, head.detail)
            return
        self.response = response_of(head)
        self.closing = head.close
        self.reader = reader_of(head.length)
        yield ReceiveHttp(ResponseHeaders(self.stream_id, self.response, head.length == 0))
        self.state = self.read_body
        yield from self.read_body(events.DataReceived(self.conn, b""))

    def _next_head(self) -> ResponseHead | BadHead | None:
        assert self.request is not None
        raw = self.buf.take_head()
        if raw is None or isinstance(raw, BadHead):
            return raw
        head = parse_response_head(raw, self.request.data.method, self.request.data.http_version)
        if isinstance(head, ResponseHead) and head.status < 200:
            self._interim += 1
            if head.status == 101 and "upgrade" not in self.request.headers:
                return BadHead(Reason.UPSTREAM_PROTOCOL, "another protocol than was asked for")
            if self._interim > MAX_INTERIM:
                return BadHead(Reason.UPSTREAM_PROTOCOL, "interim responses without end")
        return head

    def _pass_interim(self, head: ResponseHead) -> CommandGenerator[None]:
        """Hints and progress pass (RFC 9110 §15.2); a 100 was already said by us, and HTTP/1.0 knows none of it."""
        assert self.request is not None
        if head.status == 100 or self.request.http_version == "HTTP/1.0":
            return
        yield Interim(head.status, head.phrase, onward_trailers(head.fields))

    def body_done(self, trailers: tuple[Field, ...]) -> CommandGenerator[None]:
        """End the response; a response that ends before its request does ends the exchange."""
        assert self.stream_id is not None
        onward = onward_trailers(trailers)
        if onward:
            yield ReceiveHttp(ResponseTrailers(self.stream_id, http.Headers(onward)))
        yield ReceiveHttp(ResponseEndOfMessage(self.stream_id))
        if not self.request_done:
            self.state = self.done
            yield Answered(early=True)
            return
        yield from self.mark_done(response=True)

    def mark_done(self, *, request: bool = False, response: bool = False) -> CommandGenerator[None]:
        """Become idle once both messages of this exchange are complete."""
        self.request_done = self.request_done or request
        self.response_done = self.response_done or response
        if not (self.request_done and self.response_done):
            return
        self.request_done = self.response_done = False
        self.request = self.response = None
        self.stream_id = None
        self.state = self.read_headers
        if self.closing or self.buf or not self.conn.connected:
            self.state = self.done
            yield commands.CloseConnection(self.conn)


_PROTOCOL_ERRORS: Final = {
    ErrorCode.GENERIC_CLIENT_ERROR: (Reason.BAD_REQUEST, "refused by mitmproxy"),
    ErrorCode.REQUEST_VALIDATION_FAILED: (Reason.BAD_REQUEST, "refused by mitmproxy"),
    ErrorCode.KILL: (Reason.INTERNAL_ERROR, "killed by an addon"),
}
