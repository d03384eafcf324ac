"""Sinks: where lines go. A file, shared politely with other runs, or a stream whose reader may stop reading.

Neither waits for a reader: `write` gives back how many whole lines got out, and the rest is the caller's to
try again. A sink never removes a byte; where half a line got out, the next one begins on a new line.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from egressd.journal.chain import BEGINNING, NOTHING, Line, Link, Rest

LINE_LIMIT = 16 * 1024
STDOUT = "-"

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

OPEN_FLAGS = os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class JournalUnavailable(Exception):
    """The journal cannot be written now, so what needed the record is denied; the text is for an operator."""


class Busy(JournalUnavailable):
    """The journal would have to be waited for: its reader is slow, or another run holds the file."""


class Full(JournalUnavailable):
    """There is no room for the journal: the disk is full, or a quota is spent."""


class Standing(NamedTuple):
    """What a write finds: the last line in the sink, the last that is known to have been written, and what is no line."""

    last: Link = BEGINNING
    known: Link = BEGINNING
    rest: Rest = NOTHING


class Sink(Protocol):
    """Takes whole lines, one turn at a time."""

    line_limit: int
    problem: JournalUnavailable

    def turn(self) -> AbstractContextManager[Standing]:
        """Hold the sink for one write; gives what stands in it; raises JournalUnavailable."""

    def write(self, lines: Sequence[Line]) -> int:
        """Within a turn, return how many whole lines got out; if not all, `problem` says why."""

    def is_due(self, now: float) -> bool:
        """Within a turn, say whether it is time for another file, by size or by the age of what is in it."""

    def rotate(self, now: float) -> None:
        """Within a turn, go on in another file; raises JournalUnavailable, and then the old one stays in use."""

    def sync(self) -> None:
        """Have what was written outlive a power failure, where the sink can; raises JournalUnavailable. Any thread may."""

    def fileno(self) -> int | None:
        """Return a descriptor that turns writable when a Busy sink is worth another try, None without one."""

    def close(self) -> None:
        """Let go of the descriptor."""


def is_stream(path: Path) -> bool:
    """Say whether a path is a FIFO or a character device; raises JournalUnavailable for a symbolic link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise JournalUnavailable(
            f"{path}: is a symbolic link; name the file itself, or `-` for standard output"
        )
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def open_target(path: Path, access: int) -> int:
    """Return a descriptor of a file (O_RDWR, made 0600 where there is none) or a stream (O_WRONLY); raises OSError too."""
    create = os.O_CREAT if access == os.O_RDWR else 0
    if create:
        make_parents(path.parent)
    fd = os.open(path, OPEN_FLAGS | access | create, 0o600)
    mode = os.fstat(fd).st_mode
    # asked again of the open file: the path may have been exchanged since it was looked at
    fits = stat.S_ISREG(mode) if create else stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    if not fits or (create and mode & stat.S_IWOTH):
        os.close(fd)
        what = "anybody may write to it" if fits else "is no regular file, FIFO or character device"
        raise JournalUnavailable(f"{path}: {what}")
    return fd


def make_parents(directory: Path) -> None:
    """Make a directory, and those above it, 0700 where they are new."""
    if not directory.is_dir():
        make_parents(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def unavailable(where: Path | str, error: OSError) -> JournalUnavailable:
    """Return what an error of the system means for the journal."""
    kind = Full if error.errno in _NO_ROOM else JournalUnavailable
    return kind(f"{where}: {os.strerror(error.errno) if error.errno else error}")


def whole_lines(lines: Sequence[Line], out: int) -> int:
    """Return how many of the lines the first `out` bytes cover."""
    for index, line in enumerate(lines):
        if out < len(line.text):
            return index
        out -= len(line.text)
    return len(lines)
