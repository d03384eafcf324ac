"""What one connection waits for: hooks and dials that take their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """The pending tasks of one connection; whatever one of them raises is told, and then the connection goes on."""

    def __init__(self, go_on: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        """`go_on` is called after each task, which no longer counts then; `broke` before that with what it has raised."""
        self._go_on = go_on
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task."""
        task = self._loop.create_task(self._carry(work))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        task.add_done_callback(lambda _: work.close())  # which a task that is cancelled early never began
        return task

    async def _carry(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 # law 1: the exchange is refused, whatever was done for it has raised
            self._broke(error)
        task = asyncio.current_task()
        assert task is not None
        self._pending.discard(task)
        self._go_on()

    def stop(self) -> None:
        """Cancel all but the one that asks for it."""
        for task in self._pending - {asyncio.current_task(self._loop)}:
            task.cancel()
