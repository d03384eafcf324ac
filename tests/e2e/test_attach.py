"""The namespace wiring with runc containers that run already, made without a network."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from egressd.lab import Lab
from tests.e2e.conftest import RULES, build, until
from tests.e2e.daemon import Daemon, daemon
from tests.e2e.wired import API, INSIDE, Containers, counted, environment, left

pytestmark = [pytest.mark.e2e, pytest.mark.root]

ATTACKER = "11.6.6.6"
OTHER = """\
schema: 1
profile: other
owner: lab
mode: enforce
allow:
  - {id: other, hosts: [pypi.org]}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with build(rootless=False) as lab:
        yield lab


class Ground:
    """A daemon, and containers that run beside it."""

    def __init__(self, lab: Lab, daemon: Daemon) -> None:
        self.lab, self.stand, self.daemon = lab, daemon.stand, daemon
        self.bundle = str(self.stand.directory / "ca-trust" / "bundle.crt")
        self.containers = Containers(lab, self.stand)
        (self.stand.rules / "profiles" / "other.yaml").write_text(OTHER)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        self.held = contextlib.ExitStack()

    def container(self, *options: str) -> Held:
        return self.held.enter_context(contextlib.closing(Held(self, *options)))

    def egressd(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run("host", self.stand.egressd(*words), env=environment(self.lab), cwd="/")

    def create(self, profile: str, **place: object) -> str:
        return str(self.daemon.create(profile=profile, wiring="namespace", **place)["sandbox"]["id"])

    def refused(self, container: Held, **place: object) -> str:
        wanted = {"profile": "lab", "wiring": "namespace", **(place or {"pid": container.pid})}
        status, made = self.daemon.ask("POST", "/v1/sandboxes", wanted)
        assert status in (422, 503), made
        return str(made["detail"])

    def stage(self, sandbox: str) -> tuple[str, str | None]:
        _, shown = self.daemon.ask("GET", f"/v1/sandboxes/{sandbox}")
        return shown["stage"], shown["ending"]

    def records(self, sandbox: str, **wanted: object) -> list[dict[str, Any]]:
        return self.stand.records(sandbox=sandbox, **wanted)


class Held:
    """A container without a network, that runs until it is closed; commands are run in it."""

    def __init__(self, ground: Ground, *options: str) -> None:
        self.ground, lab = ground, ground.lab
        bundle = ground.bundle
        given = [
            f"--env=CURL_CA_BUNDLE={bundle}",
            f"--bind={os.path.dirname(bundle)}:ro",
            f"--bind={INSIDE.parent}:ro",
        ]
        given += ["--resolver=198.18.0.1", *(options or ("--network=none",))]
        argv = ground.containers.argv(given, ["sh", "-c", "echo held; exec sleep 600"])
        self.name = ground.containers.name
        self.process = lab.popen("host", argv, env=environment(lab), cwd="/", stdin=subprocess.DEVNULL)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"
        self.pid: int = json.loads(self.runc("state", self.name).stdout)["pid"]
        self.network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    def runc(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        argv = ["runc", f"--root={self.ground.containers.state}", *words]
        return self.ground.lab.run("host", argv, env=environment(self.ground.lab), cwd="/", timeout=timeout)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return self.runc("exec", self.name, "sh", "-c", script)

    def inside(self, case: str) -> dict[str, Any]:
        done = self.runc("exec", self.name, "/usr/bin/python3", str(INSIDE), *case.split())
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def traces(self) -> list[str]:
        """What there is in its network: rules, routes, addresses, sockets that listen."""
        script = (
            "iptables-save; ip6tables-save; ip -4 route show table all; ip -6 route show table all; ip -o addr;"
            " ss -Hlntu; cat /proc/sys/net/ipv4/ping_group_range"
        )
        argv = ["nsenter", f"--net=/proc/self/fd/{self.network}", "sh", "-c", script]
        done = subprocess.run(argv, capture_output=True, text=True, pass_fds=[self.network], check=True)
        lines = (line for line in done.stdout.splitlines() if not line.startswith(("#", ":", "*", "COMMIT")))
        return sorted(line.replace("valid_lft forever preferred_lft forever", "") for line in lines)

    def kill(self) -> None:
        self.runc("kill", self.name, "KILL")
        self.process.wait(30)

    def close(self) -> None:
        if self.network < 0:
            return
        if self.process.poll() is None:
            self.kill()
        os.close(self.network)
        self.network = -1


@pytest.fixture(scope="module")
def ground(lab: Lab) -> Iterator[Ground]:
    with daemon(lab, RULES, "") as running:
        made = Ground(lab, running)
        with made.held:
            yield made


def test_two_at_once_are_judged_by_their_own_rules_and_nothing_is_left_of_either(ground: Ground) -> None:
    a, b = ground.container(), ground.container()
    before = a.traces(), b.traces()
    words = ("--wiring", "namespace", "--profile", "lab", "--format", "json", "--pid", str(a.pid))
    made = ground.egressd("sandbox", "create", *words)
    assert made.returncode == 0, made.stderr
    ids = json.loads(made.stdout)["sandbox"]["id"], ground.create("other", netns=f"/proc/{b.pid}/ns/net")
    tried = f"curl -sS -m 20 {API}; echo; curl -sS -m 20 https://pypi.org/simple/ | head -c 9; curl -sS -m 5 http://{ATTACKER}/"
    said = [each.run(tried).stdout for each in (a, b)]
    assert said[0].splitlines()[0].isdigit(), said
    assert "(reason not_allowed)" in said[1].splitlines()[0], said
    assert all("(reason ip_literal)" in each for each in said), said
    packets = a.inside("not_tcp")
    assert all(each["error"] and each["fast"] for each in packets.values()), packets
    assert left(ground.lab, ATTACKER, "169.254.169.254") == []
    until(lambda: counted(ground.records(ids[0]), layer="packet") == 7)
    assert counted(ground.records(ids[1]), layer="packet") == 0
    for sandbox in ids:
        ground.daemon.revoke(sandbox)
    assert (a.traces(), b.traces()) == before
    assert a.run(f"curl -sS -m 3 {API}").returncode != 0
    for sandbox in ids:
        assert ground.records(sandbox, event="lost") == []


def test_whose_end_is_the_sandbox_s_end(ground: Ground) -> None:
    container = ground.container()
    sandbox = ground.create("lab", pid=container.pid)
    container.kill()
    until(lambda: ground.stage(sandbox) == ("gone", "ended"))
    assert "No such process" in ground.refused(container)
    assert "ended: the container has ended" in [r["detail"] for r in ground.records(sandbox, event="sandbox")]


def test_who_gets_another_network_or_a_process_of_power_is_no_sandbox_any_more(ground: Ground) -> None:
    container = ground.container()
    sandbox = ground.create("lab", pid=container.pid)
    enter = ["nsenter", f"--net=/proc/self/fd/{container.network}"]
    powerful = subprocess.Popen([*enter, "sleep", "600"], pass_fds=[container.network])
    try:
        until(lambda: ground.stage(sandbox) == ("gone", "ended"))
    finally:
        powerful.kill()
        powerful.wait()
    assert [line for line in container.traces() if "REDIRECT" in line or "198.18" in line] == []

    sandbox = ground.create("lab", pid=container.pid)
    pair = f"ip link add second type veth peer name eth1 netns {container.pid}"
    assert ground.lab.run("host", pair.split()).returncode == 0
    subprocess.run([*enter, "ip", "link", "set", "eth1", "up"], pass_fds=[container.network], check=True)
    until(lambda: ground.stage(sandbox) == ("gone", "ended"))
    assert any("REJECT" in line for line in container.traces())  # so that the new way is closed
    assert "eth1 is up" in ground.refused(container)
    ended = [
        r["detail"] for r in ground.records(sandbox, event="sandbox") if "network of its own" in r["detail"]
    ]
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(["--network=none", "--capability=CAP_NET_RAW"], "holds CAP_NET_RAW", id="NET_RAW"),
        pytest.param(["--network=none", "--uid=0", "--capability=CAP_NET_ADMIN"], "holds CAP_NET_ADMIN", id="NET_ADMIN"),
        pytest.param(["--network=none", "--capability=CAP_SYS_ADMIN"], "holds CAP_SYS_ADMIN", id="SYS_ADMIN"),
        pytest.param(["--workdir=/"], "the host's own network namespace", id="the host's network"),
    ],
)  # fmt: skip
def test_what_could_change_its_network_is_refused_and_left_as_it_was(
    ground: Ground, options: list[str], why: str
) -> None:
    container = ground.container(*options)
    before = container.traces()
    assert why in ground.refused(container)
    assert why in ground.refused(container, netns=f"/proc/{container.pid}/ns/net")
    assert container.traces() == before
    container.close()


def test_a_port_that_the_container_holds_and_one_that_is_attached_already_are_refused(ground: Ground) -> None:
    container = ground.container()
    program = "import socket, sys; held = socket.create_server(('127.0.0.1', 15053)); print('up', flush=True); sys.stdin.read()"
    argv = [
        "runc",
        f"--root={ground.containers.state}",
        "exec",
        container.name,
        "/usr/bin/python3",
        "-c",
        program,
    ]
    before = container.traces()
    with ground.lab.popen("host", argv, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        held = container.traces()
        assert "15053: Address already in use" in ground.refused(container)
        assert container.traces() == held
    assert container.traces() == before
    ground.create("lab", pid=container.pid)
    wired = container.traces()
    assert "already in use" in ground.refused(container)
    assert container.traces() == wired
    assert container.run(f"curl -sS -m 20 {API}").stdout.isdigit()


@pytest.mark.parametrize("flag", ["--standalone", "--daemon"])
def test_run_serves_a_container_until_it_is_told_to_end(ground: Ground, flag: str) -> None:
    container = ground.container()
    before = container.traces()
    argv = ground.stand.egressd("run", "--profile", "lab", flag, "--pid", str(container.pid))
    with ground.lab.popen("host", argv, env=environment(ground.lab), cwd="/", stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        said = ""
        while "attached: " not in said:
            said = run.stderr.readline()
            assert said, run.wait()
        assert container.run(f"curl -sS -m 20 {API}").stdout.isdigit()
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 143
        assert [line for line in run.stderr if line.strip()] == []
    assert container.traces() == before
    sandbox = said.split()[-1]
    until(lambda: "gone" in [r["detail"] for r in ground.records(sandbox, event="sandbox")])
    assert ground.records(sandbox, event="lost") == []


def test_a_daemon_that_is_killed_leaves_it_closed_and_its_successor_nothing(ground: Ground) -> None:
    container = ground.container()
    before = container.traces()
    sandbox = ground.create("lab", pid=container.pid)
    ground.daemon.process.kill()
    ground.daemon.process.wait()
    assert container.run(f"curl -sS -m 3 {API}; curl -sS -m 3 http://{ATTACKER}/").returncode != 0
    ground.daemon.start()
    assert set(container.traces()) - {"0\t2147483647"} == set(before) - {
        "1\t0"
    }  # who may ping: only who set it knew what it was
    assert "gone: its daemon was killed" in [r["detail"] for r in ground.records(sandbox, event="sandbox")]
    ground.create("other", pid=container.pid)
    assert left(ground.lab, ATTACKER) == []
