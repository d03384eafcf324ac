"""The packet rules of the sidecar wiring: one network namespace for egressd and its sandbox, told apart by uid. Pure.

What goes out is egressd's, whose sockets are one uid's, or it is refused. Everybody else's TCP and DNS are led to egressd's
listeners on the loopback that both share. What was found by attacking a first draft is marked !.

* DNS is led away before loopback is left alone: a resolver on 127.0.0.x is a way out. Container engines put one there (Docker:
  127.0.0.11, at a port that changes !); it is egressd's alone.
* A socket that is bound to the outer interface, for which nobody needs a capability, keeps it when the packet is redirected !: to
  127.0.0.1 by the outer interface, bytes included. Only after routing can that be seen, hence the table mangle.
* A socket that is bound to lo sends to anywhere by lo !: it would meet a listener, and no answer would find it. That is refused
  before it is redirected.
* `--uid-owner` looks at who opened the socket. Packets without such a socket are the kernel's own: the last ones of a connection
  that was closed (egressd's pass, since nobody else's ever was established), neighbour discovery, replies to strangers (dropped).
* The first rules are there to be tried by egressd itself, which may not read rules without a capability: see `sidecar.proved`.
"""

from typing import Final

from egressd.wiring.overlay import PREFIX, Chain, Jump, Overlay
from egressd.wiring.ruleset import (
    DNS_PORT,
    NFLOG_GROUP,
    NFLOG_PREFIX,
    RESOLVER,
    TRANSPARENT_PORT,
    Family,
)

CHAIN: Final = PREFIX
REFUSING: Final = f"{PREFIX}-REFUSE"
FORWARDED: Final = f"{PREFIX}-FORWARD"
ASTRAY: Final = f"{PREFIX}-ASTRAY"

RESOLVERS: Final[dict[Family, str]] = {4: RESOLVER, 6: "2001:2::1"}
"""Led to egressd's DNS listener whoever asks, egressd too: what answers there proves the redirection."""
REFUSED: Final[dict[Family, str]] = {4: "198.18.0.4", 6: "2001:2::4"}
"""Refused to egressd too: an error from there proves the filter."""

_LOOPBACK: Final[dict[Family, str]] = {4: "127.0.0.0/8", 6: "::1"}
_ENGINE_RESOLVER: Final = "127.0.0.11"
_PROHIBITED: Final[dict[Family, str]] = {4: "icmp-admin-prohibited", 6: "icmp6-adm-prohibited"}
_NOBODYS: Final = "-m owner ! --uid-owner 0-4294967294"
"""No socket that a process has open: the kernel's own packets."""
_NEIGHBOURS: Final = (133, 135, 136)
"""ICMPv6 router solicitation, neighbour solicitation and advertisement (RFC 4861); the kernel sends them for everybody."""


def sidecar_overlay(family: Family, uid: int, *, nflog_group: int = NFLOG_GROUP) -> Overlay:
    """The chains of one family; filter first, for between two tables everything is refused and nothing redirected."""
    output = (Jump("OUTPUT"),)
    refusing = Chain(
        REFUSING,
        (
            _log(nflog_group),
            "-p tcp -j REJECT --reject-with tcp-reset",
            f"-j REJECT --reject-with {_PROHIBITED[family]}",
        ),
    )
    # A packet with a source route (IP_OPTIONS needs no capability) comes back from lo to be forwarded.
    forwarded = Chain(FORWARDED, (f"-j {REFUSING}",), (Jump("FORWARD", "-i lo"),))
    return (
        # The chain that is led to comes first: text is read from top to bottom.
        ("filter", (refusing, Chain(CHAIN, _filter(family, uid), output), forwarded)),
        (
            "mangle",
            (
                Chain(CHAIN, _after_routing(family, nflog_group), (Jump("POSTROUTING"),)),
                Chain(ASTRAY, _astray(nflog_group), output),
            ),
        ),
        ("nat", (Chain(CHAIN, _nat(family, uid), output),)),
    )


def _log(nflog_group: int) -> str:
    return f"-j NFLOG --nflog-prefix {NFLOG_PREFIX} --nflog-group {nflog_group}"


def _filter(family: Family, uid: int) -> tuple[str, ...]:
    owner = f"-m owner --uid-owner {uid}"
    engine: tuple[str, ...] = ()
    kernel: tuple[str, ...]
    if family == 4:
        engine = (f"-d {_ENGINE_RESOLVER} -j {REFUSING}",)
        kernel = (
            f"-p icmp {_NOBODYS} -j DROP",
            f"-p igmp {_NOBODYS} -j DROP",
        )
    else:
        kernel = (
            *(f"-p ipv6-icmp -m icmp6 --icmpv6-type {kind} {_NOBODYS} -j ACCEPT" for kind in _NEIGHBOURS),
            f"-p ipv6-icmp {_NOBODYS} -j DROP",
        )
    return (
        f"-d {REFUSED[family]} -p udp {owner} -j REJECT --reject-with {_PROHIBITED[family]}",
        f"{owner} -j ACCEPT",
        *engine,
        # What was redirected: it still counts as leaving by the outer interface here.
        f"-d {_LOOPBACK[family]} -m conntrack --ctstate DNAT -j ACCEPT",
        # The pod's own addresses too: what is local leaves nothing.
        "-o lo -m addrtype --dst-type LOCAL -j ACCEPT",
        f"-p tcp {_NOBODYS} -m conntrack --ctstate ESTABLISHED --ctdir ORIGINAL -j ACCEPT",
        f"-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN {_NOBODYS} -j DROP",
        *kernel,
        f"-j {REFUSING}",
    )


def _after_routing(family: Family, nflog_group: int) -> tuple[str, ...]:
    return (
        "-o lo -j RETURN",
        f"-d {_LOOPBACK[family]} {_log(nflog_group)}",
        f"-d {_LOOPBACK[family]} -j DROP",
    )


def _astray(nflog_group: int) -> tuple[str, ...]:
    astray = "-o lo -m addrtype ! --dst-type LOCAL"
    return (f"{astray} {_log(nflog_group)}", f"{astray} -j DROP")


def _nat(family: Family, uid: int) -> tuple[str, ...]:
    owner = f"-m owner --uid-owner {uid}"
    return (
        f"-d {RESOLVERS[family]} -p udp -m udp --dport 53 {owner} -j REDIRECT --to-ports {DNS_PORT}",
        f"-d {RESOLVERS[family]} -p tcp -m tcp --dport 53 {owner} -j REDIRECT --to-ports {DNS_PORT}",
        f"{owner} -j RETURN",
        f"-p udp -m udp --dport 53 -j REDIRECT --to-ports {DNS_PORT}",
        f"-p tcp -m tcp --dport 53 -j REDIRECT --to-ports {DNS_PORT}",
        "-m addrtype --dst-type LOCAL -j RETURN",
        f"-p tcp -j REDIRECT --to-ports {TRANSPARENT_PORT}",
    )
