"""Header sections of one HTTP/2 connection: from frames to fields and from fields to bytes (RFC 9113 §4.3, RFC 7541).

hpack does the compression. Its table towards the peer stays at 4 KiB whatever the peer offers, so that no peer chooses how
much we remember; fields that may be secrets are never put into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from egressd.gate.inspector.head import Field
from egressd.gate.inspector.http2 import faults, frames
from egressd.gate.inspector.http2.events import Broken
from egressd.gate.inspector.http2.frames import Frame

TABLE_BYTES: Final = 4096
MAX_CONTINUATIONS: Final = 32

_SECRET: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie", b"set-cookie", b"x-api-key"})


class Sections:
    """Both directions of one connection; at most one section is being read, and nothing else may come between its frames."""

    def __init__(self, head_bytes: int) -> None:
        """Sections of far more than `head_bytes` end the connection; smaller ones are still to be judged by their size."""
        self.stream: int | None = None
        """The stream of the section that is being read, None between two."""
        self.flags = 0
        """The flags of the frame that has begun it."""
        self._most = 2 * head_bytes
        self._block = bytearray()
        self._continuations = 0
        self._decoder = Decoder(max_header_list_size=self._most)
        self._encoder = Encoder()

    def begin(self, frame: Frame) -> bool:
        """Take the HEADERS frame that begins a section; returns whether its padding fits."""
        fragment = frames.fragment_of(frame)
        if fragment is None:
            return False
        self.stream, self.flags = frame.stream, frame.flags
        self._block, self._continuations = bytearray(fragment), 0
        return True

    def go_on(self, frame: Frame) -> Broken | None:
        """Take a CONTINUATION frame of the section."""
        self._block += frame.payload
        self._continuations += 1
        if len(self._block) > self._most or self._continuations > MAX_CONTINUATIONS:
            return faults.ENDLESS_SECTION
        return None

    def end(self) -> tuple[Field, ...] | Broken:
        """Return the fields of the section that is complete now."""
        block, self._block, self.stream = bytes(self._block), bytearray(), None
        try:
            return tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            return faults.LARGE_SECTION
        except (HPACKError, IndexError, ValueError, TypeError):
            return faults.UNREADABLE_SECTION

    def encode(self, fields: Iterable[Field]) -> bytes:
        """Return a section of ours, compressed; it must be sent next, for the peer's table follows from it."""
        listed = [(name, value, name in _SECRET) for name, value in fields]
        return self._encoder.encode(listed, huffman=False)

    def allow_table(self, size: int) -> None:
        """Use no larger table towards the peer than `size`, nor than our own bound."""
        size = min(TABLE_BYTES, size)
        if size != self._encoder.header_table_size:
            self._encoder.header_table_size = size
