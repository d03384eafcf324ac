"""Names: one parser, total, and strict wherever two others would read two hosts."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import idna
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
    parse_port,
    propose_normal,
)
from egressd.policy.reasons import Reason

BAD = Reason.BAD_HOST
FOREIGN = Reason.NON_ASCII_HOST
USERINFO = Reason.USERINFO_IN_AUTHORITY
PORT = Reason.BAD_PORT

ALLOWED: Name = ("api", "allowed", "test")
KELVIN, LONG_S = "\u212a", "\u017f"  # str.lower makes ASCII letters of the first, casefold of both


def authority(raw: str | bytes) -> Authority | Reason:
    found = parse_authority(raw, 443)
    return found.reason if isinstance(found, BadHost) else found


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param("api.allowed.test", Authority(ALLOWED, 443), id="a plain name"),
        pytest.param(
            "evil.test.", Authority(("evil", "test"), 443), id="NAME-01 one final dot is taken away"
        ),
        pytest.param("api.allowed.test.:443", Authority(ALLOWED, 443), id="NAME-01 also before the port"),
        pytest.param("a..", BAD, id="NAME-01 two final dots are not"),
        pytest.param(".", BAD, id="NAME-01 the root alone is no host"),
        pytest.param("[evil.test]:443", BAD, id="NAME-02 brackets round a name"),
        pytest.param("[127.0.0.1]:443", BAD, id="NAME-02 brackets round IPv4"),
        pytest.param("[::1]x:443", BAD, id="NAME-02 text behind the bracket"),
        pytest.param("API.AlLoWeD.TeSt:443", Authority(ALLOWED, 443), id="NAME-03 ASCII case is folded"),
        pytest.param(f"{KELVIN}ernel.test", FOREIGN, id="NAME-03 the Kelvin sign is no k"),
        pytest.param(f"{LONG_S}.test", FOREIGN, id="NAME-03 the long s is no s"),
        pytest.param("api.allowed.test@evil.test", USERINFO, id="NAME-05 a prefix that is user information"),
        pytest.param("api.allowed.test:443@evil.test", USERINFO, id="NAME-06 userinfo with a port in it"),
        pytest.param("api.allowed.test:443@evil.test:443", USERINFO, id="NAME-06 userinfo in CONNECT"),
        pytest.param("evil.test\0.allowed.test:443", BAD, id="NAME-07 NUL"),
        pytest.param(b"evil.test\0.allowed.test:443", BAD, id="NAME-07 NUL in bytes"),
        pytest.param("evil%2etest", BAD, id="NAME-08 an escaped dot"),
        pytest.param("api.allowed.test%00.evil.test", BAD, id="NAME-08 an escaped NUL"),
        pytest.param("api.allowed.test%2f@evil.test:443", USERINFO, id="NAME-08 an escaped slash before @"),
        pytest.param("evil.test\\@api.allowed.test", USERINFO, id="NAME-09 a backslash before @"),
        pytest.param("evil.test#@api.allowed.test", USERINFO, id="NAME-09 a fragment before @"),
        pytest.param("evil.test\\.allowed.test", BAD, id="NAME-09 a backslash"),
        pytest.param("evil.test/x:443", BAD, id="NAME-09 a slash"),
        pytest.param("evil.test?x", BAD, id="NAME-09 a question mark"),
        pytest.param("evil.test\t.allowed.test:443", BAD, id="NAME-10 a tab"),
        pytest.param("a\r\nX-Log: ok", BAD, id="NAME-10 a line of its own"),
        pytest.param(" api.allowed.test", BAD, id="NAME-10 a space before"),
        pytest.param("api.allowed.test ", BAD, id="NAME-10 a space behind"),
        pytest.param("evil\u3002test", FOREIGN, id="NAME-11 the ideographic full stop"),
        pytest.param("evil\uff0etest", FOREIGN, id="NAME-11 the fullwidth full stop"),
        pytest.param("evil\uff61test".encode(), FOREIGN, id="NAME-11 the halfwidth full stop, as bytes"),
        pytest.param("\u2460\u2461\u2466.0.0.\u2460", FOREIGN, id="NAME-13 enclosed digits"),
        pytest.param("al\u200blowed.test", FOREIGN, id="NAME-14 a zero-width space"),
        pytest.param("al\u00adlowed.test", FOREIGN, id="NAME-14 a soft hyphen"),
        pytest.param(
            "xn--pi-6kc.allowed.test",
            Authority(("xn--pi-6kc", "allowed", "test"), 443),
            id="NAME-15 a homograph stays its own A-label",
        ),
        pytest.param("xn--a.test", BAD, id="NAME-16 broken Punycode"),
        pytest.param("xn--.test", BAD, id="NAME-16 empty Punycode"),
        pytest.param("xn--999999b.test", BAD, id="NAME-16 Punycode beyond Unicode"),
        pytest.param(f"xn--{'6' * 51}p1a.test", BAD, id="NAME-16 Punycode beyond any integer of C"),
        pytest.param("xn--abc-.test", BAD, id="NAME-16 Punycode of plain ASCII"),
        pytest.param("xn--\x80.test", FOREIGN, id="NAME-16 a raw byte in an A-label"),
        pytest.param("s" * 300, BAD, id="NAME-16 three hundred bytes"),
        pytest.param(".wild.test", BAD, id="NAME-17 a leading dot"),
        pytest.param(
            "_x.wild.test", Authority(("_x", "wild", "test"), 443), id="NAME-22 a leading underscore"
        ),
        pytest.param("-a.wild.test", Authority(("-a", "wild", "test"), 443), id="NAME-22 a leading hyphen"),
        pytest.param(
            "my_bucket.7.test", Authority(("my_bucket", "7", "test"), 443), id="NAME-22 digits inside"
        ),
        pytest.param("a..allowed.test", BAD, id="NAME-23 an empty label"),
        pytest.param("l" * 63 + ".test", Authority(("l" * 63, "test"), 443), id="NAME-23 a label of 63"),
        pytest.param("l" * 64 + ".test", BAD, id="NAME-23 a label of 64"),
        pytest.param("", BAD, id="NAME-23 nothing"),
        pytest.param("api.allowed.test:0", PORT, id="NAME-24 port 0"),
        pytest.param("api.allowed.test:65535", Authority(ALLOWED, 65535), id="NAME-24 the last port"),
        pytest.param("api.allowed.test:65536", PORT, id="NAME-24 one past the last port"),
        pytest.param("api.allowed.test:443:22", PORT, id="NAME-24 two ports"),
        pytest.param("api.allowed.test:+443", PORT, id="NAME-24 a sign"),
        pytest.param("api.allowed.test: 443", PORT, id="NAME-24 a space before the port"),
        pytest.param("api.allowed.test:443 ", PORT, id="NAME-24 a space behind the port"),
        pytest.param("api.allowed.test :443", BAD, id="NAME-24 a space before the colon belongs to the host"),
        pytest.param("api.allowed.test:4_43", PORT, id="NAME-24 an underscore"),
        pytest.param("api.allowed.test:0443", PORT, id="NAME-24 a leading zero"),
        pytest.param("api.allowed.test:", PORT, id="NAME-24 a colon and no port"),
        pytest.param("api.allowed.test:\uff14\uff14\uff13", PORT, id="NAME-24 fullwidth digits"),
        pytest.param("api.allowed.test:\u0664", PORT, id="NAME-24 Arabic digits"),
        pytest.param("[::1]:99999", PORT, id="NAME-24 a port behind brackets"),
        pytest.param(
            "metadata:80",
            Authority(("metadata",), 80),
            id="NAME-26 a single label is a name; the floor denies it",
        ),
        pytest.param("127.0.0.1.", BAD, id="NAME-27 an address with a final dot"),
        pytest.param("0x7f.1.", BAD, id="NAME-27 a short hexadecimal one with a final dot"),
        pytest.param("foo.0x4", BAD, id="NAME-27 a last label in hexadecimal"),
        pytest.param("foo.0x", BAD, id="NAME-27 a last label of 0x alone"),
        pytest.param("foo.09", BAD, id="NAME-27 a last label that is no octal number"),
        pytest.param("1.2.3.4.5", BAD, id="NAME-27 five parts"),
        pytest.param("256.1.1.1", BAD, id="NAME-27 a part above 255"),
        pytest.param(
            "1.2.3.4.test", Authority(("1", "2", "3", "4", "test"), 443), id="NAME-27 numbers before a word"
        ),
        pytest.param("[fe80::1%25eth0]:80", BAD, id="IP-11 a zone id"),
        pytest.param("[::1%lo0]:80", BAD, id="IP-11 a zone id, not escaped"),
        pytest.param("[::1", BAD, id="HTTP-04 an open bracket"),
        pytest.param("[]", BAD, id="HTTP-04 empty brackets"),
        pytest.param("[v1.fe80]", BAD, id="HTTP-04 a future address"),
        pytest.param("::1", BAD, id="HTTP-04 IPv6 without brackets"),
        pytest.param("fe80::1:443", BAD, id="HTTP-04 IPv6 without brackets and what may be a port"),
        pytest.param("api.allowed.test, evil.test", BAD, id="HTTP-04 two hosts in one field"),
    ],
)
def test_authority(raw: str | bytes, expected: Authority | Reason) -> None:
    assert authority(raw) == expected


@pytest.mark.parametrize(
    ("raw", "address"),
    [
        pytest.param("2130706433", "127.0.0.1", id="IP-01 decimal"),
        pytest.param("2852039166", "169.254.169.254", id="IP-01 decimal metadata"),
        pytest.param("0177.0.0.1", "127.0.0.1", id="IP-02 octal"),
        pytest.param("0x7f000001", "127.0.0.1", id="IP-02 hexadecimal"),
        pytest.param("0xa9.0xfe.0251.254", "169.254.169.254", id="IP-02 mixed bases"),
        pytest.param("0XA9FEA9FE", "169.254.169.254", id="IP-02 capital hexadecimal"),
        pytest.param("127.1", "127.0.0.1", id="IP-03 two parts"),
        pytest.param("0", "0.0.0.0", id="IP-03 one part"),
        pytest.param("169.16689662", "169.254.169.254", id="IP-03 a long last part"),
        pytest.param("[::ffff:169.254.169.254]", "::ffff:a9fe:a9fe", id="IP-05 mapped"),
        pytest.param("[FE80::1]", "fe80::1", id="capital IPv6"),
    ],
)
def test_every_spelling_of_an_address_is_that_address(raw: str, address: str) -> None:
    assert parse_host(raw) == ipaddress.ip_address(address)
    assert isinstance(parse_name(raw), BadHost)


def test_ipv6_stands_in_brackets_or_without_them_and_never_both_ways() -> None:
    loopback = ipaddress.ip_address("::1")
    assert parse_host("[::1]") == parse_host("::1", bracketed=False) == loopback
    assert isinstance(parse_host("::1"), BadHost)
    assert isinstance(parse_host("[::1]", bracketed=False), BadHost)
    assert isinstance(parse_host("::1%1", bracketed=False), BadHost)


def test_connect_needs_a_port() -> None:
    assert parse_authority("api.allowed.test", None) == BadHost(PORT, "the port is missing")
    assert parse_authority("api.allowed.test:8443", None) == Authority(ALLOWED, 8443)


@pytest.mark.parametrize(("length", "ends_well"), [(253, True), (254, False)])
def test_a_name_has_at_most_253_characters(length: int, ends_well: bool) -> None:
    name = ("a" * 62 + ".") * 4 + "b"
    name = "c" * (length - len(name)) + name[: len(name)] if length > len(name) else name
    assert len(name) == length
    assert isinstance(parse_name(name), tuple) is ends_well
    assert isinstance(parse_name(name + "."), tuple) is ends_well


@pytest.mark.parametrize(
    ("raw", "proposal"),
    [
        ("https://API.allowed.test/v1", "api.allowed.test"),
        (" api.allowed.test. ", "api.allowed.test"),
        ("api.allowed.test:8443", "api.allowed.test"),
        ("*.Wild.Test", "*.wild.test"),
        (".wild.test", "*.wild.test"),
        ("api.allowed.test", None),
        ("user@api.allowed.test", None),
        ("api-*.allowed.test", None),
        ("api.[ab]llowed.test", None),
        ("\u0430pi.allowed.test", None),
        ("10.0.0.1", None),
        ("*", None),
        ("**.wild.test", None),
        ("Localhost", None),
        ("", None),
    ],
)
def test_the_normal_form_that_is_proposed(raw: str, proposal: str | None) -> None:
    assert propose_normal(raw) == proposal


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        pytest.param("*", "every host", id="NAME-19 a bare star"),
        pytest.param("*.com", "two labels", id="NAME-19 a top-level domain"),
        pytest.param("api-*.allowed.test", "front", id="NAME-20 a star inside a label"),
        pytest.param("*.*.allowed.test", "front", id="NAME-20 two stars"),
        pytest.param("*allowed.test", "front", id="NAME-20 a star that is no label"),
        pytest.param("api.[ab]llowed.test", "character", id="NAME-20 a bracket expression"),
        pytest.param("^api$", "character", id="NAME-21 a regular expression"),
        pytest.param("api.allowed.test.", "write 'api.allowed.test'", id="CFG-11 a final dot"),
        pytest.param("https://API.allowed.test/v1", "write 'api.allowed.test'", id="CFG-11 a URL"),
        pytest.param("api.allowed.test:8443", "write 'api.allowed.test'", id="CFG-11 a port"),
        pytest.param("x.test\nallow all", "character", id="CFG-06 a second line"),
        pytest.param("10.0.0.1", "address", id="an address"),
        pytest.param("localhost", "two labels", id="a single label"),
        pytest.param("b\u00fccher.test", "ASCII", id="NAME-11 text outside ASCII"),
    ],
)
def test_a_pattern_that_is_not_normal_is_refused(raw: str, why: str) -> None:
    found = parse_pattern(raw)
    assert isinstance(found, BadHost)
    assert why in found.detail


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        pytest.param("api.allowed.test", "api.allowed.test", True, id="the name itself"),
        pytest.param("allowed.test", "evilallowed.test", False, id="NAME-04 no label boundary"),
        pytest.param("api.allowed.test", "xapi.allowed.test", False, id="NAME-04 a longer first label"),
        pytest.param("api.allowed.test", "api.allowed.test.evil.test", False, id="NAME-05 a prefix"),
        pytest.param("*.wild.test", "wild.test", False, id="NAME-17 the apex"),
        pytest.param("*.wild.test", "x.wild.test", True, id="NAME-17 a name below"),
        pytest.param("*.wild.test", "a.b.wild.test", True, id="NAME-18 two labels below"),
        pytest.param("*.wild.test", "xwild.test", False, id="NAME-04 a wildcard without boundary"),
        pytest.param("api.allowed.test", "apixallowed.test", False, id="NAME-21 the dot is no joker"),
    ],
)
def test_patterns_match_by_labels(pattern: str, name: str, covered: bool) -> None:
    compiled, labels = parse_pattern(pattern), parse_name(name)
    assert isinstance(compiled, HostPattern)
    assert isinstance(labels, tuple)
    assert compiled.matches(labels) is covered
    assert format_pattern(compiled) == pattern


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        pytest.param("user:secret@host.test:443", "***@host.test:443", id="an authority"),
        pytest.param("http://user:secret@host.test/a?b", "http://***@host.test/a?b", id="a URL"),
        pytest.param("user:se@cret@host.test", "***@host.test", id="an at in the password"),
        pytest.param("http://u:p@host.test/b@c", "http://***@host.test/b@c", id="an at in the path stays"),
        pytest.param("/a@b", "/a@b", id="a path alone"),
        pytest.param("host.test:443", "host.test:443", id="none"),
        pytest.param("u:p\n\0@host.test", "***@host.test", id="with control characters"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_a_record_shows_no_user_information(raw: str, shown: str) -> None:
    assert hide_userinfo(raw) == shown


def test_a_refusal_never_quotes_what_came_in() -> None:
    for raw in ("zq~.test", "zq zq", "[zq]", "x.test:zq", "zq@x", "zq\u00e9", "zq." * 90):
        found = parse_authority(raw, 443)
        assert isinstance(found, BadHost)
        assert "zq" not in found.detail


LABELS = st.text("abcxyz0189-_", min_size=1, max_size=8)
HOSTISH = st.one_of(
    st.text(max_size=40),
    st.text("0123456789abcdefxX.:[]%@*-_ \0", max_size=40),
    st.lists(LABELS, min_size=1, max_size=5).map(".".join),
)


@given(HOSTISH | st.binary(max_size=40))
@example(b"\xff" * 300)
@example("\ud800.test")
def test_the_parsers_are_total(raw: str | bytes) -> None:
    for found in (
        parse_name(raw),
        parse_host(raw),
        parse_host(raw, bracketed=False),
        parse_authority(raw, 1),
    ):
        assert isinstance(found, tuple | ipaddress.IPv4Address | ipaddress.IPv6Address | Authority | BadHost)
    if isinstance(raw, str):
        parse_pattern(raw)
        proposal = propose_normal(raw)
        assert proposal is None or isinstance(parse_pattern(proposal), HostPattern)


@given(HOSTISH)
def test_what_is_parsed_prints_and_parses_back(raw: str) -> None:
    found = parse_host(raw)
    if not isinstance(found, BadHost):
        assert parse_host(format_host(found)) == found
    if isinstance(found, tuple):
        assert is_name(found)
        assert parse_name(format_name(found).upper() + ".") == found
        assert parse_name(format_name(found).encode()) == found


@given(st.lists(st.text(max_size=70), max_size=5).map(tuple))
def test_a_ready_made_name_is_checked_as_a_parsed_one(labels: Name) -> None:
    parsed = parse_name(".".join(labels))
    assert is_name(labels) is (parsed == labels)


NUMBERS = st.integers(0, 2**33).flatmap(
    lambda n: st.sampled_from([str(n), hex(n), f"0{n:o}", f"0{n}", "", "0x", "08"])
)


@given(st.lists(NUMBERS, min_size=1, max_size=5).map(".".join))
@example("127.0.0.1")
@example("1.2.3.4.")
@example("0")
def test_ipv4_is_what_inet_aton_takes_it_for(text: str) -> None:
    try:
        expected: Address | None = ipaddress.IPv4Address(socket.inet_aton(text))
    except OSError:
        expected = None
    found = parse_host(text)
    assert found == expected if expected is not None else isinstance(found, BadHost)


@given(st.ip_addresses())
def test_what_ipaddress_prints_is_that_address(address: Address) -> None:
    assert parse_host(format_host(address)) == address


@given(st.text("0123456789abcdef:.%[]", max_size=45))
def test_ipv6_is_taken_only_where_ipaddress_takes_it(text: str) -> None:
    found = parse_host(f"[{text}]")
    if not isinstance(found, BadHost):
        assert found == ipaddress.IPv6Address(text)


@given(st.text("abcx-n1.", min_size=1, max_size=30))
def test_idna_reads_no_other_host_out_of_a_name(text: str) -> None:
    found = parse_name(text)
    if isinstance(found, tuple):
        with suppress(
            idna.IDNAError
        ):  # stricter than we are (hyphens, underscores): refused there, a literal name here
            assert idna.encode(text, uts46=True).decode().removesuffix(".") == format_name(found)


@given(st.text("abc.:@[]/\\?#%0 \t", max_size=30))
def test_urllib_reads_no_other_host_out_of_an_authority(text: str) -> None:
    found = parse_authority(text, 443)
    if isinstance(found, Authority):
        split = urlsplit(f"//{text}")
        assert split.hostname is not None
        assert parse_host(split.hostname, bracketed=False) == found.host
        assert (split.port or 443) == found.port


@given(st.text(max_size=8))
def test_a_port_is_what_int_prints(text: str) -> None:
    port = parse_port(text)
    assert port is None or (str(port) == text and 1 <= port <= 65535)
