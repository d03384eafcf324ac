"""The system calls that a worker can make once it is isolated, as a classic BPF program built here.

It lets through what a worker needs (`gate.system_calls`) and refuses the rest: with EPERM, or, for what only an attacker
calls, by ending the worker. So whoever takes a worker over has no program to start, no file to write, no memory of
another process, no new namespace, no further process (threads there may be), no memory that is written and run, and
of sockets only TCP and UDP: no raw packets, and no abstract Unix socket of the host, whose network namespace a
worker shares.

Total: an architecture that the program was not built for is ended, x32 calls included (`nr & 0x40000000`).
Source: linux/seccomp.h, linux/filter.h, linux/audit.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

from egressd.gate import system_calls

RET_KILL: Final = 0x8000_0000
RET_ERRNO: Final = 0x0005_0000
RET_ALLOW: Final = 0x7FFF_0000
"""SECCOMP_RET_KILL_PROCESS, _ERRNO, _ALLOW."""
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_TABLES: Final = {"x86_64": system_calls.X86_64, "aarch64": system_calls.AARCH64}
_AUDIT: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

_LD_W_ABS, _ALU_AND_K, _RET_K = 0x20, 0x54, 0x06
_JEQ_K, _JGE_K, _JSET_K = 0x15, 0x35, 0x45
_X32_BIT: Final = 0x4000_0000

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_TYPE_MASK = 1, 2, 0xF
_TCP, _UDP = 6, 17
_WRITES: Final = 0o1 | 0o2 | 0o100 | 0o1000 | 0o10000000 | 0o20000000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_PATH, __O_TMPFILE: the same on both processors."""
_PROT_EXEC: Final = 4
_THREADS: Final = (0x3D_0F00, 0x7D_0F00)
"""What glibc and musl make a thread with, and nobody anything else."""
_IOCTLS: Final = (0x5421, 0x541B, 0x5411, 0x5401, 0x5451, 0x5450)
"""FIONBIO, FIONREAD, TIOCOUTQ, TCGETS, FIOCLEX, FIONCLEX."""
_FCNTLS: Final = (0, 1, 2, 3, 4, 1030, 1031, 1034)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GET_SEALS."""
_PRCTLS: Final = (15, 0x5356_4D41)
"""PR_SET_NAME and PR_SET_VMA: names of threads and of memory."""
_OPTIONS: Final = {
    1: (2, 7, 8, 9, 13),  # SOL_SOCKET: SO_REUSEADDR, SO_SNDBUF, SO_RCVBUF, SO_KEEPALIVE, SO_LINGER
    6: (1, 3, 4, 5, 6, 12, 18, 25),  # TCP: NODELAY, CORK, the KEEPs, QUICKACK, USER_TIMEOUT, NOTSENT_LOWAT
    0: (8,),  # IP_PKTINFO
    41: (26, 49),  # IPV6_V6ONLY, IPV6_RECVPKTINFO
}

type _Instruction = tuple[int, int, int, int]


class NotConfined(Exception):
    """The kernel did not take the filter: what runs without it must not read a hostile byte."""


def program(machine: str) -> bytes:
    """Return the filter as an array of `struct sock_filter` for a processor, as `uname -m` names it.

    Raises NotConfined for one that nobody wrote the numbers down for.
    """
    numbers = _TABLES.get(machine)
    if numbers is None:
        raise NotConfined(f"no system-call filter was written for {machine}")
    code: list[_Instruction] = [
        (_LD_W_ABS, 0, 0, 4),  # seccomp_data: nr, arch, instruction pointer, six arguments of 64 bits
        (_JEQ_K, 1, 0, _AUDIT[machine]),
        _ret(RET_KILL),
        (_LD_W_ABS, 0, 0, 0),
        (_JGE_K, 0, 1, _X32_BIT),
        _ret(RET_KILL),
    ]
    for call, block in _blocks().items():
        if call in numbers:
            code += [(_JEQ_K, 0, len(block), numbers[call]), *block]
    code += [(_JGE_K, 0, 1, system_calls.SHARED_FROM), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def confine() -> None:
    """Put this process, every thread of it, behind the filter for good. Raises NotConfined.

    It must be unable to gain privileges already (PR_SET_NO_NEW_PRIVS), as `gate.isolation` leaves it.
    """
    machine = platform.machine()
    code = program(machine)
    held = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = map(ctypes.c_long, (_SECCOMP[machine], _SET_MODE_FILTER, _FLAG_TSYNC))
    result = libc.syscall(*arguments, filters)
    if result != 0:  # with TSYNC a positive one is a thread that could not be put behind it
        why = os.strerror(ctypes.get_errno()) if result < 0 else f"thread {result} is behind another"
        raise NotConfined(f"the kernel took no system-call filter: {why}")


def _blocks() -> dict[str, list[_Instruction]]:
    """What happens to each named call; every block ends in a return, so that none falls into the next."""
    judged = {
        "socket": _socket(),
        # a stream pair has its peer for good; a pair of datagrams could be sent to any other socket
        "socketpair": [*_unless(0, _AF_UNIX), *_unless(1, _SOCK_STREAM, _SOCK_TYPE_MASK), _ret(RET_ALLOW)],
        "setsockopt": _options(),
        "ioctl": _only(1, _IOCTLS),
        "fcntl": _only(1, _FCNTLS),
        "open": _without(1, _WRITES),
        "openat": _without(2, _WRITES),
        "mmap": _without(2, _PROT_EXEC),
        "mprotect": _without(2, _PROT_EXEC),
        "clone": _only(0, _THREADS),
        "prctl": _only(0, _PRCTLS),
        "prlimit64": [
            *_unless(2, 0),
            (_LD_W_ABS, 0, 0, _at(2) + 4),
            *_equal(0),
            _ret(RET_ALLOW),
        ],  # read only
    }
    free = {call: [_ret(RET_ALLOW)] for call in system_calls.FREE}
    fatal = {call: [_ret(RET_KILL)] for call in system_calls.FATAL}
    return free | {call: judged[call] for call in system_calls.JUDGED} | fatal


def _socket() -> list[_Instruction]:
    """TCP and UDP over IPv4 and IPv6, named or as what the type means by itself."""
    refused = _refuse(errno.EAFNOSUPPORT)
    return [
        _load(0),
        (_JEQ_K, 2, 0, _AF_INET),
        (_JEQ_K, 1, 0, _AF_INET6),
        refused,
        _load(1),
        (_ALU_AND_K, 0, 0, _SOCK_TYPE_MASK),
        (_JEQ_K, 2, 0, _SOCK_STREAM),
        (_JEQ_K, 5, 0, _SOCK_DGRAM),
        _refuse(errno.EPERM),
        _load(2),  # a stream's protocol
        (_JEQ_K, 5, 0, 0),
        (_JEQ_K, 4, 0, _TCP),
        _refuse(errno.EPERM),
        _load(2),  # a datagram's
        (_JEQ_K, 1, 0, 0),
        (_JEQ_K, 0, 1, _UDP),
        _ret(RET_ALLOW),
        _refuse(errno.EPERM),
    ]


def _options() -> list[_Instruction]:
    """Pairs of level and option; the others reach far into the kernel (TCP_ULP, SO_ATTACH_BPF, IPT_SO_SET_REPLACE)."""
    code: list[_Instruction] = []
    for level, options in _OPTIONS.items():
        judged = _only(2, options)
        code += [_load(1), (_JEQ_K, 0, len(judged), level), *judged]
    return [*code, _refuse(errno.EPERM)]


def _only(argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    """Allow these values of an argument of 32 bits."""
    tests = [(_JEQ_K, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [_load(argument), *tests, _refuse(errno.EPERM), _ret(RET_ALLOW)]


def _without(argument: int, bits: int) -> list[_Instruction]:
    """Allow what has none of these bits."""
    return [_load(argument), (_JSET_K, 0, 1, bits), _refuse(errno.EPERM), _ret(RET_ALLOW)]


def _unless(argument: int, value: int, mask: int = 0xFFFF_FFFF) -> list[_Instruction]:
    """Go on with this value only."""
    return [_load(argument), (_ALU_AND_K, 0, 0, mask), *_equal(value)]


def _equal(value: int) -> list[_Instruction]:
    return [(_JEQ_K, 1, 0, value), _refuse(errno.EPERM)]


def _load(argument: int) -> _Instruction:
    """The low half of an argument: all judged here but prlimit64's pointer are int or flag words of 32 bits.

    The flags of clone are unsigned long, those of mmap and mprotect too; what is refused or asked for lies in the low
    half, and the kernel knows no bit above it.
    """
    return (_LD_W_ABS, 0, 0, _at(argument))


def _at(argument: int) -> int:
    return 16 + 8 * argument


def _refuse(number: int) -> _Instruction:
    return _ret(RET_ERRNO | number)


def _ret(value: int) -> _Instruction:
    return (_RET_K, 0, 0, value)
