"""`egressd log`: the journal as a table, or its lines as they are."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NoReturn

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from egressd.cli import log_verify
from egressd.cli.rows import HEADER, Row, row_of
from egressd.journal.reader import (
    BadFilter,
    Filter,
    Line,
    Tally,
    parse_host_filter,
    parse_since,
    read,
)
from egressd.journal.record import to_line

_STDIN = "-"
_SHOW = "show"
_SAMPLE = 500
"""Rows that are looked at for the widths before the first is printed; all others flow through."""
_COLUMNS = len(HEADER) - 1
_VERDICT = HEADER.index("VERDICT")
_WHAT, _RULE = HEADER.index("WHAT"), HEADER.index("RULE")
_LEAST_WHAT, _LEAST_RULE, _MOST_OTHER = 30, 12, 40  # a narrower terminal wraps
_STYLES = {
    "allow": "green",
    "deny": "red",
    "ask": "yellow",
    "would-deny": "yellow",
    "lost": "bold red",
    "end": "dim",
    "sandbox": "cyan",
    "policy": "cyan",
    "approval": "cyan",
}

type Verdict = Literal["allow", "deny", "ask"]


class NoJournal(Exception):
    """There is no file to read; says why and what to do."""


class _Out(Console):
    """Standard output; that its reader left is for the verb to judge."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Verbs(TyperGroup):
    """What stands below `log`; where none of them is named, the records are shown."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer hands in its own Context
        """Return what is left of the arguments, the verb first."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else [_SHOW, *args])


def register(app: typer.Typer) -> None:
    """Add the verb and those below it."""
    verbs = typer.Typer(cls=Verbs, rich_markup_mode=None)
    verbs.command(_SHOW, help="Show what was tried, and what became of it. Below: `log verify`, `log key`.")(
        log
    )
    log_verify.register(verbs)
    app.add_typer(verbs, name="log", help="Show what was tried, and what became of it.")


def log(
    file: Annotated[
        str | None, typer.Argument(help="The journal; - is standard input. Default: the configured one.")
    ] = None,
    sandbox: Annotated[str | None, typer.Option(help="Only this sandbox.")] = None,
    verdict: Annotated[Verdict | None, typer.Option(help="Only this verdict.")] = None,
    host: Annotated[str | None, typer.Option(help="Only this host; *.example.com is all below it.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 30m, 2h, 7d, or a date or time, in UTC.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The lines of the journal as they are.")] = False,
    as_test: Annotated[
        bool, typer.Option("--as-test", help="A file of tests: what was decided must be decided again.")
    ] = False,
) -> None:
    """Print the wanted records, newest last; exits 0 even if there is none."""
    wanted = _filter(sandbox, verdict, host, since)
    if isinstance(wanted, BadFilter):
        _refuse(wanted.problem)
    tally = Tally()
    try:
        with _opened(file) as journal:
            lines = read(journal, wanted, tally)
            if as_test:
                _print_tests(lines)
            elif as_json:
                _print_lines(lines)
            else:
                if isinstance(sys.stdout, io.TextIOWrapper):
                    sys.stdout.reconfigure(errors="backslashreplace")  # for locales that lack a character
                print_table((row_of(line.fields) for line in lines), _Out(highlight=False))
    except NoJournal as error:
        _refuse(str(error))
    except BrokenPipeError:  # `| head` has seen enough; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:
        _refuse(f"{file or 'journal'}: {error.strerror or error}")
    if tally.torn:
        print(f"egressd: {tally.torn} torn or foreign lines were skipped", file=sys.stderr)


def print_table(rows: Iterable[Row], console: Console) -> None:
    """Print rows under a header: coloured and cut to the width of a terminal, plain and whole elsewhere."""
    shown = map(_briefly, rows) if console.is_terminal else iter(rows)
    sample = list(islice(shown, _SAMPLE))
    if not sample:
        return
    widths = [max(cell_len(row[n]) for row in (HEADER, *sample)) for n in range(_COLUMNS)]
    if console.is_terminal:
        widths = [width if n in {_WHAT, _RULE} else min(width, _MOST_OTHER) for n, width in enumerate(widths)]
        room = console.width - sum(widths) + widths[_WHAT] + widths[_RULE] - 2 * (_COLUMNS - 1)
        rule = min(widths[_RULE], max(_LEAST_RULE, room // 3, room - widths[_WHAT]))
        widths[_RULE], widths[_WHAT] = rule, min(widths[_WHAT], max(_LEAST_WHAT, room - rule))
    for row in chain((HEADER,), sample, shown):
        cells = _laid_out(row, widths, cuts=console.is_terminal)
        if console.is_terminal:
            style = "bold" if row is HEADER else ""
            console.print(Text.assemble(*cells, style=style), soft_wrap=True)
        else:  # rich takes a hundred times as long to find that there is nothing to colour
            console.file.write("".join(text for text, _ in cells) + "\n")
    console.file.flush()


def _briefly(row: Row) -> Row:
    """Return the row with month to second of its time: `12-31 23:59:59`."""
    return row._replace(time=row.time[5:19].replace("T", " "))


def _laid_out(row: Row, widths: list[int], *, cuts: bool) -> list[tuple[str, str]]:
    """Return a row as texts with their styles, padded to the widths."""
    cells: list[tuple[str, str]] = []
    last = max((n for n in range(_COLUMNS) if row[n]), default=0)
    for n in range(last + 1):
        text, width = row[n], widths[n]
        if cuts and cell_len(text) > width:
            text = set_cell_size(text, width - 1) + "…"
        cells.append((text, _STYLES.get(row.mark, "") if n == _VERDICT else ""))
        if n < last:  # no blanks at a line's end
            cells.append((" " * (width - cell_len(text) + 2), ""))
    return cells


def _print_tests(lines: Iterator[Line]) -> None:
    from egressd.rulefiles.fixtures import Fixtures

    fixtures = Fixtures()
    for line in lines:
        fixtures.add(line.fields)
    for text in fixtures.lines():
        print(text)
    for why, number in sorted(fixtures.left_out.items()):
        print(f"egressd log: {number} left out: {why}", file=sys.stderr)


def _print_lines(lines: Iterator[Line]) -> None:
    out = sys.stdout.buffer
    for line in lines:
        # what egressd wrote is printable ASCII; a line from elsewhere is made so
        plain = line.raw.isascii() and line.raw.decode("ascii").isprintable()
        out.write(line.raw + b"\n" if plain else to_line(line.fields))
    out.flush()


def _filter(
    sandbox: str | None, verdict: Verdict | None, host: str | None, since: str | None
) -> Filter | BadFilter:
    wanted_host = parse_host_filter(host) if host is not None else None
    if isinstance(wanted_host, BadFilter):
        return BadFilter(f"--host {host!r}: {wanted_host.problem}")
    wanted_since = parse_since(since, time.time()) if since is not None else None
    if isinstance(wanted_since, BadFilter):
        return BadFilter(f"--since {since!r}: {wanted_since.problem}")
    return Filter(sandbox, verdict, wanted_host, wanted_since)


@contextlib.contextmanager
def _opened(file: str | None) -> Iterator[BinaryIO]:
    if file == _STDIN:
        yield sys.stdin.buffer
        return
    path = Path(file) if file is not None else _configured()
    try:
        # a FIFO would make a plain open wait for its writer
        opened = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        hint = (
            "" if file is not None else "\nhint: `egressd run` makes it; name another as `egressd log FILE`"
        )
        raise NoJournal(f"{path}: there is no such file{hint}") from None
    with opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise NoJournal(f"{path}: is no regular file\nhint: a stream is read by `egressd log -`")
        yield opened


def _configured() -> Path:
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


def _refuse(problem: str) -> NoReturn:
    print(f"egressd: {problem}", file=sys.stderr)
    raise typer.Exit(2)
