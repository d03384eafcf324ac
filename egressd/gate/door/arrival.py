"""What arrives first on an accepted socket: its original destination, and the bytes that say which protocol it speaks."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from egressd.gate.tls.hello import BadHello, ClientHello, HelloReader, looks_like_tls
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

SO_ORIGINAL_DST = 80
"""linux/netfilter_ipv4.h and linux/netfilter_ipv6/ip6_tables.h (IP6T_SO_ORIGINAL_DST): the same number at SOL_IP and SOL_IPV6."""

_LINE_LIMIT = 400
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


class Recogniser:
    """Tells TLS from HTTP from neither in bytes that come in any pieces; each byte is read about once.

    Pure and total. How much it waits for is capped: by the hello's own limits, or by `_LINE_LIMIT`.
    """

    __slots__ = ("_hello", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._hello: HelloReader | None = None

    def read(self, more: bytes) -> Arrival | None:
        """Take more bytes; return what arrives, or None while it may still become either."""
        self.data += more
        if self._hello is None:
            tls = looks_like_tls(self.data)
            if tls is None:
                return None
            if not tls:
                return self._request()
            self._hello = HelloReader()
        hello = self._hello.read(self.data)
        if isinstance(hello, ClientHello):
            return Tls(hello, bytes(self.data))
        if isinstance(hello, BadHello):
            return Unreadable(Reason.BAD_TLS, hello.detail, bytes(self.data))
        return None

    def _request(self) -> Arrival | None:
        data = bytes(self.data)
        if _REQUEST_LINE.match(data):
            return Http(data)
        if len(data) < _LINE_LIMIT and _REQUEST_START.fullmatch(data):
            return None
        return Unreadable(Reason.UNKNOWN_PROTOCOL, f"first bytes {data[:24].hex()}", data)


async def first_bytes(sock: socket.socket, data: bytes, seconds: float) -> Arrival:
    """Read from a non-blocking socket until the protocol is known, `seconds` have passed or the peer has closed."""
    loop = asyncio.get_running_loop()
    recogniser = Recogniser()
    more = data
    try:
        async with asyncio.timeout(seconds):
            while (arrival := recogniser.read(more)) is None:
                more = await loop.sock_recv(sock, 16 * 1024)
                if not more:
                    return Unreadable(_closed(recogniser), "closed early", bytes(recogniser.data))
    except TimeoutError:
        return Unreadable(Reason.HEAD_TIMEOUT, f"{len(recogniser.data)} bytes", bytes(recogniser.data))
    except OSError:
        return Unreadable(Reason.CLIENT_CLOSED, "reset early", bytes(recogniser.data))
    return arrival


def _closed(recogniser: Recogniser) -> Reason:
    return Reason.UNKNOWN_PROTOCOL if recogniser.data else Reason.CLIENT_CLOSED
