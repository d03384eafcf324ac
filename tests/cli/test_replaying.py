"""`egressd replay`, `diff` and `suggest` as people call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from egressd.cli.diff import _code
from egressd.cli.given import GIVEN
from egressd.cli.main import app

RECORD = {
    "time": "2026-11-30T10:00:00.000000Z",
    "event": "decision",
    "layer": "request",
    "verdict": "deny",
    "reason": "not_allowed",
    "profile": "a",
    "sandbox": "sbx-1",
    "attempt_id": "e" * 28,
    "host": "two.example.com",
    "port": 443,
    "scheme": "https",
    "method": "GET",
    "path": "/x/y",
}


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def folder(tmp_path: Path, name: str, hosts: str, more: str = "") -> Path:
    made = tmp_path / name
    (made / "profiles").mkdir(parents=True)
    (made / "organisation.yaml").write_text("schema: 1\n")
    (made / "profiles" / "a.yaml").write_text(f"schema: 1\nprofile: a\n{more}allow:\n  - hosts: [{hosts}]\n")
    return made


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return folder(tmp_path, "one", "one.example.com")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return folder(tmp_path, "two", "one.example.com, two.example.com")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.jsonl"
    path.write_text(
        "".join(json.dumps(RECORD | {"attempt_id": f"{n:028x}"}) + "\n" for n in range(3)) + "half a li"
    )
    return path


def test_replay_says_what_would_change_and_for_whom(two: Path, one: Path, journal: Path) -> None:
    status, out, err = run("replay", journal, "--rules", two)
    assert status == 1
    assert out.splitlines() == [
        "newly allowed: 3",
        "  3 x GET https://two.example.com/x/… by one-example-com (profiles/a.yaml:4); a, sandbox sbx-1, "
        f"like {0:028x}",
        "unchanged: 0",
    ]
    assert "1 torn or foreign lines were skipped" in err
    assert run("replay", journal, "--rules", one)[:2] == (0, "unchanged: 3\n")
    assert json.loads(run("replay", journal, "--rules", two, "--json")[1])["changes"][0]["times"] == 3


def test_what_is_only_observed_would_break_today(tmp_path: Path) -> None:
    import datetime as dt

    day = (dt.datetime.now(dt.UTC) + dt.timedelta(days=3)).date()
    watched = folder(tmp_path, "watched", "one.example.com", f"mode: observe\nobserve_until: {day}\n")
    path = tmp_path / "journal.jsonl"
    path.write_text(
        json.dumps(RECORD | {"verdict": "allow", "reason": "observed", "would_deny": True}) + "\n"
    )
    assert run("replay", path, "--rules", watched)[0] == 0
    status, out, _ = run("replay", path, "--rules", watched, "--enforced")
    assert (status, out.splitlines()[0]) == (1, "newly denied: 1")


def test_diff_tells_the_difference_and_its_impact(one: Path, two: Path, journal: Path) -> None:
    status, out, _ = run("diff", one, two, "--journal", journal)
    assert status == 0
    assert out.splitlines()[:3] == [
        "a:",
        "  becomes allowed:",
        "    GET,HEAD https://two.example.com/**: deny (not_allowed) → allow (inspect)  "
        "[one-example-com (profiles/a.yaml:4)]",
    ]
    assert "  newly allowed: 3" in out.splitlines()
    assert run("diff", one, two, "--exit-code")[0] == 1
    assert run("diff", one, one, "--exit-code")[:2] == (0, "no difference in what is decided\n")


def test_diff_for_a_pull_request_renders_nothing_that_rules_hold(one: Path, two: Path, journal: Path) -> None:
    _, out, _ = run("diff", one, two, "--journal", journal, "--format", "markdown")
    assert out.startswith("### What these rules decide differently\n")
    assert "  * `GET,HEAD https://two.example.com/**: deny (not_allowed) → allow (inspect)" in out
    assert _code("a `b` ``c``") == "``` a `b` ``c`` ```"
    told = json.loads(run("diff", one, two, "--journal", journal, "--format", "json")[1])
    assert told["profiles"][0]["rows"][0]["kind"] == "allowed"
    assert told["impact"]["changes"][0]["sandbox"] == "sbx-1"


def test_a_suggestion_passes_check_and_its_group_helps(one: Path, journal: Path) -> None:
    status, out, err = run("suggest", journal, "--profile", "a", "--rules", one)
    assert status == 0
    assert "egressd suggest: 1 rules from 3 refused requests" in err
    (one / "groups").mkdir()
    (one / "groups" / "suggested-a.yaml").write_text(out)
    assert run("check", one)[0] == 0
    profile = one / "profiles" / "a.yaml"
    profile.write_text(profile.read_text().replace("profile: a\n", "profile: a\ngroups: [suggested-a]\n"))
    assert run("check", one)[0] == 0
    assert run("replay", journal, "--rules", one)[1].splitlines()[0] == "newly allowed: 3"


def test_a_suggestion_of_nothing_is_status_1(two: Path, journal: Path) -> None:
    status, out, err = run("suggest", journal, "--profile", "a", "--rules", two)
    assert (status, out) == (1, "")
    assert "not proposed: 3 attempts: allowed by these rules already" in err
    assert (
        run("suggest", journal, "--profile", "a", "--rules", two, "--since", "2026-12-01")[2].count("\n") == 2
    )


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "none.jsonl"],
        ["suggest", "none.jsonl", "--profile", "a"],
        ["suggest", "none.jsonl", "--profile", "b"],
        ["suggest", "none.jsonl", "--profile", "a", "--since", "soon"],
        ["suggest", "none.jsonl", "--profile", "a", "--group", "No"],
    ],
)
def test_what_is_not_there_is_bad_input(one: Path, words: list[str]) -> None:
    status, out, err = run(*words, "--rules", one)
    assert (status, out) == (2, "")
    assert err.startswith(f"egressd {words[0]}: ")


def test_the_workflow_of_the_page_runs_commands_that_there_are(one: Path, two: Path) -> None:
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "pull-requests.md").read_text()
    workflow = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    commands = [
        step["run"] for step in workflow["jobs"]["rules"]["steps"] if "egressd" in step.get("run", "")
    ]
    assert [command.split()[1] for command in commands] == ["check", "test", "diff"]
    for command in commands:
        words = command.partition(" > ")[0].split()[1:]
        paths = {"rules": str(two), "../before/rules": str(one)}
        assert run(*(paths.get(word, word) for word in words))[0] in (0, 1), command
