"""Addresses: every block at both edges, every embedding, every metadata endpoint, and the names that are never resolved."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.addresses import BLOCKS, FLOOR_NAMES, Block, classify, embedded, is_floor_name
from egressd.policy.names import parse_name
from egressd.policy.reasons import Reason

SPECIAL = Reason.SPECIAL_ADDRESS
METADATA = Reason.FLOOR_METADATA
LOOPBACK = Reason.FLOOR_LOOPBACK
LINK_LOCAL = Reason.FLOOR_LINK_LOCAL
UNSPECIFIED = Reason.FLOOR_UNSPECIFIED
MULTICAST = Reason.FLOOR_MULTICAST
OWN = Reason.FLOOR_OWN_ADDRESS

# The IANA special-purpose registries as of their last change, whatever they say of global reach; our table must hold each.
IANA = """
0.0.0.0/8 0.0.0.0/32 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29 192.0.0.8/32
192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24
192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4 255.255.255.255/32 ::1/128 ::/128
::ffff:0:0/96 64:ff9b::/96 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128
2001:1::3/128 2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2002::/16
2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10
"""


@pytest.mark.parametrize("text", IANA.split())
def test_no_address_of_the_registries_is_public(text: str) -> None:
    network = ip_network(text)
    assert classify(network.network_address).kind != "public"
    assert classify(network.broadcast_address).kind != "public"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(block.network))
def test_each_block_holds_at_both_edges(block: Block) -> None:
    for edge in (block.network.network_address, block.network.broadcast_address):
        found = classify(edge)
        # A worse block inside this one, or an address inside the address, may win; a milder one may not.
        assert found == block.found or found.kind == "floor"


# The last address before and the first one behind each block, where the neighbour is global unicast.
NEIGHBOURS = """
1.0.0.0 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 168.63.129.15 168.63.129.17
169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0 192.0.1.255 192.0.3.0 192.31.195.255
192.31.197.0 192.52.192.255 192.52.194.0 192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 192.175.47.255 192.175.49.0
198.17.255.255 198.20.0.0 198.51.99.255 198.51.101.0 203.0.112.255 203.0.114.0 223.255.255.255 2000::
2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff 2001:200:: 2001:db7:ffff:ffff:ffff:ffff:ffff:ffff 2001:db9::
2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff 2003:: 2620:4f:7fff:ffff:ffff:ffff:ffff:ffff 2620:4f:8001::
3ffd:ffff:ffff:ffff:ffff:ffff:ffff:ffff 3fff:1000:: 3fff:ffff:ffff:ffff:: 11.0.0.9 8.8.8.8 2606:4700:4700::1111
"""


@pytest.mark.parametrize("text", NEIGHBOURS.split())
def test_the_neighbours_of_the_blocks_are_public(text: str) -> None:
    assert classify(ip_address(text)).kind == "public"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("0.0.0.0", UNSPECIFIED, id="IP-04 unspecified"),
        pytest.param("0.255.255.255", UNSPECIFIED, id="IP-04 the whole of 0/8"),
        pytest.param("::", UNSPECIFIED, id="IP-04 unspecified IPv6"),
        pytest.param("127.255.255.255", LOOPBACK, id="the whole of 127/8"),
        pytest.param("::1", LOOPBACK, id="IPv6 loopback"),
        pytest.param("::ffff:169.254.169.254", METADATA, id="IP-05 mapped metadata"),
        pytest.param("::ffff:127.0.0.1", LOOPBACK, id="IP-05 mapped loopback"),
        pytest.param("::ffff:8.8.8.8", SPECIAL, id="IP-05 mapped public is special"),
        pytest.param("::7f00:1", LOOPBACK, id="IP-06 compatible"),
        pytest.param("::8.8.8.8", SPECIAL, id="IP-06 compatible public is special"),
        pytest.param("::ffff:0:127.0.0.1", LOOPBACK, id="IP-06 translated"),
        pytest.param("2002:a9fe:a9fe::1", METADATA, id="IP-06 6to4"),
        pytest.param("2002:808:808::1", SPECIAL, id="IP-06 6to4 of a public address"),
        pytest.param("64:ff9b::a9fe:a9fe", METADATA, id="IP-06 NAT64"),
        pytest.param("64:ff9b::808:808", SPECIAL, id="IP-06 NAT64 of a public address"),
        pytest.param("64:ff9b:1::a9fe:a9fe", METADATA, id="IP-06 local NAT64, /96 layout"),
        pytest.param("64:ff9b:1:a9fe:a9:fe00::", METADATA, id="IP-06 local NAT64, /48 layout"),
        pytest.param("64:ff9b:1:a9:fe:a9fe::", METADATA, id="IP-06 local NAT64, /56 layout"),
        pytest.param("64:ff9b:1::a9:fea9:fe00:0", METADATA, id="IP-06 local NAT64, /64 layout"),
        pytest.param("64:ff9b:1:7f00:0:100::", LOOPBACK, id="IP-06 local NAT64 of loopback, /48 layout"),
        pytest.param("64:ff9b:1::808:808", SPECIAL, id="IP-06 local NAT64 of a public address, /96 layout"),
        pytest.param(
            "64:ff9b:1:808:8:800::", SPECIAL, id="IP-06 local NAT64 of a public address, /48 layout"
        ),
        pytest.param("64:ff9b:1::", UNSPECIFIED, id="IP-06 local NAT64 of nothing"),
        pytest.param("2001:0:808:808::5601:5601", METADATA, id="IP-06 Teredo client, bits turned over"),
        pytest.param("2001:0:7f00:1::f7f7:f7f7", LOOPBACK, id="IP-06 Teredo server"),
        pytest.param("2001:0:808:808::f7f7:f7f7", SPECIAL, id="IP-06 Teredo between public addresses"),
        pytest.param("2600::5efe:7f00:1", LOOPBACK, id="IP-06 ISATAP"),
        pytest.param("2600::200:5efe:a9fe:a9fe", METADATA, id="IP-06 ISATAP with the universal bit"),
        pytest.param("2600::5efe:808:808", SPECIAL, id="IP-06 ISATAP of a public address"),
        pytest.param("fd00::5efe:7f00:1", LOOPBACK, id="IP-06 ISATAP inside unique local"),
        pytest.param("100.64.0.10", SPECIAL, id="IP-08 carrier-grade NAT"),
        pytest.param("100.100.100.200", METADATA, id="IP-08 META-07 Alibaba inside it"),
        pytest.param("198.18.0.1", OWN, id="IP-09 benchmarking is egressd's own"),
        pytest.param("192.0.0.8", SPECIAL, id="IP-09 dummy address"),
        pytest.param("240.0.0.1", SPECIAL, id="IP-09 reserved"),
        pytest.param("224.0.0.1", MULTICAST, id="IP-09 multicast"),
        pytest.param("255.255.255.255", MULTICAST, id="IP-09 broadcast"),
        pytest.param("192.88.99.1", SPECIAL, id="IP-09 6to4 anycast"),
        pytest.param("fd00::1", SPECIAL, id="IP-10 unique local"),
        pytest.param("fec0::1", SPECIAL, id="IP-10 site-local"),
        pytest.param("fe80::1", LINK_LOCAL, id="IP-10 link-local"),
        pytest.param("ff02::1", MULTICAST, id="IP-10 multicast"),
        pytest.param("100::1", SPECIAL, id="IP-10 discard"),
        pytest.param("2001:db8::1", SPECIAL, id="IP-10 documentation"),
        pytest.param("2001:2::fe", OWN, id="the address on the sandbox' own interface"),
        pytest.param("4000::1", SPECIAL, id="outside global unicast"),
        pytest.param("1fff:ffff::", SPECIAL, id="just below global unicast"),
        pytest.param("fe80::1%eth0", LINK_LOCAL, id="IP-11 a zone id"),
        pytest.param("2606:4700::1%eth0", LINK_LOCAL, id="IP-11 a zone id on a public address"),
        pytest.param("169.254.1.1", LINK_LOCAL, id="link-local IPv4"),
        pytest.param("169.254.169.254", METADATA, id="META-01 most clouds"),
        pytest.param("fd00:ec2::254", METADATA, id="META-02 AWS over IPv6"),
        pytest.param("169.254.170.2", METADATA, id="META-03 ECS"),
        pytest.param("169.254.170.23", METADATA, id="META-04 EKS"),
        pytest.param("fd00:ec2::23", METADATA, id="META-04 EKS over IPv6"),
        pytest.param("fd20:ce::254", METADATA, id="META-05 GCP over IPv6"),
        pytest.param("168.63.129.16", METADATA, id="META-06 Azure WireServer"),
        pytest.param("192.0.0.192", METADATA, id="META-07 Oracle"),
        pytest.param("169.254.42.42", METADATA, id="META-07 Scaleway"),
        pytest.param("fd00:42::42", METADATA, id="META-07 Scaleway over IPv6"),
        pytest.param("169.254.0.23", METADATA, id="META-07 Tencent"),
    ],
)
def test_class(text: str, reason: Reason) -> None:
    found = classify(ip_address(text))
    assert found.reason is reason
    assert found.kind == ("special" if reason is SPECIAL else "floor")
    assert found.range


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param("metadata.google.internal", METADATA, id="META-05 GCP"),
        pytest.param("metadata", METADATA, id="META-05 GCP's short name"),
        pytest.param("metadata.goog", METADATA, id="META-05 GCP's other name"),
        pytest.param("x.metadata.google.internal", METADATA, id="META-05 below it"),
        pytest.param("metadata.elsewhere.internal", METADATA, id="META-05 any .internal metadata"),
        pytest.param("instance-data", METADATA, id="AWS by name"),
        pytest.param("instance-data.ec2.internal", METADATA, id="AWS by full name"),
        pytest.param("metadata.tencentyun.com", METADATA, id="META-07 Tencent"),
        pytest.param("kubernetes.default.svc", Reason.FLOOR_NAME, id="META-08 the Kubernetes API"),
        pytest.param(
            "kubernetes.default.svc.cluster.local", Reason.FLOOR_NAME, id="META-08 by its full name"
        ),
        pytest.param("host.docker.internal", Reason.FLOOR_NAME, id="META-09 Docker's host"),
        pytest.param("gateway.docker.internal", Reason.FLOOR_NAME, id="META-09 Docker's gateway"),
        pytest.param("host.containers.internal", Reason.FLOOR_NAME, id="META-09 Podman's host"),
        pytest.param("localhost", Reason.FLOOR_NAME, id="NAME-26 localhost"),
        pytest.param("intranet", Reason.FLOOR_NAME, id="NAME-26 any single label"),
        pytest.param("a.localhost", Reason.FLOOR_NAME, id="below localhost"),
        pytest.param("localhost.localdomain", Reason.FLOOR_NAME, id="localhost of old hosts files"),
        pytest.param("ip6-localhost", Reason.FLOOR_NAME, id="localhost of Debian's hosts file"),
        pytest.param("1.0.0.127.in-addr.arpa", Reason.FLOOR_NAME, id="a reverse name"),
        pytest.param("x.ip6.arpa", Reason.FLOOR_NAME, id="an IPv6 reverse name"),
        pytest.param("printer.local", Reason.FLOOR_NAME, id="multicast DNS"),
        pytest.param("x.onion", Reason.FLOOR_NAME, id="an onion service"),
        pytest.param("egressd.internal", Reason.FLOOR_NAME, id="egressd itself"),
        pytest.param("db.internal", None, id="another internal name needs a rule and an address range"),
        pytest.param("metadata.example.com", None, id="metadata of somebody else"),
        pytest.param("evilmetadata.goog", None, id="no label boundary"),
        pytest.param("metadata.google.internal.evil.test", None, id="only a prefix"),
        pytest.param("docker.com", None, id="a public name"),
    ],
)
def test_floor_names(raw: str, reason: Reason | None) -> None:
    name = parse_name(raw)
    assert isinstance(name, tuple)
    assert is_floor_name(name) is reason


def test_floor_names_are_names() -> None:
    for text in FLOOR_NAMES:
        assert parse_name(text) == tuple(text.split("."))
    assert is_floor_name(()) is Reason.FLOOR_NAME


INSIDE = [
    lambda v4: IPv6Address(0xFFFF << 32 | v4),
    lambda v4: IPv6Address(0xFFFF_0000 << 32 | v4),
    lambda v4: IPv6Address(0x0064_FF9B << 96 | v4),
    lambda v4: IPv6Address(0x0064_FF9B_0001 << 80 | v4),
    lambda v4: IPv6Address(0x2002 << 112 | v4 << 80 | 1),
    lambda v4: IPv6Address(0x2001_0000 << 96 | v4 << 64 | 0xF7F7_F7F7),
    lambda v4: IPv6Address(0x2001_0000 << 96 | 0x0808_0808 << 64 | (v4 ^ 0xFFFF_FFFF)),
    lambda v4: IPv6Address(0x2600 << 112 | 0x5EFE << 32 | v4),
    lambda v4: IPv6Address(0x2600 << 112 | 0x0200_5EFE << 32 | v4),
]
V4 = st.one_of(st.ip_addresses(v=4), st.sampled_from(BLOCKS).map(lambda b: b.network.network_address)).filter(
    lambda address: isinstance(address, IPv4Address)
)


@given(V4, st.sampled_from(range(len(INSIDE))))
def test_no_embedding_is_better_than_what_it_carries(v4: IPv4Address, wrapping: int) -> None:
    plain, wrapped = classify(v4), classify(INSIDE[wrapping](int(v4)))
    assert wrapped.kind != "public"
    if plain.kind == "floor":
        assert wrapped.reason is plain.reason


@given(st.ip_addresses())
def test_what_the_library_calls_private_is_never_public_here(address: IPv4Address | IPv6Address) -> None:
    found = classify(address)
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert found.kind != "public"
    if isinstance(address, IPv6Address) and address not in ipaddress.ip_network("2000::/3"):
        assert found.kind != "public"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        assert address.ipv4_mapped in embedded(address)
