"""Any conversation between a client and an origin: each attempt is recorded once and ended once, and nothing is left over."""

from __future__ import annotations

import contextlib

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.stream import StreamState
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gate.inspector.http2.scene import Peer, Scene, tls_entry
from tests.gate.inspector.lab import run

_STREAM = st.integers(0, 4)
_SIZE = st.sampled_from([0, 1, 1_000, 16_384, 40_000])
_CODE = st.sampled_from(
    [ErrorCodes.NO_ERROR, ErrorCodes.CANCEL, ErrorCodes.REFUSED_STREAM, ErrorCodes.INTERNAL_ERROR]
)
_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), st.sampled_from(["GET", "POST", "HEAD", "DELETE"]), st.booleans(), st.booleans()
        ),
        st.tuples(st.just("send"), _STREAM, _SIZE, st.booleans()),
        st.tuples(st.just("give up"), _STREAM, _CODE),
        st.tuples(
            st.just("begin"), _STREAM, st.sampled_from([b"103", b"200", b"204", b"404"]), st.booleans()
        ),
        st.tuples(st.just("answer"), _STREAM, _SIZE, st.booleans()),
        st.tuples(st.just("trailers"), _STREAM, st.booleans()),
        st.tuples(st.just("reset"), _STREAM, _CODE),
        st.tuples(st.just("stall"), st.booleans(), st.booleans()),
        st.tuples(st.just("settle")),
    ),
    max_size=25,
)


class NotNow(Exception):
    """A step that this peer may not take: hyper-h2 would break its own state over it."""


def may_speak(peer: Peer, stream: int) -> int:
    found = peer.h2.streams.get(stream)
    if found is None or found.state_machine.state not in (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE):
        raise NotNow
    return stream


class Conversation:
    """Does each step if the peer whose step it is may do it now."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.asked: list[int] = []
        self.begun: set[int] = set()

    async def ask(self, method: str, end: bool, grpc: bool) -> None:
        more = [(b"content-type", b"application/grpc")] if grpc else []
        self.asked.append(self.scene.client.asks(method, "/a", more, end=end))

    async def send(self, which: int, size: int, end: bool) -> None:
        stream = may_speak(self.scene.client, self.asked[which])
        room = min(size, self.scene.client.h2.local_flow_control_window(stream), 16_384)
        self.scene.client.h2.send_data(stream, b"x" * max(0, room), end_stream=end)

    async def give_up(self, which: int, code: ErrorCodes) -> None:
        if self.asked[which] in self.scene.client.h2.streams:
            self.scene.client.h2.reset_stream(self.asked[which], code)

    async def begin(self, which: int, status: bytes, end: bool) -> None:
        stream = may_speak(self.scene.origin, sorted(self.scene.origin.heard)[which])
        if stream not in self.begun:
            if status != b"103":
                self.begun.add(stream)
            self.scene.origin.h2.send_headers(
                stream, [(b":status", status)], end_stream=end and status != b"103"
            )

    async def answer(self, which: int, size: int, end: bool) -> None:
        stream = may_speak(self.scene.origin, sorted(self.scene.origin.heard)[which])
        if stream not in self.begun:
            raise NotNow
        room = min(size, self.scene.origin.h2.local_flow_control_window(stream), 16_384)
        self.scene.origin.h2.send_data(stream, b"y" * max(0, room), end_stream=end)

    async def trailers(self, which: int, by_client: bool) -> None:
        peer = self.scene.client if by_client else self.scene.origin
        stream = may_speak(peer, self.asked[which] if by_client else sorted(self.scene.origin.heard)[which])
        if not by_client and stream not in self.begun:
            raise NotNow
        peer.h2.send_headers(stream, [(b"x-sum", b"1")], end_stream=True)

    async def reset(self, which: int, code: ErrorCodes) -> None:
        stream = sorted(self.scene.origin.heard)[which]
        if stream in self.scene.origin.h2.streams:
            self.scene.origin.h2.reset_stream(stream, code)

    async def stall(self, by_client: bool, full: bool) -> None:
        stream = self.scene.client_stream if by_client else self.scene.origin_stream
        stream.paused = full
        if not full:
            self.scene.engine.on_resume(stream)  # type: ignore[arg-type]  # a stream in all that matters

    async def settle(self) -> None:
        await self.scene.settle()


@settings(max_examples=300, deadline=None)
@given(_STEPS, st.sampled_from([0, 1_000, 65_535]))
def test_every_attempt_is_recorded_once_and_ended_once_and_nothing_is_left(
    steps: list[tuple[object, ...]], window: int
) -> None:
    async def test() -> None:
        async with Scene(tls_entry(requests=("GET,POST,HEAD /**",)), client_window=window) as scene:
            conversation = Conversation(scene)
            for step in steps:
                act = getattr(conversation, str(step[0]).replace(" ", "_"))
                if step[0] in ("begin", "answer", "reset"):
                    await scene.settle(3)  # the origin must have heard of it
                with contextlib.suppress(
                    IndexError, ProtocolError, NotNow
                ):  # not a step that this peer may take now
                    await act(*step[1:])
                if scene.client_stream.closed:
                    break
            scene.client_stream.paused = scene.origin_stream.paused = False
            await scene.settle()
            for stream in conversation.asked:
                with contextlib.suppress(ProtocolError):
                    scene.client.h2.reset_stream(stream, ErrorCodes.CANCEL)
            await scene.settle()
            assert len(scene.engine._lanes) == 0
            assert scene.engine.held == 0
            assert scene.engine._lanes.traffic.by_upstream == {}
            assert scene.engine._client.streams == 0
            assert scene.engine._upstream is None or scene.engine._upstream.streams == 0
            decisions = [record.attempt_id for record in scene.records.of("decision")]
            assert len(decisions) == len(conversation.asked)
            assert sorted(decisions) == sorted(record.attempt_id for record in scene.records.of("end"))
            assert "internal_error" not in scene.records.ends()
            allowed = sum(record.verdict == "allow" for record in scene.records.of("decision"))
            assert len(scene.origin.heard) <= allowed

    run(test())
