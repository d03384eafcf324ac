"""The side of the origin: it writes one request at a time, as its exchange has it, and reads the response."""

from __future__ import annotations

from typing import Final

from mitmproxy import http
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator
from mitmproxy.proxy.layers.http._base import HttpEvent, ReceiveHttp
from mitmproxy.proxy.layers.http._events import (
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

from egressd.credentials.attach import Refused
from egressd.gate.inspector.body import HeadBuffer
from egressd.gate.inspector.credential import Sealed
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.fields import onward_trailers
from egressd.gate.inspector.head import MAX_INTERIM, BadHead, Field, ResponseHead, parse_response_head
from egressd.gate.inspector.http1.side import Side
from egressd.gate.inspector.messages import framed_body, is_chunked, request_head_of, response_of
from egressd.gate.inspector.outcomes import Answered, Failed, Interim, Upgraded
from egressd.gate.inspector.outgoing import Outgoing
from egressd.policy.reasons import Reason

RESPONSE_HEAD_BYTES: Final = 256 * 1024


class OriginSide(Side):
    """Writes requests, reads responses."""

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
        yield from self.begin_body(
            ResponseHeaders(self.stream_id, self.response, head.length == 0), head.length
        )

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
