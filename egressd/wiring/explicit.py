"""The `explicit` wiring: egressd listens on addresses of a network that leads nowhere else, and nothing has to be captured.

It holds by that network: sandboxes reach egressd there and nobody beyond it (Compose `internal: true`, a NetworkPolicy). So no
privilege is needed here. What is made are plain listening sockets; ports below 1024 need
`net.ipv4.ip_unprivileged_port_start`, or somebody who maps them (`direct` maps the port that is meant to the one listened on).

A sandbox that has listeners of its own is known by them. Listeners that several share know it by its token and its source.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, Literal

from egressd.wiring.errors import WiringError

HTTP_PORT: Final = 3128
SOCKS_PORT: Final = 1080
DNS_PORT: Final = 53
WEB_PORTS: Final = (80, 443)
"""What a client dials at the address that `dns.answers: self` gave it; nothing else could say for which name it is."""

BACKLOG: Final = 512

type Kind = Literal["explicit", "socks", "direct", "dns-udp", "dns-tcp"]


@dataclass(frozen=True, slots=True)
class ExplicitSpec:
    """Where to listen. `addresses` are egressd's own in the sandboxes' network, or 0.0.0.0 or :: for all; None leaves a port out.

    `direct` maps each of the ports 80 and 443 to the port that is listened on for it; it goes with `dns`. `hops` are the
    networks of load balancers whose connections begin with a PROXY protocol header (version 2).
    """

    addresses: tuple[str, ...]
    http: int | None = HTTP_PORT
    socks: int | None = SOCKS_PORT
    dns: int | None = None
    direct: Mapping[int, int] = field(default_factory=dict)
    hops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """ValueError for what nobody can listen on."""
        for text in self.addresses:
            _bindable(text)
        if not self.addresses:
            raise ValueError("an address to listen on is needed")
        for hop in self.hops:
            ip_network(hop)
        if not set(self.direct) <= set(WEB_PORTS):
            raise ValueError("only ports 80 and 443 say which name a connection is for")
        ports = [
            port for port in (self.http, self.socks, self.dns, *self.direct.values()) if port is not None
        ]
        if not all(0 <= port < 65_536 for port in ports):
            raise ValueError("a port lies between 1 and 65535 (0: any that is free)")
        if len(set(filter(None, ports))) != len(list(filter(None, ports))):
            raise ValueError("two listeners on one port")


@dataclass(frozen=True, slots=True)
class ExplicitListener:
    """One listening socket; `port` is what a `direct` one stands for, `hops` as in the spec."""

    kind: Kind
    family: int
    socket: socket.socket
    port: int = 0
    hops: tuple[str, ...] = ()


def listen(spec: ExplicitSpec) -> tuple[ExplicitListener, ...]:
    """Return the sockets of a spec, non-blocking and owned by the caller; raises WiringError with none left open."""
    made: list[ExplicitListener] = []
    try:
        for address in map(ip_address, spec.addresses):
            for kind, port, meant in _wanted(spec):
                sock = _socket(kind, address, port)
                hops = () if kind.startswith("dns") else spec.hops
                made.append(ExplicitListener(kind, address.version, sock, meant, hops))
    except BaseException:
        for listener in made:
            listener.socket.close()
        raise
    return tuple(made)


def _wanted(spec: ExplicitSpec) -> Iterator[tuple[Kind, int, int]]:
    """Yield kind, port and the port that is meant of every listener on one address."""
    if spec.http is not None:
        yield "explicit", spec.http, 0
    if spec.socks is not None:
        yield "socks", spec.socks, 0
    if spec.dns is not None:
        yield "dns-udp", spec.dns, 0
        yield "dns-tcp", spec.dns, 0
    for meant, port in spec.direct.items():
        yield "direct", port, meant


def _socket(kind: Kind, address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    udp = kind == "dns-udp"
    protocol = socket.IPPROTO_UDP if udp else socket.IPPROTO_TCP
    sock = socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM, protocol)
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6:  # an IPv4 client has one spelling, and its own listener
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if not udp:
            # A restart must not wait for old connections. Never SO_REUSEPORT, and never this on UDP: whoever shares a
            # port takes queries away.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(address), port))
        if not udp:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise WiringError.from_os(f"listen on {address} port {port}", error, _hint(error, port)) from None
    return sock


def _hint(error: OSError, port: int) -> str:
    if error.errno == errno.EACCES:
        return (
            f"set the sysctl net.ipv4.ip_unprivileged_port_start={port} in egressd's own network namespace "
            "(Compose, Kubernetes: sysctls), or listen on a port above 1023 and have it mapped"
        )
    if error.errno == errno.EADDRINUSE:
        return "another program listens there; `ss -lntup` shows which"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address must be egressd's own, in the network that it shares with the sandboxes"
    return ""


def _bindable(text: str) -> None:
    address = ip_address(text)
    if address.is_multicast or getattr(address, "ipv4_mapped", None) is not None:
        raise ValueError(f"{text} cannot be listened on")
