"""Probes of power: who we are in here, and what the kernel would let us change."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator

from egressd.verify import kernel
from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried
from egressd.verify.scene import Scene

_SIOCGIFMTU, _SIOCSIFMTU = 0x8921, 0x8922  # linux/sockios.h
_SO_MARK, _IP_TRANSPARENT = 36, 19
_TOOLS = "/usr/sbin:/sbin:/usr/bin:/bin"
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO",
    "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
    "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG",
    "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
)  # fmt: skip
"""linux/capability.h, in order."""


def status(process: str = "self") -> dict[str, str]:
    """The fields of /proc/PID/status."""
    with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as lines:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@probe(
    "privilege",
    why="a capability is a part of root's power; NET_ADMIN and NET_RAW undo the wiring",
    held="all five capability sets are empty",
)
def capabilities(_scene: Scene) -> Outcome:
    """Read the capability sets that this process has, could have, and could pass on."""
    found = []
    fields = status()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        value = int(fields.get(name, "0"), 16)
        if value:
            names = [each for bit, each in enumerate(_CAPABILITIES) if value >> bit & 1]
            found.append(f"{name}: {' '.join(names[:6])}{' ...' if len(names) > 6 else ''}")
    return opened(listed(found)) if found else held("all five sets are empty")


@probe(
    "privilege",
    why="without it, any program with the set-uid bit makes root of whoever starts it",
    held="no_new_privs is set, so that no program can give more than its caller has",
)
def no_new_privileges(_scene: Scene) -> Outcome:
    """Read whether no_new_privs is set (prctl(2))."""
    value = status().get("NoNewPrivs")
    if value is None:
        return untried("this kernel does not say")
    return held("it is set") if value == "1" else opened("it is not set")


@probe(
    "privilege",
    why="the filter closes what lies beside the namespaces: vsock, io_uring, set-uid bits, old kernel doors",
    held="a system-call filter is in force",
)
def seccomp(_scene: Scene) -> Outcome:
    """Read whether a system-call filter is in force (seccomp(2))."""
    fields = status()
    if "Seccomp" not in fields:
        return untried("this kernel does not say")
    return held("a filter is in force") if fields["Seccomp"] == "2" else opened("no filter is in force")


@probe(
    "privilege",
    why="a capability-free uid 0 of the host still writes what root owns; egressd's own uid owns its files",
    held="no other uid or gid could be taken, by any of the calls",
)
def other_ids(scene: Scene) -> Outcome:
    """Become uid 0, egressd's uids and a stranger's, by setuid, setresuid, setgid and setgroups."""

    def become(change: Callable[[], None]) -> Callable[[], str | None]:
        def attempt() -> str | None:
            try:
                change()
            except OSError:
                return None
            return "done"

        return attempt

    def tries() -> Iterator[str | None]:
        mine = {os.getuid(), os.geteuid()}
        if 0 in mine:
            yield "this process has uid 0"
        for uid in scene.uids:
            ways: dict[str, Callable[[], None]] = {
                "setuid": lambda uid=uid: os.setuid(uid),  # type: ignore[misc]  # bound now
                "setresuid": lambda uid=uid: os.setresuid(uid, uid, uid),  # type: ignore[misc]
                "setgid": lambda uid=uid: os.setgid(uid),  # type: ignore[misc]
                "setgroups": lambda uid=uid: os.setgroups([uid]),  # type: ignore[misc]
            }
            for name, way in ways.items():
                if uid not in mine or name == "setgroups":
                    done = kernel.in_child(become(way))
                    yield done and f"{name}({uid})"

    return judged(tries(), "calls, all refused")


@probe(
    "privilege",
    why="a raw socket writes packets as it likes, whoever they claim to come from",
    held="no raw socket could be opened",
)
def raw_sockets(_scene: Scene) -> Outcome:
    """Open raw IP sockets of both families."""
    kinds = {"ICMP": 1, "TCP": 6, "UDP": 17, "ICMPv6": 58, "any": 255}
    ways = [
        (f"IPv{version} {name}", family, socket.SOCK_RAW, number)
        for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6))
        for name, number in kinds.items()
    ]
    return judged((_socket(*way) for way in ways), "kinds of socket, all refused")


@probe(
    "privilege",
    why="a packet socket writes to the device itself, before any packet filter",
    held="no packet socket could be opened",
)
def packet_sockets(_scene: Scene) -> Outcome:
    """Open packet sockets and express data path sockets, which work below IP."""
    ways = [
        ("AF_PACKET raw", 17, socket.SOCK_RAW, 0x0300),
        ("AF_PACKET datagram", 17, socket.SOCK_DGRAM, 0x0300),
        ("AF_XDP", 44, socket.SOCK_RAW, 0),
    ]
    return judged((_socket(*way) for way in ways), "kinds of socket, all refused")


def _socket(name: str, family: int, kind: int, protocol: int) -> str | None:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError:
        return None
    return f"{name}: opened"


@probe(
    "privilege",
    why="who may change devices, routes and marks makes a way round the rules",
    held="nothing of the network could be changed",
)
def network_administration(scene: Scene) -> Outcome:
    """Set the loopback's MTU to what it is, mark a socket, make one transparent, open the packet filter's netlink."""

    def mtu() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            wanted = array.array("B", struct.pack("16s16x", b"lo") + bytes(8))
            fcntl.ioctl(sock, _SIOCGIFMTU, wanted)
            fcntl.ioctl(sock, _SIOCSIFMTU, wanted)

    def option(level: int, number: int) -> Callable[[], None]:
        def attempt() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.setsockopt(level, number, 1)

        return attempt

    ways = {
        "setting a device's MTU": mtu,
        "SO_MARK": option(socket.SOL_SOCKET, _SO_MARK),
        "IP_TRANSPARENT": option(socket.SOL_IP, _IP_TRANSPARENT),
    }
    if (
        scene.wiring == "namespace"
    ):  # a container's maker may let it be opened: nothing can be done by it without power
        ways["the packet filter's netlink"] = lambda: socket.socket(16, socket.SOCK_RAW, 12).close()
    return judged((_allowed(name, way) for name, way in ways.items()), "ways, all refused")


def _allowed(name: str, way: Callable[[], None]) -> str | None:
    try:
        way()
    except OSError:
        return None
    return f"{name} is allowed"


@probe(
    "privilege",
    why="rules that can be flushed are no rules",
    held="no packet rule could be added, and so none removed",
)
def packet_rules(scene: Scene) -> Outcome:
    """Add an empty chain to the packet filter by its own tools, and take it away again; add nothing else."""
    chain = f"VERIFY-{scene.nonce[:12]}"
    tools = {
        tool: ([tool, "-N", chain], [tool, "-X", chain])
        for tool in ("iptables", "ip6tables", "iptables-legacy", "iptables-nft")
    }
    tools["nft"] = (
        ["nft", "add", "table", "inet", chain],
        ["nft", "delete", "table", "inet", chain],
    )
    present = {tool: ways for tool, ways in tools.items() if shutil.which(tool, path=_TOOLS)}
    if not present:
        return untried("no iptables and no nft is installed here; network-administration tries what they use")

    def tries() -> Iterator[str | None]:
        for tool, (add, remove) in present.items():
            done = _run(add)
            if done:
                _run(remove)
            yield f"{tool} changed the rules" if done else None

    return judged(tries(), "tools, all refused")


def _run(command: list[str]) -> bool:
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=5,
            env={"PATH": _TOOLS},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode == 0


_SPACES = {
    "user": 0x10000000, "mount": 0x00020000, "network": 0x40000000, "pid": 0x20000000, "ipc": 0x08000000,
    "uts": 0x04000000, "cgroup": 0x02000000, "time": 0x00000080, "user and network": 0x50000000,
}  # fmt: skip


@probe(
    "privilege",
    why="in a user namespace of its own a process is root again, with all the kernel's doors that root may use",
    held="no namespace could be made",
)
def nested_namespaces(_scene: Scene) -> Outcome:
    """Make new user, network, mount and other namespaces, by unshare and by clone3."""

    def unshare(flag: int) -> Callable[[], str | None]:
        return lambda: None if kernel.call("unshare", flag) < 0 else "made"

    def clone3() -> str | None:
        # struct clone_args (linux/sched.h): flags, three pointers, exit signal SIGCHLD
        arguments = struct.pack("=8Q", kernel.CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0)
        result = kernel.call("clone3", arguments, len(arguments))
        if result == 0:
            os._exit(0)
        return None if result < 0 else "made"

    def tries() -> Iterator[str | None]:
        for name, flag in _SPACES.items():
            made = kernel.in_child(unshare(flag))
            yield made and f"a new {name} namespace"
        made = kernel.in_child(clone3)
        yield made and "a new user namespace by clone3"

    return judged(tries(), "ways, all refused")


@probe(
    "privilege",
    why="who may mount can uncover what was hidden and lay a file of his own over another",
    held="nothing could be mounted",
)
def mounts(_scene: Scene) -> Outcome:
    """Mount a tmpfs, a new /proc, an overlay and others over a fresh directory of our own, and take each away again."""
    place = tempfile.mkdtemp(prefix="verify-")
    kinds = ("tmpfs", "proc", "sysfs", "devpts", "mqueue", "cgroup2", "overlay")

    def tries() -> Iterator[str | None]:
        for kind in kinds:
            done = kernel.mount("none", place, kind) == 0
            if done:
                kernel.unmount(place)
            yield f"mounted a {kind}" if done else None

    try:
        return judged(tries(), "kinds, all refused")
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(place)


@probe(
    "privilege",
    why="a wrong clock makes expired certificates good again, and records lie",
    held="the clock could not be touched",
)
def clock(_scene: Scene) -> Outcome:
    """Set the clock's tick to what it is (adjtimex), which needs the same power as setting the time."""
    # struct timex (linux/timex.h): modes is the first word, and 0 reads; ADJ_TICK writes the tick, which is 88 bytes in.
    timex = kernel.buffer(256)
    if kernel.call("adjtimex", timex) < 0:
        return held("it can not even be read")
    struct.pack_into("=I", timex, 0, 0x4000)
    result = kernel.call("adjtimex", timex)
    return held(f"refused: {kernel.error_name(result)}") if result < 0 else opened("it can be set")


@probe(
    "privilege",
    why="a workspace may belong to root on disk: a set-uid program left there is root for whoever starts it outside",
    held="no file with the bit could be made, by any call",
)
def setuid_bits(scene: Scene) -> Outcome:
    """Make a file in the workspace with the set-uid or set-gid bit, by chmod, fchmod, open and mknod; then remove it."""
    path = os.path.join(os.getcwd(), f".verify-{scene.nonce}")

    def chmod(mode: int) -> Callable[[], None]:
        def attempt() -> None:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
            os.chmod(path, mode)

        return attempt

    def create() -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o4755))

    ways: dict[str, Callable[[], None]] = {
        "chmod u+s": chmod(0o4755),
        "chmod g+s": chmod(0o2755),
        "open with u+s": create,
        "mknod with u+s": lambda: os.mknod(path, 0o104755),
    }

    def tries() -> Iterator[str | None]:
        for name, way in ways.items():
            try:
                way()
                made = os.stat(path).st_mode & 0o6000
            except OSError:
                made = 0
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            yield f"{name} works" if made else None

    if not os.access(os.getcwd(), os.W_OK):
        return untried("the workspace cannot be written")
    return judged(tries(), "ways, all refused")
