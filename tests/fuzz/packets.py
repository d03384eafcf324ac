"""What the kernel logged as dropped: NFLOG datagrams with a hostile packet inside."""

from __future__ import annotations

import struct
from ipaddress import ip_address

from egressd.gate.packets import DroppedPacket, Malformed, parse_nflog
from tests.fuzz.target import JUNK, Target, offsets_of


def check(data: bytes) -> None:
    """Hold every law of datagrams; and the same input as the packet inside a sound one."""
    _check(data)
    inner = parse_nflog(message(attribute(9, data)))
    assert isinstance(inner, tuple)
    assert len(inner) == 1, "a packet that adds up to nothing is still one packet"


def _check(data: bytes) -> None:
    found = parse_nflog(data)
    if isinstance(found, Malformed):
        assert found.size == len(data)
        return
    assert len(found) <= len(data) // 16
    for packet in found:
        _check_packet(packet)
    for at in offsets_of(data):
        cut = parse_nflog(data[:at])
        assert isinstance(cut, Malformed) or cut == found[: len(cut)], (
            "a datagram that is cut shows another packet"
        )
    if len(data) % 4 == 0:
        for junk in JUNK:
            more = parse_nflog(data + junk)
            assert isinstance(more, Malformed) or more[: len(found)] == found


def _check_packet(packet: DroppedPacket) -> None:
    assert packet.family in (0, 4, 6)
    for text in (packet.source, packet.destination):
        assert (text == "") if packet.family == 0 else ip_address(text).version == packet.family
    for port in (packet.source_port, packet.destination_port):
        assert port is None or 0 <= port <= 65535
    packet.prefix.encode()


def attribute(kind: int, value: bytes) -> bytes:
    """Return a netlink attribute."""
    return struct.pack("=HH", min(4 + len(value), 0xFFFF), kind) + value + bytes(-len(value) % 4)


def message(*attributes: bytes, kind: int = 0x400) -> bytes:
    """Return a netlink message of nfnetlink."""
    body = struct.pack("!BBH", 2, 0, 1) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


_IPV4 = bytes.fromhex("45000028000100004011000001020304c6120001") + b"\x9c\x40\x01\xbb" + bytes(16)
_IPV6 = (
    bytes.fromhex("6000000000100040")
    + bytes(15)
    + b"\x01"
    + bytes(15)
    + b"\x02"
    + b"\x2c\0\x01\0\0\0\0\0\x06\0\0\0\0\0\0\0"
)
TARGET = Target(
    "packets",
    check,
    parse_nflog,
    seeds=(
        message(attribute(9, _IPV4), attribute(10, b"egressd\0"), attribute(11, b"\0\0\xea\x60")),
        message(attribute(9, _IPV6)) * 2,
        _IPV4,
        _IPV6,
        message(kind=2),
        b"",
    ),
    words=(
        b"\x04\0",
        b"\0\x04",
        b"\xff\xff",
        b"\x10\0\0\0",
        b"\x45",
        b"\x4f",
        b"\x60",
        b"\x2c",
        b"\x33",
        b"\x3a",
        b"\0\0\0\0",
        b"\x09\x80",
    ),
    most=600,
)
