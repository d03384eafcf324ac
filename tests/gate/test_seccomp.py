"""A worker's filter: every branch by an interpreter of our own, and what one can do who has taken a worker over."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import resource
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate import seccomp, system_calls
from egressd.gate.seccomp import RET_ALLOW, RET_ERRNO, RET_KILL, program
from tests.gate.captivity import KILLED, OK, call, captive

EPERM, ENOSYS = RET_ERRNO | errno.EPERM, RET_ERRNO | errno.ENOSYS
NO_FAMILY = RET_ERRNO | errno.EAFNOSUPPORT
NUMBERS = {"x86_64": system_calls.X86_64, "aarch64": system_calls.AARCH64}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PROGRAMS = {machine: list(struct.iter_unpack("=HBBI", program(machine))) for machine in NUMBERS}
HERE = NUMBERS[platform.machine()]
WAYS = [pytest.param(False, id="as root", marks=pytest.mark.root), pytest.param(True, id="rootless")]


def judged(machine: str, number: int, arguments: tuple[int, ...] = (), arch: int | None = None) -> int:
    """What the program returns for one system call (linux/filter.h, struct seccomp_data)."""
    values = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, AUDIT[machine] if arch is None else arch, 0, *values)
    accumulator, place = 0, 0
    while True:
        operation, jump_true, jump_false, constant = PROGRAMS[machine][place]
        place += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x06:
            return int(constant)
        else:
            holds = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: accumulator & constant,
            }
            place += jump_true if holds[operation] else jump_false


CASES: list[tuple[str, str, tuple[int, ...], int]] = [
    ("a TCP socket", "socket", (2, 1, 6), RET_ALLOW),
    ("an IPv6 TCP socket without waiting", "socket", (10, 1 | 0o2004000, 0), RET_ALLOW),
    ("a UDP socket", "socket", (2, 2 | 0o2000000, 0), RET_ALLOW),
    ("a UDP socket by protocol", "socket", (10, 2, 17), RET_ALLOW),
    ("a raw socket", "socket", (2, 3, 255), EPERM),
    ("a raw IPv6 socket", "socket", (10, 3, 58), EPERM),
    ("a ping socket", "socket", (2, 2, 1), EPERM),
    ("multipath TCP", "socket", (2, 1, 262), EPERM),
    ("SCTP", "socket", (2, 1, 132), EPERM),
    ("TCP that is no stream", "socket", (2, 2, 6), EPERM),
    ("UDP that is no datagram", "socket", (2, 1, 17), EPERM),
    ("a sequenced packet socket", "socket", (2, 5, 0), EPERM),
    ("a Unix socket", "socket", (1, 1, 0), NO_FAMILY),
    ("a Unix datagram socket", "socket", (1, 2, 0), NO_FAMILY),
    ("netlink", "socket", (16, 3, 12), NO_FAMILY),
    ("a packet socket", "socket", (17, 3, 0), NO_FAMILY),
    ("a virtual machine socket", "socket", (40, 1, 0), NO_FAMILY),
    ("the kernel's cryptography", "socket", (38, 5, 0), NO_FAMILY),
    ("a stream pair", "socketpair", (1, 1 | 0o2000000, 0), RET_ALLOW),
    ("a datagram pair, which sends anywhere", "socketpair", (1, 2, 0), EPERM),
    ("a pair of another family", "socketpair", (2, 1, 0), EPERM),
    ("reading a file", "openat", (0xFFFFFF9C, 0, 0o2000000), RET_ALLOW),
    ("writing a file", "openat", (0xFFFFFF9C, 0, 0o1), EPERM),
    ("reading and writing a file", "openat", (0xFFFFFF9C, 0, 0o2), EPERM),
    ("making a file", "openat", (0xFFFFFF9C, 0, 0o100), EPERM),
    ("emptying a file", "openat", (0xFFFFFF9C, 0, 0o1000), EPERM),
    ("a file without a name", "openat", (0xFFFFFF9C, 0, 0o20200002), EPERM),
    ("a place", "openat", (0xFFFFFF9C, 0, 0o10000000), EPERM),
    ("memory", "mmap", (0, 4096, 3, 0x22), RET_ALLOW),
    ("memory that runs", "mmap", (0, 4096, 7, 0x22), EPERM),
    ("memory made to run", "mprotect", (0, 4096, 5), EPERM),
    ("memory that no longer runs", "mprotect", (0, 4096, 1), RET_ALLOW),
    ("a thread", "clone", (0x3D0F00,), RET_ALLOW),
    ("a thread of musl's", "clone", (0x7D0F00,), RET_ALLOW),
    ("a fork", "clone", (0x1200011,), EPERM),
    ("a thread in namespaces of its own", "clone", (0x3D0F00 | 0x10000000,), EPERM),
    ("a child in a user namespace", "clone", (0x10000011,), EPERM),
    ("a thread by the newer call", "clone3", (0, 88), ENOSYS),
    ("reading a limit", "prlimit64", (0, 7, 0, 0x1000), RET_ALLOW),
    ("setting a limit", "prlimit64", (0, 7, 0x1000, 0), EPERM),
    ("setting a limit high in memory", "prlimit64", (0, 7, 0x7F00_0000_0000, 0), EPERM),
    ("naming a thread", "prctl", (15, 0), RET_ALLOW),
    ("being dumpable again", "prctl", (4, 1), EPERM),
    ("another filter", "prctl", (22, 2), EPERM),
    ("not waiting", "ioctl", (3, 0x5421), RET_ALLOW),
    ("typing into a terminal", "ioctl", (0, 0x5412), EPERM),
    ("an interface's address", "ioctl", (3, 0x8915), EPERM),
    ("another descriptor", "fcntl", (3, 1030, 3), RET_ALLOW),
    ("a wider pipe", "fcntl", (3, 1031, 65536), RET_ALLOW),
    ("a signal to an owner", "fcntl", (3, 8, 1), EPERM),
    ("opaque bytes from socket to pipe", "splice", (3, 0, 4), RET_ALLOW),
    ("no delay", "setsockopt", (3, 6, 1), RET_ALLOW),
    ("lingering", "setsockopt", (3, 1, 13), RET_ALLOW),
    ("where a datagram was sent to", "setsockopt", (3, 0, 8), RET_ALLOW),
    ("the same for IPv6", "setsockopt", (3, 41, 49), RET_ALLOW),
    ("a shared port", "setsockopt", (3, 1, 15), EPERM),
    ("a packet mark", "setsockopt", (3, 1, 36), EPERM),
    ("an interface", "setsockopt", (3, 1, 25), EPERM),
    ("a program for packets", "setsockopt", (3, 1, 50), EPERM),
    ("TLS in the kernel", "setsockopt", (3, 6, 31), EPERM),
    ("firewall rules", "setsockopt", (3, 0, 64), EPERM),
    ("membership of a netlink group", "setsockopt", (3, 270, 1), EPERM),
]  # fmt: skip
UNNAMED = {"clone3": 435, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449}


@pytest.mark.parametrize("machine", NUMBERS)
@pytest.mark.parametrize(("what", "name", "arguments", "verdict"), CASES, ids=[case[0] for case in CASES])
def test_a_call_is_judged_by_its_arguments(
    machine: str, what: str, name: str, arguments: tuple[int, ...], verdict: int
) -> None:
    number = NUMBERS[machine].get(name, UNNAMED.get(name))
    assert number is not None, what
    assert judged(machine, number, arguments) == verdict


@pytest.mark.parametrize("machine", NUMBERS)
def test_what_takes_a_worker_over_begins_with_ends_it(machine: str) -> None:
    there = [name for name in system_calls.FATAL if name in NUMBERS[machine]]
    assert {"execve", "execveat", "ptrace", "mount", "bpf", "process_vm_readv", "keyctl"} <= set(there)
    assert {judged(machine, NUMBERS[machine][name]) for name in there} == {RET_KILL}


@pytest.mark.parametrize("machine", NUMBERS)
@pytest.mark.parametrize("number", UNNAMED.values(), ids=UNNAMED)
def test_a_library_that_tries_a_new_call_first_falls_back(machine: str, number: int) -> None:
    assert judged(machine, number) == ENOSYS


NUMBER = st.integers(0, 0xFFFF_FFFF)
ARGUMENTS = st.tuples(*[st.integers(0, 2**64 - 1)] * 6)


@given(st.sampled_from(sorted(NUMBERS)), st.integers(0, 600) | NUMBER, ARGUMENTS)
def test_what_is_not_named_is_never_let_through(
    machine: str, number: int, arguments: tuple[int, ...]
) -> None:
    named = {value: name for name, value in NUMBERS[machine].items()}
    verdict = judged(machine, number, arguments)
    if number not in named:
        assert verdict in (EPERM, ENOSYS, RET_KILL)
    elif named[number] in system_calls.FREE:
        assert verdict == RET_ALLOW


@given(st.sampled_from(sorted(NUMBERS)), NUMBER, NUMBER)
def test_another_processors_calls_end_the_worker(machine: str, number: int, arch: int) -> None:
    if arch != AUDIT[machine]:
        assert judged(machine, number, arch=arch) == RET_KILL
    assert judged(machine, number | 0x40000000) == RET_KILL


@pytest.mark.parametrize("machine", NUMBERS)
def test_every_named_call_has_one_place(machine: str) -> None:
    kinds = [*system_calls.FREE, *system_calls.JUDGED, *system_calls.FATAL]
    assert len(kinds) == len(set(kinds))
    assert set(NUMBERS[machine]) <= set(kinds)
    assert len(set(NUMBERS[machine].values())) == len(NUMBERS[machine])
    assert set(NUMBERS["x86_64"]) == set(kinds)


HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
GENERIC = Path("/usr/include/asm-generic/unistd.h")


@pytest.mark.parametrize(("machine", "header"), [("x86_64", HEADER), ("aarch64", GENERIC)])
def test_the_numbers_are_the_kernels(machine: str, header: Path) -> None:
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    told = {name: int(number) for name, number in found}
    told.setdefault("newfstatat", told.get("fstatat", -1))
    assert {name: told.get(name) for name in NUMBERS[machine]} == NUMBERS[machine]


def test_a_processor_that_nobody_wrote_numbers_down_for_stops_the_worker() -> None:
    with pytest.raises(seccomp.NotConfined, match="written for riscv64"):
        program("riscv64")


def test_a_kernel_that_takes_no_filter_stops_the_worker() -> None:
    child = os.fork()
    if child == 0:  # able to gain privileges still, and without the capability
        status = 1
        try:
            os.setresgid(1000, 1000, 1000) if os.geteuid() == 0 else None
            os.setresuid(1000, 1000, 1000) if os.geteuid() == 0 else None
            seccomp.confine()
        except seccomp.NotConfined as error:
            status = 0 if "the kernel took no system-call filter" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# from inside


def refused(number: int, *arguments: int) -> None:
    """A call that must come back with EPERM."""
    assert call(number, *arguments) == errno.EPERM


def _exec() -> None:
    os.execv("/bin/sh", ["sh"])


def _fork() -> None:
    with contextlib.suppress(PermissionError):
        os._exit(OK if os.fork() == 0 else 3)


def _spawn() -> None:
    os.posix_spawn("/bin/sh", ["sh"], {})


def _trace() -> None:
    call(HERE["ptrace"], 16, os.getppid() or 1)


def _read_memory() -> None:
    call(HERE["process_vm_readv"], 1, 0, 0, 0, 0, 0)


def _host_files() -> None:
    for path in (
        "/etc/passwd",
        "/proc/1/environ",
        "/proc/self/fd",
        "/var/lib/egressd/ca/ca.key",
        "/../etc/passwd",
    ):
        with contextlib.suppress(FileNotFoundError):
            os.open(path, os.O_RDONLY)
            raise AssertionError(path)
    with contextlib.suppress(PermissionError):
        os.open("/new", os.O_WRONLY | os.O_CREAT)
        raise AssertionError("a file was made")
    with contextlib.suppress(PermissionError):
        os.listdir("/")
        raise AssertionError("the root was listed")
    acts: list[Callable[[], None]] = [
        lambda: os.mkdir("/d"),
        lambda: os.unlink("/leaf.pem"),
        lambda: os.symlink("/", "/l"),
    ]
    for act in acts:
        with contextlib.suppress(PermissionError):
            act()
            raise AssertionError("the root was changed")


def _sockets() -> None:
    for family, kind, protocol in (
        (socket.AF_INET, socket.SOCK_RAW, 255),
        (socket.AF_INET6, socket.SOCK_RAW, 58),
        (socket.AF_INET, socket.SOCK_DGRAM, 1),
        (socket.AF_PACKET, socket.SOCK_RAW, 3),
        (socket.AF_NETLINK, socket.SOCK_RAW, 0),
        (socket.AF_UNIX, socket.SOCK_STREAM, 0),
        (socket.AF_UNIX, socket.SOCK_DGRAM, 0),
        (socket.AF_VSOCK, socket.SOCK_STREAM, 0),
    ):
        with contextlib.suppress(OSError):
            socket.socket(family, kind, protocol)
            raise AssertionError((family, kind))
    with contextlib.suppress(PermissionError):
        socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        raise AssertionError("a pair of datagram sockets reaches every socket of the host")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        refused(50 if platform.machine() == "x86_64" else 201, sock.fileno(), 1)  # listen


def _namespaces() -> None:
    os.unshare(os.CLONE_NEWUSER)


def _code() -> None:
    with contextlib.suppress(PermissionError):
        mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        raise AssertionError("memory that is written and run")
    held = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    refused(HERE["mprotect"], address, 4096, 5)


def _limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limits in ((soft, hard), (1, hard)):
        with contextlib.suppress(ValueError):  # what Python makes of EPERM here
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            raise AssertionError("a limit was set")


def _signals() -> None:
    for number in (1, -1, os.getpid()):
        refused(62 if platform.machine() == "x86_64" else 129, number, 9)  # kill


def _dumpable() -> None:
    refused(HERE["prctl"], 4, 1, 0, 0, 0)


def _root_again() -> None:
    os.setresuid(0, 0, 0)


def _ring() -> None:
    call(HERE["io_uring_setup"], 8, 0)


def _work() -> None:
    """What a worker does must still work: threads, sockets, time, errors with their tracebacks."""
    said: list[int] = []
    thread = threading.Thread(target=lambda: said.append(1))
    thread.start()
    thread.join()
    assert said == [1]
    with socket.socket() as sock, socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as other:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", 1))
    one, two = socket.socketpair()
    socket.send_fds(one, [b"x"], [two.fileno()])
    data, ancillary, _, _ = two.recvmsg(1, socket.CMSG_SPACE(array.array("i", [0]).itemsize))
    assert data == b"x"
    assert ancillary
    os.urandom(8)


ENDED = {
    "a program": _exec,
    "a program by posix_spawn": _spawn,
    "tracing": _trace,
    "another process' memory": _read_memory,
    "namespaces": _namespaces,
    "another uid": _root_again,
    "io_uring": _ring,
}
REFUSED = {
    "a process": _fork,
    "files": _host_files,
    "sockets": _sockets,
    "code": _code,
    "limits": _limits,
    "signals": _signals,
    "a core": _dumpable,
    "and its own work is not": _work,
}


@pytest.mark.parametrize("rootless", WAYS)
@pytest.mark.parametrize("act", ENDED.values(), ids=ENDED)
def test_who_took_a_worker_over_ends_it_by(
    rootless: bool, act: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    status = captive(act, rootless=rootless)
    if act is _spawn:  # refused its process before it could ask for the program
        assert status == 1
        return
    assert status == KILLED
    assert "a system call that no worker makes" in capfd.readouterr().err


@pytest.mark.parametrize("rootless", WAYS)
@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED)
def test_who_took_a_worker_over_is_refused(rootless: bool, act: Callable[[], None]) -> None:
    assert captive(act, rootless=rootless) == OK
