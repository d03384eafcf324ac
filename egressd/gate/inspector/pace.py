"""How the limits of an exchange slow it down: bytes wait here for room, in both directions, until there is some or never will be.

What waits is bounded by its side not being read meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from egressd.gate.account import Account, retry_after
from egressd.gate.buckets import Meter

_UNBOUND: Final = Meter()
_LEAST: Final = 0.05
"""Seconds between two looks: many transfers that share a limit would else wake at each other's every piece."""


@dataclass(frozen=True, slots=True)
class Starved:
    """A transfer that found no room and will find none soon; `retry_after` as `Over` has it."""

    detail: str
    retry_after: int | None


class Pace:
    """The bytes of one connection's current exchange that wait for room; `again` is called when there may be some."""

    def __init__(self, again: Callable[[], None]) -> None:
        """Nothing is bound yet."""
        self._again = again
        self._upload = self._download = _UNBOUND
        self._up = self._down = b""
        self._kept = b""  # of what was counted, but could not be passed on
        self._timer: asyncio.TimerHandle | None = None

    def bind(self, account: Account | None) -> None:
        """Bind what passes from now on by the limits of an exchange."""
        self._upload = account.upload if account is not None else _UNBOUND
        self._download = account.download if account is not None else _UNBOUND

    @property
    def holds_up(self) -> bool:
        """Whether bytes for the upstream wait, so that the sandbox is not to be read."""
        return bool(self._up)

    @property
    def holds_down(self) -> bool:
        """Whether bytes from the upstream wait, so that it is not to be read."""
        return bool(self._down or self._kept)

    @property
    def keeps(self) -> bool:
        """Whether bytes wait that were counted already."""
        return bool(self._kept)

    def keep(self, data: bytes) -> None:
        """Take back what `downward` has returned and nobody could take; it comes first the next time, and is not counted then."""
        self._kept = data

    def upward(self, data: bytes) -> bytes:
        """Count and return what may go to the upstream now, of what waited and of `data` behind it; the rest waits."""
        passing, self._up = _split(self._upload, self._up + data if self._up else data)
        return passing

    def downward(self, data: bytes) -> bytes:
        """Count and return what may go to the sandbox now, of what waited and of `data` behind it; the rest waits."""
        passing, self._down = _split(self._download, self._down + data if self._down else data)
        kept, self._kept = self._kept, b""
        return kept + passing if kept else passing

    def forget_up(self) -> int:
        """Forget what waits for the upstream; returns how many bytes that was."""
        count, self._up = len(self._up), b""
        return count

    def take_down(self) -> bytes:
        """Return all that waits from the upstream, uncounted: what comes after a response is not for the sandbox."""
        data, self._down, self._kept = self._kept + self._down, b"", b""
        return data

    def arm(self) -> Starved | None:
        """See to it that `again` is called when what waits may go on; or say that it is not worth waiting for."""
        if self._timer is not None or not (self._up or self._down):
            return None
        now, pause = time.monotonic(), math.inf
        for what, meter, data in (
            ("upload", self._upload, self._up),
            ("download", self._download, self._down),
        ):
            if data:
                pause = min(pause, found := meter.pause(now, len(data)))
                if math.isinf(found):
                    return Starved(f"{what} over a limit", retry_after(meter.wait(now, len(data))))
        self._timer = asyncio.get_running_loop().call_later(max(pause, _LEAST), self._ring)
        return None

    def stop(self) -> None:
        """Call nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._again()


def _split(meter: Meter, data: bytes) -> tuple[bytes, bytes]:
    now = time.monotonic()
    room = meter.room(now, len(data))
    meter.take(now, room)
    return (data, b"") if room == len(data) else (data[:room], data[room:])
