"""How a verification looks: a row for each probe as it is made, on a terminal with a line of progress below; and as JUnit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.table import Table
from rich.text import Text

from egressd.cli.live_table import LiveTable
from egressd.verify.probe import HELD, OPEN, UNTRIED

_PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""
_NAME = 24
_VERDICT = 10
_HEADER = ("", "PROBE", "FOUND")
_COLOURS = {HELD: "green", OPEN: "bold red", UNTRIED: "yellow"}


class VerifyTable(LiveTable):
    """Prints each row when it is added, and keeps one line below for what is going on; `silent` prints nothing."""

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__(_HEADER, _PLAIN_WIDTH, silent=silent)

    def add(self, row: dict[str, Any]) -> None:
        """Print one probe and what it found."""
        colour = _COLOURS[row["verdict"]]
        detail = row["detail"] if row["verdict"] != UNTRIED else f"not tried: {row['detail']}"
        word = "" if row["verdict"] == UNTRIED else row["verdict"]
        self.print_row(
            Text(word, style=colour), Text(row["name"]), Text(detail, style="dim" if word != OPEN else colour)
        )
        if row["verdict"] == OPEN:
            self.print_row(Text(""), Text(""), Text(f"why it matters: {row['why']}"))

    def close_with(self, document: dict[str, Any]) -> None:
        """Print what left, and the last line."""
        self._out.print()
        for note in document["notes"]:
            self._out.print(Text(note), soft_wrap=True)
        style = "bold green" if document["status"] == 0 else "bold red"
        self._out.print(Text(document["summary"], style=style), soft_wrap=True)

    def _print(self, *cells: Text) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=_VERDICT)
        table.add_column(width=_NAME)
        table.add_column(width=max(20, self._out.width - _VERDICT - _NAME - 6), overflow="fold")
        table.add_row(*cells)
        self._out.print(table)


def write_junit(document: dict[str, Any], path: Path) -> None:
    """Write the probes as JUnit XML test cases: open ones are failures, those that were not tried skipped. Raises OSError."""
    rows = document["probes"]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (OPEN, UNTRIED)}
    suite = ElementTree.Element(
        "testsuite",
        name="egressd verify",
        tests=str(len(rows)),
        failures=str(counts[OPEN]),
        errors="0",
        skipped=str(counts[UNTRIED]),
        time=str(document["seconds"]),
    )
    for row in rows:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"egressd.verify.{row['part']}",
            name=row["name"],
            time=str(row["seconds"]),
        )
        if row["verdict"] == OPEN:
            ElementTree.SubElement(
                case, "failure", message=row["detail"]
            ).text = f"{row['tries']}\n{row['why']}"
        elif row["verdict"] == UNTRIED:
            ElementTree.SubElement(case, "skipped", message=row["detail"])
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
