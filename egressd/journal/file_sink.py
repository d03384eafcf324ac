"""The journal as a file, which several runs share: locked for each write, one chain, rotated by whoever meets its limit."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from egressd.journal.chain import BEGINNING, NOTHING, Line, read_end
from egressd.journal.rotation import Terms, folder_of, moment_of, rotated_path
from egressd.journal.sinks import (
    LINE_LIMIT,
    Busy,
    JournalUnavailable,
    Standing,
    open_target,
    unavailable,
    whole_lines,
)
from egressd.journal.tip import Tip

_LOCK_TRIES = 20
_LOCK_PAUSE = 0.0005  # another run holds the lock for one write
_FIRST_LINE = LINE_LIMIT


class FileSink:
    """A regular file, locked for each write so that several runs can share it and its chain.

    With `state`, a directory, the last line is also kept outside the file (`tip`).
    """

    line_limit = LINE_LIMIT

    def __init__(self, path: Path, state: Path | None, terms: Terms) -> None:
        """Open the file; raises OSError and JournalUnavailable."""
        self.problem = JournalUnavailable(f"{path}: nothing was tried yet")
        self._path = path
        self._terms = terms
        self._tip: Tip | None = None
        self._known = BEGINNING
        self._born: float | None = None
        self._last, self._rest = BEGINNING, NOTHING
        self._size = -1
        self._take(open_target(path, os.O_RDWR))
        try:
            if state is not None:
                self._tip = Tip(state, path)
                if (
                    terms.max_size or terms.max_age
                ):  # there before a sandbox is: what is not there is not masked
                    folder_of(path).mkdir(mode=0o700, exist_ok=True)
        except OSError:
            os.close(self._fd)
            raise

    @contextmanager
    def turn(self) -> Iterator[Standing]:
        """Hold the file's lock for one write and yield what stands in it."""
        try:
            size = self._lock()
        except OSError as error:
            raise unavailable(self._path, error) from error
        try:
            if size != self._size:
                self._last, self._rest = read_end(self._fd, size)
                self._size = size
            yield Standing(self._last, self._known, self._rest)
        except OSError as error:
            raise unavailable(self._path, error) from error
        finally:
            self._unlock()

    def write(self, lines: Sequence[Line]) -> int:
        """Append the lines in one write where the disk lets us."""
        lead = b"" if self._rest.ended else b"\n"
        data = memoryview(lead + b"".join(line.text for line in lines))
        out = 0
        try:
            while out < len(data):
                out += os.write(self._fd, data[out:])
        except OSError as error:
            self.problem = unavailable(self._path, error)
        whole = whole_lines(lines, max(0, out - len(lead)))
        if whole:
            self._last = self._known = lines[whole - 1].link
            if self._tip is not None:
                with suppress(OSError):  # a full disk: the journal then goes on ahead of it
                    self._tip.write(self._last)
        if out == len(data):
            self._rest = NOTHING
            self._size += out
        else:
            self._size = -1  # half a line is there, which the next turn looks at
        return whole

    def is_due(self, now: float) -> bool:
        """Say whether the file is over a limit; an empty one never is, nor one whose end nobody else keeps."""
        terms = self._terms
        if self._size <= 0 or self._tip is None:
            return False
        if terms.max_size and self._size >= terms.max_size:
            return True
        if not terms.max_age:
            return False
        if self._born is None:
            self._born = moment_of(os.pread(self._fd, _FIRST_LINE, 0), now)
        return now - self._born >= terms.max_age

    def rotate(self, now: float) -> None:
        """Move the file into the folder beside it and go on in a new one."""
        target = rotated_path(self._path, now, self._last.seq)
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(self._path, target)
            fresh = open_target(self._path, os.O_RDWR)  # the lock of the tip keeps others out of it
        except OSError as error:
            raise unavailable(target, error) from error
        last = self._last
        old = self._fd
        self._take(fresh)
        os.close(old)
        self._size, self._known = 0, last

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        try:
            descriptor = os.dup(self._fd)
        except OSError as error:
            raise unavailable(self._path, error) from error
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise unavailable(self._path, error) from error
        finally:
            os.close(descriptor)

    def fileno(self) -> int | None:
        """None: a lock cannot be polled for."""
        return None

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        if self._tip is not None:
            self._tip.close()

    def _take(self, fd: int) -> None:
        """Go on in a file of which nothing is known yet."""
        self._fd = fd
        self._size = -1  # what the last look left behind; another size means another writer
        self._last, self._rest = BEGINNING, NOTHING
        self._born = None

    def _lock(self) -> int:
        """Lock the file to go on in; returns its size."""
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._tip is not None:
                    self._tip.lock()
            except BlockingIOError:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                time.sleep(_LOCK_PAUSE)
                continue
            status = os.fstat(self._fd)
            if self._is_current(status):
                return status.st_size
            self._unlock()
            fresh = open_target(self._path, os.O_RDWR)
            os.close(self._fd)
            self._take(fresh)
        raise Busy(f"{self._path}: another process holds its lock")

    def _unlock(self) -> None:
        if self._tip is not None:
            self._tip.unlock()
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _is_current(self, here: os.stat_result) -> bool:
        """Say whether this is the file to go on in: not one that was removed, nor one that another run has rotated."""
        if not here.st_nlink:
            return False  # what we wrote on would vanish with the descriptor
        if self._tip is None:
            return True
        tip = self._tip.read()
        if tip == self._known:
            return True
        self._known, self._size = tip, -1  # another run wrote, here or in a file that took this one's place
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
