"""rules/README.md: its ten steps, block by block, in a folder of their own: what is written loads, what is shown is printed."""

from __future__ import annotations

import datetime as dt
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app
from egressd.control.archive import Archive
from egressd.rulefiles.load import Rules, load_rules

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "rules" / "README.md"
NOW = dt.datetime(2026, 12, 8, 12, tzinfo=dt.UTC).timestamp()
"""The day on which somebody takes the steps; the dates in the guide are near it."""
CONFIG = (
    "schema: 1\nrules: rules\njournal: journal.jsonl\nstate_dir: state\ncontrol_socket: run/control.sock\n"
)
VARYING = re.compile(r"\b[0-9a-f]{16}\b|\b\d+ (?:more )?rules\b")
"""Digests, and how many rules the catalogue's services come to."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

WEEK: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("GET", "pypi.org", "/simple/requests/", {"reason": "rule", "rule": "pypi"}),
    ("GET", "docs.example.com", "/guide/start", {}),
    ("GET", "docs.example.com", "/guide/install", {}),
    ("POST", "api.example.com", "/v1/items", {}),
)
"""What a sandbox asked for while the profile only observed, as its records have it."""


def week() -> str:
    lines = []
    for number, (method, host, path, more) in enumerate(WEEK):
        fields = {
            "time": f"2026-12-0{number + 2}T10:00:00.000000Z",
            "event": "decision",
            "layer": "request",
            "verdict": "allow",
            "profile": "newcomer",
            "sandbox": "sbx-7",
            "attempt_id": f"01a3{number:024x}",
            "host": host,
            "port": 443,
            "scheme": "https",
            "method": method,
            "path": path,
        }
        observed = {"reason": "observed", "would_deny": True, "would_reason": "not_allowed"}
        lines.append(json.dumps(fields | (more or observed)))
    return "\n".join(lines) + "\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("EGRESSD_RULES", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)
    monkeypatch.setattr(time, "time", lambda: NOW)
    for name in ("services", "lists"):
        shutil.copytree(ROOT / "rules" / name, tmp_path / "rules" / name)
    (tmp_path / "egressd.yaml").write_text(CONFIG)
    (tmp_path / "journal.jsonl").write_text(week())
    monkeypatch.setenv("EGRESSD_CONFIG", str(tmp_path / "egressd.yaml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what it shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def run(command: str) -> str:
    """What a command prints, where it is not put into a file."""
    words, _, file = command.partition(" > ")
    if words.startswith("cp -r "):
        _, _, source, target = shlex.split(words)
        shutil.copytree(source, target)
        return ""
    result = CliRunner().invoke(app, shlex.split(words)[1:])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if file:
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(result.stdout)
        return result.stderr
    return result.stdout + result.stderr


def in_force(place: Path) -> None:
    """What a daemon would have kept of these rules by now."""
    rules = load_rules(place / "rules", now=NOW)
    assert isinstance(rules, Rules), str(rules)
    archive = Archive(place / "state", place / "rules")
    archive.keep(rules.source, lambda: map(rules.effective, rules.profiles), NOW)


def steps() -> str:
    return PAGE.read_text().split("## Ten steps", 1)[1].split("\n## ", 1)[0]


def test_there_are_ten_of_them() -> None:
    assert re.findall(r"^### (\d+)\. ", steps(), re.MULTILINE) == [str(number) for number in range(1, 11)]


def test_every_block_does_what_it_shows(place: Path) -> None:
    told = []
    for kind, block in BLOCK.findall(steps()):
        if kind == "yaml":
            name = block.splitlines()[0].removeprefix("# ")
            assert name.startswith("rules/"), name
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(block)
            continue
        assert kind == "console", kind
        for command, shown in commands(block):
            if command.startswith(("egressd replay", "egressd rollback")):
                in_force(place)
            printed = run(command)
            told.append(f"$ {command}\n{printed}")
            assert VARYING.sub("*", printed) == VARYING.sub("*", shown), told[-1]
