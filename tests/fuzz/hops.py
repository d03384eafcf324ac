"""The header of the PROXY protocol, version 2, in any pieces, beside a writer of it."""

from __future__ import annotations

import socket
import struct

from egressd.gate.door.hops import MOST, SIGNATURE, BadHop, Forwarded, NeedMore, read_hop
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of


def header(source: str, *, tlvs: bytes = b"", command: int = 0x21, port: int = 40_000) -> bytes:
    """Return the header that a load balancer writes for a connection from `source`."""
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    here = socket.inet_pton(family, "2001:db8::2" if ":" in source else "192.0.2.2")
    body = socket.inet_pton(family, source) + here + struct.pack("!HH", port, 443) + tlvs
    return SIGNATURE + struct.pack("!BBH", command, 0x21 if ":" in source else 0x11, len(body)) + body


def check(data: bytes) -> None:
    """Hold every law of the header."""
    outcome = read_hop(data)
    for pieces in pieces_of(data):
        seen, found = b"", read_hop(b"")
        for piece in pieces:
            seen += piece
            found = read_hop(seen)
            if not isinstance(found, NeedMore):
                break
        assert type(found) is type(outcome), "the header depends on how it was cut"
        if not isinstance(found, NeedMore):
            assert found == outcome
    if isinstance(outcome, NeedMore):
        assert len(data) < outcome.size <= MOST, "more is waited for than a header may have"
        return
    for junk in JUNK:
        assert read_hop(data + junk) == outcome, "what lies behind a header changes it"
    if isinstance(outcome, Forwarded):
        assert data.startswith(SIGNATURE)
        assert len(SIGNATURE) < outcome.size <= len(data)
        for at in offsets_of(data, outcome.size):
            assert isinstance(read_hop(data[:at]), NeedMore), "a header that is not all there"
    else:
        assert isinstance(outcome, BadHop)


TARGET = Target(
    "hops",
    check,
    read_hop,
    seeds=(
        header("192.0.2.9"),
        header("2001:db8::9"),
        header("::ffff:192.0.2.9"),
        header("192.0.2.9", tlvs=b"\x03\x00\x04abcd\x05\x00\x00"),
        header("192.0.2.9", tlvs=b"\x03\x00\x04abc"),
        header("192.0.2.9", command=0x20),
        SIGNATURE + b"\x20\x00\x00\x00",
        SIGNATURE + b"\x21\x00\x00\x00",
        SIGNATURE + b"\x21\x31" + struct.pack("!H", 216) + bytes(216),
        SIGNATURE + b"\x21\x11\xff\xff",
        SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12),
        b"PROXY TCP4 192.0.2.9 192.0.2.2 40000 443\r\n",
        b"CONNECT a.test:443 HTTP/1.1\r\n\r\n",
    ),
    words=(
        SIGNATURE,
        b"\x21\x11",
        b"\x21\x21",
        b"\x20",
        b"\x00\x0c",
        b"\x00\x24",
        b"\x00",
        b"\r\n",
        b"\xff\xff",
    ),
    most=2100,
)
