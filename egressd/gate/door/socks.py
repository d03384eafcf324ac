"""SOCKS5 on the wire (RFC 1928, RFC 1929): what a client says, and what it is answered. Pure and total.

A conversation has three turns, each a message of its own from the client: the greeting (which ways of authentication it has),
user name and password if that was chosen, and the request. Every reader takes all bytes that have come so far, says how many of
them its message took, and asks for more until that is whole; none of them waits for more than 513 bytes.

Only CONNECT is served. BIND would open a port for the outside, UDP ASSOCIATE a way that nobody judges; SOCKS4 has no way to say
who asks, and SOCKS4a is read here no further than its version.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from egressd.gate.door.connect import NeedMore
from egressd.policy.names import Authority, BadHost, parse_host
from egressd.policy.reasons import Reason

NO_AUTHENTICATION: Final = 0x00
USERNAME_PASSWORD: Final = 0x02
NO_METHOD: Final = 0xFF

_VERSION = 5
_AUTH_VERSION = 1
_CONNECT = 1
_IPV4, _DOMAIN, _IPV6 = 1, 3, 4
_SIZES: Final = {_IPV4: 4, _IPV6: 16}

SUCCEEDED: Final = 0x00
NOT_ALLOWED: Final = 0x02
COMMAND_NOT_SUPPORTED: Final = 0x07
ADDRESS_TYPE_NOT_SUPPORTED: Final = 0x08
"""RFC 1928 §6."""

_REJECTED_4: Final = b"\x00\x5b\x00\x00\x00\x00\x00\x00"
"""SOCKS4's own "request rejected or failed", without an address."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The ways of authentication that the client has; `size` bytes of the input were its message."""

    methods: frozenset[int]
    size: int


@dataclass(frozen=True, slots=True)
class Login:
    """User name and password (RFC 1929 §2), as sent."""

    user: bytes
    password: bytes
    size: int

    def __repr__(self) -> str:
        """Say nothing of what must never get into a log."""
        return "Login(...)"


@dataclass(frozen=True, slots=True)
class Request:
    """A CONNECT to this authority."""

    authority: Authority
    size: int


@dataclass(frozen=True, slots=True)
class BadSocks:
    """What is refused: why, fixed words, what stood in the host's place, and the reply that the client understands."""

    reason: Reason
    detail: str
    reply: bytes
    authority: bytes = b""


def read_greeting(data: bytes) -> Greeting | BadSocks | NeedMore:
    """Return the ways of authentication that a client has (RFC 1928 §3)."""
    if not data:
        return NeedMore()
    if data[0] == 4:
        return BadSocks(Reason.BAD_REQUEST, "SOCKS4", _REJECTED_4)
    if data[0] != _VERSION:
        return BadSocks(Reason.UNKNOWN_PROTOCOL, f"first bytes {data[:24].hex()}", b"")
    if len(data) < 2:
        return NeedMore()
    end = 2 + data[1]
    if data[1] == 0:
        return BadSocks(Reason.BAD_REQUEST, "no way of authentication", choose(NO_METHOD))
    return Greeting(frozenset(data[2:end]), end) if len(data) >= end else NeedMore()


def read_login(data: bytes) -> Login | BadSocks | NeedMore:
    """Return user name and password (RFC 1929 §2)."""
    if data and data[0] != _AUTH_VERSION:
        return BadSocks(Reason.BAD_REQUEST, "authentication of an unknown version", judge_login(ok=False))
    if len(data) < 2:
        return NeedMore()
    user_end = 2 + data[1]
    if len(data) <= user_end:
        return NeedMore()
    end = user_end + 1 + data[user_end]
    if len(data) < end:
        return NeedMore()
    return Login(data[2:user_end], data[user_end + 1 : end], end)


def read_request(data: bytes) -> Request | BadSocks | NeedMore:
    """Return where a client wants to be connected to (RFC 1928 §4).

    A domain name that spells an address is that address: `parse_host` reads it as every other host is read.
    """
    if data and data[0] != _VERSION:
        return BadSocks(Reason.BAD_REQUEST, "a request of another version", reply(NOT_ALLOWED))
    if len(data) < 5:
        return NeedMore()
    _, command, reserved, kind, length = data[:5]
    if kind == _DOMAIN:
        begin, size = 5, length
    elif kind in _SIZES:
        begin, size = 4, _SIZES[kind]
    else:
        return BadSocks(
            Reason.BAD_HOST, f"address type {kind}", reply(ADDRESS_TYPE_NOT_SUPPORTED)
        )  # whose length nobody knows
    end = begin + size + 2
    if len(data) < end:
        return NeedMore()
    raw, port = data[begin : begin + size], int.from_bytes(data[end - 2 : end])
    sent = b"%s:%d" % (raw, port) if kind == _DOMAIN else b""
    if command != _CONNECT:
        refused = reply(COMMAND_NOT_SUPPORTED)
        return BadSocks(Reason.PROTOCOL_NOT_ALLOWED, f"SOCKS command {command}", refused, sent)
    if reserved != 0:
        return BadSocks(Reason.BAD_REQUEST, "the reserved byte is not 0", reply(NOT_ALLOWED), sent)
    host = _host(kind, raw)
    if isinstance(host, BadHost):
        return BadSocks(host.reason, host.detail, reply(NOT_ALLOWED), sent)
    if port == 0:
        return BadSocks(Reason.BAD_PORT, "port 0", reply(NOT_ALLOWED), sent)
    return Request(Authority(host, port), end)


def _host(kind: int, raw: bytes) -> tuple[str, ...] | IPv4Address | IPv6Address | BadHost:
    if kind == _IPV4:
        return IPv4Address(raw)
    if kind == _IPV6:
        return IPv6Address(raw)
    return parse_host(raw, bracketed=False)


def choose(method: int) -> bytes:
    """Return the choice of a way of authentication; NO_METHOD ends the conversation (RFC 1928 §3)."""
    return bytes((_VERSION, method))


def judge_login(*, ok: bool) -> bytes:
    """Return the answer to user name and password (RFC 1929 §2); anything but 0 ends the conversation."""
    return bytes((_AUTH_VERSION, 0 if ok else 1))


def reply(code: int) -> bytes:
    """Return the reply to a request; the bound address is never told (law 10), which clients do not miss."""
    return bytes((_VERSION, code, 0, _IPV4, 0, 0, 0, 0, 0, 0))
