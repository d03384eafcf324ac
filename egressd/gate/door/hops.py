"""The PROXY protocol, version 2: where a connection came from, as a hop before egressd says. Pure and total.

Source: HAProxy, doc/proxy-protocol.txt, §2.2. The binary version alone, since the text of version 1 could be a request; only TCP
over IPv4 or IPv6. A listed hop must begin with a header, anybody else must not: which it is says the address that the kernel
names, and nothing is guessed from the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final

from egressd.policy.attempt import Address

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
PREFIX: Final = 16
"""Bytes of a header that say how long it is: signature, version and command, family, length."""
MOST: Final = 2048
"""Longest header that is read, in bytes; what load balancers send has a few hundred."""

_LOCAL, _PROXY = 0x20, 0x21
_TCP4, _TCP6 = 0x11, 0x21
_HEAD = struct.Struct("!12sBBH")

type Networks = tuple[IPv4Network | IPv6Network, ...]


@dataclass(frozen=True, slots=True)
class NeedMore:
    """The header has not ended: its first `size` bytes say where it does, or it has so many."""

    size: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The connection came from `source`; None where the hop itself made it (LOCAL: a health check)."""

    source: Address | None
    size: int


@dataclass(frozen=True, slots=True)
class BadHop:
    """No header of version 2, or one that is not to be believed."""

    detail: str


def read_hop(data: bytes) -> Forwarded | BadHop | NeedMore:
    """Return what the header at the beginning of `data` says."""
    begun = data[: len(SIGNATURE)]
    if begun != SIGNATURE[: len(begun)]:
        return BadHop("no PROXY protocol header")
    if len(data) < PREFIX:
        return NeedMore(PREFIX)
    _, command, family, length = _HEAD.unpack_from(data)
    size = PREFIX + length
    if command not in (_LOCAL, _PROXY):
        return BadHop("a PROXY protocol header of an unknown version or command")
    if size > MOST:
        return BadHop("a PROXY protocol header that is too long")
    if len(data) < size:
        return NeedMore(size)
    if command == _LOCAL:  # §2.2: its addresses are to be skipped, whatever they are
        return Forwarded(None, size)
    body = data[PREFIX:size]
    addresses = {_TCP4: 12, _TCP6: 36}.get(family)
    if addresses is None or len(body) < addresses:
        return BadHop("a PROXY protocol header without TCP addresses")
    if not _are_tlvs(body[addresses:]):
        return BadHop("a PROXY protocol header whose end is malformed")
    return Forwarded(bare(IPv4Address(body[:4]) if family == _TCP4 else IPv6Address(body[:16])), size)


def _are_tlvs(data: bytes) -> bool:
    """Whether the rest is a list of (type, length, value) that ends where it should; what they say is nothing to us."""
    at = 0
    while at < len(data):
        if at + 3 > len(data):
            return False
        at += 3 + int.from_bytes(data[at + 1 : at + 3])
    return at == len(data)


def bare(address: Address) -> Address:
    """Return a peer's address as one spelling: without a zone, and IPv4 out of the IPv6 that a dual socket shows it in."""
    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or IPv6Address(int(address))
    return address


def read_networks(texts: tuple[str, ...]) -> Networks:
    """Return the networks of listed hops; raises ValueError."""
    return tuple(ip_network(text) for text in texts)


def is_listed(peer: Address, hops: Networks) -> bool:
    """Say whether a peer is one of the hops that speak for others."""
    return any(peer.version == hop.version and peer in hop for hop in hops)
