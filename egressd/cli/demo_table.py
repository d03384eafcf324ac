"""How a demo looks on a terminal: rows as they come, what is being tried, the accounts, and where to look further."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.table import Table
from rich.text import Text

from egressd.cli.live_table import LiveTable

_PLAIN_WIDTH = 150
"""Columns where there is no terminal to ask."""
_SHARES = (25, 32, 24, 19)
"""What the columns behind the first have of the width, in hundredths."""
_WORDS = {"allow": ("allowed", "green"), "deny": ("refused", "red")}
_FIRST = 8
_HEADER = ("", "TRIED", "THE CLIENT SAW", "THE RECORD", "WITHOUT EGRESSD")
_BRIEF = 40
"""Letters that are shown of what a success brought: that it succeeded is the point."""


class DemoTable(LiveTable):
    """Prints each row when it is added, and keeps one line below it for what is going on; `silent` prints nothing."""

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__(_HEADER, _PLAIN_WIDTH, silent=silent)

    def add(self, row: dict[str, Any]) -> None:
        """Print one move and what came of it."""
        word, colour = _WORDS[row["verdict"]] if not row["surprises"] else ("SURPRISE", "bold yellow")
        without = row["without"]
        self.print_row(
            Text(word, style=colour),
            Text(row["tried"]),
            Text(_brief(row["saw"]) if row["verdict"] == "allow" else row["saw"]),
            Text(_record(row), style=colour),
            Text("" if without is None else _brief(without["saw"]), style="dim"),
        )
        for surprise in row["surprises"]:
            self._out.print(Text(f"  ! {surprise}", style="bold yellow"))

    def close_with(self, document: dict[str, Any]) -> None:
        """Print the accounts, where to look further, and the last line."""
        if "accounts" in document:
            self._print_accounts(document["accounts"], document["left"])
        self._print_further(document["kept"])
        self._out.print(f"[dim]took {document['seconds']} s[/]")
        style = "bold yellow" if document["surprises"] else "bold green"
        self._out.print(Text(document["summary"], style=style), soft_wrap=True)

    def _print_accounts(self, accounts: list[dict[str, Any]], left: dict[str, Any]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("ATTEMPTS")
        table.add_column("SENT", justify="right")
        table.add_column("RECORDED", justify="right")
        table.add_column("SENT IS COUNTED BY")
        for account in accounts:
            style = "green" if account["sent"] == account["recorded"] else "bold yellow"
            numbers = (Text(str(account[name]), style=style) for name in ("sent", "recorded"))
            table.add_row(account["kind"], *numbers, Text(account["by"], style="dim"))
        self._out.print()
        self._out.print(table)
        self._out.print()
        strangers = ", ".join(left["strangers"]) or "nobody else"
        self._out.print(
            f"Packets that reached the attacker: {left['attacker']}; metadata endpoints: {left['metadata']}."
        )
        self._out.print(Text(f"Names that DNS was asked for: {', '.join(left['queries'])}."))
        self._out.print(Text(f"Beyond DNS and the allowed hosts, packets went to {strangers}."))

    def _print_further(self, kept: str | None) -> None:
        self._out.print()
        if kept is None:
            lines = ["To look further: --keep keeps the rules and the journal (make demo ARGS=--keep)."]
        else:
            egressd = sys.argv[0] if os.path.basename(sys.argv[0]) == "egressd" else "egressd"
            lines = [
                f"Rules and journal are kept in {kept}. To look further:",
                f"  {egressd} log {kept}/journal.jsonl --verdict deny",
                f"  {egressd} explain 'POST https://www.lab-origin.com/upload' --profile lab --rules {kept}/rules",
            ]
        for line in [
            *lines,
            "README.md tells how to run your own command; docs/records.md explains every field.",
        ]:
            self._out.print(Text(line), soft_wrap=True)

    def _print(self, *cells: Text) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        room = self._out.width - 2 * len(cells) - _FIRST
        table.add_column(width=_FIRST)
        for share in _SHARES:
            table.add_column(width=max(8, room * share // 100), overflow="fold")
        table.add_row(*cells)
        self._out.print(table)


def _brief(text: str) -> str:
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 1]}…"


def _record(row: dict[str, Any]) -> str:
    record = row["record"]
    if record is None:
        return str(row["law"] or "none")
    said = f"{record['layer']}: {record['verdict']} {record['reason']}"
    rule = (
        f", rule {record['rule']} ({record['place']})"
        if "rule" in record and record["verdict"] != "allow"
        else ""
    )
    law = f" ({row['law']})" if row["law"] else ""
    return f"{said}{rule}{law}"
