"""The exchanges of one HTTP/2 connection by the client's stream, and how each of them ends, which is its own affair.

`requests` and `responses` carry them. What raises refuses one lane and no other; a lane that cannot even be refused is reset.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from egressd.gate.connection import Connection
from egressd.gate.inspector import grpc
from egressd.gate.inspector.exchange import EARLY, Exchange
from egressd.gate.inspector.http2 import heads
from egressd.gate.inspector.http2.frames import Code
from egressd.gate.inspector.http2.lane import Lane, Section
from egressd.gate.inspector.http2.link import Link
from egressd.gate.inspector.http2.traffic import Socket, Traffic
from egressd.gate.inspector.pace import Starved
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason

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

    def __init__(self, connection: Connection, client: Link, way: Way, socket: Socket) -> None:
        """There is none yet, and no upstream."""
        self.way = way
        self.traffic = Traffic(self, socket, client)
        self._connection = connection
        self._client = client
        self._upstream: Link | None = None
        self._lanes: dict[int, Lane] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._lanes)

    def adopt(self, upstream: Link) -> None:
        """Take the link of the upstream."""
        self._upstream = upstream
        self.traffic.adopt(upstream)

    def open(self, stream: int) -> Lane:
        """Begin a lane for a stream of the client's."""
        lane = self._lanes[stream] = Lane(stream, self._loop.time(), Exchange(self._connection))
        return lane

    def of(self, stream: int) -> Lane | None:
        """Return the lane of a stream of the client's, None where it has none any more."""
        return self._lanes.get(stream)

    def all(self) -> tuple[Lane, ...]:
        """Return the lanes of now; any of them may be gone after the next step of another."""
        return tuple(self._lanes.values())

    def has(self, lane: Lane) -> bool:
        """Say whether a lane is still there, and not answered by egressd itself."""
        return self._lanes.get(lane.stream) is lane and not lane.answered

    # how lanes end

    def lane_said_all(self, lane: Lane, *, up: bool) -> None:
        """Once the client has all of its answer the exchange is over, whatever is left of the request (§8.1)."""
        if up:
            return
        whole = lane.heard_end and not lane.up.busy
        detail = None if whole else EARLY
        lane.exchange.end(
            Reason.COMPLETED, "request trailers dropped" if whole and lane.trailers_dropped else detail
        )
        self.drop(lane, None)

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
        if not self.has(lane):
            lane.exchange.end(Reason.INTERNAL_ERROR)
            self.drop(lane, Code.INTERNAL_ERROR)
            return
        try:
            self.fail(lane, Reason.INTERNAL_ERROR, type(error).__name__)
        except Exception:  # noqa: BLE001 # not even that: then nothing is said at all
            lane.exchange.end(Reason.INTERNAL_ERROR)
            self.drop(lane, Code.INTERNAL_ERROR)

    @contextmanager
    def guarded(self, lane: Lane) -> Iterator[None]:
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
            lane.exchange.end(reason, detail)
            self.drop(lane, code)
        elif lane.begun and lane.grpc:
            exchange.refuse(reason)
            self._close_call(lane, reason, detail)
        elif lane.begun:
            lane.exchange.end(reason, detail)
            self.drop(lane, code or _CODES.get(reason, Code.INTERNAL_ERROR))
        else:
            exchange.give_up(reason, detail)
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
        lane.exchange.end(ended, detail)

    def _close_call(self, lane: Lane, ended: Reason, detail: str) -> None:
        """End a call that has begun in gRPC's own way, so that its client learns why."""
        refusal = lane.exchange.refusal
        assert refusal is not None
        lane.answered = True
        lane.down.end(Section(grpc.trailers_of(refusal)))
        self.traffic.wake(lane, up=False)
        lane.exchange.end(ended, detail)

    def drop(self, lane: Lane, code: Code | None) -> None:
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
            self.way.lane_gone()

    def deny(self, lane: Lane) -> None:
        """Answer a request that the addon has not admitted."""
        if lane.exchange.refusal is None:
            lane.exchange.refuse(Reason.INTERNAL_ERROR)
        self._answer(lane, lane.exchange.ending)

    def unread(self, lane: Lane, reason: Reason, detail: str) -> None:
        """Answer and record an attempt that never became a request."""
        lane.exchange.deny(Decision("deny", reason), detail)
        self._answer(lane, Reason.COMPLETED)

    # from outside

    def cut(self, reason: Reason) -> None:
        """End every exchange with `reason`; nothing more is said."""
        for lane in self.all():
            lane.exchange.end(reason)
            self.drop(lane, Code.CANCEL)
        self.traffic.stop()

    def rejudge(self, now: float) -> None:
        """End the exchanges that the rules no longer allow; the others don't notice."""
        for lane in self.all():
            with self.guarded(lane):
                if not lane.answered and not lane.exchange.may_live(now):
                    self.fail(lane, Reason.POLICY_CHANGED, "judged again")

    def overdue(self, head_timeout: float, idle_timeout: float) -> None:
        """End the exchanges on which nothing has moved for too long."""
        now = self._loop.time()
        for lane in self.all():
            quiet = now - lane.moved
            with self.guarded(lane):
                if lane.undecided is not None and quiet >= head_timeout:
                    self.unread(lane, Reason.HEAD_TIMEOUT, "nothing told whether a body follows")
                elif quiet >= idle_timeout and lane.answered:
                    self.drop(lane, Code.CANCEL)
                elif quiet >= idle_timeout:
                    waiting = lane.heard_end and not lane.responded
                    reason = Reason.UPSTREAM_TIMEOUT if waiting else Reason.IDLE_TIMEOUT
                    self.fail(lane, reason, "no bytes in either direction")
