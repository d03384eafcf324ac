"""A rule that asks for a body: nothing of a stream leaves before all of its body was looked into (HTTP/2)."""

from __future__ import annotations

import pytest

from egressd.policy.effective import EffectiveEntry
from tests.gate.inspector.http2.scene import Scene, tls_entry
from tests.gate.inspector.lab import run

GOOD = b'{"operation": "download"}'
BAD = b'{"operation": "upload"}'
JSON = (b"content-type", b"application/json")


def looks() -> EffectiveEntry:
    return tls_entry(requests=("POST /batch?",), body=(("operation", ("download",)),))


def test_a_body_that_matches_goes_on_once_it_is_whole() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            stream = scene.client.asks("POST", "/batch", [JSON], end=False)
            scene.client.h2.send_data(stream, GOOD[:9])
            await scene.settle()
            assert scene.origin.heard == {}
            scene.client.h2.send_data(stream, GOOD[9:], end_stream=True)
            await scene.settle()
            asked = scene.origin.heard[1]
            assert asked.body == GOOD
            assert asked.fields[b"content-length"] == b"%d" % len(GOOD)
            await scene.answer(1, body=b"ok")
            assert scene.client.heard[stream].body == b"ok"
            assert scene.records.ends() == ["completed"]

    run(test())


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        pytest.param([JSON], BAD, id="another value"),
        pytest.param([JSON], GOOD + BAD, id="two documents"),
        pytest.param([(b"content-type", b"text/plain")], GOOD, id="another type"),
        pytest.param([JSON, (b"content-encoding", b"br")], GOOD, id="said to be coded"),
        pytest.param([(b"content-type", b"application/grpc+json")], b"\0\0\0\0\x19" + GOOD, id="gRPC"),
        pytest.param([JSON], b" " * 70_000 + GOOD, id="too large"),
    ],
)
def test_nothing_leaves_of_a_body_that_does_not_and_other_streams_go_on(
    fields: list[tuple[bytes, bytes]], body: bytes
) -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            stream = scene.client.asks("POST", "/batch", fields, end=False)
            for start in range(0, len(body), 16_000):
                scene.client.h2.send_data(stream, body[start : start + 16_000])
                await scene.settle()
                if scene.client.heard.get(stream) is not None and scene.client.heard[stream].status:
                    break
            else:
                scene.client.h2.send_data(stream, b"", end_stream=True)
            await scene.settle()
            answer = scene.client.heard[stream]
            assert answer.fields[b"x-egressd-reason"] == b"body_mismatch"
            assert scene.origin.heard == {}
            other = scene.client.asks("POST", "/batch", [JSON], end=False)
            scene.client.h2.send_data(other, GOOD, end_stream=True)
            await scene.settle()
            assert scene.origin.heard[1].body == GOOD

    run(test())


def test_a_head_without_a_body_is_refused_at_once() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            answer = await scene.ask("POST", "/batch", [JSON])
            assert answer.fields[b"x-egressd-reason"] == b"body_mismatch"
            assert scene.origin.heard == {}

    run(test())


def test_trailers_end_a_body_and_do_not_go_on() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            stream = scene.client.asks("POST", "/batch", [JSON], end=False)
            scene.client.h2.send_data(stream, GOOD)
            scene.client.h2.send_headers(stream, [(b"x-more", b"1")], end_stream=True)
            await scene.settle()
            assert scene.origin.heard[1].body == GOOD
            assert scene.origin.heard[1].ended
            assert scene.origin.heard[1].trailers is None

    run(test())
