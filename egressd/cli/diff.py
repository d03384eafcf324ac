"""`egressd diff A B`: what two sets of rules decide differently, by profile, and what that means for recorded traffic."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from egressd.cli.rows import printable
from egressd.cli.ruleset import BadRules, loaded_rules

if TYPE_CHECKING:  # see check.py
    from egressd.rulefiles.difference import Difference, Row
    from egressd.rulefiles.replay import Impact

OK, NO, BAD_INPUT = 0, 1, 2
MOST_SHOWN = 100
"""Rows of one profile in text and Markdown; JSON has them all."""

type Format = Literal["text", "json", "markdown"]

_TITLES = {
    "allowed": "becomes allowed",
    "asked": "becomes asked for",
    "denied": "becomes denied",
    "not inspected": "is no longer inspected",
    "inspected": "becomes inspected",
    "credential": "gets another credential",
    "addresses": "may resolve elsewhere",
    "body": "bodies looked at otherwise",
    "terms": "other terms",
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("diff", help="Say what two rules folders decide differently.")(diff)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="The rules folder before.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The rules folder after.")],
    journal: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also: what it means for this recorded traffic.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The credentials that both name; otherwise the configuration's."),
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="1 if anything differs.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="What stdout gets.")] = "text",
) -> None:
    """Print what differs: 0 (with --exit-code 1 if something does), 2 bad input."""
    from egressd.cli.recordings import BadJournal, recorded
    from egressd.rulefiles.difference import difference
    from egressd.rulefiles.replay import Impact, between

    now = time.time()
    try:
        old, new = (loaded_rules(credentials, folder=folder) for folder in (before, after))
        found = difference(old, new, now)
        impact = Impact(between(old.policies, new.policies, now)) if journal is not None else None
        for fields in recorded(journal, doing="comparing") if journal is not None else ():
            assert impact is not None
            impact.take(fields)
    except (BadRules, BadJournal) as error:
        print(f"egressd diff: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    if format_ == "json":
        print(json.dumps(_as_json(found, impact), ensure_ascii=True))
    else:
        print("\n".join(_markdown(found, impact) if format_ == "markdown" else _text(found, impact)))
    raise typer.Exit(NO if exit_code and found else OK)


def _text(found: list[Difference], impact: Impact | None) -> Iterator[str]:
    from egressd.cli.impact_table import impact_lines

    for one in found:
        yield f"{one.profile}:{_only(one)}"
        for kind, rows in _by_kind(one.rows[:MOST_SHOWN]):
            yield f"  {_TITLES[kind]}:"
            yield from (f"    {printable(_line(row))}" for row in rows)
        yield from (f"  … and {left} more" for left in (_left(one),) if left)
    if not found:
        yield "no difference in what is decided"
    if impact is not None:
        yield "on the recorded traffic:"
        yield from (f"  {line}" for line in impact_lines(impact))


def _markdown(found: list[Difference], impact: Impact | None) -> Iterator[str]:
    """The same for a comment on a pull request. What rules and journals hold is set as code, which renders nothing."""
    from egressd.cli.impact_table import impact_lines

    yield "### What these rules decide differently"
    for one in found:
        yield f"\n**{one.profile}**{_only(one)}\n"
        for kind, rows in _by_kind(one.rows[:MOST_SHOWN]):
            yield f"* {_TITLES[kind]}"
            yield from (f"  * {_code(_line(row))}" for row in rows)
        yield from (f"* … and {left} more" for left in (_left(one),) if left)
    if not found:
        yield "\nNothing."
    if impact is not None:
        yield "\n### On the recorded traffic\n"
        yield from (f"    {printable(line)}" for line in impact_lines(impact))


def _by_kind(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for kind, group in groupby(rows, key=lambda row: row.kind):
        yield kind, list(group)


def _line(row: Row) -> str:
    by = f"  [{row.rule}]" if row.rule else ""
    return f"{row.what}: {row.before} → {row.after}{by}"


def _code(text: str) -> str:
    """Set a text as code in Markdown, whatever backticks are in it."""
    shown = printable(text)
    fence = "`"
    while fence in shown:
        fence += "`"
    return f"{fence} {shown} {fence}" if "`" in shown else f"{fence}{shown}{fence}"


def _only(one: Difference) -> str:
    return {"before": " (this profile is gone)", "after": " (a new profile)", None: ""}[one.only]


def _left(one: Difference) -> int:
    return max(0, len(one.rows) - MOST_SHOWN) + one.left_out


def _as_json(found: list[Difference], impact: Impact | None) -> dict[str, object]:
    from egressd.cli.impact_table import impact_json

    return {
        "profiles": [
            {
                "profile": one.profile,
                "only": one.only,
                "left_out": one.left_out,
                "rows": [
                    {"kind": r.kind, "what": r.what, "before": r.before, "after": r.after, "rule": r.rule}
                    for r in one.rows
                ],
            }
            for one in found
        ],
        "impact": impact_json(impact) if impact is not None else None,
    }
