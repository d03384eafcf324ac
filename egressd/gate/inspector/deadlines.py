"""When an inspected connection is overdue: one timer, whatever it waits for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from egressd.gate.settings import Settings

FLUSH_CHECK: Final = 1.0
"""Seconds between two looks at a last answer that its client is still reading."""


class Deadlines:
    """Calls `overdue` when what is awaited has not come in time; what to wait for is said anew after each call."""

    def __init__(self, settings: Settings, overdue: Callable[[], None]) -> None:
        """Nothing is awaited yet."""
        self._settings = settings
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._moved = self._loop.time()
        self._most = settings.idle_timeout

    def await_head(self) -> None:
        """From now on the end of a request head is awaited."""
        self._arm(self._loop.time() + self._settings.head_timeout)

    def await_bytes(self, most: float = math.inf) -> None:
        """From now on bytes are awaited, in any direction, again and again; not longer than `most` seconds."""
        self._moved = self._loop.time()
        self._most = min(most, self._settings.idle_timeout)
        self._arm(self._moved + self._most, moving=True)

    def await_reader(self) -> None:
        """Look again soon whether the client has read on."""
        self._arm(self._loop.time() + FLUSH_CHECK)

    def moved(self) -> None:
        """Bytes have come or gone."""
        self._moved = self._loop.time()

    @property
    def idle(self) -> bool:
        """Whether nothing has moved for the whole idle time."""
        return self._loop.time() - self._moved >= self._most

    def stop(self) -> None:
        """Await nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when: float, *, moving: bool = False) -> None:
        self.stop()
        self._timer = self._loop.call_at(when, self._tick, moving)

    def _tick(self, moving: bool) -> None:
        """A timer that is pushed on by every byte would cost more than one that looks back when it fires."""
        if moving and not self.idle:
            self._arm(self._moved + self._most, moving=True)
        else:
            self._overdue()
