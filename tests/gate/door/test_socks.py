"""SOCKS5 as a client writes it: greeting, login, request; everything else is refused in words that the client understands."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.door.connect import NeedMore
from egressd.gate.door.socks import (
    BadSocks,
    Greeting,
    Login,
    Request,
    choose,
    judge_login,
    read_greeting,
    read_login,
    read_request,
    reply,
)
from egressd.policy.names import parse_authority
from egressd.policy.reasons import Reason

NOT_ALLOWED = b"\x05\x02\x00\x01" + bytes(6)
NO_SUCH_COMMAND = b"\x05\x07\x00\x01" + bytes(6)
NO_SUCH_TYPE = b"\x05\x08\x00\x01" + bytes(6)


def domain(name: bytes, port: int = 443, command: int = 1) -> bytes:
    return bytes((5, command, 0, 3, len(name))) + name + port.to_bytes(2)


def test_a_greeting_gives_the_ways_of_authentication_and_what_it_took() -> None:
    assert read_greeting(b"\x05\x02\x00\x02\x05\x01") == Greeting(frozenset({0, 2}), 4)


def test_a_login_gives_user_and_password_and_shows_neither() -> None:
    login = read_login(b"\x01\x05sbx-1\x06s:cret\x05\x01")
    assert login == Login(b"sbx-1", b"s:cret", 14)
    assert "cret" not in repr(login)
    assert read_login(b"\x01\x00\x00") == Login(b"", b"", 3)


@pytest.mark.parametrize(
    ("data", "host", "port"),
    [
        pytest.param(domain(b"API.Example.com."), ("api", "example", "com"), 443, id="a name"),
        pytest.param(domain(b"0x7f.1", 80), IPv4Address("127.0.0.1"), 80, id="IP-02 a name that is an address"),
        pytest.param(domain(b"::1", 80), IPv6Address("::1"), 80, id="IP-05 a name that is an IPv6 address"),
        pytest.param(b"\x05\x01\x00\x01\x5d\xb8\xd8\x22\x00\x50", IPv4Address("93.184.216.34"), 80, id="IPv4"),
        pytest.param(
            b"\x05\x01\x00\x04" + IPv6Address("2606:4700::1111").packed + b"\x01\xbb",
            IPv6Address("2606:4700::1111"), 443, id="IPv6",
        ),
    ],
)  # fmt: skip
def test_a_request_gives_host_and_port(data: bytes, host: object, port: int) -> None:
    request = read_request(data + b"\x16\x03\x01")
    assert isinstance(request, Request)
    assert (request.authority.host, request.authority.port, request.size) == (host, port, len(data))


REFUSED = [
    pytest.param(domain(b"evil.test\0.allowed.test"), Reason.BAD_HOST, NOT_ALLOWED, id="NAME-07 NUL in a name"),
    pytest.param(domain(b""), Reason.BAD_HOST, NOT_ALLOWED, id="no name"),
    pytest.param(domain("\u212aernel.test".encode()), Reason.NON_ASCII_HOST, NOT_ALLOWED, id="NAME-03 Kelvin sign"),
    pytest.param(domain(b"a@evil.test"), Reason.USERINFO_IN_AUTHORITY, NOT_ALLOWED, id="NAME-06 userinfo"),
    pytest.param(domain(b"a.test:443"), Reason.BAD_HOST, NOT_ALLOWED, id="NAME-24 a port in the name"),
    pytest.param(domain(b"[::1]"), Reason.BAD_HOST, NOT_ALLOWED, id="brackets have no place in SOCKS"),
    pytest.param(domain(b"fe80::1%eth0"), Reason.BAD_HOST, NOT_ALLOWED, id="IP-08 a zone"),
    pytest.param(domain(b"x" * 255), Reason.BAD_HOST, NOT_ALLOWED, id="a name that is too long"),
    pytest.param(domain(b"a.test", 0), Reason.BAD_PORT, NOT_ALLOWED, id="NAME-24 port zero"),
    pytest.param(domain(b"a.test", command=2), Reason.PROTOCOL_NOT_ALLOWED, NO_SUCH_COMMAND, id="BIND"),
    pytest.param(domain(b"a.test", command=3), Reason.PROTOCOL_NOT_ALLOWED, NO_SUCH_COMMAND, id="UDP ASSOCIATE"),
    pytest.param(domain(b"a.test", command=0xF0), Reason.PROTOCOL_NOT_ALLOWED, NO_SUCH_COMMAND, id="Tor's RESOLVE"),
    pytest.param(b"\x05\x01\x01\x03\x01a\x00\x50", Reason.BAD_REQUEST, NOT_ALLOWED, id="a reserved byte"),
    pytest.param(b"\x05\x01\x00\x02\x00\x00", Reason.BAD_HOST, NO_SUCH_TYPE, id="an address of unknown type"),
    pytest.param(b"\x04\x01\x00\x50", Reason.BAD_REQUEST, NOT_ALLOWED, id="a request of another version"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason", "answer"), REFUSED)
def test_a_request_that_is_none_is_refused(data: bytes, reason: Reason, answer: bytes) -> None:
    refused = read_request(data)
    assert isinstance(refused, BadSocks)
    assert (refused.reason, refused.reply) == (reason, answer)


@pytest.mark.parametrize(
    ("data", "reason", "answer"),
    [
        pytest.param(b"\x04\x01\x00\x50\x5d\xb8\xd8\x22u\0", Reason.BAD_REQUEST, b"\0\x5b" + bytes(6), id="SOCKS4"),
        pytest.param(b"\x04\x01\x00\x50\0\0\0\1\0a.test\0", Reason.BAD_REQUEST, b"\0\x5b" + bytes(6), id="SOCKS4a"),
        pytest.param(b"\x05\x00", Reason.BAD_REQUEST, b"\x05\xff", id="no way of authentication"),
        pytest.param(b"GET / HTTP/1.1\r\n", Reason.UNKNOWN_PROTOCOL, b"", id="HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00", Reason.UNKNOWN_PROTOCOL, b"", id="TLS"),
        pytest.param(b"\r\n\r\n\0\r\nQUIT\n\x21\x11", Reason.UNKNOWN_PROTOCOL, b"", id="a PROXY header of no hop"),
    ],
)  # fmt: skip
def test_what_does_not_begin_as_socks5_is_refused(data: bytes, reason: Reason, answer: bytes) -> None:
    refused = read_greeting(data)
    assert isinstance(refused, BadSocks)
    assert (refused.reason, refused.reply) == (reason, answer)


def test_a_login_of_another_version_is_refused() -> None:
    refused = read_login(b"\x05\x01\x00")
    assert isinstance(refused, BadSocks)
    assert refused.reply == b"\x01\x01"


def test_every_prefix_asks_for_more() -> None:
    for reader, message in (
        (read_greeting, b"\x05\x03\x00\x01\x02"),
        (read_login, b"\x01\x05sbx-1\x06secret"),
        (read_request, domain(b"api.example.com")),
        (read_request, b"\x05\x01\x00\x04" + bytes(15) + b"\x01\x01\xbb"),
    ):
        for end in range(len(message)):
            assert reader(message[:end]) == NeedMore(), message[:end]
        assert not isinstance(reader(message), NeedMore | BadSocks)


@given(st.from_regex(r"[a-z0-9.\-_:\[\]x]{0,60}", fullmatch=True), st.integers(0, 65_535))
def test_law_2_a_name_means_here_what_it_means_to_connect(name: str, port: int) -> None:
    asked = read_request(domain(name.encode(), port))
    bracketed = f"[{name}]" if ":" in name and "[" not in name else name
    connect = parse_authority(f"{bracketed}:{port}", None)
    if isinstance(asked, Request):
        assert asked.authority == connect


@given(st.binary(max_size=300))
def test_no_bytes_make_a_reader_raise(data: bytes) -> None:
    for reader in (read_greeting, read_login, read_request):
        reader(data)
        reader(b"\x05" + data)
        reader(b"\x01" + data)


def test_what_is_answered_never_tells_an_address() -> None:
    assert reply(0) == b"\x05\x00\x00\x01" + socket.inet_aton("0.0.0.0") + b"\0\0"
    assert (choose(2), judge_login(ok=True), judge_login(ok=False)) == (b"\x05\x02", b"\x01\x00", b"\x01\x01")
