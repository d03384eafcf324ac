"""`egressd wire` as it is called; what it does is held by tests/e2e/test_sidecar.py and test_gateway.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMESPACE = ["unshare", "--net", "--"]


def wire(*words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    argv = [*before, sys.executable, "-m", "egressd", "wire", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sidecar", "--uid", "0"], "a number above 0"),
        (["sidecar", "--uid", "-5"], "a number above 0"),
        (["sidecar", "--uid", "4294967295"], "a number above 0"),
        (["sidecar", "--undo", "--check"], "one of --undo, --check and a command"),
        (["sidecar", "--check", "--", "true"], "one of --undo, --check and a command"),
        (["gateway"], "Missing option"),
        (["gateway", "--interface", "eth+"], "no name of an interface"),
        (["gateway", "--interface", "lo", "--undo", "--check"], "one of --undo, --check"),
    ],
)
def test_bad_input(words: list[str], said: str) -> None:
    done = wire(*words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_exit_statuses_and_words() -> None:
    unwired = wire("sidecar", "--check", before=tuple(NAMESPACE))
    assert unwired.returncode == 1
    assert "IPv6: *nat: table missing" in unwired.stdout
    absent = wire("gateway", "--interface", "nothere", before=tuple(NAMESPACE))
    assert absent.returncode == 3
    assert "hint:" in absent.stderr
    powerless = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-all", *NAMESPACE)
    assert wire("sidecar", before=powerless).returncode == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_command_runs_as_egressd_s_uid_with_nothing_but_its_sockets() -> None:
    script = "id -u; grep -E 'Cap(Prm|Eff|Amb)|NoNewPrivs' /proc/self/status; echo $LISTEN_FDNAMES; iptables-save 2>&1 | head -1"
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, "-m", "egressd", "wire", "sidecar",
         "--uid", "4711", "--", "sh", "-c", script],
        capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "4711", done.stderr
    assert [line.split()[1] for line in lines[1:5]] == ["0" * 16, "0" * 16, "0" * 16, "1"]
    assert lines[5] == "transparent-4:transparent-6:explicit-4:dns-udp-4:dns-tcp-4:dns-udp-6:dns-tcp-6:nflog"
    assert "you must be root" in lines[6] or "Permission denied" in lines[6], lines
