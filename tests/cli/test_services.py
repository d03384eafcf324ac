"""The catalogue on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app

RULES = Path(__file__).resolve().parents[2] / "rules"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("config", "rules"):
        monkeypatch.setattr(GIVEN, name, None)
    monkeypatch.setattr(GIVEN, "verbose", False)


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["services", *(str(word) for word in words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_list_names_every_service_on_a_line() -> None:
    status, out, err = run("list", RULES)
    assert (status, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert names == sorted(path.stem for path in (RULES / "services").glob("*.yaml"))
    assert "with repos" in next(line for line in out.splitlines() if line.startswith("github-clone "))


def test_list_as_json_is_an_object_a_service() -> None:
    status, out, _ = run("list", RULES, "--json")
    services = {one["service"]: one for one in map(json.loads, out.splitlines())}
    assert status == 0
    assert services["s3-read"] == {
        "service": "s3-read",
        "description": "Reading objects below a prefix of named S3 buckets",
        "owner": "platform-security",
        "reviewed": "2026-11-30",
        "access": "read",
        "expects_credential": True,
        "parameters": {"bucket": "host_label", "region": "host_label", "prefix": "prefix"},
    }
    assert {one["access"] for one in services.values()} == {"read", "call", "write", "deny"}


def test_show_says_what_passes_and_what_remains_to_be_feared() -> None:
    status, out, _ = run("show", "container-pull", RULES)
    assert status == 0
    assert out.startswith("container-pull: Pulling named images from Docker Hub")
    for line in (
        f"  file: {RULES}/services/container-pull.yaml",
        "    GET,HEAD /v2/{image}/manifests/*",
        "    never with the credential of the service",
        "  risks:",
        "    - service: container-pull",
        "      with: {images: […]}",
    ):
        assert line in out.splitlines()


def test_show_of_what_is_for_denials_says_so() -> None:
    _, out, _ = run("show", "exfil-sinks", RULES)
    assert "    everything" in out.splitlines()
    assert "  denied by:" in out.splitlines()
    assert " more (lists/pastes.txt)" in out


def test_show_as_json_has_every_host_of_a_list() -> None:
    status, out, _ = run("show", "github-actions-results", RULES, "--json")
    assert status == 0
    (entry,) = json.loads(out)["entries"]
    assert len(entry["hosts"]) == 140
    assert entry["requests"] == ["GET,HEAD /**"]


def test_show_of_an_unknown_service_proposes_a_known_one() -> None:
    status, out, err = run("show", "githubclone", RULES)
    assert (status, out) == (2, "")
    assert "there is no service 'githubclone' (did you mean 'github-clone'?)" in err


def test_lint_has_nothing_to_object_to_what_we_ship() -> None:
    status, out, err = run("lint", RULES, "--at", "2026-12-01")
    assert (status, out) == (0, "")
    assert err.startswith("egressd services lint: nothing to object to in ")


def test_lint_names_what_is_wrong_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    shutil.copy(RULES / "services" / "npm.yaml", tmp_path / "services")
    text = (RULES / "services" / "crates.yaml").read_text()
    (tmp_path / "services" / "crates.yaml").write_text(text.replace("index.crates.io", "index.cratse.io"))
    status, out, err = run("lint", tmp_path, "--at", "2026-12-01")
    assert status == 1
    assert "/services/crates.yaml:" in out
    assert ": lookalike: index.cratse.io is spelled like crates.io\n    hint: " in out
    assert err == "egressd services lint: 1 finding in 2 services\n"
    status, out, _ = run("lint", tmp_path, "--at", "2028-01-01", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 1
    assert [one["code"] for one in found] == ["stale_review", "lookalike", "stale_review"]
    assert set(found[0]) == {"path", "line", "column", "code", "service", "message", "hint", "why"}


@pytest.mark.parametrize("words", [("list",), ("show", "npm"), ("lint",)], ids=" ".join)
def test_a_bad_folder_is_status_2(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "a.yaml").write_text("schema: 1\nservice: b\n")
    status, out, err = run(*words, tmp_path)
    assert (status, out) == (2, "")
    assert "services/a.yaml:" in err
    assert run(*words, tmp_path / "none")[0] == 2


def test_a_day_that_is_none_is_status_2() -> None:
    assert run("lint", RULES, "--at", "soon")[0] == 2


def test_the_folder_is_found_like_that_of_every_verb() -> None:
    status, out, _ = run("list", "--rules", RULES)
    assert status == 0
    assert out.startswith("alpine ")
