"""What a daemon leaves behind when it is killed, kept on disk so that its successor can take it down.

The folder `state_dir` belongs to one daemon at a time, by a lock that ends with its process. In it are a number that grows with
every start, from which generations are made, and a file for each living sandbox with the traces that its wiring makes outside
this process. Nothing here is a secret, and nothing here is a sandbox's: all that a process alone holds (sockets, workers,
tokens, leases) ends with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_FILE: Final = re.compile(r"(sbx-[0-9a-f]{20})\.json\Z")
_MOST_BYTES: Final = 64 * 1024
_STARTS: Final = 2**20
"""Starts that are told apart; with 32 bits for the sandboxes of each, a generation is exact in every JSON reader."""


class StateError(Exception):
    """The state directory cannot be used; `hint` says what a person can do."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Remains:
    """A sandbox that a killed daemon left: what its wiring made for it, by the wiring's own words."""

    id: str
    wiring: str
    profile: str
    traces: Mapping[str, str]


class Estate:
    """The folder, locked for as long as this process lives."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if there is none, and lock it; raises StateError."""
        self._sandboxes = folder / "sandboxes"
        self._count = 0
        try:
            self._sandboxes.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(
                folder / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise StateError(
                f"{folder}: {error.strerror}", "state_dir must be a folder of egressd's own"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StateError(f"{folder}/serve.lock: {error.strerror}") from None
            raise StateError(
                f"another daemon has {folder} (pid {holder or 'unknown'})", "one daemon for one state_dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        try:
            self._start = self._next_start(folder / "starts")
        except OSError as error:
            self.close()
            raise StateError(f"{folder}/starts: {error.strerror}") from None

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._lock)

    def next_generation(self) -> int:
        """Return a number greater than every one before it, other starts included."""
        self._count += 1
        return self._start * 2**32 + self._count

    def note(self, remains: Remains) -> None:
        """Keep what a sandbox may leave behind; raises OSError."""
        content = json.dumps(
            {
                "id": remains.id,
                "wiring": remains.wiring,
                "profile": remains.profile,
                "traces": dict(remains.traces),
            }
        )
        _replace(self._place(remains.id), content)

    def forget(self, sandbox: str) -> None:
        """Nothing is left of a sandbox."""
        with contextlib.suppress(OSError):
            self._place(sandbox).unlink(missing_ok=True)

    def remains(self) -> Iterator[Remains]:
        """Yield what predecessors left. A file that cannot be read stands for a sandbox of which nothing more is known."""
        for name in sorted(os.listdir(self._sandboxes)):
            match = _FILE.match(name)
            if match is None:
                with contextlib.suppress(OSError):  # half a write of ours
                    (self._sandboxes / name).unlink()
                continue
            fields = _read(self._sandboxes / name)
            traces = fields.get("traces")
            yield Remains(
                match[1],
                str(fields.get("wiring", "")),
                str(fields.get("profile", "")),
                {str(k): str(v) for k, v in traces.items()} if isinstance(traces, dict) else {},
            )

    def _place(self, sandbox: str) -> Path:
        if not _FILE.match(f"{sandbox}.json"):  # ids are made here; this one was not
            raise ValueError("no sandbox id")
        return self._sandboxes / f"{sandbox}.json"

    @staticmethod
    def _next_start(path: Path) -> int:
        try:
            text = path.read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            text = "0"
        number = int(text) + 1 if text.isascii() and text.isdigit() and len(text) < 8 else 1
        _replace(path, f"{number % _STARTS}\n", sync=True)
        return number % _STARTS


def _replace(path: Path, content: str, *, sync: bool = False) -> None:
    """Write a file so that it is whole or not there."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(descriptor)
    fresh.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            fields = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
