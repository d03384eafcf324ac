"""What a connection waits for: it goes on after each task, whatever became of it, and a task that is stopped leaves nothing."""

from __future__ import annotations

import asyncio
import warnings

import pytest

from egressd.gate.inspector.tasks import Tasks
from tests.gate.inspector.lab import run


class Waiting:
    """Tasks, and what they were followed by."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.tasks = Tasks(self._go_on, lambda error: self.said.append(type(error).__name__))

    def _go_on(self) -> None:
        self.said.append("pending" if self.tasks else "goes on")


async def nothing() -> None:
    pass


async def fault() -> None:
    raise LookupError


def test_a_task_counts_until_the_connection_goes_on_after_it() -> None:
    async def test() -> None:
        waiting = Waiting()
        task = waiting.tasks.spawn(nothing())
        assert waiting.tasks
        await task
        assert waiting.said == ["goes on"]
        assert not waiting.tasks

    run(test())


def test_of_two_tasks_the_other_still_counts() -> None:
    async def test() -> None:
        waiting, other = Waiting(), asyncio.Event()
        waiting.tasks.spawn(asyncio.wait_for(other.wait(), 5))  # type: ignore[arg-type] # what it returns is of no account
        await waiting.tasks.spawn(nothing())
        assert waiting.said == ["pending"]
        waiting.tasks.stop()

    run(test())


def test_what_a_task_raises_is_told_before_the_connection_goes_on() -> None:
    async def test() -> None:
        waiting = Waiting()
        await waiting.tasks.spawn(fault())
        assert waiting.said == ["LookupError", "goes on"]

    run(test())


def test_a_task_that_is_stopped_before_it_began_is_nobodys_warning() -> None:
    async def test() -> None:
        waiting = Waiting()
        task = waiting.tasks.spawn(nothing())
        waiting.tasks.stop()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert waiting.said == []
        assert not waiting.tasks

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(test())


def test_a_task_that_stops_all_goes_on_itself() -> None:
    async def test() -> None:
        waiting = Waiting()

        async def stop() -> None:
            waiting.tasks.stop()
            await asyncio.sleep(0)

        other = waiting.tasks.spawn(asyncio.sleep(60))
        await waiting.tasks.spawn(stop())
        assert other.cancelled()
        assert len(waiting.said) == 1

    run(test())
