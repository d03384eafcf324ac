"""Requests under the limits of rules: over one they are answered 429, in the middle of a body they wait or are cut."""

from __future__ import annotations

import asyncio
import json

import pytest

from egressd.gate.limits import Budget
from egressd.policy.attempt import Decision
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, Lab, entry, laboratory, run, wait_until
from tests.gate.inspector.origin import PathOrigin


def rate(amount: int, seconds: int = 10**9) -> Rate:
    """So many, and for the length of a test no more."""
    return Rate(amount=amount, seconds=seconds)


def limited(**limits: object) -> EffectiveEntry:
    return entry(limits=EntryLimits.model_validate(limits))


def ended(lab: Lab) -> tuple[str | None, int, int]:
    """Reason and bytes of the last end."""
    record = lab.records.of("end")[-1]
    return record.reason, record.bytes_up or 0, record.bytes_down or 0


def test_a_request_over_the_limit_is_told_when_to_come_back() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin, limited(requests=Rate(amount=2, seconds=3600))) as lab:
            client = await lab.dial()
            assert [(await client.ask("GET /n")).body for _ in range(2)] == [b"1", b"2"]
            refused = await client.ask("GET /n\nAccept: application/json")
            assert (refused.status, refused.headers["x-egressd-reason"]) == (429, "rate_limited")
            assert 1790 <= int(refused.headers["retry-after"]) <= 1800
            assert json.loads(refused.body)["retry_after"] == int(refused.headers["retry-after"])
            assert await client.closed() == b""
            assert lab.records.decisions() == [("allow", "rule"), ("allow", "rule"), ("deny", "rate_limited")]
            denied = lab.records.of("decision")[-1]
            assert (denied.rule, denied.status, denied.detail) == ("origin", 429, "requests of rule origin")
            assert origin.heads.count(b"GET /n") == 2

    run(test())


def test_a_denied_request_costs_nothing() -> None:
    async def test() -> None:
        rule = limited(requests=rate(1)).model_copy(update={"requests": ("GET /n",)})
        async with laboratory(PathOrigin(), rule) as lab:
            for _ in range(3):
                assert (await (await lab.dial()).ask("GET /other")).status == 403
            assert (await (await lab.dial()).ask("GET /n")).status == 200

    run(test())


def test_the_limit_is_the_sandboxes_not_the_connections() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(requests=rate(3))) as lab:
            answers = [(await (await lab.dial()).ask("GET /n")).status for _ in range(5)]
            assert answers == [200, 200, 200, 429, 429]

    run(test())


def test_limits_bind_also_where_the_profile_only_observes() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            import datetime as dt

            tomorrow = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1)
            lab.sandbox.policy = compile_policy(
                EffectivePolicy(
                    profile="lab",
                    mode="observe",
                    observe_until=tomorrow,
                    limits=EntryLimits(requests=rate(1)),
                )
            )
            assert (await (await lab.dial()).ask("GET /n")).status == 200
            assert (await (await lab.dial()).ask("GET /n")).status == 429
            assert lab.records.decisions() == [("allow", "observed"), ("deny", "rate_limited")]

    run(test())


def test_a_connection_that_is_over_a_limit_is_answered_so() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            connection = lab.connection()
            connection.decision = Decision("deny", Reason.RATE_LIMITED)
            connection.retry_after = 17
            refused = await (await lab.dial(connection)).ask("GET /n")
            assert (refused.status, refused.headers["retry-after"]) == (429, "17")

    run(test())


def test_a_connection_may_carry_no_request_of_a_rule_whose_places_are_taken() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(connections=1)) as lab:
            first, second = await lab.dial(), await lab.dial()
            assert (await first.ask("GET /n")).status == 200
            refused = await second.ask("GET /n")
            assert (refused.status, refused.headers["x-egressd-reason"]) == (429, "too_many_connections")
            assert "retry-after" not in refused.headers
            assert (await first.ask("GET /n")).status == 200

    run(test())


def test_new_hosts_are_counted_by_name() -> None:
    async def test() -> None:
        rule = limited(new_hosts=rate(1)).model_copy(update={"hosts": ("*.test.example",)})
        async with laboratory(PathOrigin(), rule) as lab:
            connection = lab.connection()
            connection.channel = "absolute"
            client = await lab.dial(connection)
            assert (await client.ask(f"GET http://{HOST}/n")).status == 200
            assert (await client.ask(f"GET http://{HOST}/n")).status == 200
            refused = await client.ask("GET http://b.test.example/n", host="b.test.example")
            assert (refused.status, refused.headers["x-egressd-reason"]) == (429, "rate_limited")
            assert len(lab.dialer.dials) == 1

    run(test())


# upload


def test_a_head_counts_and_one_without_room_never_leaves() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin, limited(upload=rate(600))) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /n\nX-Data: " + "a" * 300)).status == 200
            refused = await client.ask("GET /n\nX-Data: " + "b" * 300)
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) > 3600
            assert lab.records.of("decision")[-1].detail == "upload of rule origin"
            assert b"b" * 300 not in origin.heads

    run(test())


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
def test_an_upload_is_cut_where_its_limit_ends(chunked: bool) -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(upload=rate(100_000))) as lab:
            client = await lab.dial()
            body = bytes(400_000)
            if chunked:
                body = b"61a80\r\n" + body + b"\r\n0\r\n\r\n"
            fields = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
            refused = await client.ask(f"POST /echo\n{fields}", body)
            assert (refused.status, refused.headers["x-egressd-reason"]) == (429, "rate_limited")
            assert int(refused.headers["retry-after"]) > 60
            reason, up, _ = ended(lab)
            assert reason == "rate_limited"
            assert up == 100_000, "to the last byte, and no further"
            assert lab.records.decisions() == [("allow", "rule")]
            assert (await (await lab.dial()).ask("GET /n")).status == 429

    run(test())


def test_many_uploads_at_once_do_not_pass_more_than_one_would() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(upload=rate(200_000))) as lab:

            async def upload() -> None:
                client = await lab.dial()
                refused = await client.ask("POST /echo\nContent-Length: 100000", bytes(100_000))
                assert refused.status in (200, 429)

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(upload())
            assert sum(record.bytes_up or 0 for record in lab.records.of("end")) <= 200_000

    run(test())


def test_a_fast_limit_slows_an_upload_down_and_does_not_cut_it() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(upload=Rate(amount=400_000, seconds=1))) as lab:
            client, loop = await lab.dial(), asyncio.get_running_loop()
            began = loop.time()
            answer = await client.ask("POST /echo\nContent-Length: 700000", bytes(700_000))
            assert json.loads(answer.body)["n"] == 700_000
            assert loop.time() - began >= 0.7, "300,000 bytes at 400,000 a second"
            assert (await client.ask("GET /n")).status == 200, "the connection lives on"
            assert lab.records.ends() == ["completed"] * 2

    run(test())


def test_an_answer_that_comes_before_a_slow_upload_is_over_ends_it() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin, limited(upload=Rate(amount=20_000, seconds=1))) as lab:
            client = await lab.dial()
            answer = await client.ask("POST /early\nContent-Length: 60000", bytes(60_000))
            assert (answer.status, answer.body) == (413, b"big")
            assert await client.closed() == b""
            await wait_until(lab.records.ends)
            reason, up, _ = ended(lab)
            assert reason == "completed"
            assert up < 60_000
            origin.go_on.set()

    run(test())


# download


def test_a_download_is_cut_where_its_limit_ends() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin, limited(download=rate(300_000))) as lab:
            client = await lab.dial()
            client.send(f"GET /big HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            answer = await client.head()
            assert answer.status == 200
            body = await client.closed()
            assert 100_000 < len(body) < 300_000
            assert ended(lab)[::2] == ("rate_limited", 300_000)
            await origin.lost.wait()

    run(test())


def test_an_answer_for_which_nothing_is_left_is_an_answer_that_says_so() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(download=rate(10))) as lab:
            refused = await (await lab.dial()).ask("GET /n")
            assert (refused.status, refused.headers["x-egressd-reason"]) == (429, "rate_limited")
            assert ended(lab)[0] == "rate_limited"

    run(test())


@pytest.mark.parametrize("page", ["counted", "nolen", "chunks"])
def test_a_fast_limit_slows_a_download_down_and_does_not_cut_it(page: str) -> None:
    async def test() -> None:
        origin, body = PathOrigin(), bytes(range(250)) * 1200
        origin.canned = {
            "counted": b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + body,
            "nolen": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body,
            "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n493e0\r\n"
            + body
            + b"\r\n0\r\n\r\n",
        }
        async with laboratory(origin, limited(download=Rate(amount=200_000, seconds=1))) as lab:
            client, loop = await lab.dial(), asyncio.get_running_loop()
            began = loop.time()
            answer = await client.ask(f"GET /{page}")
            assert answer.body == body
            assert loop.time() - began >= 0.45, "100,000 bytes at 200,000 a second"
            await wait_until(lab.records.ends)
            assert lab.records.ends() == ["completed"]

    run(test())


def test_what_an_origin_sends_behind_a_slow_answer_is_not_the_next_ones() -> None:
    async def test() -> None:
        origin = PathOrigin()
        late = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
        origin.canned = {"a": b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + bytes(20_000) + late}
        async with laboratory(origin, limited(download=Rate(amount=20_000, seconds=1))) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /a")).body == bytes(20_000)
            assert (await client.ask("GET /n")).body == b"1", "by a connection of its own"

    run(test())


def test_a_cut_while_bytes_wait_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin(), limited(upload=Rate(amount=20_000, seconds=1))) as lab:
            client = await lab.dial()
            client.send(f"POST /echo HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 60000\r\n\r\n".encode())
            client.send(bytes(60_000))
            await wait_until(lambda: lab.engines and lab.engines[0]._pace.holds_up)
            lab.engines[0].cut(Reason.REVOKED)
            await client.task
            reason, up, _ = ended(lab)
            assert (reason, up) == ("revoked", 20_000)
            assert lab.engines[0]._pace._timer is None

    run(test())


def test_a_budget_that_fails_lets_nothing_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            monkeypatch.setattr(Budget, "account", broken)
            refused = await (await lab.dial()).ask("GET /n")
            assert (refused.status, refused.headers["x-egressd-reason"]) == (502, "internal_error")
            assert origin.connections == 0

    run(test())
