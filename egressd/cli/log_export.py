"""Records for other programs: lines of JSON as they stand, or comma-separated values."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable
from typing import Any

from egressd.cli.rows import printable
from egressd.journal.reader import Line
from egressd.journal.record import FIELDS, to_line

_FORMULA = ("=", "+", "-", "@")
"""How a cell begins that a spreadsheet would run."""


def print_json(lines: Iterable[Line]) -> None:
    """Print each record as its line stands in the journal."""
    out, at_once = sys.stdout.buffer, sys.stdout.isatty()
    for line in lines:
        # what egressd wrote is printable ASCII; a line from elsewhere is made so
        plain = line.raw.isascii() and line.raw.decode("ascii").isprintable()
        out.write(line.raw + b"\n" if plain else to_line(line.fields))
        if at_once:
            out.flush()
    out.flush()


def print_ocsf(lines: Iterable[Line]) -> None:
    """Print each record as an OCSF event."""
    from egressd.journal.ocsf import event_of

    for line in lines:
        sys.stdout.buffer.write(to_line(event_of(line.fields)))
    sys.stdout.buffer.flush()


def print_csv(lines: Iterable[Line]) -> None:
    """Print a header and a row for each record, every field a column (RFC 4180); objects are JSON."""
    table = csv.writer(sys.stdout, lineterminator="\r\n")
    table.writerow(FIELDS)
    for line in lines:
        table.writerow([_cell(line.fields.get(name)) for name in FIELDS])
    sys.stdout.flush()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return f"'{text}" if text.startswith(_FORMULA) else text
