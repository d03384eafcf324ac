"""A connection lives once: it cannot be opened again, and is among its sandbox's for just as long."""

from __future__ import annotations

import asyncio

import pytest

from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.inspector.life import Life, Phase
from egressd.gate.limits import Budget
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import run


class Led:
    """What an engine is to its life."""

    def __init__(self) -> None:
        self.life = Life()
        self.cuts: list[Reason] = []
        self.sandbox = Sandbox(
            "sb-1", compile_policy(EffectivePolicy(profile="lab")), SyntheticNames(1), Budget(Settings())
        )

    def cut(self, reason: Reason) -> None:
        if not self.life.is_over():
            self.cuts.append(reason)
            self.life.finish()

    def rejudge(self, now: float) -> None:
        raise AssertionError(now)

    def retire(self) -> None:
        raise AssertionError

    async def lead(self) -> None:
        await self.life.lead(self, self.sandbox, lambda: None)


async def begun(led: Led) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(led.lead())
    await asyncio.sleep(0)
    return task


def test_it_leaves_once_and_is_over_for_good() -> None:
    async def test() -> None:
        life = Life()
        assert life.is_open()
        assert [life.leave(), life.leave()] == [True, False]
        assert life.phase is Phase.LEAVING
        assert not life.is_over()
        life.finish()
        life.finish()
        assert not life.leave()
        assert life.is_over()

    run(test())


def test_it_is_one_of_its_sandboxs_until_it_is_over() -> None:
    async def test() -> None:
        led = Led()
        task = await begun(led)
        assert led.sandbox.live == {led}
        led.life.finish()
        await task
        assert (led.sandbox.live, led.cuts) == (set(), [])

    run(test())


def test_who_cancels_it_cuts_it() -> None:
    async def test() -> None:
        led = Led()
        task = await begun(led)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (led.sandbox.live, led.cuts) == (set(), [Reason.SHUTDOWN])

    run(test())


def test_one_that_cannot_begin_is_cut() -> None:
    async def test() -> None:
        led = Led()

        def fault() -> None:
            raise LookupError

        with pytest.raises(LookupError):
            await led.life.lead(led, led.sandbox, fault)
        assert (led.sandbox.live, led.cuts) == (set(), [Reason.INTERNAL_ERROR])

    run(test())
