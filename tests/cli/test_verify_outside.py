"""What is looked at from outside: owners and modes, the sandboxed program as the host sees it, the records."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from egressd.cli.verify_outside import View, command_of, host_files, host_identity, records
from egressd.control.config import Config, load_config
from egressd.policy.effective import EntryLimits, Rate
from egressd.verify.scene import Allowed
from tests.policy.entries import NOON, allow, policy

READY = {"event": "sandbox", "detail": "ready"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    conf = tmp_path / "conf"
    for folder in ("rules/profiles", "ca", "state"):
        (conf / folder).mkdir(parents=True)
    (conf / "egressd.yaml").write_text(
        "schema: 1\nrules: rules\ncredentials: credentials.yaml\nca_dir: ca\njournal: journal.jsonl\nstate_dir: state\n"
    )
    for name in ("rules/profiles/a.yaml", "ca/ca.key", "credentials.yaml", "journal.jsonl"):
        (conf / name).touch()
        (conf / name).chmod(0o600)
    (conf / "ca").chmod(0o700)
    return load_config({}, {"HOME": "/nonexistent"}, file=conf / "egressd.yaml")


@pytest.fixture
def view(config: Config, tmp_path: Path) -> View:
    return View(
        config=config,
        stand=os.getpid(),
        command=None,
        euid=os.geteuid(),
        sandbox_uid=59137,
        journal=tmp_path / "records.jsonl",
        nonce="n",
        allowed=Allowed("a.com", 443, "https", "GET", "/"),
        policy=policy(allow("a.com"), allow("*.w.com")),
        now=NOON,
        evil_is_allowed=False,
        without=False,
    )


def test_what_is_closed_to_others_is_held(view: View) -> None:
    assert host_files(view).verdict == "held", host_files(view)


MODES = [
    pytest.param("conf/rules/profiles/a.yaml", 0o666, "written", id="a rule file"),
    pytest.param("conf/rules/profiles", 0o777, "written", id="a folder of rules"),
    pytest.param("conf", 0o775, "written", id="a folder above, by the group"),
    pytest.param("conf/egressd.yaml", 0o646, "written", id="the configuration"),
    pytest.param("conf/ca/ca.key", 0o644, "read", id="the key"),
    pytest.param("conf/ca", 0o755, "read", id="the key's folder"),
    pytest.param("conf/credentials.yaml", 0o640, "read", id="the credentials, by the group"),
    pytest.param("conf/journal.jsonl", 0o604, "read", id="the journal"),
]


@pytest.mark.parametrize(("path", "mode", "what"), MODES)
def test_what_others_can_do_is_open(view: View, tmp_path: Path, path: str, mode: int, what: str) -> None:
    (tmp_path / path).chmod(mode)
    found = host_files(view)
    assert found.verdict == "open"
    assert found.detail == f"{tmp_path / path} can be {what} by others (mode {mode:04o})"


def test_a_sticky_folder_lets_nobody_rename_what_is_not_his(view: View, tmp_path: Path) -> None:
    (tmp_path / "conf").chmod(0o1777)
    assert host_files(view).verdict == "held"


@pytest.mark.root
def test_a_rule_file_of_the_sandboxs_own_uid_is_open(view: View, tmp_path: Path) -> None:
    rule = tmp_path / "conf/rules/profiles/a.yaml"
    os.chown(rule, 59137, 59137)
    assert host_files(view).detail == f"{rule} belongs to uid 59137"


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*wrapper: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.root
def test_uid_0_of_the_host_is_open(view: View, sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    found = host_identity(dataclasses.replace(view, command=sleeper().pid))
    assert found.verdict == "open"
    assert "it is uid 0 of the host" in found.detail


@pytest.mark.root
def test_a_uid_and_a_namespace_of_egressds_are_open(view: View) -> None:
    with (
        subprocess.Popen(["egressd.gate.worker", "60"], executable="/bin/sleep", user=1337) as worker,
        subprocess.Popen(["sleep", "60"], user=1337) as sandboxed,
    ):
        try:
            found = host_identity(dataclasses.replace(view, stand=worker.pid, command=sandboxed.pid))
        finally:
            worker.kill()
            sandboxed.kill()
    assert found.verdict == "open"
    assert found.detail.split("; ") == [
        "it is uid 1337, which egressd uses",
        f"process {worker.pid} of egressd's is in its user namespace",
        f"process {worker.pid} of egressd's is in its pid namespace",
    ]


def test_no_sandbox_is_no_proof(view: View) -> None:
    assert host_identity(view).verdict == "not tried"
    assert host_identity(dataclasses.replace(view, without=True)).verdict == "not tried"
    assert command_of(os.getpid(), 2**22) is None


def decision(layer: str, verdict: str, **fields: Any) -> dict[str, Any]:
    return {"event": "decision", "layer": layer, "verdict": verdict, **fields}


REFUSED = [decision("dns", "deny"), decision("connection", "deny"), decision("packet", "deny")]


@pytest.mark.parametrize(
    ("lines", "verdict", "detail"),
    [
        pytest.param([READY, *REFUSED], "held", "3 decisions, all as they should be", id="all refused"),
        pytest.param(
            [
                READY,
                *REFUSED,
                decision("request", "allow", host="a.com"),
                decision("dns", "allow", host="x.w.com"),
            ],
            "held",
            "5 decisions, all as they should be",
            id="what the rules allow was allowed",
        ),
        pytest.param(
            [READY, *REFUSED, decision("request", "allow", host="evil.example")],
            "open",
            "allowed: request evil.example",
            id="another host was allowed",
        ),
        pytest.param(
            [READY, *REFUSED, decision("connection", "allow", host="x.w.com")],
            "open",
            "allowed: connection x.w.com",
            id="a connection below the wildcard",
        ),
        pytest.param(
            [READY, *REFUSED[:2]],
            "open",
            "nothing recorded of the layer packet",
            id="packets without a record",
        ),
        pytest.param([READY], "open", "there is no record of any attempt", id="no record"),
        pytest.param(
            [decision("dns", "allow", host="before"), READY, *REFUSED],
            "held",
            "3 decisions, all as they should be",
            id="control's own proof of the start",
        ),
    ],
)
def test_the_records_are_judged(view: View, lines: list[dict[str, Any]], verdict: str, detail: str) -> None:
    view.journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    assert records(view) == (verdict, detail)


def test_where_the_whole_web_may_be_read_strangers_may_be_reached(view: View) -> None:
    limits = EntryLimits(
        requests=Rate(amount=1, seconds=1),
        upload=Rate(amount=1, seconds=1),
        new_hosts=Rate(amount=1, seconds=1),
    )
    web = dataclasses.replace(
        view, policy=policy(allow(public_web=True, limits=limits)), evil_is_allowed=True
    )
    lines = [READY, *REFUSED, decision("connection", "allow", host="evil-lab.com")]
    view.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert records(web).verdict == "held", records(web)
    assert records(view).verdict == "open"


def test_a_journal_that_is_not_there_is_open(view: View) -> None:
    assert records(view).verdict == "open"
