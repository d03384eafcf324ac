"""Content codings, undone while they stream: a compressed body could hide what is looked for in it. Pure and total.

Only gzip and deflate, once: what else a body may be coded in is not read here. Nothing is kept but the decompressor's own window,
and what comes out comes in pieces of at most `PIECE` bytes: whoever takes them decides how fast.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from egressd.gate.inspector.body import Broken

PIECE: Final = 64 * 1024
"""Most bytes in one piece of what comes out."""

_GZIP, _ZLIB, _BARE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS

type Coding = Literal["gzip", "deflate"]


def coding_of(values: Iterable[bytes]) -> Coding | Broken | None:
    """Return the coding that Content-Encoding fields name (RFC 9110 §8.4), None for none, `Broken` for what is not read.

    More than one is refused whatever they are: each could be a bomb to the next.
    """
    names = [name.strip(b" \t").lower() for value in values for name in value.split(b",")]
    names = [name for name in names if name not in (b"", b"identity")]
    if not names:
        return None
    if len(names) > 1:
        return Broken("more than one content coding")
    if names[0] in (b"gzip", b"x-gzip"):
        return "gzip"
    return "deflate" if names[0] == b"deflate" else Broken("a content coding that is not read")


class Inflater:
    """Undoes one coding of one body."""

    __slots__ = ("_broken", "_coding", "_ended", "_first", "_zlib")

    def __init__(self, coding: Coding) -> None:
        """The body begins."""
        self._coding = coding
        self._zlib: zlib._Decompress | None = None
        self._first = b""
        self._ended = self._broken = False

    def feed(self, data: bytes) -> Iterator[bytes | Broken]:
        """Return what `data` stands for, in pieces, all of it that can be known; `Broken` is the last one there is."""
        try:
            yield from self._undo(data)
        except zlib.error:
            self._broken = True
            yield Broken("the content coding is not what it says")

    def finish(self) -> Broken | None:
        """Say what is wrong with a body that ends here; one without a byte is none in any coding."""
        whole = not self._broken and self._zlib is None and not self._first
        return None if whole else Broken("the content coding is cut short")

    def _undo(self, data: bytes) -> Iterator[bytes]:
        while data and not self._broken:
            data = self._begin(data) if self._zlib is None else data
            unread = self._zlib
            if unread is None:
                return
            piece = unread.decompress(data, PIECE)
            while piece:
                yield piece
                piece = unread.decompress(unread.unconsumed_tail, PIECE) if not unread.eof else b""
            data = b""
            if unread.eof:
                data, self._zlib, self._ended = unread.unused_data, None, True

    def _begin(self, data: bytes) -> bytes:
        """Make ready for what begins, and return it; b"" where it is too little yet, or nothing but padding."""
        if self._coding == "gzip":
            data = (
                data.lstrip(b"\0") if self._ended else data
            )  # members may follow each other (RFC 1952 §2.2), zeros the last
            self._zlib = zlib.decompressobj(_GZIP) if data else None
            return data
        if self._ended:
            raise zlib.error("more behind the end")
        data, self._first = self._first + data, b""
        if len(data) < 2:
            self._first = data
            return b""
        # RFC 9110 §8.4.1.2 means the zlib format, and knows of those who leave it out: two bytes tell them apart (RFC 1950 §2.2).
        wrapped = data[0] & 0x8F == 0x08 and int.from_bytes(data[:2]) % 31 == 0
        self._zlib = zlib.decompressobj(_ZLIB if wrapped else _BARE)
        return data
