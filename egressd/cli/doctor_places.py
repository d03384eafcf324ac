"""Whether the places that the configuration names will do: who owns them, who else can write there, and is there room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from egressd.cli.doctor_host import Entry, Host, Line

if TYPE_CHECKING:  # configuration takes longer to import than the other checks
    from egressd.control.config import Config

_ROOM: Final = 100 << 20


def places_lines(host: Host, config: Config) -> Iterator[Line]:
    """Say of each place whether egressd can use it as whoever runs this; nothing is made."""
    told = f"{config.file}" if config.file is not None else "none: defaults, flags and variables"
    yield Line("configuration", "ok", told)
    yield from _rules(host, config.rules)
    yield from _folder(host, "authority", config.ca.ca, private=True)
    yield from _secret(host, "authority's key", config.ca.key)
    yield from _folder(host, "trust", config.ca.trust, private=False)
    yield from _folder(host, "state", config.state_dir, private=True)
    yield from _folder(host, "control socket", config.control_socket.parent, private=False)
    if isinstance(config.journal, Path):
        yield from _folder(host, "journal", config.journal.parent, private=False)
        free = host.free(str(config.journal))
        if free is not None and free < _ROOM:
            hint = "a journal that cannot be written denies everything: make room, or put it elsewhere (journal:)"
            yield Line("journal's disk", "fail" if free < 1 << 20 else "warn", f"{free >> 20} MiB free", hint)
    yield from _secret(host, "credentials", config.credentials)


def _rules(host: Host, rules: Path) -> Iterator[Line]:
    entry = host.entry(str(rules))
    if entry is None or not entry.folder:
        yield Line(
            "rules",
            "fail",
            f"{rules} is not there",
            "name a folder with profiles/ and services/ (--rules)",
        )
    elif entry.mode & 0o002:
        yield Line(
            "rules",
            "fail",
            f"anybody can write {rules}",
            f"chmod o-w {rules}: what a sandbox can write is no rule",
        )
    else:
        yield Line("rules", "ok", str(rules))


def _folder(host: Host, name: str, path: Path, *, private: bool) -> Iterator[Line]:
    entry = host.entry(str(path))
    if entry is None:
        yield _to_be_made(host, name, path)
    elif not entry.folder:
        yield Line(name, "fail", f"{path} is no folder", "move it out of the way")
    elif entry.uid not in (host.euid, 0):
        yield Line(
            name, "fail", f"{path} belongs to uid {entry.uid}", "run as its owner, or name another place"
        )
    elif _open(entry) or (private and entry.mode & 0o077):
        mode = "700" if private else "o-w,g-w"
        yield Line(
            name,
            "fail" if _open(entry) else "warn",
            f"{path} is open to others ({entry.mode:04o})",
            f"chmod {mode} {path}",
        )
    elif not entry.writable:
        yield Line(name, "fail", f"{path} cannot be written", "run as its owner, or name another place")
    else:
        yield Line(name, "ok", str(path))


def _open(entry: Entry) -> bool:
    """Whether somebody else can put things there; in a sticky folder nobody can exchange what is ours."""
    return bool(entry.mode & 0o022) and not entry.mode & 0o1000


def _to_be_made(host: Host, name: str, path: Path) -> Line:
    for parent in path.parents:
        entry = host.entry(str(parent))
        if entry is not None:
            if entry.folder and entry.writable:
                return Line(name, "ok", f"{path}, made when it is needed")
            hint = f"mkdir -p {path} && chown {host.euid} {path}, or name another place"
            return Line(name, "fail", f"{path} is not there, and {parent} cannot be written", hint)
    return Line(name, "fail", f"{path} has nothing above it", "name an absolute path")


def _secret(host: Host, name: str, path: Path) -> Iterator[Line]:
    entry = host.entry(os.fspath(path))
    if entry is None:
        return
    if entry.uid not in (host.euid, 0):
        yield Line(name, "fail", f"{path} belongs to uid {entry.uid}", f"chown {host.euid} {path}")
    elif entry.mode & 0o077 and name != "credentials":
        yield Line(
            name,
            "fail",
            f"{path} can be read by others ({entry.mode:04o})",
            f"chmod 600 {path}, then egressd ca rotate",
        )
    elif entry.mode & 0o022:
        yield Line(name, "fail", f"{path} can be written by others ({entry.mode:04o})", f"chmod go-w {path}")
    else:
        yield Line(name, "ok", str(path))
