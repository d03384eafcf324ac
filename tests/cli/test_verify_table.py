"""How a verification looks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from egressd.cli.verify_table import VerifyTable, write_junit


def row(verdict: str, name: str, detail: str, why: str = "W", seconds: float = 0.0) -> dict[str, Any]:
    told = {"verdict": verdict, "name": name, "detail": detail, "why": why, "seconds": seconds}
    return told | {"tries": f"tries {name}", "part": "network"}


ROWS = [
    row("held", "raw-sockets", "10 [red]kinds[/]"),
    row("open", "udp", "11.6.6.6: sent", "UDP carries anything", 1.0),
    row("not tried", "vsock", "no <kernel> for it"),
]


def shown(*rows: dict[str, Any], terminal: bool = False) -> str:
    table = VerifyTable()
    page = io.StringIO()
    table._out = Console(file=page, width=120, force_terminal=terminal, highlight=False)
    for row in rows:
        table.add(row)
    table.close_with({"notes": ["a note"], "status": 1, "summary": "verify: 1 held, 1 open"})
    return page.getvalue()


def test_each_probe_has_a_line_and_an_open_one_says_why_it_matters() -> None:
    lines = [" ".join(line.split()) for line in shown(*ROWS).splitlines()]
    assert lines == [
        "PROBE FOUND",
        "held raw-sockets 10 [red]kinds[/]",
        "open udp 11.6.6.6: sent",
        "why it matters: UDP carries anything",
        "vsock not tried: no <kernel> for it",
        "",
        "a note",
        "verify: 1 held, 1 open",
    ]


def test_a_terminal_gets_colour_and_a_pipe_does_not() -> None:
    assert "\x1b[1;31mopen" in shown(ROWS[1], terminal=True)
    assert "\x1b" not in shown(ROWS[1])


def test_junit_counts_open_as_failed_and_the_rest_as_skipped(tmp_path: Path) -> None:
    write_junit({"probes": ROWS, "seconds": 1.5}, tmp_path / "x.xml")
    suite = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert dict(suite.attrib) == {
        "name": "egressd verify", "tests": "3", "failures": "1", "errors": "0", "skipped": "1", "time": "1.5",
    }  # fmt: skip
    held, failed, skipped = suite
    assert list(held) == []
    assert (failed[0].tag, failed[0].get("message"), failed[0].text) == (
        "failure",
        "11.6.6.6: sent",
        "tries udp\nUDP carries anything",
    )
    assert (skipped[0].tag, skipped[0].get("message")) == ("skipped", "no <kernel> for it")
