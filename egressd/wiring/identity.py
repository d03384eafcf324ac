"""Which uids a sandbox has, inside and outside, and how a user namespace gets its map."""

import os
import pwd
from collections.abc import Iterable
from typing import Final

from egressd.wiring.errors import WiringError

Map = Iterable[tuple[int, int, int]]
"""Lines of uid_map: first id inside, first id outside, how many (user_namespaces(7))."""

SANDBOX_UID: Final = 59137
"""The host uid (and gid) of sandboxes that root starts: high among the ids that login managers never hand out to people
(systemd's UIDs-GIDs page, Debian policy 9.2.2), below 65536 so that it exists inside nested containers too."""

SOCKET_UID: Final = 59138
"""The uid under which root makes the listening sockets: the kernel lets a port be shared within one uid only."""

WORKER_UID: Final = 1337
INSIDE_UID: Final = 1000


def sandbox_uid(wanted: int | None) -> int | None:
    """The uid that a sandbox changes to, or None where it keeps the caller's: never 0 of the host.

    `wanted` is the operator's choice, for root only. Raises WiringError.
    """
    own = os.geteuid()
    if own != 0:
        if wanted not in (None, own):
            raise WiringError("run", f"only root can choose a sandbox's uid ({wanted})", "leave --uid out")
        return None
    uid = SANDBOX_UID if wanted is None else wanted
    if uid in (0, WORKER_UID, SOCKET_UID):
        raise WiringError(
            "run", f"uid {uid} is not for sandboxes", "choose an unprivileged uid that egressd does not use"
        )
    tables = ("/proc/self/uid_map", "/proc/self/gid_map")
    if all(is_mapped(number, table) for table in tables for number in (uid, SOCKET_UID)):
        if wanted is None and _has_account(uid):
            raise WiringError(
                "run", f"uid {uid}, the default of sandboxes, has an account here", "choose with --uid"
            )
        return uid
    if wanted is None and not _is_root_outside():
        return None  # root of a user namespace with one uid: an ordinary user outside, so as rootless
    raise WiringError(
        "run", f"uid {uid} does not exist in this user namespace", "choose a mapped one with --uid"
    )


def _is_root_outside() -> bool:
    with open("/proc/self/uid_map", encoding="utf-8") as lines:
        return any(line.split()[:2] == ["0", "0"] for line in lines)


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def user_namespace(uids: Map, gids: Map) -> int:
    """A descriptor of a new user namespace with these maps and no process in it. Needs CAP_SETUID and CAP_SETGID."""
    ready, told = os.pipe()
    done, finish = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.unshare(os.CLONE_NEWUSER)
            os.write(told, b"1")
            os.close(finish)
            os.read(done, 1)
        finally:
            os._exit(0)
    try:
        os.close(told)
        told = -1
        if not os.read(ready, 1):
            raise PermissionError(1, "a new user namespace was refused")
        write_maps(child, uids, gids)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (ready, done, finish):
            os.close(descriptor)
        if told >= 0:
            os.close(told)
        os.waitpid(child, 0)


def write_maps(process: int, uids: Map, gids: Map) -> None:
    """Fill in the maps of the user namespace that `process` has just entered; setgroups(2) stays denied in it."""
    _write(f"/proc/{process}/setgroups", "deny")
    _write(f"/proc/{process}/uid_map", _lines(uids))
    _write(f"/proc/{process}/gid_map", _lines(gids))


def is_mapped(number: int, table: str = "/proc/self/uid_map") -> bool:
    """Does this id exist in our own user namespace? Inside a container it need not."""
    with open(table, encoding="utf-8") as lines:
        for line in lines:
            first, _outside, count = (int(word) for word in line.split())
            if first <= number < first + count:
                return True
    return False


def _lines(pairs: Map) -> str:
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in pairs)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())  # the kernel takes a map in one write only
    finally:
        os.close(descriptor)
