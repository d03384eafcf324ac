"""`egressd suggest JOURNAL`: the narrowest rules for what was refused, or would have been, as a file of a group on stdout."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from egressd.cli.ruleset import BadRules, loaded_rules

OK, NO, BAD_INPUT = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("suggest", help="Propose the narrowest rules for what was refused, for a person to read.")(
        suggest
    )


def suggest(
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="The journal; - is standard input.")],
    profile: Annotated[
        str, typer.Option(envvar="EGRESSD_PROFILE", help="For what was refused under this profile.")
    ],
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 30m, 2h, 7d, or a date or time, in UTC.")
    ] = None,
    least: Annotated[int, typer.Option(min=1, help="Leave out what was tried less often.")] = 1,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the group; suggested-PROFILE.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
) -> None:
    """Print a file for rules/groups/: 0, or 1 where nothing is to be proposed; what is left out, and why, is on stderr."""
    from egressd.cli.recordings import BadJournal, recorded
    from egressd.journal.reader import BadFilter, parse_since
    from egressd.policy.values import slug
    from egressd.rulefiles.problems import Problems
    from egressd.rulefiles.suggest import Wishes, propose
    from egressd.rulefiles.suggestion import suggestion

    now = time.time()
    after = parse_since(since, now) if since is not None else ""
    if isinstance(after, BadFilter):
        raise _bad(f"--since {since!r}: {after.problem}")
    name = group or f"suggested-{profile}"[:64].strip("-")
    if slug(name) != name or not name:
        raise _bad(f"--group {name!r}: small letters, digits and single hyphens")
    try:
        rules = loaded_rules(credentials, profile=profile)
        wishes = Wishes(rules, profile, now)
        for fields in recorded(journal, doing="reading"):
            if not after or str(fields.get("time", "")) >= after:
                wishes.take(fields)
    except (BadRules, BadJournal) as error:
        raise _bad(str(error)) from None
    made = suggestion(wishes, propose(wishes, least), name)
    if isinstance(made, Problems):
        raise RuntimeError(f"the file would not load:\n{made}")
    print(made.text, end="")
    for why, number in sorted(wishes.left_out.items()):
        print(f"egressd suggest: not proposed: {number:,} attempts: {why}", file=sys.stderr)
    print(f"egressd suggest: {made.rules} rules from {wishes.taken:,} refused requests", file=sys.stderr)
    raise typer.Exit(OK if made.rules else NO)


def _bad(message: str) -> typer.Exit:
    print(f"egressd suggest: {message}", file=sys.stderr)
    return typer.Exit(BAD_INPUT)
