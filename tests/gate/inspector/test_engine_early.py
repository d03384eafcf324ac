"""The upstream that the door has dialled early, and clients that end their side early."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from egressd.gate.inspector import engine, uplink
from egressd.gate.inspector.upstream import OpenFailed
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, entry, run, wait_until
from tests.gate.inspector.scene import FakeStream, Scene

GET = f"GET /a HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TLS = entry(schemes=("https",), ports=(443,))


def test_the_first_request_takes_it() -> None:
    async def test() -> None:
        early = FakeStream()
        async with Scene(TLS, tls=True, early=early) as scene:
            assert early.written == b""
            await scene.says(GET)
            assert early.written == GET
            assert await scene.origin_says(ANSWER) == ANSWER
            await scene.says(GET)
            assert scene.upstreams == [early]

    run(test())


def test_one_that_has_gone_is_dialled_again() -> None:
    async def test() -> None:
        early = FakeStream()
        async with Scene(TLS, tls=True, early=early) as scene:
            early.state = "lost"
            await scene.says(GET)
            assert len(scene.upstreams) == 2
            assert scene.upstreams[1].written == GET

    run(test())


def test_one_at_an_address_that_the_requests_rule_does_not_permit_is_not_used() -> None:
    async def test() -> None:
        confined = entry(schemes=("https",), ports=(443,), addresses=("198.51.100.0/24",))
        early = FakeStream()
        async with Scene(confined, tls=True, early=early) as scene:
            with mock.patch.object(
                uplink, "open_upstream", return_value=OpenFailed(Reason.ADDRESS_OUTSIDE_RULE, "")
            ):
                assert (await scene.says(GET)).startswith(b"HTTP/1.1 403 ")
            assert early.written == b""
            assert early.state == "closed"

    run(test())


def test_one_that_nobody_asked_anything_is_let_go() -> None:
    async def test() -> None:
        early = FakeStream()
        async with Scene(TLS, tls=True, early=early) as scene:
            await scene.says(b"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n")
            assert early.state == "closed"
            assert early.written == b""

    run(test())


def test_a_dial_that_failed_early_is_not_made_again() -> None:
    async def test() -> None:
        failed = OpenFailed(Reason.UPSTREAM_UNREACHABLE, "refused")
        async with Scene(TLS, tls=True, early=failed) as scene:
            assert (await scene.says(GET)).startswith(b"HTTP/1.1 502 egressd: upstream error")
            assert scene.upstreams == []
            assert scene.records.decisions() == [("allow", "rule")]
            assert scene.records.ends() == ["upstream_unreachable"]

    run(test())


def test_a_client_that_ends_its_side_after_its_request_gets_its_answer() -> None:
    """As `nc -N` does."""

    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            scene.client.end()
            await scene.settle()
            assert scene.client.state == "open"
            assert await scene.origin_says(ANSWER) == ANSWER
            assert scene.client.state == "lingering"
            assert scene.records.ends() == ["completed"]

    run(test())


def test_every_request_that_was_sent_before_the_end_is_answered() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET + GET)
            scene.client.end()
            await scene.settle()
            assert await scene.origin_says(ANSWER) == ANSWER
            assert await scene.origin_says(ANSWER) == ANSWER
            assert scene.client.state == "lingering"
            assert scene.records.ends() == ["completed", "completed"]

    run(test())


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        pytest.param(GET[:-9], "bad_request", id="in the head of a later request"),
        pytest.param(
            f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 9\r\n\r\nabc".encode(),
            "client_closed",
            id="in the body of a later request",
        ),
    ],
)
def test_what_was_cut_by_the_end_is_no_request(cut: bytes, reason: str) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET + cut)
            scene.client.end()
            await scene.settle()
            assert (await scene.origin_says(ANSWER)).startswith(ANSWER)
            await scene.settle()
            assert scene.client.state == "lingering"
            reasons = [record.reason for record in scene.records.all]
            assert reasons[:3] == ["rule", "completed", *reasons[2:3]]
            assert reason in reasons[2:]

    run(test())


def test_a_tls_client_that_says_goodbye_wants_no_answer() -> None:
    async def test() -> None:
        async with Scene(TLS, tls=True) as scene:
            await scene.says(GET)
            scene.client.end()
            await scene.settle()
            assert scene.records.ends() == ["client_closed"]
            assert scene.upstreams[0].closed

    run(test())


def test_a_client_that_ended_its_side_and_takes_nothing_counts_as_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "HALF_CLOSED_IDLE", 0.05)

    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            scene.client.end()
            await asyncio.sleep(0)
            await wait_until(lambda: scene.records.ends())
            assert scene.records.ends() == ["client_closed"]
            assert scene.upstreams[0].closed

    run(test())
