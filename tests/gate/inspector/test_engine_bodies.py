"""A rule that asks for a body: nothing of a request leaves before all of its body was looked into (HTTP/1)."""

from __future__ import annotations

import pytest

from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from tests.gate.inspector.lab import HOST, entry, run
from tests.gate.inspector.scene import Scene

GOOD = b'{"operation": "download"}'
BAD = b'{"operation": "upload"}'
JSON = "Content-Type: application/json"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def looks(*conditions: tuple[str, tuple[str, ...]]) -> EffectiveEntry:
    body = conditions or (("operation", ("download",)),)
    return entry(requests=("POST,PUT /batch?",), body=body)


def head(*fields: str, method: str = "POST") -> bytes:
    return "\r\n".join((f"{method} /batch HTTP/1.1", f"Host: {HOST}", *fields, "", "")).encode()


def sized(body: bytes, *fields: str) -> bytes:
    return head(*(fields or (JSON,)), f"Content-Length: {len(body)}") + body


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head(JSON, "Transfer-Encoding: chunked") + framed + b"0\r\n\r\n"


def sent(scene: Scene) -> bytes:
    """What has left, to whomever."""
    return b"".join(upstream.written for upstream in scene.upstreams)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(sized(GOOD), id="of a length"),
        pytest.param(chunked(GOOD), id="one chunk"),
        pytest.param(chunked(*(bytes([one]) for one in GOOD)), id="a chunk for each byte"),
    ],
)
@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
def test_a_body_that_matches_goes_on_as_it_was_judged(request_: bytes, bytewise: bool) -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            for piece in [bytes([one]) for one in request_[:-1]] if bytewise else [request_[:-1]]:
                await scene.says(piece)
                assert GOOD not in sent(scene)
            if b"chunked" in request_:
                assert sent(scene) == b""
            await scene.says(request_[-1:])
            upstream = scene.upstreams[0].written
            assert upstream.endswith(b"\r\n\r\n" + GOOD)
            assert b"content-length: %d\r\n" % len(GOOD) in upstream.lower()
            assert b"transfer-encoding" not in upstream.lower()
            assert await scene.origin_says(ANSWER) == ANSWER
            assert scene.records.decisions() == [("allow", "rule")]
            assert scene.records.ends() == ["completed"]

    run(test())


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(sized(BAD), id="another value"),
        pytest.param(chunked(BAD), id="in a chunk"),
        pytest.param(chunked(GOOD, BAD), id="a second document in a second chunk"),
        pytest.param(sized(b""), id="nothing"),
        pytest.param(head(JSON), id="no body at all"),
        pytest.param(sized(GOOD, "Content-Type: text/plain"), id="another type"),
        pytest.param(sized(GOOD, JSON, "Content-Encoding: gzip"), id="said to be coded"),
        pytest.param(sized(GOOD, JSON, "Content-Type: text/plain"), id="two types"),
        pytest.param(sized(b'{"operation":"download","Operation":"upload"}'), id="a key twice"),
        pytest.param(sized(b"[" + GOOD + b"]"), id="a batch"),
        pytest.param(chunked(b" " * 40_000, b" " * 30_000 + GOOD), id="too large, in chunks"),
        pytest.param(head(JSON, "Content-Length: 70000") + GOOD, id="too large, by its length"),
    ],
)
def test_nothing_leaves_of_a_body_that_does_not(request_: bytes) -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            answer = await scene.says(request_)
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert b"x-egressd-reason: body_mismatch" in answer.lower()
            assert b"upload" not in answer
            assert sent(scene) == b""
            ends = scene.records.of("end")
            assert len(ends) == 1
            refused = [record for record in scene.records.all if record.verdict == "deny"]
            assert "body_mismatch" in [record.reason for record in refused]
            assert BAD.decode() not in str([record.as_dict() for record in scene.records.all])

    run(test())


def test_a_chunk_that_lies_about_its_length_ends_it() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            broken = head(JSON, "Transfer-Encoding: chunked") + b"5\r\n" + GOOD + b"\r\n0\r\n\r\n"
            assert (await scene.says(broken)).startswith(b"HTTP/1.1 400 ")
            assert sent(scene) == b""

    run(test())


def test_a_length_beside_chunks_is_no_request() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            both = head(JSON, "Transfer-Encoding: chunked", f"Content-Length: {len(GOOD)}") + GOOD
            assert (await scene.says(both)).startswith(b"HTTP/1.1 400 ")
            assert scene.upstreams == []

    run(test())


def test_a_client_that_waits_to_be_invited_is() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            expecting = head(JSON, f"Content-Length: {len(GOOD)}", "Expect: 100-continue")
            assert await scene.says(expecting) == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert sent(scene) == b""
            await scene.says(GOOD)
            upstream = scene.upstreams[0].written
            assert upstream.endswith(GOOD)
            assert b"expect" not in upstream.lower()
            assert await scene.origin_says(ANSWER) == ANSWER

    run(test())


def test_a_client_that_waits_to_be_invited_with_a_body_that_cannot_match_is_not() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            expecting = head("Content-Type: text/plain", "Content-Length: 3", "Expect: 100-continue")
            assert (await scene.says(expecting)).startswith(b"HTTP/1.1 403 ")
            assert scene.upstreams == []

    run(test())


def test_one_that_leaves_in_the_middle_has_sent_nothing() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            await scene.says(sized(GOOD)[:-1])
            scene.client.end()
            await scene.settle()
            assert sent(scene) == b""
            assert scene.records.ends() == ["bad_framing"] or scene.records.ends() == ["client_closed"]

    run(test())


def test_rules_that_ask_for_another_body_meanwhile_end_it() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            await scene.says(sized(GOOD)[:-1])
            other = looks(("operation", ("download",)), ("ref", ("main",)))
            sandbox = scene.engine.connection.sandbox
            sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=(other,)))
            scene.engine.rejudge(0.0)
            await scene.says(GOOD[-1:])
            assert sent(scene) == b""
            assert scene.records.ends() == ["policy_changed"]

    run(test())


def test_the_next_request_on_the_connection_is_judged_by_itself() -> None:
    async def test() -> None:
        async with Scene(looks()) as scene:
            await scene.says(sized(GOOD))
            await scene.origin_says(ANSWER)
            before = sent(scene)
            assert (await scene.says(sized(BAD))).startswith(b"HTTP/1.1 403 ")
            assert sent(scene) == before

    run(test())


def test_the_rule_that_decides_by_its_path_asks_no_other_rule() -> None:
    async def test() -> None:
        wide = entry(id="wide", requests=("POST /**",))
        async with Scene(looks(), wide) as scene:
            assert (await scene.says(sized(BAD))).startswith(b"HTTP/1.1 403 ")
            assert sent(scene) == b""

    run(test())
