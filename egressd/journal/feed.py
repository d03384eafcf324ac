"""A feed: written lines on their way to somewhere else, which may be slow, away or broken without the journal noticing.

A bounded queue and a thread of its own. What does not fit is counted, and the count is sent once the other side takes lines
again; the journal has those lines. The writer's side neither waits nor raises.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from egressd.journal.chain import Line
from egressd.journal.record import NOBODY, new_id, timestamp, to_line

QUEUE_LINES: Final = 20_000
"""Lines that wait for a slow reader; twelve megabytes or so."""
BATCH: Final = 500
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_CLOSE_SECONDS = 3.0

type Fields = dict[str, Any]


class Unsent(Exception):
    """The other side did not take a batch, which is tried again; the text is for an operator."""


class Outlet(Protocol):
    """Where a feed leads; used by one thread alone."""

    name: str

    def send(self, records: Sequence[Fields], seconds: float) -> None:
        """Deliver records within about `seconds`; raises Unsent or OSError, and then all of them are tried again."""

    def close(self) -> None:
        """Let go of what is held."""


class Feed:
    """Carries lines to one outlet. `say` tells the operator, from the feed's own thread."""

    def __init__(self, outlet: Outlet, say: Callable[[str], None], *, limit: int = QUEUE_LINES) -> None:
        """Begin to carry."""
        self._outlet = outlet
        self._say = say
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._wanted = threading.Condition()
        self._lost = 0
        self._ending: float | None = None
        self.sent = 0
        """Lines that the other side took."""
        self.lost = 0
        """Lines that found no room."""
        self._thread = threading.Thread(target=self._run, name=f"feed {outlet.name}", daemon=True)
        self._thread.start()

    def hear(self, lines: Sequence[Line]) -> None:
        """Take lines that were written; never waits for more than a moment's lock, never raises."""
        with self._wanted:
            room = self._limit - len(self._lines)
            self._lines.extend(line.text for line in lines[:room])
            if len(lines) > room:
                self._lost += len(lines) - room
                self.lost += len(lines) - room
            self._wanted.notify()

    @property
    def waiting(self) -> int:
        """Lines that were not sent yet."""
        return len(self._lines)

    def close(self) -> None:
        """Send what is left for a few seconds, then end."""
        with self._wanted:
            self._ending = time.monotonic() + _CLOSE_SECONDS
            self._wanted.notify()
        self._thread.join(_CLOSE_SECONDS + 1)

    def _run(self) -> None:
        pause = 0.0
        try:
            while (batch := self._next(pause)) is not None:
                pause = self._try(batch, pause)
        finally:
            self._outlet.close()
            if left := len(self._lines) + self._lost:
                self._say(f"{self._outlet.name}: {left} records were not sent; the journal has them")

    def _try(self, batch: list[bytes], pause: float) -> float:
        """Send a batch; returns how long to wait before the next, 0 after a success."""
        lost = self._lost
        records = [json.loads(line) for line in batch]
        if lost:
            records.insert(0, _lost_record(lost))
        left = 10.0 if self._ending is None else max(0.1, self._ending - time.monotonic())
        try:
            self._outlet.send(records, left)
        except Exception as error:  # noqa: BLE001 -- whatever fails outside, the next try is the answer
            if not pause:
                self._say(f"{self._outlet.name}: not sent, tried again: {error}")
            return min(max(pause * 2, _FIRST_PAUSE), _LONGEST_PAUSE)
        if pause:
            self._say(
                f"{self._outlet.name}: sending again" + (f"; {lost} records found no room" if lost else "")
            )
        with self._wanted:
            for _ in batch:
                self._lines.popleft()
            self._lost -= lost
            self.sent += len(batch)
        return 0.0

    def _next(self, pause: float) -> list[bytes] | None:
        """Return what is to be sent next, after a pause where the last try failed; None at the end."""
        with self._wanted:
            if pause:
                self._wanted.wait_for(lambda: self._ending is not None, timeout=pause)
                if self._ending is not None and time.monotonic() >= self._ending:
                    return None
            self._wanted.wait_for(lambda: self._lines or self._lost or self._ending is not None)
            if not self._lines and not self._lost:
                return None
            if self._ending is not None and (pause >= 1 or time.monotonic() >= self._ending):
                return None
            return list(islice(self._lines, BATCH))


def _lost_record(count: int) -> Fields:
    attempt = new_id()
    return {
        "time": timestamp(time.time()),
        "schema": 1,
        "event": "lost",
        "sandbox": NOBODY,
        "attempt_id": attempt,
        "root_id": attempt,
        "count": count,
        "detail": "records that this sink did not take; the journal has them",
    }


def line_of(fields: Fields) -> bytes:
    """Return a record as a line without its newline, in the journal's own form."""
    return to_line(fields)[:-1]
