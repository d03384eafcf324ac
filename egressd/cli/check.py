"""`egressd check`: are these rule files sound, and do their own tests hold?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from egressd.cli.given import GIVEN, credentials_file, rules_folder

if TYPE_CHECKING:  # the reader of rules takes longer to import than `--help` should
    from egressd.rulefiles.load import Rules
    from egressd.rulefiles.problems import Problem, Problems

OK, TESTS_FAILED, BAD_FILES = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("check", help="Check rule files and run their own tests.")(check)


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
    format_: Annotated[Literal["text", "json"], typer.Option("--format", help="What stdout gets.")] = "text",
) -> None:
    """Print every problem, or one line that says all is well: 0 sound, 1 a test failed, 2 a bad file."""
    from egressd.rulefiles.load import load_rules
    from egressd.rulefiles.problems import Problems

    try:
        folder = directory or rules_folder()
        beside = credentials_file(credentials)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(BAD_FILES) from None
    result = load_rules(folder, credentials=beside)
    if format_ == "json":
        print(json.dumps(_as_json(result), ensure_ascii=True))
    elif isinstance(result, Problems):
        print(result)
        _summary(result)
    else:
        _sound(result, folder)
    if isinstance(result, Problems):
        raise typer.Exit(TESTS_FAILED if result.only_tests_failed else BAD_FILES)


def _summary(problems: Problems) -> None:
    print(f"egressd check: {_count(len(problems), 'problem')}; nothing was loaded", file=sys.stderr)


def _sound(rules: Rules, folder: Path) -> None:
    for warning in rules.warnings:
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


def _as_json(result: Rules | Problems) -> dict[str, object]:
    from egressd.rulefiles.problems import Problems

    if isinstance(result, Problems):
        return {
            "ok": False,
            "problems": [_problem(problem) for problem in result],
            "left_out": result.left_out,
        }
    profiles = {name: result.effective(name).digest() for name in result.profiles}
    warnings = [_problem(problem) for problem in result.warnings]
    return {
        "ok": True,
        "digest": result.digest,
        "profiles": profiles,
        "tests": result.tests,
        "warnings": warnings,
    }


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "path": problem.path,
        "line": problem.line,
        "column": problem.column,
        "code": problem.code.value,
        "severity": problem.severity,
        "message": problem.message,
        "hint": problem.hint or None,
    }
