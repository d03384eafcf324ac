"""`egressd import` as people call it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app

SAMPLES = Path(__file__).resolve().parent.parent / "rulefiles" / "foreign" / "samples"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)
    monkeypatch.setattr("egressd.cli.imported.time.time", lambda: 1_796_126_400.0)


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_profile_is_on_stdout_and_each_loss_on_stderr() -> None:
    status, out, err = run("import", "--from", "squid", SAMPLES / "squid.conf")
    assert status == 1
    assert out == (SAMPLES / "squid.conf.imported-squid.yaml").read_text()
    file = SAMPLES / "squid.conf"
    assert f"{file}:19: imported-squid: not carried over: http_access deny ads: " in err
    assert err.count("\n") == out.count("#   line ")


def test_a_list_that_is_carried_over_whole_is_status_0(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[permissions.p.network.domains]\n"example.com" = "allow"\n')
    status, out, err = run("import", "--from", "codex", file, "--profile", "reader")
    assert (status, err) == (0, "")
    assert "profile: reader\n" in out


def test_several_lists_become_several_files_that_check(tmp_path: Path) -> None:
    status, out, err = run(
        "import", "--from", "smokescreen", SAMPLES / "smokescreen-acl.yaml", "--into", tmp_path
    )
    assert status == 1, err
    assert out.splitlines() == [
        str(tmp_path / "profiles" / f"{name}.yaml") for name in ("payments", "webhooks", "crawler", "default")
    ]
    (tmp_path / "organisation.yaml").write_text("schema: 1\n")
    assert run("check", tmp_path)[0] == 0
    before = (tmp_path / "profiles" / "payments.yaml").read_text()
    status, out, err = run(
        "import", "--from", "smokescreen", SAMPLES / "smokescreen-acl.yaml", "--into", tmp_path
    )
    assert (status, out) == (2, "")
    assert "is there already: payments.yaml" in err
    assert (tmp_path / "profiles" / "payments.yaml").read_text() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "squid", "none.conf"], "cannot be read"),
        (["--from", "srt", SAMPLES / "squid.conf"], "no JSON"),
        (["--from", "smokescreen", SAMPLES / "smokescreen-acl.yaml"], "payments, webhooks, crawler, default"),
        (["--from", "squid", SAMPLES / "squid.conf", "--profile", "Not One"], "small letters"),
    ],
    ids=["no such file", "another form", "one of several", "a name that is none"],
)
def test_bad_input_is_status_2(words: list[str | Path], says: str) -> None:
    status, out, err = run("import", *words)
    assert (status, out) == (2, "")
    assert says in err
