"""What the lab saw of a verification: whatever left egressd's place, but for what the rules' own allowed request needs."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from egressd.lab import Lab, topology
from egressd.policy.addresses import BLOCKS, FLOOR_NAMES
from egressd.policy.reasons import Reason
from egressd.verify.probe import listed
from egressd.verify.scene import Allowed, Edge

EVIL = "evil-lab.com"
RESOLVERS = (topology.ATTACKER_RESOLVER, topology.ATTACKER_V6)
SERVED = {"https": frozenset(topology.TLS_PORTS), "http": frozenset(topology.PLAIN_PORTS)}
TARGETS = (topology.ATTACKER, topology.ATTACKER_V6)
SPECIAL = (
    topology.PRIVATE, *topology.SPECIALS, "10.0.0.1", "172.17.0.1", "192.168.1.1", "100.64.0.1", "fd12:3456:789a::1",
)  # fmt: skip
_CHATTER = range(130, 144)  # ICMPv6 types of neighbour discovery and multicast reports: the kernel's own
_OTHER_NAMES = (
    "metadata", "instance-data", "kubernetes", "kubernetes.default.svc.cluster.local", "host.docker.internal",
    "gateway.docker.internal", "host.containers.internal",
)  # fmt: skip


def metadata_addresses() -> list[str]:
    """Return every cloud's metadata endpoint: those that the lab serves, and the others that the floor names."""
    single = (
        block.network.network_address
        for block in BLOCKS
        if block.found.reason is Reason.FLOOR_METADATA and block.network.num_addresses == 1
    )
    # A link-local address needs a device's name behind it, and what is on such a link is not the lab's.
    known = [str(address) for address in single if not (address.version == 6 and address.is_link_local)]
    return list(dict.fromkeys((*topology.METADATAS, "::ffff:169.254.169.254", *known)))


def metadata_names() -> list[str]:
    """Return the names of metadata endpoints and control planes."""
    named = [name for name, reason in FLOOR_NAMES.items() if reason is Reason.FLOOR_METADATA]
    return [*named, *_OTHER_NAMES]


@dataclass(frozen=True, slots=True)
class Seen:
    """What left, in words; empty where nothing did that should not have."""

    packets: tuple[str, ...]
    questions: tuple[str, ...]
    requests: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.packets or self.questions or self.requests)

    def __str__(self) -> str:
        parts = [f"packets left for {listed(list(self.packets))}"] if self.packets else []
        parts += [f"DNS was asked for {listed(list(self.questions))}"] if self.questions else []
        parts += [f"a site was asked for {listed(list(self.requests))}"] if self.requests else []
        return "; ".join(parts)


class World:
    """The lab, shaped for the names of one verification; `seen` is what left since the last time that it was asked."""

    def __init__(self, lab: Lab, allowed: Allowed | None, wild: str, edges: Iterable[Edge]) -> None:
        self.lab = lab
        self._allowed = allowed.name if allowed else ""
        self._total: list[Seen] = []
        theirs = {"a": [topology.ATTACKER], "aaaa": [topology.ATTACKER_V6]}
        ours = {"a": [topology.API], "aaaa": [topology.API_V6]}
        for name in metadata_names():
            lab.set_name(name, a=[topology.METADATA], aaaa=[topology.METADATA_V6])
        for edge in edges:
            lab.set_name(edge.name, **theirs)
        if wild:
            lab.set_name(f"*.{wild}", **ours)
        if allowed:
            lab.set_name(allowed.name, **ours)
        lab.forget()

    def seen(self) -> Seen:
        """Return what has left since, and forget it."""
        welcome = {topology.API, topology.API_V6}
        packets = {
            f"{flow.address} ({flow.protocol} {flow.port})"
            for flow in self.lab.packets("host")
            if not _is_chatter(flow.protocol, flow.port, flow.address)
            and flow.address not in welcome
            and (flow.address, flow.port) != (topology.DNS, 53)
        }
        questions = {query.name for query in self.lab.dns_queries()} - {self._allowed}
        requests = {request.host for request in self.lab.requests()} - {self._allowed}
        requests |= {f"metadata at {request.address}" for request in self.lab.metadata_hits()}
        seen = Seen(tuple(sorted(packets)), tuple(sorted(questions)), tuple(sorted(requests)))
        self._total.append(seen)
        self.lab.forget()
        return seen

    def lost(self) -> int:
        """Return the packets that the capture missed: with any, what it did not see proves nothing."""
        return self.lab.packets_lost()

    def total(self) -> Seen:
        """Return everything that has left."""
        every = [[part for seen in self._total for part in getattr(seen, name)] for name in Seen.__slots__]
        return Seen(*(tuple(sorted(set(parts))) for parts in every))


def _is_chatter(protocol: str, kind: int, address: str) -> bool:
    return protocol == "icmp6" and kind in _CHATTER and ipaddress.ip_address(address).version == 6
