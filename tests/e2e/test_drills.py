"""What breaks while traffic runs: nothing leaves, a record is written, the next request works."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab.stand import Stand
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e
BOTH_WAYS = True


@contextlib.contextmanager
def running(stand: Stand, script: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A shell in a sandbox that reads its commands from us, a line at a time."""
    process = stand.start(["sh", "-c", script], flags=flags, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def worker_of(control: int) -> int:
    """The pid of the worker: control's child, whose child is the isolated process."""
    for line in Path(f"/proc/{control}/task/{control}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"egressd.gate.worker" in Path(f"/proc/{line}/cmdline").read_bytes():
                return int(line)
    raise LookupError("no worker")


_SAID: weakref.WeakKeyDictionary[subprocess.Popen[str], bytes] = weakref.WeakKeyDictionary()
"""What was read of a process and not yet asked for: lines that come together are read together."""


def line_of(process: subprocess.Popen[str], seconds: float = 20.0) -> str:
    """The next line of its output; nothing else may read from it meanwhile."""
    assert process.stdout is not None
    held, deadline = _SAID.get(process, b""), time.monotonic() + seconds
    while b"\n" not in held:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "no output in time"
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            break
        held += part
    line, _, _SAID[process] = held.partition(b"\n")
    return line.decode().strip()


ASK = "while read url; do curl -sS -m 10 -o /dev/null -w '%{http_code}\\n' \"$url\" 2>/dev/null || echo failed; done"
OK = "https://api.lab-origin.com/n"


def ask(process: subprocess.Popen[str], url: str) -> str:
    assert process.stdin is not None
    process.stdin.write(url + "\n")
    process.stdin.flush()
    return line_of(process)


@pytest.mark.parametrize("inner", [False, True], ids=["the waiting parent", "the isolated child"])
def test_a_killed_worker_is_replaced_and_the_next_request_works(stand: Stand, inner: bool) -> None:
    with running(
        stand, "curl -sS https://api.lab-origin.com/big?bytes=4000000000 >/dev/null 2>&1 & " + ASK
    ) as process:
        assert ask(process, OK) == "200"
        until(lambda: stand.records(event="decision", path="/big"), what="the download to begin")
        worker = worker_of(process.pid)
        victim = worker
        if inner:
            victim = int(Path(f"/proc/{worker}/task/{worker}/children").read_text().split()[0])
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        assert ask(process, OK) == "200"
        assert time.monotonic() - killed < 10, "expected within a second or two"
        assert worker_of(process.pid) != worker
        cut = [r for r in stand.records(event="decision", layer="request") if r["path"] == "/big"]
        ends = [r for r in stand.records(event="end") if r["attempt_id"] == cut[0]["attempt_id"]]
        assert [end["reason"] for end in ends] == ["worker_died"]


def test_names_keep_their_addresses_across_workers(stand: Stand) -> None:
    look_up = "while read name; do getent hosts $name | cut -d' ' -f1; done"
    with running(stand, look_up) as process:
        names = ["api.lab-origin.com", "pypi.org", "a.lab-origin.com"]
        before = [ask(process, name) for name in names]
        os.kill(worker_of(process.pid), signal.SIGKILL)
        assert [ask(process, name) for name in names] == before
        assert len(set(before)) == 3


def test_a_dead_control_is_no_way_out(stand: Stand) -> None:
    marker = stand.workspace / "alive"
    script = (
        f"while :; do curl -sS -m 1 -o /dev/null https://api.lab-origin.com/n; date +%s%N > {marker}; done"
    )
    process = stand.start(["sh", "-c", script])
    try:
        until(lambda: stand.lab.requests(path="/n") and marker.exists(), 20, "the first request")
        worker = worker_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        until(lambda: not Path(f"/proc/{worker}").exists(), 10, "the worker to end with control")
        stand.lab.forget()
        last = marker.read_text()
        time.sleep(0.5)  # the sandbox would have tried several times by now
        assert stand.lab.requests() == []
        assert stand.lab.packets() == []
        assert marker.read_text() == last, "the command outlived control"
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_journal_that_cannot_be_written_denies(stand: Stand) -> None:
    if os.geteuid() != 0 or stand.lab.rootless:
        pytest.skip("needs a full file system: root mounts one")
    small = stand.directory / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(small)]
    script = f'mount --make-rprivate / && {" ".join(mount)} && exec "$@"'
    argv = stand.egressd("run", "--profile", "lab", "--journal", str(small / "j"), "--", "sh", "-c", ASK)
    process = stand.lab.popen_host(
        ["unshare", "-m", "sh", "-c", script, "sh", *argv], cwd=str(stand.workspace), stdin=subprocess.PIPE
    )
    try:
        statuses = [ask(process, f"{OK}?{'x' * 2000}{n}") for n in range(60)]
        assert statuses[0] == "200"
        assert statuses[-1] == "503"
        served = len(stand.lab.requests(host="api.lab-origin.com"))
        assert served == statuses.count("200"), "something left without a record"
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_reload_changes_new_attempts_and_a_bad_file_changes_nothing(stand: Stand) -> None:
    good = stand.profile.read_text()
    with running(stand, ASK) as process:
        assert ask(process, OK) == "200"
        stand.profile.write_text("schema: 1\nprofile: lab\nallow: [nonsense\n")
        until(lambda: stand.records(event="policy"), what="the refusal to be recorded")
        assert stand.records(event="policy")[-1]["detail"].startswith("refused:")
        assert ask(process, OK) == "200"
        stand.profile.write_text(
            good.replace("hosts: [api.lab-origin.com]", "hosts: [other.lab-origin.com]").replace(
                "*.lab-origin", "*.elsewhere"
            )
        )
        until(lambda: stand.records(event="policy", detail="adopted"), what="the new rules")
        assert ask(process, OK) == "403"
        stand.profile.write_text(good)
        until(lambda: len(stand.records(event="policy", detail="adopted")) == 2, what="the old rules again")
        assert ask(process, OK) == "200"


def peak_of(pid: int) -> int:
    """Peak resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024


def test_four_hundred_megabytes_each_way_in_flat_memory(stand: Stand) -> None:
    size = 400_000_000
    script = (
        "read go; "
        f"curl -sS -o /dev/null -w '%{{size_download}}\\n' 'https://api.lab-origin.com/big?bytes={size}'; "
        f"head -c {size} /dev/zero | "
        "curl -sS -o /dev/null -w '%{size_upload}\\n' -T - -X POST https://api.lab-origin.com/upload; "
        "read end"
    )
    with running(stand, script) as process:
        assert process.stdin is not None
        until(lambda: [r for r in stand.records(event="sandbox") if r.get("detail") == "ready"], 20)
        worker = worker_of(process.pid)
        inner = int(Path(f"/proc/{worker}/task/{worker}/children").read_text().split()[0])
        process.stdin.write("go\n")
        process.stdin.flush()
        assert line_of(process, 100) == str(size)
        assert int(line_of(process, 100)) >= size  # curl counts its chunk heads too
        peak = peak_of(inner)
        assert peak < 150, f"peak RSS {peak} MiB"
        upload = stand.lab.requests(path="/upload")[0]
        assert upload.body_bytes == size
