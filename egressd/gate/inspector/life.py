"""The life of an inspected connection: it is open, then leaves with its last word, then is over. There is no way back."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from egressd.gate.sandbox import Live, Sandbox
from egressd.policy.reasons import Reason


class Phase(enum.Enum):
    """Where in its life a connection is."""

    OPEN = enum.auto()
    LEAVING = enum.auto()
    """The last word is on its way to the client."""
    OVER = enum.auto()


class Life:
    """The phases of one connection; `phase` is set by its engine alone, by `leave` and `finish`."""

    def __init__(self) -> None:
        """It is open."""
        self.phase = Phase.OPEN
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_open(self) -> bool:
        """Whether anything is still judged or sent upstream."""
        return self.phase is Phase.OPEN

    def is_over(self) -> bool:
        """Whether both sides have ended."""
        return self.phase is Phase.OVER

    def leave(self) -> bool:
        """Begin to leave; returns whether it was open."""
        was_open = self.is_open()
        if was_open:
            self.phase = Phase.LEAVING
        return was_open

    def finish(self) -> None:
        """End it."""
        self.phase = Phase.OVER
        if not self._over.done():
            self._over.set_result(None)

    async def lead(self, engine: Live, sandbox: Sandbox, begin: Callable[[], None]) -> None:
        """Have `engine` carry the connection to its end, as one of its sandbox's. Cancelling this cuts it."""
        sandbox.live.add(engine)
        try:
            begin()
            await self._over
        except asyncio.CancelledError:
            engine.cut(Reason.SHUTDOWN)
            raise
        finally:
            engine.cut(Reason.INTERNAL_ERROR)
            sandbox.live.discard(engine)
