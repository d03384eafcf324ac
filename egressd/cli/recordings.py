"""The journal that a verb looks back on: its decisions one after the other, in flat memory, with progress on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

STDIN = "-"
_STEP = 5000
"""Records between two looks at the clock."""


class BadJournal(Exception):
    """There is no journal to read; says why."""


def recorded(name: str, *, doing: str = "reading") -> Iterator[dict[str, Any]]:
    """Yield the fields of every decision in the journal `name`, `-` being standard input; raises BadJournal.

    On a terminal, stderr shows how far it is; lines that are no records are counted there at the end.
    """
    from egressd.journal.reader import Tally, read

    tally = Tally()
    with _opened(name) as file:
        size = _size(file)
        try:
            with _progress(doing, size) as advance:
                for line in read(file, None, tally):
                    if tally.records % _STEP == 0:
                        advance(_position(file), tally.records)
                    if line.fields.get("event") == "decision":
                        yield line.fields
        except OSError as error:
            raise BadJournal(f"{name}: {error.strerror or error}") from None
    if tally.torn:
        print(f"egressd: {tally.torn} torn or foreign lines were skipped", file=sys.stderr)


def _opened(name: str) -> BinaryIO:
    if name == STDIN:
        return sys.stdin.buffer
    try:
        # a FIFO would make a plain open wait for its writer
        file = os.fdopen(os.open(Path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 1 << 20)
    except OSError as error:
        raise BadJournal(f"{name}: {error.strerror or error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadJournal(f"{name}: is no regular file\nhint: a stream is read by `-`")
    return file


def _size(file: BinaryIO) -> int | None:
    try:
        found = os.fstat(file.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _position(file: BinaryIO) -> int:
    try:
        return file.tell()
    except OSError:
        return 0


@contextlib.contextmanager
def _progress(doing: str, size: int | None) -> Iterator[Callable[[int, int], None]]:
    """Lend what is told (bytes, records) now and then; a bar where somebody looks, else nothing."""
    if not sys.stderr.isatty():
        yield lambda _position, _records: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    said = TextColumn("{task.fields[records]:,} records")
    columns = (TextColumn("{task.description}"), BarColumn(), said, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=size, records=0)
        yield lambda position, records: bar.update(task, completed=position, records=records)
