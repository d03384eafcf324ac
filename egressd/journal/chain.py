"""The chain: every line names the SHA-256 of the line before, so that no line can change, go, come or move unseen.

What is hashed is the line's bytes as they stand in the file, without the newline: `prev` of a line is what
`tail -n 1 | tr -d '\\n' | sha256sum` said before it was written. The first line of all names GENESIS. A chain goes on
over restarts, rotations and several writers of one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, Final, NamedTuple

GENESIS: Final = "0" * 64
"""What the first line of a chain names, having none before it."""

ROOM: Final = 16 + len(f',"prev":"{GENESIS}"')
"""Bytes that numbering and chaining may add to a line."""

_LOOK = 64 * 1024
_FAR_LOOK = 4 * 1024 * 1024
_UNNUMBERED = b'"seq":null'
_DIGEST = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)


class Link(NamedTuple):
    """A line of the chain: its number, from 1, and the SHA-256 of its bytes in hex; number 0 is before the first."""

    seq: int
    digest: str


BEGINNING: Final = Link(0, GENESIS)


class Line(NamedTuple):
    """A line that is ready to be written, with its newline, and what the next one says of it."""

    text: bytes
    link: Link


class Rest(NamedTuple):
    """What stands behind the last whole record and is none: its length in bytes, its SHA-256, whether a newline ends it."""

    length: int
    digest: str
    ended: bool


NOTHING: Final = Rest(0, hashlib.sha256().hexdigest(), ended=True)


def digest(line: bytes) -> str:
    """Return what the next line says of this one, which comes without its newline."""
    return hashlib.sha256(line).hexdigest()


def chained(text: bytes, before: Link) -> Line:
    """Return an admitted record's line (`to_line`, not numbered yet) as the one behind `before`."""
    seq = before.seq + 1
    # the first match is the field itself: only time and schema stand before it
    numbered = text.replace(_UNNUMBERED, b'"seq":%d' % seq, 1)
    line = b'%b,"prev":"%b"}' % (numbered[:-2], before.digest.encode("ascii"))
    return Line(line + b"\n", Link(seq, digest(line)))


def seq_of(line: bytes) -> int:
    """Return the number that a line bears, 0 where it is no record."""
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    number = fields.get("seq") if isinstance(fields, dict) else None
    return number if type(number) is int and 0 < number < 2**53 else 0


def prev_of(fields: dict[str, Any]) -> str | None:
    """Return what a record says of the line before it, None where it says nothing."""
    prev = fields.get("prev")
    return prev if isinstance(prev, str) and _DIGEST.match(prev) else None


def read_end(fd: int, size: int) -> tuple[Link, Rest]:
    """Return the last record of a file of `size` bytes and what stands behind it; raises OSError.

    Looked for in its last 4 MiB; where there is none, BEGINNING. A record that lacks only its newline is a whole one.
    """
    for look in (_LOOK, _FAR_LOOK):
        found = _last_record(os.pread(fd, look, max(0, size - look)))
        if found is not None or size <= look:
            break
    if found is not None:
        return found
    tail = os.pread(fd, _FAR_LOOK, max(0, size - _FAR_LOOK))
    return BEGINNING, _rest(tail)


def _last_record(tail: bytes) -> tuple[Link, Rest] | None:
    end = len(tail)
    while end > 0:
        begin = tail.rfind(b"\n", 0, end) + 1
        line = tail[begin:end]
        if seq := seq_of(line):  # what a window cuts in two is no JSON any more
            behind = tail[end + 1 :]
            unended = NOTHING._replace(ended=False)
            return Link(seq, digest(line)), _rest(behind) if end < len(tail) else unended
        end = begin - 1
    return None


def _rest(behind: bytes) -> Rest:
    if not behind:
        return NOTHING
    ended = behind.endswith(b"\n")
    content = behind[:-1] if ended else behind
    return Rest(len(content), digest(content), ended)
