"""Who has which address in the lab, and the command scripts that make it so.

Three namespaces, two wires, and no wire to the machine:

    host  11.0.0.2  2600:11::2 ──eth0─────to-host──┐
                                                    world  (every other address, all local to it)
    open  11.0.0.3  2600:11::3 ──eth0─────to-open──┘

The addresses look global on purpose: documentation and private ranges are refused by egressd itself, so
that a lab made of them would prove nothing about an ordinary destination.
"""

from __future__ import annotations

GATEWAY = ("11.0.0.1", "2600:11::1")
HOST = ("11.0.0.2", "2600:11::2")
OPEN = ("11.0.0.3", "2600:11::3")

DNS = "11.0.0.53"
DNS_V6 = "2600:11::53"
DNS_NAME = "dns.lab-origin.com"
"""What its certificate holds, besides its addresses."""
DOT_PORT = 853
DOH_PORT = 4443
"""The web listens on 443 of every address."""

PYPI = "11.0.0.11"
PYTHONHOSTED = "11.0.0.12"
GITHUB = "11.0.0.13"
ANTHROPIC = "11.0.0.14"
DEBIAN = "11.0.0.15"
NPM = "11.0.0.16"
PYPI_UPLOAD = "11.0.0.17"
API = "11.0.0.20"
API_V6 = "2600:11::20"
PASTEBIN = "11.0.0.30"
# 60 addresses that answer like any origin, for the name that has them all
CROWD = tuple(f"11.0.1.{last}" for last in range(1, 61))

REFUSED = "11.0.0.251"
"""An address of the world where no port is open: TCP gets a reset."""
BLACKHOLE = "11.0.0.250"
"""An address of nobody: packets vanish, and a dialer's timeout must end the wait."""

ATTACKER = "11.6.6.6"
ATTACKER_V6 = "2600:6:6::6"
# A public resolver's address, run here by the attacker: what a query to "another server" would reach.
ATTACKER_RESOLVER = "8.8.8.8"
ATTACKERS = (ATTACKER, ATTACKER_V6, ATTACKER_RESOLVER)

METADATA = "169.254.169.254"
METADATA_V6 = "fd00:ec2::254"
METADATA_AZURE = "168.63.129.16"
METADATA_ECS = "169.254.170.2"
METADATA_ALIBABA = "100.100.100.200"
METADATAS_OF_OTHERS = (
    "169.254.170.23",
    "fd00:ec2::23",
    "192.0.0.192",
    "169.254.42.42",
    "fd00:42::42",
    "169.254.0.23",
    "fd20:ce::254",
)
# As a translator or a tunnel of the network would understand them: NAT64, its local prefix, 6to4.
METADATAS_INSIDE_IPV6 = ("64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1")
METADATAS = (
    METADATA,
    METADATA_V6,
    METADATA_AZURE,
    METADATA_ECS,
    METADATA_ALIBABA,
    *METADATAS_OF_OTHERS,
    *METADATAS_INSIDE_IPV6,
)

# A private network behind the world: what a name that resolves inwards would reach.
PRIVATE = "10.20.0.7"
# The same in other ranges that are not the Internet: shared, protocol assignments, documentation, reserved, unique local,
# site-local, discard.
SPECIALS = (
    "100.64.0.10",
    "192.0.0.8",
    "198.51.100.7",
    "240.0.0.1",
    "fd00::1",
    "fec0::1",
    "2001:db8::1",
    "100::1",
)

ORIGINS = (
    PYPI,
    PYTHONHOSTED,
    GITHUB,
    ANTHROPIC,
    DEBIAN,
    NPM,
    PYPI_UPLOAD,
    API,
    API_V6,
    PASTEBIN,
    PRIVATE,
    *SPECIALS,
    *CROWD,
)

TLS_PORTS = (443, 8443)
PLAIN_PORTS = (80, 8080)
BANNER_PORT = 22
# Where the world's attacker listens; TPROXY hands it every other port of the attackers' addresses.
ATTACKER_PORT = 6666

WIRE_TO = {"host": "to-host", "open": "to-open"}
"""The world's end of each wire: what arrives there has left that namespace."""

LINK_ADDRESSES = {
    "host": ("02:00:00:00:01:01", "02:00:00:00:01:02"),
    "open": ("02:00:00:00:02:01", "02:00:00:00:02:02"),
}
"""Of each wire: the world's end, the other end. They are told, not asked for: a neighbour solicitation needs a link-local source
(linux net/ipv6/ndisc.c), which these wires do not have, so what was once learned would be lost after some seconds."""


def world_links(host_netns: str, open_netns: str) -> str:
    """The `ip -batch` script for the world; the arguments are paths of the other two namespaces."""
    local = [*ORIGINS, REFUSED, DNS, DNS_V6, *ATTACKERS, *METADATAS]
    lines = ["link set lo up"]
    lines += [f"addr add {_whole(address)} dev lo" for address in local]
    for place, netns, (v4, v6) in (("host", host_netns, HOST), ("open", open_netns, OPEN)):
        wire, (here, there) = WIRE_TO[place], LINK_ADDRESSES[place]
        lines += [
            f"link add {wire} address {here} type veth peer name eth0 address {there} netns {netns}",
            f"link set {wire} addrgenmode none",
            # On the wire itself: IPv6 answers neighbours only for the receiving device's own addresses.
            f"addr add {GATEWAY[0]}/32 dev {wire}",
            f"addr add {GATEWAY[1]}/128 dev {wire} nodad",
            f"link set {wire} up",
            f"route add {v4}/32 dev {wire}",
            f"route add {v6}/128 dev {wire}",
            f"neigh add {v6} lladdr {there} dev {wire} nud permanent",
        ]
    return "\n".join(lines) + "\n"


def leaf_links(place: str, addresses: tuple[str, str]) -> str:
    """The `ip -batch` script for host or open: its addresses, and everything else by the world."""
    v4, v6 = addresses
    return f"""\
link set lo up
link set eth0 addrgenmode none
addr add {v4}/32 dev eth0
addr add {v6}/128 dev eth0 nodad
link set eth0 up
route add {GATEWAY[0]}/32 dev eth0
route add default via {GATEWAY[0]} dev eth0 src {v4}
route add {GATEWAY[1]}/128 dev eth0
neigh add {GATEWAY[1]} lladdr {LINK_ADDRESSES[place][0]} dev eth0 nud permanent
route add default via {GATEWAY[1]} dev eth0 src {v6}
"""


def world_ruleset(family: int) -> str:
    """The `iptables-restore` text of the world for family 4 or 6: the attacker has all ports of his addresses.

    TPROXY and not REDIRECT: it keeps the destination, which UDP has no other way to tell.
    """
    lines = ["*mangle", ":PREROUTING ACCEPT [0:0]"]
    for address in ATTACKERS:
        if (":" in address) == (family == 6):
            lines += [
                f"-A PREROUTING -d {address} -p {protocol} -j TPROXY --on-port {ATTACKER_PORT}"
                for protocol in ("tcp", "udp")
            ]
    lines += ["COMMIT"]
    if family == 4:
        refuse = f"-A INPUT -d {REFUSED} -p tcp -j REJECT --reject-with tcp-reset"
        lines += ["*filter", ":INPUT ACCEPT [0:0]", refuse, "COMMIT"]
    return "\n".join(lines) + "\n"


def _whole(address: str) -> str:
    return f"{address}/128 nodad" if ":" in address else f"{address}/32"
