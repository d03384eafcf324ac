"""Credentials on the streams of one HTTP/2 connection: each has its own, or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from egressd.credentials.lease import Lease
from egressd.policy.compile import compile_policy
from egressd.policy.credential import Attach, Placeholder
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from tests.gate.inspector.http2.scene import Answer, Scene
from tests.gate.inspector.lab import run
from tests.gate.inspector.lender import BEARER, DUMMY, SECRET, Lender, keyed, lease_of

PLACED = Attach(placeholder=Placeholder(variable="KEY", headers=["x-key"]))


@asynccontextmanager
async def scene_of(lender: Lender, *entries: EffectiveEntry, verified: bool = True) -> AsyncIterator[Scene]:
    scene = Scene(*(entries or (keyed(),))) if verified else Scene(*(entries or (keyed(),)), context=None)
    lender.serve(scene.sandbox, scene.connection.services)
    async with scene:
        yield scene


def asked_of(scene: Scene, stream: int = 1) -> dict[bytes, bytes]:
    return scene.origin.heard[stream].fields


def nothing_left(scene: Scene) -> None:
    assert SECRET.encode() not in scene.origin_stream.written
    assert scene.origin.heard == {}
    assert all(SECRET not in str(record.as_dict()) for record in scene.records.all)


def test_the_origin_gets_the_credential_and_none_of_the_sandboxs_own() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of())) as scene:
            own = [
                (b"x-api-key", b"sk-own"),
                (b"cookie", b"a=sk-own"),
                (b"cookie", b"b=c"),
                (b"range", b"bytes=0-1"),
            ]
            await scene.ask("GET", "/v1/x?api_key=sk-own&a=b", own)
            fields = asked_of(scene)
            assert fields[b":path"] == b"/v1/x?a=b"
            assert fields[b"authorization"] == b"Bearer " + SECRET.encode()
            assert fields[b"accept-encoding"] == b"identity"
            assert not fields.keys() & {b"x-api-key", b"cookie", b"range"}
            await scene.answer(1, body=b"ok")
            assert scene.client.heard[1].status == 200
            assert scene.records.ends() == ["completed"]

    run(test())


def test_streams_at_once_share_one_question_and_each_gets_it() -> None:
    async def test() -> None:
        lender = Lender(lease_of())
        async with scene_of(lender) as scene:
            streams = [scene.client.asks("GET", f"/{number}") for number in range(10)]
            await scene.settle()
            assert {asked_of(scene, stream)[b"authorization"] for stream in streams} == {
                b"Bearer " + SECRET.encode()
            }
            assert len(lender.asked) == 1

    run(test())


def test_another_rule_on_the_same_connection_gets_none() -> None:
    async def test() -> None:
        entries = keyed(requests=("GET /v1/**",)), keyed(id="bare", credential=None, requests=("GET /bare",))
        async with scene_of(Lender(lease_of()), *entries) as scene:
            await scene.ask("GET", "/v1/x")
            await scene.ask("GET", "/bare", [(b"authorization", b"Bearer own")])
            assert asked_of(scene, 1)[b"authorization"] == b"Bearer " + SECRET.encode()
            assert asked_of(scene, 3)[b"authorization"] == b"Bearer own"

    run(test())


@pytest.mark.parametrize(
    "lease",
    [None, OSError(SECRET), lease_of(sandbox="sb-2"), lease_of(expires=1.0)],
    ids=["control says no", "control is gone", "another sandbox's", "expired"],
)
def test_without_a_lease_nothing_leaves(lease: Lease | BaseException | None) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease)) as scene:
            answer = await scene.ask("GET", "/v1/x")
            assert answer.status == 502
            assert answer.fields[b"x-egressd-reason"] == b"credential_unavailable"
            nothing_left(scene)

    run(test())


def test_nothing_leaves_over_an_upstream_that_was_not_verified() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of()), verified=False) as scene:
            answer = await scene.ask("GET", "/v1/x")
            assert answer.fields[b"x-egressd-reason"] == b"credential_needs_tls"
            nothing_left(scene)

    run(test())


def test_a_placeholder_in_a_body_ends_its_stream_and_no_other() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(PLACED))) as scene:
            own = [(b"x-key", DUMMY.encode())]
            stream = scene.client.asks("POST", "/v1/x", own, end=False)
            await scene.settle()
            for piece in (b"key=" + DUMMY[:9].encode(), DUMMY[9:].encode()):
                scene.client.h2.send_data(stream, piece)
                await scene.settle()
            assert scene.client.heard[stream].fields[b"x-egressd-reason"] == b"placeholder_leak"
            assert DUMMY.encode() not in scene.origin_stream.written
            await scene.ask("GET", "/v1/y", own)
            assert asked_of(scene, 3)[b"x-key"] == SECRET.encode()

    run(test())


def test_trailers_of_a_call_are_dropped() -> None:
    """gRPC's trailers pass elsewhere; here one could be a key."""

    async def test() -> None:
        async with scene_of(Lender(lease_of())) as scene:
            grpc = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
            stream = scene.client.asks("POST", "/a.B/C", grpc, end=False)
            await scene.settle()
            scene.client.h2.send_data(stream, b"\0\0\0\0\0")
            scene.client.h2.send_headers(stream, [(b"x-api-key", b"sk-own")], end_stream=True)
            await scene.settle()
            assert asked_of(scene)[b"authorization"] == b"Bearer " + SECRET.encode()
            assert scene.origin.heard[1].trailers is None
            assert scene.origin.heard[1].ended

    run(test())


def test_a_lease_that_is_taken_back_ends_its_streams() -> None:
    async def test() -> None:
        lender = Lender(lease_of(BEARER))
        async with scene_of(lender) as scene:
            await scene.ask("GET", "/v1/x")
            scene.origin.h2.send_headers(1, [(b":status", b"200")])
            await scene.settle()
            scene.engine.rejudge(time.time() + 7200)
            assert scene.records.ends() == []
            lender.leases.withdraw("lease-1")
            scene.engine.rejudge(time.time())
            await scene.settle()
            assert scene.records.ends() == ["policy_changed"]

    run(test())


def test_a_reload_while_the_lease_is_asked_for_sends_nothing() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow() -> Lease:
            await go.wait()
            return lease_of()

        async with scene_of(Lender(slow)) as scene:
            stream = scene.client.asks("GET", "/v1/x")
            await scene.settle()
            scene.sandbox.policy = compile_policy(
                EffectivePolicy(profile="lab", entries=(keyed(credential="other"),))
            )
            go.set()
            await scene.settle()
            assert scene.client.heard[stream].fields[b"x-egressd-reason"] == b"policy_changed"
            assert scene.records.decisions() == [("deny", "policy_changed")]
            nothing_left(scene)

    run(test())


S3 = Attach.model_validate({"sigv4": {"service": "s3", "region": "eu-west-1"}})
STS = Attach.model_validate({"sigv4": {"service": "sts", "region": "us-east-1"}})


async def upload(scene: Scene, stream: int, body: bytes) -> None:
    """Send a body as the windows allow, and end the stream."""
    while body:
        room = min(scene.client.h2.local_flow_control_window(stream), 16384, len(body))
        assert room > 0, "the window is never given back"
        scene.client.h2.send_data(stream, body[:room], end_stream=room == len(body))
        body = body[room:]
        await scene.settle()


def test_a_body_that_must_be_seen_is_kept_though_it_is_longer_than_the_window() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(STS))) as scene:
            stream = scene.client.asks("POST", "/", [(b"x-amz-date", b"own")], end=False)
            await scene.settle()
            body = b"Action=GetCallerIdentity&x=" + b"y" * 600_000
            await upload(scene, stream, body)
            assert scene.origin.heard[1].body == body
            assert b"AKIDREAL" in asked_of(scene)[b"authorization"]
            assert asked_of(scene)[b"content-length"] == str(len(body)).encode()
            await scene.answer(1, body=b"ok")
            assert scene.client.heard[stream].status == 200
            assert scene.sandbox.signing == 0

    run(test())


def test_a_body_that_came_before_the_lease_is_signed_too() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow() -> Lease:
            await go.wait()
            return lease_of(STS)

        async with scene_of(Lender(slow)) as scene:
            stream = scene.client.asks("POST", "/", end=False)
            scene.client.h2.send_data(stream, b"Action=GetCallerIdentity", end_stream=True)
            await scene.settle()
            go.set()
            await scene.settle()
            assert scene.origin.heard[1].body == b"Action=GetCallerIdentity"
            assert scene.origin.heard[1].ended

    run(test())


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"Action=AssumeRole", b"token_request"), (b"x" * (1024 * 1024 + 1), b"unsignable")],
    ids=["one that asks for keys", "one that is too large"],
)
def test_a_body_that_is_not_signed(body: bytes, reason: bytes) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(STS))) as scene:
            stream = scene.client.asks("POST", "/", end=False)
            await scene.settle()
            left = body
            while left and not (scene.client.heard.get(stream) or Answer()).fields:
                room = min(scene.client.h2.local_flow_control_window(stream), 16384, len(left))
                scene.client.h2.send_data(stream, left[:room], end_stream=room == len(left))
                left = left[room:]
                await scene.settle()
            assert scene.client.heard[stream].fields[b"x-egressd-reason"] == reason
            nothing_left(scene)
            assert scene.sandbox.signing == 0

    run(test())


def test_signed_chunks_longer_than_the_window_are_signed_anew() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(S3))) as scene:
            chunks = (b"a" * 700_000, b"b" * 300_000, b"c", b"")
            body = b"".join(
                b"%x;chunk-signature=%s\r\n%s\r\n" % (len(chunk), b"0" * 64, chunk) for chunk in chunks
            )
            fields = [
                (b"x-amz-content-sha256", b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
                (b"content-length", str(len(body)).encode()),
            ]
            stream = scene.client.asks("PUT", "/b/k", fields, end=False)
            await scene.settle()
            await upload(scene, stream, body)
            await scene.settle()
            heard = scene.origin.heard[1]
            assert len(heard.body) == len(body)
            assert heard.ended
            assert b"0" * 64 not in heard.body
            await scene.answer(1, body=b"ok")
            assert scene.records.ends() == ["completed"]
            assert scene.sandbox.signing == 0

    run(test())


def test_a_slow_origin_holds_an_upload_of_signed_chunks_up() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(S3))) as scene:
            scene.origin.acknowledges = False
            fields = [(b"x-amz-content-sha256", b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD")]
            stream = scene.client.asks("PUT", "/b/k", fields, end=False)
            await scene.settle()
            chunk = b"%x;chunk-signature=%s\r\n%s\r\n" % (500_000, b"0" * 64, b"a" * 500_000)
            sent = 0
            pending = b""
            while (
                room := min(scene.client.h2.local_flow_control_window(stream), 16384)
            ) > 0 and sent < 8_000_000:
                pending = pending or chunk
                piece, pending = pending[:room], pending[room:]
                scene.client.h2.send_data(stream, piece)
                sent += len(piece)
                await scene.settle()
            assert sent < 2_000_000, "what waits is bounded"

    run(test())
