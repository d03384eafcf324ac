"""Names, hosts, authorities and host patterns, beside what libc, ipaddress, idna, urllib, DNS libraries and mitmproxy read."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

import dns.name
import dnslib
import idna
from mitmproxy.net.http import url as mitmproxy_url

from egressd.policy.attempt import Address, Name
from egressd.policy.names import (
    Authority,
    BadHost,
    HostPattern,
    format_host,
    format_name,
    format_pattern,
    hide_userinfo,
    is_name,
    parse_authority,
    parse_host,
    parse_name,
    parse_pattern,
    propose_normal,
)
from tests.fuzz.target import Target

_BEHIND = (
    b"\0",
    b" ",
    b"\t",
    b"\r\n",
    b"@x.test",
    b"/",
    b"#",
    b"?",
    b"\\x",
    b"%00",
    b"\xe3\x80\x82com",
    b"..",
)


def check(data: bytes) -> None:
    """Hold every law of names."""
    text = data.decode("latin-1")
    for parse in (parse_name, parse_host):
        assert parse(data) == parse(text), "bytes and their text are read differently"
    assert parse_authority(data, 80) == parse_authority(text, 80)
    _check_name(text)
    _check_host(text, bracketed=True)
    _check_host(text, bracketed=False)
    _check_authority(text)
    for spelled in {text, data.decode("utf-8", "replace")}:
        _check_pattern(spelled)
        hide_userinfo(spelled)
        if not spelled.isascii():
            assert isinstance(parse_host(spelled), BadHost)
    for junk in _BEHIND:
        assert isinstance(parse_name(data + junk), BadHost), junk
        assert isinstance(parse_host(data + junk), BadHost), junk
        assert isinstance(parse_authority(data + junk, 80), BadHost), junk


def _check_name(text: str) -> None:
    name = parse_name(text)
    if isinstance(name, BadHost):
        assert name.detail.isascii()
        assert len(text) < 24 or text not in name.detail, "a refusal quotes what it refuses"
        return
    assert is_name(name)
    assert parse_host(text) == name
    assert parse_name(format_name(name)) == parse_name(format_name(name) + ".") == name
    _agree_on_name(text, name)


def _agree_on_name(text: str, name: Name) -> None:
    """Whoever reads the text as a host at all reads the same one."""
    plain = format_name(name)
    for reader in (socket.inet_aton, ipaddress.ip_address):
        with contextlib.suppress(OSError, ValueError):
            reader(text)
            raise AssertionError(f"{reader.__name__} reads an address where we read a name")
    assert (urlsplit(f"http://{text}/p").hostname or "").removesuffix(".") == plain
    assert dns.name.from_text(text).to_text(omit_final_dot=True).lower() == plain
    assert tuple(label.decode("ascii").lower() for label in dnslib.DNSLabel(text).label) == name
    with contextlib.suppress(idna.IDNAError, UnicodeError):
        assert idna.encode(text, uts46=True).decode("ascii").removesuffix(".") == plain
    with contextlib.suppress(UnicodeError):
        assert text.encode("idna").decode("ascii").removesuffix(".").lower() == plain


def _check_host(text: str, *, bracketed: bool) -> None:
    host = parse_host(text, bracketed=bracketed)
    libc: bytes | None = None
    with contextlib.suppress(OSError, ValueError):
        libc = socket.inet_aton(text)
    if libc is not None:
        address = ipaddress.IPv4Address(libc)
        assert isinstance(host, BadHost) or host == address, "libc dials another host"
    if isinstance(host, BadHost):
        return
    if isinstance(host, ipaddress.IPv4Address):
        assert libc == host.packed, "we read an address where libc reads none"
    if isinstance(host, ipaddress.IPv6Address):
        assert host.scope_id is None
        assert socket.inet_pton(socket.AF_INET6, text.strip("[]")) == host.packed
    assert parse_host(format_host(host)) == host


def _check_authority(text: str) -> None:
    with_port, without = parse_authority(text, None), parse_authority(text, 443)
    if isinstance(with_port, Authority):
        assert with_port == without
    if isinstance(without, BadHost):
        assert isinstance(with_port, BadHost)
        return
    assert 1 <= without.port <= 65535
    split = urlsplit(f"https://{text}/p?q")
    assert _same(split.hostname, without.host), "urllib reads another host"
    assert (split.port or 443) == without.port
    assert (split.path, split.query, split.username) == ("/p", "q", None)
    with contextlib.suppress(ValueError):
        host, port = mitmproxy_url.parse_authority(text, check=False)
        assert _same(host, without.host), "mitmproxy reads another host"
        assert (port or 443) == without.port


def _same(text: str | None, host: Name | Address) -> bool:
    return text is not None and parse_host(text, bracketed=text.startswith("[")) == host


def _check_pattern(text: str) -> None:
    pattern = parse_pattern(text)
    proposal = propose_normal(text)
    assert proposal is None or isinstance(parse_pattern(proposal), HostPattern)
    if isinstance(pattern, HostPattern):
        assert format_pattern(pattern) == text
        assert pattern.matches(pattern.name) is not pattern.wildcard
        assert pattern.matches(("x", *pattern.name)) is pattern.wildcard
        assert not pattern.matches(("x" + pattern.name[0], *pattern.name[1:]))


def parse(data: bytes) -> object:
    """Read the input in every way there is."""
    return (
        parse_name(data),
        parse_host(data),
        parse_authority(data, 80),
        parse_pattern(data.decode("latin-1")),
    )


TARGET = Target(
    "names",
    check,
    parse,
    seeds=(
        b"api.example.com",
        b"API.Example.COM.",
        b"*.example.com",
        b"a_b.x-y.test:8443",
        b"xn--mnchen-3ya.de",
        b"xn--a.xn--p1ai",
        b"127.0.0.1",
        b"0x7f.1",
        b"017700000001",
        b"2130706433",
        b"1.2.3",
        b"0x7f000001:80",
        b"[::1]:443",
        b"[::ffff:169.254.169.254]",
        b"fe80::1%eth0",
        b"user:pw@host.test:80",
        b"http://a.test/b?c#d",
        b".example.com",
        b"a..b",
        b"a.b.c.d.e.f.g.h:1",
        b"metadata.google.internal",
        b"localhost:0080",
        b"1.2.3.4.",
        b"xn--",
        b"a." * 126 + b"b",
        b"x" * 63 + b".test",
        "bücher.example".encode(),
        b"example.com\0.evil.test",
        b"[fe80::1%25eth0]:443",
        b"1.2.3.08",
        b"0x.test",
        b"a.0x",
        b"%65xample.com",
        b"\xef\xbd\x81.test",
    ),
    words=(
        b".",
        b":",
        b"xn--",
        b"0x",
        b"%00",
        b"@",
        b"[",
        b"]",
        b"*.",
        b"::",
        b"ffff:",
        b":443",
        b":65536",
        b"1.1",
        b"\xe3\x80\x82",
        b"\xc2\xad",
        b"\xe2\x84\xaa",
        b"-",
        b"_",
        b"http://",
        b"127.",
        b"0",
        b"08",
        b"255",
    ),
    most=320,
)
