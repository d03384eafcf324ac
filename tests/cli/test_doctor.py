"""`egressd doctor`: each finding by a machine that is made up, then this machine as it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.doctor_host import Entry, Line, ThisHost, subprocess_of
from egressd.cli.doctor_kernel import kernel_lines
from egressd.cli.doctor_places import places_lines
from egressd.cli.doctor_rules import rules_lines
from egressd.cli.given import GIVEN
from egressd.cli.main import app
from egressd.control.config import load_config

FILES = {
    "/proc/sys/kernel/seccomp/actions_avail": "kill_process kill_thread trap errno user_notif trace log allow\n",
    "/proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\n",
    "/proc/sys/net/netfilter/nf_conntrack_max": "262144\n",
    "/proc/sys/net/netfilter/nf_conntrack_count": "12\n",
    "/etc/resolv.conf": "search corp\nnameserver 192.0.2.1\n",
    "/proc/sys/user/max_user_namespaces": "63000\n",
    "/proc/self/attr/current": "unconfined\n",
    "/proc/swaps": "Filename Type Size Used Priority\n",
}
EMPTY = "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"
RUNS = {
    "bwrap --version": (0, "bubblewrap 0.8.0\n"),
    "iptables-restore --version": (0, "iptables-restore v1.8.9 (nf_tables)\n"),
    "ip6tables-restore --version": (0, "ip6tables-restore v1.8.9 (nf_tables)\n"),
    "iptables --version": (0, "iptables v1.8.9 (nf_tables)\n"),
    "iptables-save": (0, EMPTY),
    "ip6tables-save": (0, EMPTY),
}
PROGRAMS = frozenset({"bwrap", "iptables-restore", "ip6tables-restore", "conntrack", "certutil"})


@dataclass(frozen=True)
class Made:
    """A machine of which everything is known."""

    euid: int = 0
    release: str = "6.12.5-amd64"
    machine: str = "x86_64"
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=lambda: dict(FILES))
    runs: Mapping[str, tuple[int, str]] = field(default_factory=lambda: dict(RUNS))
    programs: frozenset[str] = PROGRAMS
    entries: Mapping[str, Entry] = field(default_factory=dict)
    accounts: Mapping[int, str] = field(default_factory=dict)
    most: int = 1 << 20
    locked: int = -1
    room: int | None = 1 << 40
    sandbox: str | None = None
    worker: str | None = None

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def program(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name in self.programs else None

    def run(self, *argv: str) -> tuple[int, str] | None:
        return self.runs.get(" ".join(argv))

    def entry(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def account(self, uid: int) -> str | None:
        return self.accounts.get(uid)

    def descriptors(self) -> int:
        return self.most

    def lockable(self) -> int:
        return self.locked

    def free(self, path: str) -> int | None:
        assert path.startswith("/")
        return self.room

    def try_sandbox(self) -> str | None:
        return self.sandbox

    def try_worker(self) -> str | None:
        return self.worker

    def but(self, **changes: object) -> Made:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type] # each has its field's type

    def reading(self, **files: str) -> Made:
        found = {
            **self.files,
            **{f"/proc/sys/{name.replace('__', '/')}": text for name, text in files.items()},
        }
        return self.but(files=found)


GOOD = Made()
ROOTLESS = GOOD.but(euid=1000)


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "rules"):  # neither what another test was given, nor ours for the next one
        monkeypatch.setattr(GIVEN, name, None)


def verdicts(lines: list[Line]) -> dict[str, str]:
    return {line.name: line.verdict for line in lines}


def found(lines: list[Line], name: str) -> Line:
    [line] = [line for line in lines if line.name == name]
    return line


@pytest.mark.parametrize("host", [GOOD, ROOTLESS], ids=["root", "rootless"])
def test_a_good_machine_is_good(host: Made) -> None:
    lines = [*kernel_lines(host), *rules_lines(host)]
    assert set(verdicts(lines).values()) == {"ok"}


def without(runs: str, **changes: tuple[int, str]) -> dict[str, tuple[int, str]]:
    return {name: ran for name, ran in RUNS.items() if name != runs} | changes


KERNEL: list[tuple[str, Made, str, str, str]] = [
    ("an old kernel", GOOD.but(release="4.19.0-27"), "kernel", "fail", "5.12"),
    ("a kernel without mapped mounts", GOOD.but(release="5.10.0"), "kernel", "warn", "5.12"),
    ("a release that is no version", GOOD.but(release="rubbish"), "kernel", "fail", "5.4"),
    ("another processor", GOOD.but(machine="riscv64"), "processor", "fail", "aarch64"),
    ("no seccomp", GOOD.but(files={}), "seccomp", "fail", "CONFIG_SECCOMP_FILTER"),
    (
        "half of seccomp",
        GOOD.reading(kernel__seccomp__actions_avail="errno allow"),
        "seccomp",
        "fail",
        "CONFIG",
    ),
    ("no bubblewrap", GOOD.but(programs=PROGRAMS - {"bwrap"}), "bwrap", "fail", "apt-get install bubblewrap"),
    (
        "an old bubblewrap",
        GOOD.but(runs=RUNS | {"bwrap --version": (0, "bubblewrap 0.4.1\n")}),
        "bwrap",
        "fail",
        "too old",
    ),
    ("a broken bubblewrap", GOOD.but(runs=RUNS | {"bwrap --version": (1, "")}), "bwrap", "fail", "--version"),
    (
        "no iptables",
        GOOD.but(programs=frozenset({"bwrap"})),
        "iptables-restore",
        "fail",
        "apt-get install iptables",
    ),
    (
        "a version that nobody can read",
        GOOD.but(runs=RUNS | {"iptables-restore --version": (0, "")}),
        "iptables-restore",
        "ok",
        "",
    ),
    (
        "no conntrack",
        GOOD.but(programs=PROGRAMS - {"conntrack"}),
        "conntrack",
        "warn",
        "apt-get install conntrack",
    ),
    (
        "root of a container",
        GOOD.but(files=FILES | {"/proc/self/status": "CapEff:\t00000000a80425fb\n"}),
        "privileges",
        "fail",
        "rootless",
    ),
    (
        "root of nobody knows what",
        GOOD.but(files=FILES | {"/proc/self/status": ""}),
        "privileges",
        "fail",
        "--cap-add",
    ),
    (
        "somebody has the workers' uid",
        GOOD.but(accounts={1337: "istio-proxy"}),
        "worker uid",
        "warn",
        "another uid",
    ),
    (
        "no user namespaces",
        ROOTLESS.reading(user__max_user_namespaces="0\n"),
        "user namespaces",
        "fail",
        "sysctl",
    ),
    (
        "no user namespaces for users",
        ROOTLESS.reading(kernel__unprivileged_userns_clone="0\n"),
        "user namespaces",
        "fail",
        "unprivileged_userns_clone=1",
    ),
    (
        "user namespaces by AppArmor",
        ROOTLESS.reading(kernel__apparmor_restrict_unprivileged_userns="1\n"),
        "user namespaces",
        "warn",
        "AppArmor profile",
    ),
    (
        "few user namespaces",
        ROOTLESS.reading(user__max_user_namespaces="64\n"),
        "user namespaces",
        "warn",
        "one a",
    ),
    (
        "docker's profile",
        GOOD.but(files=FILES | {"/proc/self/attr/current": "docker-default (enforce)\n"}),
        "confinement",
        "warn",
        "--security-opt",
    ),
    (
        "a container",
        GOOD.but(entries={"/.dockerenv": Entry(0, 0o755, False, True)}),
        "container",
        "warn",
        "unshare",
    ),
    ("selinux", GOOD.but(files=FILES | {"/sys/fs/selinux/enforce": "1"}), "selinux", "warn", "ausearch"),
    ("no descriptors", GOOD.but(most=1024), "descriptors", "fail", "LimitNOFILE"),
    ("few descriptors", GOOD.but(most=20_000), "descriptors", "warn", "LimitNOFILE"),
    (
        "a small table",
        GOOD.reading(net__netfilter__nf_conntrack_max="8192"),
        "connection table",
        "warn",
        "=262144",
    ),
    (
        "a full table",
        GOOD.reading(net__netfilter__nf_conntrack_count="250000"),
        "connection table",
        "fail",
        "nf_conntrack_max",
    ),
    (
        "swap",
        ROOTLESS.but(files=FILES | {"/proc/swaps": "Filename\n/dev/sda2 partition 1 0 -2\n"}, locked=65_536),
        "swap",
        "warn",
        "LimitMEMLOCK",
    ),
    (
        "no resolver",
        GOOD.but(files=FILES | {"/etc/resolv.conf": "# none\n"}),
        "resolver",
        "warn",
        "dns.upstream",
    ),
    ("a proxy", GOOD.but(environ={"https_proxy": "http://p:3128"}), "proxy", "warn", "upstream.proxy"),
    (
        "a sandbox that cannot be made",
        GOOD.but(sandbox="unshare: Operation not permitted\nhint: see sysctl user.max_user_namespaces"),
        "trial: sandbox",
        "fail",
        "see sysctl",
    ),
    (
        "a worker that cannot be",
        GOOD.but(worker="mount tmpfs: Permission denied"),
        "trial: worker",
        "fail",
        "above",
    ),
]


@pytest.mark.parametrize(
    ("host", "name", "verdict", "hint"), [case[1:] for case in KERNEL], ids=[c[0] for c in KERNEL]
)
def test_what_of_the_machine_will_not_do_is_said_with_what_to_do(
    host: Made, name: str, verdict: str, hint: str
) -> None:
    lines = list(kernel_lines(host))
    for line in lines:
        assert line.hint or line.verdict == "ok", line
    line = [line for line in lines if line.name.startswith(name)][-1]
    assert line.verdict == verdict
    assert hint in line.hint


def saved(*chains: str, output: str = "ACCEPT") -> dict[str, tuple[int, str]]:
    declared = "".join(f":{chain} - [0:0]\n" for chain in chains)
    text = f"*nat\n:OUTPUT ACCEPT [0:0]\n{declared}COMMIT\n*filter\n:OUTPUT {output} [0:0]\nCOMMIT\n"
    return RUNS | {"iptables-save": (0, text)}


RULES: list[tuple[str, Made, str, str]] = [
    ("docker", GOOD.but(runs=saved("DOCKER", "DOCKER-USER")), "rules: docker", "internal network"),
    ("a cluster", GOOD.but(runs=saved("KUBE-SERVICES")), "rules: kubernetes", "sidecar"),
    ("cilium", GOOD.but(runs=saved("CILIUM_OUTPUT")), "rules: kubernetes", "NetworkPolicy"),
    ("istio", GOOD.but(runs=saved("ISTIO_OUTPUT", "ISTIO_REDIRECT")), "rules: mesh", "1337"),
    ("linkerd", GOOD.but(runs=saved("PROXY_INIT_OUTPUT")), "rules: mesh", "1337"),
    ("ufw", GOOD.but(runs=saved("ufw-user-output")), "rules: ufw", "ufw allow"),
    (
        "ufw for IPv6",
        GOOD.but(runs=RUNS | {"ip6tables-save": (0, ":ufw6-user-output - [0:0]\n")}),
        "rules: ufw",
        "ufw",
    ),
    (
        "firewalld",
        GOOD.but(
            programs=PROGRAMS | {"nft"},
            runs=RUNS | {"nft list ruleset": (0, "table inet firewalld {\n\tchain filter_INPUT {\n\t}\n}\n")},
        ),
        "rules: firewalld",
        "zone",
    ),
    ("a closed host", GOOD.but(runs=saved(output="DROP")), "rules: output", "1337"),
    ("rules that cannot be read", GOOD.but(runs={}), "packet rules", "ip_tables"),
    (
        "two kinds of tables",
        GOOD.but(files=FILES | {"/proc/net/ip_tables_names": "nat\nfilter\n"}),
        "rules: two kinds",
        "iptables-legacy-save",
    ),
    ("a host that forwards", GOOD.reading(net__ipv4__ip_forward="1\n"), "forwarding", "egressd wire gateway"),
]


@pytest.mark.parametrize(
    ("host", "name", "hint"), [case[1:] for case in RULES], ids=[case[0] for case in RULES]
)
def test_whose_rules_are_in_the_way_is_said(host: Made, name: str, hint: str) -> None:
    line = found(list(rules_lines(host)), name)
    assert line.verdict == "warn"
    assert hint in line.hint


PLACES = {
    "/": Entry(0, 0o755, True, True),
    "/e": Entry(0, 0o755, True, True),
    "/e/rules": Entry(0, 0o755, True, True),
    "/e/egressd.yaml": Entry(0, 0o644, False, True),
}
TREE = """schema: 1
rules: rules
ca_dir: ca
journal: log/journal.jsonl
state_dir: state
control_socket: run/control.sock
credentials: credentials.yaml
"""
PLACED: list[tuple[str, dict[str, Entry | None], dict[str, object], str, str, str]] = [
    ("no rules", {"/e/rules": None}, {}, "rules", "fail", "--rules"),
    ("rules for anybody", {"/e/rules": Entry(0, 0o777, True, True)}, {}, "rules", "fail", "chmod o-w"),
    ("a file in the way", {"/e/ca": Entry(0, 0o644, False, True)}, {}, "authority", "fail", "out of the way"),
    ("another's folder", {"/e/ca": Entry(1000, 0o700, True, True)}, {}, "authority", "fail", "owner"),
    ("an open folder", {"/e/ca": Entry(0, 0o755, True, True)}, {}, "authority", "warn", "chmod 700"),
    ("a folder for anybody", {"/e/state": Entry(0, 0o777, True, True)}, {}, "state", "fail", "chmod"),
    ("a sticky one", {"/e/log": Entry(0, 0o1777, True, True)}, {}, "journal", "ok", ""),
    ("a folder to read only", {"/e/log": Entry(0, 0o755, True, False)}, {}, "journal", "fail", "owner"),
    ("nothing, and no way to make it", {"/e": Entry(0, 0o755, True, False)}, {}, "state", "fail", "mkdir -p"),
    ("a full disk", {}, {"room": 1000}, "journal's disk", "fail", "denies everything"),
    ("little room", {}, {"room": 50 << 20}, "journal's disk", "warn", "make room"),
    (
        "an open key",
        {"/e/ca/ca.key": Entry(0, 0o640, False, True)},
        {},
        "authority's key",
        "fail",
        "ca rotate",
    ),
    (
        "a key of another's",
        {"/e/ca/ca.key": Entry(7, 0o600, False, True)},
        {},
        "authority's key",
        "fail",
        "chown",
    ),
    (
        "credentials for anybody to write",
        {"/e/credentials.yaml": Entry(0, 0o666, False, True)},
        {},
        "credentials",
        "fail",
        "chmod go-w",
    ),
    ("credentials", {"/e/credentials.yaml": Entry(0, 0o644, False, True)}, {}, "credentials", "ok", ""),
]


def configured(host: Made, path: Path) -> list[Line]:
    """The findings of a configuration whose folder stands for /e."""
    (path / "egressd.yaml").write_text(TREE)
    config = load_config({}, {}, file=path / "egressd.yaml")
    moved = {
        str(path) + place.removeprefix("/e"): entry for place, entry in host.entries.items() if place != "/"
    }
    return list(places_lines(host.but(entries={"/": PLACES["/"]} | moved), config))


@pytest.mark.parametrize(
    ("changes", "machine", "name", "verdict", "hint"),
    [case[1:] for case in PLACED],
    ids=[c[0] for c in PLACED],
)
def test_places_that_will_not_do_are_said(
    tmp_path: Path,
    changes: dict[str, Entry | None],
    machine: dict[str, object],
    name: str,
    verdict: str,
    hint: str,
) -> None:
    entries = {place: entry for place, entry in (PLACES | changes).items() if entry is not None}
    line = found(configured(GOOD.but(entries=entries, **machine), tmp_path), name)
    assert line.verdict == verdict
    assert hint in line.hint


def test_places_that_are_not_there_yet_are_made(tmp_path: Path) -> None:
    lines = configured(GOOD.but(entries=PLACES), tmp_path)
    assert set(verdicts(lines).values()) == {"ok"}
    assert "made when it is needed" in found(lines, "state").found


# the verb


@pytest.mark.root
def test_this_machine_is_looked_at_for_real(tmp_path: Path) -> None:
    host = ThisHost()
    lines = list(kernel_lines(host))
    assert found(lines, "trial: worker").verdict == "ok", found(lines, "trial: worker")
    assert found(lines, "trial: sandbox").verdict == "ok", found(lines, "trial: sandbox")
    assert host.read("/nonexistent") is None
    assert host.run("/nonexistent") is None
    assert host.entry("/nonexistent") is None
    assert host.entry(str(tmp_path)) == Entry(os.geteuid(), tmp_path.stat().st_mode & 0o7777, True, True)
    assert (host.free(str(tmp_path / "not/there")) or 0) > 0
    assert host.account(0) == "root"
    assert host.account(4_000_000_000) is None


@pytest.mark.parametrize("as_json", [False, True])
def test_the_verb_prints_and_says_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    file = tmp_path / "egressd.yaml"
    file.write_text(TREE)
    made = GOOD.but(entries={"/": PLACES["/"], str(tmp_path): PLACES["/e"]})
    monkeypatch.setattr("egressd.cli.doctor.ThisHost", lambda: made)
    flags = ["--json"] if as_json else []
    result = CliRunner().invoke(app, ["--config", str(file), "doctor", *flags])
    assert result.exit_code == 1
    (tmp_path / "rules").mkdir()
    made = made.but(entries=dict(made.entries) | {str(tmp_path / "rules"): PLACES["/e/rules"]})
    good = CliRunner().invoke(app, ["--config", str(file), "doctor", *flags])
    assert good.exit_code == 0, good.stdout
    if as_json:
        told = json.loads(result.stdout)
        assert told["ok"] is False
        assert {"name": "kernel", "verdict": "ok", "found": "Linux 6.12.5-amd64", "hint": None} in told[
            "lines"
        ]
        assert json.loads(good.stdout)["ok"] is True
    else:
        assert "FAIL  rules" in result.stdout
        assert "hint: name a folder" in result.stdout
        assert "0 fail" in good.stderr


def test_a_configuration_that_cannot_be_read_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egressd.cli.doctor.ThisHost", lambda: GOOD)
    file = tmp_path / "egressd.yaml"
    file.write_text("schema: 1\nrulez: x\n")
    result = CliRunner().invoke(app, ["--config", str(file), "doctor"])
    assert result.exit_code == 1
    assert "FAIL  configuration" in result.stdout


def test_what_a_trial_said_is_its_last_word() -> None:
    from egressd.cli import doctor_host

    assert (
        doctor_host._said(subprocess_of("sys.exit('unshare: no\\nhint: try harder')"))
        == "unshare: no\nhint: try harder"
    )
    assert doctor_host._said(subprocess_of("sys.exit(3)")) == "exit status 3"
    assert doctor_host._said(["/nonexistent"]) is not None
    assert doctor_host._said(subprocess_of("pass")) is None
