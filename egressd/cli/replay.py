"""`egressd replay JOURNAL`: what these rules would decide on recorded traffic, where that differs from what was decided."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.ruleset import BadRules, loaded_rules

if TYPE_CHECKING:
    from egressd.policy.compile import CompiledPolicy

OK, NO, BAD_INPUT = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("replay", help="Judge recorded traffic by these rules, and say what would change.")(replay)


def replay(
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="The journal; - is standard input.")],
    profile: Annotated[
        str | None, typer.Option(help="Judge all of it under this profile, not under the recorded ones.")
    ] = None,
    enforced: Annotated[
        bool, typer.Option("--enforced", help="As if no profile only observed: what would break today.")
    ] = False,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print what would change: 0 nothing, 1 something, 2 bad input."""
    from egressd.cli.impact_table import impact_json, impact_lines
    from egressd.cli.recordings import BadJournal, recorded
    from egressd.rulefiles.replay import Impact, with_record

    try:
        rules = loaded_rules(credentials, profile=profile)
        policies = {
            name: _enforced(rules.compiled(name)) if enforced else rules.compiled(name)
            for name in rules.profiles
        }
        impact = Impact(with_record(policies, time.time(), profile))
        for fields in recorded(journal, doing="replaying"):
            impact.take(fields)
    except (BadRules, BadJournal) as error:
        print(f"egressd replay: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        print(json.dumps(impact_json(impact), ensure_ascii=True))
    else:
        print("\n".join(impact_lines(impact)))
    raise typer.Exit(NO if impact.rows else OK)


def _enforced(policy: CompiledPolicy) -> CompiledPolicy:
    from egressd.policy.compile import compile_policy

    return compile_policy(policy.effective.enforced())
