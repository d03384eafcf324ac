"""A WebSocket through the engine: judged as a handshake, passed frame by frame, ended with a word."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, entry, run
from tests.gate.inspector.scene import Scene
from tests.gate.inspector.test_websocket import ACCEPT, KEY, frame

ALLOWED = entry(requests=("GET /**", "WEBSOCKET /ws"))
ASK = (
    f"GET /ws?token=secret HTTP/1.1\r\nHost: {HOST}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    f"Sec-WebSocket-Key: {KEY.decode()}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat\r\n"
    "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\nOrigin: null\r\n\r\n"
).encode()
AGREE = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
    + ACCEPT
    + b"\r\n"
)


async def open_websocket(scene: Scene, more: bytes = b"") -> None:
    assert await scene.says(ASK) == b""
    told = await scene.origin_says(AGREE + more + b"\r\n")
    assert told.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert b"Sec-WebSocket-Accept: " + ACCEPT in told


def test_an_allowed_one_opens_and_passes_frames_both_ways() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene, b"Sec-WebSocket-Protocol: chat\r\n")
            (upstream,) = scene.upstreams
            asked = upstream.written
            assert b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" in asked
            for name in (
                b"Sec-WebSocket-Key: ",
                b"Sec-WebSocket-Protocol: chat",
                b"permessage-deflate",
                b"Origin",
            ):
                assert name in asked
            up, down = frame(1, b"hello") + frame(9), frame(1, b"hi", masked=False)
            assert await scene.says(up) == b""
            assert upstream.written == asked + up
            assert await scene.origin_says(down) == down
            assert await scene.says(frame(8)) == b""
            assert await scene.origin_says(frame(8, masked=False)) == frame(8, masked=False)
            upstream.end()
            await scene.settle()
            (end,) = scene.records.of("end")
            assert (end.reason, end.status, end.detail) == ("completed", 101, "3 frames up, 2 down")
            assert end.bytes_up == len(asked + up + frame(8))
            assert scene.records.of("decision")[0].query == "token=<6>"
            assert scene.client.state == "lingering"

    run(test())


def test_frames_that_come_with_the_handshake_are_not_lost() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            early, greeting = frame(1, b"early"), frame(1, b"greeting", masked=False)
            await scene.says(ASK + early)
            assert early not in scene.upstreams[0].written
            assert (await scene.origin_says(AGREE + b"\r\n" + greeting)).endswith(greeting)
            assert scene.upstreams[0].written.endswith(early)

    run(test())


DENIED = {
    "no rule names it": (entry(), ASK, "upgrade_not_allowed", 403),
    "another path": (ALLOWED, ASK.replace(b"/ws", b"/other"), "upgrade_not_allowed", 403),
    "another upgrade": (
        ALLOWED,
        ASK.replace(b"Upgrade: websocket", b"Upgrade: tcp"),
        "upgrade_not_allowed",
        403,
    ),
    "two upgrades": (
        ALLOWED,
        ASK.replace(b"Upgrade: websocket", b"Upgrade: websocket, tcp"),
        "upgrade_not_allowed",
        403,
    ),
    "a bad key": (ALLOWED, ASK.replace(KEY, b"AAAA"), "bad_request", 400),
    "an old version": (ALLOWED, ASK.replace(b"Version: 13", b"Version: 8"), "bad_request", 400),
    "HTTP/1.0": (ALLOWED, ASK.replace(b"HTTP/1.1", b"HTTP/1.0"), "upgrade_not_allowed", 403),
    "a body": (ALLOWED, ASK.replace(b"Origin: null", b"Content-Length: 3") + b"abc", "body_not_allowed", 403),
}


@pytest.mark.parametrize(("rule", "ask", "reason", "status"), DENIED.values(), ids=DENIED)
def test_a_denied_one_is_told_at_once(rule: object, ask: bytes, reason: str, status: int) -> None:
    async def test() -> None:
        async with Scene(rule) as scene:  # type: ignore[arg-type]  # an entry
            told = await scene.says(ask)
            assert told.startswith(f"HTTP/1.1 {status} egressd: denied".encode())
            assert scene.upstreams == []
            assert scene.records.decisions() == [("deny", reason)]

    run(test())


WRONG = {
    "a wrong proof": AGREE.replace(ACCEPT, b"AAAA") + b"\r\n",
    "an extension nobody asked for": AGREE + b"Sec-WebSocket-Extensions: mux\r\n\r\n",
    "a subprotocol nobody asked for": AGREE + b"Sec-WebSocket-Protocol: other\r\n\r\n",
    "another protocol": AGREE.replace(b"websocket", b"h2c") + b"\r\n",
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_an_answer_that_is_none_opens_nothing(answer: bytes) -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await scene.says(ASK)
            assert (await scene.origin_says(answer)).startswith(b"HTTP/1.1 502 egressd: upstream error")
            assert scene.records.ends() == ["upstream_protocol"]
            assert scene.upstreams[0].closed

    run(test())


def test_an_upgrade_nobody_asked_for_is_no_answer() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await scene.says(f"GET /ws HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            assert (await scene.origin_says(AGREE + b"\r\n")).startswith(b"HTTP/1.1 502 ")

    run(test())


def test_an_origin_that_refuses_is_heard() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await scene.says(ASK)
            answer = b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\n\r\nno"
            assert await scene.origin_says(answer) == answer
            assert scene.records.ends() == ["completed"]

    run(test())


def test_bad_frames_of_the_client_go_no_further() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene)
            before = scene.upstreams[0].written
            told = await scene.says(frame(1, b"fine") + frame(1, b"bare", masked=False))
            assert told.startswith(b"\x88")
            assert int.from_bytes(told[2:4]) == 1002
            assert scene.upstreams[0].written == before
            assert scene.upstreams[0].closed
            assert scene.records.ends() == ["bad_framing"]

    run(test())


def test_bad_frames_of_the_origin_go_no_further() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene)
            told = await scene.origin_says(frame(1, b"masked"))
            assert int.from_bytes(told[2:4]) == 1002
            assert scene.records.ends() == ["upstream_protocol"]

    run(test())


@pytest.mark.parametrize("mid_frame", [False, True])
def test_rules_that_change_end_it_with_a_word_where_one_fits(mid_frame: bool) -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene)
            whole = frame(2, b"x" * 100, masked=False)
            await scene.origin_says(whole[:50] if mid_frame else whole)
            before = len(scene.client.written)
            sandbox = scene.engine.connection.sandbox
            sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=(entry(),)))
            scene.engine.rejudge(time.time())
            await scene.settle()
            told = scene.client.written[before:]
            if mid_frame:
                assert told == b""
                assert scene.client.state == "aborted"
            else:
                assert int.from_bytes(told[2:4]) == 1008
                assert b"policy_changed" in told
                assert scene.client.state == "lingering"
            assert scene.upstreams[0].closed
            assert scene.records.ends() == ["policy_changed"]

    run(test())


@pytest.mark.parametrize(("reason", "code"), [(Reason.REVOKED, 1008), (Reason.SHUTDOWN, 1012)])
def test_a_revocation_ends_it_at_once_with_a_word(reason: Reason, code: int) -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene)
            before = len(scene.client.written)
            scene.engine.cut(reason)
            assert int.from_bytes(scene.client.written[before + 2 : before + 4]) == code
            assert (scene.client.state, scene.upstreams[0].state) == ("closed", "aborted")
            assert scene.records.ends() == [reason.value]

    run(test())


def test_a_side_that_goes_without_a_word_is_recorded_so() -> None:
    async def test() -> None:
        for ended, reason in (("client", "client_closed"), ("upstream", "upstream_closed")):
            async with Scene(ALLOWED) as scene:
                await open_websocket(scene)
                (scene.client if ended == "client" else scene.upstreams[0]).end()
                await scene.settle()
                assert scene.records.ends() == [reason]
                assert scene.upstreams[0].closed

    run(test())


def test_each_side_is_read_only_as_fast_as_the_other_takes_it() -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene)
            scene.fill(scene.client, full=True)
            assert not scene.upstreams[0].is_read()
            scene.fill(scene.client, full=False)
            assert scene.upstreams[0].is_read()
            scene.fill(scene.upstreams[0], full=True)
            assert not scene.client.is_read()

    run(test())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), max_size=8))
def test_no_bytes_of_either_side_raise_or_pass_unchecked(said: list[tuple[bool, bytes]]) -> None:
    async def test() -> None:
        async with Scene(ALLOWED) as scene:
            await open_websocket(scene)
            for by_client, data in said:
                await (scene.says if by_client else scene.origin_says)(data)
        assert len(scene.records.ends()) == 1
        assert scene.records.ends()[0] != "internal_error"

    run(test())
