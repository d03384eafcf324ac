"""A running container, found by a process or by the path of its network namespace, and held so that no other can take its place.

A pid is somebody else's once its process has ended; so the process is pinned first (pidfd_open(2)), its network namespace opened
after, and it must live then still. From there on nothing is looked up by number again: the descriptors are the container.
"""

import errno
import os
import select
import stat
from dataclasses import dataclass
from fcntl import ioctl
from typing import Final

from egressd.wiring import occupants
from egressd.wiring.occupants import Place

_CLONE_NEWNET: Final = 0x40000000
_HINT: Final = "docs/wirings.md, namespace: a running container"


@dataclass(slots=True)
class Target:
    """`net` is the network namespace and `process` the pinned process, None where only a path is known; both are descriptors.

    `place` is which network namespace that is, as in `occupants`.
    """

    net: int
    process: int | None
    pid: int | None
    path: str | None
    place: Place = 0

    def lives(self) -> bool:
        """Whether the process has not ended, or the path still leads to the namespace."""
        if self.process is not None:
            return _lives(self.process)
        try:
            status = os.stat(self.path or "")
        except OSError:
            return False
        own = os.fstat(self.net)
        return (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)

    def close(self) -> None:
        """Let go of it; may be called again."""
        for descriptor in (self.net, self.process):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.net, self.process = -1, None

    def __str__(self) -> str:
        return f"process {self.pid}" if self.path is None else self.path


def find(pid: int | None, path: str | None) -> Target:
    """Pin what a caller names: one of the two. ValueError for what cannot be a container's network namespace."""
    if (pid is None) == (path is None):
        raise ValueError("name a process of the container (pid) or the path of its network namespace (netns)")
    target = _by_process(pid) if pid is not None else _by_path(path or "")
    try:
        target.place = occupants.place_at(target.net)
        if target.place in _ours():
            raise ValueError(f"{target} is in the host's own network namespace, or in egressd's")
    except OSError as error:
        target.close()
        raise ValueError(f"the network of {target} cannot be entered: {error.strerror}") from None
    except BaseException:
        target.close()
        raise
    return target


def started(pid: int) -> str:
    """When a process began, in clock ticks since boot (proc_pid_stat(5)): with its pid, its identity. Empty: there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as line:
            return line.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def unfit(target: Target) -> str | None:
    """Say why a container cannot be a sandbox: a process in its network that has power over it. None where nothing is in the way.

    Raises WiringError where that cannot be seen.
    """
    members = occupants.census().get(target.place, [])
    for held in occupants.powerful(target.net, members).values():
        return f"{held}; start the container without (cap-drop ALL)"
    return None


def _by_process(pid: int) -> Target:
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise ValueError(f"process {pid}: {error.strerror}") from None
    try:
        net = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        os.close(process)
        raise ValueError(f"process {pid}: {error.strerror}") from None
    target = Target(net, process, pid, None)
    if not target.lives():  # what was opened may be its successor's
        target.close()
        raise ValueError(f"process {pid}: {os.strerror(errno.ESRCH)}")
    return target


def _by_path(path: str) -> Target:
    if not os.path.isabs(path):
        raise ValueError(f"{path}: the path of a network namespace is absolute")
    try:
        # O_NONBLOCK: whatever somebody has put there instead must not hold us up.
        net = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(net).st_mode) or ioctl(net, occupants.NS_GET_NSTYPE) != _CLONE_NEWNET:
            raise ValueError(f"{path} is no network namespace")
    except OSError:  # not even a namespace
        os.close(net)
        raise ValueError(f"{path} is no network namespace") from None
    except ValueError:
        os.close(net)
        raise
    return Target(net, None, None, path)


def _lives(process: int) -> bool:
    waiting = select.poll()
    waiting.register(process, select.POLLIN)  # readable once it has ended (pidfd_open(2))
    return not waiting.poll(0)


def _ours() -> set[Place]:
    return {occupants.place_of("self"), occupants.place_of("1")}
