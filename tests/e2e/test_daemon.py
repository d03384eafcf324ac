"""The daemon itself: reload, drain, the journal anew, its start and its death."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from tests.e2e.conftest import until
from tests.e2e.daemon import (
    ALLOWED,
    RULES,
    Daemon,
    alive,
    curl,
    daemon,
    flows,
    stderr_of,
    wait_for,
)
from tests.e2e.test_drills import line_of, running

pytestmark = pytest.mark.e2e


@pytest.fixture
def served(shared_lab: Lab) -> Iterator[Daemon]:
    with daemon(shared_lab, RULES) as made:
        yield made


def test_run_stands_alone_where_no_daemon_runs_or_when_told_to(served: Daemon) -> None:
    stand = served.stand
    with running(stand, "read line; exit 3", "--standalone") as process:
        wait_for(process, lambda: stand.records(event="sandbox", detail="ready"), "ready")
        assert served.living == []
    assert served.end() == 0
    assert stand.run(["true"]).returncode == 0
    told = stand.run(["true"], flags=["--daemon"])
    assert (told.returncode, "no daemon listens" in told.stderr) == (125, True)


@pytest.mark.parametrize("way", ["the API", "SIGHUP"])
def test_a_reload_reaches_every_sandbox(served: Daemon, way: str) -> None:
    stand = served.stand
    made = served.create()
    assert curl(stand, made, ALLOWED) == "200"
    with flows(stand) as (process, _):
        before = stand.profile.read_text()
        stand.profile.write_text(before.replace("api.lab-origin.com", "nowhere.lab-origin.com"))
        if way == "SIGHUP":
            served.process.send_signal(signal.SIGHUP)
        else:
            served.ask("POST", "/v1/reload")
        assert {line_of(process), line_of(process)} == {"download cut", "websocket cut"}
        assert "200" not in curl(stand, made, ALLOWED)
        stand.profile.write_text(before + "nonsense: true\n")
        status, problem = served.ask("POST", "/v1/reload")
        assert status == 409
        assert re.search(r"profiles/lab\.yaml:\d+:\d+: ", problem["detail"])
        assert "200" not in curl(stand, made, ALLOWED)  # the old rules stay in force
        assert stand.records(event="policy", sandbox="-")[-1]["detail"].startswith("refused: ")


def test_the_journal_goes_on_in_a_new_file_when_told_to(served: Daemon) -> None:
    stand = served.stand
    served.create()
    stand.journal.rename(stand.directory / "old.jsonl")
    served.process.send_signal(signal.SIGUSR1)
    until(stand.journal.exists, what="a new journal")
    served.create()
    assert len(stand.records(event="sandbox", detail="created")) == 1


def test_a_drain_waits_for_the_living_lets_nobody_in_and_ends_them_in_time(served: Daemon) -> None:
    stand = served.stand
    with flows(stand) as (process, _):
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.ask("GET", "/v1/status")[1]["draining"], what="draining")
        assert served.ask("POST", "/v1/sandboxes", {"profile": "lab"})[0] == 429
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line_of(process) == "still 4"
        served.process.send_signal(signal.SIGTERM)  # again: now
        assert served.process.wait(10) == 0
        assert process.wait(10) == 125
        assert "the sandbox was ended (drained)" in stderr_of(process)
    assert served.files() == []
    assert not served.socket.exists()
    assert stand.records(event="sandbox")[-1]["detail"] == "gone"
    assert stand.records(event="lost") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_while_it_starts_is_no_sudden_death(served: Daemon, number: int) -> None:
    assert served.end() == 0
    lock = served.stand.directory / "state/serve.lock"
    lock.unlink()
    served.begin()
    until(lock.exists, what="its first step")
    served.process.send_signal(number)
    if number != signal.SIGTERM:
        until(served.socket.exists, 30, "its last step")
        assert served.living == []
        assert served.end() == 0
    assert served.process.wait(20) == 0
    assert not served.socket.exists()


def test_a_drain_is_over_when_the_last_has_ended(served: Daemon) -> None:
    with running(served.stand, "read line") as process:
        wait_for(process, lambda: [life["stage"] for life in served.living] == ["ready"], "ready")
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.ask("GET", "/v1/status")[1]["draining"], what="draining")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(10) == 0
        assert served.process.wait(4) == 0


def test_rules_that_cannot_be_used_are_status_2(served: Daemon) -> None:
    stand = served.stand
    assert served.end() == 0
    stand.profile.write_text("schema: 1\nnonsense: 1\n")
    served.begin()
    assert served.process.wait(30) == 2
    assert "profiles/lab.yaml:2:1: " in served.said()


def test_what_a_killed_daemon_carried_is_cut_off_and_its_successor_knows_none_of_it(served: Daemon) -> None:
    stand = served.stand
    made = served.create()
    assert curl(stand, made, ALLOWED) == "200"
    with flows(stand) as (process, sandbox):
        workers = served.workers()
        served.end(signal.SIGKILL)
        assert process.wait(10) == 125
        assert "the daemon is gone" in stderr_of(process)
        until(lambda: not any(map(alive, workers)), what="the end of the workers")
        assert "200" not in curl(stand, made, ALLOWED)
    assert served.socket.exists()
    served.start()
    assert served.living == []
    assert "2 sandboxes of a daemon that was killed were taken down" in served.said()
    for gone in (sandbox, made["sandbox"]["id"]):
        assert stand.records(event="sandbox", sandbox=gone)[-1]["detail"] == "gone: its daemon was killed"
    assert "200" not in curl(stand, made, ALLOWED)  # its token died with it
    assert served.create()["sandbox"]["generation"] > made["sandbox"]["generation"]


AS_SIDECAR = """
import os, socket, sys
sock = socket.socket()
sock.listen()
os.dup2(sock.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="transparent-4")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_sidecar_does_not_open_its_api_to_the_network_that_it_shares(served: Daemon) -> None:
    stand = served.stand
    assert served.end() == 0
    api = {
        "EGRESSD_SERVE_API_LISTEN": "127.0.0.2:19443",
        **{f"EGRESSD_SERVE_API_{name}": "/nowhere" for name in ("CERTIFICATE", "KEY", "CLIENT_CA")},
    }
    done = stand.lab.host_exec(
        [sys.executable, "-I", "-c", AS_SIDECAR, *stand.egressd("serve")], cwd=str(stand.directory),
        env=clean_env(stand.lab, trust=False) | api, privileged=not stand.lab.rootless,
    )  # fmt: skip
    assert done.returncode == 3
    assert "shares every address with its sandbox" in done.stderr
