"""`egressd config print`: what is in force, and who said so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from egressd.control.config import keys

TEXT = """\
schema: 1
journal: "-"
dns: {upstream: udp://192.0.2.53}
limits:
  connections: 7
"""


def printed(
    tmp_path: Path, *arguments: str, text: str = TEXT, **env: str
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "egressd.yaml"
    file.write_text(text)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EGRESSD_")}
    return subprocess.run(
        [sys.executable, "-m", "egressd", "--config", str(file), "config", "print", *arguments],
        env=clean | env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_key_is_printed_with_what_holds(tmp_path: Path) -> None:
    done = printed(tmp_path, "--json")
    told = json.loads(done.stdout)
    assert list(told) == list(keys().values())
    assert told["journal"] == "-"
    assert told["limits.connections"] == 7
    assert told["limits.idle_timeout"] == 900.0  # nobody gave it
    assert told["serve.health"] == "127.0.0.1:15021"


@pytest.mark.parametrize(
    ("key", "origin"),
    [
        ("journal", "{file}:2"),
        ("dns.upstream", "{file}:3"),
        ("dns.denied", "EGRESSD_DNS_DENIED"),
        ("limits.connections", "EGRESSD_LIMITS_CONNECTIONS"),
        ("rules", "--rules"),
        ("limits.idle_timeout", "default"),
    ],
)
def test_each_value_says_where_it_comes_from(tmp_path: Path, key: str, origin: str) -> None:
    done = printed(
        tmp_path,
        "--show-origin", "--json", "--rules", "/rules",
        EGRESSD_LIMITS_CONNECTIONS="8", EGRESSD_DNS_DENIED="nxdomain",
    )  # fmt: skip
    assert json.loads(done.stdout)[key]["origin"] == origin.format(file=tmp_path / "egressd.yaml")


def test_people_get_a_line_for_each_key(tmp_path: Path) -> None:
    lines = printed(tmp_path, "--show-origin").stdout.splitlines()
    assert f'journal: "-"    # {tmp_path / "egressd.yaml"}:2' in lines
    assert len(lines) == len(keys())


def test_what_cannot_be_used_is_status_2_with_every_problem(tmp_path: Path) -> None:
    done = printed(tmp_path, text="jornal: x\ndns: {denied: no}\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) >= 2
