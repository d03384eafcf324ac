"""The signed chunks of an S3 body, signed anew one by one, so that an upload streams and keeps its length. Pure and total.

    size-in-hex;chunk-signature=64-hex-digits CRLF data CRLF …          the last chunk has the size 0 and no data
    [name:value CRLF … x-amz-trailer-signature:64-hex-digits CRLF] CRLF  in brackets: STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER

A chunk's signature stands before its data, so each chunk is kept until it is whole; a longer one than `CHUNK_MOST` is refused.
Only the 64 digits change. Whatever is framed otherwise is refused, and nothing more comes out after that: the request has to
be broken off, for what went before is a part of an upload that the origin will not take.

Source: Amazon S3 API reference, "Transferring payload in multiple chunks (chunked upload)", and the same "… including trailing
headers".
"""

from __future__ import annotations

import hashlib
import re
from enum import Enum, auto
from typing import Final

from egressd.credentials.sigv4 import ALGORITHM, Seed, Unsignable

CHUNK_MOST: Final = 1024 * 1024
"""Most bytes of data in one chunk; that many are held back."""

_HEAD_MOST: Final = 128
_TRAILER_MOST: Final = 4096
_EMPTY: Final = hashlib.sha256(b"").hexdigest()
_HEAD: Final = re.compile(rb"([0-9A-Fa-f]{1,16});chunk-signature=([0-9A-Fa-f]{64})")
_CHECKSUM: Final = re.compile(rb"([Xx]-[Aa][Mm][Zz]-[Cc]hecksum-[A-Za-z0-9]{1,32}):([ \t\x21-\x7e]{1,1024})")
_SIGNED: Final = re.compile(rb"([Xx]-[Aa]mz-[Tt]railer-[Ss]ignature:[ \t]*)[0-9A-Fa-f]{64}")


type _Step = bytes | Unsignable | None
"""What one element becomes; None when it is not whole yet."""


class _State(Enum):
    HEAD = auto()
    DATA = auto()
    TRAILER = auto()
    SIGNED = auto()
    """The trailer's signature has come; the empty line has not."""
    END = auto()


class ChunkResigner:
    """Takes a body's bytes in pieces of any size and returns them with signatures that go on from the request's own."""

    def __init__(self, seed: Seed) -> None:
        self._seed = seed
        self._signature = seed.signature
        self._buffer = bytearray()
        self._state = _State.HEAD
        self._size = ""
        self._length = 0
        self._trailers: list[tuple[bytes, bytes]] = []
        self._trailer_bytes = 0
        self._refused: Unsignable | None = None

    def feed(self, data: bytes) -> bytes | Unsignable:
        """Return what may go now, which can be nothing yet; after an Unsignable it is the same one for ever."""
        self._buffer += data
        out = bytearray()
        while self._refused is None:
            step = self._step()
            if step is None:
                return bytes(out)
            if isinstance(step, Unsignable):
                self._refused = step
            else:
                out += step
        self._buffer.clear()
        return self._refused

    def finish(self) -> Unsignable | None:
        """Say whether the body may end here: None when its last chunk, and the trailer, have gone."""
        if self._refused is None and self._state is not _State.END:
            self._refused = Unsignable("the body ends inside its chunks")
        return self._refused

    def _step(self) -> _Step:
        """Take one element off the buffer and return it signed."""
        if self._state is _State.DATA:
            return self._data()
        if self._state is _State.END:
            return Unsignable("bytes follow the last chunk") if self._buffer else None
        most = _HEAD_MOST if self._state is _State.HEAD else _TRAILER_MOST
        end = self._buffer.find(b"\r\n", 0, most + 2)
        if end < 0:
            return Unsignable("a line of its chunks is too long") if len(self._buffer) > most + 1 else None
        line = bytes(self._buffer[:end])
        if self._state is _State.HEAD:
            return self._head(line, end + 2)
        del self._buffer[: end + 2]
        return (
            self._end(line) if self._state is _State.SIGNED or not self._seed.trailer else self._trailer(line)
        )

    def _head(self, line: bytes, length: int) -> _Step:
        found = _HEAD.fullmatch(line)
        size = int(found[1], 16) if found else 0
        if found is None:
            return Unsignable("its chunks are framed in another way")
        if size > CHUNK_MOST:
            return Unsignable("a chunk is too large")
        del self._buffer[:length]
        self._size, self._length, self._state = found[1].decode(), size, _State.DATA
        return b""

    def _data(self) -> _Step:
        """A last chunk has neither data nor a line end of its own: what ends the body is the empty line, or the trailer's."""
        length = self._length
        if length and len(self._buffer) < length + 2:
            return None
        if length and self._buffer[length : length + 2] != b"\r\n":
            return Unsignable("a chunk is longer than it says")
        data = bytes(self._buffer[:length])
        digest = hashlib.sha256(data).hexdigest()
        self._sign(f"{ALGORITHM}-PAYLOAD", _EMPTY, digest)
        head = f"{self._size};chunk-signature={self._signature}\r\n".encode()
        if not length:
            self._state = _State.TRAILER
            return head
        del self._buffer[: length + 2]
        self._state = _State.HEAD
        return head + data + b"\r\n"

    def _trailer(self, line: bytes) -> _Step:
        self._trailer_bytes += len(line)
        signed = _SIGNED.fullmatch(line)
        if signed is not None and self._trailers:
            lines = b"".join(b"%s:%s\n" % pair for pair in sorted(self._trailers))
            self._sign(f"{ALGORITHM}-TRAILER", hashlib.sha256(lines).hexdigest())
            self._state = _State.SIGNED
            return signed[1] + self._signature.encode() + b"\r\n"
        found = _CHECKSUM.fullmatch(line)
        if found is None or self._trailer_bytes > _TRAILER_MOST:
            return Unsignable("its trailer is no checksum with a signature")
        self._trailers.append((found[1].lower(), b" ".join(found[2].split())))
        return line + b"\r\n"

    def _end(self, line: bytes) -> _Step:
        if line:
            return Unsignable("its last chunk is not followed by an empty line")
        self._state = _State.END
        return b"\r\n"

    def _sign(self, algorithm: str, *digests: str) -> None:
        signer = self._seed.signer
        self._signature = signer.sign(algorithm, signer.stamp, signer.scope, self._signature, *digests)
