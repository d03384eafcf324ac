"""UDP messages with both their ends: who sent it, and to which address of ours; a reply goes back from there.

A socket that is bound to one address knows the latter by itself. One that is bound to all of them is told by the kernel with each
message (IP_PKTINFO, ip(7); IPV6_RECVPKTINFO, ipv6(7)) and must say it with each reply, which could else leave by another.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from egressd.policy.attempt import Address

_IP_PKTINFO = 8
_PKTINFO_4 = struct.Struct("=i4s4s")  # in_pktinfo: interface, the local address, the header's destination
_PKTINFO_6 = struct.Struct("=16si")  # in6_pktinfo: address, interface
_SPACE = socket.CMSG_SPACE(_PKTINFO_6.size) + socket.CMSG_SPACE(_PKTINFO_4.size)


@dataclass(frozen=True, slots=True)
class Datagram:
    """One message; `here` is the address of ours that it was sent to, where the kernel was asked to tell (`ask_where`)."""

    message: bytes
    peer: Any
    here: Address | None = None

    @property
    def source(self) -> Address:
        """The address that it came from."""
        return bare(self.peer[0])


def bare(text: str) -> Address:
    """Return an address without its zone, and IPv4 as such where a socket for both shows it inside IPv6."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or IPv6Address(int(address))
    return address


def ask_where(sock: socket.socket) -> None:
    """Have the kernel tell where each message was sent to, if the socket is bound to all addresses."""
    if not ip_address(sock.getsockname()[0]).is_unspecified:
        return
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)


def receive(sock: socket.socket, size: int) -> Datagram:
    """Return the next message, cut at `size` bytes; raises BlockingIOError where there is none, OSError."""
    message, ancillary, _, peer = sock.recvmsg(size, _SPACE)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO) and len(data) >= _PKTINFO_4.size:
            return Datagram(message, peer, IPv4Address(_PKTINFO_4.unpack_from(data)[1]))
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and len(data) >= _PKTINFO_6.size:
            return Datagram(message, peer, IPv6Address(_PKTINFO_6.unpack_from(data)[0]))
    return Datagram(message, peer)


def local(sock: socket.socket) -> Address | None:
    """Return the address of ours that a socket is bound or connected to; None where it is all of them."""
    address = bare(sock.getsockname()[0])
    return None if address.is_unspecified else address


def reply(sock: socket.socket, data: bytes, to: Datagram) -> None:
    """Send a reply to a message from the address that it was sent to; raises OSError."""
    if to.here is None:
        sock.sendto(data, to.peer)
    elif isinstance(to.here, IPv4Address):
        info = _PKTINFO_4.pack(0, to.here.packed, bytes(4))
        sock.sendmsg([data], [(socket.IPPROTO_IP, _IP_PKTINFO, info)], 0, to.peer)
    else:
        info = _PKTINFO_6.pack(to.here.packed, to.peer[3] if len(to.peer) > 3 else 0)
        sock.sendmsg([data], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, info)], 0, to.peer)
