"""Packet capture by AF_PACKET: counts every packet that arrives on one wire.

"Nothing reached the attacker" is then a measured fact: a flow that is not in the table did not cross the
wire, as long as `lost()` is 0. The kernel copies only headers, into a ring that is mapped here
(linux/if_packet.h, TPACKET_V2): a plain packet socket is charged for whole packets and loses some of any
bulk transfer.
"""

from __future__ import annotations

import ipaddress
import mmap
import socket
import struct
from collections.abc import Callable

from egressd.lab.sightings import Flow

_ETH_P_ALL = 3  # linux/if_ether.h
_ETH_P_IP = 0x0800
_ETH_P_IPV6 = 0x86DD
_SOL_PACKET = 263
_PACKET_OUTGOING = 4  # linux/if_packet.h, here and below
_PACKET_RX_RING = 5
_PACKET_STATISTICS = 6
_PACKET_VERSION = 10
_TPACKET_V2 = 1
_TP_STATUS_USER = 1
_HEADER = struct.Struct(
    "=IIIHH"
)  # tpacket2_hdr: status, length, captured length, link offset, network offset
_ADDRESS = struct.Struct("!2xH6xB")  # sockaddr_ll, behind the header: protocol, packet type
_ADDRESS_AT = 32
_FRAME = 256  # 80 for what precedes the packet, 176 for its headers
_BLOCK = 1 << 16
_RING = 8 << 20  # 32,768 packets between two drains
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}
_EXTENSIONS = {0, 43, 60}  # hop-by-hop, routing, destination options (RFC 8200 section 4)


class Capture:
    """Counts the packets that arrive on `interface`, in the network namespace of the thread that makes it.

    Needs CAP_NET_RAW there. Call `drain()` whenever `fileno()` is readable and before reading `flows`.
    `seen` is called for each packet with its flow and its first bytes, from the IP header on.
    """

    def __init__(
        self, origin: str, interface: str, seen: Callable[[Flow, bytes], None] | None = None
    ) -> None:
        self.origin = origin
        self.flows: dict[tuple[str, str, str, int], Flow] = {}
        self._seen = seen
        self._lost = 0
        self._next = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
        ring = struct.pack("IIII", _BLOCK, _RING // _BLOCK, _FRAME, _RING // _FRAME)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_RX_RING, ring)
        self._ring = mmap.mmap(self._socket.fileno(), _RING)
        self._socket.bind((interface, _ETH_P_ALL))

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def drain(self, limit: int = 1 << 30) -> None:
        """Counts what has arrived, at most `limit` packets."""
        for _ in range(limit):
            at = self._next * _FRAME
            status, length, captured, _, begin = _HEADER.unpack_from(self._ring, at)
            if not status & _TP_STATUS_USER:
                return
            ethertype, direction = _ADDRESS.unpack_from(self._ring, at + _ADDRESS_AT)
            if direction != _PACKET_OUTGOING:
                self._count(self._ring[at + begin : at + begin + captured], ethertype, length)
            struct.pack_into("=I", self._ring, at, 0)  # the frame is the kernel's again
            self._next = (self._next + 1) % (_RING // _FRAME)

    def lost(self) -> int:
        """How many packets found the ring full since the last `forget`."""
        # The kernel sets its counters to zero when they are read (packet(7)).
        statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._lost += struct.unpack("II", statistics)[1]
        return self._lost

    def forget(self) -> None:
        """Drops what was counted, what is queued and what was lost included."""
        self.drain()
        self.lost()
        self._lost = 0
        self.flows.clear()

    def _count(self, packet: bytes, ethertype: int, length: int) -> None:
        parsed = parse_packet(packet, ethertype)
        if parsed is None:
            return
        protocol, source, address, port, opening = parsed
        key = (protocol, source, address, port)
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = Flow(self.origin, protocol, source, address, port)
        flow.packets += 1
        flow.bytes += length
        flow.openings += opening
        if self._seen is not None:
            self._seen(flow, packet)


def parse_packet(packet: bytes, ethertype: int) -> tuple[str, str, str, int, bool] | None:
    """Reads (protocol, source, destination, port or ICMP type, opens a TCP connection) from an IP packet's
    start.

    Total: any bytes, None for what is neither IPv4 nor IPv6 (ARP, a cut header). A later fragment has port 0.
    """
    if ethertype == _ETH_P_IP and len(packet) >= 20:
        number, offset = packet[9], (packet[0] & 15) * 4
        source, address = packet[12:16], packet[16:20]
        first = struct.unpack_from("!H", packet, 6)[0] & 0x1FFF == 0
    elif ethertype == _ETH_P_IPV6 and len(packet) >= 40:
        source, address = packet[8:24], packet[24:40]
        number, offset, first = _skip_extensions(packet)
    else:
        return None
    protocol = _PROTOCOLS.get(number, str(number))
    port, opening = _port(protocol, packet[offset:]) if first else (0, False)
    return protocol, str(ipaddress.ip_address(source)), str(ipaddress.ip_address(address)), port, opening


def _skip_extensions(packet: bytes) -> tuple[int, int, bool]:
    number, offset, first = packet[6], 40, True
    while number in _EXTENSIONS or number == 44:
        if len(packet) < offset + 8:
            break
        if number == 44:  # fragment
            first = struct.unpack_from("!H", packet, offset + 2)[0] & 0xFFF8 == 0
            size = 8
        else:
            size = (packet[offset + 1] + 1) * 8
        number, offset = packet[offset], offset + size
    return number, offset, first


def _port(protocol: str, segment: bytes) -> tuple[int, bool]:
    if protocol in {"tcp", "udp"} and len(segment) >= 4:
        opening = protocol == "tcp" and len(segment) >= 14 and segment[13] & 0x12 == 0x02
        return struct.unpack_from("!H", segment, 2)[0], opening
    if protocol in {"icmp", "icmp6"} and segment:
        return segment[0], False
    return 0, False
