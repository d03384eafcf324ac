"""Where things live when nobody says otherwise: the system's places for root, the user's own for others.

The XDG base directory specification says where a user's own places are; a variable that does not hold an
absolute path counts as not set.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # certificates take longer to import than `check` should
    from egressd.control.ca import CaPaths


_SYSTEM = Path("/etc/egressd")


@dataclass(frozen=True, slots=True)
class Paths:
    """Every default place; nothing here has been looked at or made."""

    config: Path
    rules: Path
    credentials: Path
    ca: CaPaths
    journal: Path
    state: Path
    control_socket: Path


def default_paths(environ: Mapping[str, str], euid: int) -> Paths:
    """Return the places of a system installation for root, and those of a rootless one for any other uid."""
    return system_paths() if euid == 0 else rootless_paths(environ, euid)


def config_folder(environ: Mapping[str, str], euid: int) -> Path:
    """Return the folder of egressd.yaml and credentials.yaml, and of the rules."""
    return _SYSTEM if euid == 0 else _xdg(environ, "XDG_CONFIG_HOME", _home(environ, euid) / ".config")


def system_paths() -> Paths:
    """Return the places of a system or container installation."""
    from egressd.control.ca import CaPaths

    return Paths(
        config=_SYSTEM / "egressd.yaml",
        rules=_SYSTEM / "rules",
        credentials=_SYSTEM / "credentials.yaml",
        ca=CaPaths.system(),
        journal=Path("/var/log/egressd/journal.jsonl"),
        state=Path("/var/lib/egressd/state"),
        control_socket=Path("/run/egressd/control.sock"),
    )


def rootless_paths(environ: Mapping[str, str], euid: int) -> Paths:
    """Return the places below the user's XDG directories.

    Without XDG_RUNTIME_DIR the control socket is beside the state.
    """
    from egressd.control.ca import CaPaths

    home = _home(environ, euid)
    config = config_folder(environ, euid)
    data = _xdg(environ, "XDG_DATA_HOME", home / ".local/share")
    state = _xdg(environ, "XDG_STATE_HOME", home / ".local/state")
    return Paths(
        config=config / "egressd.yaml",
        rules=config / "rules",
        credentials=config / "credentials.yaml",
        ca=CaPaths(data / "ca", data / "trust"),
        journal=state / "journal.jsonl",
        state=state,
        control_socket=_xdg(environ, "XDG_RUNTIME_DIR", state.parent) / "control.sock",
    )


def _xdg(environ: Mapping[str, str], name: str, fallback: Path) -> Path:
    given = Path(environ.get(name, ""))
    return (given if given.is_absolute() else fallback) / "egressd"


def _home(environ: Mapping[str, str], euid: int) -> Path:
    home = Path(environ.get("HOME", ""))
    if home.is_absolute():
        return home
    try:
        return Path(pwd.getpwuid(euid).pw_dir)
    except KeyError:  # a uid without an account, as containers use
        return Path(os.sep)
