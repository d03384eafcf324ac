"""The gateway wiring with runc containers behind a bridge of a host that forwards and masquerades for everybody else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from egressd.wiring.ruleset import packets
from tests.e2e.conftest import RULES, SHIPPED, build, until
from tests.e2e.wired import API, BRIDGE, GATEWAY, SANDBOXES, Behind, Bridge, bridge, counted, left, ok

pytestmark = [pytest.mark.e2e, pytest.mark.root]

ATTACKER = "11.6.6.6"
NET_RAW, NET_ADMIN = "--capability=CAP_NET_RAW", "--capability=CAP_NET_ADMIN"
FOLDED = 25.0
"""Seconds until repeats of what belongs to nobody are written as a count, twice over."""
REFUSED = {"No route to host", "Permission denied", "Operation not permitted", "Network is unreachable"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with build(rootless=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def made(lab: Lab) -> Iterator[Bridge]:
    with Stand(lab, RULES, shipped=SHIPPED) as stand, bridge(lab, stand) as made:
        yield made


@pytest.fixture
def gate(made: Bridge) -> Bridge:
    """The gateway, and a world that has seen nothing yet."""
    made.lab.forget()
    return made


@pytest.fixture
def a(gate: Bridge) -> Behind:
    return gate.sandboxes["a"]


@pytest.fixture
def b(gate: Bridge) -> Behind:
    return gate.sandboxes["b"]


def records(gate: Bridge, since: int, **wanted: object) -> list[dict[str, Any]]:
    return [r for r in gate.stand.records()[since:] if all(r.get(k) == v for k, v in wanted.items())]


def bridge_mac(gate: Bridge) -> str:
    shown = gate.lab.run("host", ["ip", "-j", "link", "show", BRIDGE])
    return str(json.loads(shown.stdout)[0]["address"])


def works(sandbox: Behind) -> bool:
    return sandbox.run(f"curl -sS -m 20 {API}").stdout.isdigit()


def test_each_is_known_by_its_source_and_judged_by_itself(gate: Bridge, a: Behind, b: Behind) -> None:
    before = len(gate.stand.records())
    for sandbox in (a, b):
        done = sandbox.run(
            f"curl -sS -m 20 {API}; curl -sS -m 20 https://evil-lab.com/; curl -sS -m 5 http://{ATTACKER}/"
        )
        assert done.stdout[:1].isdigit(), done.stderr
        assert "(reason not_allowed)" in done.stdout
    assert left(gate.lab, ATTACKER) == []
    for name, address in SANDBOXES.items():
        mine = {"sandbox": gate.ids[name], "layer": "connection", "event": "decision"}
        until(lambda mine=mine: len(records(gate, before, **mine)) == 3)  # type: ignore[misc]
        found = records(gate, before, **mine)
        assert [r["reason"] for r in found] == ["rule", "not_allowed", "ip_literal"]
        assert {(r["source"], r["channel"]) for r in found} == {(address, "transparent")}


def test_what_is_neither_tcp_nor_dns_is_refused_at_once_and_each_packet_recorded(
    gate: Bridge, a: Behind
) -> None:
    before = len(gate.stand.records())
    tried = a.inside("not_tcp")
    del tried["three"]  # a host sends so many ICMP errors a second and no more (icmp(7), icmp_ratelimit)
    assert all(each["error"] in REFUSED and each["fast"] for each in tried.values()), tried
    assert left(gate.lab, ATTACKER, "169.254.169.254") == []
    until(lambda: counted(records(gate, before), layer="packet", sandbox=gate.ids["a"]) == 7)


def dropped_six(gate: Bridge) -> int:
    """What the kernel counted at the rule that logs IPv6."""
    saved = gate.lab.run("host", ["ip6tables-save", "-c"]).stdout
    return sum(count for (_, rule), count in packets(saved, f"EGRESSD-{BRIDGE}").items() if "NFLOG" in rule)


def counted_six(gate: Bridge, since: int) -> int:
    """How many IPv6 packets records account for."""
    return counted([r for r in records(gate, since, layer="packet") if ":" in (r.get("source") or "")])


def test_ipv6_is_dropped_and_recorded(gate: Bridge, a: Behind) -> None:
    before, kernels = len(gate.stand.records()), dropped_six(gate)
    for neighbour in ("", f"ip -6 neigh replace fd00:90::1 lladdr {bridge_mac(gate)} dev eth0"):
        if neighbour:  # which nobody tells it
            a.do(neighbour)
        tried = a.inside("six")
        assert all(each["said"] is None for each in tried.values()), tried
    assert [flow for flow in gate.lab.packets("host") if flow.address == "2600:6:6::6"] == []
    assert dropped_six(gate) - kernels >= 4
    until(
        lambda: counted_six(gate, before) == dropped_six(gate) - kernels,
        2 * FOLDED,
        "a record of each packet",
    )
    mine = records(gate, before, source="fd00:90::5")
    assert {(r["layer"], r["sandbox"]) for r in mine} == {("packet", "unknown")}


def test_other_protocols_go_nowhere_even_with_raw_sockets(gate: Bridge, a: Behind) -> None:
    before = len(gate.stand.records())
    a.inside(f"protocols {a.address} {GATEWAY}", NET_RAW)
    assert left(gate.lab, ATTACKER) == []
    until(lambda: counted(records(gate, before), layer="packet", sandbox=gate.ids["a"]) == 6)


def test_nobody_passes_for_a_neighbour_by_any_layer(gate: Bridge, a: Behind, b: Behind) -> None:
    """NET-17: five packets with a source that does not belong there, one of nobody's, and two lies by ARP."""
    before = len(gate.stand.records())
    tried = a.inside(f"forged {a.address} {b.address} {GATEWAY} {bridge_mac(gate)} {a.mac} {b.mac}", NET_RAW)
    assert {each["said"] for each in tried.values()} == {"sent"}, tried
    until(lambda: counted(records(gate, before), reason="spoofed_source") == 5, FOLDED)
    assert counted(records(gate, before), reason="unknown_sandbox") == 1
    assert works(b)  # neither ARP nor its MAC address was taken from it
    assert works(a)
    for name in SANDBOXES:
        own = records(gate, before, sandbox=gate.ids[name], event="decision", layer="connection")
        assert [r["reason"] for r in own] == ["rule"]
        assert records(gate, before, sandbox=gate.ids[name], verdict="deny") == []
    assert left(gate.lab, ATTACKER) == []
    assert gate.wire("--check").stdout == ""


def test_an_address_that_was_only_claimed_is_worth_nothing(gate: Bridge, a: Behind, b: Behind) -> None:
    before = len(gate.stand.records())
    for address in (b.address, "10.90.0.99"):
        tried = a.inside(f"source {address}", NET_ADMIN)
        assert tried["added"]["status"] == 0, tried
        assert tried["tcp"]["error"] is not None, tried
        a.do(f"ip addr del {address}/24 dev eth0")
    until(lambda: counted(records(gate, before), reason="spoofed_source", source=b.address) > 0)
    until(lambda: counted(records(gate, before), reason="unknown_sandbox", source="10.90.0.99") > 0)
    assert records(gate, before, sandbox=gate.ids["b"]) == []
    assert left(gate.lab, ATTACKER) == []


def test_sandboxes_do_not_reach_each_other(gate: Bridge, a: Behind, b: Behind) -> None:
    argv = gate.containers.argv([f"--network={b.network}"], ["/usr/bin/python3", "-m", "http.server", "8000"])
    server = gate.lab.popen("host", argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: b.run("curl -sS -m 2 -o /dev/null http://127.0.0.1:8000/").returncode == 0)
        assert a.run(f"curl -sS -m 3 http://{b.address}:8000/").returncode != 0
        # With the neighbour's MAC address, which nobody told it, the frames are addressed and still do not get there.
        a.do(f"ip neigh replace {b.address} lladdr {b.mac} dev eth0")
        told = a.run(f"curl -sS -m 3 http://{b.address}:8000/")
        assert "Directory listing" not in told.stdout
        a.do(f"ip neigh del {b.address} dev eth0")
        world = gate.lab.run("world", ["curl", "-sS", "-m", "3", f"http://{b.address}:8000/"])
        assert world.returncode != 0
    finally:
        server.terminate()
        server.wait()


def test_the_host_s_own_ports_are_not_open_to_sandboxes(gate: Bridge, a: Behind) -> None:
    before = len(gate.stand.records())
    server = gate.lab.popen(
        "host", ["/usr/bin/python3", "-m", "http.server", "8000"], stderr=subprocess.DEVNULL
    )
    try:
        until(
            lambda: gate.lab.host_exec(["curl", "-sS", "-m", "2", "http://127.0.0.1:8000/"]).returncode == 0
        )
        tried = a.inside(f"ports {GATEWAY} 22 8000 15001 15021")
        assert "Directory listing" not in str(tried)
        again = a.inside("ports 11.0.0.2 8000")
        assert "Directory listing" not in str(again)
    finally:
        server.terminate()
        server.wait()
    until(lambda: counted(records(gate, before), layer="connection", sandbox=gate.ids["a"]) == 5)
    reasons = [r["reason"] for r in records(gate, before, layer="connection", event="decision")]
    assert reasons.count("no_original_dst") == 1


@pytest.mark.parametrize("port", [53, 80, 15001, 15053])
def test_egressd_s_ports_are_not_open_to_other_hosts(gate: Bridge, port: int) -> None:
    for address in ("11.0.0.2", GATEWAY):
        seen = gate.lab.run("world", ["curl", "-sS", "-m", "2", f"http://{address}:{port}/"])
        assert seen.returncode == 7 or seen.returncode == 28, seen.stderr


def test_nothing_is_forwarded_to_a_sandbox(gate: Bridge, a: Behind) -> None:
    routed = gate.lab.run("world", ["ip", "route", "replace", "10.90.0.0/24", "via", "11.0.0.2"])
    assert routed.returncode == 0, routed.stderr
    try:
        pinged = gate.lab.run("world", ["ping", "-c1", "-W1", a.address])
        assert "0 received" in pinged.stdout
    finally:
        gate.lab.run("world", ["ip", "route", "del", "10.90.0.0/24"])


def test_the_rule_in_forward_is_what_keeps_routed_packets_here(gate: Bridge, a: Behind) -> None:
    """By a source route a datagram comes to the gateway itself, to be sent on from there: without the rule it is."""
    follows = "net.ipv4.conf.all.accept_source_route=1", f"net.ipv4.conf.{BRIDGE}.accept_source_route=1"
    ok(gate.lab, " ".join(("sysctl -qw", *follows)))
    ok(gate.lab, f"iptables -t nat -A POSTROUTING -s 10.90.0.0/24 ! -o {BRIDGE} -j MASQUERADE")
    before = len(gate.stand.records())
    try:
        tried = a.inside(f"source_routed {GATEWAY} {ATTACKER}", NET_RAW)
        assert tried["said"] == "sent", tried
        until(lambda: counted(records(gate, before), layer="packet", sandbox=gate.ids["a"]) == 1)
        assert left(gate.lab, ATTACKER) == []
        ok(gate.lab, f"iptables -F EGRESSD-F-{BRIDGE}")
        a.inside(f"source_routed {GATEWAY} {ATTACKER}", NET_RAW)
        until(lambda: left(gate.lab, ATTACKER), what="without the rule it leaves")
    finally:
        ok(gate.lab, f"iptables -t nat -D POSTROUTING -s 10.90.0.0/24 ! -o {BRIDGE} -j MASQUERADE")
        ok(gate.lab, " ".join(("sysctl -qw", *follows)).replace("=1", "=0"))
        gate.daemon.ask("problems")  # which puts the rule back
    assert gate.daemon.ask("problems") == []


def test_who_gets_an_address_next_inherits_nothing(gate: Bridge, a: Behind) -> None:
    """Neither flows, nor names, nor identity; and between the two the address is nobody's."""
    name = "getent ahostsv4 api.lab-origin.com | head -1 | cut -d' ' -f1"
    synthetic = a.run(name).stdout.strip()
    assert synthetic.startswith("198.18."), synthetic
    slow = ["sh", "-c", "curl -sS -m 30 https://api.lab-origin.com/slow?seconds=20; echo status $?"]
    bundle = gate.daemon.bundle
    argv = gate.containers.argv(
        [
            f"--network={a.network}",
            "--resolver=198.18.0.1",
            f"--bind={bundle}:ro",
            f"--env=CURL_CA_BUNDLE={bundle}",
        ],
        slow,
    )
    open_ = gate.lab.popen("host", argv)
    until(lambda: gate.lab.requests(path="/slow"))
    listed = ["conntrack", "-L", "--orig-src", a.address]
    assert a.address in gate.lab.run("host", listed).stdout
    before = len(gate.stand.records())
    assert gate.daemon.ask("revoke a") == "done"
    said, _ = open_.communicate(timeout=20)
    assert "status 0" not in said
    assert gate.lab.run("host", listed).stdout == ""
    assert a.run("curl -sS -m 2 http://11.6.6.6/").returncode != 0
    until(lambda: counted(records(gate, before), reason="unknown_sandbox", source=a.address) > 0)

    old, gate.ids["a"] = gate.ids["a"], a.create()
    assert gate.ids["a"] != old
    assert a.run(f"curl -sSk -m 5 https://{synthetic}/").returncode != 0
    until(lambda: counted(records(gate, before), reason="synthetic_unmapped", sandbox=gate.ids["a"]) == 1)
    assert works(a)


def test_a_source_has_one_sandbox_and_one_place(gate: Bridge, a: Behind, b: Behind) -> None:
    for order, why in (
        (f"create c {a.address} {a.mac} {a.port}", "bound already"),
        ("create c 10.90.0.9", "needs its MAC address and its port"),
        (f"create c 10.90.0.9 {a.mac} eth0", "at none of the interfaces"),
        (f"create c 10.90.0.9 {a.mac} lo", "at none of the interfaces"),
        ("create c 224.0.0.1", "no sandbox's address"),
        ("create c", "needs its source address"),
    ):
        assert why in gate.daemon.ask(order)["error"]
    assert works(b)


def test_a_worker_that_dies_opens_nothing(gate: Bridge, a: Behind, b: Behind) -> None:
    assert gate.daemon.ask("kill") == "done"
    assert works(a)
    assert works(b)
    assert "(reason not_allowed)" in a.run("curl -sS -m 20 https://evil-lab.com/").stdout
    assert left(gate.lab, ATTACKER) == []


def test_a_rule_that_is_gone_is_seen_and_put_back_and_nobody_is_forgotten(gate: Bridge, a: Behind) -> None:
    assert gate.daemon.ask("problems") == []
    for harm in (
        f"iptables -t raw -D PREROUTING -i {BRIDGE} -j EGRESSD-{BRIDGE}",
        "iptables -I FORWARD -j ACCEPT",
        f"bridge link set dev {a.port} isolated off",
        f"iptables -t raw -A EGRESSD-SRC-{BRIDGE} -j ACCEPT",
    ):
        assert gate.lab.run("host", harm.split()).returncode == 0, harm
    checked = gate.wire("--check")
    assert (checked.returncode, len(checked.stdout.splitlines())) == (1, 5), checked.stdout
    assert len(gate.daemon.ask("problems")) == 5  # and they are put right
    assert gate.daemon.ask("problems") == []
    again = gate.wire()
    assert again.returncode == 0, again.stderr
    assert "forwards packets" in again.stderr
    assert works(a)


def test_a_daemon_that_is_killed_lets_nobody_out_and_its_successor_knows_nobody(
    gate: Bridge, a: Behind
) -> None:
    gate.daemon.process.kill()
    gate.daemon.process.wait()
    assert a.run(f"curl -sS -m 3 {API}; curl -sS -m 3 http://{ATTACKER}/").returncode != 0
    assert left(gate.lab, ATTACKER) == []
    gate.start()
    before = len(gate.stand.records())
    assert a.run(f"curl -sS -m 3 http://{ATTACKER}/").returncode != 0
    until(lambda: counted(records(gate, before), reason="unknown_sandbox", source=a.address) > 0)
    gate.ids = {name: sandbox.create() for name, sandbox in gate.sandboxes.items()}
    assert works(a)


def test_undoing_leaves_what_others_made(lab: Lab, gate: Bridge) -> None:
    others = [rule for rule in gate.rules() if "EGRESSD" not in rule and not rule.startswith("*")]
    for name in SANDBOXES:
        gate.daemon.ask(f"revoke {name}")
    undone = gate.wire("--undo")
    assert undone.returncode == 0, undone.stderr
    assert [rule for rule in gate.rules() if not rule.startswith("*")] == others
    assert gate.wire("--undo").returncode == 0
    assert gate.wire("--check").returncode == 1
