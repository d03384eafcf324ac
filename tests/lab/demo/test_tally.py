"""The sender's count: each opening once, each query, each refusal, whatever else crosses the loopback."""

from __future__ import annotations

import ipaddress
import struct

import pytest

from egressd.lab.capture import parse_packet
from egressd.lab.demo.tally import Counter, Sent
from egressd.lab.sightings import Flow

SYN, SYN_ACK, ACK = 0x02, 0x12, 0x10


def tcp(port: int, *, source: int = 40000, number: int = 7, flags: int = SYN) -> bytes:
    return struct.pack("!HHIIBBHHH", source, port, number, 0, 5 << 4, flags, 0, 0, 0)


def udp(port: int) -> bytes:
    return struct.pack("!HHHH", 40000, port, 8, 0)


def v4(protocol: int, payload: bytes, source: str = "127.0.0.1") -> tuple[bytes, int]:
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address("127.0.0.1").packed
    return struct.pack(
        "!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0
    ) + ends + payload, 0x0800


def v6(protocol: int, payload: bytes) -> tuple[bytes, int]:
    ends = ipaddress.ip_address("::1").packed * 2
    return struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + ends + payload, 0x86DD


def count(*packets: tuple[bytes, int]) -> Sent:
    counter = Counter()
    for packet, ethertype in packets:
        parsed = parse_packet(packet, ethertype)
        assert parsed is not None
        protocol, source, address, port, _ = parsed
        counter.see(Flow("sandbox", protocol, source, address, port), packet)
    return counter.sent(0)


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        pytest.param([v4(6, tcp(15001))], Sent(connections=1), id="a captured connection"),
        pytest.param([v6(6, tcp(15001))], Sent(connections=1), id="the same over IPv6"),
        pytest.param([v4(6, tcp(3128))], Sent(connections=1), id="one to the proxy"),
        pytest.param(
            [v4(6, tcp(15001)), v4(6, tcp(15001))], Sent(connections=1), id="a SYN that is sent again"
        ),
        pytest.param(
            [v4(6, tcp(15001)), v4(6, tcp(15001, number=8)), v4(6, tcp(15001, source=40001))],
            Sent(connections=3),
            id="three openings",
        ),
        pytest.param(
            [v4(6, tcp(15001)), v4(6, tcp(15001), source="198.18.0.254")],
            Sent(connections=2),
            id="two addresses of one sandbox",
        ),
        pytest.param(
            [v4(6, tcp(15001, flags=SYN_ACK)), v4(6, tcp(15001, flags=ACK))], Sent(), id="no opening"
        ),
        pytest.param([v4(6, tcp(8080))], Sent(), id="a server of the sandbox's own"),
        pytest.param([v4(17, udp(15053)), v4(17, udp(15053))], Sent(dns_udp=2), id="two queries"),
        pytest.param([v4(6, tcp(15053))], Sent(dns_tcp=1), id="a query over TCP"),
        pytest.param([v4(17, udp(53))], Sent(), id="a datagram that was not redirected"),
        pytest.param([v4(1, bytes((3, 13)))], Sent(refused_packets=1), id="a refusal"),
        pytest.param([v6(58, bytes((1, 1)))], Sent(refused_packets=1), id="a refusal over IPv6"),
        pytest.param([v4(1, bytes((3, 3))), v6(58, bytes((1, 4)))], Sent(), id="a closed port is no refusal"),
        pytest.param([v4(1, bytes((8, 0)))], Sent(), id="a ping"),
    ],
)
def test_each_attempt_is_counted_once(packets: list[tuple[bytes, int]], expected: Sent) -> None:
    assert count(*packets) == expected
