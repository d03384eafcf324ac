"""What firewalls refused, as records: of one sandbox, and of whoever is behind an interface."""

from __future__ import annotations

import asyncio
import socket
import struct
from ipaddress import IPv4Address, ip_address

import pytest

from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.limits import Budget
from egressd.gate.packet_log import FORGED, PacketCounts, SharedPacketLog
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.gate.strangers import Strangers
from egressd.policy.attempt import Address
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy
from egressd.wiring.gateway_rules import SOURCE_PREFIX
from tests.gate.door.test_lobby import Book
from tests.gate.test_packets import PREFIX, attribute, message

A, B = IPv4Address("10.90.0.5"), IPv4Address("10.90.0.6")


def sandbox() -> Sandbox:
    policy = compile_policy(EffectivePolicy(profile="p", entries=()))
    return Sandbox("sbx-1", policy, SyntheticNames(1), Budget(Settings()))


def logged(
    source: Address, destination: str = "8.8.8.8", prefix: str = "egressd", protocol: int = 17
) -> bytes:
    """An NFLOG message of a packet to port 443."""
    head = struct.pack("!BBHHHBBH", 0x45, 0, 28, 1, 0, 64, protocol, 0)
    packet = head + source.packed + ip_address(destination).packed + struct.pack("!HHI", 40000, 443, 0)
    return message(attribute(9, packet), attribute(PREFIX, prefix.encode() + b"\0"))


def heard(*datagrams: bytes) -> list[tuple[str, str | None, str | None, int | None]]:
    """The records of datagrams: sandbox, reason, source, count. A is a sandbox's, and nobody else is anybody's."""
    book = Book()

    async def play() -> None:
        counts = PacketCounts(sandbox(), book)
        strangers = Strangers(book)
        ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        log = SharedPacketLog(ours, lambda source: counts if source == A else None, strangers)
        with kernel:
            for datagram in datagrams:
                kernel.send(datagram)
            log.close()
        counts.flush()
        strangers.flush()

    asyncio.run(play())
    assert all(r.verdict == "deny" and r.layer == "packet" and r.channel == "nflog" for r in book.records)
    return [(r.sandbox, r.reason, r.source, r.count) for r in book.records]


def test_a_packet_is_its_source_s_and_repeats_are_counted() -> None:
    found = heard(*[logged(A)] * 3)
    assert [(reason, count) for _, reason, _, count in found] == [
        ("protocol_not_allowed", 1),
        ("protocol_not_allowed", 2),
    ]
    assert {name for name, *_ in found} == {sandbox().id}


def test_a_packet_from_nobody_s_source_is_a_stranger_s() -> None:
    assert heard(logged(B)) == [("unknown", "unknown_sandbox", str(B), None)]


def test_a_source_that_does_not_belong_there_is_never_held_against_whose_it_is() -> None:
    assert heard(logged(A, prefix=FORGED)) == [("unknown", "spoofed_source", str(A), None)]
    assert heard(logged(B, prefix=FORGED)) == [("unknown", "unknown_sandbox", str(B), None)]


@pytest.mark.parametrize(
    "datagram",
    [
        pytest.param(message(attribute(9, b"\xff" * 8)), id="no IP header"),
        pytest.param(b"\1\0\0\0", id="no netlink message"),
        pytest.param(message(attribute(9, b"")), id="nothing"),
    ],
)
def test_what_cannot_be_read_is_recorded_all_the_same(datagram: bytes) -> None:
    assert heard(datagram) == [("unknown", "unknown_sandbox", None, None)]


def test_both_sides_mean_the_same_prefix() -> None:
    assert FORGED == SOURCE_PREFIX
