"""The tip: the last line that was written, kept outside the journal, so that a journal whose end was cut is known by it.

A file of its own in the state directory for each journal, made anew by every write: one small write into the page cache. A
writer that is killed leaves it at most one write behind its journal, never ahead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from pathlib import Path
from typing import Final

from egressd.journal.chain import BEGINNING, Link

_SHAPE: Final = re.compile(rb"(\d{16}) ([0-9a-f]{64})\n", re.ASCII)
_LENGTH: Final = 16 + 1 + 64 + 1


def tip_path(state: Path, journal: Path) -> Path:
    """Return where the tip of a journal lies; the journal goes by its absolute path."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(journal))).hexdigest()[:16]
    return state / "journals" / f"{name}.tip"


class Tip:
    """An open tip; written and read under the lock of its journal and its own."""

    def __init__(self, state: Path, journal: Path) -> None:
        """Open it, or make it; raises OSError."""
        path = tip_path(state, journal)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        self._path = os.fsencode(os.path.abspath(journal))
        self._said: tuple[bytes, Link] = (b"", BEGINNING)

    def lock(self) -> None:
        """Take its lock, which holds where the journal's own does not: while one process rotates; raises BlockingIOError."""
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Let its lock go."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> Link:
        """Return the last line that was written, BEGINNING where none was."""
        content = os.pread(self._fd, _LENGTH, 0)
        if content != self._said[0]:  # mostly it is what we wrote ourselves
            self._said = (content, parse(content))
        return self._said[1]

    def write(self, link: Link) -> None:
        """Note the last line that was written."""
        content = b"%016d %b\n" % (link.seq, link.digest.encode("ascii"))
        os.pwrite(self._fd, content + self._path + b"\n", 0)
        self._said = (content, link)

    def close(self) -> None:
        """Let the file go."""
        os.close(self._fd)


def parse(content: bytes) -> Link:
    """Return the line that a tip names, BEGINNING where it names none."""
    match = _SHAPE.match(content)
    return Link(int(match[1]), match[2].decode("ascii")) if match else BEGINNING
