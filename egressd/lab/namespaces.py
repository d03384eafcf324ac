"""The lab's namespaces: made by the world's process in itself, held by its descriptors, gone when it is gone.

No name under /run/netns, no link in the machine's own namespace: a killed lab leaves nothing to clean up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from egressd.lab import topology

_MS_BIND = 0x1000  # sys/mount.h
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18


class CannotBuild(Exception):
    """A command that makes the lab failed; the text names it and what it said."""


@dataclass(frozen=True)
class Namespaces:
    """Descriptors of the three network namespaces; the calling process itself is in `world`."""

    world: int
    host: int
    open: int


def enter_user_namespace() -> None:
    """Makes the calling, single-threaded process root of a new user namespace that maps its own uid and gid
    alone.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        os.unshare(os.CLONE_NEWUSER)
        # Without setgroups denied an unprivileged process may not map a gid (user_namespaces(7)).
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise CannotBuild(f"unshare(CLONE_NEWUSER) and its maps: {error}") from error


def make_namespaces() -> Namespaces:
    """Makes the three network namespaces and a private mount namespace, wires and addresses them."""
    try:
        os.unshare(os.CLONE_NEWNS | os.CLONE_NEWNET)
        mount(None, "/", _MS_REC | _MS_PRIVATE)
        world = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        host = _another_network()
        open_ = _another_network()
        os.setns(world, os.CLONE_NEWNET)
    except OSError as error:
        raise CannotBuild(f"unshare(CLONE_NEWNS | CLONE_NEWNET): {error}") from error
    made = Namespaces(world, host, open_)
    script = topology.world_links(f"/proc/self/fd/{host}", f"/proc/self/fd/{open_}")
    command(["ip", "-batch", "-"], script, pass_fds=(host, open_))
    for place, leaf, addresses in (("host", host, topology.HOST), ("open", open_, topology.OPEN)):
        os.setns(leaf, os.CLONE_NEWNET)
        command(["ip", "-batch", "-"], topology.leaf_links(place, addresses))
    _allow_ping()
    os.setns(world, os.CLONE_NEWNET)
    command(["iptables-restore"], topology.world_ruleset(4))
    command(["ip6tables-restore"], topology.world_ruleset(6))
    return made


def mount(source: str | None, target: str, flags: int) -> None:
    """mount(2) without a file system type: binds and propagation. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = None if source is None else source.encode()
    if libc.mount(encoded, target.encode(), None, ctypes.c_ulong(flags), None) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"mount {source} on {target}: {os.strerror(errno)}")


def bind_configuration(folder: Path) -> None:
    """Lays resolv.conf, hosts and nsswitch.conf from `folder` over the machine's, in this mount namespace
    alone.
    """
    for name in ("resolv.conf", "hosts", "nsswitch.conf"):
        # A symbolic link (systemd-resolved's) is followed: a mount cannot lie on the link itself.
        target = os.path.realpath(f"/etc/{name}")
        if not os.path.exists(target):
            if name == "nsswitch.conf":
                continue  # its absence means "files dns", which is what ours says
            raise CannotBuild(
                f"/etc/{name} leads to {target}, which does not exist, so nothing can be laid over it"
            )
        try:
            mount(str(folder / name), target, _MS_BIND)
        except OSError as error:
            raise CannotBuild(str(error)) from error


def write_configuration(folder: Path) -> None:
    """Writes what `bind_configuration` lays over the machine's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolv.conf").write_text(f"nameserver {topology.DNS}\noptions timeout:2 attempts:1\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {os.uname().nodename}\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n")


def inhabitants(inodes: set[int]) -> list[int]:
    """The pids (but the caller's) whose network namespace is one of `inodes`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                inside = os.stat(f"/proc/{entry}/ns/net").st_ino in inodes
            except OSError:  # gone meanwhile, or somebody else's process, and so none of the lab's
                continue
            if inside:
                found.append(int(entry))
    return found


def command(argv: list[str], script: str, pass_fds: tuple[int, ...] = ()) -> None:
    """Runs one set-up command with `script` on its input; raises CannotBuild with its words."""
    environment = {"PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, input=script, env=environment, pass_fds=pass_fds, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{argv[0]}: {error}") from error
    if done.returncode != 0:
        raise CannotBuild(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")


def _another_network() -> int:
    os.unshare(os.CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _allow_ping() -> None:
    """Lets group 0, the one group that every lab maps, open ICMP echo sockets in the current network
    namespace.
    """
    try:
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")
    except OSError:
        # Then ping needs its file capability, as on most machines; the file is read-only in some containers.
        return
