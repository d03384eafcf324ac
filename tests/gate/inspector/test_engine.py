"""The engine as a transcript, on streams in memory, and its laws under any bytes from either side."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gate.inspector.lab import HOST, run
from tests.gate.inspector.scene import Scene

GET = f"GET /a HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
POST = f"POST /b HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 4\r\n\r\n".encode()


def test_two_requests_on_one_upstream() -> None:
    async def test() -> None:
        async with Scene() as scene:
            assert await scene.says(GET[:20]) == b""
            assert scene.upstreams == []
            assert await scene.says(GET[20:]) == b""
            (upstream,) = scene.upstreams
            assert upstream.written == GET
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
            assert await scene.origin_says(answer) == answer
            assert await scene.says(POST + b"ab") == b""
            assert upstream.written == GET + POST + b"ab"
            assert await scene.says(b"cd") == b""
            assert (
                await scene.origin_says(b"HTTP/1.1 204 No Content\r\n\r\n")
                == b"HTTP/1.1 204 No Content\r\n\r\n"
            )
            assert scene.records.ends() == ["completed", "completed"]
            assert [record.bytes_up for record in scene.records.of("end")] == [len(GET), len(POST) + 4]

    run(test())


def test_nothing_is_opened_for_a_denied_request_and_nothing_after_it_is_read() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.says(b"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n" + GET)
            assert answer.startswith(b"HTTP/1.1 403 egressd: denied: ")
            assert scene.client.state == "lingering"
            assert scene.upstreams == []
            assert len(scene.records.decisions()) == 1

    run(test())


def test_the_client_is_not_read_while_its_request_waits_or_its_upstream_is_full() -> None:
    async def test() -> None:
        async with Scene() as scene:
            scene.records.gate = asyncio.Event()
            await scene.says(POST)
            assert scene.client.is_read()
            await scene.says(b"a")  # one read's worth is kept, no more
            assert not scene.client.is_read()
            await scene.says(b"b")
            scene.records.gate.set()
            await scene.settle()
            assert scene.client.is_read()
            (upstream,) = scene.upstreams
            assert upstream.written == POST + b"ab"
            scene.fill(upstream, full=True)
            assert not scene.client.is_read()
            scene.fill(upstream, full=False)
            assert scene.client.is_read()

    run(test())


def test_the_upstream_is_not_read_while_the_client_is_full() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            scene.fill(scene.client, full=True)
            assert not scene.upstreams[0].is_read()
            scene.fill(scene.client, full=False)
            assert scene.upstreams[0].is_read()

    run(test())


def test_requests_sent_ahead_are_kept_up_to_a_bound() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            for _ in range(40):
                await scene.says(b"x" * 16_384)
            assert not scene.client.is_read()
            assert len(scene.engine._layer.sandbox_side.buf) < 256 * 1024

    run(test())


def test_bytes_that_answer_nothing_close_their_upstream_and_answer_nobody() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
            assert await scene.origin_says(answer + b"HTTP/1.1 200 OK\r\n\r\n") == answer
            assert scene.upstreams[0].state == "closed"
            await scene.says(GET)
            assert len(scene.upstreams) == 2
            assert await scene.origin_says(b"HTTP/1.1 204 No\r\n\r\n") == b"HTTP/1.1 204 No\r\n\r\n"
            assert await scene.origin_says(b"junk") == b""
            assert scene.upstreams[1].state == "closed"

    run(test())


def test_an_idle_upstream_that_ends_is_not_used_again() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            await scene.origin_says(b"HTTP/1.1 204 No\r\n\r\n")
            scene.upstreams[0].end()
            await scene.says(GET)
            assert len(scene.upstreams) == 2

    run(test())


@pytest.mark.parametrize("end", ["end", "lose"])
def test_an_upstream_that_goes_before_it_answers_is_an_upstream_error(end: str) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            getattr(scene.upstreams[0], end)()
            await scene.settle()
            assert b"reason upstream_closed" in scene.client.written
            assert scene.records.ends() == ["upstream_closed"]

    run(test())


def test_a_cut_aborts_both_sides_and_says_nothing() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
        assert (scene.client.state, scene.upstreams[0].state, scene.client.written) == (
            "aborted",
            "aborted",
            b"",
        )
        assert scene.records.ends() == ["shutdown"]

    run(test())


PARTS = [
    GET,
    POST,
    b"abcd",
    f"PUT / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode(),
    f"HEAD / HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode(),
    b"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n",
    b"2\r\nab\r\n",
    b"0\r\n\r\n",
    b"Host: x\r\n",
    b"\r\n",
    b"\n",
    b"\0",
]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 100 C\r\n\r\n",
    b"HTTP/1.1 101 S\r\n\r\n",
    b"HTTP/1.1 103 E\r\nA: b\r\n\r\n",
    b"HTTP/1.1 204 N\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n",
    b"1\r\na\r\n",
    b"0\r\nA: b\r\n\r\n",
    b"0\r\n\r\n",
    b"ok",
    b"\r\n",
]
STEPS = st.lists(
    st.tuples(st.just("client"), st.sampled_from(PARTS) | st.binary(max_size=8))
    | st.tuples(st.just("origin"), st.sampled_from(ANSWERS) | st.binary(max_size=8))
    | st.tuples(st.sampled_from(["client ends", "origin ends", "origin lost", "client lost"]), st.just(b"")),
    max_size=12,
)


def play(steps: list[tuple[str, bytes]]) -> Scene:
    scenes: list[Scene] = []

    async def test() -> None:
        async with Scene() as scene:
            scenes.append(scene)
            for who, data in steps:
                if who.startswith("origin") and not scene.upstreams:
                    continue
                stream = scene.client if who.startswith("client") else scene.upstreams[-1]
                if data:
                    stream.arrive(data)
                elif who.endswith("ends"):
                    stream.end()
                elif who.endswith("lost"):
                    stream.lose()
                await scene.settle()

    quick(test())
    return scenes[0]


def quick(test: Coroutine[None, None, None]) -> None:
    with asyncio.Runner() as runner:
        runner.run(test)


@settings(max_examples=300)
@given(STEPS)
def test_the_laws_hold_whatever_either_side_sends(steps: list[tuple[str, bytes]]) -> None:
    scene = play(steps)
    decisions, ends = scene.records.of("decision"), scene.records.of("end")
    assert not [record for record in scene.records.all if record.reason == "internal_error"]
    # every attempt has one decision and one end, by the same id
    assert [record.attempt_id for record in decisions] == [record.attempt_id for record in ends]
    assert len({record.attempt_id for record in decisions}) == len(decisions)
    # no more requests go out than were allowed, each of them to the judged host
    sent = b"".join(upstream.written for upstream in scene.upstreams)
    hosts = re.findall(rb"\r\nHost: ([^\r\n]*)\r\n", sent)
    assert len(hosts) <= len([record for record in decisions if record.verdict == "allow"])
    assert set(hosts) <= {HOST.encode()}
    assert sum(record.bytes_up or 0 for record in ends) == len(sent)
    # what the client gets is HTTP, or nothing
    assert scene.client.written == b"" or re.match(rb"HTTP/1\.1 [1-5][0-9]{2} ", scene.client.written)
