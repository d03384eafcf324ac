"""HTTP/2 frames (RFC 9113 §4 and §6): bytes in, frames out, and the other way round. Pure and total.

What a frame means is the business of `link`; here is only where it begins and ends, and what its payload is made of.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client says first (§3.4)."""

FRAME_BYTES: Final = 16 * 1024
"""The longest payload that we take, and that every peer takes (§4.2)."""

HEADER_BYTES: Final = 9
MAX_WINDOW: Final = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

(
    HEADER_TABLE_SIZE,
    ENABLE_PUSH,
    MAX_CONCURRENT_STREAMS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
) = range(1, 7)

_HEADER = struct.Struct(">HBBBL")
_SETTING = struct.Struct(">HL")
_NUMBER = struct.Struct(">L")
_GOAWAY = struct.Struct(">LL")


class Code(IntEnum):
    """Why a stream or a connection ends (§7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13

    @classmethod
    def of(cls, number: int) -> Code:
        """Return the code of a number; an unknown one is an INTERNAL_ERROR (§7)."""
        return cls(number) if number <= cls.HTTP_1_1_REQUIRED else cls.INTERNAL_ERROR


class Frame(NamedTuple):
    """A frame as it arrived; `stream` is 0 for the connection."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Oversized(NamedTuple):
    """A frame that is longer than we take; nothing after it can be read."""

    length: int


class FrameReader:
    """Cuts what arrives into frames; keeps less than one of them."""

    __slots__ = ("_at", "_data")

    def __init__(self) -> None:
        """Nothing has arrived."""
        self._data = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Take what arrived; what was read before is let go."""
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    def next(self) -> Frame | Oversized | None:
        """Return the next frame, None until more has arrived."""
        at = self._at
        if len(self._data) - at < HEADER_BYTES:
            return None
        high, low, kind, flags, stream = _HEADER.unpack_from(self._data, at)
        length = high << 8 | low
        if length > FRAME_BYTES:
            return Oversized(length)
        start = at + HEADER_BYTES
        if len(self._data) - start < length:
            return None
        self._at = start + length
        return Frame(kind, flags, stream & MAX_WINDOW, bytes(memoryview(self._data)[start : self._at]))


def unpadded(frame: Frame) -> bytes | None:
    """Return the payload of a DATA or HEADERS frame without its padding (§6.1), None if there is more padding than frame."""
    payload = frame.payload
    if not frame.flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        return None
    return payload[1 : len(payload) - payload[0]]


def fragment_of(frame: Frame) -> bytes | None:
    """Return the part of a header block that a HEADERS frame carries; priorities are not ours to keep (§5.3.2)."""
    payload = unpadded(frame)
    if payload is None or not frame.flags & PRIORITIZED:
        return payload
    return payload[5:] if len(payload) >= 5 else None


def settings_of(payload: bytes) -> dict[int, int] | None:
    """Return the settings of a frame, the last value of each counting; None if it is cut in the middle of one."""
    if len(payload) % 6:
        return None
    return dict(_SETTING.iter_unpack(payload))


def number_of(payload: bytes) -> int | None:
    """Return the number that a RST_STREAM or WINDOW_UPDATE frame holds, None where it has another length than that."""
    return int(_NUMBER.unpack(payload)[0]) if len(payload) == 4 else None


def goaway_of(payload: bytes) -> tuple[int, int] | None:
    """Return the last stream and the code of a GOAWAY frame, None if it is too short; its debug data is not looked at."""
    if len(payload) < 8:
        return None
    last, code = _GOAWAY.unpack_from(payload)
    return last & MAX_WINDOW, code


def head_of(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Write the nine bytes before a payload."""
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Write a whole frame."""
    return head_of(kind, flags, stream, len(payload)) + payload


def settings(values: dict[int, int]) -> bytes:
    """Write a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def reset(stream: int, code: Code) -> bytes:
    """Write a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def window_update(stream: int, increment: int) -> bytes:
    """Write a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(increment))


def goaway(last: int, code: Code) -> bytes:
    """Write a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last, code))


def header_block(stream: int, block: bytes, *, end: bool, limit: int = FRAME_BYTES) -> bytes:
    """Write a HEADERS frame and as many CONTINUATION frames as the block needs."""
    ended = END_STREAM if end else 0
    if len(block) <= limit:
        return frame(HEADERS, ended | END_HEADERS, stream, block)
    parts = [block[at : at + limit] for at in range(0, len(block), limit)]
    frames = [frame(HEADERS, ended, stream, parts[0])]
    frames += [frame(CONTINUATION, 0, stream, part) for part in parts[1:-1]]
    return b"".join((*frames, frame(CONTINUATION, END_HEADERS, stream, parts[-1])))
