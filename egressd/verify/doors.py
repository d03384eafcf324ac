"""Probes of the kernel's other doors: sockets that no network namespace holds, rings, devices, settings."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from egressd.verify import kernel
from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried, word
from egressd.verify.scene import Scene

_TIOCSTI = 0x5412
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


@probe(
    "kernel",
    why="vsock reaches the hypervisor and other machines on it, and no network namespace holds it",
    held="no such socket could be opened",
)
def vsock(_scene: Scene) -> Outcome:
    """Open a vsock socket and connect to the hypervisor."""
    try:
        with socket.socket(40, socket.SOCK_STREAM) as sock:
            sock.settimeout(0.5)
            try:
                sock.connect((2, 1))
            except OSError as error:
                return opened(f"a socket could be opened; connecting said {word(error)}")
            return opened("connected to the hypervisor")
    except OSError as error:
        return held(f"refused: {word(error)}")


@probe(
    "kernel",
    why="these families work beside IP: into drivers, key stores and other machines",
    held="no such socket could be opened",
)
def socket_families(_scene: Scene) -> Outcome:
    """Open sockets of families that are neither Unix nor Internet, and netlink sockets other than for routes."""
    ways = {
        "AF_ALG": (38, socket.SOCK_SEQPACKET, 0),
        "AF_BLUETOOTH": (31, socket.SOCK_RAW, 1),
        "AF_CAN": (29, socket.SOCK_RAW, 1),
        "AF_TIPC": (30, socket.SOCK_RDM, 0),
        "AF_RDS": (21, socket.SOCK_SEQPACKET, 0),
        "AF_KEY": (15, socket.SOCK_RAW, 2),
        "AF_NFC": (39, socket.SOCK_SEQPACKET, 0),
        "AF_QIPCRTR": (42, socket.SOCK_DGRAM, 0),
        "netlink audit": (16, socket.SOCK_RAW, 9),
        "netlink connector": (16, socket.SOCK_RAW, 11),
        "netlink netfilter": (16, socket.SOCK_RAW, 12),
        "netlink kernel events": (16, socket.SOCK_RAW, 15),
        "netlink generic": (16, socket.SOCK_RAW, 16),
        "netlink sockets": (16, socket.SOCK_RAW, 4),
    }

    def tries() -> Iterator[str | None]:
        for name, (family, kind, protocol) in ways.items():
            try:
                socket.socket(family, kind, protocol).close()
            except OSError:
                yield None
            else:
                yield name

    return judged(tries(), "families, all refused")


@probe(
    "kernel",
    why="what is asked of a ring no system-call filter sees",
    held="no ring could be set up",
)
def io_uring(_scene: Scene) -> Outcome:
    """Set up an io_uring."""
    try:
        result = kernel.call("io_uring_setup", 4, kernel.buffer(120))
    except kernel.Unknown as error:
        return untried(str(error))
    if result >= 0:
        os.close(result)
        return opened("a ring was set up")
    if -result in _REFUSED:
        return held(f"refused: {kernel.error_name(result)}")
    return opened(f"the call is let through: {kernel.error_name(result)}")


@probe(
    "kernel",
    why="old and wide interfaces, in which holes of the kernel were found again and again",
    held="every call was refused before the kernel looked at its arguments",
)
def kernel_doors(_scene: Scene) -> Outcome:
    """Make calls such as bpf, keyctl, userfaultfd, perf_event_open, module loading and setns, with arguments that do nothing."""
    calls: dict[str, tuple[int | bytes | None, ...]] = {
        "bpf": (0, None, 0),
        "keyctl": (0, -3, 0),
        "add_key": (None, None, None, 0, 0),
        "userfaultfd": (-1,),
        "perf_event_open": (None, -1, -1, -1, 0),
        "open_by_handle_at": (-1, None, 0),
        "setns": (-1, 0),
        "init_module": (None, 0, None),
        "finit_module": (-1, None, 0),
        "syslog": (10, None, 0),
    }

    def tries() -> Iterator[str | None]:
        for name, arguments in calls.items():
            result = kernel.call(name, *arguments)
            yield None if -result in _REFUSED else name

    try:
        return judged(tries(), "calls, all refused")
    except kernel.Unknown as error:
        return untried(str(error))


@probe(
    "kernel",
    why="core_pattern, modprobe and their like name programs that the kernel runs as root outside",
    held="none could be opened for writing",
)
def kernel_settings(_scene: Scene) -> Outcome:
    """Open settings of the kernel for writing, without writing: core_pattern, modprobe, sysrq, cgroup agents, sysfs."""
    paths = [
        "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug",
        "/proc/sys/kernel/hostname", "/proc/sys/fs/suid_dumpable",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ip_unprivileged_port_start",
        "/proc/sys/net/ipv4/ping_group_range", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger",
        "/proc/sys/fs/binfmt_misc/register", "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/release_agent",
        "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/module/kernel/parameters/panic",
    ]  # fmt: skip
    return judged(
        (_openable(path, os.O_WRONLY) for path in paths if os.path.lexists(path)), "settings, all closed"
    )


def _openable(path: str, how: int) -> str | None:
    try:
        os.close(os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError:
        return None
    return f"{path} can be opened"


@probe(
    "kernel",
    why="the kernel's memory holds every secret of the machine; its log tells where to look",
    held="none could be opened for reading",
)
def kernel_memory(_scene: Scene) -> Outcome:
    """Open the kernel's memory, its log and the machine's ports for reading."""
    paths = (
        "/dev/mem",
        "/dev/kmem",
        "/dev/port",
        "/proc/kcore",
        "/dev/kmsg",
        "/proc/kmsg",
        "/sys/kernel/debug/tracing",
    )
    return judged((_openable(path, os.O_RDONLY) for path in paths), "places, all closed")


_COMMON_DEVICES = frozenset({
    "core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero",
    "console",
})  # fmt: skip


@probe(
    "kernel",
    why="a device is hardware: disks hold other people's files, tun and vhost are networks, kvm and fuse are kernel doors",
    held="/dev holds the harmless devices and no other",
)
def devices(_scene: Scene) -> Outcome:
    """List /dev for devices beside null, zero, random, full, tty and the terminal's; none is opened."""
    found = []
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                continue
            special = stat.S_ISBLK(mode) or stat.S_ISCHR(mode)
            plain = path.startswith("/dev/pts/") or (folder == "/dev" and name in _COMMON_DEVICES)
            if special and not plain and os.access(path, os.R_OK):
                found.append(path)
    return (
        opened(f"{len(found)} devices: {listed(sorted(found))}")
        if found
        else held("nothing but the usual few")
    )


@probe(
    "kernel",
    why="a byte pushed into a shared terminal is typed by the operator, after the sandbox has ended",
    held="nothing could be pushed",
)
def terminal_input(_scene: Scene) -> Outcome:
    """Push a byte into a terminal made for this probe (TIOCSTI)."""
    try:
        master, slave = os.openpty()
    except OSError as error:
        return untried(f"no terminal can be made here: {word(error)}")
    try:
        fcntl.ioctl(slave, _TIOCSTI, b"v")
    except OSError as error:
        return held(f"refused: {word(error)}")
    finally:
        os.close(master)
        os.close(slave)
    return opened("a byte was pushed into a terminal")
