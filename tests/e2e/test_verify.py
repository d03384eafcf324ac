"""`egressd verify` as an operator runs it, as root and as an ordinary user; where there is no egressd; and where it is broken."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from egressd.cli.verify_ground import Options
from egressd.cli.verify_run import Verification
from egressd.cli.verify_table import VerifyTable
from egressd.cli.verify_wirings import names_of
from egressd.control.config import load_config
from egressd.lab import Lab, clean_env
from tests.e2e.test_demo import sessions

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
ORDINARY = 47123
AS_ORDINARY = """
import os, sys
from tests.wiring.driver import become
become(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
PROFILE = """schema: 1
profile: lab
owner: verify
allow:
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET /v1/models", "POST /upload"]
  - id: wild
    hosts: ["*.wild-lab.com"]
  - id: pinned
    hosts: [api.anthropic.com]
    treatment: tunnel
deny:
  - id: never-x
    hosts: [x.wild-lab.com]
"""
OBSERVING = """schema: 1
profile: observing
owner: verify
mode: observe
observe_until: {until}
allow:
  - id: api
    hosts: [api.lab-origin.com]
"""
CREDENTIALS = """schema: 1
credentials:
  spare:
    for: [{hosts: [api.lab-origin.com], requests: ["GET /v1/**"]}]
    source: {env: SPARE_KEY}
    attach: {header: x-api-key}
"""
PRIVATE = (
    "conf/rules",
    "conf/credentials.yaml",
    "conf/ca/ca.key",
    "conf/journal.jsonl",
    "conf/state",
    "conf/control.sock",
)
NAMES = names_of("namespace")


@dataclass
class Installation:
    """egressd as somebody has installed it: everything in the folder `conf` of the very workspace, which is the worst place."""

    home: Path
    workspace: Path
    owner: int

    @property
    def config(self) -> Path:
        return self.workspace / "conf/egressd.yaml"

    def argv(self, *arguments: str) -> list[str]:
        command = [
            "-P",
            "-m",
            "egressd",
            "verify",
            "--config",
            str(self.config),
            "--profile",
            "lab",
            *arguments,
        ]
        if os.geteuid() == 0 and self.owner != 0:
            return [sys.executable, "-P", "-c", AS_ORDINARY, str(self.owner), *command]
        return [sys.executable, *command]

    def env(self) -> dict[str, str]:
        mine = {
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "160",
            "TMPDIR": str(self.home.parent / "tmp"),
        }
        return clean_env(trust=False) | mine

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.workspace,
            env=self.env(),
            start_new_session=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            try:
                output, errors = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                raise
        if process.returncode == 3 and os.geteuid() != 0 and "CLONE_NEWUSER" in errors:
            pytest.skip(f"this kernel lets no unprivileged user make a user namespace: {errors}")
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def document(self, *arguments: str) -> dict[str, Any]:
        ran = self.run("--json", *arguments)
        assert ran.stdout, ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout)
        assert ran.returncode == found["status"]
        return found

    def broken(self, *mutations: str, **options: Any) -> dict[str, str]:
        """What is open, by name, when egressd is broken in these ways."""
        stand = (sys.executable, "-P", str(ROOT / "tests/verify/mutated.py"), ",".join(mutations))
        asked = Options("lab", stand=stand, **options) if mutations else Options("lab", **options)
        config = load_config({}, {"HOME": str(self.home)}, file=self.config)
        document = Verification(config, asked, VerifyTable(silent=True)).run()
        assert document["status"] == 1
        return {row["name"]: row["detail"] for row in document["probes"] if row["verdict"] == "open"}


def install(top: Path, owner: int) -> Installation:
    made = Installation(top / "home", top / "work", owner)
    conf = made.workspace / "conf"
    for folder in (
        made.home / ".ssh",
        made.workspace,
        conf / "ca",
        conf / "state",
        conf / "journal.jsonl.d",
        top / "tmp",
    ):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "rules", conf / "rules")
    until = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=20)
    (conf / "rules/profiles/lab.yaml").write_text(PROFILE)
    (conf / "rules/profiles/observing.yaml").write_text(OBSERVING.format(until=until))
    keys = ("rules", "credentials", "ca_dir", "journal", "state_dir", "control_socket")
    places = ("rules", "credentials.yaml", "ca", "journal.jsonl", "state", "control.sock")
    lines = [f"{key}: {place}" for key, place in zip(keys, places, strict=True)]
    made.config.write_text("\n".join(["schema: 1", *lines, ""]))
    for name in ("journal.jsonl", "control.sock", "control-attach.sock"):
        (conf / name).touch(0o600)
    (conf / "credentials.yaml").write_text(CREDENTIALS)
    (conf / "credentials.yaml").chmod(0o600)
    (conf / "state/pairs").write_text("state")
    (made.home / ".ssh/id_ed25519").write_text("a key")
    shown = [sys.executable, "-P", "-m", "egressd", "ca", "show", "--config", str(made.config)]
    subprocess.run(shown, env=made.env(), cwd=top, capture_output=True, check=False)
    for path in (top, *top.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)
    conf.chmod(0o700)
    (conf / "ca").chmod(0o700)
    return made


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every uid may pass through: pytest's own are for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="egressd-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(
    params=[
        pytest.param(0, id="as root", marks=pytest.mark.root),
        pytest.param(ORDINARY, id="as an ordinary user"),
    ]
)
def installation(request: pytest.FixtureRequest, shared: Path) -> Installation:
    """An installation of each kind of user."""
    return install(shared / "top", request.param if os.geteuid() == 0 else os.geteuid())


@pytest.fixture
def roots(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """Root's, with this very process in its workspace."""
    made = install(shared / "top", 0)
    for name in list(os.environ):
        if name not in {"PATH", "LANG"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.chdir(made.workspace)
    return made


def verdicts(document: dict[str, Any], verdict: str) -> dict[str, str]:
    return {row["name"]: row["detail"] for row in document["probes"] if row["verdict"] == verdict}


def test_everything_holds_in_well_under_a_minute_and_nothing_stays_behind(
    installation: Installation, shared: Path
) -> None:
    before = sorted(path.relative_to(installation.workspace) for path in installation.workspace.rglob("*"))
    places = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run")]
    document = installation.document("--junit", str(shared / "top/tmp/junit.xml"))
    assert document["summary"].startswith(f"verify: {len(NAMES)} held, 0 open, 0 not tried"), (
        verdicts(document, "open"),
        verdicts(document, "not tried"),
    )
    assert [row["name"] for row in document["probes"]] == NAMES
    assert document["left"] == {"packets": [], "questions": [], "requests": [], "lost": 0}
    assert document["notes"] == []
    assert document["seconds"] < 55
    suite = ElementTree.parse(shared / "top/tmp/junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (str(len(NAMES)), "0", "0")
    assert [case.get("name") for case in suite] == NAMES
    assert [path.name for path in (shared / "top/tmp").iterdir()] == ["junit.xml"]
    assert not [path for place in places for path in place.glob(f"verify-{'[0-9a-f]' * 16}*")]
    after = {path.relative_to(installation.workspace) for path in installation.workspace.rglob("*")}
    assert {str(path) for path in after - set(before)} <= {"conf/ca-trust"} | {
        str(path) for path in after if str(path).startswith(("conf/ca", "conf/ca-trust"))
    }


@pytest.mark.root
def test_what_the_operator_lets_in_shows_as_open(roots: Installation, shared: Path) -> None:
    docker = shared / "top/docker.sock"
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(docker))
        engine.listen()
        docker.chmod(0o666)
        ran = roots.run("--socket", str(docker), "--env", "ANTHROPIC_API_KEY=sk-ant-very-secret")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    opened = [line.split() for line in ran.stdout.splitlines() if line.startswith("open ")]
    assert {words[1] for words in opened} == {"host-sockets", "environment-secrets"}
    assert f"{docker} answers" in ran.stdout
    assert "ANTHROPIC_API_KEY (by its name)" in ran.stdout
    assert "very-secret" not in ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith(f"verify: {len(NAMES) - 2} held, 2 open, 0 not tried")


@pytest.mark.root
def test_rules_that_others_can_write_show_as_open(roots: Installation) -> None:
    (roots.workspace / "conf/rules/profiles").chmod(0o777)
    assert set(roots.broken()) == {"host-files"}


@pytest.mark.root
def test_what_only_observes_shows_as_open(roots: Installation) -> None:
    """Under `mode: observe` a name that no rule allows is let through, and everything that begins with one."""
    config = load_config({}, {"HOME": str(roots.home)}, file=roots.config)
    document = Verification(config, Options("observing"), VerifyTable(silent=True)).run()
    assert {"denied-name", "rule-edges", "records", "nothing-left"} <= verdicts(document, "open").keys()


# Where there is no egressd

STILL_HELD = {
    "allowed-request": "it says that something works, which it does",
    "inherited-descriptors": "none is left open here; tests/verify: test_a_descriptor_that_came_along_shows_as_open",
    "host-files": "it looks at the installation, which is there all the same; test_rules_that_others_can_write_show_as_open",
    "host-identity": "there is no sandbox; tests/cli/test_verify_outside.py",
    "records": "there is no journal; the mutation no-rules",
    "nothing-left": "there is no egressd's place to leave; the mutation leak",
}


def lacking() -> set[str]:
    """The probes of what this very kernel or machine does not have, with egressd or without."""
    found = (
        {"packet-rules"} if shutil.which("iptables", path="/usr/sbin:/sbin:/usr/bin:/bin") is None else set()
    )
    for name, path in (
        ("io-uring", "/proc/sys/kernel/io_uring_disabled"),
        ("terminal-input", "/proc/sys/dev/tty/legacy_tiocsti"),
    ):
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == {"io-uring": "2", "terminal-input": "0"}[name]:
                found.add(name)
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError:
        found.add("vsock")
    return found


@pytest.mark.root
def test_without_egressd_every_probe_but_a_few_is_open(roots: Installation) -> None:
    document = roots.document("--without-egressd")
    closed = set(NAMES) - verdicts(document, "open").keys()
    assert closed - lacking() == STILL_HELD.keys(), verdicts(document, "not tried")
    assert document["status"] == 1


# Where egressd is broken

BROKEN: list[tuple[str, tuple[str, ...], set[str]]] = [
    ("the sandbox is given too much", ("no-masks", "no-filter", "powerful", "shared-namespaces"), {
        # nothing of egressd's is hidden
        "rules", "journal", "configuration", "folders-above", "authority-key", "credentials-file", "control-socket",
        # no system call is refused
        "setuid-bits", "vsock", "socket-families", "io-uring", "kernel-doors", "network-administration",
        # capabilities are left
        "capabilities", "nested-namespaces",
        # the namespaces are the host's
        "other-processes", "own-namespaces", "signals-to-egressd", "tracing-egressd", "first-process", "shared-memory",
    }),
    ("the packet filter is empty, and there is another device", ("no-rules", "another-device"), {
        "udp", "quic", "icmp", "other-protocols", "multicast", "records", "network-devices", "routes",
    }),
    ("egressd itself leaks", ("leak",), {"nothing-left"}),
]  # fmt: skip


@pytest.mark.root
@pytest.mark.parametrize(("mutations", "expected"), [pytest.param(*row[1:], id=row[0]) for row in BROKEN])
def test_what_is_broken_shows_as_open(
    roots: Installation, mutations: Sequence[str], expected: set[str]
) -> None:
    found = roots.broken(*mutations)
    assert expected - lacking() <= found.keys(), found
    if mutations == ("leak",):
        blamed = [
            name
            for name, detail in found.items()
            if detail.startswith("packets left for 11.6.6.6 (udp 4444)")
        ]
        assert len(blamed) > 1, "what left is also said of the probe during which it did"


# What it is told


@pytest.mark.root
def test_a_target_given_by_hand_is_all_that_is_tried(roots: Installation) -> None:
    with Lab.build() as lab:  # it stands for the real network here
        ran = lab.host_exec(
            roots.argv("--json", "--target", "11.6.6.6", "--target", "2600:6:6::6"),
            cwd=str(roots.workspace),
            env=roots.env(),
            timeout=90,
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
        document = json.loads(ran.stdout)
        tried = {row["name"]: row for row in document["probes"]}
        assert document["targets"] == ["11.6.6.6", "2600:6:6::6"]
        for name in (
            "direct-tcp",
            "direct-tcp-v6",
            "udp",
            "quic",
            "icmp",
            "other-resolvers",
            "capabilities",
            "rules",
            "records",
        ):
            assert tried[name]["verdict"] == "held", tried[name]
        for name in (
            "metadata-v4",
            "special-ranges",
            "denied-name",
            "dns-tunnel",
            "rule-edges",
            "allowed-request",
        ):
            assert tried[name]["verdict"] == "not tried", tried[name]
        assert "nothing-left" not in tried, "there is no capture"
        assert [flow for flow in lab.packets("host") if flow.protocol != "icmp6"] == []
        assert lab.dns_queries() == []


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        pytest.param(
            ["--profile", "none"],
            2,
            "there is no profile 'none'\nhint: profiles here: ",
            id="no such profile",
        ),
        pytest.param(
            ["--target", "evil.example"],
            2,
            "'evil.example' does not appear to be an IPv4",
            id="a target by name",
        ),
        pytest.param(["--rules", "/nonexistent"], 2, "/nonexistent", id="no rules"),
        pytest.param(["--ready-timeout", "soon"], 2, "'soon' is no duration", id="no duration"),
        pytest.param(
            ["--bind", "/nonexistent"],
            3,
            "--bind /nonexistent does not exist",
            id="a sandbox that does not start",
        ),
        pytest.param(
            ["--junit", "/nonexistent/x.xml"], 3, "/nonexistent/x.xml", id="a report that cannot be written"
        ),
    ],
)
@pytest.mark.root
def test_what_cannot_be_done_has_a_status_and_a_line(
    roots: Installation, arguments: list[str], status: int, said: str
) -> None:
    ran = roots.run(*arguments)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert ran.stderr.startswith("egressd verify: ")
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.root
def test_a_home_is_no_workspace_and_an_empty_one_is_used(roots: Installation) -> None:
    roots.workspace.joinpath("conf").rename(roots.home / "conf")
    roots.workspace = roots.home
    document = roots.document()
    assert document["status"] == 0, verdicts(document, "open")
    (note,) = document["notes"]
    assert note.startswith(f"{roots.home} is no workspace (")


def test_interrupted_it_leaves_nothing_behind(installation: Installation) -> None:
    with installation.start() as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("held "):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
        session = process.pid
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "egressd verify: interrupted; everything has been taken down\n"
    assert list((installation.home.parent / "tmp").iterdir()) == []
    assert sessions().isdisjoint({session})
