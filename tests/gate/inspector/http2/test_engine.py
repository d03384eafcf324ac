"""HTTP/2 as a transcript: allowed streams, what is answered to others, and how streams end, on streams in memory."""

from __future__ import annotations

import asyncio
import time

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from egressd.gate.inspector.upstream import OpenFailed
from egressd.policy.attempt import Decision
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason
from tests.gate.inspector.http2.scene import OTHER, Fields, Scene, tls_entry
from tests.gate.inspector.lab import HOST, run, wait_until


def test_a_request_goes_up_as_it_was_judged_and_its_answer_comes_down() -> None:
    async def test() -> None:
        async with Scene() as scene:
            more = [
                (b"accept", b"*/*"),
                (b"cookie", b"a=1"),
                (b"cookie", b"b=2"),
                (b"te", b"trailers"),
                (b"x-http-method-override", b"DELETE"),
                (b"proxy-authorization", b"Basic x"),
                (b"host", HOST.encode()),
            ]
            answer = await scene.ask("GET", "/a?key=secret", more)
            (asked,) = scene.origin.heard.values()
            assert list(asked.fields.items()) == [
                (b":method", b"GET"),
                (b":scheme", b"https"),
                (b":authority", HOST.encode()),
                (b":path", b"/a?key=secret"),
                (b"accept", b"*/*"),
                (b"cookie", b"a=1; b=2"),  # as hyper-h2 joins them
            ]
            assert asked.ended
            own = [
                (b"x-one", b"1"),
                (b"alt-svc", b"h3"),
                (b"x-egressd-reason", b"rule"),
                (b"set-cookie", b"a"),
            ]
            await scene.answer(1, 200, b"hello", own)
            assert answer.fields == {b":status": b"200", b"x-one": b"1", b"set-cookie": b"a"}
            assert (answer.body, answer.ended) == (b"hello", True)
            decision, end = scene.records.all
            assert (decision.verdict, decision.method, decision.path, decision.query) == (
                "allow",
                "GET",
                "/a",
                "key=<6>",
            )
            assert decision.host_raw is None
            assert (end.reason, end.status, end.upstream, end.bytes_down) == (
                "completed",
                200,
                "93.184.216.34",
                27 + 5,
            )

    run(test())


def test_nothing_is_said_to_the_upstream_before_a_request_is_admitted() -> None:
    async def test() -> None:
        async with Scene() as scene:
            assert scene.origin_stream.written == b""
            assert (await scene.ask("GET", "/", host="evil.example.com")).status == 403
            assert scene.origin_stream.written == b""
            scene.records.gate = asyncio.Event()
            await scene.ask("POST", "/a", end=False)
            scene.client.h2.send_data(3, b"body", end_stream=True)
            await scene.settle()
            assert scene.origin_stream.written == b""
            scene.records.gate.set()
            await wait_until(lambda: scene.origin_stream.written)
            await scene.settle()
            assert scene.origin.heard[1].body == b"body"

    run(test())


def test_streams_share_one_upstream_and_end_in_any_order() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answers = [await scene.ask("GET", f"/{number}") for number in range(20)]
            assert sorted(scene.origin.heard) == list(range(1, 41, 2))
            for stream in reversed(scene.origin.heard):
                await scene.answer(stream, 200, scene.origin.heard[stream].fields[b":path"])
            assert [answer.body.decode() for answer in answers] == [f"/{number}" for number in range(20)]
            assert scene.records.ends() == ["completed"] * 20
            assert len(scene.engine._lanes) == scene.engine._client.streams == 0

    run(test())


REFUSED: dict[str, tuple[Fields, str, int]] = {
    "another path": ([(b":path", b"/no")], "path_not_allowed", 403),
    "another method": ([(b":method", b"DELETE")], "method_not_allowed", 403),
    "TRACE": ([(b":method", b"TRACE")], "method_not_allowed", 403),
    "CONNECT": ([(b":method", b"CONNECT")], "nested_connect", 403),
    "a WebSocket over HTTP/2 (RFC 8441)": (
        [(b":method", b"CONNECT"), (b":protocol", b"websocket")],
        "upgrade_not_allowed",
        403,
    ),
    "another name": ([(b":authority", b"evil.example.com")], "authority_mismatch", 403),
    "TLS-17 another name that is allowed": ([(b":authority", OTHER.encode())], "misdirected_request", 421),
    "a name that is allowed, on another port": (
        [(b":authority", OTHER.encode() + b":8443")],
        "authority_mismatch",
        403,
    ),
    "Host names another": ([(b"host", OTHER.encode())], "authority_mismatch", 403),
    "no name at all": ([(b":authority", b"")], "bad_host", 400),
    "userinfo": ([(b":authority", b"a@" + HOST.encode())], "userinfo_in_authority", 400),
    "another scheme": ([(b":scheme", b"http")], "authority_mismatch", 403),
    "HTTP-06 a path with a space": ([(b":path", b"/a b")], "bad_request", 400),
    "HTTP-06 a path with a line break": ([(b":path", b"/a\r\nHost: evil")], "bad_header", 400),
    "an absolute path": ([(b":path", b"https://origin.test.example/")], "bad_request", 400),
    "a path that is an authority": ([(b":path", b"//evil.example.com/")], "bad_request", 400),
    "no path": ([(b":path", b"")], "bad_request", 400),
    "a method in lower case": ([(b":method", b"get")], "bad_request", 400),
    "an unknown pseudo-header": ([(b":other", b"x")], "bad_header", 400),
    "HTTP-06 a name in capitals": ([(b"X-Big", b"x")], "bad_header", 400),
    "HTTP-06 a value with a line break": ([(b"x-a", b"b\r\nhost: evil")], "bad_header", 400),
    "a value with NUL": ([(b"x-a", b"b\0c")], "bad_header", 400),
    "a value that begins with a space": ([(b"x-a", b" b")], "bad_header", 400),
    "a name with a space": ([(b"x a", b"b")], "bad_header", 400),
    "a name with a line break": ([(b"x-a\r\nhost", b"b")], "bad_header", 400),
    "an empty name": ([(b"", b"b")], "bad_header", 400),
    "HTTP-06 transfer-encoding": ([(b"transfer-encoding", b"chunked")], "bad_header", 400),
    "connection": ([(b"connection", b"close")], "bad_header", 400),
    "upgrade": ([(b"upgrade", b"h2c")], "bad_header", 400),
    "keep-alive": ([(b"keep-alive", b"1")], "bad_header", 400),
    "te with more than trailers": ([(b"te", b"gzip")], "bad_header", 400),
    "an expectation": ([(b"expect", b"magic")], "bad_header", 400),
    "two lengths": ([(b"content-length", b"0"), (b"content-length", b"0")], "bad_framing", 400),
    "a length that is no number": ([(b"content-length", b"+0")], "bad_framing", 400),
    "HTTP-06 a length without a body": ([(b"content-length", b"5")], "bad_framing", 400),
    "a framing field with an underscore": ([(b"content_length", b"5")], "bad_framing", 400),
    "many fields": ([(b"x-%d" % number, b"") for number in range(300)], "head_too_large", 431),
    "a large head": ([(b"x-a", b"x" * 65536)], "head_too_large", 431),
}


@pytest.mark.parametrize(("changes", "reason", "status"), REFUSED.values(), ids=REFUSED)
def test_a_refused_stream_is_answered_and_the_others_live_on(
    changes: Fields, reason: str, status: int
) -> None:
    async def test() -> None:
        rules = (
            tls_entry(requests=("GET,POST,PUT /**",)),
            tls_entry(id="other", hosts=(OTHER,), requests=("GET /x",)),
        )
        rules = (rules[0].model_copy(update={"requests": ("GET,POST,PUT /ok/**", "GET,POST /")}), rules[1])
        async with Scene(*rules, lax=True) as scene:
            first = await scene.ask("POST", "/", end=False)
            fields = {b":method": b"GET", b":scheme": b"https", b":authority": HOST.encode(), b":path": b"/"}
            pseudo = fields | {name: value for name, value in changes if name[:1] == b":"}
            plain = [field for field in changes if field[0][:1] != b":"]
            refused = await scene.ask(
                fields=[*((name, value) for name, value in pseudo.items() if value), *plain]
            )
            assert (refused.status, refused.ended) == (status, True)
            assert refused.fields[b"x-egressd-reason"] == reason.encode()
            assert f"(reason {reason})".encode() in refused.body
            assert b"connection" not in refused.fields
            assert len(scene.origin.heard) == 1
            assert scene.records.decisions()[1:] == [("deny", reason)]
            scene.client.h2.send_data(1, b"on", end_stream=True)
            await scene.settle()
            await scene.answer(1, 200, b"alive")
            assert first.body == b"alive"
            assert sorted(filter(None, scene.records.ends())) == ["completed", "completed"]

    run(test())


def test_pseudo_headers_are_said_once_and_first() -> None:
    async def test() -> None:
        good = [
            (b":method", b"GET"),
            (b":scheme", b"https"),
            (b":authority", HOST.encode()),
            (b":path", b"/"),
        ]
        async with Scene(lax=True) as scene:
            for fields in (
                [*good, (b":path", b"/")],
                [*good[:3], (b"x-a", b"b"), good[3]],
                good[:3],
                good[1:],
            ):
                answer = await scene.ask(fields=fields)
                assert (answer.status, answer.ended) == (400, True)
            assert scene.origin.heard == {}
            assert len(scene.records.decisions()) == 4

    run(test())


LENGTHS = {
    "too little": (b"5", [b"abc"], True),
    "too much": (b"5", [b"abc", b"def"], False),
    "too much at once": (b"0", [b"a"], False),
}


@pytest.mark.parametrize(("length", "pieces", "end"), LENGTHS.values(), ids=LENGTHS)
def test_a_body_of_another_length_than_declared_is_refused_and_never_ends_upstream(
    length: bytes, pieces: list[bytes], end: bool
) -> None:
    async def test() -> None:
        async with Scene(lax=True) as scene:
            answer = await scene.ask("POST", "/a", [(b"content-length", length)], end=False)
            for number, piece in enumerate(pieces):
                scene.client.h2.send_data(1, piece, end_stream=end and number == len(pieces) - 1)
                await scene.settle()
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (400, b"bad_framing")
            (asked,) = scene.origin.heard.values()
            assert not asked.ended
            assert asked.reset == ErrorCodes.CANCEL
            assert len(asked.body) <= int(length)
            assert scene.records.ends() == ["bad_framing"]

    run(test())


def test_a_get_with_a_body_is_refused_before_anything_of_it_leaves() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask("GET", "/a", end=False)
            assert answer.status == 0  # whether a body follows is still to be seen
            scene.client.h2.send_data(1, b"", end_stream=False)
            await scene.settle()
            scene.client.h2.send_data(1, b"secrets", end_stream=True)
            await scene.settle()
            assert answer.fields[b"x-egressd-reason"] == b"body_not_allowed"
            assert scene.origin.heard == {}

    run(test())


def test_a_get_that_ends_with_an_empty_frame_has_no_body() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask("GET", "/a", end=False)
            scene.client.h2.send_data(1, b"", end_stream=True)
            await scene.settle()
            assert scene.origin.heard[1].ended
            await scene.answer(1, 204)
            assert answer.status == 204

    run(test())


def test_a_body_is_invited_only_once_it_was_judged() -> None:
    async def test() -> None:
        async with Scene(tls_entry(requests=("POST /a",))) as scene:
            expect = [(b"expect", b"100-continue"), (b"content-length", b"4")]
            invited = await scene.ask("POST", "/a", expect, end=False)
            refused = await scene.ask("POST", "/b", expect, end=False)
            assert [head[b":status"] for head in invited.interim] == [b"100"]
            assert (refused.status, refused.interim, refused.reset) == (403, [], None)
            assert b"expect" not in scene.origin.heard[1].fields
            scene.client.h2.send_data(1, b"body", end_stream=True)
            await scene.settle()
            assert scene.origin.heard[1].body == b"body"

    run(test())


def test_hints_pass_and_continue_is_dropped() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            for status, more in ((b"100", []), (b"103", [(b"link", b"</a>"), (b"alt-svc", b"h3")])):
                scene.origin.h2.send_headers(1, [(b":status", status), *more])
            await scene.answer(1, 200, b"final")
            assert answer.interim == [{b":status": b"103", b"link": b"</a>"}]
            assert answer.body == b"final"

    run(test())


def test_trailers_of_responses_pass_filtered() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            scene.origin.h2.send_data(1, b"body")
            trailers = [(b"x-sum", b"1"), (b"set-cookie", b"a=b"), (b"x-egressd-reason", b"rule")]
            scene.origin.h2.send_headers(1, trailers, end_stream=True)
            await scene.settle()
            assert (answer.body, answer.trailers, answer.ended) == (b"body", {b"x-sum": b"1"}, True)

    run(test())


@pytest.mark.parametrize("grpc", [False, True])
def test_trailers_of_requests_pass_for_grpc_alone(grpc: bool) -> None:
    async def test() -> None:
        async with Scene() as scene:
            kind = b"application/grpc+proto" if grpc else b"text/plain"
            await scene.ask("POST", "/a", [(b"content-type", kind)], end=False)
            scene.client.h2.send_data(1, b"body")
            trailers = [
                (b"x-sum", b"1"),
                (b"authorization", b"x"),
                (b"x-http-method", b"PUT"),
                (b"cookie", b"c"),
            ]
            scene.client.h2.send_headers(1, trailers, end_stream=True)
            await scene.settle()
            asked = scene.origin.heard[1]
            assert asked.ended
            assert asked.trailers == ({b"x-sum": b"1"} if grpc else None)
            assert asked.fields.get(b"te") == (b"trailers" if grpc else None)
            await scene.answer(1, 204)
            assert scene.records.of("end")[0].detail == "request trailers dropped"

    run(test())


BAD_ANSWERS: dict[str, Fields] = {
    "no status": [(b"x-a", b"b")],
    "a status of two digits": [(b":status", b"20")],
    "101": [(b":status", b"101")],
    "a request's pseudo-header": [(b":status", b"200"), (b":path", b"/")],
    "a name in capitals": [(b":status", b"200"), (b"X-A", b"b")],
    "a value with a line break": [(b":status", b"200"), (b"x-a", b"b\r\nc")],
    "transfer-encoding": [(b":status", b"200"), (b"transfer-encoding", b"chunked")],
    "two lengths": [(b":status", b"200"), (b"content-length", b"1"), (b"content-length", b"2")],
}


@pytest.mark.parametrize("fields", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_malformed_answer_is_none_and_the_others_are_heard(fields: Fields) -> None:
    async def test() -> None:
        async with Scene(lax=True) as scene:
            answer, other = await scene.ask(), await scene.ask()
            scene.origin.h2.send_headers(1, fields)
            await scene.settle()
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"upstream_protocol")
            assert scene.origin.heard[1].reset == ErrorCodes.CANCEL
            await scene.answer(3, 200, b"fine")
            assert other.body == b"fine"
            assert scene.records.ends() == ["upstream_protocol", "completed"]

    run(test())


def test_an_answer_of_another_length_than_declared_is_cut() -> None:
    async def test() -> None:
        for data, end in ((b"abc", True), (b"abcdefgh", False)):
            async with Scene() as scene:
                answer = await scene.ask()
                scene.origin.h2.send_headers(1, [(b":status", b"200"), (b"content-length", b"5")])
                await scene.settle()
                scene.origin.h2.send_data(1, data, end_stream=end)
                await scene.settle()
                assert (answer.status, answer.ended, answer.reset) == (200, False, ErrorCodes.INTERNAL_ERROR)
                assert len(answer.body) <= 5
                assert scene.records.ends() == ["upstream_protocol"]

    run(test())


def test_a_body_where_none_can_be_is_no_answer() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask("HEAD")
            scene.origin.h2.send_headers(1, [(b":status", b"200"), (b"content-length", b"5")])
            scene.origin.h2.send_data(1, b"abcde")
            await scene.settle()
            assert (answer.body, answer.reset) == (b"", None)
            assert answer.fields[b"x-egressd-reason"] == b"upstream_protocol"

    run(test())


def test_head_and_304_keep_their_length() -> None:
    async def test() -> None:
        async with Scene() as scene:
            for method, status in (("HEAD", b"200"), ("GET", b"304")):
                answer = await scene.ask(method)
                stream = max(scene.origin.heard)
                scene.origin.h2.send_headers(
                    stream, [(b":status", status), (b"content-length", b"99")], end_stream=True
                )
                await scene.settle()
                assert (answer.fields[b"content-length"], answer.ended) == (b"99", True)

    run(test())


def test_an_answer_before_the_end_of_its_request_stops_the_upload() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask("POST", "/a", end=False)
            scene.client.h2.send_data(1, b"part")
            await scene.settle()
            await scene.answer(1, 413, b"too large")
            assert (answer.status, answer.body, answer.ended) == (413, b"too large", True)
            scene.client.h2.send_data(1, b"the rest", end_stream=True)
            await scene.settle()
            assert answer.reset is None, "who is reset while sending may not show the answer"
            assert scene.origin.heard[1].body == b"part"
            (end,) = scene.records.of("end")
            assert (end.reason, end.detail) == ("completed", "answered before the end of the request")
            assert scene.origin.heard[1].reset is not None

    run(test())


def test_a_request_that_is_given_up_is_given_up_upstream() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.ask("POST", "/a", end=False)
            scene.client.h2.reset_stream(1, ErrorCodes.CANCEL)
            await scene.settle()
            assert scene.origin.heard[1].reset == ErrorCodes.CANCEL
            assert scene.records.ends() == ["client_closed"]
            assert (await scene.ask()).reset is None

    run(test())


def test_a_request_that_is_given_up_before_it_was_admitted_never_leaves() -> None:
    async def test() -> None:
        async with Scene() as scene:
            stream = scene.client.asks()
            scene.client.h2.reset_stream(stream)
            await scene.settle()
            assert scene.origin_stream.written == b""
            assert scene.records.decisions() == [("deny", "client_closed")]
            assert scene.records.ends() == ["client_closed"]

    run(test())


RESETS = {
    "refused: the client may ask again": (ErrorCodes.REFUSED_STREAM, None, ErrorCodes.REFUSED_STREAM),
    "wants HTTP/1.1": (ErrorCodes.HTTP_1_1_REQUIRED, None, ErrorCodes.HTTP_1_1_REQUIRED),
    "an error": (ErrorCodes.INTERNAL_ERROR, 502, None),
    "no error": (ErrorCodes.NO_ERROR, 502, None),
}


@pytest.mark.parametrize(("code", "status", "reset"), RESETS.values(), ids=RESETS)
def test_a_stream_that_the_origin_resets(
    code: ErrorCodes, status: int | None, reset: ErrorCodes | None
) -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            scene.origin.h2.reset_stream(1, code)
            await scene.settle()
            assert (answer.status or None, answer.reset) == (status, reset)
            assert scene.records.ends() == ["upstream_closed"]

    run(test())


def test_a_reset_in_the_middle_of_an_answer_is_passed_on() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            scene.origin.h2.send_data(1, b"part")
            await scene.settle()
            scene.origin.h2.reset_stream(1, ErrorCodes.ENHANCE_YOUR_CALM)
            await scene.settle()
            assert (answer.body, answer.reset) == (b"part", ErrorCodes.ENHANCE_YOUR_CALM)

    run(test())


def test_an_upstream_that_drains_ends_the_connection_after_what_it_still_answers() -> None:
    async def test() -> None:
        async with Scene() as scene:
            first, second = await scene.ask(), await scene.ask()
            scene.origin_stream.arrive(goaway(last=1))
            await scene.settle()
            assert second.reset == ErrorCodes.REFUSED_STREAM
            assert not scene.client.told_to_go()  # not yet: there are clients that hear nothing after it
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            scene.origin.h2.send_data(1, b"x" * 1000, end_stream=True)
            await scene.settle()
            assert (first.body, first.ended) == (b"x" * 1000, True)
            assert scene.client.told_to_go()
            assert sorted(filter(None, scene.records.ends())) == ["completed", "upstream_closed"]
            assert scene.client_stream.state == "lingering"

    run(test())


def test_requests_that_wait_for_an_upstream_that_drains_are_asked_elsewhere() -> None:
    async def test() -> None:
        async with Scene() as scene:
            first = await scene.ask()
            scene.origin.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1})
            await scene.settle()
            waiting = await scene.ask()
            scene.origin_stream.arrive(goaway(last=1))
            await scene.settle()
            assert waiting.reset == ErrorCodes.REFUSED_STREAM
            await scene.answer(1, 200, b"last")
            assert first.body == b"last"
            assert len(scene.origin.heard) == 1

    run(test())


def goaway(last: int, code: int = 0) -> bytes:
    return b"\0\0\x08\x07\0\0\0\0\0" + last.to_bytes(4) + code.to_bytes(4)


def test_an_upstream_that_closes_between_requests_ends_the_connection() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            await scene.answer(1, 200, b"ok")
            assert answer.ended
            scene.origin_stream.end()
            await scene.settle()
            assert scene.client.goaway is not None
            assert scene.client.goaway.error_code == ErrorCodes.NO_ERROR
            assert scene.client_stream.state == "lingering"

    run(test())


def test_an_upstream_that_is_lost_fails_what_it_had_not_answered() -> None:
    async def test() -> None:
        async with Scene() as scene:
            answer = await scene.ask()
            scene.origin_stream.lose()
            await scene.settle()
            assert scene.records.ends() == ["upstream_closed"]
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"upstream_closed")
            assert scene.client_stream.state == "lingering"

    run(test())


def test_one_that_was_gone_before_the_first_request_makes_the_client_ask_again() -> None:
    async def test() -> None:
        async with Scene() as scene:
            scene.origin_stream.state = "lost"
            answer = await scene.ask()
            assert answer.reset == ErrorCodes.REFUSED_STREAM
            assert scene.records.ends() == ["upstream_closed"]
            assert scene.client_stream.state == "lingering"

    run(test())


def test_an_upstream_that_could_not_be_reached_is_told_to_every_stream() -> None:
    async def test() -> None:
        async with Scene(opened=OpenFailed(Reason.UPSTREAM_TLS, "certificate: expired")) as scene:
            answer = await scene.ask()
            assert (answer.status, answer.fields[b"x-egressd-reason"]) == (502, b"upstream_tls")
            assert scene.records.decisions() == [("allow", "rule")]
            assert [(end.reason, end.status) for end in scene.records.of("end")] == [("upstream_tls", 502)]
            assert scene.client_stream.state == "lingering"
            assert scene.client.goaway is not None

    run(test())


def test_a_denied_connection_is_explained_on_every_stream_and_ends_then() -> None:
    """Its decision is of the time when it was made: who asks again later shall be judged again."""

    async def test() -> None:
        denied = Decision("deny", Reason.NOT_ALLOWED)
        async with Scene(decision=denied, opened=None) as scene:
            for _ in range(3):
                scene.client.asks("GET", "/", [(b"accept", b"application/json")])
            await scene.settle()
            for answer in scene.client.heard.values():
                assert (answer.status, answer.fields[b"content-type"]) == (403, b"application/json")
            assert scene.records.decisions() == [("deny", "not_allowed")] * 3
            assert scene.origin_stream.written == b""
            assert scene.client.told_to_go()
            assert scene.client_stream.state == "lingering"

    run(test())


def test_rules_that_change_end_the_streams_they_no_longer_allow_and_no_other() -> None:
    async def test() -> None:
        async with Scene() as scene:
            begun, waiting, kept = (
                await scene.ask("GET", "/a"),
                await scene.ask("GET", "/b"),
                await scene.ask("GET", "/keep"),
            )
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            scene.origin.h2.send_data(1, b"part")
            await scene.settle()
            rules = (tls_entry(requests=("GET /keep",)),)
            scene.sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=rules))
            for live in tuple(scene.sandbox.live):
                live.rejudge(time.time())
            await scene.settle()
            assert (begun.status, begun.reset) == (200, ErrorCodes.CANCEL)
            assert (waiting.status, waiting.fields[b"x-egressd-reason"]) == (403, b"policy_changed")
            assert kept.status == 0
            await scene.answer(5, 200, b"kept")
            assert kept.body == b"kept"
            assert scene.records.ends() == ["policy_changed", "policy_changed", "completed"]

    run(test())


def test_a_cut_ends_every_stream_once() -> None:
    async def test() -> None:
        async with Scene() as scene:
            for _ in range(3):
                await scene.ask("POST", "/a", end=False)
            scene.engine.cut(Reason.REVOKED)
            scene.engine.cut(Reason.SHUTDOWN)
            assert scene.records.ends() == ["revoked"] * 3
            assert (scene.client_stream.state, scene.origin_stream.state) == ("aborted", "aborted")

    run(test())


def test_a_client_that_goes_ends_every_stream_on_both_sides() -> None:
    async def test() -> None:
        for how in ("end", "lose"):
            async with Scene() as scene:
                await scene.ask()
                getattr(scene.client_stream, how)()
                await scene.settle()
                assert scene.records.ends() == ["client_closed"]
                assert scene.origin_stream.closed

    run(test())


@pytest.mark.parametrize("content_type", [b"application/grpc", b"application/grpc+proto"])
def test_a_denied_call_gets_a_status_of_grpcs_own(content_type: bytes) -> None:
    async def test() -> None:
        async with Scene(tls_entry(requests=("POST /lab.Echo/Say",))) as scene:
            answer = await scene.ask("POST", "/lab.Echo/Other", [(b"content-type", content_type)], end=False)
            assert (answer.status, answer.fields[b"grpc-status"], answer.ended) == (200, b"7", True)
            assert answer.fields[b"grpc-message"].startswith(
                b"egressd: denied: this path of the host is not allowed"
            )
            assert answer.fields[b"x-egressd-reason"] == b"path_not_allowed"
            assert answer.body == b""

    run(test())


def test_a_call_whose_upstream_fails_is_unavailable() -> None:
    async def test() -> None:
        async with Scene(opened=OpenFailed(Reason.UPSTREAM_UNREACHABLE, "")) as scene:
            call = await scene.ask("POST", "/a/b", [(b"content-type", b"application/grpc")], end=False)
            assert call.fields[b"grpc-status"] == b"14"
            assert scene.records.ends() == ["upstream_unreachable"]

    run(test())


def test_a_call_that_is_cut_in_the_middle_ends_with_a_status() -> None:
    async def test() -> None:
        async with Scene() as scene:
            call = await scene.ask("POST", "/a/b", [(b"content-type", b"application/grpc")], end=False)
            scene.origin.h2.send_headers(1, [(b":status", b"200"), (b"content-type", b"application/grpc")])
            scene.origin.h2.send_data(1, b"\0\0\0\0\x01a")
            await scene.settle()
            scene.sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=()))
            scene.engine.rejudge(time.time())
            await scene.settle()
            assert call.trailers is not None
            assert call.trailers[b"grpc-status"] == b"7"
            assert b"policy_changed" in call.trailers[b"grpc-message"]
            assert scene.records.ends() == ["policy_changed"]

    run(test())
