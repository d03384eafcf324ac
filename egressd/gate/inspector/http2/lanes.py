"""The exchanges of one HTTP/2 connection: each stream is judged, admitted, carried and ended on its own.

Everything here is about one lane at a time. What raises refuses that lane and no other; a lane that cannot even be refused
is reset.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mitmproxy import http
from mitmproxy.connection import Client, Server

from egressd.credentials.attach import Body, Refused
from egressd.gate.connection import Connection
from egressd.gate.inspector import grpc
from egressd.gate.inspector.addon import BODY, PolicyAddon, exchange_of
from egressd.gate.inspector.credential import Sealed
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.fields import onward_request_trailers, onward_trailers
from egressd.gate.inspector.head import CHUNKED, BadHead, Field, RequestHead
from egressd.gate.inspector.http2 import heads
from egressd.gate.inspector.http2.events import Data, Head, Reset, Surplus
from egressd.gate.inspector.http2.frames import Code
from egressd.gate.inspector.http2.lane import Lane, Section, brings
from egressd.gate.inspector.http2.link import Link
from egressd.gate.inspector.http2.sieve import Sieve
from egressd.gate.inspector.http2.traffic import Socket, Traffic
from egressd.gate.inspector.messages import request_of, response_of
from egressd.gate.inspector.outgoing import LEAK, Outgoing, Watch
from egressd.gate.inspector.pace import Starved
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason

HOOK_TIMEOUT: Final = 30.0
"""Seconds that any hook may take."""

MAX_INTERIM: Final = 16
RESPONSE_HEAD_BYTES: Final = 64 * 1024

_PASSED_ON: Final = frozenset({Code.REFUSED_STREAM, Code.HTTP_1_1_REQUIRED})
"""Codes by which an origin says that it has done nothing and what the client may do about it (RFC 9113 §8.7)."""

_CODES: Final = {
    Reason.BAD_FRAMING: Code.PROTOCOL_ERROR,
    Reason.POLICY_CHANGED: Code.CANCEL,
    Reason.REVOKED: Code.CANCEL,
    Reason.RATE_LIMITED: Code.ENHANCE_YOUR_CALM,
    Reason.IDLE_TIMEOUT: Code.CANCEL,
}


@dataclass(frozen=True, slots=True)
class Unreachable:
    """There is no upstream for an exchange, and why; `code` where the client may simply ask again on another connection."""

    reason: Reason
    detail: str
    code: Code | None = None


class Way(Protocol):
    """The connection that the lanes are on."""

    def reach(self, exchange: Exchange) -> Unreachable | None:
        """Make the upstream of an admitted exchange ready for a stream, or say why there is none for it."""

    @property
    def congested(self) -> bool:
        """Whether the client does not keep up."""

    def lane_gone(self) -> None:
        """There is one lane less."""


class Lanes:
    """All lanes of a connection, by the client's stream."""

    def __init__(
        self, connection: Connection, flow_ends: tuple[Client, Server], client: Link, way: Way, socket: Socket
    ) -> None:
        """`flow_ends` are the two connections in mitmproxy's terms."""
        self.connection = connection
        self.addon = PolicyAddon(connection)
        self.traffic = Traffic(self, socket, client)
        self._client = client
        self._upstream: Link | None = None
        self._ends = flow_ends
        self._way, self._socket = way, socket
        self._lanes: dict[int, Lane] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._lanes)

    def adopt(self, upstream: Link) -> None:
        """Take the link of the upstream."""
        self._upstream = upstream
        self.traffic.adopt(upstream)

    # what the client says

    def opens(self, head: Head) -> None:
        """A request begins."""
        lane = self._lanes[head.stream] = Lane(head.stream, self._loop.time(), Exchange(self.connection))
        with self._guarded(lane):
            parsed = heads.parse_request(
                head.fields, ended=head.ended, limit=self.connection.services.settings.head_bytes
            )
            content_type = next((value for name, value in head.fields if name == b"content-type"), None)
            lane.grpc = grpc.is_grpc(content_type)
            lane.heard_end = head.ended
            lane.exchange.method = parsed.method.decode("latin-1") or None
            lane.exchange.target = parsed.target.decode("latin-1") or None
            if isinstance(parsed, BadHead):
                self._unread(lane, parsed.reason, parsed.detail)
            elif parsed.method in (b"GET", b"HEAD") and parsed.length is CHUNKED:
                lane.undecided = parsed
            else:
                self._judge(lane, parsed, body=parsed.length != 0)

    def client_data(self, data: Data) -> None:
        """A piece of a request's body."""
        lane = self._lanes.get(data.stream)
        if lane is None or lane.answered:
            self.traffic.skip(data.size, up=True)
            return
        lane.moved = self._loop.time()
        with self._guarded(lane):
            lane.watch = lane.watch or Watch(lane.exchange)
            passing: bytes | Refused = LEAK
            try:
                passing = LEAK if lane.watch.finds(data.data) else self._signed(lane, data.data)
            finally:  # the connection's window is given back whatever becomes of it
                self.traffic.add(lane, b"" if isinstance(passing, Refused) else passing, data.size, up=True)
            if isinstance(passing, Refused):
                self.fail(lane, passing.reason, passing.detail)
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

    def client_trailers(self, head: Head) -> None:
        """A request ends with trailers; only gRPC's go on: no rule judged them (RFC 9110 §6.5.1 lets them be dropped)."""
        lane = self._lanes.get(head.stream)
        if lane is None or lane.answered:
            return
        with self._guarded(lane):
            parsed = heads.parse_trailers(head.fields, self.connection.services.settings.head_bytes)
            if isinstance(parsed, BadHead):
                self.fail(lane, parsed.reason, parsed.detail)
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
            self.fail(lane, Reason.BAD_FRAMING, left)
            return
        lane.length = left
        if ended and lane.outgoing is not None:
            self._end_signed(lane, lane.outgoing)
        elif ended:
            lane.up.end(trailers)
        if lane.ready:
            self.traffic.wake(lane, up=True)

    def client_reset(self, reset: Reset) -> None:
        """The client gives a request up, or has done something on its stream that ends it."""
        lane = self._lanes.get(reset.stream)
        if lane is None:
            return
        if reset.ours:
            self._end(lane, Reason.BAD_FRAMING, f"the stream: {reset.code.name.lower()}")
        else:
            self._end(lane, Reason.CLIENT_CLOSED, f"reset: {reset.code.name.lower()}")
        self._drop(lane, Code.CANCEL)

    def surplus(self, surplus: Surplus) -> None:
        """A stream was refused before anybody looked at it; it is an attempt all the same."""
        shown = dict(reversed(surplus.fields))
        exchange = Exchange(self.connection)
        exchange.method = shown.get(b":method", b"").decode("latin-1")
        exchange.target = shown.get(b":path", b"").decode("latin-1")
        exchange.deny(
            Decision("deny", Reason.TOO_MANY_CONNECTIONS), "one stream too many; it may be opened again"
        )
        exchange.end(Reason.COMPLETED)

    def attempt(self, reason: Reason, detail: str) -> None:
        """Record what never became a request, and ended the connection."""
        exchange = Exchange(self.connection)
        exchange.deny(Decision("deny", reason), detail)
        exchange.end(Reason.COMPLETED)

    # the judgement

    def _judge(self, lane: Lane, parsed: RequestHead, *, body: bool) -> None:
        """Have the addon judge a request; what it does not admit is answered."""
        flow = lane.flow = http.HTTPFlow(*self._ends, live=True)
        flow.request = request_of(parsed)
        flow.metadata[BODY] = body
        lane.length = parsed.length
        hook = self.addon.requestheaders(flow)
        lane.exchange = exchange_of(flow)
        if hook is None:
            self._deny(lane)
            return
        lane.task = self._loop.create_task(self._admit(lane, hook))
        lane.task.add_done_callback(
            lambda _: hook.close()
        )  # which a task that is cancelled early never began

    async def _admit(self, lane: Lane, hook: Coroutine[Any, Any, None]) -> None:
        with self._guarded(lane):
            async with asyncio.timeout(HOOK_TIMEOUT):
                await hook
            if self._is_here(lane):
                lane.task = None
                self._admitted(lane)
        self._socket.moved()

    def _is_here(self, lane: Lane) -> bool:
        return self._lanes.get(lane.stream) is lane and not lane.answered

    def _admitted(self, lane: Lane) -> None:
        exchange = lane.exchange
        if not exchange.admitted:
            self._deny(lane)
            return
        failed = self._way.reach(exchange)
        if failed is not None:
            self.fail(lane, failed.reason, failed.detail, failed.code)
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
        self.traffic.clear(lane, up=True)
        if not outgoing.waits:
            self._go_up(lane, outgoing.head(lane.flow.request))
        signed = self._signed(lane, come) if not lane.answered else b""
        if isinstance(signed, Refused):
            self.fail(lane, signed.reason, signed.detail)
            return
        self.traffic.add(lane, signed, 0, up=True)
        if lane.heard_end and not lane.answered:
            self._end_signed(lane, outgoing)

    def _end_signed(self, lane: Lane, outgoing: Outgoing) -> None:
        """End a body that must be signed; where that needed all of it, only now is there a head."""
        assert lane.flow is not None
        last = outgoing.end(lane.flow.request)
        if isinstance(last, Refused):
            self.fail(lane, last.reason, last.detail)
            return
        lane.up.end()
        if last[0] is not None:
            self.traffic.add(lane, last[1], 0, up=True)
            self._go_up(lane, last[0])

    def _go_up(self, lane: Lane, sealed: Sealed | Refused) -> None:
        """Have the head of a request and what follows it sent."""
        bound = lane.exchange.bound
        assert bound is not None
        assert lane.flow is not None
        if isinstance(sealed, Refused):
            self.fail(lane, sealed.reason, sealed.detail)
            return
        method, target, fields = lane.flow.request.data.method, sealed.target, sealed.fields
        lane.up.begin(Section(heads.write_request(method, target, fields, bound, trailers=lane.grpc)))
        lane.ready = True
        if lane.heard_end and lane.outgoing is None and not lane.up.ended:
            lane.up.end()
        self.traffic.wake(lane, up=True)

    def _deny(self, lane: Lane) -> None:
        """Answer a request that the addon has not admitted."""
        exchange = lane.exchange
        refusal = exchange.refusal or exchange.refuse(Reason.INTERNAL_ERROR)
        judged = exchange.decided and refusal.reason is exchange.decision.reason
        self._answer(lane, Reason.COMPLETED if judged else refusal.reason)

    def _unread(self, lane: Lane, reason: Reason, detail: str) -> None:
        """Answer and record an attempt that never became a request."""
        lane.exchange.deny(Decision("deny", reason), detail)
        self._answer(lane, Reason.COMPLETED)

    # what the upstream says

    def response(self, head: Head) -> None:
        """A response begins, or an interim one comes before it, or trailers end it."""
        lane = self.traffic.by_upstream.get(head.stream)
        if lane is None or lane.answered:
            return
        lane.moved = self._loop.time()
        with self._guarded(lane):
            if lane.responded:
                self._response_trailers(lane, head)
                return
            parsed = heads.parse_response(
                head.fields, method=lane.method, ended=head.ended, limit=RESPONSE_HEAD_BYTES
            )
            if isinstance(parsed, BadHead):
                self.fail(lane, Reason.UPSTREAM_PROTOCOL, parsed.detail)
            elif parsed.status < 200:
                self._interim(lane, parsed.status, parsed.fields)
            else:
                assert lane.flow is not None
                lane.flow.response = response_of(parsed)
                self.addon.responseheaders(lane.flow)
                lane.responded, lane.down_length = True, parsed.length
                veil = lane.exchange.veil
                problem = (
                    veil.head(lane.flow.response, lane.exchange.method or "") if veil is not None else None
                )
                if problem is not None:
                    self.fail(lane, Reason.UNSCANNABLE, problem)
                    return
                lane.sieve = Sieve(veil) if veil is not None else None
                lane.down.begin(Section(heads.write_response(lane.flow.response)))
                self._comes_down(lane, 0, ended=head.ended)

    def _interim(self, lane: Lane, status: int, fields: tuple[Field, ...]) -> None:
        """Hints and progress pass (RFC 9110 §15.2) where the client keeps up; a 100 was said by us."""
        lane.interim += 1
        if lane.interim > MAX_INTERIM:
            self.fail(lane, Reason.UPSTREAM_PROTOCOL, "interim responses without end")
        elif status != 100 and not self._way.congested:
            pseudo = (b":status", str(status).encode("ascii"))
            self._client.send_head(lane.stream, (pseudo, *_veiled(lane, onward_trailers(fields))))

    def _response_trailers(self, lane: Lane, head: Head) -> None:
        parsed = heads.parse_trailers(head.fields, RESPONSE_HEAD_BYTES)
        if isinstance(parsed, BadHead) or not head.ended:
            self.fail(lane, Reason.UPSTREAM_PROTOCOL, "the trailers are malformed")
            return
        onward = _veiled(lane, onward_trailers(parsed))
        self._comes_down(lane, 0, ended=True, trailers=Section(onward) if onward else None)

    def upstream_data(self, data: Data) -> None:
        """A piece of a response's body."""
        lane = self.traffic.by_upstream.get(data.stream)
        if lane is None or lane.answered:
            self.traffic.skip(data.size, up=False)
            return
        lane.moved = self._loop.time()
        self.traffic.add(lane, data.data, data.size, up=False)
        with self._guarded(lane):
            if lane.responded:
                self._comes_down(lane, len(data.data), ended=data.ended)
            else:
                self.fail(lane, Reason.UPSTREAM_PROTOCOL, "data before a response")

    def _comes_down(self, lane: Lane, count: int, *, ended: bool, trailers: Section | None = None) -> None:
        left = brings(lane.down_length, count, ended=ended)
        if isinstance(left, str):
            self.fail(lane, Reason.UPSTREAM_PROTOCOL, left)
            return
        lane.down_length = left
        if ended and lane.sieve is not None:
            lane.sieve.end(trailers)
        elif ended:
            lane.down.end(trailers)
        self.traffic.wake(lane, up=False)

    def upstream_reset(self, reset: Reset) -> None:
        """The upstream ends a stream before its time; one whose response is complete only has no use for the rest."""
        lane = self.traffic.by_upstream.get(reset.stream)
        if lane is None or lane.answered:
            return
        with self._guarded(lane):
            if lane.heard_all:
                self.traffic.clear(lane, up=True)
                return
            detail = f"reset: {reset.code.name.lower()}"
            self.fail(
                lane, Reason.UPSTREAM_PROTOCOL if reset.ours else Reason.UPSTREAM_CLOSED, detail, reset.code
            )

    def upstream_takes_up_to(self, last: int) -> None:
        """The upstream has not looked at streams after `last`, and will not: the client may ask for them elsewhere."""
        for lane in tuple(self._lanes.values()):
            if lane.ready and not lane.answered and (lane.upstream is None or lane.upstream > last):
                with self._guarded(lane):
                    self.fail(lane, Reason.UPSTREAM_CLOSED, "the host goes away", Code.REFUSED_STREAM)

    def upstream_lost(self, reason: Reason, detail: str) -> None:
        """The upstream has gone: what it has not answered in full fails, and so does what it was not asked yet."""
        for lane in tuple(self._lanes.values()):
            if lane.ready and not lane.answered and not lane.heard_all:
                with self._guarded(lane):
                    self.fail(
                        lane, reason, detail, None if lane.upstream is not None else Code.REFUSED_STREAM
                    )

    # how lanes end

    def lane_said_all(self, lane: Lane, *, up: bool) -> None:
        """Once the client has all of its answer the exchange is over, whatever is left of the request (§8.1)."""
        if up:
            return
        whole = lane.heard_end and not lane.up.busy
        detail = None if whole else "answered before the end of the request"
        self._end(
            lane, Reason.COMPLETED, "request trailers dropped" if whole and lane.trailers_dropped else detail
        )
        self._drop(lane, None)

    def lane_garbled(self, lane: Lane, detail: str) -> None:
        """Its response cannot be read on."""
        self.fail(lane, Reason.UPSTREAM_PROTOCOL, detail)

    def lane_starved(self, lane: Lane, starved: Starved) -> None:
        """A limit has no room for it, and will have none soon."""
        lane.exchange.retry_after = starved.retry_after
        self.fail(lane, Reason.RATE_LIMITED, starved.detail)

    def lane_broke(self, lane: Lane, error: Exception) -> None:
        """Fail closed, and tell the operator; a lane that breaks in its refusal is reset."""
        traceback.print_exception(error, limit=8, file=sys.stderr)
        if not self._is_here(lane):
            self._end(lane, Reason.INTERNAL_ERROR)
            self._drop(lane, Code.INTERNAL_ERROR)
            return
        try:
            self.fail(lane, Reason.INTERNAL_ERROR, type(error).__name__)
        except Exception:  # noqa: BLE001 # not even that: then nothing is said at all
            self._end(lane, Reason.INTERNAL_ERROR)
            self._drop(lane, Code.INTERNAL_ERROR)

    @contextmanager
    def _guarded(self, lane: Lane) -> Iterator[None]:
        """Run a step of one lane: whatever raises, a hook, a parser or this file, refuses that lane (law 1)."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 # as said
            self.lane_broke(lane, error)

    def fail(self, lane: Lane, reason: Reason, detail: str, code: Code | None = None) -> None:
        """End an exchange that cannot go on: by an answer that says why, or where one has begun by cutting it short."""
        exchange = lane.exchange
        self._stop(lane)
        if code in _PASSED_ON and not lane.begun:
            self._end(lane, reason, detail)
            self._drop(lane, code)
        elif lane.begun and lane.grpc:
            exchange.refuse(reason)
            self._close_call(lane, reason, detail)
        elif lane.begun:
            self._end(lane, reason, detail)
            self._drop(lane, code or _CODES.get(reason, Code.INTERNAL_ERROR))
        else:
            if not exchange.decided:
                exchange.deny(Decision("deny", reason), detail)
            exchange.refuse(reason)
            self._answer(lane, reason, detail)

    def _stop(self, lane: Lane) -> None:
        """Have nothing more of a lane go upstream, or come from there."""
        if lane.task is not None and lane.task is not asyncio.current_task():
            lane.task.cancel()
        lane.task = None
        lane.ready = False
        if lane.outgoing is not None:
            lane.outgoing.drop()
        if lane.upstream is not None and self._upstream is not None:
            self._upstream.reset(lane.upstream, Code.CANCEL)
        self.traffic.forget(lane)

    def _answer(self, lane: Lane, ended: Reason, detail: str | None = None) -> None:
        """Send the exchange's refusal instead of a response."""
        refusal = lane.exchange.refusal
        assert refusal is not None
        self._stop(lane)
        lane.answered = True
        if lane.grpc and refusal.status >= 400 and refusal.reason is not Reason.MISDIRECTED_REQUEST:
            lane.down.begin(Section(grpc.answer_of(refusal)))
        else:
            status = (b":status", str(refusal.status).encode("ascii"))
            kept = (field for field in refusal.fields if field[0] not in heads.CONNECTION_SPECIFIC)
            lane.down.begin(Section((status, *kept)))
            if lane.exchange.method != "HEAD":
                self.traffic.put(lane, refusal.body)
        lane.down.end()
        self.traffic.wake(lane, up=False)
        self._end(lane, ended, detail)

    def _close_call(self, lane: Lane, ended: Reason, detail: str) -> None:
        """End a call that has begun in gRPC's own way, so that its client learns why."""
        refusal = lane.exchange.refusal
        assert refusal is not None
        lane.answered = True
        lane.down.end(Section(grpc.trailers_of(refusal)))
        self.traffic.wake(lane, up=False)
        self._end(lane, ended, detail)

    def _end(self, lane: Lane, reason: Reason, detail: str | None = None) -> None:
        lane.exchange.end(reason, detail)

    def _drop(self, lane: Lane, code: Code | None) -> None:
        """Let go of a lane on both sides; a stream that is complete is not touched by it.

        Without a `code` the client has its whole answer, and may finish what it is sending: it is dropped.
        """
        self._stop(lane)
        if code is None:
            self._client.let_finish(lane.stream)
        else:
            self._client.reset(lane.stream, code)
        if self._lanes.get(lane.stream) is lane:
            del self._lanes[lane.stream]
            self._way.lane_gone()

    # from outside

    def cut(self, reason: Reason) -> None:
        """End every exchange with `reason`; nothing more is said."""
        for lane in tuple(self._lanes.values()):
            self._end(lane, reason)
            self._drop(lane, Code.CANCEL)
        self.traffic.stop()

    def rejudge(self, now: float) -> None:
        """End the exchanges that the rules no longer allow; the others don't notice."""
        for lane in tuple(self._lanes.values()):
            with self._guarded(lane):
                if not lane.answered and not lane.exchange.may_live(now):
                    self.fail(lane, Reason.POLICY_CHANGED, "judged again")

    def overdue(self, head_timeout: float, idle_timeout: float) -> None:
        """End the exchanges on which nothing has moved for too long."""
        now = self._loop.time()
        for lane in tuple(self._lanes.values()):
            quiet = now - lane.moved
            with self._guarded(lane):
                if lane.undecided is not None and quiet >= head_timeout:
                    self._unread(lane, Reason.HEAD_TIMEOUT, "nothing told whether a body follows")
                elif quiet >= idle_timeout and lane.answered:
                    self._drop(lane, Code.CANCEL)
                elif quiet >= idle_timeout:
                    waiting = lane.heard_end and not lane.responded
                    reason = Reason.UPSTREAM_TIMEOUT if waiting else Reason.IDLE_TIMEOUT
                    self.fail(lane, reason, "no bytes in either direction")


def _veiled(lane: Lane, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    veil = lane.exchange.veil
    return fields if veil is None else veil.fields(fields)
