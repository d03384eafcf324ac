"""`egressd review`: the rules as somebody sees them who asks what is still needed: unused, ending, ownerless, wide, with keys."""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from egressd.cli.ruleset import BadRules, loaded_rules

if TYPE_CHECKING:
    from egressd.rulefiles.load import Rules
    from egressd.rulefiles.review import Section, Usage

OK, BAD_INPUT = 0, 2

type Format = Literal["text", "html", "csv", "json"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "review",
        help="List what a reviewer of the rules looks at: unused, expiring, ownerless, widest, credentialed.",
    )(review)


def review(
    journal: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What was recorded: which rules are used. Again for more files."),
    ] = None,
    unused: Annotated[
        str, typer.Option(metavar="AGE", help="A rule that decided nothing for so long is unused.")
    ] = "90d",
    soon: Annotated[
        int, typer.Option(metavar="DAYS", min=0, help="What ends within so many days is told.")
    ] = 30,
    section: Annotated[
        list[str] | None,
        typer.Option(help="Only this: unused, expiring, ownerless, widest or credentialed. Again for more."),
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="What stdout gets.")] = "text",
) -> None:
    """Print the review: 0, or 2 where rules or journal cannot be read."""
    from egressd.cli import review_forms as forms
    from egressd.cli.recordings import BadJournal
    from egressd.rulefiles.review import review as rows_of

    now = time.time()
    today = dt.datetime.fromtimestamp(now, dt.UTC).date()
    try:
        wanted = _sections(section)
        rules = loaded_rules(credentials)
        usage, notes = _usage(rules, journal, unused, now)
    except (BadRules, BadJournal, ValueError) as error:
        print(f"egressd review: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    found = rows_of(rules, today, usage=usage, soon=dt.timedelta(days=soon))
    rows = [row for row in found if row.section in wanted]
    if format_ == "html":
        print(forms.as_html(rows, notes, f"Review of {rules.root} ({rules.digest}), {today}"), end="")
    elif format_ == "csv":
        print(forms.as_csv(rows), end="")
        print("".join(f"egressd: {note}\n" for note in notes), end="", file=sys.stderr)
    elif format_ == "json":
        print(json.dumps(forms.as_json(rows, notes), ensure_ascii=True))
    else:
        print("\n".join(forms.as_text(rows, notes)))


def _sections(given: list[str] | None) -> tuple[Section, ...]:
    from egressd.rulefiles.review import SECTIONS

    for name in given or ():
        if name not in SECTIONS:
            raise ValueError(f"--section {name!r}: one of {', '.join(SECTIONS)}")
    return tuple(one for one in SECTIONS if not given or one in given)


def _usage(rules: Rules, journals: list[str] | None, age: str, now: float) -> tuple[Usage | None, list[str]]:
    """Return what the journal tells of rules, and what is to be said of that."""
    from egressd.cli.recordings import history
    from egressd.journal.reader import BadFilter, parse_since
    from egressd.rulefiles.review import Usage

    since = parse_since(age, now)
    if isinstance(since, BadFilter):
        raise ValueError(f"--unused {age!r}: {since.problem}")
    if not journals:
        return None, ["which rules are unused is told by a journal: --journal FILE"]
    usage = Usage(rules)
    for fields in history(journals, since, doing="reviewing"):
        usage.take(fields)
    if not usage.first:
        return usage, [f"nothing was recorded since {since}: every rule looks unused"]
    return usage, [f"used and unused: by what was recorded from {usage.first} on; asked for from {since} on"]
