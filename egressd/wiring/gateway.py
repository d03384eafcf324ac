"""The `gateway` wiring: sandboxes behind an interface or a bridge of this host, whose only neighbour is egressd.

A sandbox is known by its source address, and a source is let in only from where it belongs: alone on an interface of its own, or
by its port of a bridge with its MAC address. It holds by topology: the sandboxes' network leads nowhere but here, and here
nothing is forwarded.

Everything acts on the network namespace of the calling process and needs CAP_NET_ADMIN in it.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from egressd.wiring import conntrack, network, tables
from egressd.wiring.errors import WiringError
from egressd.wiring.gateway_rules import (
    Binding,
    bindings_chain,
    checked_interface,
    counted,
    counting_rules,
    gateway_overlay,
    nflog_group,
    read_bindings,
)
from egressd.wiring.namespace import Listener
from egressd.wiring.programs import Program
from egressd.wiring.ruleset import DNS_PORT, TRANSPARENT_PORT, Counted, Table, meaning, parse_tables

# The network namespace's own, as everything that `ip` says; /sys may show another's.
_FILTERED: Final = "/proc/sys/net/bridge/bridge-nf-call-iptables"
_FORWARDING: Final = "/proc/sys/net/ipv4/ip_forward"
_PORT_SETTINGS: Final = {"isolated": True, "learning": False, "flood": False}
"""Ports do not talk to each other; no frame moves another's MAC address to its own port; what is for one floods to none."""


class Gateway:
    """One interface with sandboxes behind it. Nothing is changed before `wire`."""

    def __init__(self, interface: str) -> None:
        """ValueError for what cannot be the name of one interface."""
        self.interface = checked_interface(interface)
        self._overlays = {family: gateway_overlay(family, interface) for family in tables.FAMILIES}

    @functools.cached_property
    def bridged(self) -> bool:
        """Whether the interface is a bridge, so that many hosts are behind it; asked of the kernel once."""
        links = _links("dev", self.interface)
        return any(link.get("linkinfo", {}).get("info_kind") == "bridge" for link in links)

    def wire(self) -> list[str]:
        """Put the rules in place and read them back; again is no change, and bindings stay. Returns notes for the operator.

        Raises WiringError. Until sources are bound, everything from there is dropped and logged.
        """
        self._demand()
        tables.put(self._overlays)
        found, foreign = self._read_bindings()
        if foreign:  # whoever put them there: they let in what is bound to no place
            chain = bindings_chain(self.interface)
            rules = "".join(f"-A {chain} {binding.rule}\n" for binding in found)
            tables.restore(4, f"*raw\n:{chain} - [0:0]\n{rules}COMMIT\n")
        self._change(self._deciding(parse_tables(tables.read(4))))
        for port in self.ports():
            _secure(port)
        return self.notes()

    def check(self) -> list[str]:
        """What is missing or altered, read back now; raises WiringError where it cannot be read."""
        problems = tables.differences(self._overlays)
        problems += [f"a rule that binds no source: {rule}" for rule in self._read_bindings()[1]]
        deciding = self._deciding(parse_tables(tables.read(4)))
        problems += [
            f"*{table}: a rule that decides where rules count: {rule}"
            for table in deciding
            for rule in deciding[table]
        ]
        problems += [
            f"port {port}: {name} is {'off' if wanted else 'on'}"
            for port, settings in self.ports().items()
            for name, wanted in _PORT_SETTINGS.items()
            if settings.get(name) is not wanted
        ]
        try:
            self._demand()
        except WiringError as error:
            problems.append(f"{error.command}: {error.stderr}")
        return problems

    def notes(self) -> list[str]:
        """What the operator should know and may change."""
        if _read(_FORWARDING) == "0":
            return []
        return [
            "this host forwards packets (net.ipv4.ip_forward): only the rules in FORWARD keep those of "
            f"{self.interface} from it; set it to 0 where nothing else needs it"
        ]

    def undo(self) -> None:
        """Release every binding and take the rules away, those of others untouched; raises WiringError."""
        for binding in self.bindings():
            self.release(binding.source)
        tables.take_away(self._overlays)

    # sources

    def bindings(self) -> tuple[Binding, ...]:
        """The sources that are let in, read back now."""
        return tuple(self._read_bindings()[0])

    def bind(self, binding: Binding) -> None:
        """Let a source in from where it belongs. Nothing of who had it before is left. Raises ValueError, WiringError.

        Behind a bridge a source needs a MAC address and a port, for addresses alone can be forged there.
        """
        if self.bridged and (binding.mac is None or binding.port is None):
            raise ValueError(
                f"{self.interface} is a bridge: {binding.source} needs its MAC address and its port"
            )
        if not self.bridged and binding.port is not None:
            raise ValueError(f"{self.interface} is no bridge, so {binding.port} cannot be a port of it")
        if any(binding.source == other.source for other in self.bindings()):
            raise ValueError(f"{binding.source} is bound already")
        if binding.port is not None and binding.port not in self.ports():
            raise ValueError(f"{binding.port} is no port of {self.interface}")
        conntrack.forget(binding.source)
        if binding.port is not None:
            _secure(binding.port)
        self._fix_neighbour(binding)
        chain = bindings_chain(self.interface)
        counting = {
            table: [f"-A {chain} {rule}" for rule, _ in rules]
            for table, rules in counting_rules(binding.source).items()
        }
        stale = self._counting(
            binding.source, parse_tables(tables.read(4))
        )  # of who was killed while it ended
        self._change({table: [*stale.get(table, []), *rules] for table, rules in counting.items()})
        self._change({"raw": [f"-A {chain} {binding.rule}"]})

    def stop(self, source: str) -> None:
        """Let a source in no longer; what was counted of it by then is all that it ever sent. Raises WiringError."""
        for binding in self.bindings():
            if binding.source == source:
                self._change({"raw": [f"-D {bindings_chain(self.interface)} {binding.rule}"]})

    def release(self, source: str, binding: Binding | None = None) -> Counted | None:
        """Let a source in no longer, and forget its flows; whoever has the address next inherits nothing. Raises WiringError.

        `binding` is how it was bound, for one that was stopped before. Returns what was counted of it, None where nobody knows.
        """
        saved = tables.read(4, counters=True)
        found = parse_tables(saved)
        chain = bindings_chain(self.interface)
        bound = read_bindings(found.get("raw", Table()).rules.get(chain, []))[0]
        mine = [each for each in bound if each.source == source]
        if mine:
            self._change({"raw": [f"-D {chain} {each.rule}" for each in mine]})
        for each in dict.fromkeys((*mine, *([binding] if binding is not None else []))):
            self._loosen_neighbour(each)
        conntrack.forget(source)
        self._change(self._counting(source, found))
        return counted(source, self.interface, saved)

    def _deciding(self, found: Mapping[str, Table]) -> dict[str, list[str]]:
        """What takes away somebody else's rules among those that count, by table: ours have no target."""
        chain = bindings_chain(self.interface)
        return {
            table: [f"-D {chain} {rule}" for rule in rules if re.search(r"(^| )(-j|-g) ", rule)]
            for table in counting_rules("0.0.0.0")  # noqa: S104 -- anybody's
            if (rules := found.get(table, Table()).rules.get(chain))
        }

    def _counting(self, source: str, found: Mapping[str, Table]) -> dict[str, list[str]]:
        """What takes away the rules that count for a source and are there, by table."""
        chain = bindings_chain(self.interface)
        gone = {}
        for table, rules in counting_rules(source).items():
            present = found.get(table, Table()).rules.get(chain, [])
            gone[table] = [
                f"-D {chain} {rule}" for rule, _ in rules for _ in range(present.count(meaning(rule)))
            ]
        return gone

    # sockets

    def listeners(self) -> tuple[Listener, ...]:
        """egressd's sockets, which hear this interface alone, and its packet log; the caller's. Raises WiringError."""
        made = []
        try:
            for listener in self._listeners():
                listener.socket.setblocking(False)
                made.append(listener)
        except BaseException:
            for listener in made:
                listener.socket.close()
            raise
        return tuple(made)

    def _listeners(self) -> Iterator[Listener]:
        by = self.interface
        yield Listener("transparent", 4, network.tcp(4, TRANSPARENT_PORT, interface=by, again=True))
        yield Listener("dns-udp", 4, network.udp(4, DNS_PORT, interface=by))
        yield Listener("dns-tcp", 4, network.tcp(4, DNS_PORT, interface=by, again=True))
        yield Listener("nflog", 0, network.packet_log(nflog_group(self.interface)))

    # the kernel

    def _read_bindings(self) -> tuple[list[Binding], list[str]]:
        raw = parse_tables(tables.read(4)).get("raw")
        return (
            read_bindings(raw.rules.get(bindings_chain(self.interface), [])) if raw is not None else ([], [])
        )

    def _change(self, rules: Mapping[str, list[str]]) -> None:
        text = "".join(
            "\n".join((f"*{table}", *several, "COMMIT", "")) for table, several in rules.items() if several
        )
        if text:
            tables.restore(4, text)

    def _demand(self) -> None:
        """Raises WiringError for an interface behind which nobody could be told apart."""
        if self.bridged and _read(_FILTERED) != "1":
            raise WiringError(
                self.interface,
                "frames of this bridge pass no packet rules, so its ports cannot be told apart",
                "modprobe br_netfilter && sysctl -w net.bridge.bridge-nf-call-iptables=1 "
                "net.bridge.bridge-nf-call-ip6tables=1 (container engines have both set)",
            )

    def ports(self) -> Mapping[str, Mapping[str, Any]]:
        """The bridge's ports with their settings; none where it is no bridge."""
        if not self.bridged:
            return {}
        ports = _links("master", self.interface)
        return {port["ifname"]: port.get("linkinfo", {}).get("info_slave_data", {}) for port in ports}

    def _fix_neighbour(self, binding: Binding) -> None:
        """Have replies go to where the source belongs, whatever anybody says by ARP or by the source of a frame."""
        if binding.mac is None:
            return
        here = ("dev", self.interface)
        _run("ip", "neigh", "replace", binding.source, "lladdr", binding.mac, *here, "nud", "permanent")
        if binding.port is not None:
            _run("bridge", "fdb", "replace", binding.mac, "dev", binding.port, "master", "static")

    def _loosen_neighbour(self, binding: Binding) -> None:
        """Undo that; a port that is gone has taken its entries with it."""
        if binding.mac is None:
            return
        with contextlib.suppress(WiringError):
            _run("ip", "neigh", "del", binding.source, "dev", self.interface)
        if binding.port is not None:
            with contextlib.suppress(WiringError):
                _run("bridge", "fdb", "del", binding.mac, "dev", binding.port, "master")


def _secure(port: str) -> None:
    words = [word for name, on in _PORT_SETTINGS.items() for word in (name, "on" if on else "off")]
    _run("bridge", "link", "set", "dev", port, *words)


def _links(*selection: str) -> list[dict[str, Any]]:
    """What `ip` says of links; raises WiringError, also for an interface that is not there."""
    links: list[dict[str, Any]] = json.loads(
        _run("ip", "-json", "-details", "link", "show", *selection) or "[]"
    )
    return links


def _run(*command: str) -> str:
    return Program(command, hint="needs iproute2 and CAP_NET_ADMIN, and the interface").output()


def _read(path: str) -> str:
    """A setting of the kernel's; empty where it has none."""
    try:
        with open(path, encoding="ascii") as setting:
            return setting.read().strip()
    except OSError:
        return ""
