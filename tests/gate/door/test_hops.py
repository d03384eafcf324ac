"""The PROXY protocol, version 2: believed whole, or not at all."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from egressd.gate.door.hops import (
    MOST,
    SIGNATURE,
    BadHop,
    Forwarded,
    NeedMore,
    bare,
    is_listed,
    read_hop,
    read_networks,
)
from tests.fuzz.hops import header


@pytest.mark.parametrize(
    ("source", "told"),
    [
        pytest.param("192.0.2.9", "192.0.2.9", id="IPv4"),
        pytest.param("2001:db8::9", "2001:db8::9", id="IPv6"),
        pytest.param("::ffff:192.0.2.9", "192.0.2.9", id="IPv4 inside IPv6 is one address, not two"),
    ],
)
def test_a_header_tells_the_source_and_what_it_took(source: str, told: str) -> None:
    data = header(source, tlvs=b"\x03\x00\x04abcd\x05\x00\x00")
    assert read_hop(data + b"CONNECT ") == Forwarded(ip_address(told), len(data))


def test_a_hop_s_own_connection_has_no_source_but_the_hop() -> None:
    assert read_hop(SIGNATURE + b"\x20\x00\x00\x03abc!") == Forwarded(None, 19)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"PROXY TCP4 192.0.2.9 192.0.2.2 40000 443\r\n", id="version 1"),
        pytest.param(b"CONNECT a.test:443 HTTP/1.1\r\n", id="no header at all"),
        pytest.param(SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12), id="version 1 in the binary form"),
        pytest.param(SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12), id="an unknown command"),
        pytest.param(SIGNATURE + b"\x21\x00\x00\x00", id="a source of no family"),
        pytest.param(SIGNATURE + b"\x21\x12\x00\x0c" + bytes(12), id="UDP"),
        pytest.param(SIGNATURE + b"\x21\x31" + struct.pack("!H", 216) + bytes(216), id="Unix sockets"),
        pytest.param(SIGNATURE + b"\x21\x11\x00\x0b" + bytes(11), id="addresses cut off"),
        pytest.param(SIGNATURE + b"\x21\x21\x00\x0c" + bytes(12), id="IPv4 addresses said to be IPv6"),
        pytest.param(header("192.0.2.9", tlvs=b"\x03\x00\x04abc"), id="a TLV longer than the header"),
        pytest.param(header("192.0.2.9", tlvs=b"\x03\x00"), id="a TLV without a length"),
        pytest.param(SIGNATURE + b"\x21\x11\xff\xff", id="a header that is too long is not waited for"),
    ],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    assert isinstance(read_hop(data), BadHop)


def test_every_prefix_says_how_much_to_read() -> None:
    data = header("192.0.2.9")
    for end in range(len(data)):
        assert read_hop(data[:end]) == NeedMore(16 if end < 16 else len(data))
    assert isinstance(read_hop(SIGNATURE + b"\x20\x00" + struct.pack("!H", MOST - 16)), NeedMore)


def test_only_listed_peers_are_hops() -> None:
    hops = read_networks(("10.0.0.0/8", "2001:db8::/32"))
    assert is_listed(IPv4Address("10.1.2.3"), hops)
    assert is_listed(IPv6Address("2001:db8::1"), hops)
    assert not is_listed(IPv4Address("11.0.0.1"), hops)
    assert not is_listed(IPv4Address("10.1.2.3"), ())
    assert bare(IPv6Address("fe80::1%2")) == IPv6Address("fe80::1")
    with pytest.raises(ValueError, match="host bits"):
        read_networks(("10.0.0.1/8",))
