"""As much of HTTP/2 as a client needs that asks a few things and reads the answers (RFC 9113, RFC 7541)."""

from __future__ import annotations

import socket

from .books import Load
from .wire import Reader


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113 section 4.1."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def fields_of(authority: str, path: str) -> bytes:
    """A field section of literals (RFC 7541 section 6.2.2)."""
    fields = {":method": "GET", ":scheme": "https", ":authority": authority, ":path": path}
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def read_streams(load: Load, sock: socket.socket, reader: Reader, numbers: list[int]) -> None:
    left = len(numbers)
    while left:
        start = reader.exactly(9)
        payload = reader.exactly(int.from_bytes(start[:3], "big"))
        kind, flags, stream = start[3], start[4], int.from_bytes(start[5:], "big")
        if kind == 4 and not flags & 1:
            sock.sendall(frame(4, 1, 0, b""))
        elif kind == 1:
            load.requests[numbers[stream // 2]][1] = status_of(payload)
        elif kind == 7:
            raise EOFError
        left -= (kind in (0, 1) and flags & 1) or kind == 3


def status_of(block: bytes) -> int:
    """The status that a field section begins with (RFC 7541 sections 6.1 and 6.2, appendices A and B)."""
    known = {8: 200, 9: 204, 10: 206, 11: 304, 12: 400, 13: 404, 14: 500}
    block = block[next(at for at, byte in enumerate(block) if byte & 0xE0 != 0x20) :]
    if block[0] & 0x80:
        return known[block[0] & 0x7F]
    size, text = block[1] & 0x7F, block[2:]
    if not block[1] & 0x80:
        return int(text[:size])
    bits = "".join(f"{byte:08b}" for byte in text[:size])
    digits, at = "", 0
    while len(digits) < 3:
        long = bits[at : at + 5] not in ("00000", "00001", "00010")
        digits += str(int(bits[at : at + 6], 2) - 22 if long else int(bits[at : at + 5], 2))
        at += 6 if long else 5
    return int(digits)
