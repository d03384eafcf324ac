"""Law 3: the names of a request and its connection agree, or it is refused, whatever their spelling."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.binding import Bound, Names, Unbound, bind
from egressd.policy.reasons import Reason

NAME = ("api", "example", "com")
HTTPS = Names(NAME, 443, "https", sni="api.example.com")
HTTP = Names(NAME, 80, "http")
PROXY = Names(NAME, 80, "http", per_request=True)


@pytest.mark.parametrize(
    "host",
    [
        b"api.example.com",
        b"API.Example.COM",
        b"api.example.com.",
        b"api.example.com:443",
        b"api.example.com.:443",
    ],
)
def test_every_spelling_of_the_name_is_the_name(host: bytes) -> None:
    assert bind(HTTPS, [host]) == Bound(NAME, 443, "https")
    assert bind(HTTPS, [host], host) == Bound(NAME, 443, "https")
    assert bind(HTTPS, [], host) == Bound(NAME, 443, "https")


REFUSED: dict[str, tuple[Names, list[bytes], bytes, Reason]] = {
    "another host": (HTTPS, [b"evil.example.com"], b"", Reason.AUTHORITY_MISMATCH),
    "a name below": (HTTPS, [b"x.api.example.com"], b"", Reason.AUTHORITY_MISMATCH),
    "a name above": (HTTPS, [b"example.com"], b"", Reason.AUTHORITY_MISMATCH),
    "an address": (HTTPS, [b"1.2.3.4"], b"", Reason.AUTHORITY_MISMATCH),
    "another port": (HTTPS, [b"api.example.com:8443"], b"", Reason.AUTHORITY_MISMATCH),
    "another authority": (HTTPS, [b"api.example.com"], b"evil.example.com", Reason.AUTHORITY_MISMATCH),
    "a good authority and another host": (
        HTTPS,
        [b"evil.example.com"],
        b"api.example.com",
        Reason.AUTHORITY_MISMATCH,
    ),
    "two hosts": (HTTPS, [b"api.example.com", b"evil.example.com"], b"", Reason.DUPLICATE_HOST),
    "the host twice": (HTTPS, [b"api.example.com"] * 2, b"", Reason.DUPLICATE_HOST),
    "two hosts beside an authority": (
        HTTPS,
        [b"api.example.com"] * 2,
        b"api.example.com",
        Reason.DUPLICATE_HOST,
    ),
    "no host": (HTTPS, [], b"", Reason.BAD_HOST),
    "an empty host": (HTTPS, [b""], b"", Reason.BAD_HOST),
    "a list": (HTTPS, [b"api.example.com, evil.example.com"], b"", Reason.BAD_HOST),
    "user information": (HTTPS, [b"api.example.com@evil.example.com"], b"", Reason.USERINFO_IN_AUTHORITY),
    "a letter outside ASCII": (HTTPS, ["\u212aernel.org".encode()], b"", Reason.NON_ASCII_HOST),
    "port zero": (HTTPS, [b"api.example.com:0"], b"", Reason.BAD_PORT),
    "an empty port": (HTTPS, [b"api.example.com:"], b"", Reason.BAD_PORT),
    "a bad authority": (HTTPS, [b"api.example.com"], b"a b", Reason.BAD_HOST),
    "a hello for another name": (
        Names(NAME, 443, "https", sni="b.example.com"),
        [b"api.example.com"],
        b"",
        Reason.SNI_MISMATCH,
    ),
    "a hello for no name": (
        Names(NAME, 443, "https", sni="\0"),
        [b"api.example.com"],
        b"",
        Reason.SNI_MISMATCH,
    ),
    "a destination that proves nothing": (
        Names(None, 443, "https"),
        [b"api.example.com"],
        b"",
        Reason.SYNTHETIC_UNMAPPED,
    ),
    "origin form to a proxy": (PROXY, [b"api.example.com"], b"", Reason.BAD_REQUEST),
    "a proxy target that Host denies": (
        PROXY,
        [b"evil.example.com"],
        b"api.example.com",
        Reason.AUTHORITY_MISMATCH,
    ),
    "a proxy target on another port": (
        PROXY,
        [b"api.example.com:81"],
        b"api.example.com:82",
        Reason.AUTHORITY_MISMATCH,
    ),
}


@pytest.mark.parametrize(("names", "hosts", "authority", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(names: Names, hosts: list[bytes], authority: bytes, reason: Reason) -> None:
    unbound = bind(names, hosts, authority)
    assert isinstance(unbound, Unbound)
    assert unbound.reason is reason


def test_a_hello_without_a_name_passes_where_the_destination_proves_one() -> None:
    assert bind(Names(NAME, 443, "https"), [b"api.example.com"]) == Bound(NAME, 443, "https")


def test_a_target_to_a_proxy_is_its_own_destination() -> None:
    assert bind(PROXY, [b"b.example.com:8080"], b"b.example.com:8080") == Bound(
        ("b", "example", "com"), 8080, "http"
    )


@pytest.mark.parametrize(
    ("host", "port", "scheme", "authority"),
    [
        (NAME, 443, "https", b"api.example.com"),
        (NAME, 80, "http", b"api.example.com"),
        (NAME, 80, "https", b"api.example.com:80"),
        (NAME, 8080, "http", b"api.example.com:8080"),
        (IPv4Address("11.0.0.9"), 80, "http", b"11.0.0.9"),
        (IPv6Address("2606:4700::1"), 8080, "http", b"[2606:4700::1]:8080"),
    ],
)
def test_the_judged_authority_is_what_goes_upstream(
    host: object, port: int, scheme: str, authority: bytes
) -> None:
    assert isinstance(host, tuple | IPv4Address | IPv6Address)
    bound = Bound(host, port, scheme)
    assert bound.authority == authority
    assert bind(Names(host, port, scheme), [authority]) == bound


TEXT = st.binary(max_size=30) | st.sampled_from(
    [b"api.example.com", b"api.example.com:80", b"[::1]", b"1.2.3.4"]
)


@given(st.lists(TEXT, max_size=3), TEXT, st.sampled_from([HTTPS, HTTP, PROXY, Names(None, 80, "http")]))
def test_what_is_bound_is_the_judged_host_or_the_proxys_target(
    hosts: list[bytes], authority: bytes, names: Names
) -> None:
    bound = bind(names, hosts, authority)
    if isinstance(bound, Bound) and not names.per_request:
        assert (bound.host, bound.port) == (names.host, names.port)
