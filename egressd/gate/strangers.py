"""The records of attempts that belong to no sandbox: every one is written down, and nobody can drown the journal with them.

One record for the first of a kind from a source, and a count for its repeats in a window; past `LIVE` kinds at a time, those of
further sources are told together, so that no number of forged addresses costs memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from egressd.gate.recorder import Recorder
from egressd.journal.record import NOBODY, Layer, Record, new_id
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

WINDOW: Final = 10.0
"""Seconds in which repeats become one count."""
LIVE: Final = 256
"""Kinds with a source of their own that are counted at a time."""


@dataclass(frozen=True, slots=True)
class Stray:
    """An attempt of nobody known: what it was, why it went nowhere, and where it came from.

    `sandbox` is set where the source is a sandbox's, which then has tried to pass for another. `detail` is of a closed set.
    """

    layer: Layer
    channel: str
    reason: Reason
    source: Address | None = None
    sandbox: str | None = None
    detail: str | None = None


class Strangers:
    """Writes down strays; `flush` writes what is still only counted."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was met yet."""
        self._recorder = recorder
        self._clock = clock
        self._live: dict[Stray, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, stray: Stray, *, status: int | None = None, attempt_id: str | None = None) -> None:
        """Write down or count one attempt; never raises. `status` is what it was answered, `attempt_id` by what name."""
        if stray not in self._live and len(self._live) >= LIVE:
            stray = Stray(stray.layer, stray.channel, stray.reason)
        held = self._live.get(stray)
        if held is not None:
            self._live[stray] = held[0], held[1] + 1
            return
        record = _record(stray, attempt_id or new_id())
        record.status = status
        self._put(record)
        self._live[stray] = self._clock(), 0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)

    def lose(self, channel: str, count: int) -> None:
        """Write down attempts that the kernel dropped at a shared socket before anybody read them."""
        record = _record(Stray("dns", channel, Reason.DNS_BUDGET), new_id())
        record.event, record.verdict, record.treatment = "lost", None, None
        record.count, record.detail = count, "queries that the kernel dropped unread"
        self._put(record)

    def flush(self) -> None:
        """Write every count now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for stray in tuple(self._live):
            self._count(stray)

    def _end_window(self) -> None:
        self._timer = None
        now = self._clock()
        for stray, (began, _) in tuple(self._live.items()):
            if now - began >= WINDOW:
                self._count(stray)
        if self._live:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)

    def _count(self, stray: Stray) -> None:
        _, repeats = self._live.pop(stray)
        if repeats:
            record = _record(stray, new_id())
            record.count = repeats
            self._put(record)

    def _put(self, record: Record) -> None:
        with contextlib.suppress(Exception):  # a stray is refused whatever becomes of its record
            self._recorder.put(record)


def _record(stray: Stray, attempt_id: str) -> Record:
    return Record(
        event="decision",
        sandbox=stray.sandbox or NOBODY,
        attempt_id=attempt_id,
        root_id=attempt_id,
        layer=stray.layer,
        channel=stray.channel,
        verdict="deny",
        reason=stray.reason.value,
        source=str(stray.source) if stray.source is not None else None,
        detail=stray.detail,
    )
