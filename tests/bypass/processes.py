"""The processes of one `egressd run`, seen from outside: which is which, what they hold, and how to take it from them."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def children(pid: int) -> list[int]:
    """The pids of a process's children; none when it is gone."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    """The pids of everything a process started that still belongs to it."""
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children(queue.pop()):
            found.append(child)
            queue.append(child)
    return found


def workers_of(control: int) -> list[int]:
    """The workers that control has started and that still live."""
    found = []
    for child in children(control):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"egressd.gate.worker" in line or b"--worker" in line:  # the latter by broken.py
                found.append(child)
    return found


def worker_of(control: int) -> int:
    """The process that carries the sandbox's bytes: the isolated one, wherever it stands below control."""
    workers = workers_of(control)
    if not workers:
        raise LookupError("no worker")
    return (children(workers[0]) or workers)[0]


def inside_of(control: int) -> int:
    """A process that lives in the sandbox's network namespace (needs the power to look at it)."""
    outside = os.stat(f"/proc/{control}/ns/net").st_ino
    for pid in descendants(control):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino != outside:
                return pid
    raise LookupError("no process inside")


def open_files(pid: int) -> int:
    """How many descriptors a process holds (needs the power to look at it)."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int, field: str = "VmRSS") -> int:
    """A field of a process's status in bytes: VmRSS, VmHWM (its peak), VmSize."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:")) * 1024


@contextlib.contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """Take a resource (`resource.RLIMIT_…`) from a process for a while: the soft limit alone, so that it can be given back."""
    before = _limit(pid, what, None)
    _limit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it did not live to have it back
            _limit(pid, what, before)


def _limit(pid: int, what: int, limits: tuple[int, int] | None) -> tuple[int, int]:
    """Set or read a limit as the process's own user: root without CAP_SYS_RESOURCE may not do it as root."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    uid, gid = (
        next(int(line.split()[1]) for line in status if line.startswith(name)) for name in ("Uid:", "Gid:")
    )
    if uid == os.geteuid():
        return resource.prlimit(pid, what, limits) if limits else resource.prlimit(pid, what)
    code = f"import resource; print(*resource.prlimit({pid}, {what}, *{[limits] if limits else []}))"
    become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "/usr/bin/python3", "-c", code]
    ran = subprocess.run(become, capture_output=True, text=True, check=False)
    if "ProcessLookupError" in ran.stderr:
        raise ProcessLookupError(pid)
    assert ran.returncode == 0, ran
    soft, hard = map(int, ran.stdout.split())
    return soft, hard


def settled(pids: list[int], seconds: float = 10.0) -> bool:
    """Wait for processes to be gone; whether they are."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
