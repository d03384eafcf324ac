"""Connections under the limits of rules: counted before anything is dialled, given back when they are over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest

from egressd.gate.door.visit import Visit
from egressd.journal.record import Record
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy, EntryLimits, Rate
from tests.gate.door.test_visit import ENTRIES, PINNED, WEB, Scene


def rate(amount: int, seconds: int = 10**9) -> Rate:
    return Rate(amount=amount, seconds=seconds)


def scene(destination: str, port: int = 443, *, profile: EntryLimits | None = None, **limits: Any) -> Scene:
    """A scene in which every rule has these limits, or the profile has others."""
    made = Scene(destination=destination, port=port)
    bound = EntryLimits(**limits)
    entries = tuple(entry.model_copy(update={"limits": bound}) for entry in ENTRIES)
    rules = EffectivePolicy(profile="p", entries=entries, limits=profile or EntryLimits())
    made.sandbox.policy = compile_policy(rules)
    return made


async def close_far(scene: Scene, client: socket.socket, visit: Visit) -> None:
    async with asyncio.timeout(5):
        await scene.dialer.dialed.wait()
    client.shutdown(socket.SHUT_WR)
    assert scene.dialer.far is not None
    scene.dialer.far.close()
    scene.dialer.dialed = asyncio.Event()  # the next play has a loop of its own


def decided(scene: Scene) -> list[tuple[str | None, str | None, str | None]]:
    found = [r for r in scene.recorder.records if r.event == "decision"]
    return [(r.reason, r.rule, r.detail) for r in found]


def ends(scene: Scene) -> list[Record]:
    return [r for r in scene.recorder.records if r.event == "end"]


def test_a_connection_that_is_not_read_counts_as_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    played = scene("raw", 22, requests=rate(2))
    for _ in range(2):
        played.play(monkeypatch, b"", close_far)
    assert played.play(monkeypatch, b"") == b""
    assert decided(played) == [("rule", "raw", None)] * 2 + [("rate_limited", "raw", "requests of rule raw")]
    assert played.dialer.dials == 2


def test_a_tunnel_over_its_limit_is_never_dialled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("pinned", requests=rate(1))
    played.play(monkeypatch, PINNED, close_far)
    played.play(monkeypatch, PINNED)
    assert decided(played)[1] == ("rate_limited", "pinned", "requests of rule pinned")
    assert played.dialer.dials == 1


def test_a_hello_that_has_no_room_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("pinned", upload=rate(len(PINNED) - 1))
    played.play(monkeypatch, PINNED)
    assert decided(played) == [("rate_limited", "pinned", "upload of rule pinned")]
    assert played.dialer.dials == 0


def test_a_tunnel_is_cut_when_its_upload_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = len(PINNED) + 100
    got = 0

    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        nonlocal got
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            await scene.dialer.dialed.wait()
            assert scene.dialer.far is not None
            await loop.sock_sendall(client, bytes(1000))
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(scene.dialer.far, 4096):
                    got += len(part)

    played = scene("pinned", upload=rate(limit))
    played.play(monkeypatch, PINNED, act)
    (end,) = ends(played)
    assert (end.reason, end.bytes_up) == ("rate_limited", limit)
    assert got <= limit


def test_connections_at_a_time_are_counted_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    played = scene("raw", 22, connections=1)

    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        async with asyncio.timeout(5):
            await scene.dialer.dialed.wait()
            far, ours = socket.socketpair()
            ours.setblocking(False)
            with far:
                await Visit(ours, scene.sandbox, scene.services).run()
        await close_far(scene, client, visit)

    played.play(monkeypatch, b"", act)
    assert decided(played) == [
        ("rule", "raw", None),
        ("too_many_connections", "raw", "connections of rule raw"),
    ]
    played.play(monkeypatch, b"", close_far)
    assert decided(played)[2] == ("rule", "raw", None)


@pytest.mark.parametrize(
    "sent", [WEB, b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"], ids=["https", "http"]
)
def test_a_connection_that_is_inspected_takes_a_place(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("web", 443 if sent is WEB else 80, profile=EntryLimits(connections=1))
    rules, entry = played.sandbox.policy.effective, played.sandbox.policy.effective.entries[0]
    account = played.sandbox.budget.account(time.monotonic(), rules, entry)
    assert account.connect(time.monotonic(), "another") is None
    got = played.play(monkeypatch, sent)
    assert decided(played)[0] == ("too_many_connections", "web", "connections of the profile")
    if sent is not WEB:  # there is no certificate in this scene
        assert got.startswith(b"HTTP/1.1 429 ")
    assert played.dialer.dials == 0
    assert account.connect(time.monotonic(), "another") is None, "what was denied has no place"


def test_connections_that_begin_too_fast_are_told_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("web", 80, profile=EntryLimits(new_connections=rate(1)))
    rules, entry = played.sandbox.policy.effective, played.sandbox.policy.effective.entries[0]
    assert (
        played.sandbox.budget.account(time.monotonic(), rules, entry).connect(time.monotonic(), "c") is None
    )
    got = played.play(monkeypatch, b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
    assert decided(played)[0] == ("rate_limited", "web", "new_connections of the profile")
    assert got.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: " in got.lower()
    assert played.dialer.dials == 0


def test_a_destination_that_has_its_bytes_does_not_take_another_s(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("pinned", upload_per_host=rate(len(PINNED)))
    played.play(monkeypatch, PINNED, close_far)
    played.play(monkeypatch, PINNED)
    assert decided(played)[1] == ("rate_limited", "pinned", "upload_per_host of rule pinned")
    assert played.dialer.dials == 1


def test_a_visit_that_fails_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("raw", 22, connections=1)
    played.dialer.fault = RuntimeError("boom")
    played.play(monkeypatch, b"")
    played.dialer.fault = None
    played.play(monkeypatch, b"", close_far)
    assert decided(played) == [("rule", "raw", None)] * 2


def test_a_budget_that_fails_denies(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played = scene("raw", 22)

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(type(played.sandbox.budget), "account", broken)
    played.play(monkeypatch, b"")
    assert [reason for reason, _, _ in decided(played)] == ["internal_error"]
    assert played.dialer.dials == 0
