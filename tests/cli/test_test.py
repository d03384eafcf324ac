from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent
PROFILE = """schema: 1
profile: a
allow:
  - {id: one, hosts: [one.example.com]}
  - {id: two, hosts: [two.example.com]}
tests:
  - {allow: "GET https://one.example.com/", rule: one}
"""


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    folder = tmp_path / "rules"
    (folder / "profiles").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "organisation.yaml").write_text("schema: 1\n")
    (folder / "profiles" / "a.yaml").write_text(PROFILE)
    return folder


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["test", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_tests_that_hold_are_one_line_with_what_they_exercise(rules: Path) -> None:
    assert run("--rules", rules) == (0, "1 tests hold; they exercise 1 of 2 rules\n", "")


def test_coverage_names_the_rules_that_nothing_tries(rules: Path) -> None:
    _, out, _ = run("--rules", rules, "--coverage")
    assert out.splitlines()[0] == f"untried: {rules}/profiles/a.yaml:5: allow two (a)"


def test_a_failure_has_its_place_and_the_command_that_explains_it(rules: Path) -> None:
    file = rules / "tests" / "a.yaml"
    file.write_text('schema: 1\nunder: a\ntests:\n  - {deny: "GET https://two.example.com/"}\n')
    status, out, _ = run("--rules", rules)
    assert status == 1
    assert out.splitlines()[:3] == [
        f"FAILED: {file}:4: deny GET https://two.example.com/ under a",
        "    expected deny, got allow by two (profiles/a.yaml:5) (rule)",
        "    hint: egressd explain 'GET https://two.example.com/' --profile a",
    ]
    checked = CliRunner().invoke(app, ["check", str(rules)])
    assert checked.exit_code == 1  # what `test` says fails, nothing loads


def test_more_tests_may_lie_elsewhere(rules: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text('schema: 1\nunder: a\ntests:\n  - {allow: "GET https://two.example.com/", rule: two}\n')
    assert run("--rules", rules, more) == (0, "2 tests hold; they exercise 2 of 2 rules\n", "")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("schema: 1\nunder: b\ntests:\n  - {allow: 'GET https://x.example.com/'}\n", "unknown_profile"),
        ("schema: 1\nunder: a\ntests:\n  - {allow: 'https://x.example.com/'}\n", "bad_test"),
        ("schema: 1\nunder: a\ntests: []\n", "empty_list"),
        ("schema: 1\ntests:\n  - {allow: 'GET https://x.example.com/'}\n", "missing_key"),
    ],
)
def test_what_is_no_test_is_status_2(rules: Path, tmp_path: Path, text: str, code: str) -> None:
    more = tmp_path / "more.yaml"
    more.write_text(text)
    status, out, err = run("--rules", rules, more)
    assert (status, out) == (2, "")
    assert f": {code}: " in err


def test_junit_has_a_case_for_each_test_and_skips_what_is_untried(rules: Path, tmp_path: Path) -> None:
    (rules / "tests" / "b.yaml").write_text(
        'schema: 1\nunder: a\ntests:\n  - {ask: "GET https://one.example.com/"}\n'
    )
    assert run("--rules", rules, "--junit", tmp_path / "j.xml")[0] == 1
    suites = ElementTree.parse(tmp_path / "j.xml").getroot()
    counted = [(suite.get("tests"), suite.get("failures"), suite.get("skipped")) for suite in suites]
    assert counted == [("1", "0", None), ("1", "1", None), ("1", "0", "1")]
    failure = suites.find(".//failure")
    assert failure is not None
    assert failure.get("message") == "expected ask, got allow by one (profiles/a.yaml:4) (rule)"


def test_json_tells_the_same(rules: Path) -> None:
    told = json.loads(run("--rules", rules, "--json")[1])
    assert told["ok"]
    assert told["untried"] == [
        {"rule": "two", "effect": "allow", "place": "profiles/a.yaml:5", "profiles": ["a"]}
    ]
    assert told["tests"][0]["rule"] == "one"


def test_watching_runs_again_at_every_change(rules: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "egressd", "test", "--rules", str(rules), "--watch"]
    polling = {"WATCHFILES_FORCE_POLLING": "1", "WATCHFILES_POLL_DELAY_MS": "50"}
    env = os.environ | polling | {"PYTHONPATH": str(ROOT)}
    out = tmp_path / "out"
    broken = PROFILE.replace("rule: one", "rule: two")
    with out.open("w") as written, subprocess.Popen(command, stdout=written, env=env, cwd=ROOT) as watching:
        try:
            deadline = time.monotonic() + 60
            while "FAILED" not in out.read_text() and time.monotonic() < deadline:
                if out.read_text().startswith("1 tests hold"):
                    (rules / "profiles" / "a.yaml").write_text(
                        broken
                    )  # until the watch has begun, nobody sees it
                    broken += "\n"
                time.sleep(0.2)
        finally:
            watching.terminate()
    assert "FAILED" in out.read_text()


def test_what_the_journal_says_is_a_file_of_tests(rules: Path, tmp_path: Path) -> None:
    record: dict[str, object] = {
        "event": "decision",
        "layer": "request",
        "verdict": "allow",
        "reason": "rule",
        "rule": "two",
    }
    record |= {
        "profile": "a",
        "host": "two.example.com",
        "port": 443,
        "scheme": "https",
        "method": "GET",
        "path": "/x",
    }
    journal = tmp_path / "journal.jsonl"
    journal.write_text(json.dumps(record) + "\n" + json.dumps(record | {"query": "k=<1>"}) + "\n")
    result = CliRunner().invoke(app, ["log", str(journal), "--as-test"])
    assert result.exit_code == 0
    assert "1 left out: the values of its query are not recorded" in result.stderr
    (rules / "tests" / "recorded.yaml").write_text(result.stdout)
    assert run("--rules", rules) == (0, "2 tests hold; they exercise 2 of 2 rules\n", "")
