"""Whatever raises, nothing is let out by it, and no bytes of either side raise: faults, hostile frames, and laws."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.gate.inspector.addon import PolicyAddon
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.http2 import frames, heads, lane, lanes, link, requests, traffic
from egressd.gate.inspector.http2.frames import frame
from tests.gate.inspector.http2.scene import Scene
from tests.gate.inspector.http2.test_link import GET, block
from tests.gate.inspector.lab import HOST, run


class Fault(Exception):
    """Something nobody planned for."""


def fail(*_: object, **__: object) -> Any:
    raise Fault


async def fail_later(*_: object) -> None:
    await asyncio.sleep(0)
    raise Fault


def judged_then_fail(self: PolicyAddon, flow: Any) -> Any:
    judged = ORIGINAL(self, flow)
    if judged is not None:
        judged.close()
    return fail_later()


ORIGINAL = PolicyAddon.requestheaders

BEFORE: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "the hook": (PolicyAddon, "requestheaders", fail),
    "the hook's coroutine": (PolicyAddon, "requestheaders", judged_then_fail),
    "the judgement": (PolicyAddon, "_judge", fail),
    "the commit": (Exchange, "commit", fail_later),
    "the reading of the head": (heads, "parse_request", fail),
    "the writing of the head": (heads, "write_request", fail),
    "the way to the upstream": (requests.Requests, "_admitted", fail),
    "the sending": (link.Link, "open", fail),
}


@pytest.mark.parametrize(("where", "name", "fault"), BEFORE.values(), ids=BEFORE)
def test_a_fault_before_a_request_has_left_lets_nothing_out(
    where: object,
    name: str,
    fault: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(where, name, fault)

    async def test() -> None:
        async with Scene() as scene:
            scene.client.asks("POST", "/a", end=False)
            scene.client.h2.send_data(1, b"secrets")
            await scene.settle()
            answer = scene.client.heard[1]
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"internal_error")
            assert scene.origin.heard == {}
            assert scene.records.ends() == ["internal_error"]
            assert len(scene.records.decisions()) == 1
            monkeypatch.undo()
            await scene.ask("GET", "/fine")
            assert [heard.fields[b":path"] for heard in scene.origin.heard.values()] == [b"/fine"]

    run(test())
    assert "Fault" in capfd.readouterr().err


def test_bytes_for_the_upstream_of_a_request_that_is_not_admitted_are_a_fault(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.ask("POST", "/a", end=False)
            (one,) = scene.engine._lanes._lanes.values()
            one.exchange.admitted = False
            scene.client.h2.send_data(1, b"secrets")
            await scene.settle()
            assert scene.origin.heard[1].body == b""
            assert scene.origin.heard[1].reset == ErrorCodes.CANCEL
            assert scene.records.ends() == ["internal_error"]

    run(test())
    assert "not admitted" in capfd.readouterr().err


AFTER: dict[str, tuple[object, str]] = {
    "the hook of the response": (PolicyAddon, "responseheaders"),
    "the reading of the response": (heads, "parse_response"),
    "the writing of the response": (heads, "write_response"),
}


@pytest.mark.parametrize(("where", "name"), AFTER.values(), ids=AFTER)
def test_a_fault_in_an_answer_fails_that_stream_alone(
    where: object, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer, other = await scene.ask(), await scene.ask()
            monkeypatch.setattr(where, name, fail)
            await scene.answer(1, 200, b"x")
            monkeypatch.undo()
            await scene.answer(3, 200, b"fine")
            assert (answer.status, other.body) == (502, b"fine")
            assert scene.records.ends() == ["internal_error", "completed"]

    run(test())
    assert "Fault" in capfd.readouterr().err


def test_a_lane_that_cannot_even_be_refused_is_reset(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PolicyAddon, "requestheaders", fail)
    monkeypatch.setattr(lanes.Lanes, "_answer", fail)

    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            assert answer.reset == ErrorCodes.INTERNAL_ERROR
            assert len(scene.records.ends()) == 1
            assert scene.client_stream.state == "open"

    run(test())
    capfd.readouterr()


@pytest.mark.parametrize(
    ("where", "name"),
    [(traffic.Traffic, "pump"), (lanes.Lanes, "overdue"), (link.Link, "receive")],
    ids=["moving", "the watch", "reading"],
)
def test_a_fault_of_the_connection_cuts_it(
    where: object, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.ask("POST", "/a", end=False)
            monkeypatch.setattr(where, name, fail)
            if name == "overdue":
                scene.engine._guard(scene.engine._look)
            else:
                scene.client.h2.send_data(1, b"x")
                scene.client_stream.arrive(scene.client.sent())
            monkeypatch.undo()
            assert (scene.client_stream.state, scene.origin_stream.state) == ("aborted", "aborted")
            assert scene.records.ends() == ["internal_error"]

    run(test())
    capfd.readouterr()


def test_an_addon_cannot_break_out_of_a_field(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def responseheaders(self: PolicyAddon, flow: Any) -> None:
        flow.response.headers["x-own"] = "a\r\nset-cookie: b"

    monkeypatch.setattr(PolicyAddon, "responseheaders", responseheaders)

    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            await scene.answer(1, 200)
            assert answer.status == 502

    run(test())
    capfd.readouterr()


def test_a_connection_that_is_broken_says_why_once_and_ends_its_streams() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.ask("POST", "/a", end=False)
            await scene.ask("POST", "/b", end=False)
            scene.client_stream.arrive(frame(frames.PING, 0, 0, bytes(8)) * 2_500)
            await scene.settle()
            assert scene.client.goaway is not None
            assert scene.client.goaway.error_code == ErrorCodes.ENHANCE_YOUR_CALM
            assert scene.records.decisions() == [("allow", "rule"), ("allow", "rule"), ("deny", "flood")]
            assert sorted(filter(None, scene.records.ends())) == ["completed", "flood", "flood"]
            assert scene.client_stream.state == "lingering"
            assert scene.origin_stream.closed

    run(test())


def test_an_upstream_that_breaks_http2_fails_its_streams_and_drains_the_client() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            scene.origin_stream.arrive(frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2" + block()))
            await scene.settle()
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"upstream_protocol")
            assert scene.origin.goaway is not None
            assert scene.client.told_to_go()

    run(test())


# laws

_CLIENT_FRAMES = st.builds(
    frame,
    st.integers(0, 10),
    st.integers(0, 63),
    st.integers(0, 7),
    st.one_of(st.binary(max_size=30), st.just(block())),
)
_NAMES = st.sampled_from(
    [
        b":method",
        b":path",
        b":authority",
        b":scheme",
        b":protocol",
        b"host",
        b"content-length",
        b"te",
        b"x-a",
        b"X",
    ]
)
_VALUES = st.sampled_from(
    [b"GET", b"POST", b"/", b"/a b", b"//a", HOST.encode(), b"evil.example.com", b"https", b"5", b"\r\n", b""]
)
_HEADS = st.lists(st.tuples(_NAMES, _VALUES), max_size=7)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), _CLIENT_FRAMES), max_size=10))
def test_no_frames_of_either_side_raise(said: list[tuple[bool, bytes]]) -> None:
    async def test() -> None:
        async with Scene() as scene:
            scene.client_stream.arrive(scene.client.sent())
            for by_client, data in said:
                stream = scene.client_stream if by_client else scene.origin_stream
                if stream.owner is not None:
                    stream.arrive(data)
                await asyncio.sleep(0)
        assert "internal_error" not in scene.records.ends()
        attempts = [record.attempt_id for record in scene.records.of("decision")]
        assert len(set(attempts)) == len(attempts)
        assert sorted(attempts) == sorted(record.attempt_id for record in scene.records.of("end"))

    run(test())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_HEADS, st.booleans(), st.binary(max_size=8)), max_size=4))
def test_nothing_goes_upstream_that_was_not_admitted(
    asked: list[tuple[list[tuple[bytes, bytes]], bool, bytes]],
) -> None:
    async def test() -> None:
        async with Scene(lax=True) as scene:
            for fields, end, data in asked:
                stream = scene.client.asks(fields=fields or GET, end=end)
                if not end:
                    scene.client.h2.send_data(stream, data, end_stream=True)
                await scene.settle()
            allowed = [record for record in scene.records.of("decision") if record.verdict == "allow"]
            assert len(scene.origin.heard) <= len(allowed)
            assert len(scene.records.of("decision")) == len(asked)
            for heard in scene.origin.heard.values():
                assert heard.fields[b":authority"] == HOST.encode()
                assert heard.fields[b":scheme"] == b"https"
                assert heard.fields[b":method"] in (b"GET", b"POST")
                assert heard.fields[b":path"] == b"/"
                assert b"host" not in heard.fields

    run(test())


@given(st.lists(st.one_of(st.binary(max_size=5), st.just(None)), max_size=8), st.integers(1, 6))
def test_what_waits_in_a_lane_is_sent_in_order_whatever_the_room(
    items: list[bytes | None], most: int
) -> None:
    """None is the end."""
    pieces = [item for item in items if item is not None]
    course, out = lane.Course(), []

    class Takes:
        def send_data(self, _stream: int, data: bytes, *, end: bool) -> None:
            out.append((data, end))

    for piece in pieces:
        course.add(piece)
    course.end()
    while course.busy:
        course.send(Takes(), 1, most)  # type: ignore[arg-type]  # a link as far as a course needs one
    assert b"".join(data for data, _ in out) == b"".join(pieces)
    assert [end for _, end in out] == [False] * (len(out) - 1) + [True]
    assert course.waiting == 0


# why not hyper-h2 (see the package)


def pair() -> tuple[H2Connection, H2Connection]:
    client, server = H2Connection(H2Configuration()), H2Connection(H2Configuration(client_side=False))
    client.initiate_connection()
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    client.send_headers(1, GET)
    server.receive_data(client.data_to_send())
    return client, server


def test_hyper_h2_sends_nothing_after_a_farewell() -> None:
    _, server = pair()
    server.receive_data(frame(frames.GOAWAY, 0, 0, bytes(8)))
    with pytest.raises(ProtocolError):
        server.send_headers(1, [(":status", "200")])
    _, server = pair()
    server.close_connection()
    with pytest.raises(ProtocolError):
        server.send_headers(1, [(":status", "200")])


def test_hyper_h2_ends_the_connection_for_one_wrong_length_and_one_stream_too_many() -> None:
    _, server = pair()
    raw = H2Connection(H2Configuration(validate_outbound_headers=False))
    raw.encoder = _.encoder
    raw.initiate_connection()
    raw.data_to_send()
    raw.send_headers(3, [*GET, (b"content-length", b"1")])
    with pytest.raises(ProtocolError):
        server.receive_data(raw.data_to_send() + frame(frames.DATA, 1, 3, b"abc"))
    client, server = pair()
    for stream in range(3, 201, 2):
        client.send_headers(stream, GET)
    server.receive_data(client.data_to_send())
    client.remote_settings[3] = 1000
    client.remote_settings.acknowledge()
    client.send_headers(201, GET)
    with pytest.raises(ProtocolError):
        server.receive_data(client.data_to_send())
