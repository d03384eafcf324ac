"""Sums of a journal: what each sandbox tried, by registered domain, and what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from egressd.cli.log_source import Choice, Opened, search, wants_index
from egressd.cli.rows import printable, readable_size
from egressd.journal.domains import registered_domain
from egressd.journal.query import Query
from egressd.journal.reader import Tally
from egressd.journal.record import timestamp

HEADER = ("SANDBOX", "LABELS", "DOMAIN", "ALLOWED", "DENIED", "ASKED", "UP", "DOWN", "LAST (UTC)")
_RIGHT = frozenset({3, 4, 5, 6, 7})
_KEYS_LIMIT = 200_000
_OTHERS = "(others)"


@dataclass(slots=True)
class Sum:
    """What one sandbox tried at one domain: attempts by verdict, payload bytes, the last time."""

    labels: str = ""
    allow: int = 0
    deny: int = 0
    ask: int = 0
    up: int = 0
    down: int = 0
    last: str = ""

    def add(self, verdict: str, attempts: int, up: int, down: int, last: str) -> None:
        """Add what some records say."""
        if verdict == "allow":
            self.allow += attempts
        elif verdict == "deny":
            self.deny += attempts
        elif verdict == "ask":
            self.ask += attempts
        self.up, self.down, self.last = self.up + up, self.down + down, max(self.last, last)


class Sums:
    """Sums by (sandbox, registered domain), in bounded memory: past a limit, domains are summed as others."""

    def __init__(self) -> None:
        self.by: dict[tuple[str, str], Sum] = {}

    def of(self, sandbox: str, host: str, labels: str) -> Sum:
        """Return the sum to add to."""
        key = (sandbox, registered_domain(host))
        if key not in self.by and len(self.by) >= _KEYS_LIMIT:
            key = (sandbox, _OTHERS)
        found = self.by.setdefault(key, Sum())
        found.labels = labels or found.labels
        return found

    def feed(self, fields: Mapping[str, Any]) -> None:
        """Add a record: a decision counts as an attempt, an end has the bytes."""
        event = fields.get("event")
        if event not in ("decision", "end"):
            return
        host = fields.get("host") or fields.get("host_raw") or fields.get("address")
        labels = fields.get("labels")
        shown = words(labels) if isinstance(labels, dict) else ""
        one = self.of(_text(fields.get("sandbox")), _text(host), shown)
        verdict = _text(fields.get("verdict")) if event == "decision" else ""
        count = _number(fields.get("count")) or 1
        up, down = _number(fields.get("bytes_up")), _number(fields.get("bytes_down"))
        one.add(verdict, count, up, down, _text(fields.get("time")))


def summed(opened: list[Opened], query: Query, tally: Tally, choice: Choice) -> Sums:
    """Return the sums of what is asked for; an end counts with its attempt as far as it says the same."""
    sums = Sums()
    if wants_index(opened, choice):
        from egressd.cli.recordings import progress
        from egressd.journal.index import Index

        for path, file in opened:
            assert path is not None
            with progress("indexing", os.fstat(file.fileno()).st_size) as advance:
                index = Index(path, file, advance)
            with closing(index):
                if not index.covers(query):
                    break
                shown_as: dict[str, str] = {"": ""}
                for sandbox, labels, host, verdict, attempts, up, down, last in index.sums(query):
                    if labels not in shown_as:
                        shown_as[labels] = words(json.loads(labels))
                    shown = shown_as[labels]
                    sums.of(sandbox, host, shown).add(verdict, attempts, up, down, timestamp(last))
        else:
            return sums
    sums = Sums()
    for _, file in opened:
        if file.seekable():
            file.seek(0)
    for line in search(opened, query, tally, ends=True, index=choice):
        if query.wants(line.fields) or query.of_ends.wants(line.fields):
            sums.feed(line.fields)
    return sums


def print_summary(sums: Sums, console: Console) -> None:
    """Print the sums, the most denied first; texts are made safe for a terminal."""
    if not sums.by:
        return
    rows = [HEADER, *rows_of(sums)]
    widths = [max(cell_len(row[n]) for row in rows) for n in range(len(HEADER))]
    for row in rows:
        cells = [_padded(cell, width, n) for n, (cell, width) in enumerate(zip(row, widths, strict=True))]
        text = "  ".join(cells).rstrip()
        if console.is_terminal:
            style = "bold" if row is HEADER else ("red" if row[4] != "0" else "")
            console.print(Text(text, style=style), soft_wrap=True)
        else:
            console.file.write(text + "\n")
    console.file.flush()


def rows_of(sums: Sums) -> list[tuple[str, ...]]:
    """Return the sums as printable rows, the most denied first."""
    order = sorted(sums.by.items(), key=lambda item: (-item[1].deny, -item[1].allow, item[0]))
    return [_row(sandbox, domain, one) for (sandbox, domain), one in order]


def words(labels: Mapping[str, Any]) -> str:
    """Return labels as one text: `task=7 name=web`."""
    return " ".join(f"{name}={text}" for name, text in labels.items())


def _row(sandbox: str, domain: str, one: Sum) -> tuple[str, ...]:
    return (
        printable(sandbox[:64]),
        printable(one.labels[:64]),
        printable(domain[:253]) or "-",
        str(one.allow),
        str(one.deny),
        str(one.ask),
        readable_size(one.up),
        readable_size(one.down),
        printable(one.last[:19]),
    )


def _padded(cell: str, width: int, column: int) -> str:
    blanks = " " * (width - cell_len(cell))
    return blanks + cell if column in _RIGHT else cell + blanks


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else 0
