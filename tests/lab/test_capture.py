"""What the packet capture reads from the first bytes of a packet."""

from __future__ import annotations

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.lab.capture import parse_packet

V4, V6 = 0x0800, 0x86DD


def v4(protocol: int, rest: bytes, *, options: bytes = b"", fragment: int = 0) -> bytes:
    first = 0x40 | (5 + len(options) // 4)
    head = struct.pack("!BBHHHBBH", first, 0, 0, 0, fragment, 64, protocol, 0)
    return head + bytes([11, 0, 0, 2, 11, 6, 6, 6]) + options + rest


def v6(next_header: int, rest: bytes) -> bytes:
    addresses = ipaddress.ip_address("2600:11::2").packed + ipaddress.ip_address("2600:6:6::6").packed
    return struct.pack("!IHBB", 0x60000000, len(rest), next_header, 64) + addresses + rest


def ports(destination: int) -> bytes:
    return struct.pack("!HH", 50000, destination)


def tcp(destination: int, flags: int) -> bytes:
    return ports(destination) + bytes(9) + bytes([flags]) + bytes(6)


CASES = [
    ("a TCP opening", v4(6, tcp(443, 0x02)), V4, ("tcp", 443, True)),
    ("a TCP acknowledgement", v4(6, tcp(443, 0x10)), V4, ("tcp", 443, False)),
    ("the answer to an opening", v4(6, tcp(443, 0x12)), V4, ("tcp", 443, False)),
    ("UDP behind IPv4 options", v4(17, ports(53), options=bytes(8)), V4, ("udp", 53, False)),
    ("a ping", v4(1, bytes([8, 0])), V4, ("icmp", 8, False)),
    ("a later fragment", v4(17, ports(53), fragment=5), V4, ("udp", 0, False)),
    ("another protocol", v4(47, b"x"), V4, ("47", 0, False)),
    ("a cut transport header", v4(6, b"x"), V4, ("tcp", 0, False)),
    ("TCP by IPv6", v6(6, tcp(853, 0x02)), V6, ("tcp", 853, True)),
    (
        "UDP behind a hop-by-hop header",
        v6(0, bytes([17, 0]) + bytes(6) + ports(123)),
        V6,
        ("udp", 123, False),
    ),
    ("a first IPv6 fragment", v6(44, bytes([17, 0, 0, 1]) + bytes(4) + ports(123)), V6, ("udp", 123, False)),
    ("a later IPv6 fragment", v6(44, bytes([17, 0, 0, 9]) + bytes(4) + ports(123)), V6, ("udp", 0, False)),
    ("a ping by IPv6", v6(58, bytes([128, 0])), V6, ("icmp6", 128, False)),
]


@pytest.mark.parametrize(
    ("packet", "ethertype", "expected"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_packet_is_read(packet: bytes, ethertype: int, expected: tuple[str, int, bool]) -> None:
    parsed = parse_packet(packet, ethertype)
    assert parsed is not None
    protocol, source, address, port, opening = parsed
    assert (protocol, port, opening) == expected
    assert (source, address) == (
        ("11.0.0.2", "11.6.6.6") if ethertype == V4 else ("2600:11::2", "2600:6:6::6")
    )


def test_what_is_no_ip_is_none() -> None:
    assert parse_packet(bytes(64), 0x0806) is None
    assert parse_packet(v4(6, b"")[:19], V4) is None
    assert parse_packet(v6(6, b"")[:39], V6) is None


@given(st.binary(max_size=128), st.sampled_from([V4, V6, 0x0806]))
def test_any_bytes_are_read_without_raising(packet: bytes, ethertype: int) -> None:
    parse_packet(packet, ethertype)
