"""`egressd demo` as a newcomer runs it: as root and rootless, to its last line; what it starts is gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from egressd.lab.demo.moves import FORBIDDEN, WELCOME
from egressd.rulefiles.load import Rules, load_rules

pytestmark = pytest.mark.e2e

LAST_LINE = f"demo: {len(WELCOME)} allowed, {len(FORBIDDEN)} refused, all as the rules say"


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "egressd", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "200"},
        start_new_session=True,
    )


def run(tmp_path: Path, *arguments: str) -> str:
    with start(tmp_path, *arguments) as process:
        try:
            output, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            raise
    if process.returncode == 3 and os.geteuid() != 0 and "CLONE_NEWUSER" in errors:
        pytest.skip(f"this kernel lets no unprivileged user make a user namespace: {errors}")
    assert (process.returncode, errors) == (0, ""), output[-2000:] + errors
    return output


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder for temporary files that every uid may pass through: pytest's own are for its user alone."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path


@pytest.mark.root
def test_everything_is_as_the_rules_say_and_the_books_balance(shared: Path) -> None:
    document: dict[str, Any] = json.loads(run(shared, "--json"))
    assert document["summary"] == LAST_LINE
    assert document["surprises"] == []
    assert sum(row["verdict"] == "allow" for row in document["moves"]) >= 5
    assert sum(row["verdict"] == "deny" for row in document["moves"]) >= 14
    for account in document["accounts"]:
        assert account["sent"] == account["recorded"], account
        assert account["sent"] > 0, f"{account['kind']}: the demo does not show any"
    left = document["left"]
    assert (left["attacker"], left["metadata"], left["strangers"], left["lost"]) == (0, 0, [], 0)
    assert all(row["without"]["succeeded"] for row in document["moves"] if row["verdict"] == "deny")
    assert document["seconds"] < 50
    assert list(shared.iterdir()) == []


def test_rootless_it_ends_in_its_promised_line_and_keeps_what_can_be_looked_into(shared: Path) -> None:
    output = run(shared, "--rootless", "--keep")
    lines = output.splitlines()
    assert lines[-1] == LAST_LINE
    assert sum(line.startswith("allowed ") for line in lines) == len(WELCOME)
    assert sum(line.startswith("refused ") for line in lines) == len(FORBIDDEN)
    [kept] = shared.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == [
        "credentials.yaml",
        "egressd.yaml",
        "journal.jsonl",
        "lab-ca.pem",
        "rules",
    ]
    assert isinstance(load_rules(kept / "rules"), Rules)
    for line in lines:
        if line.startswith("  ") and str(kept) in line:
            verb = line.split()[1:]
            shown = subprocess.run(
                ["sh", "-c", f'"$0" -m egressd {" ".join(verb)}', sys.executable],
                capture_output=True,
                text=True,
            )
            assert shown.returncode in {0, 1}, (line, shown.stderr)
            assert "deny" in shown.stdout, line


def test_interrupted_it_leaves_nothing_behind(shared: Path) -> None:
    with start(shared, "--rootless") as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("allowed "):  # the sandbox is at work
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
        session = process.pid
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "egressd demo: interrupted; everything has been taken down\n"
    assert list(shared.iterdir()) == []
    assert sessions().isdisjoint({session})


def sessions() -> set[int]:
    """The session of every process that has not ended."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if state not in "ZX":
                found.add(int(session))
    return found
