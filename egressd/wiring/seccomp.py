"""The system calls a sandboxed command may not make, as a classic BPF program built here.

The namespaces and the missing capabilities are the fence; this closes what lies beside it:

* sockets that no network namespace contains (AF_VSOCK, AF_ALG, AF_BLUETOOTH ...) and netlink families other than route;
* io_uring, whose operations no filter sees;
* set-uid and set-gid bits: an idmapped workspace may belong to root on disk, and a program with the bit set would
  run as root for whoever starts it outside;
* new namespaces, again (bubblewrap forbids them too), and kernel doors with a history: bpf, keyrings, userfaultfd ...

Total: an architecture the program was not built for is killed, x32 calls included (`nr & 0x40000000`).
Source: linux/seccomp.h, linux/filter.h, linux/audit.h, the unistd tables of both architectures.
"""

import errno
import platform
import struct
from dataclasses import dataclass
from typing import Final

from egressd.wiring.errors import WiringError

RET_KILL: Final = 0x80000000  # SECCOMP_RET_KILL_PROCESS
RET_ERRNO: Final = 0x00050000
RET_ALLOW: Final = 0x7FFF0000

_LD_W_ABS: Final = 0x20
_JMP_JEQ_K: Final = 0x15
_JMP_JGE_K: Final = 0x35
_JMP_JSET_K: Final = 0x45
_RET_K: Final = 0x06

_NR_OFFSET: Final = 0
_ARCH_OFFSET: Final = 4
_X32_BIT: Final = 0x40000000

AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
AF_NETLINK: Final = 16
NETLINK_ROUTE: Final = 0

_SETID_BITS: Final = 0o6000
_O_CREAT: Final = 0o100
_O_TMPFILE_BIT: Final = 0o20000000
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C
_CLONE_NEW: Final = 0x7E020000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID and NET. CLONE_NEWTIME (0x80) lies in clone's signal mask and can be asked
for by unshare and clone3 only."""
_CLONE_NEWTIME: Final = 0x80


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    x32: bool
    numbers: dict[str, int]


_BOTH: Final = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435, "openat2": 437,
    "fchmodat2": 452,
}  # fmt: skip
_X86_64: Final = _Machine(
    0xC000003E,
    True,
    _BOTH
    | {
        "open": 2, "ioctl": 16, "socket": 41, "socketpair": 53, "clone": 56, "creat": 85, "chmod": 90, "fchmod": 91,
        "syslog": 103, "mknod": 133, "create_module": 174, "init_module": 175, "delete_module": 176,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "openat": 257, "mknodat": 259,
        "fchmodat": 268, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
)  # fmt: skip
_AARCH64: Final = _Machine(
    0xC00000B7,
    False,
    _BOTH
    | {
        "ioctl": 29, "mknodat": 33, "fchmod": 52, "fchmodat": 53, "openat": 56, "unshare": 97, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "syslog": 116, "socket": 198, "socketpair": 199, "add_key": 217,
        "request_key": 218, "keyctl": 219, "clone": 220, "perf_event_open": 241, "open_by_handle_at": 265,
        "setns": 268, "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
)  # fmt: skip
MACHINES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}

_EPERM_ALWAYS: Final = (
    "bpf", "keyctl", "add_key", "request_key", "userfaultfd", "perf_event_open", "kexec_load", "kexec_file_load",
    "init_module", "finit_module", "delete_module", "create_module", "open_by_handle_at", "setns", "syslog",
)  # fmt: skip
_ENOSYS_ALWAYS: Final = ("io_uring_setup", "io_uring_enter", "io_uring_register", "openat2", "clone3")
"""ENOSYS, not EPERM, where a library falls back to a call whose arguments can be judged: openat2 and clone3 carry
their flags behind a pointer, which a filter cannot read."""

Instruction = tuple[int, int, int, int]


def program(machine: str = "") -> bytes:
    """The filter as an array of `struct sock_filter` for `machine` (as `uname -m` names it; default: this one).

    Raises WiringError for a processor that nobody wrote the numbers down for.
    """
    name = machine or platform.machine()
    if name not in MACHINES:
        raise WiringError("seccomp", f"no filter for {name}", f"egressd runs on {' and '.join(MACHINES)}")
    target = MACHINES[name]
    code = [(_LD_W_ABS, 0, 0, _ARCH_OFFSET), (_JMP_JEQ_K, 1, 0, target.audit), _ret(RET_KILL)]
    code.append((_LD_W_ABS, 0, 0, _NR_OFFSET))
    if target.x32:
        code += [(_JMP_JGE_K, 0, 1, _X32_BIT), _ret(RET_KILL)]
    for call, block in _blocks().items():
        if call in target.numbers:
            code += [(_JMP_JEQ_K, 0, len(block), target.numbers[call]), *block]
    code.append(_ret(RET_ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _blocks() -> dict[str, list[Instruction]]:
    """What happens to each named call. Every block ends in a return on all its paths, so none can fall into the next."""
    blocks = {call: [_refuse(errno.EPERM)] for call in _EPERM_ALWAYS}
    blocks |= {call: [_refuse(errno.ENOSYS)] for call in _ENOSYS_ALWAYS}
    # Where each call keeps its mode, counted from 0.
    for call, argument in {"chmod": 1, "fchmod": 1, "creat": 1, "mknod": 1}.items():
        blocks[call] = _refuse_if_any(argument, _SETID_BITS)
    for call, argument in {"fchmodat": 2, "fchmodat2": 2, "mknodat": 2}.items():
        blocks[call] = _refuse_if_any(argument, _SETID_BITS)
    blocks["open"] = _open(flags=1, mode=2)
    blocks["openat"] = _open(flags=2, mode=3)
    blocks["socket"] = blocks["socketpair"] = _socket()
    blocks["ioctl"] = [
        _load(1),
        (_JMP_JEQ_K, 1, 0, _TIOCSTI),
        (_JMP_JEQ_K, 0, 1, _TIOCLINUX),
        _refuse(errno.EPERM),
        _ret(RET_ALLOW),
    ]
    blocks["clone"] = _refuse_if_any(0, _CLONE_NEW)
    blocks["unshare"] = _refuse_if_any(0, _CLONE_NEW | _CLONE_NEWTIME)
    return blocks


def _socket() -> list[Instruction]:
    """Families by allow list; netlink only for routes, which glibc's getaddrinfo and `ip` read."""
    return [
        _load(0),
        (_JMP_JEQ_K, 7, 0, AF_UNIX),
        (_JMP_JEQ_K, 6, 0, AF_INET),
        (_JMP_JEQ_K, 5, 0, AF_INET6),
        (_JMP_JEQ_K, 1, 0, AF_NETLINK),
        _refuse(errno.EAFNOSUPPORT),
        _load(2),
        (_JMP_JEQ_K, 1, 0, NETLINK_ROUTE),
        _refuse(errno.EPROTONOSUPPORT),
        _ret(RET_ALLOW),
    ]


def _open(*, flags: int, mode: int) -> list[Instruction]:
    """The mode counts only where a file may be created; otherwise it is whatever the register held."""
    return [
        _load(flags),
        (_JMP_JSET_K, 1, 0, _O_CREAT | _O_TMPFILE_BIT),
        _ret(RET_ALLOW),
        *_refuse_if_any(mode, _SETID_BITS),
    ]


def _refuse_if_any(argument: int, bits: int) -> list[Instruction]:
    return [_load(argument), (_JMP_JSET_K, 0, 1, bits), _refuse(errno.EPERM), _ret(RET_ALLOW)]


def _load(argument: int) -> Instruction:
    """The low half of an argument. Each one judged here is an int, a mode or a flag word: the kernel reads no more."""
    return (_LD_W_ABS, 0, 0, 16 + 8 * argument)


def _refuse(number: int) -> Instruction:
    return _ret(RET_ERRNO | number)


def _ret(value: int) -> Instruction:
    return (_RET_K, 0, 0, value)
