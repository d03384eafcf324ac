"""What the upstream answers on its streams, made fit for the client, veiled where a credential could come back, and sent on.

Everything here is about one lane at a time, and guarded by `Lanes`: what raises refuses that lane and no other.
"""

from __future__ import annotations

import asyncio
from typing import Final

from egressd.gate.inspector.addon import PolicyAddon
from egressd.gate.inspector.fields import onward_trailers
from egressd.gate.inspector.head import MAX_INTERIM, BadHead, Field
from egressd.gate.inspector.http2 import heads
from egressd.gate.inspector.http2.events import Data, Head, Reset
from egressd.gate.inspector.http2.frames import Code
from egressd.gate.inspector.http2.lane import Lane, Section, brings
from egressd.gate.inspector.http2.lanes import Lanes
from egressd.gate.inspector.http2.link import Link
from egressd.gate.inspector.http2.sieve import Sieve
from egressd.gate.inspector.messages import response_of
from egressd.policy.reasons import Reason

RESPONSE_HEAD_BYTES: Final = 64 * 1024


class Responses:
    """The responses of one connection, from what the upstream says to what waits for the client."""

    def __init__(self, addon: PolicyAddon, lanes: Lanes, client: Link) -> None:
        """Nothing is heard before there is an upstream."""
        self._lanes, self._traffic = lanes, lanes.traffic
        self._client = client
        self._addon = addon
        self._loop = asyncio.get_running_loop()

    def head(self, head: Head) -> None:
        """A response begins, or an interim one comes before it, or trailers end it."""
        lane = self._traffic.by_upstream.get(head.stream)
        if lane is None or lane.answered:
            return
        lane.moved = self._loop.time()
        with self._lanes.guarded(lane):
            if lane.responded:
                self._trailers(lane, head)
                return
            parsed = heads.parse_response(
                head.fields, method=lane.method, ended=head.ended, limit=RESPONSE_HEAD_BYTES
            )
            if isinstance(parsed, BadHead):
                self._lanes.fail(lane, Reason.UPSTREAM_PROTOCOL, parsed.detail)
            elif parsed.status < 200:
                self._interim(lane, parsed.status, parsed.fields)
            else:
                assert lane.flow is not None
                lane.flow.response = response_of(parsed)
                self._addon.responseheaders(lane.flow)
                lane.responded, lane.down_length = True, parsed.length
                veil = lane.exchange.veil
                problem = (
                    veil.head(lane.flow.response, lane.exchange.method or "") if veil is not None else None
                )
                if problem is not None:
                    self._lanes.fail(lane, Reason.UNSCANNABLE, problem)
                    return
                lane.sieve = Sieve(veil) if veil is not None else None
                lane.down.begin(Section(heads.write_response(lane.flow.response)))
                self._comes_down(lane, 0, ended=head.ended)

    def _interim(self, lane: Lane, status: int, fields: tuple[Field, ...]) -> None:
        """Hints and progress pass (RFC 9110 §15.2) where the client keeps up; a 100 was said by us."""
        lane.interim += 1
        if lane.interim > MAX_INTERIM:
            self._lanes.fail(lane, Reason.UPSTREAM_PROTOCOL, "interim responses without end")
        elif status != 100 and not self._lanes.way.congested:
            pseudo = (b":status", str(status).encode("ascii"))
            self._client.send_head(lane.stream, (pseudo, *_veiled(lane, onward_trailers(fields))))

    def _trailers(self, lane: Lane, head: Head) -> None:
        parsed = heads.parse_trailers(head.fields, RESPONSE_HEAD_BYTES)
        if isinstance(parsed, BadHead) or not head.ended:
            self._lanes.fail(lane, Reason.UPSTREAM_PROTOCOL, "the trailers are malformed")
            return
        onward = _veiled(lane, onward_trailers(parsed))
        self._comes_down(lane, 0, ended=True, trailers=Section(onward) if onward else None)

    def data(self, data: Data) -> None:
        """A piece of a response's body."""
        lane = self._traffic.by_upstream.get(data.stream)
        if lane is None or lane.answered:
            self._traffic.skip(data.size, up=False)
            return
        lane.moved = self._loop.time()
        self._traffic.add(lane, data.data, data.size, up=False)
        with self._lanes.guarded(lane):
            if lane.responded:
                self._comes_down(lane, len(data.data), ended=data.ended)
            else:
                self._lanes.fail(lane, Reason.UPSTREAM_PROTOCOL, "data before a response")

    def _comes_down(self, lane: Lane, count: int, *, ended: bool, trailers: Section | None = None) -> None:
        left = brings(lane.down_length, count, ended=ended)
        if isinstance(left, str):
            self._lanes.fail(lane, Reason.UPSTREAM_PROTOCOL, left)
            return
        lane.down_length = left
        if ended and lane.sieve is not None:
            lane.sieve.end(trailers)
        elif ended:
            lane.down.end(trailers)
        self._traffic.wake(lane, up=False)

    def reset(self, reset: Reset) -> None:
        """The upstream ends a stream before its time; one whose response is complete only has no use for the rest."""
        lane = self._traffic.by_upstream.get(reset.stream)
        if lane is None or lane.answered:
            return
        with self._lanes.guarded(lane):
            if lane.heard_all:
                self._traffic.clear(lane, up=True)
                return
            detail = f"reset: {reset.code.name.lower()}"
            self._lanes.fail(
                lane, Reason.UPSTREAM_PROTOCOL if reset.ours else Reason.UPSTREAM_CLOSED, detail, reset.code
            )

    def taken_up_to(self, last: int) -> None:
        """The upstream has not looked at streams after `last`, and will not: the client may ask for them elsewhere."""
        for lane in self._lanes.all():
            if lane.ready and not lane.answered and (lane.upstream is None or lane.upstream > last):
                with self._lanes.guarded(lane):
                    self._lanes.fail(lane, Reason.UPSTREAM_CLOSED, "the host goes away", Code.REFUSED_STREAM)

    def lost(self, reason: Reason, detail: str) -> None:
        """The upstream has gone: what it has not answered in full fails, and so does what it was not asked yet."""
        for lane in self._lanes.all():
            if lane.ready and not lane.answered and not lane.heard_all:
                with self._lanes.guarded(lane):
                    self._lanes.fail(
                        lane, reason, detail, None if lane.upstream is not None else Code.REFUSED_STREAM
                    )


def _veiled(lane: Lane, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    veil = lane.exchange.veil
    return fields if veil is None else veil.fields(fields)
