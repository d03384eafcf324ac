"""The side of the sandbox: it reads requests, one after the other, and writes responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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

from egressd.gate.inspector.body import Broken, HeadBuffer
from egressd.gate.inspector.head import BadHead, Field, RequestHead, parse_request_head
from egressd.gate.inspector.http1.side import Side
from egressd.gate.inspector.messages import framed_body, head_of, is_chunked, request_of, section
from egressd.gate.inspector.outcomes import Answered, ClientLeft, Failed, HalfClosed, Rejected
from egressd.gate.inspector.veil import Veil
from egressd.policy.reasons import Reason

_PROTOCOL_ERRORS: Final = {
    ErrorCode.GENERIC_CLIENT_ERROR: (Reason.BAD_REQUEST, "refused by mitmproxy"),
    ErrorCode.REQUEST_VALIDATION_FAILED: (Reason.BAD_REQUEST, "refused by mitmproxy"),
    ErrorCode.KILL: (Reason.INTERNAL_ERROR, "killed by an addon"),
}


class SandboxSide(Side):
    """Reads requests, writes responses."""

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
        self.retiring = False
        """The exchange that is open or comes next is the last one."""
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
        self.closing = head.close or self.retiring
        self.trailers_dropped = False
        self._trailers = ()
        yield from self.begin_body(
            RequestHeaders(self.stream_id, self.request, head.length == 0), head.length
        )

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
            yield commands.SendData(self.conn, section(b"0", self._trailers))
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
        self.closing = self.closing or self.retiring
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
