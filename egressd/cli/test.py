"""`egressd test`: the tests of rule files, one by one, what they leave untried, and again at every change."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.given import GIVEN, credentials_file, rules_folder

if TYPE_CHECKING:  # see check.py
    from egressd.rulefiles.claims import Claims, Outcome
    from egressd.rulefiles.testrun import TestRun

OK, NO, BAD_INPUT = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("test", help="Run the tests of rule files, and say which rules they leave untried.")(run)


def run(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="More tests, beside those of the rules.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Name the rules that no test exercises.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML too.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Run again whenever a file changes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print what does not hold: 0 all hold, 1 a test failed, 2 a bad file."""
    try:
        folder, beside = rules_folder(), credentials_file(credentials)
    except ValueError as error:
        print(f"egressd test: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    more = files or []
    status = _once(folder, beside, more, coverage=coverage, junit=junit, as_json=as_json)
    if not watch:
        raise typer.Exit(status)
    from watchfiles import watch as changes

    for _ in changes(folder, *more, *([beside] if beside else []), raise_interrupt=False):
        print(f"--- {time.strftime('%H:%M:%S')}", flush=True)
        status = _once(folder, beside, more, coverage=coverage, junit=junit, as_json=as_json)
    raise typer.Exit(status)


def _once(
    folder: Path,
    credentials: Path | None,
    more: list[Path],
    *,
    coverage: bool,
    junit: Path | None,
    as_json: bool,
) -> int:
    from egressd.rulefiles.load import load_rules
    from egressd.rulefiles.problems import Problems
    from egressd.rulefiles.testrun import as_junit, run_tests

    now = time.time()
    rules = load_rules(folder, credentials=credentials, now=now, tested=False)
    claims = _read(more)
    run = run_tests(rules, now, claims) if not isinstance(rules, Problems) and claims is not None else None
    for problems in (rules, run):
        if isinstance(problems, Problems):
            print(problems, file=sys.stderr, flush=True)
    if run is None or isinstance(run, Problems):
        return BAD_INPUT
    if junit is not None:
        junit.write_text(as_junit(run), encoding="utf-8")
    if as_json:
        print(json.dumps(_as_json(run), ensure_ascii=True))
    else:
        _print(run, str(folder), coverage=coverage)
    sys.stdout.flush()
    return NO if run.failures else OK


def _read(files: list[Path]) -> list[Claims] | None:
    """Return the tests of the files; None after their problems have been printed."""
    from egressd.rulefiles.problems import Findings, Problems
    from egressd.rulefiles.testrun import read_tests
    from egressd.rulefiles.yaml import read_bytes

    found: list[Claims] = []
    for path in files:
        findings = Findings()
        content = read_bytes(path, str(path), findings)
        claims = findings.problems() if content is None else read_tests(content, str(path))
        if isinstance(claims, Problems):
            print(claims, file=sys.stderr)
            return None
        found.append(claims)
    return found


def _print(run: TestRun, root: str, *, coverage: bool) -> None:
    from egressd.rulefiles.problems import printable

    for outcome in run.outcomes:
        if outcome.failure is None and not GIVEN.verbose:
            continue
        word = "ok" if outcome.failure is None else "expired" if outcome.expired else "FAILED"
        place = f"{root}/{outcome.path}:{outcome.place.line}"
        print(printable(f"{word}: {place}: {outcome.claimed} {outcome.asked.text} under {outcome.profile}"))
        if outcome.failure is not None:
            print(printable(f"    {outcome.failure}"))
            if not outcome.group:
                print(
                    printable(
                        f"    hint: egressd explain {shlex.quote(outcome.asked.text)} --profile {outcome.profile}"
                    )
                )
    if coverage:
        for rule in run.idle:
            print(f"untried: {root}/{rule.place}: {rule.effect} {rule.id} ({', '.join(rule.profiles)})")
    failed = len(run.failures)
    tried = run.rules - len(run.idle)
    held = f"{len(run.outcomes)} tests, {failed} failed" if failed else f"{len(run.outcomes)} tests hold"
    print(f"{held}; they exercise {tried} of {run.rules} rules")


def _as_json(run: TestRun) -> dict[str, object]:
    return {
        "ok": not run.failures,
        "tests": [_told(outcome) for outcome in run.outcomes],
        "rules": run.rules,
        "untried": [
            {"rule": rule.id, "effect": rule.effect, "place": rule.place, "profiles": list(rule.profiles)}
            for rule in run.idle
        ],
    }


def _told(outcome: Outcome) -> dict[str, object]:
    entry = outcome.decision.entry
    return {
        "path": outcome.path,
        "line": outcome.place.line,
        "request": outcome.asked.text,
        "claimed": outcome.claimed,
        "profile": outcome.profile,
        "verdict": outcome.decision.verdict,
        "reason": outcome.decision.reason.value,
        "rule": entry.id if entry is not None else None,
        "holds": outcome.failure is None,
        "expired": outcome.expired,
        "failure": outcome.failure,
    }
