"""The explicit proxy head: CONNECT and absolute form, total over bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.door.connect import Absolute, BadHead, NeedMore, Tunnel, parse_proxy_head
from egressd.policy.reasons import Reason


def test_connect_gives_the_authority_and_what_its_head_took() -> None:
    data = b"CONNECT API.Example.com.:443 HTTP/1.1\r\nHost: whatever\r\n\r\n\x16\x03\x01"
    head = parse_proxy_head(data)
    assert isinstance(head, Tunnel)
    assert (head.authority.host, head.authority.port) == (("api", "example", "com"), 443)
    assert data[head.size :] == b"\x16\x03\x01"


def test_absolute_form_gives_the_authority_of_the_target() -> None:
    head = parse_proxy_head(b"GET http://deb.example.org/debian?x=//y@z HTTP/1.1\r\n")
    assert isinstance(head, Absolute)
    assert (head.authority.host, head.authority.port) == (("deb", "example", "org"), 80)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"CONNECT a.test:0 HTTP/1.1\r\n\r\n", Reason.BAD_PORT, id="NAME-24 port zero"),
        pytest.param(b"CONNECT a.test:65536 HTTP/1.1\r\n\r\n", Reason.BAD_PORT, id="NAME-24 port too large"),
        pytest.param(b"CONNECT a.test:443:22 HTTP/1.1\r\n\r\n", Reason.BAD_PORT, id="NAME-24 two ports"),
        pytest.param(b"CONNECT a.test:+443 HTTP/1.1\r\n\r\n", Reason.BAD_PORT, id="NAME-24 signed port"),
        pytest.param(b"CONNECT a.test HTTP/1.1\r\n\r\n", Reason.BAD_PORT, id="NAME-24 no port"),
        pytest.param(
            b"CONNECT [evil.test]:443 HTTP/1.1\r\n\r\n", Reason.BAD_HOST, id="NAME-02 brackets round a name"
        ),
        pytest.param(
            b"CONNECT a.test:443@evil.test:443 HTTP/1.1\r\n\r\n",
            Reason.USERINFO_IN_AUTHORITY,
            id="NAME-06 userinfo",
        ),
        pytest.param(b"CONNECT evil.test\0.a.test:443 HTTP/1.1\r\n\r\n", Reason.BAD_HOST, id="NAME-07 NUL"),
        pytest.param(b"CONNECT evil.test/x:443 HTTP/1.1\r\n\r\n", Reason.BAD_HOST, id="NAME-09 slash"),
        pytest.param(
            "CONNECT \u212aernel.test:443 HTTP/1.1\r\n\r\n".encode(),
            Reason.NON_ASCII_HOST,
            id="NAME-03 Kelvin sign",
        ),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", Reason.BAD_REQUEST, id="HTTP-03 origin form"),
        pytest.param(
            b"GET https://a.test/ HTTP/1.1\r\n\r\n", Reason.BAD_REQUEST, id="HTTP-21 https in clear"
        ),
        pytest.param(b"GET ftp://a.test/ HTTP/1.1\r\n\r\n", Reason.BAD_REQUEST, id="HTTP-20 other scheme"),
        pytest.param(
            b"GET http://a.test@evil.test/ HTTP/1.1\r\n\r\n",
            Reason.USERINFO_IN_AUTHORITY,
            id="NAME-05 userinfo in a URL",
        ),
        pytest.param(b"GET http://evil%2etest/ HTTP/1.1\r\n\r\n", Reason.BAD_HOST, id="NAME-08 percent"),
        pytest.param(
            b"CONNECT a.test:443 HTTP/1.1\n\r\nX: y\r\n\r\n", Reason.BAD_REQUEST, id="HTTP-05 bare LF"
        ),
        pytest.param(b"CONNECT a.test:443 HTTP/9.9\r\n\r\n", Reason.BAD_REQUEST, id="HTTP-20 version"),
        pytest.param(
            b"CONNECT a.test:443 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
            Reason.BAD_FRAMING,
            id="CONNECT with a body",
        ),
        pytest.param(
            b"CONNECT a.test:443 HTTP/1.1\r\n folded: x\r\n\r\n", Reason.BAD_HEADER, id="HTTP-07 obs-fold"
        ),
        pytest.param(b"\x05\x01\x00\n", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 SOCKS 5 with a line end"),
        pytest.param(b"\x05\x01\x00", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 SOCKS 5"),
        pytest.param(b"\x04\x01\x01\xbb\0\0\0\1u\0", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 SOCKS 4a"),
        pytest.param(b"\x16\x03\x01\x02", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 TLS"),
        pytest.param(b"CONNECT\0", Reason.BAD_REQUEST, id="a NUL in a line that has not ended"),
        pytest.param(b"EHLO x\r\n", Reason.BAD_REQUEST, id="HTTP-22 SMTP"),
    ],
)
def test_what_is_no_proxy_request_is_refused_with_its_reason(data: bytes, reason: Reason) -> None:
    head = parse_proxy_head(data)
    assert isinstance(head, BadHead)
    assert head.reason is reason


def test_every_prefix_of_a_head_asks_for_more() -> None:
    data = b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n"
    for end in range(len(data)):
        assert isinstance(parse_proxy_head(data[:end]), NeedMore), data[:end]


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_raise(data: bytes) -> None:
    parse_proxy_head(data)
    parse_proxy_head(b"CONNECT " + data)
    parse_proxy_head(b"GET http://" + data + b" HTTP/1.1\r\n\r\n")
