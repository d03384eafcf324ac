"""Nothing of a credential comes back by HTTP/2: not in header sections, data or trailers of any stream."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

import pytest
from h2.exceptions import StreamClosedError
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.gate.inspector import veil as veil_module
from egressd.gate.inspector.http2 import frames, traffic
from tests.gate.inspector.http2.scene import Answer, Fields, Scene, tls_entry
from tests.gate.inspector.lab import run
from tests.gate.inspector.lender import SECRET, Lender, keyed, lease_of

S = SECRET.encode()
STARS = b"*" * len(S)


@asynccontextmanager
async def scene_of(*, credential: bool = True, window: int | None = None) -> AsyncIterator[Scene]:
    scene = Scene(keyed() if credential else tls_entry(), client_window=window)
    Lender(lease_of()).serve(scene.sandbox, scene.connection.services)
    async with scene:
        yield scene


async def told(
    scene: Scene,
    pieces: list[bytes],
    fields: Fields | None = None,
    *,
    trailers: Fields | None = None,
    method: str = "GET",
    ask: Fields | None = None,
) -> Answer:
    """What the client hears of an answer whose body comes in these frames."""
    stream = scene.client.asks(method, "/echo", ask or [])
    await scene.settle()
    peer = scene.origin.h2
    head = [(b":status", b"200"), *(fields or [])]
    peer.send_headers(stream, head, end_stream=not pieces and not trailers)
    await scene.settle()
    with contextlib.suppress(StreamClosedError):  # by us: the rest of the answer is not wanted
        for number, piece in enumerate(pieces):
            peer.send_data(stream, piece, end_stream=number == len(pieces) - 1 and not trailers)
            await scene.settle()
        if trailers:
            peer.send_headers(stream, trailers, end_stream=True)
            await scene.settle()
    return scene.client.heard[stream]


def test_data_is_masked_across_frames() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            answer = await told(scene, [b"<" + S[:4], S[4:9], S[9:] + b">"])
            assert (answer.body, answer.ended) == (b"<" + STARS + b">", True)
            (end,) = scene.records.of("end")
            assert (end.reason, end.detail) == ("completed", "the credential was masked in what came back")

    run(test())


@given(st.binary(max_size=20), st.lists(st.integers(0, 70), max_size=8))
@settings(max_examples=25, deadline=None)
def test_no_cut_into_frames_changes_it(noise: bytes, places: list[int]) -> None:
    body = noise + S + noise + S[:-1] + b"." + S
    cuts = [0, *sorted(min(place, len(body)) for place in places), len(body)]
    pieces = [body[first:last] for first, last in itertools.pairwise(cuts)]

    async def test() -> None:
        async with scene_of() as scene:
            answer = await told(scene, pieces)
            assert (answer.body, answer.ended) == (noise + STARS + noise + S[:-1] + b"." + STARS, True)

    run(test())


def test_header_fields_interim_ones_and_trailers_are_masked() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            stream = scene.client.asks("GET", "/")
            await scene.settle()
            peer = scene.origin.h2
            peer.send_headers(stream, [(b":status", b"103"), (b"link", S), (b"x-auth-token", b"minted")])
            peer.send_headers(stream, [(b":status", b"200"), (b"location", b"/?" + S), (b"set-cookie", S)])
            peer.send_data(stream, b"ok")
            peer.send_headers(
                stream,
                [(b"x-key", S), (b"x-auth-token", b"minted"), (b"grpc-message", b"no " + S)],
                end_stream=True,
            )
            await scene.settle()
            answer = scene.client.heard[stream]
            assert answer.interim == [{b":status": b"103", b"link": STARS}]
            assert answer.fields == {b":status": b"200", b"location": b"/?" + STARS}
            assert answer.trailers == {b"x-key": STARS, b"grpc-message": b"no " + STARS}
            assert (answer.body, answer.ended) == (b"ok", True)

    run(test())


@pytest.mark.parametrize("pieces", [1, 7, 1000], ids=["by the byte", "by seven", "at once"])
def test_a_coded_body_is_undone_and_masked(pieces: int) -> None:
    async def test() -> None:
        coded = gzip.compress(b"<" + S + b">" + b"x" * 1000)
        fields = [(b"content-encoding", b"gzip"), (b"content-length", b"%d" % len(coded)), (b"etag", b'"a"')]
        async with scene_of() as scene:
            data = [coded[at : at + pieces] for at in range(0, len(coded), pieces)]
            answer = await told(scene, data, fields)
            assert answer.fields == {b":status": b"200", b"etag": b'W/"a"'}
            assert (answer.body, answer.ended) == (b"<" + STARS + b">" + b"x" * 1000, True)
            assert scene.records.ends() == ["completed"]

    run(test())


def test_a_head_alone_says_what_it_would_with_a_body() -> None:
    async def test() -> None:
        fields = [(b"content-encoding", b"gzip"), (b"content-length", b"99"), (b"x", S)]
        async with scene_of() as scene:
            answer = await told(scene, [], fields, method="HEAD")
            assert (answer.fields, answer.ended) == ({b":status": b"200", b"x": STARS}, True)

    run(test())


UNSCANNABLE: dict[str, Fields] = {
    "Brotli": [(b"content-encoding", b"br")],
    "gzip twice": [(b"content-encoding", b"gzip"), (b"content-encoding", b"gzip")],
    "messages that are coded": [(b"grpc-encoding", b"gzip")],
}


@pytest.mark.parametrize("fields", UNSCANNABLE.values(), ids=UNSCANNABLE)
def test_what_cannot_be_looked_into_is_not_passed_on(fields: Fields) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            answer = await told(scene, [S, S], [*fields, (b"x", S)])
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"unscannable")
            assert S not in scene.client_stream.written
            assert scene.records.ends() == ["unscannable"]
            assert (await told(scene, [b"next"])).body == b"next"
        async with scene_of(credential=False) as scene:
            assert (await told(scene, [S], fields)).body == S

    run(test())


def test_a_call_of_grpc_is_told_in_its_own_way() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            own = [
                (b"content-type", b"application/grpc"),
                (b"grpc-accept-encoding", b"gzip"),
                (b"te", b"trailers"),
            ]
            answer = await told(scene, [b"x"], [(b"grpc-encoding", b"gzip")], ask=own, method="POST")
            assert b"grpc-accept-encoding" not in scene.origin.heard[1].fields
            assert answer.fields[b"grpc-status"] == b"14"
            assert answer.fields[b"x-egressd-reason"] == b"unscannable"

    run(test())


@pytest.mark.parametrize(
    "body",
    [b"plain", gzip.compress(b"x" * 99)[:-2], gzip.compress(b"x") + b"junk"],
    ids=["not coded", "cut short", "junk behind it"],
)
def test_a_coding_that_breaks_ends_the_stream_alone(body: bytes) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            answer = await told(scene, [body], [(b"content-encoding", b"gzip")])
            assert (answer.ended, answer.reset is not None) == (False, True)
            assert scene.records.ends() == ["upstream_protocol"]
            assert (await told(scene, [b"next"])).body == b"next"
            assert scene.engine.held == 0

    run(test())


@pytest.mark.parametrize("where", ["head", "body", "end", "fields"])
def test_a_masker_that_fails_ends_the_stream_and_passes_nothing(where: str) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            with mock.patch.object(veil_module.Veil, where, side_effect=RuntimeError("a fault")):
                answer = await told(scene, [S], trailers=[(b"x-key", S)])
            assert not answer.ended or answer.status == 502
            assert S not in scene.client_stream.written
            assert scene.records.ends() == ["internal_error"]
            assert (await told(scene, [b"next"])).body == b"next"
            assert scene.engine.held == 0

    run(test())


def test_no_cut_of_what_streams_tells_whether_a_guess_was_right() -> None:
    async def cut_at(guess: bytes, fields: list[tuple[bytes, bytes]]) -> list[int]:
        sizes = []
        async with scene_of() as scene:
            stream = scene.client.asks("GET", "/")
            await scene.settle()
            scene.origin.h2.send_headers(stream, [(b":status", b"200"), *fields])
            for piece in (b"x" * 2000 + guess, b"y" * 1000, b"z" + guess):
                scene.origin.h2.send_data(stream, piece)
                await scene.settle()
                sizes.append(len(scene.client.heard[stream].body))
        return sizes

    async def test() -> None:
        for fields in ([(b"content-length", b"9999")], [(b"content-type", b"application/json")]):
            for length in (1, 2, 8):
                assert await cut_at(S[:length], fields) == await cut_at(b"#" * length, fields)

    run(test())


def test_streams_do_not_share_what_they_hold_back() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            streams = [scene.client.asks("GET", f"/{number}") for number in range(3)]
            await scene.settle()
            peer = scene.origin.h2
            for stream in streams:
                peer.send_headers(stream, [(b":status", b"200")])
                peer.send_data(stream, b"%d " % stream + S[:10])
            await scene.settle()
            for stream in streams:
                assert scene.client.heard[stream].body == b"%d " % stream
                peer.send_data(stream, S[10:], end_stream=True)
            await scene.settle()
            assert [scene.client.heard[stream].body for stream in streams] == [
                b"%d " % stream + STARS for stream in streams
            ]

    run(test())


def test_an_answer_that_came_whole_is_not_lost_with_its_origin() -> None:
    async def test() -> None:
        async with scene_of(window=8) as scene:
            scene.client.acknowledges = False
            stream = scene.client.asks("GET", "/")
            await scene.settle()
            peer = scene.origin.h2
            peer.send_headers(stream, [(b":status", b"200")])
            peer.send_data(stream, b"0123456789 " + S, end_stream=True)
            await scene.settle()
            scene.origin_stream.arrive(frames.reset(stream, frames.Code.NO_ERROR))
            await scene.settle()
            assert scene.client.heard[stream].body == b"01234567"
            scene.origin_stream.end()
            scene.client.h2.increment_flow_control_window(100, stream)
            await scene.settle()
            assert scene.client.heard[stream].body == b"0123456789 " + STARS
            assert scene.client.heard[stream].ended

    run(test())


def test_a_bomb_is_undone_only_as_fast_as_it_is_taken() -> None:
    async def test() -> None:
        size = 4 * 1024 * 1024
        bomb = gzip.compress(bytes(size))
        async with scene_of(window=1024) as scene:
            scene.client.acknowledges = False
            answer = await told(scene, [bomb[:16384]], [(b"content-encoding", b"gzip")])
            assert answer.body == bytes(1024)
            assert scene.engine.held < 4 * 1024 * 1024 + 16384
            scene.client.h2.reset_stream(1)
            await scene.settle()
            assert scene.engine.held == 0
        async with scene_of() as scene:
            answer = await told(
                scene,
                [bomb[at : at + 4096] for at in range(0, len(bomb), 4096)],
                [(b"content-encoding", b"gzip")],
            )
            for _ in range(50):
                await scene.settle()
            assert (len(answer.body), answer.ended) == (size, True)
            assert scene.engine.held == 0

    run(test())


def test_what_takes_its_time_to_mask_lets_others_have_their_turn() -> None:
    async def test() -> None:
        async with scene_of(window=16 * 1024 * 1024) as scene:
            size = 4 * 1024 * 1024 // 3 * 3
            stream = scene.client.asks("GET", "/")
            await scene.settle()
            scene.client.h2.increment_flow_control_window(2**30)
            await scene.settle()
            peer = scene.origin.h2
            peer.send_headers(stream, [(b":status", b"200"), (b"content-encoding", b"gzip")])
            peer.send_data(stream, gzip.compress(S[:3] * (size // 3), 9), end_stream=True)
            turns: list[int] = []
            while len(turns) < 1000 and not scene.records.ends():
                turns.append(len(scene.client_stream.written))
                await asyncio.sleep(0)
            await scene.settle()
            assert max(after - before for before, after in itertools.pairwise(turns)) < 1024 * 1024
            assert len(scene.client.heard[stream].body) == size

    run(test())


def test_windows_are_given_back_in_full() -> None:
    """More passes than all windows hold, masked and undone; the origin would stop if a byte of it were not given back."""

    async def test() -> None:
        async with scene_of() as scene:
            piece = (b"x" * 1000 + S) * 16
            stream = scene.client.asks("GET", "/")
            await scene.settle()
            peer = scene.origin.h2
            peer.send_headers(stream, [(b":status", b"200")])
            for _ in range(200):
                assert peer.local_flow_control_window(stream) >= 16384
                peer.send_data(stream, piece[:16384])
                await scene.settle()
            peer.send_data(stream, b"", end_stream=True)
            await scene.settle()
            answer = scene.client.heard[stream]
            assert len(answer.body) == 200 * len(piece[:16384])
            assert S not in answer.body
            assert scene.engine.held == 0

    run(test())


def test_without_a_credential_nothing_is_sifted() -> None:
    async def test() -> None:
        async with scene_of(credential=False) as scene:
            with mock.patch.object(
                traffic.Traffic, "_sift", side_effect=AssertionError("nobody is to be masked")
            ):
                assert (await told(scene, [S], [(b"x", S)], trailers=[(b"y", S)])).body == S
            assert scene.records.ends() == ["completed"]

    run(test())
