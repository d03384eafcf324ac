"""The explicit wiring's other listeners: one sandbox's own, on ports that stand for others, and behind a load balancer."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from tests.e2e.conftest import RULES, SHIPPED, build, until
from tests.e2e.explicit import ADDRESSES, OWN, Network, network, reasons

pytestmark = [pytest.mark.e2e, pytest.mark.root]

API = "https://api.lab-origin.com/n"
SPEC = {
    "sandboxes": {
        "own": {"listeners": {"addresses": [OWN], "http": 3128, "socks": 1080, "dns": 53, "direct": {"443": 8443, "80": 8080}}},
        "shared": {},
    },
    "shared": {"addresses": [OWN], "http": 4128, "socks": 4080, "hops": [f"{ADDRESSES['b']}/32"]},
}  # fmt: skip
SEND = Path(__file__).parent / "programs" / "by_hop.py"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with build(rootless=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def net(lab: Lab) -> Iterator[Network]:
    with Stand(lab, RULES, shipped=SHIPPED) as stand:
        stand.directory.chmod(0o777)
        with network(lab, stand, SPEC) as made:
            yield made


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(f"--proxy http://{OWN}:3128", id="HTTP"),
        pytest.param(f"--proxy http://who:ever@{OWN}:3128", id="HTTP with credentials of nobody's"),
        pytest.param(f"--socks5-hostname {OWN}:1080", id="SOCKS"),
        pytest.param(f"--socks5-hostname who:ever@{OWN}:1080", id="SOCKS with credentials of nobody's"),
        pytest.param(f"--connect-to api.lab-origin.com:443:{OWN}:8443", id="a port that stands for 443"),
    ],
)
def test_a_listener_of_its_own_says_who_it_is(net: Network, words: str) -> None:
    before = len(net.stand.records())
    done = net.sandboxes["a"].run(f"curl -sS -m 20 {words} {API}")
    assert done.stdout.isdigit(), done.stderr
    new = net.stand.records()[before:]
    assert {record["sandbox"] for record in new} == {net.made["own"]["id"]}
    assert {record["port"] for record in new if record["layer"] == "connection"} == {443}


def test_names_lead_there_whatever_the_ports(net: Network) -> None:
    assert net.sandboxes["a"].run("getent ahosts api.lab-origin.com").stdout.split()[0] == OWN
    assert net.sandboxes["a"].run("getent ahosts metadata.google.internal").returncode != 0
    plain = f"curl -sS -m 20 --connect-to www.lab-origin.com:80:{OWN}:8080 http://www.lab-origin.com/headers"
    assert '"host": "www.lab-origin.com"' in net.sandboxes["a"].run(plain).stdout


def by_hop(net: Network, inner: str, header: str, of: str = "shared") -> str:
    """Send a header, then a CONNECT with a token, to the shared proxy; return what came back, `reset` for a reset."""
    made = net.made[of]
    arguments = [OWN, "4128", header, made["id"], made["token"]]
    return net.sandboxes[inner].run(f"python3 {SEND} {shlex.join(arguments)}").stdout


def test_a_listed_hop_speaks_for_others_and_nobody_else_does(net: Network) -> None:
    before = len(net.stand.records())
    assert by_hop(net, "b", "172.30.9.9").startswith("HTTP/1.1 200 ")
    assert by_hop(net, "b", "none") == "reset"
    assert by_hop(net, "b", "172.30.9.10").startswith("HTTP/1.1 403 ")  # another source
    assert by_hop(net, "a", "172.30.9.9").startswith("HTTP/1.1 403 ")  # no hop
    assert by_hop(net, "a", "none").startswith("HTTP/1.1 403 ")  # no hop, and another source

    def told() -> bool:
        denied = [record for record in net.stand.records()[before:] if record.get("verdict") == "deny"]
        return {"bad_hop", "token_source_mismatch", "unknown_protocol"} <= set(reasons(denied))

    until(told)
    bound = [
        record for record in net.stand.records(event="sandbox") if record["detail"] == "bound to its source"
    ]
    assert [(record["sandbox"], record["source"]) for record in bound] == [
        (net.made["shared"]["id"], "172.30.9.9")
    ]
