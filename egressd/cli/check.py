"""`egressd check`: are these rule files sound, do their own tests hold, and what would a reviewer object to?"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from egressd.cli.given import GIVEN, credentials_file, rules_folder

if TYPE_CHECKING:  # the reader of rules takes longer to import than `--help` should
    from egressd.rulefiles.load import Rules
    from egressd.rulefiles.problems import Problem, Problems

OK, NO, BAD_FILES = 0, 1, 2

type Format = Literal["text", "json", "sarif", "github"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("check", help="Check rule files, look for likely mistakes, run their own tests.")(check)


def check(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The rules folder; otherwise --rules and its kin.")
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The credentials that the rules name; otherwise the configuration's."
        ),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also warn of rules that decided nothing in this journal."),
    ] = None,
    strict: Annotated[bool, typer.Option(help="A warning is status 1.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="What stdout gets.")] = "text",
) -> None:
    """Print every problem, or one line that says all is well: 0 sound, 1 a test failed, 2 a bad file."""
    from egressd.rulefiles.load import load_rules
    from egressd.rulefiles.problems import Problems

    now = time.time()
    try:
        folder = directory or rules_folder()
        result = load_rules(folder, credentials=credentials_file(credentials), now=now)
        warnings = [] if isinstance(result, Problems) else _warnings(result, now, journal)
    except ValueError as error:
        print(f"egressd check: {error}", file=sys.stderr)
        raise typer.Exit(BAD_FILES) from None
    if format_ in ("sarif", "github"):
        _for_programs([*result] if isinstance(result, Problems) else warnings, format_)
    elif format_ == "json":
        print(json.dumps(_as_json(result, warnings), ensure_ascii=True))
    elif isinstance(result, Problems):
        print(result)
        print(f"egressd check: {_count(len(result), 'problem')}; nothing was loaded", file=sys.stderr)
    else:
        _sound(result, warnings, folder)
    if isinstance(result, Problems):
        raise typer.Exit(NO if result.only_tests_failed else BAD_FILES)
    raise typer.Exit(NO if strict and warnings else OK)


def _warnings(rules: Rules, now: float, journal: str | None) -> list[Problem]:
    import datetime as dt

    from egressd.rulefiles.lints import lint

    matched: set[tuple[str, str]] | None = None
    if journal is not None:
        from egressd.cli.recordings import BadJournal, recorded

        try:
            matched = {
                (str(fields.get("profile")), str(fields["rule"]))
                for fields in recorded(journal)
                if "rule" in fields
            }
        except BadJournal as error:
            raise ValueError(str(error)) from None
    return lint(rules, dt.datetime.fromtimestamp(now, dt.UTC).date(), matched=matched)


def _sound(rules: Rules, warnings: list[Problem], folder: Path) -> None:
    for warning in warnings:
        print(warning, file=sys.stderr)
    entries = sum(len(rules.effective(name).entries) for name in rules.profiles)
    counts = [_count(len(rules.profiles), "profile"), _count(entries, "rule"), _count(rules.tests, "test")]
    if rules.credentials is not None:
        counts.insert(2, _count(len(rules.credentials.credentials), "credential"))
    print(f"{folder}: {', '.join(counts)} hold ({rules.digest})")
    if GIVEN.verbose:
        for name in rules.profiles:
            effective = rules.effective(name)
            print(f"  {name}: {effective.mode}, {len(effective.entries)} entries ({effective.digest()})")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _for_programs(problems: list[Problem], form: Format) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from egressd.rulefiles.reports import as_github, as_sarif

    if form == "sarif":
        try:
            ours = version("egressd")
        except PackageNotFoundError:  # a checkout that was never installed
            ours = "0"
        print(json.dumps(as_sarif(problems, ours), ensure_ascii=True, indent=1))
    else:
        print("\n".join(map(as_github, problems)), end="\n" if problems else "")


def _as_json(result: Rules | Problems, warnings: list[Problem]) -> dict[str, object]:
    from egressd.rulefiles.problems import Problems
    from egressd.rulefiles.reports import as_json

    if isinstance(result, Problems):
        problems = [as_json(problem) for problem in result]
        return {"ok": False, "problems": problems, "left_out": result.left_out}
    return {
        "ok": True,
        "digest": result.digest,
        "profiles": {name: result.effective(name).digest() for name in result.profiles},
        "tests": result.tests,
        "warnings": [as_json(warning) for warning in warnings],
    }
