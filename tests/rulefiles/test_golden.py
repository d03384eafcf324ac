"""Files in, words out: `tests/golden/NN-name` are lessons in order of difficulty, `tests/golden/bad/CODE` one mistake each.

`UPDATE_GOLDEN=1 pytest tests/rulefiles/test_golden.py` writes what comes out; read the difference before you keep it.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
from pathlib import Path

import pytest

from egressd.cli.explain import lines
from egressd.rulefiles.explain import explain
from egressd.rulefiles.lints import lint
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.printout import as_text, printout
from egressd.rulefiles.problems import LINTS, WARNINGS, Code, Problems
from egressd.rulefiles.requestline import Asked, parse_request_line
from egressd.rulefiles.yaml import MOST_BYTES

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
BAD = GOLDEN / "bad"
NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC).timestamp()
TODAY = dt.date(2026, 12, 1)

LESSONS = sorted(path.name for path in GOLDEN.iterdir() if path.name[0].isdigit())
MISTAKES = sorted(path.name for path in BAD.iterdir() if path.name != "base")
WITHOUT_A_FILE = {Code.TOO_LARGE}  # four MiB are made below, not kept


def compare(path: Path, got: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(got)
    assert got == path.read_text()


def laid_out(case: Path, folder: Path) -> Path:
    """A folder with the base files, those of the case over them, and without what its `removed` names."""
    shutil.copytree(BAD / "base", folder)
    shutil.copytree(case, folder, dirs_exist_ok=True)
    removed = folder / "removed"
    for name in removed.read_text().split() if removed.exists() else ():
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_place_and_a_way_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out(BAD / name, tmp_path / "rules")
    monkeypatch.chdir(tmp_path)
    credentials = Path("rules/credentials.yaml")
    result = load_rules(Path("rules"), now=NOW, credentials=credentials if credentials.exists() else None)
    if Code(name) in LINTS:
        assert isinstance(result, Rules), str(result)
        assert Code(name) not in {warning.code for warning in result.warnings}, "loading does not look for it"
        problems = lint(result, TODAY, matched=matched(Path("rules/matched.txt")))
    elif Code(name) in WARNINGS:
        assert isinstance(result, Rules), str(result)
        problems = list(result.warnings)
    else:
        assert isinstance(result, Problems)
        problems = list(result)
    # An expired test comes with the expired rule.
    assert {problem.code for problem in problems} - {Code.EXPIRED} == {Code(name)} - {Code.EXPIRED}
    assert problems == sorted(problems)
    compare(BAD / name / "expected.txt", "".join(f"{problem}\n" for problem in problems))


def matched(path: Path) -> list[tuple[str, str]] | None:
    """The rules that decided something in recorded traffic, as `PROFILE RULE` a line; None without such a file."""
    if not path.exists():
        return None
    return [(profile, rule) for profile, rule in map(str.split, path.read_text().splitlines())]


def test_every_code_has_a_file_that_shows_it() -> None:
    assert {Code(name) for name in MISTAKES} == set(Code) - WITHOUT_A_FILE


def test_a_file_over_the_most_is_too_large(tmp_path: Path) -> None:
    folder = laid_out(BAD / "empty_file", tmp_path / "rules")
    (folder / "profiles" / "a.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    result = load_rules(folder, now=NOW)
    assert isinstance(result, Problems)
    assert [problem.code for problem in result] == [Code.TOO_LARGE]


def test_the_lessons_are_numbered_without_a_gap() -> None:
    assert [int(name.split("-")[0]) for name in LESSONS] == list(range(1, len(LESSONS) + 1))
    assert len(LESSONS) > 60


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_comes_out_as_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN / name)
    credentials = Path("credentials.yaml")
    rules = load_rules(Path("rules"), now=NOW, credentials=credentials if credentials.exists() else None)
    assert isinstance(rules, Rules), str(rules)
    shown = [str(warning) for warning in rules.warnings]
    for line in Path("requests.txt").read_text().splitlines():
        profile, _, request = line.partition(" ")
        asked = parse_request_line(request)
        assert isinstance(asked, Asked), asked
        shown += ["", *lines(explain(rules, profile, asked, NOW), rules.root)]
    compare(GOLDEN / name / "expected.txt", "\n".join(shown).lstrip("\n") + "\n")


@pytest.mark.parametrize("name", [name for name in LESSONS if (GOLDEN / name / "effective.txt").exists()])
def test_an_effective_policy_is_printed_with_the_origin_of_every_line(name: str) -> None:
    page = GOLDEN / name / "effective.txt"
    profile = page.read_text().split("\n", 1)[0].removeprefix("# ")
    rules = load_rules(GOLDEN / name / "rules", now=NOW)
    assert isinstance(rules, Rules), str(rules)
    lines_ = printout(rules.effective(profile), rules.source)
    assert all(line.origin or line.text.endswith(":") for line in lines_)
    compare(page, f"# {profile}\n{as_text(lines_)}\n")
