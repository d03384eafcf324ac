"""System calls by number, and a child in which something irreversible can be tried."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable

_X86_64 = {
    "ptrace": 101, "syslog": 103, "init_module": 175, "add_key": 248, "keyctl": 250, "perf_event_open": 298,
    "open_by_handle_at": 304, "setns": 308, "finit_module": 313, "bpf": 321, "userfaultfd": 323, "unshare": 272,
    "adjtimex": 159, "swapoff": 168, "process_vm_readv": 310, "personality": 135, "kcmp": 312,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "syslog": 116, "init_module": 105, "add_key": 217, "keyctl": 219, "perf_event_open": 241,
    "open_by_handle_at": 265, "setns": 268, "finit_module": 273, "bpf": 280, "userfaultfd": 282, "unshare": 97,
    "adjtimex": 171, "swapoff": 225, "process_vm_readv": 270, "personality": 92, "kcmp": 272,
}  # fmt: skip
_SAME = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_open": 434, "clone3": 435,
    "openat2": 437, "pidfd_getfd": 438,
}  # fmt: skip
_NUMBERS = {"x86_64": {**_X86_64, **_SAME}, "aarch64": {**_AARCH64, **_SAME}}
"""linux/unistd.h of both architectures; on any other the probes by number are not tried."""

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000

_libc = ctypes.CDLL(None, use_errno=True)


class Unknown(Exception):
    """Nobody wrote down the number of this system call for this processor."""


def buffer(size: int) -> ctypes.Array[ctypes.c_char]:
    """Room for the kernel to write into, all zeros."""
    return ctypes.create_string_buffer(size)


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call; returns its result, or minus the error's number. Raises Unknown."""
    numbers = _NUMBERS.get(platform.machine(), {})
    if name not in numbers:
        raise Unknown(f"{name} has no number here for {platform.machine()}")
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    ctypes.set_errno(0)
    result = int(_libc.syscall(ctypes.c_long(numbers[name]), *given))
    return -ctypes.get_errno() if result == -1 else result


def mount(source: str, target: str, kind: str) -> int:
    """mount(2) without flags; returns 0 or minus the error's number."""
    ctypes.set_errno(0)
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), None)
    return 0 if result == 0 else -ctypes.get_errno()


def unmount(target: str) -> None:
    """Take a mount of our own away again (MNT_DETACH)."""
    _libc.umount2(target.encode(), 2)


def error_name(result: int) -> str:
    """The name of a system call's failure, such as EPERM."""
    return errno.errorcode.get(-result, str(-result))


def in_child(attempt: Callable[[], str | None], seconds: int = 10) -> str | None:
    """Run something in a process of its own and return what it returns; a text that says why when it ends otherwise."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            said = attempt()
            os.write(writing, b"" if said is None else b"+" + said.encode("utf-8", "replace")[:4000])
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    told = b""
    while True:
        part = os.read(reading, 4096)
        if not part:
            break
        told += part
    os.close(reading)
    _, ended = os.waitpid(child, 0)
    if ended != 0:
        raise ChildDied(ended & 0x7F)
    return told[1:].decode("utf-8", "replace") if told else None


class ChildDied(Exception):
    """The child ended before it could say anything; `signal` is what killed it, or 0."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}" if number else "ended early")
        self.signal = number
