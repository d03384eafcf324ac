"""The few system calls that Python's standard library does not wrap, each raising OSError like its own.

Source: mount(2), openat2(2), open_tree(2), move_mount(2), mount_setattr(2), prctl(2); numbers from linux/mount.h and
asm-generic/unistd.h (the calls after 423 have one number on every architecture).
"""

import ctypes
import os
import signal
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_RESOLVE_NO_SYMLINKS: Final = 0x04
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MOUNT_ATTR_RDONLY: Final = 0x1
_MOUNT_ATTR_IDMAP: Final = 0x00100000

_SYS_OPEN_TREE: Final = 428
_SYS_OPENAT2: Final = 437
_SYS_MOVE_MOUNT: Final = 429
_SYS_MOUNT_SETATTR: Final = 442

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _checked(result, f"mount {target}")


def open_exactly(path: str) -> int:
    """An O_PATH descriptor of `path`, in which no component may be a symbolic link (ELOOP): a sandbox that can write
    above it could otherwise exchange it for one between our look and our use."""
    how = _OpenHow(flags=os.O_PATH | os.O_CLOEXEC, resolve=_RESOLVE_NO_SYMLINKS)
    size = ctypes.sizeof(how)
    result = _libc.syscall(_SYS_OPENAT2, _AT_FDCWD, os.fsencode(path), ctypes.byref(how), size)
    return _checked(result, f"open {path}")


def clone_tree(descriptor: int) -> int:
    """A detached copy of the mounts at and below what is open, as a descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH
    return _checked(_libc.syscall(_SYS_OPEN_TREE, descriptor, b"", flags), "open_tree")


def attach_tree(tree: int, target: str) -> None:
    """Mount a detached copy over `target`."""
    result = _libc.syscall(
        _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
    )
    _checked(result, f"move_mount {target}")


def map_owners(tree: int, user_namespace: int) -> None:
    """Show the top mount of a detached copy with the owners that the user namespace maps (an idmapped mount)."""
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_IDMAP, userns_fd=user_namespace)
    size = ctypes.sizeof(attributes)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size)
    _checked(result, "mount_setattr")


def make_read_only(path: str) -> None:
    """Make the mounts at and below `path` read-only."""
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(attributes)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, ctypes.byref(attributes), size
    )
    _checked(result, f"mount_setattr {path}")


def die_with_parent() -> None:
    """SIGKILL this process when the thread that started it ends. A change of uid undoes it: call it again then."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def forbid_inspection() -> None:
    """No core file, no ptrace and no /proc/PID/mem for processes of the same uid (PR_SET_DUMPABLE 0)."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl PR_SET_DUMPABLE")
