"""What the client asks on its streams: each request is judged, and once it is admitted made ready to go on.

Everything here is about one lane at a time, and guarded by `Lanes`: what raises refuses that lane and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from mitmproxy import http
from mitmproxy.connection import Client, Server

from egressd.credentials.attach import Body, Refused
from egressd.gate.inspector import grpc
from egressd.gate.inspector.addon import BODY, HOOK_TIMEOUT, PolicyAddon, exchange_of
from egressd.gate.inspector.credential import Sealed
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.fields import onward_request_trailers
from egressd.gate.inspector.head import CHUNKED, BadHead, RequestHead
from egressd.gate.inspector.http2 import heads
from egressd.gate.inspector.http2.events import Data, Head, Reset, Surplus
from egressd.gate.inspector.http2.frames import Code
from egressd.gate.inspector.http2.lane import Lane, Section, brings
from egressd.gate.inspector.http2.lanes import Lanes
from egressd.gate.inspector.http2.link import Link
from egressd.gate.inspector.http2.traffic import Socket
from egressd.gate.inspector.messages import request_of
from egressd.gate.inspector.outgoing import LEAK, Outgoing, Watch
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason


class Requests:
    """The requests of one connection, from what the client says to what waits for the upstream."""

    def __init__(
        self, addon: PolicyAddon, flow_ends: tuple[Client, Server], lanes: Lanes, client: Link, socket: Socket
    ) -> None:
        """`flow_ends` are the two connections in mitmproxy's terms; `socket` is told when an admitted one is ready."""
        self._connection = addon.connection
        self._addon, self._socket = addon, socket
        self._lanes, self._traffic = lanes, lanes.traffic
        self._client = client
        self._ends = flow_ends
        self._loop = asyncio.get_running_loop()

    # what the client says

    def head(self, head: Head) -> None:
        """A request begins, or trailers end it."""
        if head.opens:
            self._opens(head)
        else:
            self._trailers(head)

    def _opens(self, head: Head) -> None:
        """A request begins."""
        lane = self._lanes.open(head.stream)
        with self._lanes.guarded(lane):
            parsed = heads.parse_request(
                head.fields, ended=head.ended, limit=self._connection.services.settings.head_bytes
            )
            content_type = next((value for name, value in head.fields if name == b"content-type"), None)
            lane.grpc = grpc.is_grpc(content_type)
            lane.heard_end = head.ended
            lane.exchange.method = parsed.method.decode("latin-1") or None
            lane.exchange.target = parsed.target.decode("latin-1") or None
            if isinstance(parsed, BadHead):
                self._lanes.unread(lane, parsed.reason, parsed.detail)
            elif parsed.method in (b"GET", b"HEAD") and parsed.length is CHUNKED:
                lane.undecided = parsed
            else:
                self._judge(lane, parsed, body=parsed.length != 0)

    def data(self, data: Data) -> None:
        """A piece of a request's body."""
        lane = self._lanes.of(data.stream)
        if lane is None or lane.answered:
            self._traffic.skip(data.size, up=True)
            return
        lane.moved = self._loop.time()
        with self._lanes.guarded(lane):
            lane.watch = lane.watch or Watch(lane.exchange)
            passing: bytes | Refused = LEAK
            try:
                passing = LEAK if lane.watch.finds(data.data) else self._signed(lane, data.data)
            finally:  # the connection's window is given back whatever becomes of it
                self._traffic.add(lane, b"" if isinstance(passing, Refused) else passing, data.size, up=True)
            if isinstance(passing, Refused):
                self._lanes.fail(lane, passing.reason, passing.detail)
            else:
                self._goes_on(lane, len(data.data), ended=data.ended)

    def _signed(self, lane: Lane, data: bytes) -> bytes | Refused:
        """Return what of a body is to be sent for a piece of it: of one that must be signed, what is signed."""
        if lane.outgoing is None:
            return data
        signed = lane.outgoing.body(data)
        if not isinstance(signed, Refused):
            self._client.taken(lane.stream, lane.due(0), keeps_up=False)
        return signed

    def _trailers(self, head: Head) -> None:
        """A request ends with trailers; only gRPC's go on: no rule judged them (RFC 9110 §6.5.1 lets them be dropped)."""
        lane = self._lanes.of(head.stream)
        if lane is None or lane.answered:
            return
        with self._lanes.guarded(lane):
            parsed = heads.parse_trailers(head.fields, self._connection.services.settings.head_bytes)
            if isinstance(parsed, BadHead):
                self._lanes.fail(lane, parsed.reason, parsed.detail)
                return
            plain = (
                lane.grpc and lane.exchange.credential is None
            )  # a trailer could be a key of the sandbox's own
            onward = onward_request_trailers(parsed) if plain else ()
            lane.trailers_dropped = len(onward) < len(parsed)
            self._goes_on(lane, 0, ended=True, trailers=Section(onward) if onward else None)

    def _goes_on(self, lane: Lane, count: int, *, ended: bool, trailers: Section | None = None) -> None:
        """A request's body has `count` bytes more."""
        lane.heard_end = lane.heard_end or ended
        if lane.undecided is not None and (count or ended):
            parsed, lane.undecided = lane.undecided, None
            self._judge(lane, parsed, body=bool(count))
        if lane.answered:
            return
        left = brings(lane.length, count, ended=ended)
        if isinstance(left, str):
            self._lanes.fail(lane, Reason.BAD_FRAMING, left)
            return
        lane.length = left
        if ended and lane.outgoing is not None:
            self._end_signed(lane, lane.outgoing)
        elif ended:
            lane.up.end(trailers)
        if lane.ready:
            self._traffic.wake(lane, up=True)

    def reset(self, reset: Reset) -> None:
        """The client gives a request up, or has done something on its stream that ends it."""
        lane = self._lanes.of(reset.stream)
        if lane is None:
            return
        if reset.ours:
            lane.exchange.end(Reason.BAD_FRAMING, f"the stream: {reset.code.name.lower()}")
        else:
            lane.exchange.end(Reason.CLIENT_CLOSED, f"reset: {reset.code.name.lower()}")
        self._lanes.drop(lane, Code.CANCEL)

    def surplus(self, surplus: Surplus) -> None:
        """A stream was refused before anybody looked at it; it is an attempt all the same."""
        shown = dict(reversed(surplus.fields))
        exchange = Exchange(self._connection)
        exchange.method = shown.get(b":method", b"").decode("latin-1")
        exchange.target = shown.get(b":path", b"").decode("latin-1")
        exchange.deny(
            Decision("deny", Reason.TOO_MANY_CONNECTIONS), "one stream too many; it may be opened again"
        )
        exchange.end(Reason.COMPLETED)

    def attempt(self, reason: Reason, detail: str) -> None:
        """Record what never became a request, and ended the connection."""
        exchange = Exchange(self._connection)
        exchange.deny(Decision("deny", reason), detail)
        exchange.end(Reason.COMPLETED)

    # the judgement

    def _judge(self, lane: Lane, parsed: RequestHead, *, body: bool) -> None:
        """Have the addon judge a request; what it does not admit is answered."""
        flow = lane.flow = http.HTTPFlow(*self._ends, live=True)
        flow.request = request_of(parsed)
        flow.metadata[BODY] = body
        lane.length = parsed.length
        hook = self._addon.requestheaders(flow)
        lane.exchange = exchange_of(flow)
        if hook is None:
            self._lanes.deny(lane)
            return
        lane.task = self._loop.create_task(self._admit(lane, hook))
        lane.task.add_done_callback(
            lambda _: hook.close()
        )  # which a task that is cancelled early never began

    async def _admit(self, lane: Lane, hook: Coroutine[Any, Any, None]) -> None:
        with self._lanes.guarded(lane):
            async with asyncio.timeout(HOOK_TIMEOUT):
                await hook
            if self._lanes.has(lane):
                lane.task = None
                self._admitted(lane)
        self._socket.moved()

    def _admitted(self, lane: Lane) -> None:
        exchange = lane.exchange
        if not exchange.admitted:
            self._lanes.deny(lane)
            return
        failed = self._lanes.way.reach(exchange)
        if failed is not None:
            self._lanes.fail(lane, failed.reason, failed.detail, failed.code)
            return
        assert lane.flow is not None
        request = lane.flow.request
        if request.headers.pop("expect", None) is not None and not lane.heard_end:
            self._client.send_head(lane.stream, ((b":status", b"100"),))
        outgoing = Outgoing(exchange)
        if exchange.body is Body.PASSES:
            self._go_up(lane, outgoing.head(request))
        else:
            self._sign(lane, outgoing)

    def _sign(self, lane: Lane, outgoing: Outgoing) -> None:
        """Begin with a body that must be signed: with what has come of it."""
        assert lane.flow is not None
        come, lane.outgoing = lane.up.data, outgoing
        self._traffic.clear(lane, up=True)
        if not outgoing.waits:
            self._go_up(lane, outgoing.head(lane.flow.request))
        signed = self._signed(lane, come) if not lane.answered else b""
        if isinstance(signed, Refused):
            self._lanes.fail(lane, signed.reason, signed.detail)
            return
        self._traffic.add(lane, signed, 0, up=True)
        if lane.heard_end and not lane.answered:
            self._end_signed(lane, outgoing)

    def _end_signed(self, lane: Lane, outgoing: Outgoing) -> None:
        """End a body that must be signed; where that needed all of it, only now is there a head."""
        assert lane.flow is not None
        last = outgoing.end(lane.flow.request)
        if isinstance(last, Refused):
            self._lanes.fail(lane, last.reason, last.detail)
            return
        lane.up.end()
        if last[0] is not None:
            self._traffic.add(lane, last[1], 0, up=True)
            self._go_up(lane, last[0])

    def _go_up(self, lane: Lane, sealed: Sealed | Refused) -> None:
        """Have the head of a request and what follows it sent."""
        bound = lane.exchange.bound
        assert bound is not None
        assert lane.flow is not None
        if isinstance(sealed, Refused):
            self._lanes.fail(lane, sealed.reason, sealed.detail)
            return
        method, target, fields = lane.flow.request.data.method, sealed.target, sealed.fields
        lane.up.begin(Section(heads.write_request(method, target, fields, bound, trailers=lane.grpc)))
        lane.ready = True
        if lane.heard_end and lane.outgoing is None and not lane.up.ended:
            lane.up.end()
        self._traffic.wake(lane, up=True)
