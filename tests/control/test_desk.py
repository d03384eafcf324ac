"""The desk: every question is answered once, and with a lease only where the worker carries the sandbox from first to last."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest
from pydantic import SecretStr

from egressd.control import desk as desk_module
from egressd.control.desk import Desk
from egressd.control.lending import Lending
from egressd.control.sandboxes import SandboxState
from egressd.credentials.lease import Lease, Token
from egressd.gate.channel import Channel, ChannelBroken, unsealed
from egressd.gate.messages import Ask, Lent
from egressd.policy.credential import Attach
from egressd.policy.effective import EffectivePolicy

ASK = Ask(
    ticket=7,
    sandbox="sbx-1",
    credential="key",
    method="GET",
    scheme="https",
    host="api.example.com",
    port=443,
    target="/",
)
LEASE = Lease(
    id="lease-1",
    credential="key",
    sandbox="sbx-1",
    material=Token(value=SecretStr("canary-5c0ffee")),
    attach=Attach(bearer=True),
)
SANDBOX = SandboxState("sbx-1", EffectivePolicy(profile="p"), ())


class Line:
    """A channel that keeps what is sent: each message and the payload beside it."""

    def __init__(self, broken: bool = False) -> None:
        self.sent: list[tuple[Lent, list[bytes]]] = []
        self.broken = broken

    def send(self, message: Lent, descriptors: Sequence[int] = ()) -> None:
        if self.broken:
            raise ChannelBroken("closed")
        self.sent.append((message, [unsealed(os.dup(one)) for one in descriptors]))


class Lender:
    def __init__(self, lease: Lease | None = LEASE) -> None:
        self.lease = lease
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0
        self.ended: list[str] = []

    async def lend(self, _sandbox: SandboxState, _ask: Ask) -> Lease | None:
        self.asked += 1
        await self.gate.wait()
        return self.lease

    async def end(self, sandbox_id: str) -> None:
        self.ended.append(sandbox_id)


def made(lender: Lender | None, broken: bool = False) -> tuple[Desk, Line, Callable[..., Any]]:
    desk, line = Desk(cast(Lending | None, lender)), Line(broken)

    def answer(carried: Callable[[], SandboxState | None] = lambda: SANDBOX) -> Coroutine[Any, Any, None]:
        return desk.answer(cast(Channel[Any], line), ASK, carried)

    return desk, line, answer


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


NONE: tuple[Lent, list[bytes]] = (Lent(ticket=7, ok=False), [])


def test_a_lease_travels_beside_its_answer() -> None:
    async def test() -> None:
        desk, line, answer = made(Lender())
        await answer()
        ((message, payloads),) = line.sent
        assert message == Lent(ticket=7, ok=True)
        assert "canary" not in message.model_dump_json()
        assert [Lease.model_validate_json(payload) for payload in payloads] == [LEASE]
        await desk.end("sbx-1")

    run(test())


def test_nobody_gets_anything_where_there_is_nothing_to_lend() -> None:
    async def test() -> None:
        desk, line, answer = made(None)
        await answer()
        await desk.end("sbx-1")
        assert line.sent == [NONE]
        _, line, answer = made(Lender(None))
        await answer()
        assert line.sent == [NONE]

    run(test())


def test_a_sandbox_that_the_worker_does_not_carry_is_not_even_asked_for() -> None:
    async def test() -> None:
        lender = Lender()
        _, line, answer = made(lender)
        await answer(lambda: None)
        assert (line.sent, lender.asked) == ([NONE], 0)

    run(test())


@pytest.mark.parametrize(
    "later",
    [None, SandboxState("sbx-1", EffectivePolicy(profile="p"), ())],
    ids=["it is gone", "another has its id"],
)
def test_a_sandbox_that_ended_while_its_source_was_asked_gets_none(later: SandboxState | None) -> None:
    async def test() -> None:
        answers = [SANDBOX, later]
        _, line, answer = made(Lender())
        await answer(lambda: answers.pop(0))
        assert line.sent == [NONE]

    run(test())


def test_open_questions_are_bounded_and_the_next_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MOST", 2)

    async def test() -> None:
        lender = Lender()
        lender.gate.clear()
        _, line, answer = made(lender)
        waiting = [asyncio.ensure_future(answer()) for _ in range(2)]
        await asyncio.sleep(0)
        await answer()
        assert (line.sent, lender.asked) == ([NONE], 2)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        lender.gate.set()
        await asyncio.gather(waiting[1], answer())
        assert [message.ok for message, _ in line.sent] == [False, True, True]

    run(test())


def test_a_worker_that_has_died_or_a_host_without_descriptors_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(_payload: bytes) -> int:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        for lender in (Lender(), Lender(None)):
            _, line, answer = made(lender, broken=True)
            await answer()
            assert line.sent == []
        monkeypatch.setattr(desk_module, "sealed", none_left)
        _, line, answer = made(Lender())
        await answer()
        assert line.sent == []

    before = len(os.listdir("/proc/self/fd"))
    run(test())
    assert len(os.listdir("/proc/self/fd")) == before
    assert capsys.readouterr().err == "egressd: a lease could not be handed over: Too many open files\n"
