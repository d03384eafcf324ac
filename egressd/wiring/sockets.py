"""Where services of this machine listen on Unix sockets that a sandbox might see.

A read-only mount keeps nobody from connecting, and each network namespace lists only the sockets bound by its own processes
(unix(7)), while a socket's file is reached from any. So the lists of all namespaces count, and so does what is mounted from
elsewhere: a container sees a service's file, not its process.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

_PROC: Final = "/proc"
_HEAD: Final = 4096
_PIECE: Final = 64 * 1024
MOUNTED_LIMIT: Final = 10_000
"""Entries looked at, breadth first, in search of sockets in folders that are mounted one by one, as into a container."""

_VIRTUAL: Final = frozenset(
    {
        *(
            "autofs",
            "binfmt_misc",
            "bpf",
            "cgroup",
            "cgroup2",
            "configfs",
            "debugfs",
            "devpts",
            "devtmpfs",
            "efivarfs",
        ),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "securityfs", "sysfs", "tracefs"),
    }
)
"""File systems that hold no sockets of services."""


def live_sockets(skip: Iterable[str] = ()) -> list[str]:
    """Return the paths, free of symbolic links, at which a service may listen; some may hold no socket in this view.

    `skip` are trees that are searched by others.
    """
    found = {*_bound(), *_mounted(frozenset(skip))}
    return sorted({os.path.realpath(path) for path in found})


def is_socket(path: str) -> bool:
    """Return whether the path itself, not what it links to, is a socket's file."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _bound() -> Iterator[str]:
    """Path names of bound sockets, by the lists of every network namespace that a process here lives in.

    A list is opened once for each namespace that is known to be another: there may be hundreds, of sandboxes for the most part,
    and thousands of processes in them.
    """
    seen: set[str] = set()
    for pid in filter(str.isdigit, os.listdir(_PROC)):
        if (known := _namespace(pid)) in seen:
            continue
        try:
            table = _listed(f"{_PROC}/{pid}/net/unix")
        except OSError:  # it is gone, or hidden
            continue
        key = known or table[:_HEAD]
        if key in seen:
            continue
        seen.add(key)
        rows = (line.split(None, 7) for line in table.split("\n"))
        yield from (row[7] for row in rows if len(row) == 8 and row[7].startswith("/"))


def _listed(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, _PIECE):
            parts.append(part)
    finally:
        os.close(descriptor)
    return os.fsdecode(b"".join(parts))


def _namespace(pid: str) -> str | None:
    """Return the name of a process's network namespace; None where looking at the process is not allowed."""
    try:
        return os.readlink(f"{_PROC}/{pid}/ns/net")
    except OSError:
        return None


def _mounted(skip: frozenset[str]) -> Iterator[str]:
    """Sockets that are mounted one by one, or lie in a folder that is a part of another file system (proc_pid_mountinfo(5))."""
    folders = []
    with open(f"{_PROC}/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, kind = line.partition(" - ")
            root, point = map(_plain, fields.split(" ")[3:5])
            if kind.split(" ")[0] in _VIRTUAL or point in skip:
                continue
            if is_socket(point):
                yield point
            elif root != "/" and os.path.isdir(point):
                folders.append(point)
    yield from _search(folders)


def _search(folders: list[str]) -> Iterator[str]:
    left = MOUNTED_LIMIT
    for folder in folders:  # grows while it is walked
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries[:left]:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif not entry.is_file(follow_symlinks=False) and is_socket(entry.path):
                yield entry.path
        left -= len(entries)
        if left <= 0:
            return


def _plain(field: str) -> str:
    """Undo the escapes of a field of mountinfo: space, tab, newline and backslash as octal."""
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, character)
    return field
