"""`egressd explain REQUEST`: what is decided, or was, by which rule, why not by the others, and what would change it."""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.ruleset import BadRules, loaded_rules

if TYPE_CHECKING:  # see check.py
    from egressd.cli.past import Past
    from egressd.rulefiles.attachment import Attachment
    from egressd.rulefiles.changes import Change
    from egressd.rulefiles.explain import Explanation

YES, NO, BAD_INPUT = 0, 1, 2

_STANDINGS = {"decides": "*", "covers": "+", "misses": "-", "expired": "x", "elsewhere": " ", "observes": "~"}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("explain", help="Say what is decided on a request, or was on an attempt, and why.")(explain)


def explain(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="METHOD URL, tcp://host:port, dns:NAME[/TYPE], or the id of an attempt."
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(envvar="EGRESSD_PROFILE", help="Under which profile; an attempt has its own."),
    ] = None,
    journal: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where the attempt is recorded; - is standard input.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="As at this day (noon UTC) or time, like 2027-03-31T18:00Z; else now, or when it was.",
        ),
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
    from egressd.rulefiles.requestline import BadLine, parse_request_line

    past = _past(request, journal)
    asked = parse_request_line(request) if past is None else None
    if isinstance(asked, BadLine):
        raise _bad(f"{request!r}: {asked.detail}", asked.hint)
    chosen = profile or (past.profile if past is not None else None)
    if chosen is None:
        raise _bad("under which profile?", "--profile NAME, or EGRESSD_PROFILE; there is no default")
    now = _moment(at) if at is not None or past is None else past.moment
    try:
        rules = loaded_rules(credentials, profile=chosen)
    except BadRules as error:
        raise _bad(str(error)) from None
    if past is not None:
        asked = past.asked(rules, chosen, now)
    if asked is None:
        assert past is not None
        print(json.dumps({"recorded": past.as_json()}) if as_json else "\n".join(past.lines()))
        raise typer.Exit(YES if past.verdict == "allow" else NO)
    found = explained(rules, chosen, asked, now)
    if as_json:
        recorded = {"recorded": past.as_json(rules)} if past is not None else {}
        print(json.dumps(found.as_json() | recorded, ensure_ascii=True))
    else:
        before = past.lines(rules) if past is not None else []
        print("\n".join([*before, *lines(found, rules.root)]))
    raise typer.Exit(YES if found.decision.allowed else NO)


def _past(request: str, journal: str | None) -> Past | None:
    """Return the recorded attempt that is asked about; None where a request is."""
    from egressd.cli.past import ATTEMPT_ID, find
    from egressd.cli.recordings import BadJournal

    if not ATTEMPT_ID.fullmatch(request):
        if journal is not None:
            raise _bad(f"{request!r} is no attempt id", "--journal goes with one: 28 hex digits")
        return None
    try:
        found = find(request, journal)
    except BadJournal as error:
        raise _bad(str(error)) from None
    if found is None:
        raise _bad(f"no decision on {request} is in this journal", "egressd log shows what is")
    return found


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
        lines.append(_observed(found))
    if entry is not None and entry.via:
        lines.append(f"  via:    {root}/{entry.via}")
    if entry is not None and entry.because:
        lines.append(f"  because: {entry.because}")
    if entry is not None and entry.expires and decision.verdict != "deny":
        lines.append(f"  until:  {dt.date.isoformat(entry.expires)} (UTC)")
    if found.attachment is not None:
        lines += _attached(found.attachment)
    if found.tried:
        observing = "~ observes, " if any(tried.standing == "observes" for tried in found.tried) else ""
        lines.append(f"  tried (* decides, + covers, - misses, {observing}x expired):")
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
    return [*lines, *_changes(found.changes)]


def _observed(found: Explanation) -> str:
    by = found.decision.would_entry or found.decision.entry
    who = f"rule {by.id}" if by is not None else "the profile"
    return f"  note:   {who} only observes; enforced, this is a deny ({found.decision.would_reason})"


def _changes(changes: tuple[Change, ...]) -> list[str]:
    if len(changes) < 2:
        told = [f"    {line}" for change in changes for line in change.text.splitlines()]
        return ["  to change it:", *told] if told else []
    lines = ["  to change it, the narrowest first:"]
    for number, change in enumerate(changes, 1):
        lines.append(f"    {number}. {change.what}")
        lines += [f"       {line}" for line in change.text.splitlines()]
    return lines


def _attached(goes: Attachment) -> list[str]:
    if goes.credential is None:
        return [f"  credential: none ({goes.why})"]
    way = f", {goes.how}" if goes.how else ""
    return [f"  credential: {goes.credential}{way}", f"    {goes.why}"]
