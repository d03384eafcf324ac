"""Who lives in network namespaces, and with what power over them: read from /proc, nothing is changed.

A process has power over a network namespace by capabilities in the user namespace that owns it, or in one above that; what it
holds in a user namespace of its own, below, is power over nothing here (user_namespaces(7)). Capabilities are each thread's.
"""

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from egressd.wiring.errors import WiringError

_PROC: Final = "/proc"
POWERS: Final = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}
"""Numbers of linux/capability.h: rules and devices can be changed, whole frames sent, other networks entered."""
_SETS: Final = ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")
NS_GET_USERNS, NS_GET_PARENT, NS_GET_NSTYPE = 0xB701, 0xB702, 0xB703
"""linux/nsfs.h, ioctl_ns(2)."""

type Place = int
"""The inode of /proc/PID/net/dev: another one in each network namespace, and the same for all who live in one.

ns/net would say it too, but not of processes that have more power than we, which are the ones to be found."""


def place_of(process: str) -> Place:
    """Where a process lives; OSError when it is gone."""
    return os.stat(f"{_PROC}/{process}/net/dev").st_ino


def place_at(net: int) -> Place:
    """Which place an open network namespace is; OSError where it cannot be entered. A thread goes there, and ends there."""
    found: list[Place | OSError] = []

    def look() -> None:
        try:
            os.setns(net, os.CLONE_NEWNET)
            found.append(place_of("thread-self"))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def census() -> dict[Place, list[int]]:
    """Every process that we can see, by where it lives; raises WiringError where we cannot look at one."""
    found: dict[Place, list[int]] = {}
    for entry in os.listdir(_PROC):
        if not entry.isdigit():
            continue
        try:
            place = place_of(entry)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except OSError as error:
            hint = "run egressd as root, and where the containers' processes are: in the host's pid namespace"
            raise WiringError.from_os(f"/proc/{entry}/net/dev", error, hint) from error
        found.setdefault(place, []).append(int(entry))
    return found


def powerful(net: int, members: Iterable[int]) -> dict[int, str]:
    """Which of these processes have power over the namespace that is open as `net`, and what each holds, in words."""
    owner = _owner(net)
    found = {}
    for pid in members:
        for where, fields in _statuses(pid):
            if held := _held(fields):
                if not _is_below(pid, owner):
                    name = fields.get("Name", "?").encode("ascii", "replace").decode()
                    found[pid] = f"process {where} ({name}) holds {', '.join(held)}"
                break
    return found


def devices(pid: int) -> frozenset[str]:
    """The network devices of a process's network namespace (proc_pid_net(5)); OSError when it is gone."""
    with open(f"{_PROC}/{pid}/net/dev", encoding="ascii", errors="replace") as table:
        return frozenset(line.split(":")[0].strip() for line in table if ":" in line)


def routed(pid: int) -> frozenset[str]:
    """The devices that a route of its network namespace leads to; OSError when it is gone."""
    with open(f"{_PROC}/{pid}/net/route", encoding="ascii", errors="replace") as table:
        found = {line.split()[0] for line in list(table)[1:] if line.split()}
    with open(f"{_PROC}/{pid}/net/ipv6_route", encoding="ascii", errors="replace") as table:
        found |= {line.split()[-1] for line in table if line.split()}
    return frozenset(found)


def _held(fields: Mapping[str, str]) -> list[str]:
    held = 0
    for name in _SETS:
        held |= int(fields.get(name, "0"), 16)
    return [name for name, bit in POWERS.items() if held >> bit & 1]


def _statuses(pid: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Every thread's fields of /proc/PID/status; nothing of what has ended."""
    try:
        threads = os.listdir(f"{_PROC}/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"{_PROC}/{pid}/task/{thread}/status", encoding="utf-8", errors="replace") as lines:
                pairs = (line.partition(":") for line in lines)
                yield int(thread), {key: value.strip() for key, _, value in pairs}
        except (FileNotFoundError, ProcessLookupError):
            continue


def _owner(net: int) -> tuple[int, int] | None:
    """The user namespace that owns a network namespace; None for one above our own, which is every sandbox's."""
    try:
        owner = fcntl.ioctl(net, NS_GET_USERNS)
    except PermissionError:
        return None
    try:
        return _identity(owner)
    finally:
        os.close(owner)


def _identity(space: int) -> tuple[int, int]:
    status = os.fstat(space)
    return status.st_dev, status.st_ino


def _is_below(pid: int, owner: tuple[int, int] | None) -> bool:
    """Whether a process's user namespace lies below the owner, so that no capability of it counts there."""
    if owner is None:
        return False
    try:
        space = os.open(f"{_PROC}/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    below = False
    try:
        while _identity(space) != owner:
            try:
                above = fcntl.ioctl(space, NS_GET_PARENT)
            except OSError:  # our own is reached: it lies elsewhere, or above
                return False
            os.close(space)
            space, below = above, True
        return below
    finally:
        os.close(space)
