"""Forget what the kernel knows of an address's flows, so that who has the address next inherits none of them.

Source: linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_conntrack.h. A dump, and a deletion for each entry by its own tuple
and id: kernels differ in which filters they know, and one that does not know a filter deletes everything.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from egressd.wiring.errors import WiringError

_NETLINK_NETFILTER: Final = 12
_NEW, _GET, _DELETE = ((1 << 8) | kind for kind in (0, 1, 2))  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_*
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_TUPLE_ORIG, _TUPLE_REPLY, _ID, _ZONE = 1, 2, 12, 18  # CTA_*
_TUPLE_IP: Final = 1
_TYPE_MASK: Final = 0x3FFF
_HEADER, _NFGENMSG = struct.Struct("=IHHII"), struct.Struct("!BBH")
_PIECE: Final = 256 * 1024
_HINT: Final = (
    "needs CAP_NET_ADMIN, and nf_conntrack_netlink in the kernel (modprobe nf_conntrack_netlink on the host)"
)


def forget(address: str) -> int:
    """Delete every entry of an address, in either direction, in this network namespace; how many. Raises WiringError."""
    wanted = ip_address(address)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
            netlink.bind((0, 0))
            found = [entry for entry in _entries(netlink, wanted) if entry]
            return sum(_delete(netlink, wanted, entry) for entry in found)
    except OSError as error:
        raise WiringError.from_os(f"conntrack entries of {address}", error, _HINT) from error


def _family(address: IPv4Address | IPv6Address) -> bytes:
    return _NFGENMSG.pack(socket.AF_INET6 if address.version == 6 else socket.AF_INET, 0, 0)


def _entries(netlink: socket.socket, wanted: IPv4Address | IPv6Address) -> Iterator[bytes]:
    """What names each entry of the address: its original tuple, zone and id, as attributes."""
    _send(netlink, _GET, _REQUEST | _DUMP, _family(wanted))
    for kind, body in _answers(netlink):
        if kind == _NEW:
            attributes = dict(attributes_of(body[_NFGENMSG.size :]))
            if any(
                wanted.packed == address
                for direction in (_TUPLE_ORIG, _TUPLE_REPLY)
                for address in _addresses(attributes.get(direction, b""))
            ):
                named = ((kind, attributes[kind]) for kind in (_TUPLE_ORIG, _ZONE, _ID) if kind in attributes)
                yield b"".join(_attribute(kind, value) for kind, value in named)


def _addresses(tuple_: bytes) -> Iterator[bytes]:
    for kind, nested in attributes_of(tuple_):
        if kind == _TUPLE_IP:
            yield from (value for _, value in attributes_of(nested))


def _delete(netlink: socket.socket, wanted: IPv4Address | IPv6Address, entry: bytes) -> int:
    _send(netlink, _DELETE, _REQUEST | _ACK, _family(wanted) + entry)
    try:
        for _ in _answers(netlink):
            pass
    except OSError as error:
        if error.errno != errno.ENOENT:  # it has ended by itself
            raise
        return 0
    return 1


def _send(netlink: socket.socket, kind: int, flags: int, body: bytes) -> None:
    netlink.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)


def _answers(netlink: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Every message up to the end of the answer; raises OSError with what the kernel says."""
    while True:
        data = netlink.recv(_PIECE)
        place = 0
        while place + _HEADER.size <= len(data):
            length, kind = struct.unpack_from("=IH", data, place)
            body = data[place + _HEADER.size : place + length]
            if kind == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                if number:
                    raise OSError(number, os.strerror(number))
                return
            if kind == _DONE:
                return
            yield kind, body
            place += (max(length, _HEADER.size) + 3) & ~3


def attributes_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes in netlink bytes (struct nlattr): type without flags, value. Ends where they do not add up."""
    place = 0
    while place + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, place)
        if length < 4 or place + length > len(data):
            return
        yield kind & _TYPE_MASK, data[place + 4 : place + length]
        place += (length + 3) & ~3


def _attribute(kind: int, value: bytes) -> bytes:
    nested = 0x8000 if kind == _TUPLE_ORIG else 0
    return struct.pack("=HH", 4 + len(value), kind | nested) + value + bytes(-len(value) % 4)
