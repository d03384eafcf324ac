"""What both sides of an HTTP/1 exchange share: the reading of bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mitmproxy.proxy import events
from mitmproxy.proxy.layer import CommandGenerator
from mitmproxy.proxy.layers.http._base import HttpEvent, ReceiveHttp
from mitmproxy.proxy.layers.http._http1 import Http1Connection

from egressd.gate.inspector.body import BodyReader, Broken, End, HeadBuffer, Piece, reader_of
from egressd.gate.inspector.head import Field, Length
from egressd.gate.inspector.outcomes import Failed
from egressd.policy.reasons import Reason


class Side(Http1Connection):
    """One side of one connection; what reads heads and writes messages is its own."""

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

    def begin_body(self, head: HttpEvent, length: Length) -> CommandGenerator[None]:
        """Pass on a head, and what has come already of the body of `length` behind it."""
        self.reader = reader_of(length)
        yield ReceiveHttp(head)
        self.state = self.read_body
        yield from self.read_body(events.DataReceived(self.conn, b""))

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
