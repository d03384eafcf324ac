"""`egressd doctor`: whether this machine will do, line by line, and what to do where it will not. Changes nothing."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from egressd.cli.doctor_host import Host, Line, ThisHost
from egressd.cli.rows import printable

SOMETHING_FAILS = 1
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor", help="Say whether this machine will do, and what to do where it will not.")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Look at kernel, tools, permissions, limits and other people's packet rules: 0, or 1 where something fails."""
    lines = list(diagnosis(ThisHost()))
    counts = Counter(line.verdict for line in lines)
    if as_json:
        found = [
            {"name": line.name, "verdict": line.verdict, "found": line.found, "hint": line.hint or None}
            for line in lines
        ]
        print(json.dumps({"schema": 1, "ok": not counts["fail"], "lines": found}, ensure_ascii=True))
    else:
        _print(lines)
        told = f"{counts['fail']} fail, {counts['warn']} to think about, {counts['ok']} ok"
        print(f"egressd: {told}", file=sys.stderr)
    if counts["fail"]:
        raise typer.Exit(SOMETHING_FAILS)


def diagnosis(host: Host) -> Iterator[Line]:
    """Yield every finding of this machine and this configuration."""
    from egressd.cli.doctor_kernel import kernel_lines
    from egressd.cli.doctor_places import places_lines
    from egressd.cli.doctor_rules import rules_lines
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    yield from kernel_lines(host)
    yield from rules_lines(host)
    try:
        config = given_config()
    except ConfigError as error:
        first, *rest = str(error).splitlines()
        yield Line("configuration", "fail", first, " ".join(rest).removeprefix("hint: "))
    else:
        yield from places_lines(host, config)


def _print(lines: list[Line]) -> None:
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{_MARKS[line.verdict]}  {line.name:<{width}}  {printable(' '.join(line.found.split()))}")
        if line.hint and line.verdict != "ok":
            print(f"      {'':<{width}}  hint: {printable(' '.join(line.hint.split()))}")
