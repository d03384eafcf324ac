"""Rotation and retention: when the journal goes on in a new file, where the old ones lie, and how long they are kept.

Rotated files lie in the folder `FILE.d` beside the journal, so that one place more is to be hidden from sandboxes; each is
named for when it was closed and for its last line: `20270115T080000Z-000000012345.jsonl`.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ROTATED = re.compile(r"(\d{8}T\d{6}Z)-(\d{12,16})\.jsonl\Z", re.ASCII)
_STAMP = "%Y%m%dT%H%M%SZ"

REMOVED = "removed by retention: "
"""What a record says of a rotated file that is gone, before its name."""

type Fsync = Literal["never", "interval", "each"]
type OnFull = Literal["deny", "drop-and-count"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a journal is kept. Sizes are bytes, ages seconds; 0 sets no limit.

    A file is closed over `max_size`, or once its first line is older than `max_age`. Of the closed files `max_files` are kept,
    none of them longer than `retain`. `fsync`: whether a record outlives a power failure: never waited for, within a second, or
    before anything goes by it. `on_full`: what becomes of attempts whose record finds no room. A head is signed after
    `sign_lines`, and `sign_seconds` after the first line that none covers.
    """

    max_size: int = 0
    max_age: float = 0
    max_files: int = 0
    retain: float = 0
    fsync: Fsync = "never"
    on_full: OnFull = "deny"
    sign_lines: int = 1000
    sign_seconds: float = 10.0


def folder_of(journal: Path) -> Path:
    """Return the folder beside a journal: of its rotated files, and of its index."""
    return journal.with_name(journal.name + ".d")


def rotated_path(journal: Path, now: float, last: int) -> Path:
    """Return where the journal's file goes that is closed at `now` and ends with the line `last`."""
    stamp = dt.datetime.fromtimestamp(now, dt.UTC).strftime(_STAMP)
    return folder_of(journal) / f"{stamp}-{last:012d}.jsonl"


def rotated_files(journal: Path) -> list[Path]:
    """Return the rotated files of a journal, oldest first; raises OSError for a folder that cannot be read."""
    try:
        names = [each for each in folder_of(journal).iterdir() if _ROTATED.match(each.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(names, key=lambda path: _last_of(path.name))


def doomed(journal: Path, terms: Terms, now: float) -> list[Path]:
    """Return the rotated files that are too many or too old, oldest first; none where the folder cannot be read."""
    try:
        files = rotated_files(journal) if terms.max_files or terms.retain else []
    except OSError:
        return []
    over = len(files) - terms.max_files if terms.max_files else 0
    found: list[Path] = []
    for number, path in enumerate(files):
        if number >= over and not (terms.retain and now - closed_at(path.name) > terms.retain):
            break  # the newer ones are no older
        found.append(path)
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove files, and what was made of them; what cannot be removed stays."""
    for path in files:
        for each in (path, path.with_name(f"{path.name}.d") / f"{path.name}.index"):
            with suppress(OSError):
                each.unlink(missing_ok=True)
        with suppress(OSError):
            path.with_name(f"{path.name}.d").rmdir()


def last_line_of(name: str) -> int:
    """Return the number of the last line of a rotated file by its name, 0 for any other name."""
    return _last_of(name) if _ROTATED.match(name) else 0


def moment_of(line: bytes, otherwise: float) -> float:
    """Return when the first record of these bytes was written, Unix seconds; `otherwise` where that is not said."""
    try:
        fields = json.loads(line.split(b"\n", 1)[0])
        return dt.datetime.fromisoformat(fields["time"]).timestamp()
    except (ValueError, RecursionError, TypeError, KeyError, OverflowError):
        return otherwise


def _last_of(name: str) -> int:
    match = _ROTATED.match(name)
    return int(match[2]) if match else 0


def closed_at(name: str) -> float:
    """Return when a rotated file was closed by its name, Unix seconds; 0 for any other name."""
    match = _ROTATED.match(name)
    if match is None:
        return 0.0
    try:
        return dt.datetime.strptime(match[1], _STAMP).replace(tzinfo=dt.UTC).timestamp()
    except ValueError:
        return 0.0
