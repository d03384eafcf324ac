"""`egressd explain REQUEST`: what would be decided, by which rule, why not by the others, and what would change it."""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.given import credentials_file, rules_folder

if TYPE_CHECKING:  # see check.py
    from egressd.rulefiles.attachment import Attachment
    from egressd.rulefiles.explain import Explanation

YES, NO, BAD_INPUT = 0, 1, 2

_STANDINGS = {"decides": "*", "covers": "+", "misses": "-", "expired": "x", "elsewhere": " "}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("explain", help="Say what is decided on a request, and why.")(explain)


def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="METHOD URL, tcp://host:port or dns:NAME[/TYPE].")
    ],
    profile: Annotated[
        str, typer.Option(envvar="EGRESSD_PROFILE", help="Under which profile; there is no default.")
    ],
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="As at this day (noon UTC) or time, like 2027-03-31T18:00Z."),
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print the decision and how it came about: 0 allowed, 1 denied or to be asked for, 2 bad input."""
    from egressd.rulefiles.explain import explain as explained
    from egressd.rulefiles.load import load_rules
    from egressd.rulefiles.problems import Problems
    from egressd.rulefiles.requestline import BadLine, parse_request_line
    from egressd.rulefiles.shape import did_you_mean

    asked = parse_request_line(request)
    if isinstance(asked, BadLine):
        raise _bad(f"{request!r}: {asked.detail}", asked.hint)
    now = _moment(at)
    try:
        rules = load_rules(rules_folder(), credentials=credentials_file(credentials))
    except ValueError as error:
        raise _bad(str(error)) from None
    if isinstance(rules, Problems):
        print(rules, file=sys.stderr)
        raise _bad("the rules cannot be used", "egressd check")
    if profile not in rules.profiles:
        near = did_you_mean(profile, rules.profiles)
        raise _bad(f"there is no profile {profile!r}{near}", f"known: {', '.join(rules.profiles)}")
    found = explained(rules, profile, asked, now)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=True))
    else:
        print("\n".join(lines(found, rules.root)))
    raise typer.Exit(YES if found.decision.allowed else NO)


def _bad(message: str, hint: str = "") -> typer.Exit:
    print(f"egressd explain: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return typer.Exit(BAD_INPUT)


def _moment(at: str | None) -> float:
    from egressd.policy.values import parse_moment

    if at is None:
        return time.time()
    try:
        return parse_moment(at).timestamp()
    except ValueError as error:
        raise _bad(f"--at {at!r}: {error}") from None


def lines(found: Explanation, root: str) -> list[str]:
    """Return the explanation for people; `root` stands before every place."""
    decision, entry = found.decision, found.decision.entry
    treatment = f" ({found.treatment})" if found.treatment else ""
    lines = [
        f"{decision.verdict}{treatment}: {found.asked.text} under {found.profile}",
        f"  reason: {decision.reason} ({found.says})",
        f"  rule:   {entry.id if entry else 'none'}{f' ({root}/{entry.place})' if entry else ''}",
    ]
    if decision.would_deny:
        lines.append("  note:   the profile only observes; enforced, this is a deny")
    if entry is not None and entry.via:
        lines.append(f"  via:    {root}/{entry.via}")
    if entry is not None and entry.because:
        lines.append(f"  because: {entry.because}")
    if entry is not None and entry.expires and decision.verdict != "deny":
        lines.append(f"  until:  {dt.date.isoformat(entry.expires)} (UTC)")
    if found.attachment is not None:
        lines += _attached(found.attachment)
    if found.tried:
        lines.append("  tried (* decides, + covers, - misses, x expired):")
    for tried in found.tried:
        via = f" via {root}/{tried.entry.via}" if tried.entry.via else ""
        mark = _STANDINGS[tried.standing]
        lines.append(
            f"    {mark} {tried.entry.effect} {tried.entry.id} ({root}/{tried.entry.place}{via}): {tried.why}"
        )
    if found.untold:
        lines.append(
            f"    {found.untold} more {'rule is' if found.untold == 1 else 'rules are'} about other hosts"
        )
    if found.change:
        lines.append("  to change it:")
        lines += [f"    {line}" for line in found.change.splitlines()]
    return lines


def _attached(goes: Attachment) -> list[str]:
    if goes.credential is None:
        return [f"  credential: none ({goes.why})"]
    way = f", {goes.how}" if goes.how else ""
    return [f"  credential: {goes.credential}{way}", f"    {goes.why}"]
