"""Probes of processes: whether any but our own can be seen, read, stopped or robbed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from egressd.verify import kernel
from egressd.verify.power import status
from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried
from egressd.verify.scene import Process, Scene

_PTRACE_SEIZE = 0x4206  # linux/ptrace.h


def open_at_start() -> dict[int, str]:
    """The descriptors that this program began with, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that listed them
            continue
    return found


AT_START = open_at_start()


def visible() -> list[int]:
    """The processes that /proc shows."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def started(pid: int) -> int:
    """A process's start time in clock ticks since boot (proc(5)); 0 where there is none to be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as line:
            return int(line.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _kin() -> set[int]:
    """This process and everything it descends from in here."""
    kin, pid = set(), os.getpid()
    while pid > 0 and pid not in kin:
        kin.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as line:
                pid = int(line.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return kin


@probe(
    "processes",
    why="what can be seen can be watched: command lines hold secrets, and pids are where attacks begin",
    held="/proc shows this program, what it descends from in here, and nothing else",
)
def other_processes(_scene: Scene) -> Outcome:
    """List every process that /proc shows."""
    strangers = [pid for pid in visible() if pid not in _kin()]
    if not strangers:
        return held("no process but our own is visible")
    return opened(f"{len(strangers)} processes of others are visible")


@probe(
    "processes",
    why="a namespace that is shared with the host is no fence",
    held="none of our namespaces is the host's",
)
def own_namespaces(scene: Scene) -> Outcome:
    """Compare our namespaces of every kind with those in which egressd itself lives."""

    def tries() -> Iterator[str | None]:
        for kind, theirs in scene.spaces.items():
            try:
                ours = os.readlink(f"/proc/self/ns/{kind}")
            except OSError:
                continue
            yield f"the {kind} namespace is the host's" if ours == theirs else None

    return judged(tries(), "kinds of namespace, all our own")


def _same(process: Process) -> bool:
    return process.started > 0 and started(process.pid) == process.started


@probe(
    "processes",
    why="a stopped egressd judges nothing, and a killed one ends every sandbox",
    held="no process of egressd's can be named in here, so none can be signalled",
)
def signals_to_egressd(scene: Scene) -> Outcome:
    """Send signal 0, which does nothing, to every process of egressd's."""
    if not scene.processes:
        return untried("no process of egressd's is known")

    def tries() -> Iterator[str | None]:
        for process in scene.processes:
            if not _same(process):
                yield None
                continue
            try:
                os.kill(process.pid, 0)
            except OSError:
                yield None
            else:
                yield f"{process.what} (pid {process.pid}) can be signalled"

    return judged(tries(), "processes, none within reach")


@probe(
    "processes",
    why="whoever may trace egressd reads its keys and speaks with its voice; its descriptors are the way out",
    held="no process of egressd's could be read, traced, or robbed of a descriptor",
)
def tracing_egressd(scene: Scene) -> Outcome:
    """Open egressd's memory, seize it with ptrace, and take one of its descriptors; let go at once."""
    if not scene.processes:
        return untried("no process of egressd's is known")

    def tries() -> Iterator[str | None]:
        for process in scene.processes:
            taken = _taken(process.pid) if _same(process) else None
            yield taken and f"{process.what} (pid {process.pid}): {taken}"

    return judged(tries(), "processes, none within reach")


def _taken(pid: int) -> str | None:
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass
    else:
        return "its memory can be read"
    try:
        handle = kernel.call("pidfd_open", pid, 0)
        if handle >= 0:
            descriptor = kernel.call("pidfd_getfd", handle, 0, 0)
            os.close(handle)
            if descriptor >= 0:
                os.close(descriptor)
                return "a descriptor could be taken"
        # The tracer's end lets go: in a child that ends at once.
        return kernel.in_child(
            lambda: None if kernel.call("ptrace", _PTRACE_SEIZE, pid, 0, 0) < 0 else "it can be traced"
        )
    except (kernel.Unknown, kernel.ChildDied):
        return None


_POWERS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Gid")


@probe(
    "processes",
    why="the first process in here stands nearest to the host; through its root, namespaces and descriptors leads a way out",
    held="it has our root, our namespaces and no more power than we have, and holds no file or socket that we do not",
)
def first_process(_scene: Scene) -> Outcome:
    """Go through /proc/1: root, namespaces, powers, descriptors."""

    def tries() -> Iterator[str | None]:
        try:
            there, here = os.stat("/proc/1/root/"), os.stat("/")
        except OSError:
            yield None
        else:
            same = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
            yield None if same else "its root is another than ours"
        for kind in ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup"):
            try:
                theirs = os.readlink(f"/proc/1/ns/{kind}")
            except OSError:
                yield None
                continue
            yield (
                None
                if theirs == os.readlink(f"/proc/self/ns/{kind}")
                else f"its {kind} namespace is within reach"
            )
        ours, theirs_status = status(), status("1")
        more = [name for name in _POWERS if ours.get(name) != theirs_status.get(name)]
        yield f"it differs from us in {listed(more)}" if more else None
        yield from _first_descriptors()

    return judged(tries(), "ways, none of which leads out")


def _first_descriptors() -> Iterator[str | None]:
    try:
        names = os.listdir("/proc/1/fd")
    except OSError:
        return
    ours = set(AT_START.values())
    for name in names:
        try:
            link = os.readlink(f"/proc/1/fd/{name}")
        except OSError:
            continue
        # An event counter or a timer leads nowhere: who writes into bubblewrap's own ends the command's own sandbox.
        stranger = link not in ours and not link.startswith("anon_inode:")
        yield f"its descriptor {name} is a {_kind(link)}" if stranger else None


@probe(
    "processes",
    why="a descriptor that came along is open already, whatever the namespaces say; a socket on it is a way out",
    held="only the standard streams are open, and none of them is a socket or a directory",
)
def inherited_descriptors(_scene: Scene) -> Outcome:
    """List the descriptors that this program began with."""
    found = [f"descriptor {number} ({_kind(link)})" for number, link in AT_START.items() if number > 2]
    for number in (0, 1, 2):
        link = AT_START.get(number, "")
        if _kind(link) == "socket" or _is_directory(number):
            found.append(f"descriptor {number} is a {_kind(link)}")
    return opened(listed(found)) if found else held("the standard streams and nothing else")


def _kind(link: str) -> str:
    return link.split(":")[0] if ":" in link else "file"


def _is_directory(number: int) -> bool:
    try:
        return stat.S_ISDIR(os.fstat(number).st_mode)
    except OSError:
        return False
