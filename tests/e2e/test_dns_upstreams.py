"""The encrypted DNS upstreams, asked by a real worker in its empty root for a real client."""

from __future__ import annotations

import pytest

from egressd.lab import topology
from egressd.lab.stand import Stand

pytestmark = pytest.mark.e2e

URL = "https://api.lab-origin.com/n"
TLS = f"tls://{topology.DNS}#{topology.DNS_NAME}"
HTTPS = f"https://{topology.DNS}:{topology.DOH_PORT}#{topology.DNS_NAME}"


def curl(stand: Stand, upstream: str, script: str = f"curl -sS -m 20 {URL}") -> str:
    return stand.run(["sh", "-c", script], flags=["--dns-upstream", upstream]).stdout


def transports(stand: Stand) -> set[str]:
    return {query.transport for query in stand.lab.dns_queries()}


@pytest.mark.parametrize(
    ("upstream", "transport"),
    [
        pytest.param(f"udp://{topology.DNS}", "udp", id="udp"),
        pytest.param(f"tcp://{topology.DNS}", "tcp", id="tcp"),
        pytest.param(TLS, "tls", id="tls"),
        pytest.param(f"tls://{topology.DNS}", "tls", id="tls by address"),
        pytest.param(f"tls://[{topology.DNS_V6}]#{topology.DNS_NAME}", "tls", id="tls over IPv6"),
        pytest.param(HTTPS, "https", id="https"),
        pytest.param(f"https://{topology.DNS}:{topology.DOH_PORT}/dns-query", "https", id="https by address"),
    ],
)
def test_an_allowed_name_is_resolved_by_the_configured_transport_and_no_other(
    stand: Stand, upstream: str, transport: str
) -> None:
    assert curl(stand, upstream) == "1"
    assert transports(stand) == {transport}
    if transport in ("tls", "https"):
        assert stand.lab.packets(port=53) == []
    assert stand.lab.packets_lost() == 0


@pytest.mark.parametrize("upstream", [TLS, HTTPS], ids=["tls", "https"])
def test_several_names_share_one_connection(stand: Stand, upstream: str) -> None:
    names = [f"n{number}.wild.lab-origin.com" for number in range(6)]
    script = "; ".join(f"curl -sS -m 20 https://{name}/n" for name in names)
    assert curl(stand, upstream, script) == "1" * 6
    port = topology.DOT_PORT if upstream is TLS else topology.DOH_PORT
    [flow] = [flow for flow in stand.lab.packets(address=topology.DNS, port=port) if flow.openings]
    assert flow.openings == 1
    assert {query.name for query in stand.lab.dns_queries()} == set(names)


@pytest.mark.parametrize("upstream", [TLS, HTTPS], ids=["tls", "https"])
@pytest.mark.parametrize("kind", ["expired", "self-signed", "wrong-name"])
def test_dns_28_a_server_that_proves_nothing_is_asked_nothing_and_nobody_else_is(
    stand: Stand, upstream: str, kind: str
) -> None:
    stand.lab.set_certificate(topology.DNS_NAME, kind)
    try:
        said = curl(stand, upstream)
    finally:
        stand.lab.set_certificate(topology.DNS_NAME, "good")
    assert "(reason upstream_dns" in said
    assert stand.lab.dns_queries() == []
    assert stand.lab.packets(port=53) == []
    [end] = [record for record in stand.records(event="end") if record["reason"] == "upstream_dns"]
    assert "certificate is refused" in end["detail"]
    assert "certificate" not in said  # the sandbox is not told of the operator's servers
    assert topology.DNS not in said


@pytest.mark.parametrize("upstream", [TLS, HTTPS], ids=["tls", "https"])
@pytest.mark.parametrize("name", ["wrong-id", "garbage"])
def test_hostile_answers_are_no_better_for_being_encrypted(stand: Stand, upstream: str, name: str) -> None:
    said = curl(stand, upstream, f"curl -sS -m 20 https://{name}.lab-origin.com/")
    assert "(reason upstream_dns" in said
    assert stand.lab.requests() == []
    assert stand.lab.packets(port=53) == []


@pytest.mark.parametrize(
    "upstream",
    [f"tls://{topology.REFUSED}#{topology.DNS_NAME}", f"https://{topology.REFUSED}#{topology.DNS_NAME}"],
    ids=["tls", "https"],
)
def test_dns_28_a_server_that_is_not_there_is_replaced_by_no_other(stand: Stand, upstream: str) -> None:
    assert "(reason upstream_dns" in curl(stand, upstream)
    assert stand.lab.dns_queries() == []
    assert stand.lab.packets(port=53) == []


@pytest.mark.parametrize("upstream", ["tcp://127.0.0.1:15053", f"tls://127.0.0.1:15001#{topology.DNS_NAME}"])
def test_an_upstream_with_the_address_of_our_own_listener_is_not_it(stand: Stand, upstream: str) -> None:
    """Ours are in the sandbox's network, and the worker dials in the host's: no query comes back to us."""
    assert "(reason upstream_dns" in curl(stand, upstream)
    attempts = stand.attempts()
    assert [each["layer"] for each in attempts if each["layer"] != "dns"] == ["connection", "request"]
    assert {each["host"] for each in attempts} == {"api.lab-origin.com"}
    [end] = stand.records(event="end", reason="upstream_dns")
    assert end["detail"].endswith("Connection refused")


@pytest.mark.parametrize(
    ("upstream", "says"),
    [
        ("tls://dns.lab-origin.com", "as in tls://ADDRESS#NAME"),
        ("https://dns.lab-origin.com/dns-query", "as in https://ADDRESS#NAME"),
        ("tls://11.0.0.53#", "behind # stands a DNS name"),
        ("https://11.0.0.53/dns-query{?dns}", "questions are sent by POST"),
    ],
)
def test_what_is_no_upstream_stops_the_start_and_says_what_to_write(
    stand: Stand, upstream: str, says: str
) -> None:
    ran = stand.run(["true"], flags=["--dns-upstream", upstream])
    assert ran.returncode == 125
    assert says in ran.stderr
    assert "; use system, udp://ADDRESS[:PORT]" in ran.stderr
