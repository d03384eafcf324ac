"""The engine for HTTP/2: one connection of a sandbox, one upstream connection, and an exchange on every stream.

It keeps the two rules of the HTTP/1 engine: nothing is written upstream before an exchange is admitted, and whatever breaks
fails closed. A stream that is refused or breaks ends alone; the connection ends with what its peer does to it.

The client speaks HTTP/2 only where the upstream does (the door has found that out), so nothing is ever translated to
HTTP/1. When the upstream goes, so does the connection, after the streams that it still carries: the client opens another.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from egressd.gate.connection import Connection
from egressd.gate.inspector.addon import PolicyAddon
from egressd.gate.inspector.conduit import Conduit
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.http2.events import Broken, Data, Event, GoingAway, Head, Reset, Surplus
from egressd.gate.inspector.http2.frames import Code
from egressd.gate.inspector.http2.lanes import Lanes, Unreachable
from egressd.gate.inspector.http2.link import Link, Terms
from egressd.gate.inspector.http2.requests import Requests
from egressd.gate.inspector.http2.responses import RESPONSE_HEAD_BYTES, Responses
from egressd.gate.inspector.layers import client_of, context_of
from egressd.gate.inspector.life import Life
from egressd.gate.inspector.pace import Pace
from egressd.gate.inspector.upstream import Opened, OpenFailed, reason_of
from egressd.gate.tls.stream import ByteStream
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason

KiB: Final = 1024
CLIENT_WINDOW: Final = 128 * KiB
UPSTREAM_WINDOW: Final = 256 * KiB
MOST_WINDOW: Final = 1024 * KiB
"""Windows of a stream: of the sandbox, which is near; of an origin at first, and where what it sends is taken as it comes."""

CONNECTION_WINDOW: Final = 1024 * KiB
UNREAD_REPLIES: Final = 1024 * KiB
"""Bytes that may wait for a peer that asks and does not read; bodies wait elsewhere."""

LOOK: Final = 1.0
"""Seconds between two looks at what is overdue, at most."""


class Http2Engine:
    """One connection of a sandbox under inspection; owner of its stream and of its upstream's."""

    def __init__(
        self, connection: Connection, stream: ByteStream, opened: Opened | OpenFailed | None
    ) -> None:
        """`opened` is the upstream that agreed to HTTP/2, or why there is none; None where no request can be admitted."""
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._life = Life()
        self._conduit = Conduit(stream, self, Pace(lambda: None))
        self._opened = opened
        self._client = Link(
            Terms(connection.services.settings.head_bytes, CLIENT_WINDOW, CLIENT_WINDOW, CONNECTION_WINDOW),
            server=True,
        )
        self._upstream: Link | None = None
        self._lanes = Lanes(connection, self._client, self, self)
        addon, client = PolicyAddon(connection, holds_bodies=True), client_of(connection, stream)
        ends = client, context_of(connection, client).server
        self._requests = requests = Requests(addon, ends, self._lanes, self._client, self)
        self._responses = responses = Responses(addon, self._lanes, self._client)
        self._draining = False
        self._begun = False  # there has been a lane
        self._quiet: float | None = self._loop.time()  # since when there has been no lane
        self._head: float | None = None  # since when the client is in the middle of a header section
        self._moved = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._from_client: dict[type[Any], Callable[[Any], None]] = {
            Head: requests.head,
            Data: requests.data,
            Reset: requests.reset,
            Surplus: requests.surplus,
            GoingAway: lambda _: self._drain(),
            Broken: self._client_broke,
        }
        self._from_upstream: dict[type[Any], Callable[[Any], None]] = {
            Head: responses.head,
            Data: responses.data,
            Reset: responses.reset,
            GoingAway: self._upstream_goes,
            Broken: lambda broken: self._lose_upstream(Reason.UPSTREAM_PROTOCOL, broken.detail),
        }

    async def run(self) -> None:
        """Carry the connection to its end. Cancelling it cuts the connection."""
        await self._life.lead(self, self.connection.sandbox, self._begin)

    def _begin(self) -> None:
        self._conduit.open()  # which tells nothing before this returns to the loop
        self._watch()
        self.flush(up=False)
        if self.connection.sandbox.retiring:
            self.retire()

    def cut(self, reason: Reason) -> None:
        """End both sides at once; every open exchange gets its `end` record with `reason`. Nothing is done twice."""
        if self._life.is_over():
            return
        self._lanes.cut(reason)
        self._conduit.abort()
        self._finish()

    def retire(self) -> None:
        """Take no more streams, and leave once those that are open have ended."""
        if self._life.is_open():
            self._guard(self._drain)
            self._guard(self._settle)

    def rejudge(self, now: float) -> None:
        """End the exchanges that the rules no longer allow; the others and the connection live on."""
        if self._life.is_open():
            self._guard(lambda: self._lanes.rejudge(now))
            self._guard(self._settle)

    @property
    def held(self) -> int:
        """Bytes of bodies that wait in this connection."""
        return self._lanes.traffic.held

    # what the streams tell (StreamOwner)

    def on_ready(self, stream: ByteStream) -> None:
        """Both streams are ready before they get here."""

    def on_data(self, stream: ByteStream, data: bytes) -> None:
        """Read what arrived, and send on what that sets going."""
        if not self._life.is_open():
            return
        if stream is self._conduit.client:
            self._guard(lambda: self._read(self._client, data, self._from_client))
        elif self._upstream is not None and self._conduit.is_upstream(stream):
            upstream = self._upstream
            self._guard(lambda: self._read(upstream, data, self._from_upstream))
        self._guard(self._settle)

    def _read(self, link: Link, data: bytes, steps: dict[type[Any], Callable[[Any], None]]) -> None:
        events: list[Event] = link.receive(data, self._loop.time())
        for event in events:
            step = steps.get(type(event))
            if step is not None:
                step(event)
            if not self._life.is_open():
                break

    def on_eof(self, stream: ByteStream) -> None:
        """A client that ends its side has gone: HTTP/2 needs both directions to the end of a stream."""
        if not self._life.is_open():
            return
        if stream is self._conduit.client:
            self._lanes.cut(Reason.CLIENT_CLOSED)
            self._leave()
        elif self._conduit.is_upstream(stream):
            self._guard(lambda: self._lose_upstream(Reason.UPSTREAM_CLOSED, "closed"))
            self._guard(self._settle)

    def on_lost(self, stream: ByteStream, exc: Exception | None) -> None:
        """End with the client; without its upstream no stream is carried any more."""
        if stream is self._conduit.client:
            self._lanes.cut(Reason.CLIENT_CLOSED)
            self._conduit.drop_upstream()
            self._finish()
        elif self._life.is_open() and self._conduit.is_upstream(stream):
            self._guard(lambda: self._lose_upstream(reason_of(exc), "lost"))
            self._guard(self._settle)

    def on_pause(self, _: ByteStream) -> None:
        """Bodies wait in their lanes until the peer has read; nothing else needs to."""

    def on_resume(self, _: ByteStream) -> None:
        """Go on sending."""
        if self._life.is_open():
            self._guard(self._settle)

    # where bytes go (traffic.Socket) and come from (lanes.Way)

    def flush(self, *, up: bool) -> bool:
        """Write what a link has to say; returns whether its peer takes more."""
        if not up:
            stream, data = self._conduit.client, self._client.take()
        elif self._upstream is not None and self._conduit.upstream is not None:
            stream, data = self._conduit.upstream.stream, self._upstream.take()
        else:
            return False
        if data:
            stream.write(data)
        return not stream.paused and not stream.closed

    def moved(self) -> None:
        """Something waits to be sent, or a limit may have room again."""
        if self._life.is_open():
            self._guard(self._settle)

    def held_in_sandbox(self) -> int:
        """Bytes of bodies that wait in all connections of the sandbox."""
        return sum(live.held for live in self.connection.sandbox.live if isinstance(live, Http2Engine))

    @property
    def congested(self) -> bool:
        """Whether the client does not keep up."""
        return self._conduit.client.paused

    def lane_gone(self) -> None:
        """Say farewell behind the very last answer: a client that learned of it later might have asked again by then."""
        if self._is_over():
            self._client.go_away()

    def _is_over(self) -> bool:
        """Whether all was said: nothing is open, and nothing more would be answered, or only by what may no longer be so."""
        return not len(self._lanes) and (self._draining or not self.connection.decision.allowed)

    def reach(self, exchange: Exchange) -> Unreachable | None:
        """Make the upstream ready for an admitted exchange: only here, and only for one, is anything said to it."""
        assert exchange.admitted
        assert exchange.bound is not None
        opened, bound = self._opened, exchange.bound
        if isinstance(opened, OpenFailed):
            self._drain()
            return Unreachable(opened.reason, opened.detail)
        if opened is None:
            raise RuntimeError("a request was admitted on a connection that leads nowhere")
        name = format_host(bound.host).strip("[]")
        if (name, bound.port, bound.scheme) != (opened.name, opened.port, "https"):
            raise ValueError("the request leads elsewhere than its connection")
        if exchange.lease is not None and not opened.verified:
            return Unreachable(Reason.CREDENTIAL_NEEDS_TLS, "the upstream is not verified")
        refused = exchange.permits(opened.address)
        if refused is not None:
            return Unreachable(refused, f"{opened.address} refused")
        if self._draining or opened.stream.closed or opened.stream.clean is not None:
            self._drain()
            return Unreachable(Reason.UPSTREAM_CLOSED, "gone before the request", Code.REFUSED_STREAM)
        if self._upstream is None:
            self._upstream = Link(
                Terms(RESPONSE_HEAD_BYTES, UPSTREAM_WINDOW, MOST_WINDOW, CONNECTION_WINDOW), server=False
            )
            self._lanes.adopt(self._upstream)
            self._conduit.adopt(opened)
        exchange.upstream = opened.address
        return None

    # what the peers do to the connection

    def _client_broke(self, broken: Broken) -> None:
        self._requests.attempt(broken.reason, broken.detail)
        self._lanes.cut(broken.reason)
        self._leave()

    def _upstream_goes(self, going: GoingAway) -> None:
        self._drain()
        self._responses.taken_up_to(going.last)

    def _lose_upstream(self, reason: Reason, detail: str) -> None:
        self._drain()
        self.flush(up=True)  # its GOAWAY, if it was told one
        self._conduit.drop_upstream()
        self._responses.lost(reason, detail)

    def _drain(self) -> None:
        """Take no more streams; leave once those that are open have ended."""
        self._draining = True
        self._client.take_no_more()

    def _settle(self) -> None:
        """After whatever happened: send what can be sent, and see whether the connection goes on."""
        if not self._life.is_open():
            return
        self._begun = self._begun or self._draining or len(self._lanes) > 0
        self._lanes.traffic.pump()
        now = self._loop.time()
        self._quiet = (self._quiet or now) if not len(self._lanes) else None
        self._head = (self._head or now) if self._client.in_head else None
        if self._conduit.client.waiting > UNREAD_REPLIES:
            self._requests.attempt(Reason.FLOOD, "asks and does not read")
            self.cut(Reason.FLOOD)
        elif self._conduit.upstream is not None and self._conduit.upstream.stream.waiting > UNREAD_REPLIES:
            self._lose_upstream(Reason.UPSTREAM_PROTOCOL, "asks and does not read")
            self._settle()
        elif self._is_over() and self._begun:
            self._leave()

    # deadlines, and the end

    def _watch(self) -> None:
        settings = self.connection.services.settings
        pause = min(LOOK, settings.head_timeout / 4, settings.idle_timeout / 4)
        self._timer = self._loop.call_later(pause, lambda: self._guard(self._look))

    def _look(self) -> None:
        """See what is overdue: one timer, whatever it waits for."""
        now, settings = self._loop.time(), self.connection.services.settings
        if not self._life.is_open():
            self._go_on_leaving(now, settings.idle_timeout)
        elif self._head is not None and now - self._head >= settings.head_timeout:
            self._client.go_away(Code.ENHANCE_YOUR_CALM)
            self._client_broke(
                Broken(Code.PROTOCOL_ERROR, Reason.HEAD_TIMEOUT, "the head did not end in time")
            )
        elif self._quiet is not None and now - self._quiet >= settings.head_timeout:
            self._leave()  # idle between requests: nobody is owed a word
        else:
            self._lanes.overdue(settings.head_timeout, settings.idle_timeout)
            self._settle()
        if not self._life.is_over():
            self._watch()

    def _leave(self) -> None:
        """Let the client have what was written for it, then close. Nothing more is judged or sent upstream."""
        if not self._life.leave():
            return
        self._lanes.cut(Reason.INTERNAL_ERROR)  # there are none left, or they were told why
        self._client.go_away()
        self.flush(up=False)
        self._moved = self._loop.time()
        self._release()
        if self._conduit.leave():
            self._stop_watching()

    def _go_on_leaving(self, now: float, idle_timeout: float) -> None:
        """A client that reads slowly gets all of its answer; one that reads nothing is given up on."""
        left = self._conduit.left()
        if left is False:
            self._moved = now
        elif left is None and now - self._moved >= idle_timeout:
            self._conduit.abort()
            self._finish()

    def _finish(self) -> None:
        self._life.finish()
        self._lanes.traffic.stop()
        self._stop_watching()
        self._release()

    def _release(self) -> None:
        """Let go of an upstream that was never used."""
        if isinstance(self._opened, Opened) and self._upstream is None:
            self._opened.keep_session()
            self._opened.stream.close()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _guard(self, step: Callable[[], None]) -> None:
        """Run a step that concerns the whole connection; where it raises, nothing of it is trusted any more."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 # law 1: fail closed, and tell the operator
            traceback.print_exception(error, limit=8, file=sys.stderr)
            self.cut(Reason.INTERNAL_ERROR)
