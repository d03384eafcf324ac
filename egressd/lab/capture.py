"""Packet capture by AF_PACKET: counts every packet that arrives on one wire.

"Nothing reached the attacker" is then a measured fact: a flow that is not in the table did not cross
the wire, as long as `lost()` is 0. Only headers are read, so bulk transfers cost little."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable

from egressd.lab.sightings import Flow

_ETH_P_ALL = 3  # linux/if_ether.h
_ETH_P_IP = 0x0800
_ETH_P_IPV6 = 0x86DD
_PACKET_OUTGOING = 4  # linux/if_packet.h
_SOL_PACKET = 263
_PACKET_STATISTICS = 6
_SO_RCVBUFFORCE = 33
_SNAP = 128  # an IPv6 header, a few extension headers and the ports
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}
_EXTENSIONS = {0, 43, 60}  # hop-by-hop, routing, destination options (RFC 8200 section 4)


class Capture:
    """Counts the packets that arrive on `interface`, in the network namespace of the thread that makes it.

    Needs CAP_NET_RAW there. Call `drain()` whenever `fileno()` is readable and before reading `flows`.
    """

    def __init__(
        self, origin: str, interface: str, seen: Callable[[Flow, bytes], None] | None = None
    ) -> None:
        self.origin = origin
        self.flows: dict[tuple[str, str, str, int], Flow] = {}
        self._seen = seen
        self._lost = 0
        self._buffer = bytearray(_SNAP)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        self._socket.setblocking(False)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 32 << 20)
        except PermissionError:  # needs CAP_NET_ADMIN in the first user namespace; take what the limit gives
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        self._socket.bind((interface, _ETH_P_ALL))

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def drain(self, limit: int = 1 << 30) -> None:
        """Counts what has arrived, at most `limit` packets."""
        for _ in range(limit):
            try:
                length, sender = self._socket.recvfrom_into(self._buffer, _SNAP, socket.MSG_TRUNC)
            except BlockingIOError:
                return
            if sender[2] != _PACKET_OUTGOING:
                self._count(memoryview(self._buffer)[: min(length, _SNAP)], sender[1], length)

    def lost(self) -> int:
        """How many packets the kernel could not queue so far."""
        # The kernel sets its counters to zero when they are read (packet(7)).
        statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._lost += struct.unpack("II", statistics)[1]
        return self._lost

    def forget(self) -> None:
        """Drops what was counted, what is queued included."""
        self.drain()
        self.flows.clear()

    def close(self) -> None:
        """Ends the capture."""
        self._socket.close()

    def _count(self, packet: memoryview, ethertype: int, length: int) -> None:
        parsed = parse_packet(bytes(packet), ethertype)
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
            self._seen(flow, bytes(packet))


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
