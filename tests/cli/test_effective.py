from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "rules"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_every_origin_is_a_line_that_holds_the_value() -> None:
    status, out, _ = run("effective", "coding-agent", "--json", "--rules", RULES)
    assert status == 0
    document = json.loads(out)
    checked = 0
    for line in document["lines"]:
        value = line["text"].strip().removeprefix("- ").strip('"')
        if line["origin"] in (None, "default") or ":" in value or "/" in value:
            continue  # a key with a value may be written in another order; a parameter is filled in
        path, _, number = line["origin"].rpartition(":")
        assert value in (RULES / path).read_text().splitlines()[int(number) - 1], line
        checked += 1
    assert checked > 50
    assert document["policy"]["profile"] == "coding-agent"


def test_the_text_names_the_policy_that_records_name() -> None:
    status, out, _ = run("effective", "locked-down", "--rules", RULES)
    digest = json.loads(run("effective", "locked-down", "--json", "--rules", RULES)[1])["digest"]
    assert status == 0
    assert out.startswith(f"# locked-down ({digest}), from {RULES} (")
    assert "owner: platform-security" in out


def test_an_unknown_profile_is_status_2_with_the_known_ones() -> None:
    status, out, err = run("effective", "coding-agnet", "--rules", RULES)
    assert (status, out) == (2, "")
    assert "there is no profile 'coding-agnet' (did you mean 'coding-agent'?)\nhint: known: " in err


def test_labels_show_what_a_canary_lives_under(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "organisation.yaml").write_text("schema: 1\n")
    allow = "allow:\n  - hosts: [a.example.com]\n"
    canary = "canary: {labels: {ring: first}, profile: next}\n"
    (tmp_path / "profiles" / "agent.yaml").write_text(f"schema: 1\nprofile: agent\n{canary}{allow}")
    (tmp_path / "profiles" / "next.yaml").write_text(f"schema: 1\nprofile: next\n{allow}")
    plain = run("effective", "agent", "--rules", tmp_path)[1].splitlines()
    assert plain[0] == "# sandboxes with ring=first live under next"
    assert plain[1].startswith("# agent (")
    assert run("effective", "agent", "--rules", tmp_path, "--label", "ring=first")[1].startswith("# next (")
    assert run("effective", "agent", "--rules", tmp_path, "--label", "ring")[0] == 2
