"""Where `egressd log` and `egressd top` read: a journal with its rotated files, a stream, or what is being written."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from egressd.journal.query import Query
from egressd.journal.reader import LINE_LIMIT, Line, Tally, parse_line, read
from egressd.journal.rotation import closed_at, rotated_files

STDIN = "-"
INDEX_FROM = 256 << 20
"""Bytes of a file from which on an index is made of it, where a query can use one: half a million records."""

_POLL = 0.25

type Choice = Literal["auto", "always", "never"]


class NoJournal(Exception):
    """There is no file to read; says why and what to do."""


class Opened(NamedTuple):
    """A file of a journal; `path` is None for standard input."""

    path: Path | None
    file: BinaryIO


def open_journal(stack: ExitStack, name: str | None, since: str | None = None) -> list[Opened]:
    """Return the files of a journal, oldest first, without those that were closed before `since`; raises NoJournal.

    `name` is a file, `-`, or None for the configured journal.
    """
    if name == STDIN:
        return [Opened(None, sys.stdin.buffer)]
    path = Path(name) if name is not None else configured()
    current = _open(stack, path, configured=name is None)
    seen = os.fstat(current.file.fileno()).st_ino
    older: list[Opened] = []
    for each in rotated_files(path):
        if since is not None and closed_at(each.name) + 300 < _seconds(since):
            continue
        opened = _open(stack, each, configured=False)
        if os.fstat(opened.file.fileno()).st_ino != seen:  # it was rotated just now
            older.append(opened)
    return [*older, current]


def search(
    opened: list[Opened], query: Query, tally: Tally, *, ends: bool, index: Choice = "auto"
) -> Iterator[Line]:
    """Yield the records that are asked for, in order; with `ends` also all that may end such an attempt."""
    for path, file in opened:
        if path is not None and query.terms and _wants_index(file, index):
            yield from _by_index(path, file, query, tally, ends=ends)
            continue
        likely = query.likely_or_end if ends else query.likely
        for line in read(file, None, tally, likely=likely if query.needles else None):
            if query.wants(line.fields) or (ends and line.fields.get("event") == "end"):
                yield line


def follow(opened: Opened, query: Query, *, idle: Callable[[], None] = lambda: None) -> Iterator[Line]:
    """Yield what is asked for of a file as it is written, over rotations too; never ends. `idle` is called at its end."""
    path, file = opened
    half = b""
    while True:
        raw = file.readline(LINE_LIMIT + 1)
        if raw.endswith(b"\n") or len(raw) > LINE_LIMIT:
            line, half = parse_line((half + raw).rstrip(b"\n")), b""
            if line is not None and query.wants(line.fields):
                yield line
            continue
        half += raw
        if raw:
            continue
        idle()
        if path is None:
            return
        time.sleep(_POLL)
        fresh = _replaced(path, file)
        if fresh is not None and not file.readline(1):
            file.close()
            file, half = fresh, b""
        elif fresh is not None:
            fresh.close()
            file.seek(-1, os.SEEK_CUR)


def wants_index(opened: list[Opened], index: Choice) -> bool:
    """Say whether every file is to be asked by its index."""
    return all(path is not None and _wants_index(file, index) for path, file in opened)


def configured() -> Path:
    """Return the configured journal; raises NoJournal."""
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        journal = given_config().journal
    except ConfigError as error:
        raise NoJournal(str(error)) from None
    if isinstance(journal, Path):
        return journal
    hint = "hint: name the file that it was sent to, or pipe it to `egressd log -`"
    raise NoJournal(f"the configured journal is standard output\n{hint}")


def _open(stack: ExitStack, path: Path, *, configured: bool) -> Opened:
    try:
        # a FIFO would make a plain open wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        hint = "\nhint: `egressd run` makes it; name another as `egressd log FILE`" if configured else ""
        raise NoJournal(f"{path}: there is no such file{hint}") from None
    file = stack.enter_context(os.fdopen(descriptor, "rb", 1 << 20))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise NoJournal(f"{path}: is no regular file\nhint: a stream is read by `egressd log -`")
    return Opened(path, file)


def _wants_index(file: BinaryIO, index: Choice) -> bool:
    return index == "always" or (index == "auto" and os.fstat(file.fileno()).st_size >= INDEX_FROM)


def _by_index(path: Path, file: BinaryIO, query: Query, tally: Tally, *, ends: bool) -> Iterator[Line]:
    import sqlite3

    from egressd.cli.recordings import progress
    from egressd.journal.index import Index

    try:
        with progress("indexing", os.fstat(file.fileno()).st_size) as advance:
            index = Index(path, file, advance)
    except (OSError, sqlite3.Error) as error:
        print(f"egressd: {path}: no index, so every line is read: {error}", file=sys.stderr)
        file.seek(0)
        yield from search([Opened(path, file)], query, tally, ends=ends, index="never")
        return
    with closing(index):
        for raw in index.lines(query, ends=ends):
            line = parse_line(raw)
            if line is None:  # the file was changed below the index
                tally.torn += 1
                continue
            tally.records += 1
            if query.wants(line.fields) or (ends and line.fields.get("event") == "end"):
                yield line


def _replaced(path: Path, file: BinaryIO) -> BinaryIO | None:
    """Return the file that took the place of an open one, if one did."""
    try:
        there, here = os.stat(path), os.fstat(file.fileno())
        if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) and there.st_size >= file.tell():
            return None
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 1 << 20)
    except OSError:  # between two files
        return None


def _seconds(timestamp: str) -> float:
    import datetime as dt

    return dt.datetime.fromisoformat(timestamp).timestamp()
