from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["fmt", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_shipped_rules_are_laid_out() -> None:
    assert run("--check", ROOT / "rules") == (0, "", "")


def test_a_file_is_rewritten_with_its_permissions_and_then_is_done(tmp_path: Path) -> None:
    file = tmp_path / "organisation.yaml"
    file.write_text("schema: 1   \n# kept\n\n\n")
    file.chmod(0o640)
    assert run("--check", tmp_path) == (1, f"{file}\n", "")
    assert run(tmp_path) == (0, f"{file}\n", "")
    assert file.read_text() == "schema: 1\n# kept\n"
    assert file.stat().st_mode & 0o777 == 0o640
    assert run(tmp_path) == (0, "", "")
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_laid_out_is_left_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: |\n  x  \n")
    (tmp_path / "b.yaml").write_text("a: [")
    status, out, err = run(tmp_path)
    assert (status, out) == (2, "")
    assert "a.yaml: left as it is: blanks at the end of a line belong to a text in it" in err
    assert "b.yaml:2:1: bad_yaml: " in err
    assert (tmp_path / "a.yaml").read_text() == "a: |\n  x  \n"


def test_no_message_repeats_what_a_credentials_file_holds(tmp_path: Path) -> None:
    (tmp_path / "credentials.yaml").write_text("token: &sk-secret x\n")
    _, _, err = run(tmp_path / "credentials.yaml")
    assert "alias" in err
    assert "sk-secret" not in err
