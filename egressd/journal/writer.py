"""The journal's writer: control alone holds one, numbers and chains the records and says when they are written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from egressd.journal import chain, heads
from egressd.journal.admission import BadRecord, admit, encode
from egressd.journal.chain import BEGINNING, Line, Link, chained
from egressd.journal.heads import Signer
from egressd.journal.opening import open_sink
from egressd.journal.record import Event, Record, new_id
from egressd.journal.rotation import REMOVED, Terms, doomed, remove
from egressd.journal.sinks import STDOUT, Busy, Full, JournalUnavailable, Sink, Standing
from egressd.policy.reasons import Reason

__all__ = ["BadRecord", "Journal", "JournalUnavailable"]

WAITING_LIMIT = 256
"""How many commits may wait for a slow reader at once; the next is refused at once."""

_BUSY_PAUSE = 0.005
_SYNC_PAUSE = 1.0
_ROTATE_AGAIN = 60.0
_PRUNE_PAUSE = 60.0
_ROOM = chain.ROOM + heads.ROOM
_LOST_LIMIT = 1024  # sandboxes whose losses are counted apart; the set is control's own, so this is never met
_LOST_WORDS = {
    Reason.AUDIT_UNAVAILABLE: "records that the journal could not take",
    Reason.INTERNAL_ERROR: "records that were not fit to be written",
}
_TORN = "no record stands before this line: half of one, as a crash or a full disk leaves it, or what is another's"
_NOBODYS = "-"
"""Stands for the sandbox in a record of the journal itself."""


class _Ready(NamedTuple):
    """A record that is ready but for its number and what stands before it."""

    sandbox: str
    text: bytes


type Hearer = Callable[[Sequence[Line]], None]


class Journal:
    """An open journal: appends whole lines, fails closed, recovers by itself.

    A record that could not be written is counted and never tried again: the next write that succeeds begins
    with a `lost` record for each sandbox that lost some. Written means handed to the kernel: a line
    survives egressd, and a power failure as `terms.fsync` has it.
    """

    def __init__(
        self,
        target: Path | str,
        *,
        deadline: float = 2.0,
        clock: Callable[[], float] = time.time,
        state: Path | None = None,
        terms: Terms = Terms(),  # noqa: B008 -- frozen
    ) -> None:
        """Open `target`, a path or `-`, or raise JournalUnavailable and KeyUnusable; commit waits `deadline` seconds.

        `state` is the directory of the key that signs heads, and of what is known of the journal's end; None: neither.
        """
        self.target = target
        self.dropped = 0
        """Records that found no room and were not waited for, under `on_full: drop-and-count`."""
        self.unsynced: JournalUnavailable | None = None
        """Why the disk did not keep what was written last, None where it did."""
        self._state = state
        self._terms = terms
        self._signer = Signer(state) if state is not None else None
        self._sink: Sink = open_sink(target, state, terms)
        self._deadline = deadline
        self._clock = clock
        self._problem = self._sink.problem
        self._last = BEGINNING
        self._unsigned = 0
        self._unsigned_since = 0.0
        self._rotated_last = 0.0
        self._prune_due = 0.0
        self._pruning: asyncio.Future[None] | None = None
        self._hearers: list[Hearer] = []
        self._syncing: asyncio.Task[None] | None = None
        self._sync_due: float | None = None
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
        if self._terms.fsync == "each":
            self._sink.sync()
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
        if self._terms.fsync == "each":
            await self._synced()
        return self.seq

    @property
    def seq(self) -> int:
        """The number of the last record written."""
        return self._last.seq

    @property
    def may_block(self) -> bool:
        """Whether a write can take longer than the kernel's: a pipe's reader may be slow, a disk always is."""
        return str(self.target) == STDOUT or self._terms.fsync == "each"

    def hear(self, hearer: Hearer) -> None:
        """Have `hearer` called with every line that is written, in order; it may neither wait nor raise."""
        self._hearers.append(hearer)

    def tend(self) -> None:
        """Do what time alone asks for: sign, have the disk keep what was written, remove what is old.

        Called each second, in a running loop; never raises.
        """
        now = self._clock()
        if now >= self._prune_due:
            self._prune(now)
        if self._unsigned and now - self._unsigned_since >= self._terms.sign_seconds:
            self._write([])
        if self._terms.fsync == "interval" and self._sync_due is not None and now >= self._sync_due:
            self._sync_due = None
            if self._syncing is None or self._syncing.done():
                self._syncing = asyncio.get_running_loop().create_task(self._sync())

    def reopen(self) -> None:
        """Open the target anew, after a rotation.

        On failure the old file stays in use and JournalUnavailable is raised.
        """
        fresh = open_sink(self.target, self._state, self._terms)
        with contextlib.suppress(JournalUnavailable):
            self._sign()
        self._sink.close()
        self._sink = fresh

    def close(self) -> None:
        """Sign what is not signed yet and let go of the file."""
        with contextlib.suppress(JournalUnavailable):
            self._sign()
            if self._terms.fsync != "never":
                self._sink.sync()
        self._sink.close()

    def _sign(self) -> None:
        if self._unsigned:
            self._write([], signing=True)

    async def _synced(self) -> None:
        """Return once what was written so far is on the disk: all that wait for it wait for the same."""
        if self._syncing is not None and not self._syncing.done():
            await asyncio.shield(self._syncing)  # began before this was written
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.get_running_loop().create_task(self._sync())
        await asyncio.shield(self._syncing)
        if self.unsynced is not None:
            raise self.unsynced

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(self._sink.sync)
        except JournalUnavailable as error:
            self.unsynced = error
        else:
            self.unsynced = None

    async def _wait_and_write(self, left: list[_Ready]) -> list[_Ready]:
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

    def _admit(self, records: Sequence[Mapping[str, Any]], sandboxes: Collection[str] | None) -> list[_Ready]:
        now = self._clock()
        limit = self._sink.line_limit - _ROOM
        try:
            admitted = [admit(record, sandboxes, now) for record in records]
            return [_Ready(fields["sandbox"], encode(fields, limit)) for fields in admitted]
        except BadRecord:
            # whose they were is known as far as the sender is: a worker may be blamed for its own sandboxes
            # only
            owner = min(sandboxes, default=_NOBODYS) if sandboxes is not None else _NOBODYS
            self._count_lost([_Ready(owner, b"")] * len(records), Reason.INTERNAL_ERROR)
            raise

    def _write(self, lines: list[_Ready], *, signing: bool = False) -> list[_Ready]:
        """Write what was lost before and then `lines`; returns those that did not get out."""
        lost = list(self._lost)
        try:
            with self._sink.turn() as found:
                before, own = self._after(found), self._own(found)
                if self._is_rotation_due():
                    before, own = self._rotate(own, before), []
                batch = [*own, *(self._lost_line(*key) for key in lost), *lines]
                out = self._put(batch, before, signing=signing) - len(own)
        except JournalUnavailable as error:
            self._problem = error
            return lines
        self._problem = self._sink.problem
        for key in lost[: max(0, out)]:
            del self._lost[key]
        return lines[max(0, out - len(lost)) :]

    def _put(self, batch: list[_Ready], before: Link, *, signing: bool = False) -> int:
        """Write the batch behind `before` within a turn, and a head where one is due; returns how much of it got out."""
        lines: list[Line] = []
        for ready in batch:
            lines.append(chained(ready.text, before))
            before = lines[-1].link
        if self._signer is not None and self._is_head_due(len(batch), signing=signing):
            lines.append(self._signer.head(self._own_line("head", key=self._signer.id).text, before))
        out = self._sink.write(lines) if lines else 0
        if out:
            self._note_written(lines[:out], signed=out == len(lines) > len(batch))
        return min(out, len(batch))

    def _is_head_due(self, more: int, *, signing: bool) -> bool:
        unsigned, terms = self._unsigned + more, self._terms
        if not unsigned:
            return False
        old = bool(self._unsigned) and self._clock() - self._unsigned_since >= terms.sign_seconds
        return signing or old or unsigned >= terms.sign_lines

    def _note_written(self, lines: list[Line], *, signed: bool) -> None:
        self._last = lines[-1].link
        now = self._clock()
        if signed:
            self._unsigned = 0
        else:
            if not self._unsigned:
                self._unsigned_since = now
            self._unsigned += len(lines)
        if self._sync_due is None:
            self._sync_due = now + _SYNC_PAUSE
        for hearer in self._hearers:
            hearer(lines)

    def _after(self, found: Standing) -> Link:
        """Return the line that the next one follows: the last that is known to have been written, wherever that is known from."""
        return max(self._last, found.known, found.last, key=lambda link: link.seq)

    # what the journal says of itself

    def _own(self, found: Standing) -> list[_Ready]:
        """Return what is to be said of what stands in the sink before anything else is written."""
        before = self._after(found)
        told: list[_Ready] = []
        if found.rest.length:
            torn = f"{found.rest.length} {found.rest.digest}"
            told.append(self._own_line("journal", torn=torn, detail=_TORN))
        if found.last.seq and found.last != before:
            told.append(self._own_line("journal", detail=_missing(found.last, before)))
        return told

    def _is_rotation_due(self) -> bool:
        now = self._clock()
        return now - self._rotated_last >= _ROTATE_AGAIN and self._sink.is_due(now)

    def _rotate(self, own: list[_Ready], before: Link) -> Link:
        """Close the file with a head and go on in another; where that fails, the file stays in use.

        Returns the line that the next one follows.
        """
        self._put(own, before, signing=True)
        now = self._clock()
        self._prune_due = now
        last = max(before, self._last, key=lambda link: link.seq)
        try:
            self._sink.rotate(now)
        except JournalUnavailable as error:
            self._rotated_last = now  # not tried again at once
            self._put([self._own_line("journal", detail=f"not rotated: {error}")], last)
        return max(last, self._last, key=lambda link: link.seq)

    def _prune(self, now: float) -> None:
        """Remove the rotated files that are too many or too old, in a thread: a large one takes its time."""
        self._prune_due = now + _PRUNE_PAUSE
        if self._pruning is not None and not self._pruning.done():
            return
        files = doomed(Path(self.target), self._terms, now)
        said = [self._own_line("journal", detail=f"{REMOVED}{path.name}") for path in files]
        if files and not self._write(said):  # first: what nobody is told of does not go
            self._pruning = asyncio.get_running_loop().run_in_executor(None, remove, files)

    def _own_line(
        self, event: Event, *, detail: str | None = None, torn: str | None = None, key: str | None = None
    ) -> _Ready:
        attempt = new_id()
        record = Record(
            event=event,
            sandbox=_NOBODYS,
            attempt_id=attempt,
            root_id=attempt,
            detail=detail,
            torn=torn,
            key=key,
        )
        admitted = admit(record.as_dict(), None, self._clock())
        return _Ready(_NOBODYS, encode(admitted, self._sink.line_limit - _ROOM))

    # what could not be written

    def _settle(self, left: list[_Ready]) -> None:
        if not left:
            return
        self._count_lost(left, Reason.AUDIT_UNAVAILABLE)
        if self._terms.on_full == "drop-and-count" and isinstance(self._problem, Full):
            self.dropped += len(left)
            return
        raise self._problem

    def _count_lost(self, lines: Sequence[_Ready], reason: Reason) -> None:
        for line in lines:
            known = (line.sandbox, reason) in self._lost or len(self._lost) < _LOST_LIMIT
            self._lost[line.sandbox if known else _NOBODYS, reason] += 1

    def _lost_line(self, sandbox: str, reason: Reason) -> _Ready:
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
        return _Ready(sandbox, encode(fields, self._sink.line_limit - _ROOM))


def _missing(last: Link, before: Link) -> str:
    if last.seq == before.seq:
        return f"line {last.seq} is not as it was written"
    return f"the file ends with line {last.seq}; lines to {before.seq} had been written: cut off, or lost with a power failure"
