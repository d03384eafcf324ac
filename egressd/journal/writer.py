"""The journal's writer: control alone holds one, numbers the records and says when they are written."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from egressd.journal.admission import BadRecord, admit, encode
from egressd.journal.record import Record, new_id
from egressd.journal.sinks import Busy, JournalUnavailable, Sink, open_sink
from egressd.policy.reasons import Reason

__all__ = ["BadRecord", "Journal", "JournalUnavailable"]

WAITING_LIMIT = 256
"""How many commits may wait for a slow reader at once; the next is refused at once."""

_BUSY_PAUSE = 0.005
_NUMBER_ROOM = 16  # digits of a seq
_LOST_LIMIT = 1024  # sandboxes whose losses are counted apart; the set is control's own, so this is never met
_LOST_WORDS = {
    Reason.AUDIT_UNAVAILABLE: "records that the journal could not take",
    Reason.INTERNAL_ERROR: "records that were not fit to be written",
}


class _Line(NamedTuple):
    """A record that is ready but for its number."""

    sandbox: str
    text: bytes

    def numbered(self, number: int) -> bytes:
        # the first match is the field itself: only time and schema stand before it
        return self.text.replace(b'"seq":null', b'"seq":%d' % number, 1)


class Journal:
    """An open journal: appends whole lines, fails closed, recovers by itself.

    A record that could not be written is counted and never tried again: the next write that succeeds begins
    with a `lost` record for each sandbox that lost some. Written means handed to the kernel: a line
    survives egressd, not a power failure.
    """

    def __init__(
        self, target: Path | str, *, deadline: float = 2.0, clock: Callable[[], float] = time.time
    ) -> None:
        """Open `target`, a path or `-`, or raise JournalUnavailable; commit waits `deadline` seconds."""
        self.target = target
        self.seq = 0
        """The number of the last record written."""
        self._sink: Sink = open_sink(target)
        self._deadline = deadline
        self._clock = clock
        self._problem = self._sink.problem
        self._lost: Counter[tuple[str, Reason]] = Counter()
        self._waiting = 0
        self._turn = asyncio.Lock()

    def append(
        self, records: Sequence[Mapping[str, Any]], *, allowed_sandboxes: Collection[str] | None = None
    ) -> int:
        """Write the records now and return the last one's number; never waits for a reader.

        Raises BadRecord (none is written) or JournalUnavailable (not all are). `allowed_sandboxes` are
        those of the worker that sent them, None for control's own records.
        """
        lines = self._admit(records, allowed_sandboxes)
        self._settle(self._write(lines))
        return self.seq

    async def commit(
        self, records: Sequence[Mapping[str, Any]], *, allowed_sandboxes: Collection[str] | None = None
    ) -> int:
        """Do what append does, but give a slow reader until the deadline, without holding up the loop."""
        left = self._admit(records, allowed_sandboxes)
        try:
            left = self._write(left)
            if left and self._waiting < WAITING_LIMIT:
                left = await self._wait_and_write(left)
        except asyncio.CancelledError:
            self._count_lost(left, Reason.AUDIT_UNAVAILABLE)
            raise
        self._settle(left)
        return self.seq

    def reopen(self) -> None:
        """Open the target anew, after a rotation.

        On failure the old file stays in use and JournalUnavailable is raised.
        """
        fresh = open_sink(self.target)
        self._sink.close()
        self._sink = fresh

    def close(self) -> None:
        """Let go of the file."""
        self._sink.close()

    async def _wait_and_write(self, left: list[_Line]) -> list[_Line]:
        self._waiting += 1
        try:
            async with asyncio.timeout(self._deadline), self._turn:
                while left and isinstance(self._problem, Busy):
                    await self._writable()
                    left = self._write(left)
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        return left

    async def _writable(self) -> None:
        fd = self._sink.fileno()
        if fd is None:
            await asyncio.sleep(_BUSY_PAUSE)
            return
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(fd)

    def _admit(self, records: Sequence[Mapping[str, Any]], sandboxes: Collection[str] | None) -> list[_Line]:
        now = self._clock()
        limit = self._sink.line_limit - _NUMBER_ROOM
        try:
            admitted = [admit(record, sandboxes, now) for record in records]
            return [_Line(fields["sandbox"], encode(fields, limit)) for fields in admitted]
        except BadRecord:
            # whose they were is known as far as the sender is: a worker may be blamed for its own sandboxes
            # only
            owner = min(sandboxes, default="-") if sandboxes is not None else "-"
            self._count_lost([_Line(owner, b"")] * len(records), Reason.INTERNAL_ERROR)
            raise

    def _write(self, lines: list[_Line]) -> list[_Line]:
        """Write what was lost before and then `lines`; returns those that did not get out."""
        lost = list(self._lost)
        batch = [self._lost_line(*key) for key in lost] + lines
        try:
            with self._sink.turn() as last:
                number = max(self.seq, last)
                out = self._sink.write([line.numbered(number + n) for n, line in enumerate(batch, 1)])
        except JournalUnavailable as error:
            self._problem = error
            return lines
        if out:
            self.seq = number + out
        for key in lost[:out]:
            del self._lost[key]
        self._problem = self._sink.problem
        return batch[max(out, len(lost)) :]

    def _settle(self, left: list[_Line]) -> None:
        if left:
            self._count_lost(left, Reason.AUDIT_UNAVAILABLE)
            raise self._problem

    def _count_lost(self, lines: Sequence[_Line], reason: Reason) -> None:
        for line in lines:
            known = (line.sandbox, reason) in self._lost or len(self._lost) < _LOST_LIMIT
            self._lost[line.sandbox if known else "-", reason] += 1

    def _lost_line(self, sandbox: str, reason: Reason) -> _Line:
        attempt = new_id()
        record = Record(
            event="lost",
            sandbox=sandbox,
            attempt_id=attempt,
            root_id=attempt,
            reason=reason.value,
            count=self._lost[sandbox, reason],
            detail=_LOST_WORDS[reason],
        )
        fields = admit(record.as_dict(), None, self._clock())
        return _Line(sandbox, encode(fields, self._sink.line_limit - _NUMBER_ROOM))
