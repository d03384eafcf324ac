"""Rows of records as a table: coloured and cut to its width on a terminal, plain and whole elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from egressd.cli.rows import HEADER, Row

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
    "alert": "bold yellow",
    "approval": "cyan",
}

_USUAL = Row(
    "2027-01-15T08:00:00.123Z",
    "sbx-5d1f0c9ab2e47a36c8d0",
    "connection",
    "would-deny",
    "x" * 60,
    "x" * 20,
    "x" * 20,
    "",
    "",
)
"""How wide rows are that nobody has seen yet."""


def print_table(rows: Iterable[Row], console: Console, *, at_once: bool = False) -> None:
    """Print rows under a header: coloured and cut to the width of a terminal, plain and whole elsewhere.

    `at_once`: each as it comes, in columns that are wide enough for most.
    """
    shown = map(_briefly, rows) if console.is_terminal else iter(rows)
    sample = [_USUAL] if at_once else list(islice(shown, _SAMPLE))
    if not sample:
        return
    widths = [max(cell_len(row[n]) for row in (HEADER, *sample)) for n in range(_COLUMNS)]
    if console.is_terminal:
        widths = [width if n in {_WHAT, _RULE} else min(width, _MOST_OTHER) for n, width in enumerate(widths)]
        room = console.width - sum(widths) + widths[_WHAT] + widths[_RULE] - 2 * (_COLUMNS - 1)
        rule = min(widths[_RULE], max(_LEAST_RULE, room // 3, room - widths[_WHAT]))
        widths[_RULE], widths[_WHAT] = rule, min(widths[_WHAT], max(_LEAST_WHAT, room - rule))
    for row in chain((HEADER,), () if at_once else sample, shown):
        cells = _laid_out(row, widths, cuts=console.is_terminal)
        if console.is_terminal:
            style = "bold" if row is HEADER else ""
            console.print(Text.assemble(*cells, style=style), soft_wrap=True)
        else:  # rich takes a hundred times as long to find that there is nothing to colour
            console.file.write("".join(text for text, _ in cells) + "\n")
        if at_once:
            console.file.flush()
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
