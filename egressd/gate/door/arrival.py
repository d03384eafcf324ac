"""What arrives first on an accepted socket: its original destination, and the bytes that say which protocol it speaks."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from egressd.gate.tls.hello import BadHello, ClientHello, NeedMore, parse_hello
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

SO_ORIGINAL_DST = 80
"""linux/netfilter_ipv4.h and linux/netfilter_ipv6/ip6_tables.h (IP6T_SO_ORIGINAL_DST): the same number at SOL_IP and SOL_IPV6."""

_TLS_HANDSHAKE = 0x16
_REQUEST_LINE = re.compile(
    rb"[A-Za-z][A-Za-z-]{1,31} (?:[/*]|[hH][tT][tT][pP]|[^ \r\n]{1,300}:\d{1,5} HTTP/)"
)
_REQUEST_START = re.compile(rb"[A-Za-z][A-Za-z-]{0,31}(?: [^ \r\n]{0,310}(?: [HTP/]{0,5})?)?")


@dataclass(frozen=True, slots=True)
class Tls:
    """A whole ClientHello; `data` is everything read so far."""

    hello: ClientHello
    data: bytes


@dataclass(frozen=True, slots=True)
class Http:
    """Bytes that begin like an HTTP/1 request; the inspector judges the head."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Neither, or nothing in time."""

    reason: Reason
    detail: str
    data: bytes


type Arrival = Tls | Http | Unreadable


def original_destination(sock: socket.socket) -> tuple[Address, int] | None:
    """Return where the peer of a redirected connection meant to go.

    None when the connection was made to the listener itself.
    """
    try:
        if sock.family == socket.AF_INET6:
            raw = sock.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
            port, address = struct.unpack_from("!2xH4x16s", raw)
            destination: tuple[Address, int] = (IPv6Address(address), port)
        else:
            raw = sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
            port, address = struct.unpack_from("!2xH4s", raw)
            destination = (IPv4Address(address), port)
        own = sock.getsockname()
    except (OSError, struct.error):
        return None
    if (str(destination[0]), destination[1]) == (own[0], own[1]):
        return None
    return destination


def recognise(data: bytes) -> Arrival | None:
    """Return what the first bytes are, or None while they may still become TLS or HTTP.

    Pure and total; the hello parser caps what it waits for.
    """
    if not data:
        return None
    if data[0] == _TLS_HANDSHAKE or data[0] & 0x80:
        hello = parse_hello(data)
        if isinstance(hello, ClientHello):
            return Tls(hello, data)
        if isinstance(hello, BadHello):
            return Unreadable(Reason.BAD_TLS, hello.detail, data)
        assert isinstance(hello, NeedMore)
        return None
    if _REQUEST_LINE.match(data):
        return Http(data)
    if len(data) < 400 and _REQUEST_START.fullmatch(data):
        return None
    return Unreadable(Reason.UNKNOWN_PROTOCOL, f"first bytes {data[:24].hex()}", data)


async def first_bytes(sock: socket.socket, data: bytes, seconds: float) -> Arrival:
    """Read from a non-blocking socket until the protocol is known, `seconds` have passed or the peer has closed."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            while (arrival := recognise(data)) is None:
                more = await loop.sock_recv(sock, 16 * 1024)
                if not more:
                    return Unreadable(
                        Reason.CLIENT_CLOSED if not data else Reason.UNKNOWN_PROTOCOL, "closed early", data
                    )
                data += more
    except TimeoutError:
        return Unreadable(Reason.HEAD_TIMEOUT, f"{len(data)} bytes", data)
    except OSError:
        return Unreadable(Reason.CLIENT_CLOSED, "reset early", data)
    return arrival
