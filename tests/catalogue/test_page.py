"""docs/catalogue.md is true: its commands run, its tables are what the code has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.main import app
from egressd.policy.model import ServiceFile
from egressd.rulefiles.catalogue import WHY

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "catalogue.md").read_text()


def test_its_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = PAGE.split("```sh\n")[1].split("```")[0].splitlines()
    assert [CliRunner().invoke(app, shlex.split(command)[1:]).exit_code for command in commands] == [0, 0, 0]


def test_its_findings_are_those_of_lint() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## What `lint`")[1], re.MULTILINE))
    assert table == {kind.value: why for kind, why in WHY.items()}


def test_its_lists_are_those_of_the_tool() -> None:
    tool = (ROOT / "tools" / "refresh-lists").read_text()
    kinds = re.findall(r'^    "([a-z-]+)": Kind\(\n        "(https://[^"]+)"', tool, re.MULTILINE)
    assert kinds
    assert re.findall(r"^\| `([a-z-]+)` \| (https://\S+) \|", PAGE, re.MULTILINE) == kinds


def test_it_tells_every_access() -> None:
    told = re.findall(r"^\| `access: (\w+)`", PAGE, re.MULTILINE)
    schema = ServiceFile.model_json_schema()
    access = schema["properties"]["access"]
    values = access.get("enum") or schema["$defs"]["Access"]["enum"]
    assert sorted(told) == sorted(values)
