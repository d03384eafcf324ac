"""Whatever raises, nothing is let out by it: each hook, each layer and the record itself are made to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from mitmproxy import http

from egressd.gate.inspector import addon, engine, layers, turn, uplink
from egressd.gate.inspector.addon import PolicyAddon
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.http1 import origin_side, sandbox_side
from tests.gate.inspector.lab import HOST, Lab, laboratory, run
from tests.gate.inspector.origin import PathOrigin


class Fault(Exception):
    """Something nobody planned for."""


def fail(*_: object, **__: object) -> Any:
    raise Fault


async def fail_later(*_: object) -> None:
    await asyncio.sleep(0)
    raise Fault


BEFORE_THE_REQUEST: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "the hook": (PolicyAddon, "requestheaders", fail),
    "the hook's coroutine": (
        PolicyAddon,
        "requestheaders",
        lambda self, flow: judged_then(self, flow, fail_later()),
    ),
    "the judgement": (PolicyAddon, "_judge", fail),
    "the binding": (addon, "bind", fail),
    "the decision": (addon, "decide", fail),
    "the rewriting of fields": (addon, "onward_request", fail),
    "the hook after the body": (PolicyAddon, "request", fail),
    "the choice of an upstream": (layers.InspectorLayer, "get_connection", fail),
    "the dial": (uplink, "open_upstream", fail),
    "the writing of the head": (origin_side, "request_head_of", fail),
    "the parser of heads": (sandbox_side, "parse_request_head", fail),
}


def judged_then(_addon: PolicyAddon, flow: http.HTTPFlow, work: Any) -> Any:
    exchange = Exchange(_addon.connection)
    flow.metadata["egressd"] = exchange
    return work


@pytest.mark.parametrize(("target", "name", "fault"), BEFORE_THE_REQUEST.values(), ids=BEFORE_THE_REQUEST)
def test_a_fault_before_the_request_is_sent_lets_nothing_out(
    target: object,
    name: str,
    fault: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(target, name, fault, raising=False)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            answer = await client.ask("POST /x\nContent-Length: 3", b"abc")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (502, "internal_error")
            assert b"Fault" not in answer.body
            await client.over()
            assert origin.heads == b""
            assert len(lab.records.of("decision")) == 1
            assert lab.records.ends() == ["internal_error"]

    run(test())
    assert "Fault" in capsys.readouterr().err  # the operator is told


@pytest.mark.parametrize("name", ["responseheaders", "response"])
@pytest.mark.parametrize("page", ["n", "chunked", "204"])
def test_a_fault_after_the_request_ends_the_exchange(
    name: str, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PolicyAddon, name, fail, raising=False)

    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            client.send(f"GET /{page} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            raw = await client.closed()
            assert b"Fault" not in raw
            assert not raw.endswith(b"0\r\n\r\n")
            await client.over()
            assert lab.records.ends() == ["internal_error"]

    run(test())
    assert "Fault" in capsys.readouterr().err


def test_a_hook_that_hangs_is_given_up_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "HOOK_TIMEOUT", 0.1)
    monkeypatch.setattr(
        PolicyAddon, "requestheaders", lambda self, flow: judged_then(self, flow, asyncio.sleep(60))
    )

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "internal_error"
            await client.over()
            assert origin.connections == 0

    run(test())
    assert "TimeoutError" in capsys.readouterr().err


def test_a_record_that_hangs_lets_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addon, "COMMIT_TIMEOUT", 0.1)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.records.gate = asyncio.Event()
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "audit_unavailable"
            await client.over()
            assert origin.connections == 0

    run(test())


def test_an_addon_that_forgets_to_deny_admits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is not consent: a flow whose exchange nobody admitted is refused, even with no response set."""

    def silent(self: PolicyAddon, flow: http.HTTPFlow) -> None:
        judged_then(self, flow, None)
        flow.response = None

    monkeypatch.setattr(PolicyAddon, "requestheaders", silent)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "internal_error"
            await client.over()
            assert origin.connections == 0

    run(test())


@pytest.mark.parametrize("part", ["host", "port", "scheme"])
def test_a_flow_that_an_addon_leads_elsewhere_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def redirect(_: PolicyAddon, flow: http.HTTPFlow) -> None:
        setattr(flow.request, part, {"host": "evil.example.com", "port": 22, "scheme": "https"}[part])

    monkeypatch.setattr(PolicyAddon, "request", redirect, raising=False)

    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "internal_error"
            await client.over()
            assert lab.dialer.dials == []

    run(test())
    assert "elsewhere" in capsys.readouterr().err


def test_an_addon_cannot_break_out_of_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inject(_: PolicyAddon, flow: http.HTTPFlow) -> None:
        flow.request.headers["x"] = "1\r\nHost: evil.example.com"

    monkeypatch.setattr(PolicyAddon, "request", inject, raising=False)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "internal_error"
            await client.over()
            assert origin.heads == b""

    run(test())
    assert "line break" in capsys.readouterr().err


def test_a_flow_that_an_addon_kills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyAddon, "request", lambda _, flow: flow.kill(), raising=False)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "internal_error"
            await client.over()
            assert origin.heads == b""

    run(test())


def test_a_fault_while_the_fault_is_explained_ends_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PolicyAddon, "_judge", fail)
    monkeypatch.setattr(turn.Turn, "fail", fail)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(f"GET /x HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            with contextlib.suppress(OSError):  # a reset
                assert await client.closed() == b""
            await client.over()
            assert origin.connections == 0
            assert lab.records.decisions() == [("deny", "internal_error")]

    run(test())
    assert "Fault" in capsys.readouterr().err


def test_faults_of_one_connection_are_no_other_connections_business(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            sound = await lab.dial()
            assert (await sound.ask("GET /n")).body == b"1"
            with monkeypatch.context() as patch:
                patch.setattr(PolicyAddon, "_judge", fail)
                await broken(lab)
            assert (await sound.ask("GET /n")).body == b"2"
            await sound.over()

    async def broken(lab: Lab) -> None:
        client = await lab.dial()
        assert (await client.ask("GET /x")).status == 502
        await client.over()

    run(test())
    assert "Fault" in capsys.readouterr().err
