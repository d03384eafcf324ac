"""Nothing of a credential comes back by WebSocket: not in the handshake, messages, fragments or control frames."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import run
from tests.gate.inspector.scene import Scene
from tests.gate.inspector.test_engine_reflection import STARS, S, scene_of
from tests.gate.inspector.test_engine_websocket import ASK
from tests.gate.inspector.test_websocket import ACCEPT, frame

AGREE = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
    + ACCEPT
    + b"\r\n"
)


def down(opcode: int, payload: bytes, *, final: bool = True) -> bytes:
    data = bytearray(frame(opcode, payload, masked=False))
    data[0] = (data[0] & 0x7F) | (0x80 if final else 0)
    return bytes(data)


def messages(data: bytes) -> list[tuple[int, bytes]]:
    """Opcode and payload of each message and control frame, fragments joined as the RFC says."""
    found: list[tuple[int, bytes]] = []
    current: tuple[int, bytes] | None = None
    while data:
        short = data[1] & 0x7F
        wide = {126: 2, 127: 8}.get(short, 0)
        size = int.from_bytes(data[2 : 2 + wide]) if wide else short
        opcode, payload = data[0] & 0x0F, data[2 + wide : 2 + wide + size]
        assert not data[0] & 0x70
        assert not data[1] & 0x80
        assert len(payload) == size
        if opcode >= 8:
            assert data[0] & 0x80
            found.append((opcode, payload))
        else:
            assert (current is None) == (opcode != 0)
            current = (opcode, payload) if current is None else (current[0], current[1] + payload)
            if data[0] & 0x80:
                found.append(current)
                current = None
        data = data[2 + wide + size :]
    assert current is None
    return found


async def open_websocket(scene: Scene) -> None:
    assert await scene.says(ASK) == b""
    assert (await scene.origin_says(AGREE + b"X: " + S + b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    assert S not in scene.client.written
    assert b"X: " + STARS in scene.client.written


FRAMES = {
    "a text": (down(1, b"<" + S + b">"), [(1, b"<" + STARS + b">")]),
    "a long binary message": (down(2, b"x" * 70000 + S), [(2, b"x" * 70000 + STARS)]),
    "fragments that cut it": (
        down(1, b"<" + S[:5], final=False) + down(0, S[5:9], final=False) + down(0, S[9:] + b">"),
        [(1, b"<" + STARS + b">")],
    ),
    "a ping in the middle of it": (
        down(1, S[:5], final=False) + down(9, b"are you there") + down(0, S[5:]),
        [(9, b"are you there"), (1, STARS)],
    ),
    "an empty message": (down(1, b""), [(1, b"")]),
    "an empty last fragment": (down(1, S, final=False) + down(0, b""), [(1, STARS)]),
    "control frames": (down(9, S) + down(10, b"." + S), [(9, STARS), (10, b"." + STARS)]),
    "the reason of a close": (down(8, b"\x03\xf0" + S), [(8, b"\x03\xf0" + STARS)]),
    "what may be chance at the end of a message": (down(1, S[:3]) + down(1, S[3:]), [(1, S[:3]), (1, S[3:])]),
}


@pytest.mark.parametrize(("said", "seen"), FRAMES.values(), ids=FRAMES)
def test_frames_of_an_origin_are_masked_however_they_are_cut(
    said: bytes, seen: list[tuple[int, bytes]]
) -> None:
    async def test() -> None:
        for size in (len(said), 1 if len(said) < 1000 else 997):
            async with scene_of() as scene:
                await open_websocket(scene)
                got = b""
                for at in range(0, len(said), size):
                    got += await scene.origin_says(said[at : at + size])
                assert messages(got) == seen
                scene.upstreams[-1].end()
                await scene.settle()
                (end,) = scene.records.of("end")
                assert "the credential was masked" in (end.detail or "")

    run(test())


def test_no_cut_of_a_message_tells_whether_a_guess_was_right() -> None:
    async def cut_at(guess: bytes) -> list[int]:
        async with scene_of() as scene:
            await open_websocket(scene)
            said = (
                down(1, b"x" * 2000 + guess, final=False),
                down(9, b"?"),
                down(0, guess, final=False),
                down(0, b"y"),
            )
            return [len(await scene.origin_says(piece)) for piece in said]

    async def test() -> None:
        for length in (1, 2, 8):
            assert await cut_at(S[:length]) == await cut_at(b"#" * length)

    run(test())


def test_whole_messages_pass_as_one_frame_and_the_clients_own_as_they_are() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            await open_websocket(scene)
            assert await scene.origin_says(down(1, b"hello")) == down(1, b"hello")
            before = len(scene.upstreams[-1].written)
            await scene.says(frame(1, S))
            assert scene.upstreams[-1].written[before:] == frame(1, S)

    run(test())


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 9]), st.integers(0, 40), st.integers(0, 300)), max_size=5),
    st.data(),
)
@settings(max_examples=30, deadline=None)
def test_no_cut_of_frames_changes_the_messages(
    shapes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    said, seen = b"", []
    for opcode, before, behind in shapes:
        payload = b"x" * before + (S if opcode != 9 else b"") + b"y" * (behind if opcode != 9 else 0)
        seen.append((opcode, payload.replace(S, STARS)))
        cut = data.draw(st.integers(0, len(payload))) if opcode != 9 else len(payload)
        if cut < len(payload):
            said += down(opcode, payload[:cut], final=False) + down(0, payload[cut:])
        else:
            said += down(opcode, payload)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=5)))

    async def test() -> None:
        async with scene_of() as scene:
            await open_websocket(scene)
            got, places = b"", [0, *cuts, len(said)]
            for first, last in itertools.pairwise(places):
                if first < last:
                    got += await scene.origin_says(said[first:last])
            assert messages(got) == seen

    run(test())


WRONG = {
    "compression": b"Sec-WebSocket-Extensions: permessage-deflate\r\n",
    "a subprotocol that holds it": b"Sec-WebSocket-Protocol: key." + S + b"\r\n",
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_an_upgrade_that_could_hide_it_is_none(fields: bytes) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            await scene.says(ASK)
            assert b"Sec-WebSocket-Extensions" not in scene.upstreams[-1].written
            got = await scene.origin_says(AGREE + fields + b"\r\n")
            assert got.startswith(b"HTTP/1.1 502 egressd")
            assert S not in got
            assert scene.records.ends() == ["upstream_protocol"]

    run(test())


def test_a_websocket_that_is_ended_in_the_middle_of_a_message_gets_its_last_word() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            await open_websocket(scene)
            await scene.origin_says(down(1, b"begun " + S[:4], final=False))
            before = len(scene.client.written)
            scene.engine.cut(Reason.REVOKED)
            last = scene.client.written[before:]
            assert last[0] == 0x88
            assert b"revoked" in last

    run(test())
