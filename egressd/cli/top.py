"""`egressd top`: who tries what right now, from the journal as it grows; `--once` prints the last minute and ends."""

from __future__ import annotations

import datetime as dt
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO, NamedTuple

import typer
from rich.cells import cell_len, set_cell_size

from egressd.cli.log_source import NoJournal, Opened, follow, open_journal
from egressd.cli.log_summary import HEADER, Sums, rows_of
from egressd.cli.rows import row_of
from egressd.journal.query import KEYS, Query, is_term, parse_query
from egressd.journal.reader import BadFilter, Line

_CLEAR, _HOME, _END_OF_LINE, _BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_TAIL = 32 << 20
"""Bytes at the journal's end that are read first: what a busy host writes in a minute or more."""
_MOST = 200_000
_DENIALS = 8


class Seen(NamedTuple):
    """A record and when it was made, Unix seconds."""

    at: float
    fields: dict[str, Any]


class Window:
    """The records of the last while, in bounded memory."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen: deque[Seen] = deque(maxlen=_MOST)

    def feed(self, line: Line, now: float) -> None:
        """Add a record; what is too old by now is left out."""
        at = _moment(line.fields)
        if (
            at is not None
            and now - at <= self.seconds
            and line.fields.get("event") in ("decision", "end", "alert")
        ):
            self._seen.append(Seen(at, line.fields))

    def records(self, now: float) -> list[dict[str, Any]]:
        """Return what is not too old, and forget the rest."""
        while self._seen and now - self._seen[0].at > self.seconds:
            self._seen.popleft()
        return [seen.fields for seen in self._seen]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("top", help="Watch who tries what: sandbox by registered domain, and the latest denials.")(
        top
    )


def top(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY:VALUE]...", help=f"The journal, and what to watch. Keys: {', '.join(KEYS)}."
        ),
    ] = None,
    window: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that are looked back on.")] = 60.0,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Draw the last while, again and again until Ctrl-C; exits 0."""
    query = parse_query(filter(is_term, words or []), time.time())
    files = [word for word in words or [] if not is_term(word)]
    if isinstance(query, BadFilter) or len(files) > 1:
        print(
            f"egressd: {query.problem if isinstance(query, BadFilter) else 'one journal at a time'}",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    try:
        with ExitStack() as stack:
            opened = open_journal(stack, files[0] if files else None)[-1]
            if once or not sys.stdout.isatty():
                _draw_once(opened, query, Window(window))
            else:
                _draw_on(opened, query, Window(window), interval)
    except NoJournal as error:
        print(f"egressd: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        pass
    finally:
        if sys.stdout.isatty() and not once:
            print(_SHOW, end="", flush=True)


def picture(records: list[dict[str, Any]], window: float, size: tuple[int, int]) -> list[str]:
    """Return the lines of a picture for a terminal of this size (columns, lines); every text in it is printable."""
    columns, height = size
    sums, verdicts, sandboxes = Sums(), Counter[str](), set[str]()
    latest: deque[dict[str, Any]] = deque(maxlen=_DENIALS)
    for fields in records:
        sums.feed(fields)
        if fields.get("event") == "decision":
            count = fields.get("count")
            verdicts[str(fields.get("verdict"))] += count if type(count) is int else 1
            sandboxes.add(str(fields.get("sandbox")))
        if fields.get("verdict") in ("deny", "ask") and fields.get("event") in ("decision", "alert"):
            latest.append(fields)
    total = sum(verdicts.values())
    share = f"{100 * (verdicts['deny'] + verdicts['ask']) / total:.1f} %" if total else "0 %"
    head = (
        f"{total} attempts in {window:g} s ({total / window:.1f}/s), {share} denied or asked for, "
        f"{len(sandboxes)} sandboxes, {dt.datetime.now(dt.UTC):%H:%M:%S} UTC"
    )
    below = ["", "LATEST DENIALS", *(_denial(fields) for fields in reversed(latest))] if latest else []
    room = max(3, height - len(below) - 3)
    table = rows_of(sums)
    rows = [HEADER, *table[: room - 1]]
    widths = [max(cell_len(row[n]) for row in rows) for n in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    more = [f"and {len(table) - room + 1} more"] if len(table) > room - 1 else []
    return [_fitted(line, columns) for line in (head, "", *lines, *more, *below)]


def _draw_once(opened: Opened, query: Query, window: Window) -> None:
    _read_tail(opened.file, query, window)
    columns, _ = shutil.get_terminal_size((160, 24))
    width = columns if sys.stdout.isatty() else 10_000
    for line in picture(window.records(time.time()), window.seconds, (width, 60)):
        print(line)


def _draw_on(opened: Opened, query: Query, window: Window, interval: float) -> None:
    _read_tail(opened.file, query, window)
    print(_HIDE + _CLEAR, end="")
    due = [0.0]

    def look() -> None:
        if time.monotonic() >= due[0]:
            due[0] = time.monotonic() + interval
            columns, height = shutil.get_terminal_size()
            lines = picture(window.records(time.time()), window.seconds, (columns, height))
            print(
                _HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in lines[: height - 1]) + _BELOW,
                end="",
                flush=True,
            )

    for line in follow(opened, query, idle=look):
        window.feed(line, time.time())
        look()


def _read_tail(file: BinaryIO, query: Query, window: Window) -> None:
    now = time.time()
    for line in _tail(file):
        if query.wants(line.fields):
            window.feed(line, now)


def _tail(file: BinaryIO) -> Iterator[Line]:
    from egressd.journal.reader import read

    if file.seekable():
        file.seek(0, 2)
        begin = max(0, file.tell() - _TAIL)
        file.seek(begin)
        if begin:
            file.readline()
    yield from read(file)


def _denial(fields: dict[str, Any]) -> str:
    row = row_of(fields)
    return "  ".join(filter(None, (row.time[11:19], row.sandbox, row.verdict, row.what, row.reason)))


def _fitted(line: str, columns: int) -> str:
    return line if cell_len(line) <= columns else set_cell_size(line, columns - 1) + "…"


def _moment(fields: dict[str, Any]) -> float | None:
    try:
        return dt.datetime.fromisoformat(fields["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
