"""`egressd effective PROFILE`: all that binds a sandbox under a profile, as one document with the origin of every line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from egressd.cli.ruleset import BadRules, loaded_rules

BAD_INPUT = 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("effective", help="Print all that binds a profile, with where each line is written.")(
        effective
    )


def effective(
    profile: Annotated[str, typer.Argument(envvar="EGRESSD_PROFILE", help="Which profile.")],
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="K=V", help="A label of the sandbox: what it lives under as a canary."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print the effective policy: 0, or 2 where the rules are no good or have no such profile."""
    from egressd.cli.options import label_of
    from egressd.rulefiles.canary import lives_under
    from egressd.rulefiles.printout import as_json as in_json
    from egressd.rulefiles.printout import as_text, printout

    try:
        rules = loaded_rules(credentials, profile=profile)
        labels = dict(map(label_of, label or ()))
    except (BadRules, ValueError) as error:
        print(f"egressd effective: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    under = lives_under(rules.canaries, profile, labels)
    canary = rules.canaries.get(profile)
    policy = rules.effective(under)
    if as_json:
        print(json.dumps(in_json(policy, rules.source), ensure_ascii=True))
        return
    if canary is not None and under == profile:
        wanted = ", ".join(f"{key}={value}" for key, value in canary.labels.items())
        print(f"# sandboxes with {wanted} live under {canary.profile}")
    print(f"# {under} ({policy.digest()}), from {rules.root} ({rules.digest})")
    print(as_text(printout(policy, rules.source)))
