"""From a sandbox's description to bubblewrap's arguments.

bubblewrap starts as the only process of the sandbox's outer user namespace and of its network namespace. It gives the
command a user namespace of its own, so that the command has no power over the network it lives in.
"""

import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import egressd
from egressd.wiring import identity, ruleset, seccomp
from egressd.wiring.errors import WiringError
from egressd.wiring.maker import FIRST_PLAN_DESCRIPTOR
from egressd.wiring.mounts import View, within
from egressd.wiring.spec import SandboxSpec

_SHARED: Final = ("/tmp", "/var/tmp")  # noqa: S108 - hidden, not used
EMPTIED: Final = ("/run", *_SHARED, "/dev", "/proc")
"""Places where hosts keep their sockets and everybody's leavings; the command finds them empty and writable."""

_PRIVATE_HOMES: Final = ("/root", "/home")
_SYSTEM: Final = (
    "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/opt", "/proc", "/root", "/run", "/sbin",
    "/srv", "/sys", "/usr", "/usr/local", "/var", "/var/lib", "/var/log", *_SHARED,
)  # fmt: skip
_PROGRAMS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/boot", "/dev", "/proc", "/sys")
_NEVER_BELOW: Final = ("/boot", "/dev", "/etc", "/proc", "/sys")
_HOST_NETWORK: Final = ("/sys/class/net", "/sys/devices/virtual/net", "/sys/firmware")
"""sysfs shows the host's interfaces and their addresses, whoever looks."""

_ENV: Final = "/usr/bin/env"
INTERACTIVE_SIGNALS: Final = ("INT", "QUIT")
"""What the keyboard sends to everyone in the terminal's foreground group, bubblewrap's outer process included: there
they are ignored, and env(1) gives them back to the command."""

STATUS: Final = FIRST_PLAN_DESCRIPTOR + 1
_SECCOMP: Final = FIRST_PLAN_DESCRIPTOR + 2
_FILES: Final = FIRST_PLAN_DESCRIPTOR + 3


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start one command. `arguments` is for descriptor FIRST_PLAN_DESCRIPTOR, a status pipe for the next one,
    `filter` and `files` for those after it."""

    arguments: bytes
    filter: bytes
    files: tuple[bytes, ...]
    command: tuple[str, ...]


def view(spec: SandboxSpec) -> View:
    """The paths of a sandbox, checked and free of symbolic links. Raises WiringError for what cannot be safe."""
    writable = [_let_in(spec.workspace, "the workspace", spec, writable=True)]
    readonly: list[str] = []
    for bind in spec.binds:
        path = _let_in(bind.path, f"--bind {bind.path}", spec, writable=bind.writable)
        (writable if bind.writable else readonly).append(path)
    result = View(
        writable=tuple(dict.fromkeys(writable)),
        readonly=tuple(dict.fromkeys(path for path in readonly if path not in writable)),
        sockets=tuple(dict.fromkeys(_existing(path, f"--socket {path}") for path in spec.sockets)),
        masks=tuple(dict.fromkeys(os.path.realpath(path) for path in spec.masks)),
        protected=_own_code(),
        hidden=_hidden(spec),
        emptied=EMPTIED,
        replaced=_replaced(spec),
    )
    _check(spec, result)
    return result


def writable(spec: SandboxSpec, path: str) -> bool:
    """Could the sandbox change what is found at `path`, by writing it or anything above or below it?"""
    real = os.path.realpath(path)
    return any(
        within(real, tree) or within(tree, real) for tree in map(os.path.realpath, writable_trees(spec))
    )


def writable_trees(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the paths of the host below which the sandbox can write."""
    return (spec.workspace, *(bind.path for bind in spec.binds if bind.writable))


def shown(spec: SandboxSpec, path: str) -> bool:
    """Could the sandbox see what is at `path` of the host, or what will be where there is nothing yet?"""
    real = os.path.realpath(path)
    # What is not there when the sandbox is made is not masked.
    masks = (os.path.realpath(mask) for mask in spec.masks if os.path.exists(mask))
    if any(within(real, mask) for mask in masks):
        return False
    if any(within(real, tree) for tree in _let_in_trees(spec)):
        return True
    return not any(within(real, place) for place in (*EMPTIED, *_hidden(spec)))


def covering(spec: SandboxSpec, path: str) -> tuple[str, ...]:
    """What to mask so that the file at `path` cannot be seen, not even another one that takes its place by renaming.

    A mask lies over the file that was there: rename(2) over it takes the mask away (detach_mounts, fs/namespace.c). So the
    file's directory is masked as well, where it is one of its own: nothing of the system, and nothing let in lies in it or is
    above it.
    """
    found = [path]
    for place in dict.fromkeys(
        (os.path.dirname(os.path.normpath(path)), os.path.dirname(os.path.realpath(path)))
    ):
        if _stands_apart(spec, os.path.realpath(place)):
            found.append(place)
    return tuple(found)


def _stands_apart(spec: SandboxSpec, place: str) -> bool:
    if place in _SYSTEM or not os.path.isdir(place) or any(within(place, tree) for tree in _PROGRAMS):
        return False
    let_in = _let_in_trees(spec)
    inside = (*let_in, *map(os.path.realpath, (*spec.sockets, *spec.trust, spec.home)), *_own_code())
    return not any(within(one, place) for one in inside) and not any(within(place, tree) for tree in let_in)


def _let_in_trees(spec: SandboxSpec) -> list[str]:
    return [os.path.realpath(path) for path in (spec.workspace, *(bind.path for bind in spec.binds))]


def plan(spec: SandboxSpec, paths: View, command: Sequence[str], *, terminal: bool) -> Plan:
    """How bubblewrap is to start `command`; `terminal`: it gets a terminal of its own. `paths` is what was wired."""
    files, seeds = _files(spec), _seeds(spec, paths)
    arguments = [
        *_NAMESPACES,
        "--hostname",
        spec.hostname,
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
    ]
    arguments += [
        word for path in _present(_HOST_NETWORK) for word in ("--tmpfs", path, "--remount-ro", path)
    ]
    arguments += ["--tmpfs", "/run"]
    arguments += [word for path in _present(_SHARED) for word in ("--perms", "1777", "--tmpfs", path)]
    arguments += [word for path in sorted(paths.hidden) for word in ("--tmpfs", path)]
    arguments += ["--perms", "0700", "--dir", f"/run/user/{identity.INSIDE_UID}"]
    brought = [(path, "--bind") for path in paths.writable]
    brought += [(path, "--ro-bind") for path in (*paths.readonly, *paths.sockets)]
    for path, option in sorted(brought, key=lambda pair: (pair[0].count("/"), pair)):
        arguments += [option, path, path]
    for number, inside in enumerate(files):
        arguments += ["--perms", "0444", "--ro-bind-data", str(_FILES + number), inside]
    for number, inside in enumerate(seeds, len(files)):
        arguments += ["--perms", "0600", "--file", str(_FILES + number), inside]
    arguments += ["--seccomp", str(_SECCOMP), "--json-status-fd", str(STATUS), "--chdir", paths.writable[0]]
    arguments.append("--clearenv")
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{identity.INSIDE_UID}", **spec.env}
    for name, value in environment.items():
        if not name or "=" in name:
            raise WiringError("run", f"{name!r} is no name for an environment variable")
        arguments += ["--setenv", name, value]
    return Plan(
        _joined(arguments),
        seccomp.program(),
        (*files.values(), *seeds.values()),
        _shimmed(command, terminal=terminal),
    )


_NAMESPACES: Final = (
    "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--uid", str(identity.INSIDE_UID), "--gid", str(identity.INSIDE_UID), "--cap-drop", "ALL", "--die-with-parent",
)  # fmt: skip


def _present(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]


def _joined(arguments: Sequence[str]) -> bytes:
    words = [os.fsencode(word) for word in arguments]
    for word in words:
        if b"\0" in word:
            raise WiringError("run", f"a NUL byte in {os.fsdecode(word)!r}")
    return b"".join(word + b"\0" for word in words)


def _shimmed(command: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """The command behind env(1), whose exit statuses 126 and 127 are the promised ones: bubblewrap's is always 1."""
    if not command or not command[0]:
        raise WiringError("run", "no command given")
    _joined(command)  # refuses what cannot be an argument
    restored = tuple(f"--default-signal={name}" for name in INTERACTIVE_SIGNALS) if terminal else ()
    if "=" in command[0]:
        # env would take this for a variable.
        return (_ENV, *restored, "/bin/sh", "-c", 'exec "$0" "$@"', *command)
    return (_ENV, *restored, "--", *command)


def _let_in(path: str, what: str, spec: SandboxSpec, *, writable: bool) -> str:
    real = _existing(path, what)
    home = os.path.realpath(spec.home)
    if real == "/" or (writable and real in _SYSTEM):
        raise WiringError("run", f"{what} is {real}", "choose a project's own directory")
    if writable and any(within(real, system) for system in _NEVER_BELOW):
        raise WiringError(
            "run", f"{what} lies in a part of the system that must not change", "choose another place"
        )
    if writable and what == "the workspace" and within(home, real):
        hint = "it holds keys and credentials: change to a project's own directory first"
        raise WiringError("run", f"{what} is the home directory or lies above it", hint)
    return real


def _existing(path: str, what: str) -> str:
    if not os.path.isabs(path):
        raise WiringError("run", f"{what} is not an absolute path")
    if not os.path.exists(path):
        raise WiringError("run", f"{what} does not exist")
    return os.path.realpath(path)


def _hidden(spec: SandboxSpec) -> tuple[str, ...]:
    home = os.path.realpath(spec.home)
    found = [path for path in dict.fromkeys((*_PRIVATE_HOMES, home)) if path != "/" and os.path.isdir(path)]
    return tuple(found)


def _own_code() -> tuple[str, ...]:
    """What the next egressd process will execute. A checkout or a .venv may lie in the workspace."""
    paths = sysconfig.get_paths()
    found = [str(Path(egressd.__file__).parent), paths["stdlib"], paths["purelib"], paths["platlib"]]
    if sys.prefix != sys.base_prefix:
        found.append(sys.prefix)
    else:
        found.append(str(Path(sys.executable).parent))
    return tuple(dict.fromkeys(os.path.realpath(path) for path in found))


def _check(spec: SandboxSpec, paths: View) -> None:
    for tree in paths.writable:
        for code in paths.protected:
            if within(tree, code):
                raise WiringError(
                    "run", f"{tree} lies inside egressd's own installation", "choose another place"
                )
    for given, real in zip(spec.masks, map(os.path.realpath, spec.masks), strict=True):
        _check_mask(given, real, paths)


def _check_mask(given: str, real: str, paths: View) -> None:
    if any(within(tree, real) for tree in (*paths.writable, *paths.readonly)):
        raise WiringError("run", f"{real} must stay hidden, and what is to be let in lies in it")
    within_reach = any(within(os.path.normpath(given), tree) or within(real, tree) for tree in paths.writable)
    if within_reach and not os.path.lexists(real):
        raise WiringError(
            "run", f"{given} does not exist, and the sandbox could create it", "create it or move it"
        )
    linked = os.path.normpath(given) != real and any(
        within(os.path.normpath(given), t) for t in paths.writable
    )
    if linked:
        hint = "name the place itself, or keep it outside"
        raise WiringError("run", f"{given} is reached through a link that the sandbox could change", hint)


def _replaced(spec: SandboxSpec) -> tuple[tuple[str, str], ...]:
    found = []
    for inside, outside in spec.trust.items():
        if not os.path.isdir(outside):
            continue
        real = os.path.realpath(inside)
        if not os.path.isdir(real) or real == "/" or _on_tmpfs(real, spec):
            raise WiringError(
                "run", f"{inside} is no directory of the system whose content could be replaced"
            )
        found.append((real, _existing(outside, f"what replaces {inside}")))
    return tuple(found)


def _files(spec: SandboxSpec) -> dict[str, bytes]:
    """Files whose content the sandbox sees instead of the host's: {path inside: content}.

    A link such as /etc/resolv.conf → /run/systemd/resolve/stub-resolv.conf is followed by name, because its target lies
    in a directory that is emptied: the file is put where the link will lead.
    """
    files: dict[str, bytes] = {}
    wanted = {
        "/etc/resolv.conf": f"nameserver {ruleset.RESOLVER}\n".encode(),
        "/etc/hosts": f"127.0.0.1 localhost {spec.hostname}\n::1 localhost ip6-localhost ip6-loopback\n".encode(),
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
        b"networks: files\nprotocols: files\nservices: files\nethers: files\nrpc: files\n",
        "/etc/passwd": _accounts("/etc/passwd", f"{spec.user}:x:{{id}}:{{id}}::{spec.home}:/bin/sh"),
        "/etc/group": _accounts("/etc/group", f"{spec.user}:x:{{id}}:"),
    }
    for inside, content in wanted.items():
        target = os.path.realpath(inside)
        # Without the file libc asks 127.0.0.1, where the same resolver listens.
        if os.path.exists(target) or _on_tmpfs(target, spec):
            files[target] = content
    for inside, outside in spec.trust.items():
        if os.path.isdir(outside):
            continue
        target = os.path.realpath(inside)
        if not os.path.exists(target) and not _on_tmpfs(target, spec):
            raise WiringError("run", f"{inside} does not exist, so nothing can be put in its place")
        files[target] = _content(outside)
    return files


def _seeds(spec: SandboxSpec, paths: View) -> dict[str, bytes]:
    """Files that the sandbox begins with in its empty home: {path inside: content}.

    Never in a tree that is let in: bubblewrap would write into the host's own file.
    """
    home = os.path.realpath(spec.home)
    trees = (*paths.writable, *paths.readonly, *paths.sockets)
    inside = {os.path.join(home, name): outside for name, outside in spec.seeds.items()}
    return {
        path: _content(outside)
        for path, outside in inside.items()
        if home in paths.hidden and not any(within(path, tree) for tree in trees)
    }


def _content(outside: str) -> bytes:
    try:
        return Path(outside).read_bytes()
    except OSError as error:
        raise WiringError.from_os(f"read {outside}", error) from error


def _on_tmpfs(path: str, spec: SandboxSpec) -> bool:
    return any(within(path, directory) for directory in ("/run", *_SHARED, *_hidden(spec)))


def _accounts(path: str, line: str) -> bytes:
    """The host's table with the sandbox's own line in place of whoever has its id or name."""
    own = line.format(id=identity.INSIDE_UID)
    name = own.split(":", 1)[0]
    try:
        rows = Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        rows = []
    kept = [
        row for row in rows if row.split(":")[2:3] != [str(identity.INSIDE_UID)] and row.split(":")[0] != name
    ]
    return "\n".join([*kept, own, ""]).encode(errors="surrogateescape")
