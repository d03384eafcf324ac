"""What moves between the two links of a connection: pieces of every lane in turn, as windows, sockets and limits allow.

The law of memory: a byte that was received is given back to the window of its stream only when the other side has taken it, so
a lane whose reader stalls holds at most one window and stops nobody else. The window of a connection is given back on receipt,
or a few stalled lanes would stop all others; but once a sandbox's connections together hold `HELD_MOST`, no connection that holds
more than `HELD_FREE` gets anything back before it lets go.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final, Protocol

from egressd.gate.account import retry_after
from egressd.gate.inspector.http2.lane import Course, Lane
from egressd.gate.inspector.http2.link import Link
from egressd.gate.inspector.pace import Starved

BURST: Final = 64 * 1024
"""Bytes that are written to a socket at once; then it says whether it takes more."""

TURN: Final = 256 * 1024
"""Bytes that are sent one way before whatever else waits in this process has its turn: masking them may take a while."""

HELD_FREE: Final = 256 * 1024
HELD_MOST: Final = 64 * 1024 * 1024
"""Bytes of bodies that wait: in one connection, and in all of a sandbox."""

_LEAST_PAUSE: Final = 0.05


class Owner(Protocol):
    """Who is told what the moving of lanes came to."""

    def lane_said_all(self, lane: Lane, *, up: bool) -> None:
        """Everything of one direction was sent."""

    def lane_starved(self, lane: Lane, starved: Starved) -> None:
        """A limit has no room, and will have none soon."""

    def lane_broke(self, lane: Lane, error: Exception) -> None:
        """Moving it raised."""

    def lane_garbled(self, lane: Lane, detail: str) -> None:
        """What came of its response cannot be read."""


class Socket(Protocol):
    """Where the bytes of both links go."""

    def flush(self, *, up: bool) -> bool:
        """Write what was sent; returns whether the socket takes more."""

    def held_in_sandbox(self) -> int:
        """Bytes that wait in all connections of the sandbox."""

    def moved(self) -> None:
        """Pump: something waits to be sent, or a limit may have room."""


class _Way:
    """One direction: from the link of one side to that of the other."""

    __slots__ = ("busy", "held", "owed", "source", "target", "up")

    def __init__(self, *, up: bool) -> None:
        self.up = up
        self.source: Link | None = None
        self.target: Link | None = None
        self.busy: dict[Lane, None] = {}  # in the order of their turns
        self.held = 0
        self.owed = 0  # bytes received that the window of the connection was not given back for

    def course(self, lane: Lane) -> Course:
        return lane.up if self.up else lane.down


class Traffic:
    """The lanes of one connection that have something to send."""

    def __init__(self, owner: Owner, socket: Socket, client: Link) -> None:
        """There is no upstream yet."""
        self._owner = owner
        self._socket = socket
        self._up, self._down = _Way(up=True), _Way(up=False)
        self._up.source = self._down.target = client
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self.by_upstream: dict[int, Lane] = {}

    def adopt(self, upstream: Link) -> None:
        """Take the link of the upstream."""
        self._up.target = self._down.source = upstream

    @property
    def held(self) -> int:
        """Bytes of bodies that wait, in both directions."""
        return self._up.held + self._down.held

    # what lanes do

    def wake(self, lane: Lane, *, up: bool) -> None:
        """Something of the lane waits to be sent."""
        (self._up if up else self._down).busy.setdefault(lane)

    def add(self, lane: Lane, data: bytes, size: int, *, up: bool) -> None:
        """Take bytes of a body, which counted `size` against windows, to be sent on once the lane is woken."""
        way = self._up if up else self._down
        (way.course(lane) if up or lane.sieve is None else lane.sieve).add(data)
        way.held += len(data)
        self._receive(way, size)

    def put(self, lane: Lane, data: bytes) -> None:
        """Take bytes of egressd's own for the client."""
        lane.down.add(data)
        self._down.held += len(data)

    def skip(self, size: int, *, up: bool) -> None:
        """Drop bytes of a body that nobody wants any more."""
        way = self._up if up else self._down
        assert way.source is not None
        way.source.give_back(size)

    def clear(self, lane: Lane, *, up: bool) -> None:
        """Forget what waits of a lane in one direction."""
        way = self._up if up else self._down
        sifted = lane.sieve.clear() if lane.sieve is not None and not up else 0
        self._let_go(way, way.course(lane).clear() + sifted)
        way.busy.pop(lane, None)

    def forget(self, lane: Lane) -> None:
        """Forget a lane."""
        self.clear(lane, up=True)
        self.clear(lane, up=False)
        if lane.upstream is not None:
            self.by_upstream.pop(lane.upstream, None)

    def stop(self) -> None:
        """Ask for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # windows of connections

    def _receive(self, way: _Way, size: int) -> None:
        assert way.source is not None
        if self.held > HELD_FREE and self._socket.held_in_sandbox() > HELD_MOST:
            way.owed += size
        else:
            way.source.give_back(size)

    def _let_go(self, way: _Way, count: int) -> None:
        way.held -= count
        back = min(way.owed, count) if way.held else way.owed
        if back and way.source is not None:
            way.owed -= back
            way.source.give_back(back)

    # moving

    def pump(self) -> None:
        """Send what can be sent, a piece of each lane in turn; the owner writes it."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._drain(self._up) or self._drain(self._down):
                pass  # what one direction came to may have set the other one going
        finally:
            self._pumping = False
        self._socket.flush(up=True)
        self._socket.flush(up=False)

    def _drain(self, way: _Way) -> bool:
        """Send until nothing more can be; returns whether anything was."""
        if way.target is None or not way.busy:
            return False
        now, moved, total = time.monotonic(), False, 0
        more, sent = self._socket.flush(up=way.up), 1
        while more and sent:
            sent = burst = 0
            for lane in tuple(way.busy):
                size = self._step(way, lane, now) if lane in way.busy else 0
                sent += size
                burst += size
                if burst >= BURST:
                    burst = 0
                    if not (more := self._socket.flush(up=way.up)):
                        break
            moved, total = moved or sent > 0, total + sent
            if total >= TURN:
                asyncio.get_running_loop().call_soon(self._socket.moved)
                return False
        return moved

    def _step(self, way: _Way, lane: Lane, now: float) -> int:
        """Send a piece of a lane, if it can be; returns how much that was, a head counting as 1 at least."""
        try:
            sifts = not way.up and lane.sieve is not None and not lane.answered
            if sifts and not self._sift(way, lane):
                return 1  # it was refused, and has an answer to send
            size = self._send(way, lane, now)
            course = way.course(lane)
            if size:
                way.busy.pop(lane, None)  # its next turn comes after everybody else's
                if course.busy or (sifts and lane.sieve is not None and lane.sieve.waiting):
                    way.busy[lane] = None
                if course.said_end:
                    self._owner.lane_said_all(lane, up=way.up)
        except Exception as error:  # noqa: BLE001 # law 1: what broke is refused, and nothing else is
            way.busy.pop(lane, None)
            self._owner.lane_broke(lane, error)
            return 1
        return size

    def _send(self, way: _Way, lane: Lane, now: float) -> int:
        course, target = way.course(lane), way.target
        assert target is not None
        if way.up and not lane.exchange.admitted:
            raise RuntimeError("bytes for the upstream of a request that is not admitted")
        stream = lane.upstream if way.up else lane.stream
        most = self._affordable(way, lane, now, course.wants(target, stream))
        if most is None:
            return 1  # it was refused, and has an answer to send
        section = course.section
        if section is None and course.is_at_section:
            return most  # what was paid of its price
        if section is None and not most and not course.is_at_end:
            return 0
        if stream is None:
            if section is None or not target.can_open:
                return 0
            stream = lane.upstream = target.open()
            self.by_upstream[stream] = lane
        count = course.send(target, stream, most)
        self._account(way, lane, count + (section.size if section is not None else 0))
        if section is not None and not way.up:
            lane.begun = True
        if count:
            origin = lane.stream if way.up else lane.upstream
            if origin is not None and way.source is not None and (way.up or lane.sieve is None):
                due = lane.due(count) if way.up else count
                way.source.taken(origin, due, keeps_up=course.waiting == 0)
            self._let_go(way, count)
        lane.moved = now
        return max(1, count)

    def _sift(self, way: _Way, lane: Lane) -> bool:
        """Have what came masked as far as it can be sent; returns whether it could be read."""
        assert lane.sieve is not None
        course = way.course(lane)
        ready, came = course.waiting, lane.sieve.waiting
        try:
            problem = lane.sieve.pass_on(course)
        finally:
            way.held += course.waiting - ready
            count = came - lane.sieve.waiting
            if count and lane.upstream is not None and way.source is not None:
                way.source.taken(lane.upstream, count, keeps_up=ready == 0)
            self._let_go(way, count)
        if problem is not None:
            self._owner.lane_garbled(lane, problem.detail)
        return problem is None

    def _affordable(self, way: _Way, lane: Lane, now: float, wanted: int) -> int | None:
        """Count against the limits what of `wanted` bytes may go now, and return how many; None if the lane was refused."""
        course = way.course(lane)
        if wanted <= 0:
            return 0
        meter = lane.meter(up=way.up)
        room = meter.room(now, wanted)
        meter.take(now, room)
        if course.is_at_section:
            course.pay(room)
        if room == 0:
            pause = meter.pause(now, wanted)
            if math.isinf(pause):
                what = "upload" if way.up else "download"
                starved = Starved(f"{what} over a limit", retry_after(meter.wait(now, wanted)))
                self._owner.lane_starved(lane, starved)
                return None
            if self._timer is None:
                delay = max(pause, _LEAST_PAUSE)
                self._timer = asyncio.get_running_loop().call_later(delay, self._ring)
        return room

    @staticmethod
    def _account(way: _Way, lane: Lane, size: int) -> None:
        if lane.answered:
            return
        if way.up:
            lane.exchange.up += size
        else:
            lane.exchange.down += size

    def _ring(self) -> None:
        self._timer = None
        self._socket.moved()
