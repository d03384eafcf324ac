"""`egressd run` where it cannot start: one sentence, a hint, and a status that is never taken for the command's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from egressd.cli.run import _complain
from egressd.wiring.errors import WiringError


def test_a_workspace_that_cannot_be_is_told_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "rules" / "profiles").mkdir(parents=True)
    (tmp_path / "rules" / "organisation.yaml").write_text("schema: 1\nowner: t\n")
    (tmp_path / "rules" / "profiles" / "p.yaml").write_text("schema: 1\nprofile: p\nowner: t\n")
    (tmp_path / "egressd.yaml").write_text(
        "schema: 1\nrules: rules\nca_dir: ca\njournal: journal.jsonl\nstate_dir: state\n"
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "egressd",
            "--config",
            str(tmp_path / "egressd.yaml"),
            "run",
            "--profile",
            "p",
            "true",
        ],
        cwd="/",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 125
    assert ran.stderr.splitlines() == [
        "egressd: run: the workspace is /",
        "hint: choose a project's own directory",
    ]


def test_of_a_group_of_failures_the_first_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    group = ExceptionGroup(
        "unhandled errors", [ExceptionGroup("more", [WiringError("bwrap", "gone", "install it")]), OSError()]
    )
    assert _complain(group) == 125
    assert capsys.readouterr().err == "egressd: bwrap: gone\nhint: install it\n"
