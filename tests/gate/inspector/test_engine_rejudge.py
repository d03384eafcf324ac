"""What is open when the rules change: judged again, ended if it may no longer live, left alone if it may."""

from __future__ import annotations

import time

import pytest

from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from tests.gate.inspector.lab import HOST, entry, run
from tests.gate.inspector.scene import Scene

GET = f"GET /a HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"7\r\ndata: 1\r\n"


def adopt(scene: Scene, *entries: EffectiveEntry) -> None:
    """Put the scene's sandbox under other rules, as the worker does."""
    sandbox = scene.engine.connection.sandbox
    sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=entries))
    for live in tuple(sandbox.live):
        live.rejudge(time.time())


ONLY_B = entry().model_copy(update={"requests": ("GET /b",)})
CONFINED = entry().model_copy(update={"addresses": ("198.51.100.0/24",)})
DENY = EffectiveEntry(
    id="no", place="p.yaml:9", effect="deny", hosts=(HOST,), ports=(), schemes=("https", "http")
)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param((), id="no rule is left"),
        pytest.param((ONLY_B,), id="another path alone is allowed"),
        pytest.param((CONFINED,), id="its address lies outside the rule"),
        pytest.param((entry(), DENY), id="a deny was added"),
    ],
)
def test_a_stream_that_has_begun_is_cut_and_the_record_says_why(entries: tuple[EffectiveEntry, ...]) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            assert await scene.origin_says(HEAD + EVENT) == HEAD + EVENT
            adopt(scene, *entries)
            await scene.settle()
            assert scene.records.ends() == ["policy_changed"]
            assert scene.client.closed
            assert scene.upstreams[0].closed

    run(test())


def test_a_request_that_waits_for_its_answer_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            adopt(scene)
            await scene.settle()
            assert scene.client.written.startswith(b"HTTP/1.1 403 egressd: denied: the rules changed")
            assert scene.records.ends() == ["policy_changed"]

    run(test())


def test_others_do_not_notice() -> None:
    async def test() -> None:
        async with Scene() as scene:
            await scene.says(GET)
            assert await scene.origin_says(HEAD + EVENT) == HEAD + EVENT
            adopt(scene, entry(), DENY.model_copy(update={"hosts": ("other.example.com",)}))
            assert await scene.origin_says(EVENT + b"0\r\n\r\n") == EVENT + b"0\r\n\r\n"
            assert scene.records.ends() == ["completed"]
            adopt(scene)  # idle: nothing to end, the next request is judged by the new rules
            assert not scene.client.closed
            assert (await scene.says(GET)).startswith(b"HTTP/1.1 403 ")

    run(test())


def test_a_rule_with_a_credential_is_never_carried_out_bare() -> None:
    async def test() -> None:
        async with Scene() as scene:
            rule = entry().model_copy(update={"credential": "token", "schemes": ("https",), "ports": (443,)})
            scene.engine.connection.tls = True
            scene.engine.connection.destination.port = 443
            adopt(scene, rule)
            answer = await scene.says(GET)
            assert answer.startswith(b"HTTP/1.1 502 egressd: denied: the credential")
            assert scene.upstreams == []
            assert scene.records.decisions() == [("deny", "credential_unavailable")]

    run(test())
