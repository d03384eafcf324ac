"""The shapes that requests and answers can have, over real sockets: each passes whole, or is refused in words."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
from ipaddress import IPv4Address

import pytest

from egressd.gate.dialer import DialFailed
from egressd.gate.inspector.layers import InspectorLayer
from egressd.gate.settings import Settings
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import DEADLINE, HOST, laboratory, run, wait_until
from tests.gate.inspector.origin import BIG, PathOrigin


def sha(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def test_requests_of_one_client_share_one_upstream() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert [(await client.ask("GET /n")).body for _ in range(5)] == [b"1", b"2", b"3", b"4", b"5"]
            layer = lab.engines[0]._layer
            assert isinstance(layer, InspectorLayer)
            assert (layer.streams, layer.command_sources, len(layer.connections)) == (
                {},
                {},
                2,
            )  # nothing piles up
            await client.over()
            assert origin.connections == len(lab.dialer.dials) == 1
            assert lab.records.decisions() == [("allow", "rule")] * 5
            assert lab.records.ends() == ["completed"] * 5

    run(test())


def test_clients_share_no_upstream() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            for _ in range(2):
                client = await lab.dial()
                assert (await client.ask("GET /n")).body == b"1"
                await client.over()
            assert origin.connections == 2

    run(test())


def test_a_chunked_answer_passes_and_the_connection_lives_on() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /chunked")).body == b"hello world"
            assert (await client.ask("GET /n")).body == b"2"
            await client.over()

    run(test())


@pytest.mark.parametrize("size", [5, 300_000])
def test_a_sized_upload_arrives_whole(size: int) -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            body = os.urandom(size)
            got = json.loads((await client.ask(f"POST /echo\nContent-Length: {size}", body)).body)
            assert (got["n"], got["sha"]) == (size, sha(body))
            assert (await client.ask("GET /n")).body == b"2"
            await client.over()
            assert lab.records.of("end")[0].bytes_up == size + len(lab_head(size))

    def lab_head(size: int) -> bytes:
        return f"POST /echo HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {size}\r\n\r\n".encode()

    run(test())


def test_a_chunked_upload_arrives_whole_and_its_trailers_do_not() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            body = b"3;ext=1\r\nabc\r\n4\r\ndefg\r\n0\r\nAuthorization: evil\r\nHost: evil.example\r\n\r\n"
            got = json.loads(
                (
                    await client.ask("POST /echo\nTransfer-Encoding: chunked\nTrailer: Authorization", body)
                ).body
            )
            assert (got["n"], got["sha"], got["trailers"]) == (7, sha(b"abcdefg"), "")
            assert "trailer" not in got["headers"]
            assert (await client.ask("GET /n")).body == b"2"
            await client.over()
            assert lab.records.of("end")[0].detail == "request trailers dropped"

    run(test())


def test_answers_without_a_body_end_at_their_head() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            head = await client.ask("HEAD /head")
            assert (head.status, head.headers["content-length"]) == (200, "12345")
            assert (await client.ask("GET /204")).status == 204
            assert (await client.ask("GET /304")).headers["etag"] == '"a"'
            assert (await client.ask("GET /n")).body == b"4"
            await client.over()

    run(test())


def test_an_expected_body_is_invited_after_the_allow() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(
                f"POST /echo HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert (await client.head()).status == 100
            assert lab.records.decisions() == [("allow", "rule")]
            client.send(b"abcde")
            got = json.loads((await client.answer()).body)
            assert got["n"] == 5
            assert "expect" not in got["headers"]
            await client.over()

    run(test())


def test_a_denied_body_is_not_invited() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            answer = await client.ask(
                "POST /echo\nContent-Length: 5\nExpect: 100-continue", host="evil.example.com"
            )
            assert (answer.status, answer.interim) == (403, [])
            await client.over()

    run(test())


def test_events_pass_as_they_come() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"GET /sse HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await client.head()
            for number in range(3):
                async with asyncio.timeout(DEADLINE):
                    event = await client.reader.readuntil(b"data: %d\n\n\r\n" % number)
                assert event.count(b"data:") == 1
                origin.go_on.set()
            assert await client.reader.readexactly(5) == b"0\r\n\r\n"
            await client.over()

    run(test())


def test_an_answer_that_ends_with_its_connection_gets_an_end_that_the_client_can_see() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            answer = await client.ask("GET /nolen")
            assert (answer.body, answer.headers["transfer-encoding"]) == (b"abcdef", "chunked")
            assert "connection" not in answer.headers
            assert (await client.ask("GET /n")).body == b"1"
            await client.over()
            assert origin.connections == 2

    run(test())


def test_an_old_client_gets_the_end_of_the_connection_instead() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            client.send(f"GET /nolen HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
            answer = await client.answer()
            assert (answer.body, answer.headers["connection"]) == (b"abcdef", "close")
            await client.over()
            assert lab.records.ends() == ["completed"]

    run(test())


def test_an_upstream_that_closes_between_requests_is_dialled_again() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            for request in ("GET /closeafter", "GET /n", "GET /closeafter", "POST /n\nContent-Length: 0"):
                origin.lost.clear()
                assert (await client.ask(request)).status == 200
                if "closeafter" in request:
                    await origin.lost.wait()
                    await wait_until(lambda: lab.engines[0]._conduit.upstream is None)
            assert origin.connections == 3
            await client.over()

    run(test())


def test_an_answer_that_is_cut_short_is_cut_short_for_the_client() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            client.send(f"GET /cut HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            assert (await client.head()).status == 200
            assert await client.closed() == b"abc"
            await client.over()
            assert lab.records.ends() == ["upstream_closed"]

    run(test())


def test_pipelined_requests_are_judged_one_by_one_and_answered_in_order() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(
                f"POST /a HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\n\r\nabc"
                f"POST /b HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n0\r\n\r\n"
                f"GET /c HTTP/1.1\r\nHost: {HOST}\r\n\r\n"
                "GET /d HTTP/1.1\r\nHost: evil.example.com\r\n\r\n"
                f"GET /e HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
            )
            got = [json.loads((await client.answer()).body) for _ in range(3)]
            assert [(page["target"], page["n"]) for page in got] == [("/a", 3), ("/b", 2), ("/c", 0)]
            assert (await client.answer()).headers["x-egressd-reason"] == "authority_mismatch"
            assert await client.closed() == b""
            await client.over()
            assert lab.records.decisions() == [("allow", "rule")] * 3 + [("deny", "authority_mismatch")]
            assert b"/d" not in origin.heads
            assert b"/e" not in origin.heads

    run(test())


def test_a_client_that_goes_takes_its_download_with_it() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"GET /big HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await client.head()
            client.writer.transport.abort()
            async with asyncio.timeout(DEADLINE):
                await origin.lost.wait()
                await client.task
            assert origin.sent < BIG
            assert lab.records.ends() == ["client_closed"]

    run(test())


def test_a_slow_reader_slows_the_origin_down() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined] # it is a read transport too
            client.send(f"GET /big HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            before = -1
            while origin.sent != before or origin.sent == 0:  # until nothing moves any more
                before = origin.sent
                await asyncio.sleep(0.2)
            assert origin.sent < 32 * 1024 * 1024  # kernel buffers on both sides, and ours
            assert lab.engines[0]._conduit.client.waiting < 1024 * 1024
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            await client.head()
            left = BIG
            while left:
                left -= len(await client.reader.read(1024 * 1024))
            await client.over()
            assert lab.records.ends() == ["completed"]

    run(test())


def test_an_origin_that_does_not_read_slows_the_client_down() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"POST /silent HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {BIG}\r\n\r\n".encode())
            sent = 0
            piece = b"x" * 65536
            try:
                while sent < BIG:
                    client.send(piece)
                    sent += len(piece)
                    async with asyncio.timeout(0.5):
                        await client.writer.drain()
            except TimeoutError:
                pass
            assert sent < BIG
            upstream = lab.engines[0]._conduit.upstream
            assert upstream is not None
            assert upstream.stream.waiting < 1024 * 1024
            client.writer.transport.abort()
            origin.go_on.set()

    run(test())


def test_bodies_of_40_megabytes_pass_in_flat_memory() -> None:
    size = 40 * 1024 * 1024

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"PUT /echo HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {size}\r\n\r\n".encode())
            for _ in range(size // 65536):
                client.send(b"y" * 65536)
                await client.writer.drain()
            assert json.loads((await client.answer()).body)["n"] == size
            client.send(f"GET /big HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await client.head()
            left = BIG
            while left:
                left -= len(await client.reader.read(1024 * 1024))
            await client.over()

    run(test())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(test())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024  # KiB


def test_an_early_answer_reaches_the_client_that_still_sends() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(
                f"POST /early HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 5000000\r\n\r\n".encode()
                + b"y" * 100_000
            )
            answer = await client.answer()
            assert (answer.status, answer.body) == (413, b"big")
            assert await client.closed() == b""
            await client.over()
            origin.go_on.set()
            end = lab.records.of("end")[0]
            assert (end.reason, end.status, end.detail) == (
                "completed",
                413,
                "answered before the end of the request",
            )

    run(test())


def test_interim_answers_pass_and_do_not_hang() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            client.send(f"GET /103 HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            hints = await client.head()
            assert (hints.status, hints.headers) == (103, {"link": "</a>"})
            assert (await client.answer()).body == b"final"
            assert (await client.ask("GET /n")).body == b"2"
            await client.over()

    run(test())


def test_an_old_client_gets_no_interim_answer() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            client.send(f"GET /103 HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
            answer = await client.answer()
            assert (answer.body, answer.interim) == (b"final", [])
            await client.over()

    run(test())


def test_trailers_of_an_answer_pass_but_for_those_that_may_not_be_trailers() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            answer = await client.ask("GET /trailers")
            assert (answer.body, answer.trailers) == (b"hello", {"x-sum": "1"})
            assert (await client.ask("GET /n")).body == b"2"
            await client.over()

    run(test())


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="both lengths",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", id="two lengths"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\nabc", id="signed length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n", id="unknown coding"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", id="fold"),
        pytest.param(b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", id="bare LF"),
        pytest.param(b"HTTP/1.1 200 OK\r\nA\0: b\r\n\r\n", id="NUL"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", id="upgrade unasked"),
        pytest.param(b"HTTP/2 200\r\n\r\n", id="wrong version"),
        pytest.param(b"SSH-2.0-OpenSSH_9\r\n", id="not HTTP"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 20, id="interim without end"),
    ],
)
def test_an_answer_that_can_be_read_in_two_ways_is_a_502(raw: bytes) -> None:
    async def test() -> None:
        origin = PathOrigin()
        origin.canned["bad"] = raw
        async with laboratory(origin) as lab:
            client = await lab.dial()
            answer = await client.ask("GET /bad")
            assert answer.status == 502
            assert answer.headers["x-egressd-reason"] in ("upstream_protocol", "upstream_closed")
            await client.over()
            assert lab.records.decisions() == [("allow", "rule")]
            assert lab.records.of("end")[0].status == 502

    run(test())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_bad_chunk_in_an_answer_cuts_it_short(at_once: bool) -> None:
    async def test() -> None:
        origin = PathOrigin()
        start, end = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"xyz\r\n"
        origin.canned["bad"] = start + end if at_once else start
        async with laboratory(origin) as lab:
            client = await lab.dial()
            answer = client.ask("GET /bad")
            if at_once:  # nothing was said yet: there can be an answer
                assert (await answer).status == 502
            else:
                with pytest.raises(asyncio.IncompleteReadError):
                    await answer
            await client.over()
            assert lab.records.ends() == ["upstream_protocol" if at_once else "upstream_closed"]

    run(test())


def test_an_unreachable_host_is_a_502_that_names_no_address() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            lab.dialer.failure = DialFailed(Reason.UPSTREAM_UNREACHABLE, "93.184.216.34: [Errno 111] refused")
            client = await lab.dial()
            answer = await client.ask("POST /x\nContent-Length: 3", b"abc")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (502, "upstream_unreachable")
            assert b"93.184" not in answer.body
            assert "server" not in answer.headers
            await client.over()
            end = lab.records.of("end")[0]
            assert (end.reason, end.status, end.detail) == (
                "upstream_unreachable",
                502,
                "93.184.216.34: [Errno 111] refused",
            )

    run(test())


def test_a_name_that_resolves_into_a_private_range_is_refused_after_all() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.dialer.address = IPv4Address("10.0.0.5")
            client = await lab.dial()
            answer = await client.ask("GET /x")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (403, "special_address")
            assert b"10.0.0.5" not in answer.body
            await client.over()
            end = lab.records.of("end")[0]
            assert (end.verdict, end.reason, end.status) == ("deny", "special_address", 403)
            assert origin.connections == 0

    run(test())


def test_a_site_that_says_403_is_not_taken_for_us() -> None:
    async def test() -> None:
        origin = PathOrigin()
        origin.canned["no"] = (
            b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nX-Egressd-Reason: rule\r\nX-EGRESSD-Attempt: 1\r\n"
            b'Alt-Svc: h3=":443"\r\nConnection: X-Hop\r\nX-Hop: 1\r\nServer: nginx\r\n\r\nno'
        )
        async with laboratory(origin) as lab:
            client = await lab.dial()
            answer = await client.ask("GET /no")
            assert (answer.status, answer.phrase, answer.body) == (403, "Forbidden", b"no")
            assert answer.headers == {"content-length": "2", "server": "nginx"}
            await client.over()
            assert lab.records.decisions() == [("allow", "rule")]
            assert lab.records.of("end")[0].status == 403

    run(test())


def test_a_reused_upstream_must_be_permitted_for_each_request() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /n")).body == b"1"
            lab.dialer.address = IPv4Address("10.1.1.1")  # what the name leads to by now
            engine = lab.engines[0]
            assert engine._uplink.server is not None
            engine._uplink.server.peername = ("10.1.1.1", 80)
            answer = await client.ask("GET /n")
            assert answer.headers["x-egressd-reason"] == "special_address"
            await client.over()

    run(test())


def test_a_request_whose_head_stalls_is_told_so_and_recorded() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), settings=Settings(head_timeout=0.2)) as lab:
            client = await lab.dial()
            client.send(b"GET /x HTTP/1.1\r\nHost:")
            assert (await client.answer()).status == 408
            await client.over()
            assert lab.records.decisions() == [("deny", "head_timeout")]

    run(test())


def test_a_connection_that_idles_between_requests_is_closed_in_silence() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), settings=Settings(head_timeout=0.2)) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /n")).status == 200
            assert await client.closed() == b""
            await client.over()
            assert len(lab.records.all) == 2

    run(test())


@pytest.mark.parametrize(
    ("request_head", "reason", "status"),
    [
        pytest.param("GET /silent HTTP/1.1\r\nHost: {}\r\n\r\n", "upstream_timeout", 504, id="no answer"),
        pytest.param(
            "POST /echo HTTP/1.1\r\nHost: {}\r\nContent-Length: 9\r\n\r\nabc",
            "idle_timeout",
            408,
            id="no body",
        ),
    ],
)
def test_an_exchange_in_which_nothing_moves_ends(request_head: str, reason: str, status: int) -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin, settings=Settings(idle_timeout=0.3)) as lab:
            client = await lab.dial()
            client.send(request_head.format(HOST).encode())
            answer = await client.answer()
            assert (answer.status, answer.headers["x-egressd-reason"]) == (status, reason)
            await client.over()
            origin.go_on.set()
            assert lab.records.ends() == [reason]

    run(test())


def test_a_cut_ends_both_sides_at_once() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"GET /big HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await client.head()
            for live in tuple(lab.sandbox.live):
                live.cut(Reason.REVOKED)
            async with asyncio.timeout(DEADLINE):
                await client.task
                await origin.lost.wait()
            assert lab.records.ends() == ["revoked"]
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await client.reader.readexactly(BIG)

    run(test())


def test_a_cut_while_the_decision_is_written_lets_nothing_out() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.records.gate = asyncio.Event()
            client = await lab.dial()
            client.send(f"GET /x HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await wait_until(lambda: lab.engines[0]._tasks)
            lab.engines[0].cut(Reason.REVOKED)
            lab.records.gate.set()
            await client.over()
            assert origin.connections == 0
            assert lab.records.ends() == ["revoked"]

    run(test())


def test_cancelling_the_inspection_cuts_it() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"GET /silent HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await wait_until(lambda: origin.heads)
            client.task.cancel()
            await asyncio.gather(client.task, return_exceptions=True)
            assert client.task.cancelled()
            assert lab.records.ends() == ["shutdown"]
            origin.go_on.set()
            await client.close()

    run(test())


def test_bytes_that_the_door_read_come_first() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial(first=b"GET /n HTTP/1.1\r\nHo")
            client.send(f"st: {HOST}\r\n\r\n".encode())
            assert (await client.answer()).body == b"1"
            await client.over()

    run(test())


def test_a_request_in_single_bytes_is_the_same_request() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            head = f"POST /echo HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"
            for byte in head.encode() + b"3\r\nabc\r\n0\r\n\r\n":
                client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert json.loads((await client.answer()).body)["n"] == 3
            await client.over()

    run(test())


def test_a_client_that_asks_to_close_is_closed_on_after_the_whole_answer() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"GET /big HTTP/1.1\r\nHost: {HOST}\r\nConnection: Close\r\n\r\n".encode())
            head = await client.head()
            assert head.headers["connection"] == "close"
            await asyncio.sleep(0.3)  # a reader that is in no hurry gets all of it all the same
            left = BIG
            while data := await client.reader.read(1024 * 1024):
                left -= len(data)
            assert left == 0
            await client.over()
            assert lab.records.ends() == ["completed"]

    run(test())
