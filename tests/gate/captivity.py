"""Code run where a worker stands: in a process that is isolated and confined as a worker is, but for its own imports."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from egressd.gate import isolation, seccomp

OK = 42
KILLED = -signal.SIGSYS & 0xFF
"""How a process that was ended for a system call looks from outside: its parent passes the status on."""
_libc = ctypes.CDLL(None, use_errno=True)


def captive(act: Callable[[], None], *, rootless: bool) -> int:
    """Run `act` behind isolation and filter; OK where it returned, 1 where it raised, KILLED where it was ended."""
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0 and rootless:
                os.setgroups([])
                os.setresgid(1000, 1000, 1000)
                os.setresuid(1000, 1000, 1000)
                _libc.prctl(
                    isolation.PR_SET_DUMPABLE, 1, 0, 0, 0
                )  # what exec does for a program of one's own
            isolation.protect_process()
            isolation.isolate(None if rootless else (1337, 1337), keep=())
            seccomp.confine()
            act()
            os._exit(OK)
        except BaseException as error:  # noqa: BLE001 -- the top of a process
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def call(number: int, *arguments: int) -> int:
    """Make a system call by its number; 0 where it was let through, else the errno."""
    _libc.syscall.restype = ctypes.c_long
    result = _libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    return ctypes.get_errno() if result < 0 else 0
