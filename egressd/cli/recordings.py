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
            with progress(doing, size) as advance:
                for line in read(file, None, tally):
                    if tally.records % _STEP == 0:
                        advance(_position(file), tally.records)
                    if line.fields.get("event") == "decision":
                        yield line.fields
        except OSError as error:
            raise BadJournal(f"{name}: {error.strerror or error}") from None
    if tally.torn:
        print(f"egressd: {tally.torn} torn or foreign lines were skipped", file=sys.stderr)


def history(names: list[str], since: str = "", *, doing: str = "reading") -> Iterator[dict[str, Any]]:
    """Yield the decisions of several journals, one after the other, from the time `since` (as records write it) on.

    Without a name it is the configured one. One alone comes with the files that were rotated out of it, oldest first.
    """
    paths = names or [configured_journal()]
    if len(paths) == 1 and paths[0] != STDIN:
        paths = [*map(str, _rotated(Path(paths[0]))), *paths]
    for path in paths:
        for fields in recorded(path, doing=doing):
            time = fields.get("time")
            # one format and one zone: text order is time order
            if not since or (isinstance(time, str) and time >= since):
                yield fields


def configured_journal() -> str:
    """Return the journal that the configuration names; raises BadJournal."""
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        journal = given_config().journal
    except ConfigError as error:
        raise BadJournal(str(error)) from None
    if isinstance(journal, Path):
        return str(journal)
    raise BadJournal("the configured journal is standard output\nhint: name the file that it was sent to")


def _rotated(journal: Path) -> list[Path]:
    from egressd.journal.rotation import rotated_files

    try:
        return rotated_files(journal)
    except OSError as error:
        raise BadJournal(f"{journal}: {error.strerror or error}") from None


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
def progress(doing: str, size: int | None) -> Iterator[Callable[[int, int], None]]:
    """Lend what is told (bytes, records) now and then; a bar on stderr where somebody looks, else nothing."""
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
