"""Whose packet rules are on this machine besides ours, and what each of them does to egressd.

A sandbox of the namespace wiring has tables of its own, which nobody else's rules reach. What egressd dials goes out through the
host's, and a gateway's or a sidecar's rules stand in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from egressd.cli.doctor_host import Host, Line


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who makes chains of these names, what that means here, and what to do."""

    name: str
    chains: re.Pattern[str]
    says: str
    hint: str


_OWNERS: Final = (
    _Owner(
        "docker",
        re.compile(r"^(DOCKER|DOCKER-[A-Z0-9-]+)$"),
        "docker's chains",
        "it sets FORWARD to DROP and writes its tables anew when it starts: after that, `egressd verify` a gateway or sidecar "
        "again; containers that sandboxes are must be on an internal network, or they have docker's own way out",
    ),
    _Owner(
        "kubernetes",
        re.compile(r"^(KUBE-[A-Z0-9-]+|CILIUM_.+|cali-.+|FLANNEL-.+|WEAVE.*)$"),
        "the chains of a cluster's network",
        "they are rewritten all the time: wire by sidecar or explicit with a NetworkPolicy, never a gateway on the node itself",
    ),
    _Owner(
        "mesh",
        re.compile(r"^(ISTIO_[A-Z0-9_]+|PROXY_INIT_[A-Z0-9_]+|CONSUL_[A-Z0-9_]+|KUMA_.+)$"),
        "a service mesh redirects connections here",
        'two proxies want the same packets: leave the mesh for this pod (sidecar.istio.io/inject: "false"), or have it let '
        "egressd's uid out; note that uid 1337, that of workers, is also istio's, whose traffic a mesh lets pass unseen",
    ),
    _Owner(
        "ufw",
        re.compile(r"^ufw6?-.+$"),
        "ufw is in force",
        "what egressd listens on must be let in for the sandboxes' addresses (`ufw allow in on IFACE`), and a default that "
        "denies outgoing traffic must let egressd dial",
    ),
    _Owner(
        "firewalld",
        re.compile(r"^(IN_public.*|FWD.*_ZONES.*|firewalld|filter_INPUT_ZONES.*|INPUT_ZONES.*)$"),
        "firewalld is in force",
        "put the sandboxes' interface in a zone of its own that lets egressd's ports in; a reload of it drops what others wrote",
    ),
)
_CHAIN: Final = re.compile(r"^:(\S+) (\S+)", re.M)
_NFT_CHAIN: Final = re.compile(r"^\s*(?:chain|table \S+) (\S+) \{", re.M)


def rules_lines(host: Host) -> Iterator[Line]:
    """Say whose rules there are, and what the host's own do to what egressd sends."""
    if host.euid != 0:
        yield Line("packet rules", "ok", "not looked at: only root can, and a rootless sandbox has its own")
        return
    saved = [
        ran
        for ran in (host.run("iptables-save"), host.run("ip6tables-save"))
        if ran is not None and ran[0] == 0
    ]
    listed = host.run("nft", "list", "ruleset") if host.program("nft") else None
    text = "\n".join(ran[1] for ran in saved)
    chains = {name for name, _ in _CHAIN.findall(text)}
    if listed is not None and listed[0] == 0:
        chains.update(_NFT_CHAIN.findall(listed[1]))
    if not saved:
        yield Line(
            "packet rules", "warn", "iptables-save does not work", "modprobe ip_tables, or iptables-nft"
        )
    found = False
    for owner in _OWNERS:
        theirs = sorted(name for name in chains if owner.chains.match(name))
        if theirs:
            found = True
            yield Line(f"rules: {owner.name}", "warn", f"{owner.says} ({_some(theirs)})", owner.hint)
    closed = {policy for name, policy in _CHAIN.findall(text) if name == "OUTPUT"} & {"DROP", "REJECT"}
    if closed:
        hint = (
            "egressd dials through it: accept what uid 1337 (workers) sends to where rules lead, DNS included"
        )
        yield Line("rules: output", "warn", "the host's OUTPUT drops by default", hint)
    if saved and not found and not closed:
        yield Line("packet rules", "ok", "nobody else's that are known to interfere")
    yield from _two_kinds(host)
    yield from _forwarding(host)


def _two_kinds(host: Host) -> Iterator[Line]:
    """Tables of both kinds at once: what one tool writes, the other does not show."""
    used = host.run("iptables", "--version")
    legacy = (host.read("/proc/net/ip_tables_names") or "").split()
    if used is not None and "nf_tables" in used[1] and legacy:
        hint = f"`iptables-legacy-save` shows them ({_some(legacy)}); move them over, or use one kind only"
        yield Line("rules: two kinds", "warn", "older tables are in use beside nf_tables", hint)


def _forwarding(host: Host) -> Iterator[Line]:
    if (host.read("/proc/sys/net/ipv4/ip_forward") or "").strip() == "1":
        hint = "docker and others need it; a gateway for sandboxes must not: `egressd wire gateway` refuses where it would"
        yield Line("forwarding", "warn", "this host forwards packets (net.ipv4.ip_forward=1)", hint)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
