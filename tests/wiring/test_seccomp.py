"""The system call filter: by an interpreter of our own for every branch, and by the kernel."""

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.wiring.errors import WiringError
from egressd.wiring.seccomp import MACHINES, RET_ALLOW, RET_ERRNO, RET_KILL, program

EPERM, ENOSYS = RET_ERRNO | errno.EPERM, RET_ERRNO | errno.ENOSYS
NO_FAMILY, NO_PROTOCOL = RET_ERRNO | errno.EAFNOSUPPORT, RET_ERRNO | errno.EPROTONOSUPPORT
NEWUSER, NEWNET, NEWNS, NEWTIME = 0x10000000, 0x40000000, 0x00020000, 0x80


def interpret(code: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """What a classic BPF program returns for one system call (linux/filter.h, struct seccomp_data)."""
    values = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, arch, 0, *values)
    accumulator, place = 0, 0
    instructions = list(struct.iter_unpack("=HBBI", code))
    while True:
        operation, jump_true, jump_false, constant = instructions[place]
        place += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif operation == 0x06:
            return int(constant)
        else:
            holds = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }[operation]
            place += jump_true if holds else jump_false


def judged(machine: str, call: str, *arguments: int) -> int:
    target = MACHINES[machine]
    return interpret(program(machine), target.numbers[call], target.audit, arguments)


BOTH = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])

CASES = [
    ("a TCP socket", "socket", (2, 1, 6), RET_ALLOW),
    ("an IPv6 socket", "socket", (10, 2, 17), RET_ALLOW),
    ("a Unix socket", "socket", (1, 1, 0), RET_ALLOW),
    ("route netlink", "socket", (16, 3, 0), RET_ALLOW),
    ("route netlink with flags in the type", "socket", (16, 3 | 0o2000000, 0), RET_ALLOW),
    ("netfilter netlink", "socket", (16, 3, 12), NO_PROTOCOL),
    ("socket diagnostics", "socket", (16, 3, 4), NO_PROTOCOL),
    ("a virtual machine socket", "socket", (40, 1, 0), NO_FAMILY),
    ("a packet socket", "socket", (17, 3, 0), NO_FAMILY),
    ("a family with high bits set, which the kernel cuts off", "socket", ((1 << 32) | 40, 1, 0), NO_FAMILY),
    ("family 0", "socket", (0, 1, 0), NO_FAMILY),
    ("a pair of Unix sockets", "socketpair", (1, 1, 0), RET_ALLOW),
    ("a pair of anything else", "socketpair", (30, 1, 0), NO_FAMILY),
    ("io_uring", "io_uring_setup", (8, 0), ENOSYS),
    ("io_uring in use", "io_uring_enter", (3, 1), ENOSYS),
    ("io_uring set up further", "io_uring_register", (3, 0), ENOSYS),
    ("openat2", "openat2", (3, 0, 0, 24), ENOSYS),
    ("clone3", "clone3", (0, 88), ENOSYS),
    ("a fork", "clone", (17,), RET_ALLOW),
    ("a thread", "clone", (0x3D0F00,), RET_ALLOW),
    ("a child in a user namespace", "clone", (NEWUSER | 17,), EPERM),
    ("a child in a network namespace", "clone", (NEWNET | 17,), EPERM),
    ("unshared files", "unshare", (0x400,), RET_ALLOW),
    ("an unshared user namespace", "unshare", (NEWUSER,), EPERM),
    ("an unshared mount namespace", "unshare", (NEWNS,), EPERM),
    ("an unshared time namespace", "unshare", (NEWTIME,), EPERM),
    ("entering a namespace", "setns", (3, 0), EPERM),
    ("chmod 755", "fchmodat", (3, 0, 0o755), RET_ALLOW),
    ("chmod u+s", "fchmodat", (3, 0, 0o4755), EPERM),
    ("chmod g+s", "fchmodat", (3, 0, 0o2755), EPERM),
    ("chmod +t", "fchmodat", (3, 0, 0o1777), RET_ALLOW),
    ("chmod u+s by descriptor", "fchmod", (3, 0o4755), EPERM),
    ("chmod u+s by the newest call", "fchmodat2", (3, 0, 0o4755, 0x1000), EPERM),
    ("a new file", "openat", (3, 0, 0o101, 0o644), RET_ALLOW),
    ("a new set-uid file", "openat", (3, 0, 0o101, 0o4755), EPERM),
    ("a new set-gid file without a name", "openat", (3, 0, 0o20200001, 0o2755), EPERM),
    ("an old file with rubbish for a mode", "openat", (3, 0, 0o2, 0o7777), RET_ALLOW),
    ("a set-uid node", "mknodat", (3, 0, 0o104755, 0), EPERM),
    ("a pipe", "mknodat", (3, 0, 0o10644, 0), RET_ALLOW),
    ("typing into the terminal", "ioctl", (0, 0x5412, 0), EPERM),
    ("typing with high bits set", "ioctl", (0, (7 << 32) | 0x5412, 0), EPERM),
    ("pasting on the console", "ioctl", (0, 0x541C, 0), EPERM),
    ("the window's size", "ioctl", (0, 0x5413, 0), RET_ALLOW),
    ("BPF", "bpf", (0,), EPERM),
    ("keys", "keyctl", (0,), EPERM),
    ("page faults", "userfaultfd", (0,), EPERM),
    ("performance counters", "perf_event_open", (0,), EPERM),
    ("a kernel module", "finit_module", (3,), EPERM),
    ("another kernel", "kexec_load", (0,), EPERM),
    ("files by handle", "open_by_handle_at", (3,), EPERM),
    ("the kernel's log", "syslog", (3,), EPERM),
]


@BOTH
@pytest.mark.parametrize(("call", "arguments", "verdict"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_each_call_is_judged(machine: str, call: str, arguments: tuple[int, ...], verdict: int) -> None:
    assert judged(machine, call, *arguments) == verdict


@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("open", (0, 0o101, 0o4755), EPERM),
        ("open", (0, 0o101, 0o755), RET_ALLOW),
        ("open", (0, 0, 0o4755), RET_ALLOW),
        ("creat", (0, 0o2755), EPERM),
        ("chmod", (0, 0o4755), EPERM),
        ("mknod", (0, 0o104755, 0), EPERM),
    ],
)
def test_the_old_calls_of_x86_are_judged_too(call: str, arguments: tuple[int, ...], verdict: int) -> None:
    assert judged("x86_64", call, *arguments) == verdict


@BOTH
@given(number=st.integers(0, 0x3FFFFFFF), arguments=st.tuples(*[st.integers(0, 2**64 - 1)] * 6))
def test_what_is_not_named_is_allowed_and_nothing_runs_off_the_end(
    machine: str, number: int, arguments: tuple[int, ...]
) -> None:
    target = MACHINES[machine]
    verdict = interpret(program(machine), number, target.audit, arguments)
    if number not in target.numbers.values():
        assert verdict == RET_ALLOW


@BOTH
@given(arch=st.integers(0, 2**32 - 1), number=st.integers(0, 2**32 - 1))
def test_another_architecture_is_killed(machine: str, arch: int, number: int) -> None:
    if arch != MACHINES[machine].audit:
        assert interpret(program(machine), number, arch) == RET_KILL


@given(number=st.integers(0x40000000, 0x7FFFFFFF))
def test_x32_calls_are_killed(number: int) -> None:
    assert interpret(program("x86_64"), number, MACHINES["x86_64"].audit) == RET_KILL


def test_a_processor_without_a_table_is_an_error() -> None:
    with pytest.raises(WiringError, match="riscv64"):
        program("riscv64")


def under_the_filter(attempt: Callable[[ctypes.CDLL], int]) -> int:
    """Load the real program in a child, make one attempt there, and return its errno (0: it worked)."""
    code = program()
    child = os.fork()
    if child == 0:
        status = 255
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            buffer = ctypes.create_string_buffer(code, len(code))
            header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
            loaded = libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, header, 0, 0) == 0
            status = 254
            if loaded:
                ctypes.set_errno(0)
                status = ctypes.get_errno() if attempt(libc) < 0 else 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def call(name: str, *arguments: int) -> Callable[[ctypes.CDLL], int]:
    number = MACHINES[platform.machine()].numbers[name]
    return lambda libc: int(libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments]))


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        pytest.param(call("socket", socket.AF_INET, 1, 0), 0, id="a TCP socket works"),
        pytest.param(call("socket", socket.AF_UNIX, 1, 0), 0, id="a Unix socket works"),
        pytest.param(call("socket", socket.AF_NETLINK, 3, 0), 0, id="route netlink works"),
        pytest.param(call("socket", socket.AF_NETLINK, 3, 12), errno.EPROTONOSUPPORT, id="netfilter netlink"),
        pytest.param(call("socket", 40, 1, 0), errno.EAFNOSUPPORT, id="AF_VSOCK"),
        pytest.param(call("socket", socket.AF_PACKET, 3, 0), errno.EAFNOSUPPORT, id="AF_PACKET"),
        pytest.param(call("io_uring_setup", 8, 0), errno.ENOSYS, id="io_uring"),
        pytest.param(call("unshare", NEWUSER), errno.EPERM, id="a user namespace"),
        pytest.param(call("bpf", 0, 0, 0), errno.EPERM, id="bpf"),
        pytest.param(call("fchmod", 0, 0o4755), errno.EPERM, id="set-uid"),
        pytest.param(call("ioctl", 0, 0x5412, 0), errno.EPERM, id="TIOCSTI"),
        pytest.param(call("keyctl", 0, 0), errno.EPERM, id="keyctl"),
        pytest.param(call("userfaultfd", 0), errno.EPERM, id="userfaultfd"),
        pytest.param(call("perf_event_open", 0, 0, 0, 0, 0), errno.EPERM, id="perf_event_open"),
        pytest.param(call("openat2", 0, 0, 0, 0), errno.ENOSYS, id="openat2"),
    ],
)
@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no filter for this processor")
def test_the_kernel_says_the_same(attempt: Callable[[ctypes.CDLL], int], error: int) -> None:
    assert under_the_filter(attempt) == error


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is a thing of x86")
def test_the_kernel_kills_an_x32_call() -> None:
    assert under_the_filter(lambda libc: int(libc.syscall(ctypes.c_long(0x40000000 | 39)))) == -31
