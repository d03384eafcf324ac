"""`egressd report`: what the journal tells, in sections: all attempts, what was denied, what would break if enforced.

Every section reads the journal once, together with the others, in memory that does not grow with it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.ruleset import BadRules, loaded_rules

if TYPE_CHECKING:
    from egressd.cli.report_parts import Enforced, Part

OK, NO, BAD_INPUT = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "report", help="Sum up a journal: what was tried, what was denied, what would break if enforced."
    )(report)


def report(
    journals: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOURNAL]...",
            help="Files of the journal; - is standard input. Default: the configured one and what was rotated out of it.",
        ),
    ] = None,
    what_if_enforced: Annotated[
        bool,
        typer.Option(
            "--what-if-enforced",
            help="Only what would break if these rules were enforced today; status 1 if anything.",
        ),
    ] = False,
    profile: Annotated[str | None, typer.Option(help="Only attempts under this profile.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 30m, 2h, 7d, or a date or time, in UTC.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print the report: 0; with --what-if-enforced 1 where something would break; 2 bad input."""
    from egressd.cli.recordings import BadJournal, history
    from egressd.cli.report_parts import Denied, Enforced, Overview
    from egressd.journal.reader import BadFilter, parse_since
    from egressd.rulefiles.breakage import Breakage

    now = time.time()
    after = parse_since(since, now) if since is not None else ""
    if isinstance(after, BadFilter):
        print(f"egressd report: --since {since!r}: {after.problem}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT)
    try:
        enforced = Enforced(Breakage(loaded_rules(credentials), now))
        parts: list[Part] = [enforced] if what_if_enforced else [Overview(), Denied(), enforced]
        for fields in history(journals or [], after, doing="reporting"):
            if profile is None or fields.get("profile") == profile:
                for part in parts:
                    part.take(fields)
    except (BadRules, BadJournal) as error:
        print(f"egressd report: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    _tell(parts, as_json=as_json)
    raise typer.Exit(_status(enforced) if what_if_enforced else OK)


def _tell(parts: list[Part], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({part.name: part.as_json() for part in parts}, ensure_ascii=True))
        return
    for number, part in enumerate(parts):
        print("\n" * bool(number) + part.title + ":")
        for line in part.lines():
            print(f"  {line}")


def _status(enforced: Enforced) -> int:
    return NO if enforced.breaks else OK
