"""Building, entering and ending a lab, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from egressd.lab import Lab, LabError, clean_env
from egressd.lab.namespaces import CannotBuild, command, inhabitants
from tests.lab.conftest import build, ways

PLACES = ("world", "host", "open")


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("rootless", ways)
def test_a_lab_builds_in_two_seconds_and_leaves_nothing(rootless: bool) -> None:
    begin = time.monotonic()
    lab = build(rootless)
    took = time.monotonic() - begin
    inodes = {lab.netns_inode("host"), lab.netns_inode("open"), lab.netns_inode("world")}
    sleeper = lab.popen_open(["sleep", "600"])
    # Left to itself by its parent: only the sweep of the lab's namespaces can find it.
    lab.host_exec(["sh", "-c", "sleep 600 </dev/null >/dev/null 2>&1 &"])
    assert until(lambda: len(inhabitants(inodes)) == 3)  # the two sleepers and the world itself
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    lab.close()
    assert took < 2
    assert len(inodes) == 3
    assert os.stat("/proc/self/ns/net").st_ino not in inodes
    assert "to-host" not in links
    assert "to-open" not in links
    assert sleeper.returncode == -signal.SIGKILL
    assert inhabitants(inodes) == []
    assert not Path(lab.directory).exists()
    assert lab.directory not in Path("/proc/self/mountinfo").read_text()
    named = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    assert inodes.isdisjoint(os.stat(f"/run/netns/{name}").st_ino for name in named)
    lab.close()  # a second time is no error


OWNER = """
import json, sys
from egressd.lab import Lab
lab = Lab.build(rootless=sys.argv[1] == "True")
sleeper = lab.popen_open(["sleep", "600"])
places = [lab.netns_inode(place) for place in ("world", "host", "open")]
print(json.dumps([lab.directory, sleeper.pid, places]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("rootless", ways)
def test_a_killed_owner_takes_the_whole_lab_with_it(rootless: bool) -> None:
    build(rootless).close()  # skips where it cannot be
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(rootless)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        directory, sleeper, inodes = json.loads(owner.stdout.readline())
        assert until(lambda: sleeper in inhabitants(set(inodes)))
        owner.kill()
        owner.wait()
        assert until(lambda: inhabitants(set(inodes)) == [])
        assert until(lambda: not Path(directory).exists())


def test_the_environment_is_inherited_by_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://11.0.0.9:1")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/")
    seen = dict(line.split("=", 1) for line in lab.open_exec(["env"]).stdout.splitlines())
    seen.pop("_", None)
    assert seen == clean_env(lab)
    assert not {name for name in seen if name.lower().endswith("_proxy")}


@pytest.mark.parametrize("place", ["host", "open"])
def test_names_are_asked_of_the_labs_own_server(lab: Lab, place: str) -> None:
    command = ["cat", "/etc/resolv.conf"]
    text = (lab.host_exec if place == "host" else lab.open_exec)(command).stdout
    assert text.splitlines()[0] == f"nameserver {lab.dns}"
    assert lab.dns not in Path("/etc/resolv.conf").read_text()


def test_a_command_inherits_no_descriptor_of_the_lab(lab: Lab) -> None:
    listed = lab.host_exec(["sh", "-c", "ls /proc/$$/fd"]).stdout.split()
    assert listed == ["0", "1", "2"]


def test_a_popens_pid_is_the_commands_own(lab: Lab) -> None:
    process = lab.popen_host(["sh", "-c", "echo $$; read line"], stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    assert os.stat(f"/proc/{process.pid}/ns/net").st_ino == lab.netns_inode("host")


def test_an_unprivileged_command_has_uid_1000_no_capability_and_may_still_nest(lab: Lab) -> None:
    script = "id -u; grep CapEff /proc/self/status; ip link add x type dummy || echo refused"
    lines = lab.host_exec(["sh", "-c", script], privileged=False).stdout.splitlines()
    assert lines == ["1000", "CapEff:\t0000000000000000", "refused"]
    nested = ["unshare", "--user", "--map-root-user", "--net", "ip", "-br", "link"]
    assert lab.host_exec(nested, privileged=False).stdout.split()[0] == "lo"


def test_a_command_that_takes_too_long_is_killed(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.open_exec(["sleep", "600"], timeout=0.1)
    assert lab.open_exec(["true"]).returncode == 0


def test_what_the_world_does_not_understand_is_an_error_that_says_so(lab: Lab) -> None:
    with pytest.raises(LabError, match="no such behaviour: maybe"):
        lab.set_name("x.lab-origin.com", behaviour="maybe")
    with pytest.raises(LabError, match="no such kind of certificate"):
        lab.set_certificate("x.lab-origin.com", "maybe")
    with pytest.raises(LabError, match="unexpected keyword argument 'b'"):
        lab.set_name("x.lab-origin.com", b=["11.0.0.20"])
    with pytest.raises(LabError, match="KeyError"):
        lab.ask("nothing")


def test_a_world_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "egressd"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SystemExit('broken on purpose')\n")
    monkeypatch.setattr("egressd.lab.lab._PACKAGES", str(tmp_path))
    with pytest.raises(LabError, match="the lab's world is gone: broken on purpose"):
        Lab.build()


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(CannotBuild, match=r"(?s)ip -batch -: exit 1: .*Command failed -:1"):
        command(["ip", "-batch", "-"], "nonsense\n")
    with pytest.raises(CannotBuild, match=r"no-such-program: .*No such file"):
        command(["no-such-program"], "")


def test_a_world_that_was_killed_is_reported_and_closing_still_works() -> None:
    lab = build(rootless=True)
    lab._world.kill()
    with pytest.raises(LabError, match="the lab's world"):
        lab.requests()
    lab.close()
    assert not Path(lab.directory).exists()


@pytest.mark.parametrize(("place", "known"), [("open", 1), ("host", 1), ("world", 2)])
def test_neighbours_are_told_and_never_forgotten(lab: Lab, place: str, known: int) -> None:
    """Learned ones were lost after some seconds, and IPv6 with them: the wires have no link-local address to ask from."""
    shown = lab.run(place, ["ip", "-6", "neigh", "show", "nud", "permanent"])  # type: ignore[arg-type]  # a Place
    assert len(shown.stdout.splitlines()) == known, shown.stdout + shown.stderr
