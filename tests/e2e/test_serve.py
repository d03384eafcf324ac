"""Many sandboxes of one daemon: made, used, reached by nobody else, ended each on its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from tests.e2e.conftest import until
from tests.e2e.daemon import (
    ALLOWED,
    DENIED,
    RULES,
    Daemon,
    children,
    curl,
    daemon,
    flows,
    kill,
    load_allowance,
    open_sockets,
    ports,
    seconds,
    stderr_of,
    wait_for,
)
from tests.e2e.test_drills import line_of, running

pytestmark = pytest.mark.e2e
BOTH_WAYS = True


@pytest.fixture(scope="module")
def one_for_all(shared_lab: Lab) -> Iterator[Daemon]:
    with daemon(shared_lab, RULES, ports(100)) as made:
        yield made


@pytest.fixture
def shared(one_for_all: Daemon) -> Iterator[Daemon]:
    """A daemon that others have used and will use; whoever is left when a test ends is ended."""
    yield one_for_all
    assert one_for_all.process.poll() is None
    one_for_all.ask("DELETE", "/v1/sandboxes")


def test_run_uses_the_daemon_and_gives_its_commands_status(shared: Daemon) -> None:
    stand = shared.stand
    done = stand.run(
        [
            "sh",
            "-c",
            f"curl -sS -o /dev/null -w '%{{http_code}} ' {ALLOWED} {DENIED}; echo $EGRESSD_SANDBOX; exit 7",
        ],
        flags=["--label", "task=7"],
    )
    assert done.returncode == 7, done.stderr
    *codes, sandbox = done.stdout.split()
    assert codes[0] == "200"
    told = stand.records(event="sandbox", sandbox=sandbox)
    assert [record["detail"] for record in told] == ["created", "ready", "ended", "gone"]
    assert told[0]["labels"] == {"task": "7"}
    assert stand.records(event="decision", sandbox=sandbox, verdict="deny", host="pastebin.com")
    assert stand.records(event="lost", sandbox=sandbox) == []
    assert shared.ask("GET", f"/v1/sandboxes/{sandbox}")[1]["stage"] == "gone"
    assert shared.living == []
    assert shared.files() == []


def test_run_says_where_it_and_the_daemon_would_go_by_different_things(shared: Daemon) -> None:
    done = shared.stand.run(["true"], flags=["--journal", "-"])
    assert done.returncode == 125
    assert "another configuration: journal is" in done.stderr
    assert "--standalone" in done.stderr
    assert shared.living == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(["--bind", "{rules}"], "could write", id="rules that everybody lives by"),
        pytest.param(["--profile", "none"], "there is no profile 'none'", id="no such profile"),
    ],
)
def test_a_sandbox_that_may_not_be_is_refused_by_the_daemon_too(
    shared: Daemon, flags: list[str], said: str
) -> None:
    done = shared.stand.run(["true"], flags=[flag.format(rules=shared.stand.rules) for flag in flags])
    assert done.returncode == 125
    assert said in done.stderr or "must stay hidden" in done.stderr
    until(lambda: shared.living == [], what="the end of the refused")


def test_attaching_costs_the_daemon_little(shared: Daemon) -> None:
    shared.stand.run(["true"])
    assert shared.stand.run(["true"]).returncode == 0
    created = shared.stand.records(event="sandbox", detail="created")[-1]
    asked = shared.stand.records(event="decision", sandbox=created["sandbox"])[0]
    # from `created` to the first query from inside: a worker has taken it, and `run` was told so
    assert seconds(asked["time"]) - seconds(created["time"]) < 0.15 + load_allowance()


def test_a_revoked_sandbox_loses_every_flow_within_a_second_and_others_do_not_notice(shared: Daemon) -> None:
    stand = shared.stand
    made = shared.create()
    assert curl(stand, made, ALLOWED) == "200"
    with flows(stand) as (victim, first), flows(stand) as (other, second):
        assert {life["id"] for life in shared.living} == {made["sandbox"]["id"], first, second}
        began = time.monotonic()
        gone = shared.revoke(first)
        took = time.monotonic() - began
        assert (gone["stage"], gone["ending"]) == ("gone", "revoked")
        assert took < 1.0 + load_allowance()
        assert victim.wait(10) == 125
        assert "the sandbox was ended (revoked)" in stderr_of(victim)
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
        assert line_of(other) == "still 4"
        assert curl(stand, made, ALLOWED) == "200"
        assert {life["id"] for life in shared.living} == {made["sandbox"]["id"], second}
    ends = [
        record for record in stand.records(event="end", sandbox=first) if record.get("reason") == "revoked"
    ]
    assert len(ends) >= 4
    assert stand.records(event="sandbox", sandbox=first)[-1]["detail"] == "gone"
    until(lambda: len(shared.living) == 1, what="the end of the other")


def test_a_revoked_explicit_sandbox_is_a_stranger_at_once(shared: Daemon) -> None:
    stand = shared.stand
    first, second = shared.create(), shared.create()
    assert curl(stand, first, ALLOWED) == "200"
    assert curl(stand, second, ALLOWED, source="127.0.0.8") == "200"
    shared.revoke(first["sandbox"]["id"])
    assert "200" not in curl(stand, first, ALLOWED)
    assert curl(stand, second, ALLOWED, source="127.0.0.8") == "200"
    third = shared.create(source="127.0.0.7")  # who has the address next inherits nothing
    assert curl(stand, third, DENIED) != "200"
    assert curl(stand, third, ALLOWED) == "200"
    assert shared.ask("POST", "/v1/sandboxes", {"profile": "lab", "source": "127.0.0.7"})[0] == 422


def test_a_token_is_in_no_answer_record_or_file(shared: Daemon) -> None:
    made = shared.create()
    curl(shared.stand, made, ALLOWED)
    token = made["environment"]["HTTPS_PROXY"].split(":")[2].split("@")[0]
    assert len(token) > 40
    told = json.dumps(
        [shared.living, shared.ask("GET", f"/v1/sandboxes/{made['sandbox']['id']}"), shared.stand.records()]
    )
    files = [
        path.read_text(errors="replace")
        for path in (shared.stand.directory / "state").rglob("*")
        if path.is_file()
    ]
    assert token not in told + shared.said() + "".join(files)


def test_a_time_to_live_ends_a_sandbox(shared: Daemon) -> None:
    made = shared.create(ttl=1)
    until(lambda: shared.living == [], what="the end of its time")
    assert shared.ask("GET", f"/v1/sandboxes/{made['sandbox']['id']}")[1]["ending"] == "expired"
    assert "200" not in curl(shared.stand, made, ALLOWED)


def test_kill_all_ends_everybody(shared: Daemon) -> None:
    stand = shared.stand
    shared.create()
    with running(stand, "read line") as process:
        wait_for(process, lambda: len(shared.living) == 2, "two sandboxes")
        done = stand.lab.host_exec(
            stand.egressd("kill", "--all"), cwd=str(stand.directory), env=clean_env(stand.lab, trust=False),
            privileged=not stand.lab.rootless,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "2 ended\n"), done.stderr
        assert process.wait(10) == 125
    assert shared.living == []


def test_a_run_that_is_killed_is_a_sandbox_that_ends(shared: Daemon) -> None:
    stand = shared.stand
    with flows(stand) as (process, sandbox):
        process.kill()
        until(lambda: shared.living == [], what="the end of the sandbox")
    assert stand.records(event="sandbox", sandbox=sandbox)[-1]["detail"] == "gone"


def test_a_worker_that_dies_is_replaced_and_everybody_goes_on(shared: Daemon) -> None:
    stand = shared.stand
    made = shared.create()
    assert curl(stand, made, ALLOWED) == "200"
    for worker in shared.workers() & children(shared.process.pid):
        kill(stand, worker)
    until(lambda: curl(stand, made, ALLOWED) == "200", 30, "the next worker")
    assert len(shared.living) == 1


def test_health_is_bare_and_true(shared: Daemon) -> None:
    def health(path: str) -> str:
        done = shared.stand.lab.host_exec(
            ["curl", "-s", "-w", "%{http_code}", f"http://127.0.0.1:15121{path}"]
        )
        return done.stdout

    assert health("/healthz") == "ok\n200"
    assert health("/readyz") == "ok\n200"
    assert health("/v1/sandboxes") == "no\n404"
    assert health("/../etc/passwd") == "no\n404"


def test_no_sandbox_reaches_the_api_by_any_way(shared: Daemon) -> None:
    stand = shared.stand
    script = r"""
for path in %(paths)s; do ls "$path" 2>/dev/null && echo "sees $path"
  curl -sS --max-time 3 --unix-socket "$path" http://x/v1/status
done
for address in 127.0.0.1 [::1] 198.18.0.3 11.0.0.2 169.254.169.254 localhost; do
  curl -sS --max-time 5 http://$address:15121/healthz; curl -sS --max-time 5 -x http://127.0.0.1:3128 http://$address:15121/healthz
done
python3 - <<'END'
import socket
for name in open("/proc/net/unix").read().split():
    if name.startswith("@"): print("abstract", name)
END
exit 0
"""
    paths = f"{shared.socket} {stand.directory}/control-attach.sock"
    done = stand.run(["sh", "-c", script % {"paths": paths}])
    assert done.returncode == 0, done.stderr
    assert "sees" not in done.stdout
    assert '"version"' not in done.stdout
    assert "ok\n" not in done.stdout
    assert "abstract" not in done.stdout
    made = shared.create()
    for target in (
        "http://127.0.0.1:15121/healthz",
        "http://localhost:15121/",
        "http://11.0.0.2:15121/healthz",
    ):
        assert curl(stand, made, target) == "403"
    assert curl(stand, made, "https://127.0.0.1:15121/") != "200"


def test_a_socket_that_somebody_lets_in_answers_no_sandbox(shared: Daemon) -> None:
    stand = shared.stand
    script = f"curl -sS --max-time 5 --unix-socket {shared.socket} http://x/v1/status"
    done = stand.run(["sh", "-c", f"{script}; exit 0"], flags=["--socket", str(shared.socket)])
    assert '"version"' not in done.stdout
    # and where the mount itself is forced: from a pid namespace of its own, with the very uid of the daemon
    inside = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "sh", "-c", script]
    done = stand.lab.host_exec(inside, privileged=not stand.lab.rootless)
    assert '"forbidden"' in done.stdout, done.stderr


def test_a_second_daemon_for_the_same_state_does_not_start(shared: Daemon) -> None:
    stand = shared.stand
    done = stand.lab.host_exec(
        stand.egressd("serve"), cwd=str(stand.directory), env=clean_env(stand.lab, trust=False),
        privileged=not stand.lab.rootless,
    )  # fmt: skip
    assert done.returncode == 3
    assert f"another daemon has {stand.directory}/state (pid {shared.process.pid})" in done.stderr
    assert shared.living == []


def test_descriptors_come_back(shared: Daemon) -> None:
    stand = shared.stand
    stand.run(["true"])
    shared.revoke(shared.create()["sandbox"]["id"])
    before = open_sockets(shared.process.pid)
    for _ in range(3):
        stand.run(["true"])
        shared.revoke(shared.create()["sandbox"]["id"])
    until(lambda: open_sockets(shared.process.pid) <= before, what="the descriptors' return")


def test_what_a_sandbox_of_the_daemon_may_not_do_is_approved_and_taken_back(shared: Daemon) -> None:
    made = shared.create()
    sandbox, post = made["sandbox"]["id"], "-X POST"
    url = ALLOWED.replace("/echo", "/upload")
    assert curl(shared.stand, made, url, more=post) == "403"
    status, asked = shared.ask("POST", "/v1/approvals", {"sandbox": sandbox, "request": f"POST {url}"})
    assert (status, asked["reason"]) == (201, "method_not_allowed")
    body = {"scope": "request", "length": "15m", "policy": asked["policy"], "because": "a test"}
    status, approved = shared.ask("POST", f"/v1/approvals/{asked['id']}/approve", body)
    assert (status, approved["state"]) == (200, "approved")
    assert curl(shared.stand, made, url, more=post) == "200"
    assert shared.ask("DELETE", f"/v1/grants/{approved['grant']}")[0] == 200
    assert curl(shared.stand, made, url, more=post) == "403"
    [record] = shared.stand.records(event="decision", layer="request", grant=approved["grant"])
    assert (record["sandbox"], record["verdict"], record["reason"]) == (sandbox, "allow", "grant")
