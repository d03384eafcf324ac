"""What an IP address is: public, special, or below the floor that no rule lifts (law 5).

The table is our own, from the IANA IPv4 and IPv6 Special-Purpose Address Registries and the multicast
registries, with what they lack: the address metadata endpoints of clouds, deprecated site-local space,
returned 6bone space, and the ranges that egressd's own wiring uses. The standard library's `is_global` and
`is_private` are not asked: they changed between patch releases and call `64:ff9b::a9fe:a9fe` and
`168.63.129.16` global.

Global unicast IPv6 is 2000::/3 and nothing else. An address that carries another one inside (mapped,
compatible, translated, NAT64, 6to4, Teredo, ISATAP) gets the worst class of the two, and is special even when
what it carries is public: who dials it reaches a host that we did not classify.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Literal

from egressd.policy.attempt import Address, Name
from egressd.policy.reasons import Reason

type Network = IPv4Network | IPv6Network
type Kind = Literal["public", "floor", "special"]


@dataclass(frozen=True, slots=True)
class AddressClass:
    """The class of an address; `reason` is None for a public one, `range` names the block with its source (""
    for public).
    """

    kind: Kind
    reason: Reason | None
    range: str


PUBLIC = AddressClass("public", None, "")

_SPECIAL = Reason.SPECIAL_ADDRESS
_METADATA = Reason.FLOOR_METADATA

# The worst first: where blocks overlap, and between an address and the one inside it, the first of these
# wins.
_SEVERITY = (
    Reason.FLOOR_METADATA,
    Reason.FLOOR_LOOPBACK,
    Reason.FLOOR_UNSPECIFIED,
    Reason.FLOOR_LINK_LOCAL,
    Reason.FLOOR_MULTICAST,
    Reason.FLOOR_OWN_ADDRESS,
    Reason.SPECIAL_ADDRESS,
)

# block, name, source, reason. In the order of the registries; endpoints of clouds first.
_TABLE: tuple[tuple[str, str, str, Reason], ...] = (
    ("169.254.169.254/32", "instance metadata of most clouds", "AWS, GCP, Azure, OpenStack", _METADATA),
    ("169.254.169.253/32", "Amazon DNS", "AWS", _METADATA),
    ("169.254.169.123/32", "Amazon time", "AWS", _METADATA),
    ("169.254.170.2/32", "ECS task credentials", "AWS", _METADATA),
    ("169.254.170.23/32", "EKS Pod Identity agent", "AWS", _METADATA),
    ("169.254.42.42/32", "Scaleway metadata", "Scaleway", _METADATA),
    ("169.254.0.23/32", "Tencent metadata", "Tencent Cloud", _METADATA),
    ("168.63.129.16/32", "Azure WireServer", "Azure", _METADATA),
    ("100.100.100.200/32", "Alibaba metadata", "Alibaba Cloud", _METADATA),
    ("192.0.0.192/32", "Oracle metadata", "Oracle Cloud", _METADATA),
    ("fd00:ec2::/32", "Amazon instance services", "AWS", _METADATA),
    ("fd20:ce::254/128", "Google metadata", "GCP", _METADATA),
    ("fd00:c1::a9fe:a9fe/128", "Oracle metadata", "Oracle Cloud", _METADATA),
    ("fd00:42::42/128", "Scaleway metadata", "Scaleway", _METADATA),
    ("fe80::a9fe:a9fe/128", "OpenStack metadata", "OpenStack", _METADATA),
    ("0.0.0.0/8", "this network", "RFC 791", Reason.FLOOR_UNSPECIFIED),
    ("10.0.0.0/8", "private use", "RFC 1918", _SPECIAL),
    ("100.64.0.0/10", "shared address space", "RFC 6598", _SPECIAL),
    ("127.0.0.0/8", "loopback", "RFC 1122", Reason.FLOOR_LOOPBACK),
    ("169.254.0.0/16", "link-local", "RFC 3927", Reason.FLOOR_LINK_LOCAL),
    ("172.16.0.0/12", "private use", "RFC 1918", _SPECIAL),
    ("192.0.0.0/24", "IETF protocol assignments", "RFC 6890", _SPECIAL),
    ("192.0.2.0/24", "documentation", "RFC 5737", _SPECIAL),
    ("192.31.196.0/24", "AS112", "RFC 7535", _SPECIAL),
    ("192.52.193.0/24", "automatic multicast tunnelling", "RFC 7450", _SPECIAL),
    ("192.88.99.0/24", "deprecated 6to4 relay anycast", "RFC 7526", _SPECIAL),
    ("192.168.0.0/16", "private use", "RFC 1918", _SPECIAL),
    ("192.175.48.0/24", "AS112 direct delegation", "RFC 7534", _SPECIAL),
    # Benchmarking (RFC 2544), and here the range of the synthetic addresses: nothing outside may ever answer
    # to one.
    ("198.18.0.0/15", "benchmarking, egressd's own", "RFC 2544", Reason.FLOOR_OWN_ADDRESS),
    ("198.51.100.0/24", "documentation", "RFC 5737", _SPECIAL),
    ("203.0.113.0/24", "documentation", "RFC 5737", _SPECIAL),
    ("224.0.0.0/4", "multicast", "RFC 5771", Reason.FLOOR_MULTICAST),
    ("240.0.0.0/4", "reserved", "RFC 1112", _SPECIAL),
    ("255.255.255.255/32", "limited broadcast", "RFC 919", Reason.FLOOR_MULTICAST),
    ("::1/128", "loopback", "RFC 4291", Reason.FLOOR_LOOPBACK),
    ("::/128", "unspecified", "RFC 4291", Reason.FLOOR_UNSPECIFIED),
    ("::/96", "IPv4-compatible", "RFC 4291", _SPECIAL),
    ("::ffff:0:0/96", "IPv4-mapped", "RFC 4291", _SPECIAL),
    ("::ffff:0:0:0/96", "IPv4-translated", "RFC 2765", _SPECIAL),
    ("64:ff9b::/96", "NAT64", "RFC 6052", _SPECIAL),
    ("64:ff9b:1::/48", "local-use NAT64", "RFC 8215", _SPECIAL),
    ("100::/64", "discard only", "RFC 6666", _SPECIAL),
    ("100:0:0:1::/64", "dummy prefix", "RFC 9780", _SPECIAL),
    ("2001::/23", "IETF protocol assignments", "RFC 2928", _SPECIAL),
    ("2001::/32", "Teredo", "RFC 4380", _SPECIAL),
    # Benchmarking (RFC 5180), and the fixed address on the loopback interface of our namespaces.
    ("2001:2::/48", "benchmarking, egressd's own", "RFC 5180", Reason.FLOOR_OWN_ADDRESS),
    ("2001:db8::/32", "documentation", "RFC 3849", _SPECIAL),
    ("2002::/16", "6to4", "RFC 3056", _SPECIAL),
    ("2620:4f:8000::/48", "AS112 direct delegation", "RFC 7534", _SPECIAL),
    ("3ffe::/16", "6bone, returned", "RFC 3701", _SPECIAL),
    ("3fff::/20", "documentation", "RFC 9637", _SPECIAL),
    ("5f00::/16", "segment routing identifiers", "RFC 9602", _SPECIAL),
    ("fc00::/7", "unique local", "RFC 4193", _SPECIAL),
    ("fe80::/10", "link-local", "RFC 4291", Reason.FLOOR_LINK_LOCAL),
    ("fec0::/10", "deprecated site-local", "RFC 3879", _SPECIAL),
    ("ff00::/8", "multicast", "RFC 4291", Reason.FLOOR_MULTICAST),
)


@dataclass(frozen=True, slots=True)
class Block:
    """One row of the table: a network, its class, and bounds as integers so that a look-up compares and does
    not parse.
    """

    network: Network
    found: AddressClass
    severity: int
    first: int
    last: int


def _block(text: str, name: str, source: str, reason: Reason) -> Block:
    network = ip_network(text)
    found = AddressClass(
        "special" if reason is _SPECIAL else "floor", reason, f"{network}, {name} ({source})"
    )
    bounds = int(network.network_address), int(network.broadcast_address)
    return Block(network, found, _SEVERITY.index(reason), *bounds)


# Worst first, so that the first hit is the answer.
BLOCKS = tuple(sorted((_block(*row) for row in _TABLE), key=lambda block: block.severity))
_BLOCKS_4 = tuple(block for block in BLOCKS if block.network.version == 4)
_BLOCKS_6 = tuple(block for block in BLOCKS if block.network.version == 6)

_OUTSIDE = AddressClass("special", _SPECIAL, "outside 2000::/3, not global unicast (RFC 4291)")
_ISATAP = AddressClass("special", _SPECIAL, "an ISATAP interface identifier (RFC 5214)")
_ZONE = AddressClass("floor", Reason.FLOOR_LINK_LOCAL, "an address with a zone id (RFC 4007)")


def classify(address: Address) -> AddressClass:
    """Return the worst class of `address` and of every IPv4 address that it carries inside."""
    value = int(address)
    if isinstance(address, IPv4Address):
        return _look_up(value, _BLOCKS_4, PUBLIC)
    if address.scope_id is not None:
        return _ZONE
    found = _look_up(value, _BLOCKS_6, PUBLIC if value >> 125 == 1 else _OUTSIDE)
    if found.kind == "public" and _is_isatap(value):
        found = _ISATAP
    for inner in embedded(address):
        inside = classify(inner)
        if _severity(inside) < _severity(found):
            found = AddressClass(inside.kind, inside.reason, f"{inner} inside IPv6: {inside.range}")
    return found


def embedded(address: IPv6Address) -> Iterator[IPv4Address]:
    """Give every IPv4 address that a translator, tunnel or stack could read out of `address`."""
    value = int(address)
    low = value & 0xFFFF_FFFF
    prefix = value >> 32
    if prefix in (0, 0xFFFF, 0xFFFF_0000, 0x0064_FF9B << 64):
        yield IPv4Address(low)  # compatible, mapped, translated, NAT64
    if value >> 80 == 0x0064_FF9B_0001:
        yield from _nat64_local(value)
    if value >> 112 == 0x2002:
        yield IPv4Address(value >> 80 & 0xFFFF_FFFF)  # 6to4
    if value >> 96 == 0x2001_0000:
        yield IPv4Address(value >> 64 & 0xFFFF_FFFF)  # the Teredo server
        yield IPv4Address(low ^ 0xFFFF_FFFF)  # the Teredo client, written with every bit turned over
    if _is_isatap(value):
        yield IPv4Address(low)


def is_floor_name(name: Name) -> Reason | None:
    """Return why `name` is never resolved for a sandbox, or None: `floor_metadata` for metadata endpoints,
    else `floor_name`.

    Single labels are always below the floor: what they mean hangs on the host's search list and hosts file.
    """
    if len(name) < 2:
        return _METADATA if name and name[0] in _METADATA_LABELS else Reason.FLOOR_NAME
    if name[-1] == "internal" and name[0] in _METADATA_LABELS:
        return _METADATA
    # No floor name has more labels than these.
    for depth in range(1, min(len(name), _DEEPEST) + 1):
        reason = FLOOR_NAMES.get(".".join(name[-depth:]))
        if reason is not None:
            return reason
    return None


def _look_up(value: int, blocks: tuple[Block, ...], otherwise: AddressClass) -> AddressClass:
    for block in blocks:
        if block.first <= value <= block.last:
            return block.found
    return otherwise


def _severity(found: AddressClass) -> int:
    return len(_SEVERITY) if found.reason is None else _SEVERITY.index(found.reason)


def _is_isatap(value: int) -> bool:
    """Whether the interface identifier is `[ug]00:5efe` and an IPv4 address (RFC 5214, 6.1), whatever the u
    and g bits say.
    """
    return value >> 32 & 0xFCFF_FFFF == 0x0000_5EFE


def _nat64_local(value: int) -> Iterator[IPv4Address]:
    """Read 64:ff9b:1::/48 in each layout of RFC 6052 (2.2) that fits behind a /48.

    Which one a network uses cannot be seen. Most readings of most addresses are padding, which comes out as
    0.0.0.0/8; those count only where no reading is more than padding.
    """
    readings = {
        value & 0xFFFF_FFFF,  # /96
        (value >> 64 & 0xFFFF) << 16 | value >> 40 & 0xFFFF,  # /48: around the u octet
        (value >> 64 & 0xFF) << 24 | value >> 32 & 0xFF_FFFF,  # /56: around the u octet
        value >> 24 & 0xFFFF_FFFF,  # /64: behind the u octet
    }
    telling = {reading for reading in readings if reading >> 24} or readings
    return map(IPv4Address, sorted(telling))


_METADATA_LABELS = frozenset({"metadata", "instance-data", "rancher-metadata"})

# Each of these and every name below it. Their meaning is the host's own, or a control plane's, or an address'
# name (PTR).
FLOOR_NAMES: dict[str, Reason] = {
    "metadata.google.internal": _METADATA,
    "metadata.goog": _METADATA,
    "instance-data.ec2.internal": _METADATA,
    "metadata.tencentyun.com": _METADATA,
    "metadata.platformequinix.com": _METADATA,
    "metadata.packet.net": _METADATA,
    "api.metadata.cloud.ibm.com": _METADATA,
    "localhost": Reason.FLOOR_NAME,  # RFC 6761, 6.3
    "localdomain": Reason.FLOOR_NAME,
    "local": Reason.FLOOR_NAME,  # RFC 6762: multicast DNS; also cluster.local
    "onion": Reason.FLOOR_NAME,  # RFC 7686
    "alt": Reason.FLOOR_NAME,  # RFC 9476
    "svc": Reason.FLOOR_NAME,  # Kubernetes services, without and with the search list
    "kubernetes.default": Reason.FLOOR_NAME,
    "in-addr.arpa": Reason.FLOOR_NAME,
    "ip6.arpa": Reason.FLOOR_NAME,
    "docker.internal": Reason.FLOOR_NAME,  # host., gateway., kubernetes., vm.
    "containers.internal": Reason.FLOOR_NAME,  # Podman's host and gateway
    "lima.internal": Reason.FLOOR_NAME,
    "minikube.internal": Reason.FLOOR_NAME,
    "k3d.internal": Reason.FLOOR_NAME,
    "orb.internal": Reason.FLOOR_NAME,
    "egressd.internal": Reason.FLOOR_NAME,  # answered by egressd itself, never resolved
}
_DEEPEST = max(text.count(".") + 1 for text in FLOOR_NAMES)
