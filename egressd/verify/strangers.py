"""Probes of strangers: the host's own services and sockets, and the sandboxes beside this one."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterator

from egressd.verify import wire
from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried
from egressd.verify.scene import Scene

_WALK_ENTRIES, _WALK_SECONDS = 100_000, 8.0
_WALKED_FIRST = ("/run", "/tmp", "/var/tmp", "/dev", "/var/run")  # noqa: S108 - where sockets are
_NEVER_WALKED = ("/proc", "/sys", "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/boot")
_WELL_KNOWN = (
    "/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock",
    "/run/podman/podman.sock", "/run/user/{uid}/podman/podman.sock", "/run/user/{uid}/docker.sock",
    "/run/buildkit/buildkitd.sock", "/run/dbus/system_bus_socket", "/run/user/{uid}/bus", "/run/systemd/private",
    "/run/systemd/journal/stdout", "/run/systemd/journal/socket", "/run/systemd/notify", "/dev/log", "/run/nscd/socket",
    "/run/systemd/resolve/io.systemd.Resolve", "/run/avahi-daemon/socket", "/run/cups/cups.sock", "/run/snapd.socket",
    "/run/libvirt/libvirt-sock", "/run/lxd.socket", "/tmp/.X11-unix/X0", "/run/user/{uid}/wayland-0",  # noqa: S108 - a usual place
    "/run/user/{uid}/pulse/native", "/run/user/{uid}/pipewire-0", "/run/user/{uid}/gnupg/S.gpg-agent",
    "/run/user/{uid}/keyring/control", "/run/pcscd/pcscd.comm", "/run/tailscale/tailscaled.sock", "/run/uuidd/request",
    "/run/postgresql/.s.PGSQL.5432", "/run/mysqld/mysqld.sock", "/run/vault/agent.sock",
)  # fmt: skip
_ABSTRACT = (
    "/tmp/.X11-unix/X0",  # noqa: S108 - a name
    "/tmp/.ICE-unix/1",  # noqa: S108
    "/org/freedesktop/systemd1/notify",
    "/containerd-shim/moby.sock",
)


@probe(
    "neighbours",
    why="what listens on the host's loopback trusts whoever reaches it: databases, notebooks, agents' own tools",
    held="the host's listener was out of reach, on its loopback and on its addresses, directly and by the proxy",
)
def host_services(scene: Scene) -> Outcome:
    """Connect to a listener of the host's, on its loopback and on its own addresses, directly and by egressd's proxy."""
    if not any(scene.host_ports):
        return untried("no listener of the host's is known")
    places = ["127.0.0.1", "::1", *scene.host_addresses]
    return judged(_reach(scene, places, scene.host_ports), "tries, none of which reached it")


@probe(
    "neighbours",
    why="one sandbox that reaches another uses its rules, or talks to what runs in it",
    held="the other sandbox's listener was out of reach",
)
def neighbour_services(scene: Scene) -> Outcome:
    """Connect to a listener in another sandbox, on its loopback and on its fixed addresses, directly and by the proxy."""
    if not any(scene.neighbour_ports):
        return untried("there is no second sandbox")
    return judged(
        _reach(scene, scene.neighbour_addresses, scene.neighbour_ports), "tries, none of which reached it"
    )


def _reach(scene: Scene, addresses: list[str], ports: list[int]) -> Iterator[str | None]:
    token = scene.neighbour_token.encode()
    for address in addresses:
        port = ports[1 if ":" in address else 0]
        host = f"[{address}]" if ":" in address else address
        data = wire.request(host)
        yield f"{address} port {port}" if token in wire.tcp(address, port, data, 0.5).received else None
        through = any(token in talk.received for talk in wire.by_proxy(host, port, data))
        yield f"{address} port {port} by the proxy" if through else None


@probe(
    "neighbours",
    why="whoever owns the container engine's, the bus's or the agent's socket acts as its user outside: docker.sock is root",
    held="no socket of the host's could be found, at its usual place or by looking",
)
def host_sockets(scene: Scene) -> Outcome:
    """Connect to the Unix sockets of container engines, buses, agents, displays and databases; look for any other in every
    folder but the system's, and among the mounts.
    """
    uid = str(os.getuid())
    known = [path.replace("{uid}", each) for path in _WELL_KNOWN for each in {uid, "0", "1000"}]
    wanted = [*scene.sockets, *known, *_named_by_environment(), *_mounted()]
    found = {path: connects(path) for path in dict.fromkeys(wanted)}
    walked, seen, whole = _walk()
    for path in walked:
        found.setdefault(path, connects(path) or "can be seen")
    through = [f"{path} {what}" for path, what in found.items() if what]
    if through:
        return opened(listed(through))
    return held(f"{len(found)} usual places, {seen} files{'' if whole else ' and no further'}: none")


def connects(path: str) -> str | None:
    """What a socket of either kind at a path does, or None when there is none to be reached."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.settimeout(0.5)
            try:
                sock.connect(path)
            except OSError:
                continue
            return "answers"
    return None


def _named_by_environment() -> Iterator[str]:
    """The sockets that variables such as SSH_AUTH_SOCK and DBUS_SESSION_BUS_ADDRESS name."""
    for value in os.environ.values():
        for text in re.findall(r"(?:^|=|unix://|unix:path=)(/[^,;=\s]+)", value):
            try:
                if stat.S_ISSOCK(os.stat(text).st_mode):
                    yield text
            except (OSError, ValueError):
                continue


def _mounted() -> Iterator[str]:
    """The sockets that were mounted where they are."""
    for path in mount_points():
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                yield path
        except (OSError, ValueError):
            continue


def mount_points() -> set[str]:
    """Where something is mounted."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        return {_unescaped(row.split(" ")[4]) for row in table}


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text


def _walk() -> tuple[list[str], int, bool]:
    """Every socket file outside the system's folders, how many files were looked at, and whether all were."""
    found: list[str] = []
    seen, deadline = 0, time.monotonic() + _WALK_SECONDS
    queue = list(dict.fromkeys((*_WALKED_FIRST, os.path.expanduser("~"), os.getcwd(), "/")))
    first = set(queue)
    for folder in queue:
        if seen > _WALK_ENTRIES or time.monotonic() > deadline:
            return found, seen, False
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            seen += 1
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.path not in _NEVER_WALKED and entry.path not in first:
                        queue.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and stat.S_ISSOCK(os.lstat(entry.path).st_mode):
                    found.append(entry.path)
            except OSError:
                continue
    return found, seen, True


@probe(
    "neighbours",
    why="an abstract socket has no file that a mount could hide; only the network namespace holds it (CVE-2020-15257)",
    held="no abstract socket but our own exists in here",
)
def abstract_sockets(scene: Scene) -> Outcome:
    """Connect to abstract Unix sockets of the host's and of another sandbox's, and list those that the kernel names."""
    wanted = [*scene.abstract, *_ABSTRACT]
    found = [f"@{name} answers" for name in wanted if connects("\0" + name)]
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
            names = {row.split()[7] for row in table if len(row.split()) == 8}
    except OSError:
        names = set()
    found += [f"{name} is listed" for name in sorted(names) if name.startswith("@")]
    return opened(listed(found)) if found else held(f"{len(wanted)} names, none of which is there")


@probe(
    "neighbours",
    why="a folder that two sandboxes share is a way between them",
    held="no file of the other sandbox's or of the host's was there",
)
def shared_files(scene: Scene) -> Outcome:
    """Look in /tmp, /var/tmp, /dev/shm and /run for files that another sandbox and the host left there for this probe."""
    if not scene.neighbour_files:
        return untried("nobody left a file to look for")
    return judged(
        (f"{path} is there" if os.path.lexists(path) else None for path in scene.neighbour_files),
        "files, none there",
    )


@probe(
    "neighbours",
    why="shared memory and message queues pass every file system and network by",
    held="the other sandbox's shared memory was not there",
)
def shared_memory(scene: Scene) -> Outcome:
    """Look for System V shared memory that another sandbox made for this probe."""
    if not scene.neighbour_memory:
        return untried("nobody made any to look for")
    with open("/proc/sysvipc/shm", encoding="ascii", errors="replace") as table:
        keys = {int(row.split()[0]) for row in table if row.split()[0].lstrip("-").isdigit()}
    return opened("it is there") if scene.neighbour_memory in keys else held("it is not there")
