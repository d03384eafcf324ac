"""The lab's DNS over TLS and over HTTPS, seen by a client that is not ours."""

from __future__ import annotations

import pytest

from egressd.lab import Lab, topology

TLS = ["+tls", "-p", str(topology.DOT_PORT)]
HTTPS = ["+https", "-p", str(topology.DOH_PORT)]
both = pytest.mark.parametrize(("flags", "transport"), [(TLS, "tls"), (HTTPS, "https")], ids=["tls", "https"])


def dig(lab: Lab, flags: list[str], *more: str, server: str = topology.DNS) -> str:
    # by its address: dig sends no SNI, for which the lab has a certificate of all its addresses
    arguments = ["dig", f"@{server}", *flags, f"+tls-ca={lab.ca_file}", "+tries=1", "+timeout=5", *more]
    return lab.host_exec(arguments).stdout


@both
@pytest.mark.parametrize("server", [topology.DNS, topology.DNS_V6])
def test_a_strict_client_is_answered(lab: Lab, flags: list[str], transport: str, server: str) -> None:
    assert dig(lab, flags, "+short", "api.lab-origin.com", server=server) == f"{topology.API}\n"
    assert [(seen.name, seen.type, seen.transport) for seen in lab.dns_queries()] == [
        ("api.lab-origin.com", "A", transport)
    ]


@both
def test_a_crowd_is_not_cut(lab: Lab, flags: list[str], transport: str) -> None:
    assert len(dig(lab, flags, "+short", "huge.lab-origin.com").split()) == 60


@both
@pytest.mark.parametrize("kind", ["expired", "self-signed", "wrong-name"])
def test_a_bad_certificate_is_shown_on_demand(lab: Lab, flags: list[str], transport: str, kind: str) -> None:
    lab.set_certificate("", kind)
    try:
        said = dig(lab, flags, "api.lab-origin.com")
    finally:
        lab.set_certificate("", "good")
    assert "certificate verification" in said
    assert topology.API not in said
    assert lab.dns_queries() == []


def test_another_path_is_no_dns(lab: Lab) -> None:
    answer = dig(lab, ["+https=/other", "-p", str(topology.DOH_PORT)], "api.lab-origin.com")
    assert topology.API not in answer
    assert lab.dns_queries() == []
