"""What an operator may write as dns.upstream."""

from __future__ import annotations

import re
import subprocess
import sys
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.dns.servers import FORMS, Upstream, parse_upstream

V4, V6 = IPv4Address("11.0.0.53"), IPv6Address("2001:db8::53")
NAME = "dns.example"


@pytest.mark.parametrize(
    ("text", "server", "identity"),
    [
        ("udp://11.0.0.53", Upstream(V4), "11.0.0.53"),
        ("udp://11.0.0.53:5353", Upstream(V4, 5353), "11.0.0.53"),
        ("tcp://127.0.0.1", Upstream(IPv4Address("127.0.0.1"), 53, "tcp"), "127.0.0.1"),
        ("udp://[2001:db8::53]:5353", Upstream(V6, 5353), "2001:db8::53"),
        ("tls://11.0.0.53", Upstream(V4, 853, "tls"), "11.0.0.53"),
        ("tls://11.0.0.53#dns.example", Upstream(V4, 853, "tls", NAME), NAME),
        ("tls://11.0.0.53:8853#DNS.Example.", Upstream(V4, 8853, "tls", NAME), NAME),
        ("tls://[2001:db8::53]#dns.example", Upstream(V6, 853, "tls", NAME), NAME),
        ("tls://[fe80::53%eth0]", Upstream(IPv6Address("fe80::53%eth0"), 853, "tls"), "fe80::53"),
        ("https://11.0.0.53", Upstream(V4, 443, "https", None, "/dns-query"), "11.0.0.53"),
        ("https://11.0.0.53/", Upstream(V4, 443, "https", None, "/"), "11.0.0.53"),
        ("https://11.0.0.53/q/%7Ea;b#dns.example", Upstream(V4, 443, "https", NAME, "/q/%7Ea;b"), NAME),
        ("https://[2001:db8::53]:8443/dns-query", Upstream(V6, 8443, "https", None, "/dns-query"), str(V6)),
        ("https://11.0.0.53#dns.example", Upstream(V4, 443, "https", NAME, "/dns-query"), NAME),
    ],
)
def test_an_upstream_is_an_address_and_what_its_transport_needs(
    text: str, server: Upstream, identity: str
) -> None:
    assert parse_upstream(text) == (server,)
    assert parse_upstream(str(server)) == (server,)
    assert server.identity == identity


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("11.0.0.53", "no DNS upstream"),
        ("", "no DNS upstream"),
        ("System", "no DNS upstream"),
        ("sdns://AAAA", "no DNS upstream"),
        ("TLS://11.0.0.53", "no DNS upstream"),
        ("quic://11.0.0.53", "no DNS upstream"),
        ("http://11.0.0.53/dns-query", "no DNS upstream"),
        ("udp://dns.example", "an IP address must stand here, IPv6 in brackets; use"),
        ("udp://11.0.0.053", "an IP address must stand here"),
        ("udp://0xb.0.0.53", "an IP address must stand here"),
        ("udp://[11.0.0.53]", "an IP address must stand here"),
        ("udp://٣.0.0.53", "an IP address must stand here"),
        ("tls://dns.example", "behind #, as in tls://ADDRESS#NAME"),
        ("https://dns.example/dns-query", "behind #, as in https://ADDRESS#NAME"),
        ("udp://", "no address, port and name that can be read"),
        ("udp://2001:db8::53", "IPv6 stands in brackets"),
        ("udp://11.0.0.53:+53", "no address, port and name that can be read"),
        ("udp://11.0.0.53:", "no address, port and name that can be read"),
        ("udp://11.0.0.53:٣", "no address, port and name that can be read"),
        ("udp://11.0.0.53:000053", "no address, port and name that can be read"),
        ("tls://[::1]x:853", "no address, port and name that can be read"),
        ("tls://11.0.0.53 ", "no address, port and name that can be read"),
        ("tls://11.0.0.53\n", "no address, port and name that can be read"),
        ("tls://11.0.0.53#a#b", "no address, port and name that can be read"),
        ("udp://11.0.0.53:70000", "the port is none"),
        ("udp://11.0.0.53:0", "the port is none"),
        ("udp://11.0.0.53/x", "udp:// takes nothing but an address and a port"),
        ("udp://11.0.0.53#dns.example", "udp:// takes nothing but an address and a port"),
        ("tcp://11.0.0.53#", "tcp:// takes nothing but an address and a port"),
        ("udp://11.0.0.53?x", "no query and no template"),
        ("https://11.0.0.53/dns-query?dns=", "no query and no template"),
        ("https://11.0.0.53/dns-query{?dns}", "no query and no template"),
        ("udp://me@11.0.0.53", "the name of a server stands behind #"),
        ("tls://dns.example@11.0.0.53", "the name of a server stands behind #"),
        ("https://11.0.0.53/dns-query@9.9.9.9x#", "behind # stands a DNS name"),
        ("tls://11.0.0.53/", "tls:// takes no path"),
        ("tls://11.0.0.53#", "behind # stands a DNS name"),
        ("tls://11.0.0.53#11.0.0.53", "behind # stands a DNS name"),
        ("tls://11.0.0.53#*.example", "behind # stands a DNS name"),
        ("tls://11.0.0.53#dns..example", "behind # stands a DNS name"),
        ("https://11.0.0.53/a\\b", "the path is none that a URL may have"),
        ("https://11.0.0.53/%zz", "the path is none that a URL may have"),
        ("https://11.0.0.53/é", "the path is none that a URL may have"),
        ("https://11.0.0.53/" + "x" * 1024, "the path is none that a URL may have"),
    ],
)
def test_what_is_no_upstream_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the text is compared below
        parse_upstream(text)
    assert says in str(caught.value)
    assert str(caught.value).endswith(f"; use {FORMS}")


@given(st.text() | st.builds("{}://{}".format, st.sampled_from(["udp", "tcp", "tls", "https"]), st.text()))
def test_any_text_is_one_server_that_reads_back_or_a_value_error(text: str) -> None:
    try:
        [server] = parse_upstream(text, Path("/nonexistent")) or [None]
    except ValueError:
        return
    if server is not None:
        assert parse_upstream(str(server)) == (server,)


def test_system_reads_the_nameservers_and_nothing_else(tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text(
        "# a comment\nsearch corp.internal\noptions ndots:5 rotate\n"
        "nameserver 11.0.0.1\nnameserver\nnameserver dns.example\n;nameserver 11.0.0.9\n"
        "nameserver 2001:db8::2 # second\nnameserver fe80::1%lo\nnameserver 11.0.0.4\n"
    )
    assert [str(server.address) for server in parse_upstream("system", conf)] == [
        "11.0.0.1",
        "2001:db8::2",
        "fe80::1%lo",
    ]


def test_checking_a_configuration_needs_neither_dns_nor_tls_libraries() -> None:
    program = (
        "import sys, egressd.gate.dns.servers\n"
        "print(sorted({'dns', 'h2', 'ssl', 'asyncio'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


def test_every_upstream_in_the_documentation_is_one() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "dns.md").read_text("utf-8")
    written = re.findall(r"upstream: \"?([^\s\"}]+)", text) + re.findall(r"`(https://9[^`]+)`", text)
    assert len(written) >= 6
    for each in written:
        assert len(parse_upstream(each)) == 1
    for form in FORMS.replace(" or ", ", ").split(", "):
        assert f"`{form}`" in text
