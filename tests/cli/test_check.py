from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "rules"
BAD = ROOT / "tests" / "golden" / "bad"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(GIVEN, "config", None)
    monkeypatch.setattr(GIVEN, "rules", None)
    monkeypatch.setattr(GIVEN, "verbose", False)


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def broken(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "rules"
    shutil.copytree(BAD / "base", folder)
    shutil.copytree(BAD / name, folder, dirs_exist_ok=True)
    return folder


def test_sound_rules_are_one_line_and_status_0() -> None:
    status, out, err = run("check", RULES)
    assert status == 0
    assert out.startswith(f"{RULES}: 2 profiles, ")
    assert out.count("\n") == 1
    assert err == ""


def test_a_bad_file_is_status_2_with_its_problems_on_stdout(tmp_path: Path) -> None:
    folder = broken(tmp_path, "unknown_key")
    status, out, err = run("check", folder)
    assert status == 2
    assert f"{folder}/profiles/a.yaml:3:1: unknown_key: 'alow' (did you mean 'allow'?)\n" in out
    assert err == "egressd check: 3 problems; nothing was loaded\n"


def test_a_failed_test_is_status_1(tmp_path: Path) -> None:
    status, out, _ = run("check", broken(tmp_path, "test_failed"))
    assert status == 1
    assert out.count(": test_failed: ") == 3


def test_json_has_every_field_of_a_problem(tmp_path: Path) -> None:
    status, out, _ = run("check", broken(tmp_path, "bad_id"), "--format", "json")
    assert status == 2
    (problem,) = json.loads(out)["problems"]
    assert problem == {
        "path": f"{tmp_path}/rules/profiles/a.yaml",
        "line": 4,
        "column": 9,
        "code": "bad_id",
        "severity": "error",
        "message": "'My Rule': small letters, digits and single hyphens, at most 64, like my-rule",
        "hint": None,
    }
    status, out, _ = run("check", RULES, "--format", "json")
    assert status == 0
    assert json.loads(out)["ok"] is True


def test_credentials_are_checked_when_given(tmp_path: Path) -> None:
    folder = broken(tmp_path, "credential_not_covered")
    assert run("check", folder)[0] == 0
    status, out, _ = run("check", folder, "--credentials", folder / "credentials.yaml")
    assert status == 2
    assert "credential_not_covered" in out
    assert run("check", folder, "--credentials", tmp_path / "none.yaml")[0] == 2
    whole = ROOT / "tests" / "golden" / "15-a-credential"
    status, out, _ = run("check", whole / "rules", "--credentials", whole / "credentials.yaml")
    assert status == 0
    assert ", 6 credentials, 0 tests hold (" in out


def test_credentials_are_found_by_flag_then_variable_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = broken(tmp_path, "credential_unused")
    home = tmp_path / "config" / "egressd"
    home.mkdir(parents=True)
    text = (folder / "credentials.yaml").read_text()

    def named(*words: str | Path) -> str:
        status, out, err = run("check", folder, *words)
        assert status == 0, out + err
        return err.split(":")[0] if "credential_unused" in err else err

    assert "credential_unchecked" in named()
    for place in ("default", "filed", "environment", "flag"):
        (tmp_path / f"{place}.yaml").write_text(text)
    (home / "credentials.yaml").write_text(text)
    assert named() == str(home / "credentials.yaml")
    (home / "egressd.yaml").write_text(f"credentials: {tmp_path / 'filed.yaml'}\n")
    assert named() == str(tmp_path / "filed.yaml")
    monkeypatch.setenv("EGRESSD_CREDENTIALS", str(tmp_path / "environment.yaml"))
    assert named() == str(tmp_path / "environment.yaml")
    assert named("--credentials", tmp_path / "flag.yaml") == str(tmp_path / "flag.yaml")


def test_a_credentials_file_that_was_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EGRESSD_CREDENTIALS", str(tmp_path / "none.yaml"))
    status, out, _ = run("check", RULES)
    assert status == 2
    assert f"{tmp_path / 'none.yaml'}:1:1: unreadable: " in out


def test_rules_are_found_by_flag_then_variable_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(*words: str | Path) -> str:
        status, out, _ = run(*words)
        assert status == 0
        return out.split(":")[0]

    home = tmp_path / "config" / "egressd"
    for name in ("default", "filed", "environment", "flag"):
        shutil.copytree(RULES, tmp_path / name)
    home.mkdir(parents=True)
    shutil.copytree(RULES, home / "rules")
    assert used("check") == str(home / "rules")
    (home / "egressd.yaml").write_text(f"rules: {tmp_path / 'filed'}\n")
    assert used("check") == str(tmp_path / "filed")
    monkeypatch.setenv("EGRESSD_RULES", str(tmp_path / "environment"))
    assert used("check") == str(tmp_path / "environment")
    assert used("check", "--rules", tmp_path / "flag") == str(tmp_path / "flag")
    assert used("--rules", tmp_path / "flag", "check") == str(tmp_path / "flag")


def test_a_configuration_file_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    status, out, err = run("check", "--config", tmp_path / "none.yaml")
    assert (status, out) == (2, "")
    assert "unreadable" in err


def test_no_folder_is_bad_input(tmp_path: Path) -> None:
    assert run("check", tmp_path / "none")[0] == 2


def test_warnings_are_talk_and_not_data(tmp_path: Path) -> None:
    status, out, err = run("check", broken(tmp_path, "shared_suffix"))
    assert status == 0
    assert "warning: shared_suffix" in err
    assert "shared_suffix" not in out


def test_warnings_are_status_0_and_with_strict_1(tmp_path: Path) -> None:
    folder = broken(tmp_path, "wide_ports")
    status, _, err = run("check", folder)
    assert (status, "wide_ports" in err) == (0, True)
    assert run("check", "--strict", folder)[0] == 1


def test_a_journal_tells_which_rules_decided_nothing(tmp_path: Path) -> None:
    folder = broken(tmp_path, "never_matched")
    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"event":"decision","profile":"a","rule":"used"}\nhalf a li')
    _, _, err = run("check", "--journal", journal, folder)
    assert "never_matched: 'unused'" in err
    assert "'used'" not in err
    assert "1 torn or foreign lines were skipped" in err
    assert run("check", "--journal", tmp_path / "none", folder)[0] == 2


@pytest.mark.parametrize("name", ["wide_ports", "unknown_key", "test_failed"])
def test_every_form_tells_of_the_same_problems(tmp_path: Path, name: str) -> None:
    folder = broken(tmp_path, name)
    whole = json.loads(run("check", "--format", "json", folder)[1])
    codes = [problem["code"] for problem in whole.get("problems", whole.get("warnings"))]
    sarif = json.loads(run("check", "--format", "sarif", folder)[1])
    assert [result["ruleId"] for result in sarif["runs"][0]["results"]] == codes
    commands = run("check", "--format", "github", folder)[1].splitlines()
    assert [command.split("title=egressd ")[1].split("::")[0] for command in commands] == codes
    statuses = {run("check", "--format", form, folder)[0] for form in ("text", "json", "sarif", "github")}
    assert len(statuses) == 1
