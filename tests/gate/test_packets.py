"""Dropped packets: from netlink bytes to facts, whatever the bytes."""

import errno
import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.packets import DroppedPacket, Malformed, overran, parse_nflog

PAYLOAD, PREFIX, UID = 9, 10, 11
PORTS = struct.pack("!HH", 40000, 443)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(*attributes: bytes, kind: int = 0x400) -> bytes:
    body = struct.pack("!BBH", 2, 0, 1) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def ipv4(protocol: int, carried: bytes, *, words: int = 5, fragment: int = 0) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x40 | words, 0, 20 + len(carried), 1, fragment, 64, protocol, 0)
    addresses = IPv4Address("198.18.0.254").packed + IPv4Address("8.8.8.8").packed
    return head + addresses + bytes(max(0, words - 5) * 4) + carried


def ipv6(protocol: int, carried: bytes) -> bytes:
    head = struct.pack("!IHBB", 6 << 28, len(carried), protocol, 64)
    return head + IPv6Address("2001:2::fe").packed + IPv6Address("2606:4700::1111").packed + carried


def logged(packet: bytes) -> DroppedPacket:
    parsed = parse_nflog(message(attribute(PAYLOAD, packet), attribute(PREFIX, b"egressd\0")))
    assert isinstance(parsed, tuple)
    (only,) = parsed
    return only


def test_everything_of_a_udp_datagram_is_read() -> None:
    attributes = [
        attribute(1, bytes(4)),
        attribute(PREFIX, b"egressd\0"),
        attribute(UID, struct.pack("!I", 59137)),
    ]
    parsed = parse_nflog(message(*attributes, attribute(PAYLOAD, ipv4(17, PORTS + bytes(4)))))
    assert parsed == (
        DroppedPacket(4, 17, "198.18.0.254", "8.8.8.8", 40000, 443, None, None, 59137, 28, "egressd"),
    )


@pytest.mark.parametrize(
    ("packet", "protocol", "ports", "icmp"),
    [
        pytest.param(ipv4(6, PORTS), 6, (40000, 443), (None, None), id="TCP"),
        pytest.param(ipv4(132, PORTS), 132, (40000, 443), (None, None), id="SCTP"),
        pytest.param(ipv4(33, PORTS), 33, (40000, 443), (None, None), id="DCCP"),
        pytest.param(ipv4(136, PORTS), 136, (40000, 443), (None, None), id="UDP-Lite"),
        pytest.param(ipv4(1, b"\x08\x00"), 1, (None, None), (8, 0), id="ping"),
        pytest.param(ipv4(47, PORTS), 47, (None, None), (None, None), id="GRE has no ports"),
        pytest.param(ipv4(58, b"\x80\x00"), 58, (None, None), (None, None), id="ICMPv6 in IPv4 is no ICMP"),
        pytest.param(ipv4(17, PORTS, words=7), 17, (40000, 443), (None, None), id="IP options"),
        pytest.param(ipv4(17, PORTS, words=4), 17, (None, None), (None, None), id="a header length that lies"),
        pytest.param(ipv4(17, PORTS, fragment=0x2000), 17, (40000, 443), (None, None), id="a first fragment"),
        pytest.param(ipv4(17, PORTS, fragment=5), 17, (None, None), (None, None), id="a later fragment"),
        pytest.param(ipv4(17, PORTS[:3]), 17, (None, None), (None, None), id="ports cut off"),
        pytest.param(ipv6(17, PORTS), 17, (40000, 443), (None, None), id="UDP over IPv6"),
        pytest.param(ipv6(58, b"\x80\x00"), 58, (None, None), (128, 0), id="ping over IPv6"),
        pytest.param(ipv6(0, bytes([17, 0]) + bytes(6) + PORTS), 17, (40000, 443), (None, None), id="hop-by-hop"),
        pytest.param(ipv6(60, bytes([17, 1]) + bytes(14) + PORTS), 17, (40000, 443), (None, None), id="options"),
        pytest.param(ipv6(51, bytes([6, 1]) + bytes(10) + PORTS), 6, (40000, 443), (None, None), id="AH"),
        pytest.param(ipv6(44, bytes([17, 0, 0, 1]) + bytes(4) + PORTS), 17, (40000, 443), (None, None), id="fragment 0"),
        pytest.param(ipv6(44, bytes([17, 0, 0, 9]) + bytes(4) + PORTS), 17, (None, None), (None, None), id="fragment 1"),
        pytest.param(ipv6(50, PORTS), 50, (None, None), (None, None), id="ESP hides the rest"),
        pytest.param(ipv6(0, bytes([0, 0]) + bytes(6)) , 0, (None, None), (None, None), id="extensions without end"),
    ],
)  # fmt: skip
def test_ports_and_types_are_found_where_they_are(
    packet: bytes, protocol: int, ports: tuple[int | None, int | None], icmp: tuple[int | None, int | None]
) -> None:
    found = logged(packet)
    assert found.protocol == protocol
    assert (found.source_port, found.destination_port) == ports
    assert (found.icmp_type, found.icmp_code) == icmp


@pytest.mark.parametrize(
    "packet", [b"", b"\x45", b"\x60" + bytes(30), b"\x10" + bytes(60), b"\x45" + bytes(18)]
)
def test_what_is_no_ip_header_is_still_a_packet(packet: bytes) -> None:
    assert logged(packet) == DroppedPacket(
        0, -1, "", "", None, None, None, None, None, len(packet), "egressd"
    )


def test_several_messages_in_one_datagram_are_all_read() -> None:
    one = message(attribute(PAYLOAD, ipv4(17, PORTS)))
    acknowledgement = message(kind=2)
    parsed = parse_nflog(one + acknowledgement + one)
    assert isinstance(parsed, tuple)
    assert len(parsed) == 2


@pytest.mark.parametrize(
    "datagram",
    [
        pytest.param(b"\0" * 15, id="less than a header"),
        pytest.param(struct.pack("=IHHII", 15, 0x400, 0, 0, 0), id="a length below the header's"),
        pytest.param(struct.pack("=IHHII", 99, 0x400, 0, 0, 0), id="a length beyond the end"),
        pytest.param(struct.pack("=IHHII", 18, 0x400, 0, 0, 0) + bytes(2), id="no room for the family"),
        pytest.param(message(struct.pack("=HH", 3, 9)), id="an attribute below its header"),
        pytest.param(message(struct.pack("=HH", 99, 9)), id="an attribute beyond the end"),
        pytest.param(message(b"\1\0"), id="half an attribute header"),
    ],
)
def test_framing_that_does_not_add_up_is_said(datagram: bytes) -> None:
    parsed = parse_nflog(datagram)
    assert isinstance(parsed, Malformed)
    assert parsed.size == len(datagram)


@given(st.binary(max_size=300))
def test_any_datagram_has_an_answer(datagram: bytes) -> None:
    assert isinstance(parse_nflog(datagram), (tuple, Malformed))


@given(st.builds(bytes.__add__, st.sampled_from([b"", b"\x60", b"\x45", b"\x4f"]), st.binary(max_size=128)))
def test_any_packet_is_one_dropped_packet(packet: bytes) -> None:
    assert logged(packet).family in (0, 4, 6)


@given(
    st.integers(0, 128),
    st.sampled_from([ipv4(17, PORTS), ipv6(0, bytes([44, 0] + [0] * 6 + [17] + [0] * 7) + PORTS)]),
)
def test_a_copy_cut_anywhere_never_invents_ports(size: int, packet: bytes) -> None:
    cut = logged(packet[:size])
    assert (cut.source_port, cut.destination_port) in {(40000, 443), (None, None)}


def test_a_prefix_that_is_no_text_is_escaped() -> None:
    parsed = parse_nflog(message(attribute(PREFIX, b"\xff\n\0")))
    assert isinstance(parsed, tuple)
    assert parsed[0].prefix == "\\xff\n"


def test_an_overrun_is_told_from_other_errors() -> None:
    assert overran(OSError(errno.ENOBUFS, "no buffer space"))
    assert not overran(OSError(errno.EAGAIN, "again"))
