"""What a sandbox is refused over and over is folded into counted records, so that it cannot drown the journal.

Only refusals for being over a limit are folded: whoever is over a limit has every reason to ask again at once, and the
hundredth record says nothing that the first did not. Nothing is lost: records, counts included, are as many as attempts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Final

from egressd.gate.limits import Fold
from egressd.gate.recorder import Recorder
from egressd.journal.record import Record, new_id, timestamp
from egressd.policy.reasons import Reason

WINDOW: Final = 1.0
"""Seconds in which refusals of one kind become one record and one count."""

_FOLDED: Final = frozenset({Reason.RATE_LIMITED.value, Reason.TOO_MANY_CONNECTIONS.value})
_LAYERS: Final = frozenset({"connection", "request"})
"""DNS and packets are folded where they are recorded."""

type _Kind = tuple[str | None, str | None, str | None, str | None, str | None]
"""Layer, channel, reason, rule and limit: sets that are closed, whatever a sandbox sends."""


class Folding:
    """The recorder of one sandbox that hands records on, refusals over a limit as one and a count for each window."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._fold: Fold[_Kind] = Fold(WINDOW)
        self._firsts: dict[_Kind, Record] = {}
        self._unended: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def put(self, record: Record) -> None:
        """See `Recorder.put`. An attempt that was only counted has no end either."""
        if record.event == "end" and record.attempt_id in self._unended:
            self._unended.discard(record.attempt_id)
        elif not self._is_folded(record) or self._is_first(record):
            self._recorder.put(record)

    async def commit(self, record: Record) -> None:
        """See `Recorder.commit`."""
        await self._recorder.commit(record)

    def close(self) -> None:
        """Write what is still counted; what comes later is handed on as it is."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._write(self._fold.drain())
        self._firsts.clear()

    def _is_folded(self, record: Record) -> bool:
        return (
            not self._closed
            and record.event == "decision"
            and record.verdict == "deny"
            and record.reason in _FOLDED
            and record.layer in _LAYERS
        )

    def _is_first(self, record: Record) -> bool:
        kind = record.layer, record.channel, record.reason, record.rule, record.detail
        first = self._fold.first(kind, self._clock())
        if first:
            self._firsts[kind] = record
        elif record.layer == "request":
            self._unended.add(record.attempt_id)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)
        return first

    def _end_window(self) -> None:
        self._timer = None
        self._write(self._fold.take(self._clock()))
        if self._fold:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)
        else:
            self._firsts.clear()

    def _write(self, counts: list[tuple[_Kind, int]]) -> None:
        for kind, count in counts:
            first = self._firsts[kind]
            record = dataclasses.replace(first, attempt_id=new_id(), root_id=first.attempt_id, count=count)
            record.time = timestamp(time.time())
            # what was so of the first and need not be so of those that were counted
            record.host = record.host_raw = record.address = record.sni = None
            record.port = record.scheme = record.method = record.path = record.query = None
            self._recorder.put(record)
