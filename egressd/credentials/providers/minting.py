"""Mints that are not lost when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from egressd.credentials.providers.base import Minted, SourceFailed


class Minting:
    """Runs mints to their end, also when their caller is cancelled: what nobody receives is revoked at once.

    Without it a credential, or a rotated refresh token, would be lost in the moment between a server's answer and ours. What it
    runs bounds itself in time.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, mint: Coroutine[Any, Any, Minted]) -> Minted:
        """Return what `mint` returns; raises what it raises."""
        task = self._start(mint)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                self._start(_undo(task))
            raise

    async def close(self) -> None:
        """Wait until nothing runs any more; never raises."""
        while self._running:
            await asyncio.wait(set(self._running))

    def _start[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


async def _undo(task: asyncio.Task[Minted]) -> None:
    with suppress(SourceFailed):
        minted = await task
        if minted.revoke is not None:
            await minted.revoke()
