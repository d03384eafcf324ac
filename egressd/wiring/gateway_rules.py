"""The packet rules of the gateway wiring: sandboxes behind one interface of this host, told apart by their source address. Pure.

Nothing that comes in by that interface goes anywhere but into egressd's listeners. What was found by attacking a first draft is
marked !.

* **raw**: a source is let through only where it belongs (from its MAC address, by its bridge port). Everything else, sources that
  are nobody's among it, ends here, before it can be a connection.
* **mangle**: what is no TCP connection and no DNS query is logged, while it still has the destination that was meant.
* **nat**: TCP and DNS are led to egressd's listeners, which are bound to this interface alone; the rest comes to this
  host too, to be refused at once !: where forwarding is off, the kernel drops what is for somewhere else without a word.
* **filter**: of what is left nothing is accepted, nothing is forwarded from or to this interface.
* **Counts**: in nat, filter and mangle each source has rules without a target, which let everything pass and count it: what came
  that must have left a record. raw has no say in that: whatever it drops is nobody's.
* **IPv6** is dropped whole: no sandbox needs it, since every name has an IPv4 address here.
"""

import functools
import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import Final
from zlib import crc32

from egressd.wiring.overlay import PREFIX, Chain, Jump, Overlay
from egressd.wiring.ruleset import (
    DNS_PORT,
    NFLOG_PREFIX,
    TRANSPARENT_PORT,
    Counted,
    Family,
    Kind,
    meaning,
    packets,
)

SOURCE_PREFIX: Final = f"{NFLOG_PREFIX}-source"
"""How NFLOG marks a packet whose source is not where it belongs: its source says nothing of who sent it."""
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_INTERFACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
"""Nothing that iptables or a path would read otherwise; IFNAMSIZ is 16."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a source address belongs: alone on the interface, or with this MAC address (lower case), by this port of a bridge."""

    source: str
    mac: str | None = None
    port: str | None = None

    def __post_init__(self) -> None:
        """ValueError for what is no host's address, and what is not in normal form."""
        try:
            address = IPv4Address(self.source)
        except AddressValueError:
            raise ValueError(f"{self.source!r} is no IPv4 address") from None
        if address.is_multicast or address.is_loopback or address.is_unspecified or address.is_reserved:
            raise ValueError(f"{self.source} is no sandbox's address")
        if self.mac is not None and (_MAC.fullmatch(self.mac) is None or int(self.mac[:2], 16) & 1):
            raise ValueError(f"{self.mac!r} is no MAC address of one host, in lower case")
        if self.port is not None:
            checked_interface(self.port)

    @property
    def rule(self) -> str:
        """The rule that lets it pass."""
        words = [f"-s {self.source}/32"]
        if self.port is not None:
            words.append(f"-m physdev --physdev-in {self.port}")
        if self.mac is not None:
            words.append(f"-m mac --mac-source {self.mac}")
        return " ".join([*words, "-j ACCEPT"])


def checked_interface(name: str) -> str:
    """Return the name of an interface; ValueError for what cannot be one, or would mean several."""
    if _INTERFACE.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of an interface")
    return name


def nflog_group(interface: str) -> int:
    """The log group of an interface: the same for every process that asks, another one (most likely) for every interface."""
    return 0x4000 | crc32(interface.encode()) & 0x3FFF


def bindings_chain(interface: str) -> str:
    """The chain whose rules are the bindings, in the table raw; in others, those that count for each source."""
    return f"{PREFIX}-SRC-{interface}"


def counting_rules(source: str) -> dict[str, tuple[tuple[str, Kind], ...]]:
    """The rules that count what a source sends, by table, in the chain that `bindings_chain` names; and what each counts."""
    own = f"-s {source}/32"
    return {
        # One for each connection, however often its first packet was sent.
        "nat": (
            (f"{own} -p tcp -m tcp --dport 53", "dns_connections"),
            (f"{own} -p tcp -m tcp ! --dport 53", "connections"),
        ),
        "filter": ((own, "dns_datagrams"),),
        "mangle": ((own, "packets"),),
    }


def counted(source: str, interface: str, saved: str) -> Counted | None:
    """What was counted of a source, by what `iptables-save -c` printed; None where a rule that counts is gone."""
    found = packets(saved, bindings_chain(interface))
    totals: dict[Kind, int] = {}
    for table, rules in counting_rules(source).items():
        for rule, kind in rules:
            if (table, meaning(rule)) not in found:
                return None
            totals[kind] = found[table, meaning(rule)]
    return Counted(**totals)


def gateway_overlay(family: Family, interface: str) -> Overlay:
    """The chains of one family; raw first, so that nothing is redirected before sources are looked at."""
    return _four(interface) if family == 4 else _six(interface)


def read_bindings(rules: list[str]) -> tuple[list[Binding], list[str]]:
    """The bindings that rules of their chain (as `parse_tables` spells them) say, and the rules that are none."""
    found = [(rule, _read_binding(rule)) for rule in rules]
    return [binding for _, binding in found if binding], [rule for rule, binding in found if not binding]


@functools.lru_cache(maxsize=8192)
def _read_binding(rule: str) -> Binding | None:
    options = dict(re.findall(r"(-s|--physdev-in|--mac-source) (\S+)", rule))
    try:
        binding = Binding(
            options["-s"].removesuffix("/32"),
            options["--mac-source"].lower() if "--mac-source" in options else None,
            options.get("--physdev-in"),
        )
    except (KeyError, ValueError):
        return None
    return binding if _spelled(binding.rule) == _spelled(rule) else None


def _spelled(rule: str) -> str:
    return meaning(rule).lower()  # iptables-save writes MAC addresses in either case


def _four(interface: str) -> Overlay:
    by, from_, log = (
        Jump("PREROUTING", f"-i {interface}"),
        f"{PREFIX}-{interface}",
        _log(interface, NFLOG_PREFIX),
    )
    stray = _log(interface, SOURCE_PREFIX)
    refusing = ("-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT --reject-with icmp-admin-prohibited")
    return (
        (
            "raw",
            (
                Chain(bindings_chain(interface), changing=True),
                Chain(
                    from_,
                    (
                        f"-m rpfilter --invert {stray}",
                        "-m rpfilter --invert -j DROP",
                        f"-j {bindings_chain(interface)}",
                        stray,
                        "-j DROP",
                    ),
                    (by,),
                ),
            ),
        ),
        ("filter", (
            Chain(bindings_chain(interface), changing=True),
            Chain(
                f"{PREFIX}-I-{interface}",
                (
                    f"-p udp -m udp --dport {DNS_PORT} -j {bindings_chain(interface)}",
                    f"-p udp -m udp --dport {DNS_PORT} -j ACCEPT",
                    f"-p tcp -m tcp --dport {DNS_PORT} -j ACCEPT",
                    f"-p tcp -m tcp --dport {TRANSPARENT_PORT} -j ACCEPT",
                    "-p icmp -m conntrack --ctstate RELATED -j ACCEPT",
                    *refusing,
                ),
                (Jump("INPUT", f"-i {interface}"),),
            ),
            Chain(f"{PREFIX}-F-{interface}", refusing, _both_ways(interface)),
        )),
        ("mangle", (
            Chain(bindings_chain(interface), changing=True),
            Chain(
                from_,
                (
                    "-p udp -m udp --dport 53 -m conntrack --ctdir ORIGINAL -j RETURN",
                    "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m conntrack --ctstate NEW -j RETURN",
                    "-p tcp -m conntrack --ctstate ESTABLISHED --ctdir ORIGINAL -j RETURN",
                    "-p icmp -m conntrack --ctstate RELATED -j RETURN",
                    f"-j {bindings_chain(interface)}",
                    log,
                ),
                (by,),
            ),
        )),
        ("nat", (
            Chain(bindings_chain(interface), changing=True),
            Chain(
                from_,
                (
                    f"-j {bindings_chain(interface)}",
                    f"-p udp -m udp --dport 53 -j REDIRECT --to-ports {DNS_PORT}",
                    f"-p tcp -m tcp --dport 53 -j REDIRECT --to-ports {DNS_PORT}",
                    f"-p tcp -j REDIRECT --to-ports {TRANSPARENT_PORT}",
                    "-j REDIRECT",
                ),
                (by,),
            ),
        )),
    )  # fmt: skip


def _six(interface: str) -> Overlay:
    dropping = ("-j DROP",)
    return (
        ("raw", (
            Chain(
                f"{PREFIX}-{interface}",
                (
                    # What every IPv6 host says to its own link, unasked, is no attempt to get anywhere.
                    "-d ff02::/16 -p ipv6-icmp -j DROP",
                    _log(interface, NFLOG_PREFIX),
                    *dropping,
                ),
                (Jump("PREROUTING", f"-i {interface}"),),
            ),
        )),
        ("filter", (
            Chain(f"{PREFIX}-I-{interface}", dropping, (Jump("INPUT", f"-i {interface}"),)),
            Chain(f"{PREFIX}-F-{interface}", dropping, _both_ways(interface)),
        )),
    )  # fmt: skip


def _log(interface: str, prefix: str) -> str:
    return f"-j NFLOG --nflog-prefix {prefix} --nflog-group {nflog_group(interface)}"


def _both_ways(interface: str) -> tuple[Jump, Jump]:
    return Jump("FORWARD", f"-i {interface}"), Jump("FORWARD", f"-o {interface}")
