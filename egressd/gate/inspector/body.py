"""HTTP/1 bodies: how many of the bytes in a buffer are body, and where it ends. No I/O.

A reader takes what has arrived out of a `HeadBuffer` and returns it as one piece, however many chunks it
came in: work is bounded by bytes, not by what the peer chose to cut them into. Chunk extensions are dropped
(RFC 9112 §7.1.1), so nothing can hide in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol, Self

from h11._receivebuffer import ReceiveBuffer

from egressd.gate.inspector.head import CHUNKED, UNTIL_CLOSE, BadHead, Field, HeadScan, Length, parse_fields
from egressd.policy.reasons import Reason

CHUNK_LINE: Final = 4096
"""Longest line that announces a chunk, with its extensions."""

TRAILER_BYTES: Final = 16 * 1024
PIECE: Final = 64 * 1024
"""Most bytes in one piece of a chunked body."""

_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the body."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The body has ended, whole; trailers are as parsed and belong to no header section."""

    trailers: tuple[Field, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """The body cannot be read on: what is wrong, in fixed words."""

    detail: str


type Part = Piece | End | Broken | None
"""None: nothing more until more arrives."""


class HeadBuffer(ReceiveBuffer):
    """What arrived on a connection and is not read yet: mitmproxy's own buffer type, which can also find heads and lines."""

    def __init__(self, limit: int) -> None:
        """A head of more than `limit` bytes is refused."""
        super().__init__()
        self._limit = limit
        self._scan = HeadScan()
        self._skipped = False

    def __iadd__(self, data: bytes | bytearray) -> Self:
        super().__iadd__(data)
        return self

    def take_head(self) -> bytes | BadHead | None:
        """Remove the next head and return it; None while it is incomplete.

        One empty line before it is skipped (RFC 9112 §2.2).
        """
        if not self._skipped and self._data[:2] == b"\r\n":
            self._skipped = True
            self._extract(2)
            self._scan = (
                HeadScan()
            )  # it may have looked at the CR already, and would then pass over a byte of the head
        if self._data[:2] == b"\r\n":
            return BadHead(Reason.BAD_REQUEST, "empty lines where a head begins")
        size = self._scan.find(self._data)
        if isinstance(size, BadHead):
            return size
        if (size if size is not None else len(self._data)) > self._limit:
            return BadHead(Reason.HEAD_TOO_LARGE, f"more than {self._limit} bytes of head")
        if size is None:
            return None
        self._scan = HeadScan()
        self._skipped = False
        return bytes(self._extract(size))

    def take(self, count: int) -> bytes:
        """Remove and return at most `count` bytes."""
        return bytes(self._extract(min(count, len(self._data)))) if self._data else b""

    def take_line(self, limit: int) -> bytes | Broken | None:
        """Remove the next line and return it without its CRLF; None while it is incomplete."""
        newline = self._data.find(b"\n", self._next_line_search)
        if newline < 0:
            self._next_line_search = len(self._data)
            return Broken("a chunk line is too long") if len(self._data) > limit else None
        if newline > limit:
            return Broken("a chunk line is too long")
        line = bytes(self._extract(newline + 1))
        return line[:-2] if line.endswith(b"\r\n") else Broken("a chunk line ends without CR")


class BodyReader(Protocol):
    """Takes a body out of a buffer."""

    def read(self, buffer: HeadBuffer) -> Part:
        """Return the next part of the body."""

    def whole_at_close(self) -> bool:
        """Say whether the end of the connection is the end of the body."""


class SizedBody:
    """A body of a known number of bytes."""

    def __init__(self, length: int) -> None:
        """`length` bytes are still to come."""
        self._left = length

    def read(self, buffer: HeadBuffer) -> Part:
        """Return what has arrived of it."""
        if self._left == 0:
            return End()
        data = buffer.take(self._left)
        self._left -= len(data)
        return Piece(data) if data else None

    def whole_at_close(self) -> bool:
        """A body that is cut short is not whole."""
        return False


class OpenBody:
    """A body that ends with its connection."""

    def read(self, buffer: HeadBuffer) -> Part:
        """Return what has arrived of it."""
        data = buffer.take(len(buffer))
        return Piece(data) if data else None

    def whole_at_close(self) -> bool:
        """The end of the connection is its only end."""
        return True


class ChunkedBody:
    """A body in the chunked coding (RFC 9112 §7.1)."""

    def __init__(self) -> None:
        """The line of the first chunk comes next."""
        self._left = 0  # bytes of the current chunk
        self._footer = False  # its CRLF comes next
        self._last = False  # the trailer section comes next
        self._trailer = bytearray()
        self._final: End | Broken | None = None

    def read(self, buffer: HeadBuffer) -> Part:
        """Return what has arrived of it, up to `PIECE` bytes of any number of chunks."""
        pieces: list[bytes] = []
        size = 0
        while size < PIECE and self._final is None and self._advance(buffer):
            data = buffer.take(min(self._left, PIECE))
            if not data:
                break
            self._left -= len(data)
            self._footer = self._left == 0
            pieces.append(data)
            size += len(data)
        return Piece(b"".join(pieces)) if pieces else self._final

    def whole_at_close(self) -> bool:
        """Only the last chunk ends it."""
        return False

    def _advance(self, buffer: HeadBuffer) -> bool:
        """Read lines until bytes of a chunk come next; False when more must arrive first, or when it is over."""
        while not self._left and self._final is None:
            if self._last:
                return self._end(buffer)
            line = buffer.take_line(2 if self._footer else CHUNK_LINE)
            if line is None:
                return False
            if isinstance(line, Broken):
                self._final = line
            elif self._footer:
                self._footer = False
                if line:
                    self._final = Broken("a chunk is longer than it says")
            else:
                announced = _CHUNK.fullmatch(line)
                self._left = int(announced.group(1), 16) if announced else 0
                self._last = self._left == 0
                if announced is None:
                    self._final = Broken("a chunk line is malformed")
        return self._final is None

    def _end(self, buffer: HeadBuffer) -> bool:
        """Read the trailer section: field lines up to an empty one. Never is there a chunk after it."""
        while self._final is None:
            line = buffer.take_line(TRAILER_BYTES)
            if line is None:
                return False
            if isinstance(line, Broken):
                self._final = Broken("the trailer section is malformed")
            elif line:
                self._trailer += line + b"\r\n"
                if len(self._trailer) > TRAILER_BYTES:
                    self._final = Broken("the trailer section is too long")
            else:
                fields = parse_fields(bytes(self._trailer).split(b"\r\n")[:-1])
                self._final = Broken(fields.detail) if isinstance(fields, BadHead) else End(fields)
        return False


def reader_of(length: Length) -> BodyReader:
    """Return the reader of a body of this length."""
    if length is CHUNKED:
        return ChunkedBody()
    return OpenBody() if length == UNTIL_CLOSE else SizedBody(length)
