"""The sidecar wiring with runc containers: egressd and its sandbox share a network namespace, and only egressd's uid gets out."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from tests.e2e.conftest import RULES, SHIPPED, build, until
from tests.e2e.wired import API, Pod, counted, environment, left, pod

pytestmark = [pytest.mark.e2e, pytest.mark.root]

ATTACKER = "11.6.6.6"
EGRESSD = "--uid=1337"
REFUSED = {"No route to host", "Permission denied", "Operation not permitted", "Network is unreachable"}
ENGINE = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.bind(("127.0.0.11", 41234))
print("up", flush=True)
while True:
    data, peer = sock.recvfrom(512); sock.sendto(b"resolved", peer)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with build(rootless=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def shared(lab: Lab) -> Iterator[Pod]:
    with Stand(lab, RULES, shipped=SHIPPED) as stand, pod(lab, stand) as made:
        yield made


@pytest.fixture
def fresh(shared: Pod) -> Pod:
    """The pod, and a world that has seen nothing yet."""
    shared.lab.forget()
    return shared


def records(made: Pod, since: int, **wanted: object) -> list[dict[str, Any]]:
    return [r for r in made.stand.records()[since:] if all(r.get(k) == v for k, v in wanted.items())]


def test_an_allowed_request_works_and_a_denied_one_is_refused_and_recorded(fresh: Pod) -> None:
    before = len(fresh.stand.records())
    done = fresh.run(
        f"curl -sS -m 20 {API}; curl -sS -m 20 https://evil-lab.com/; curl -sS -m 5 --noproxy '*' http://{ATTACKER}/"
    )
    assert done.stdout.startswith("1"), done.stderr
    assert "(reason not_allowed)" in done.stdout
    assert left(fresh.lab, ATTACKER) == []
    until(lambda: counted(records(fresh, before), layer="connection") == 3)
    verdicts = [
        (r["verdict"], r["reason"]) for r in records(fresh, before, layer="connection", event="decision")
    ]
    assert verdicts == [("allow", "rule"), ("deny", "not_allowed"), ("deny", "ip_literal")]
    assert {r["sandbox"] for r in records(fresh, before)} == {fresh.sandbox}


def test_what_is_neither_tcp_nor_dns_is_refused_at_once_and_each_packet_recorded(fresh: Pod) -> None:
    before = len(fresh.stand.records())
    tried = fresh.inside("not_tcp")
    assert all(each["error"] in REFUSED and each["fast"] for each in tried.values()), tried
    assert left(fresh.lab, ATTACKER, "169.254.169.254") == []
    until(lambda: counted(records(fresh, before), layer="packet") == 7)
    seen = {(r["protocol"], r["address"], r.get("port")) for r in records(fresh, before, layer="packet")}
    assert seen == {
        ("udp", ATTACKER, 443),
        ("udp", ATTACKER, 123),
        ("udp", ATTACKER, 9999),
        ("udp", "169.254.169.254", 80),
        ("icmp", ATTACKER, None),
    }


def test_ipv6_is_no_other_way(fresh: Pod) -> None:
    before = len(fresh.stand.records())
    tried = fresh.inside("six")
    assert "(reason ip_literal)" in tried["tcp"]["said"], tried
    assert tried["dns"]["said"] is not None, tried  # our resolver's answer
    assert all(tried[name]["error"] in REFUSED and tried[name]["fast"] for name in ("udp", "ping")), tried
    assert left(fresh.lab, "2600:6:6::6") == []
    until(lambda: counted(records(fresh, before)) >= 4)
    layers = sorted(r["layer"] for r in records(fresh, before, event="decision"))
    assert layers == ["connection", "dns", "packet", "packet", "request"]


@pytest.mark.parametrize("device", ["eth0", "lo"])
def test_a_socket_bound_to_an_interface_is_no_other_way(fresh: Pod, device: str) -> None:
    before = len(fresh.stand.records())
    tried = fresh.inside(f"bound {device}")
    assert left(fresh.lab, ATTACKER, "8.8.8.8", "127.0.0.1") == [], tried
    assert fresh.lab.dns_queries() == []
    assert "owned" not in str(tried)
    until(lambda: counted(records(fresh, before)) >= 3, what=f"a record of each of {tried}")


def test_a_source_route_is_no_other_way_even_on_a_host_that_follows_them(fresh: Pod) -> None:
    follows = (
        "net.ipv4.ip_forward=1 net.ipv4.conf.all.accept_source_route=1 net.ipv4.conf.lo.accept_source_route=1"
    )
    assert fresh.lab.run("host", ["sysctl", "-qw", *follows.split()]).returncode == 0
    for own in ("127.0.0.1", "11.0.0.2"):
        fresh.inside(f"source_routed {own} {ATTACKER}")
    assert left(fresh.lab, ATTACKER) == []
    assert (
        fresh.lab.run(
            "host", ["sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv4.conf.all.accept_source_route=0"]
        ).returncode
        == 0
    )


def test_every_resolver_is_egressd_s_and_the_container_engine_s_is_egressd_s_alone(fresh: Pod) -> None:
    before = len(fresh.stand.records())
    engine = fresh.lab.popen("host", [sys.executable, "-c", ENGINE], env=environment(fresh.lab))
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "up\n"
        tried = fresh.inside("resolvers")
        own = fresh.inside("resolvers", EGRESSD)
    finally:
        engine.kill()
        engine.wait()
    for name in ("public", "loopback", "six", "engine"):
        assert tried[name]["said"] is not None, tried
        assert b"resolved".hex() not in tried[name]["said"], tried
    assert tried["engine's port"]["error"] in REFUSED, tried
    assert tried["engine's port by TCP"]["error"] == "Connection refused", tried
    assert own["engine's port"]["said"] == b"resolved".hex(), own
    assert left(fresh.lab, ATTACKER) == []
    until(lambda: counted(records(fresh, before), layer="dns") == 4)


def test_without_capabilities_nobody_becomes_egressd_or_changes_a_rule(fresh: Pod) -> None:
    tried = fresh.inside("powers 1337")
    for name in ("uid", "raw", "frame"):
        assert tried[name]["error"] == "Operation not permitted", tried
    for name in ("flush", "flush six", "nft", "route", "link", "own namespace"):
        assert tried[name]["status"] != 0, tried
    assert "owned" not in tried["own uid"]["said"], tried
    assert left(fresh.lab, ATTACKER) == []
    assert fresh.wire("--check").returncode == 0


def test_a_raw_socket_is_judged_by_its_owner(fresh: Pod) -> None:
    before = len(fresh.stand.records())
    tried = fresh.inside(f"protocols 11.0.0.2 {ATTACKER}", "--capability=CAP_NET_RAW")
    assert len(tried) == 6
    assert left(fresh.lab, ATTACKER) == []
    until(lambda: counted(records(fresh, before), layer="packet") == 6, what=f"a record for each of {tried}")


@pytest.mark.parametrize(
    ("options", "case"),
    [
        pytest.param([EGRESSD], f"tcp {ATTACKER} 80", id="who has egressd's uid"),
        pytest.param(["--uid=0", "--capability=CAP_SETUID"], f"turned 1337 {ATTACKER}", id="who may take it"),
        pytest.param(["--capability=CAP_NET_RAW"], "over_the_wire", id="who may send frames"),
        pytest.param(
            ["--uid=0", "--capability=CAP_NET_ADMIN"], f"flushed {ATTACKER}", id="who may change rules"
        ),
    ],
)
def test_it_does_not_hold_against(fresh: Pod, options: list[str], case: str) -> None:
    """What docs/wirings.md says, and why manifests must drop all of it."""
    if case == "over_the_wire":
        mac = fresh.lab.run("host", ["cat", "/sys/class/net/eth0/address"]).stdout.strip()
        case = f"over_the_wire {mac} 11.0.0.2 {ATTACKER}"
    fresh.inside(case.replace("tcp", "reach"), *options)
    until(lambda: left(fresh.lab, ATTACKER) != [])
    assert fresh.wire().returncode == 0


def test_a_rule_that_is_gone_is_seen_by_egressd_and_put_back_by_the_operator(fresh: Pod) -> None:
    assert fresh.daemon.ask("problems") == []
    for tool in ("iptables", "ip6tables"):
        assert fresh.lab.run("host", [tool, "-I", "OUTPUT", "-j", "ACCEPT"]).returncode == 0
        assert fresh.lab.run("host", [tool, "-D", "OUTPUT", "-j", "EGRESSD"]).returncode == 0
    checked = fresh.wire("--check")
    assert checked.returncode == 1
    assert "*filter OUTPUT: missing" in checked.stdout
    assert len(fresh.daemon.ask("problems")) == 2
    again = fresh.wire()
    assert again.returncode == 0, again.stderr
    assert fresh.daemon.ask("problems") == []
    for tool in ("iptables", "ip6tables"):
        assert fresh.lab.run("host", [tool, "-D", "OUTPUT", "-j", "ACCEPT"]).returncode == 0
    assert fresh.wire("--check").returncode == 0
    assert fresh.run(f"curl -sS -m 20 {API}").stdout.isdigit()


def test_nobody_outside_reaches_into_the_pod(fresh: Pod) -> None:
    serving = fresh.containers.argv([], ["/usr/bin/python3", "-m", "http.server", "8000"])
    server = fresh.lab.popen("host", serving, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: fresh.run("curl -sS -m 2 -o /dev/null http://127.0.0.1:8000/").returncode == 0)
        assert fresh.run("curl -sS -m 2 -o /dev/null http://11.0.0.2:8000/").returncode == 0
        came = fresh.lab.run("world", ["curl", "-sS", "-m", "3", "http://11.0.0.2:8000/"])
        assert came.returncode != 0
        for port in (15001, 15053, 3128):
            assert (
                fresh.lab.run("world", ["curl", "-sS", "-m", "3", f"http://11.0.0.2:{port}/"]).returncode != 0
            )
    finally:
        server.terminate()
        server.wait()


def test_a_worker_that_dies_opens_nothing(fresh: Pod) -> None:
    assert fresh.daemon.ask("kill") == "done"
    done = fresh.run(f"curl -sS -m 20 {API}; curl -sS -m 20 https://evil-lab.com/")
    assert done.stdout[0].isdigit(), done.stderr
    assert "(reason not_allowed)" in done.stdout
    assert left(fresh.lab, ATTACKER) == []


def test_a_daemon_that_is_killed_lets_nobody_out_and_is_followed_by_another(fresh: Pod) -> None:
    fresh.kill()
    assert fresh.run(f"curl -sS -m 3 {API}").returncode != 0
    assert fresh.run(f"curl -sS -m 3 http://{ATTACKER}/").returncode != 0
    assert all(each["said"] is None for each in fresh.inside("not_tcp").values())
    assert left(fresh.lab, ATTACKER) == []
    fresh.start()
    assert fresh.run(f"curl -sS -m 20 {API}").stdout.isdigit()


def test_undoing_leaves_what_others_made(lab: Lab) -> None:
    def rules() -> list[str]:
        text = "".join(lab.run("open", [f"{tool}-save"]).stdout for tool in ("iptables", "ip6tables"))
        return [line for line in text.splitlines() if re.match(r"[-*]", line)]

    def wire(*flags: str) -> None:
        argv = [sys.executable, "-m", "egressd", "wire", "sidecar", *flags]
        done = lab.run("open", argv, env=environment(lab), cwd=str(Path(__file__).parents[2]))
        assert done.returncode == 0, done.stderr

    for mine in (
        "iptables -A OUTPUT -d 203.0.113.1 -j DROP",
        "iptables -t nat -N DOCKER_OUTPUT",
        "iptables -t nat -A OUTPUT -d 127.0.0.11 -j DOCKER_OUTPUT",
        "ip6tables -t mangle -A POSTROUTING -o eth0 -j MARK --set-mark 1",
        "ip6tables -t filter -A OUTPUT -o eth0 -j ACCEPT",
        "ip6tables -t nat -A OUTPUT -o eth0 -j ACCEPT",
        "iptables -t mangle -A OUTPUT -o eth0 -j ACCEPT",
    ):
        assert lab.run("open", mine.split()).returncode == 0
    before = rules()
    wire()
    assert lab.open_exec(["curl", "-sS", "-m", "3", f"http://{ATTACKER}/"]).returncode != 0
    wired = rules()
    wire()
    assert rules() == wired
    wire("--check")
    wire("--undo")
    assert rules() == before
    wire("--undo")
    assert "owned" in lab.open_exec(["curl", "-sS", "-m", "3", f"http://{ATTACKER}/"]).stdout
