"""What the kernel logged as dropped (NFLOG): netlink bytes to facts. Pure, total, bounded; nothing here decides.

The netlink framing comes from the kernel, the packet inside from the sandbox: framing that does not add up is one
`Malformed`; a packet that does not add up is still a `DroppedPacket`, with what could be read of it.

Source: linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_log.h; RFC 791, RFC 8200, RFC 792,
RFC 4443; IANA protocol numbers.
"""

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

_HEADER: Final = 16
_NFGENMSG: Final = 4
_PACKET_MESSAGE: Final = (4 << 8) | 0  # NFNL_SUBSYS_ULOG, NFULNL_MSG_PACKET
_TYPE_MASK: Final = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_PAYLOAD, _PREFIX, _UID = 9, 10, 11  # NFULA_*

_ICMP, _TCP, _UDP, _DCCP, _ICMPV6, _SCTP, _UDPLITE = 1, 6, 17, 33, 58, 132, 136
_WITH_PORTS: Final = frozenset({_TCP, _UDP, _DCCP, _SCTP, _UDPLITE})

_FRAGMENT, _AUTHENTICATION = 44, 51
_EXTENSIONS: Final = frozenset({0, 43, 60, 135, 139, 140, _FRAGMENT, _AUTHENTICATION})
"""IPv6 headers that name the next one (IANA, IPv6 Extension Header Types), without ESP, which hides it."""
_EXTENSION_LIMIT: Final = 8


@dataclass(frozen=True, slots=True)
class DroppedPacket:
    """One packet that went nowhere.

    `family` is 4 or 6, or 0 when the IP header could not be read (addresses are then empty). `protocol` is the IANA
    number, after IPv6 extension headers; -1 if unknown. Ports and ICMP type are None where the packet has none or they
    were cut off. `uid` is the sender's as the user namespace that made the
    socket sees it: in the namespace wiring 0 is the sandbox, no more than that. `length` is the IP length, in bytes.
    """

    family: int
    protocol: int
    source: str
    destination: str
    source_port: int | None
    destination_port: int | None
    icmp_type: int | None
    icmp_code: int | None
    uid: int | None
    length: int
    prefix: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A datagram that is not what the kernel sends."""

    reason: str
    size: int


def parse_nflog(datagram: bytes) -> tuple[DroppedPacket, ...] | Malformed:
    """The packets in one datagram of an NFLOG socket; acknowledgements and other messages are skipped. Total."""
    packets: list[DroppedPacket] = []
    place = 0
    while place < len(datagram):
        if len(datagram) - place < _HEADER:
            return Malformed("short netlink header", len(datagram))
        length, kind = struct.unpack_from("=IH", datagram, place)
        if length < _HEADER or place + length > len(datagram):
            return Malformed("netlink length", len(datagram))
        if kind == _PACKET_MESSAGE:
            attributes = _attributes(datagram[place + _HEADER : place + length])
            if attributes is None:
                return Malformed("netlink attributes", len(datagram))
            packets.append(_packet(attributes))
        place += _aligned(length)
    return tuple(packets)


def overran(error: OSError) -> bool:
    """Did the kernel have to throw messages away because they were not read in time?"""
    return error.errno == errno.ENOBUFS


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _attributes(body: bytes) -> dict[int, bytes] | None:
    if len(body) < _NFGENMSG:
        return None
    found: dict[int, bytes] = {}
    place = _NFGENMSG
    while place < len(body):
        if len(body) - place < 4:
            return None
        length, kind = struct.unpack_from("=HH", body, place)
        if length < 4 or place + length > len(body):
            return None
        found.setdefault(kind & _TYPE_MASK, body[place + 4 : place + length])
        place += _aligned(length)
    return found


@dataclass(frozen=True, slots=True)
class _Inner:
    """An IP header, and where what it carries begins (-1: not in these bytes)."""

    family: int
    protocol: int
    source: str
    destination: str
    length: int
    start: int


def _packet(attributes: dict[int, bytes]) -> DroppedPacket:
    payload = attributes.get(_PAYLOAD, b"")
    uid = attributes.get(_UID, b"")
    prefix = attributes.get(_PREFIX, b"").split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
    inner = _ip(payload)
    transport = payload[inner.start :] if inner.start >= 0 else b""
    ports: tuple[int | None, int | None] = (None, None)
    icmp: tuple[int | None, int | None] = (None, None)
    if inner.protocol in _WITH_PORTS and len(transport) >= 4:
        ports = struct.unpack_from("!HH", transport)
    elif (inner.family, inner.protocol) in ((4, _ICMP), (6, _ICMPV6)) and len(transport) >= 2:
        icmp = transport[0], transport[1]
    return DroppedPacket(
        family=inner.family,
        protocol=inner.protocol,
        source=inner.source,
        destination=inner.destination,
        source_port=ports[0],
        destination_port=ports[1],
        icmp_type=icmp[0],
        icmp_code=icmp[1],
        uid=int.from_bytes(uid, "big") if len(uid) == 4 else None,
        length=inner.length,
        prefix=prefix,
    )


def _ip(packet: bytes) -> _Inner:
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        return _ipv4(packet)
    if version == 6 and len(packet) >= 40:
        return _ipv6(packet)
    return _Inner(0, -1, "", "", len(packet), -1)


def _ipv4(packet: bytes) -> _Inner:
    length, fragment = struct.unpack_from("!H2xH", packet, 2)
    header = (packet[0] & 0xF) * 4
    # Only the first fragment has ports; a header length below 20 is a lie about where they are.
    start = header if header >= 20 and not fragment & 0x1FFF else -1
    source, destination = IPv4Address(packet[12:16]), IPv4Address(packet[16:20])
    return _Inner(4, packet[9], str(source), str(destination), length, start)


def _ipv6(packet: bytes) -> _Inner:
    length = struct.unpack_from("!H", packet, 4)[0] + 40
    protocol, start = packet[6], 40
    for kind, begins in _extension_headers(packet):
        protocol, start = kind, begins
    source, destination = IPv6Address(packet[8:24]), IPv6Address(packet[24:40])
    return _Inner(6, protocol, str(source), str(destination), length, start)


def _extension_headers(packet: bytes) -> Iterator[tuple[int, int]]:
    """(next protocol, where it begins) after each extension header; -1 where the packet or our copy of it ends."""
    protocol, start = packet[6], 40
    for _ in range(_EXTENSION_LIMIT):
        if protocol not in _EXTENSIONS:
            return
        if len(packet) < start + 8:
            yield protocol, -1
            return
        if protocol == _FRAGMENT:
            size, later = 8, bool(struct.unpack_from("!H", packet, start + 2)[0] & 0xFFF8)
        else:
            units = packet[start + 1]
            size, later = ((units + 2) * 4 if protocol == _AUTHENTICATION else (units + 1) * 8), False
        protocol, start = packet[start], start + size
        if later:
            yield protocol, -1
            return
        yield protocol, start
