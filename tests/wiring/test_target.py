"""Which container is meant, and what it may not be."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.wiring import occupants, target

BARE = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
pytestmark = pytest.mark.root


def started(*argv: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*argv, "sh", "-c", "echo up; exec sleep 600"],
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def container() -> Iterator[subprocess.Popen[str]]:
    """A process without capabilities in a network namespace of its own."""
    process = started("unshare", "-n", *BARE)
    yield process
    ended(process)


def beside(container: subprocess.Popen[str], *argv: str) -> subprocess.Popen[str]:
    return started("nsenter", f"--net=/proc/{container.pid}/ns/net", *argv)


def test_a_process_and_a_path_lead_to_the_same_place(container: subprocess.Popen[str]) -> None:
    by_pid = target.find(container.pid, None)
    by_path = target.find(None, f"/proc/{container.pid}/ns/net")
    try:
        assert by_pid.place == by_path.place
        assert occupants.census()[by_pid.place] == [container.pid]
        assert target.unfit(by_pid) is None
        assert by_pid.lives()
        assert by_path.lives()
        ended(container)
        assert not by_pid.lives()
        assert not by_path.lives()
    finally:
        by_pid.close()
        by_path.close()
        by_path.close()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        pytest.param(
            [*BARE[:4], "--bounding-set=-all,+net_raw"], "CAP_NET_RAW", id="in its bounding set alone"
        ),
        pytest.param([], "CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_ADMIN", id="root of the host"),
        pytest.param([*BARE, "unshare", "-U"], None, id="root of a user namespace of its own"),
    ],
)
def test_who_else_is_there_must_have_no_power_over_it(
    container: subprocess.Popen[str], argv: list[str], why: str | None
) -> None:
    found = target.find(container.pid, None)
    other = beside(container, *argv)
    try:
        held = target.unfit(found)
        assert held is None if why is None else held is not None and why in held, held
    finally:
        ended(other)
        found.close()


def test_an_ended_process_that_nobody_has_waited_for_is_none(container: subprocess.Popen[str]) -> None:
    container.kill()
    os.waitid(os.P_PID, container.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ValueError, match=r"process [0-9]+: No such"):
        target.find(container.pid, None)


@pytest.mark.parametrize(
    ("pid", "path", "why"),
    [
        pytest.param(None, None, "name a process", id="neither"),
        pytest.param(1, "/proc/1/ns/net", "name a process", id="both"),
        pytest.param(0, None, "Invalid argument", id="no process's number"),
        pytest.param(4_194_304, None, "No such process", id="nobody's number"),
        pytest.param(None, "proc/self/ns/net", "is absolute", id="a path from somewhere"),
        pytest.param(None, "/nonexistent", "No such file", id="no file"),
        pytest.param(None, "/etc/passwd", "no network namespace", id="a file"),
        pytest.param(None, "/dev/null", "no network namespace", id="a device"),
        pytest.param(None, "/proc/self/ns/uts", "no network namespace", id="another namespace"),
        pytest.param(None, "/proc/self/ns/net", "the host's own", id="egressd's own"),
        pytest.param(1, None, "the host's own|Permission denied", id="the host's own"),
    ],
)
def test_it_is_refused(pid: int | None, path: str | None, why: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=why):
        target.find(pid, path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_in_its_place_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "net")
    with pytest.raises(ValueError, match="no network namespace"):
        target.find(None, str(tmp_path / "net"))
