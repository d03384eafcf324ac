"""Networks as rule files write them: normal form, outside the floor, and narrow enough to mean something."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network

from egressd.policy.addresses import BLOCKS, embedded
from egressd.policy.reasons import Reason
from egressd.rulefiles.problems import Code, Findings, Place, quoted

type Network = IPv4Network | IPv6Network

_WIDEST = {4: 8, 6: 7}
"""10.0.0.0/8 and fc00::/7 are the widest networks that anybody owns."""


def read_network(raw: str, path: str, place: Place, findings: Findings) -> Network | None:
    """Return the network that `raw` writes in normal form, or None after adding its problem."""
    try:
        network = ip_network(raw, strict=False)
    except ValueError:
        hint = "like 10.20.0.0/16, 10.30.0.7/32 or fd00:1::/64; no leading zeros"
        findings.add(path, place, Code.BAD_NETWORK, f"{quoted(raw)} is no network", hint)
        return None
    if "%" in raw:  # compares as inside no network, not even its own without the zone
        message = f"{quoted(raw)} names a zone, which is one machine's own"
        findings.add(path, place, Code.BAD_NETWORK, message, "name the network without what follows %")
        return None
    if str(network) != raw:
        message = f"{quoted(raw)} is not a network in normal form"
        findings.add(path, place, Code.BAD_NETWORK, message, f"write {_proposal(raw, network)}")
        return None
    if isinstance(network, IPv6Network) and next(embedded(network.network_address), None) is not None:
        message = f"{quoted(raw)} stands for IPv4 addresses inside IPv6"
        findings.add(path, place, Code.BAD_NETWORK, message, "name the IPv4 network")
        return None
    if network.prefixlen < _WIDEST[network.version]:
        message = f"{quoted(raw)} is wider than any one owner's network"
        findings.add(
            path, place, Code.BAD_NETWORK, message, f"name networks of /{_WIDEST[network.version]} or longer"
        )
        return None
    refused = _floor(network)
    if refused:
        findings.add(
            path, place, Code.FLOOR_NETWORK, f"{quoted(raw)} lies in {refused}, which no rule can allow"
        )
        return None
    return network


def is_public(network: Network) -> bool:
    """Return whether no special range has a part in the network."""
    return not any(_overlap(network, block.network) for block in BLOCKS)


def _floor(network: Network) -> str:
    for block in BLOCKS:
        if block.found.kind != "floor":
            continue
        # A rule may be wider than a piece of the floor, which wins at the dial; egressd's own range may not be touched at all.
        own = block.found.reason is Reason.FLOOR_OWN_ADDRESS and _overlap(network, block.network)
        if own or _inside(network, block.network):
            return block.found.range
    return ""


def _overlap(one: Network, other: Network) -> bool:
    return one.version == other.version and one.overlaps(other)


def _inside(one: Network, other: Network) -> bool:
    if isinstance(one, IPv4Network):
        return isinstance(other, IPv4Network) and one.subnet_of(other)
    return isinstance(other, IPv6Network) and one.subnet_of(other)


def _proposal(raw: str, network: Network) -> str:
    # 10.20.1.7/16 is one address or its network: the writer knows which.
    host, slash, _ = raw.partition("/")
    if slash and host != str(network.network_address) and network.prefixlen < network.max_prefixlen:
        single = ip_network(host)
        return f"{network} for the network or {single} for the one address"
    return str(network)
