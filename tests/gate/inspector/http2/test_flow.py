"""Bytes in flight: windows from end to end, readers and origins that stall, limits of rules, and what is overdue."""

from __future__ import annotations

import asyncio

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from egressd.gate.inspector.http2 import engine as engine_module
from egressd.gate.inspector.http2 import traffic
from egressd.gate.inspector.http2.engine import CLIENT_WINDOW, CONNECTION_WINDOW, MOST_WINDOW
from egressd.gate.settings import Settings
from egressd.policy.effective import EntryLimits, Rate
from tests.gate.inspector.http2.scene import Scene, tls_entry
from tests.gate.inspector.lab import run, wait_until

MiB = 1024 * 1024


async def send(scene: Scene, stream: int, most: int, *, up: bool) -> int:
    """Send data until all windows are closed, or `most` bytes; returns how many that were."""
    peer, sent = scene.client if up else scene.origin, 0
    while sent < most:
        room = min(peer.h2.local_flow_control_window(stream), 16_384, most - sent)
        if room <= 0:
            before = sent
            await scene.settle(4)
            if peer.h2.local_flow_control_window(stream) <= 0:
                return before
            continue
        peer.h2.send_data(stream, b"x" * room)
        sent += room
    await scene.settle()
    return sent


def test_a_reader_that_stalls_holds_one_window_and_stops_nobody() -> None:
    async def test() -> None:
        async with Scene() as scene:
            stalled, other = await scene.ask("GET", "/stalled"), await scene.ask("GET", "/other")
            scene.client.acknowledges = False
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            await scene.settle()
            sent = await send(scene, 1, 8 * MiB, up=False)
            assert sent <= MOST_WINDOW + 65_535 + 2 * 16_384
            assert len(stalled.body) == 65_535  # the client's own window
            assert scene.engine.held == sent - 65_535
            scene.client.h2.increment_flow_control_window(
                1 << 20
            )  # the connection's: only the stream is stalled
            await scene.answer(3, 200, b"hello")
            assert other.body == b"hello"
            assert len(stalled.body) == 65_535
            scene.client.h2.increment_flow_control_window(1 << 24, 1)
            scene.client.h2.increment_flow_control_window(1 << 24)
            await scene.settle(200)
            assert len(stalled.body) == sent
            assert scene.engine.held == 0

    run(test())


def test_many_stalled_readers_do_not_close_the_connections_window() -> None:
    async def test() -> None:
        async with Scene(client_window=0) as scene:
            for _ in range(30):
                await scene.ask()
            for stream in range(1, 61, 2):
                scene.origin.h2.send_headers(stream, [(b":status", b"200")])
                await send(scene, stream, 200_000, up=False)
            assert scene.engine.held > 2 * CONNECTION_WINDOW
            scene.client.acknowledges = False
            scene.client.h2.increment_flow_control_window(100_000, 59)
            await scene.settle()
            assert len(scene.client.heard[59].body) == 65_535

    run(test())


def test_a_sandbox_that_holds_too_much_is_given_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "HELD_MOST", MiB)

    async def test() -> None:
        async with Scene(client_window=0) as scene:
            for _ in range(30):
                await scene.ask()
            total = 0
            for stream in range(1, 61, 2):
                scene.origin.h2.send_headers(stream, [(b":status", b"200")])
                total += await send(scene, stream, 200_000, up=False)
            assert total == scene.engine.held <= MiB + CONNECTION_WINDOW
            for stream in range(1, 61, 2):
                scene.client.h2.increment_flow_control_window(1 << 20, stream)
            scene.client.h2.increment_flow_control_window(1 << 24)
            await scene.settle(200)
            assert scene.engine.held == 0
            sent = await send(scene, 59, 200_000, up=False)
            assert sent == 200_000  # and everything comes back

    run(test())


def test_an_origin_that_stalls_holds_one_window_and_stops_nobody() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.ask("POST", "/stalled", end=False)
            scene.origin.acknowledges = False
            sent = await send(scene, 1, 8 * MiB, up=True)
            assert 65_535 < sent <= 65_535 + CLIENT_WINDOW
            scene.origin.acknowledges = True
            scene.origin.h2.increment_flow_control_window(1 << 20)
            other = await scene.ask("POST", "/other", end=False)
            scene.client.h2.send_data(3, b"body", end_stream=True)
            await scene.settle()
            assert scene.origin.heard[3].body == b"body"
            await scene.answer(3, 200, b"taken")
            assert other.body == b"taken"
            scene.origin.h2.increment_flow_control_window(1 << 20, 1)
            await scene.settle(100)
            assert len(scene.origin.heard[1].body) == sent

    run(test())


@pytest.mark.parametrize("up", [True, False])
def test_a_socket_that_is_full_is_written_no_bodies(up: bool) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.ask("POST", "/a", end=False)
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            await scene.settle()
            stream = scene.origin_stream if up else scene.client_stream
            stream.paused = True
            before = len(stream.written)
            await send(scene, 1, 100_000, up=up)
            assert len(stream.written) - before < 1000
            scene.client.h2.ping(b"12345678")
            await scene.settle()
            assert up or stream.written.endswith(b"12345678")
            stream.paused = False
            scene.engine.on_resume(stream)  # type: ignore[arg-type]  # a stream in all that matters
            await scene.settle()
            assert len(stream.written) - before > 65_535

    run(test())


def test_streams_take_turns() -> None:
    async def test() -> None:
        async with Scene(client_window=1 << 20) as scene:
            scene.client_stream.paused = True
            answers = [await scene.ask() for _ in range(3)]
            for stream in (1, 3, 5):
                scene.origin.h2.send_headers(stream, [(b":status", b"200")])
                await send(scene, stream, 60_000, up=False)
            scene.client.h2.increment_flow_control_window(1 << 20)
            scene.client_stream.paused = False
            scene.client.h2.ping(b"12345678")
            await scene.settle(1)
            got = [len(answer.body) for answer in answers]
            assert sum(got) == 0 or max(got) - min(got) <= 16_384
            await scene.settle()
            assert [len(answer.body) for answer in answers] == [60_000] * 3

    run(test())


def test_a_client_that_asks_and_does_not_read_is_cut() -> None:
    async def test() -> None:
        async with Scene() as scene:
            scene.client_stream.waiting = engine_module.UNREAD_REPLIES + 1
            await scene.ask()
            assert scene.records.decisions()[-1] == ("deny", "flood")
            assert scene.client_stream.state == "aborted"

    run(test())


def test_an_upstream_that_asks_and_does_not_read_is_let_go() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            scene.origin_stream.waiting = engine_module.UNREAD_REPLIES + 1
            scene.origin.h2.ping(b"12345678")
            await scene.settle()
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"upstream_protocol")
            assert scene.origin_stream.closed

    run(test())


# more streams than the upstream takes


def test_streams_wait_for_an_upstream_that_takes_few() -> None:
    async def test() -> None:
        async with Scene() as scene:
            first = await scene.ask("GET", "/0")
            scene.origin.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1})
            await scene.settle()
            answers = [first, *[await scene.ask("GET", f"/{number}") for number in (1, 2)]]
            for stream in (1, 3, 5):
                assert max(scene.origin.heard) == stream
                await scene.answer(stream, 200, b"ok")
            assert [answer.body for answer in answers] == [b"ok"] * 3

    run(test())


# limits of rules


def test_an_upload_over_its_limit_is_cut_and_told() -> None:
    async def test() -> None:
        rule = tls_entry(limits=EntryLimits(upload=Rate(amount=20_000, seconds=86_400)))
        async with Scene(rule) as scene:
            answer = await scene.ask("POST", "/a", end=False)
            await send(scene, 1, 60_000, up=True)
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (429, b"rate_limited")
            assert b"retry-after" in answer.fields
            assert scene.origin.heard[1].reset == ErrorCodes.CANCEL
            assert len(scene.origin.heard[1].body) <= 20_000
            assert scene.records.ends() == ["rate_limited"]

    run(test())


def test_a_download_is_slowed_to_its_limit_and_arrives() -> None:
    async def test() -> None:
        rule = tls_entry(limits=EntryLimits(download=Rate(amount=100_000, seconds=1)))
        async with Scene(rule, client_window=1 << 20) as scene:
            scene.client.h2.increment_flow_control_window(1 << 20)
            answer = await scene.ask()
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            await send(scene, 1, 150_000, up=False)
            assert len(answer.body) <= 100_000
            async with asyncio.timeout(10):
                while len(answer.body) < 150_000:
                    await asyncio.sleep(0.01)
                    await scene.settle()

    run(test())


def test_requests_over_their_limit_are_refused_stream_by_stream() -> None:
    async def test() -> None:
        rule = tls_entry(limits=EntryLimits(requests=Rate(amount=2, seconds=3600)))
        async with Scene(rule) as scene:
            statuses = [(await scene.ask()).status for _ in range(3)]
            assert statuses == [0, 0, 429]
            call = await scene.ask("POST", "/a/b", [(b"content-type", b"application/grpc")])
            assert call.fields[b"grpc-status"] == b"8"

    run(test())


# deadlines


def test_a_connection_without_streams_ends_in_time() -> None:
    async def test() -> None:
        async with Scene(settings=Settings(head_timeout=0.1)) as scene:
            await wait_until(lambda: scene.client_stream.closed)
            await scene.settle()
            assert scene.client.told_to_go()
            assert scene.records.all == []

    run(test())


def test_a_head_that_does_not_end_is_refused_while_others_live() -> None:
    async def test() -> None:
        async with Scene(settings=Settings(head_timeout=0.1)) as scene:
            await scene.ask("POST", "/a", end=False)
            scene.client_stream.arrive(b"\0\0\0\x01\0\0\0\0\x03")
            await wait_until(lambda: scene.client_stream.closed)
            assert ("deny", "head_timeout") in scene.records.decisions()

    run(test())


def test_a_get_that_does_not_say_whether_a_body_follows_is_refused_in_time() -> None:
    async def test() -> None:
        async with Scene(settings=Settings(head_timeout=0.1)) as scene:
            answer = await scene.ask("GET", "/a", end=False)
            await wait_until(lambda: scene.records.decisions())
            await scene.settle()
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (408, b"head_timeout")
            assert scene.records.all[0].path == "/a"

    run(test())


@pytest.mark.parametrize(
    ("end", "reason", "status"), [(True, "upstream_timeout", 504), (False, "idle_timeout", 408)]
)
def test_a_stream_on_which_nothing_moves_ends_alone(end: bool, reason: str, status: int) -> None:
    async def test() -> None:
        async with Scene(settings=Settings(idle_timeout=0.3)) as scene:
            quiet = await scene.ask("POST", "/quiet", end=end)
            busy = await scene.ask("POST", "/busy", end=False)
            async with asyncio.timeout(5):
                while not scene.records.ends():
                    scene.client.h2.send_data(3, b"x")
                    await scene.settle()
                    await asyncio.sleep(0.02)
            await scene.settle()
            assert (quiet.status, quiet.fields[b"x-egressd-reason"].decode()) == (status, reason)
            await scene.answer(3, 200, b"alive")
            assert busy.body == b"alive"

    run(test())
