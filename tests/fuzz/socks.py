"""The three messages of a SOCKS5 client, in any pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address

from egressd.gate.door.connect import NeedMore
from egressd.gate.door.socks import (
    BadSocks,
    Greeting,
    Login,
    Request,
    read_greeting,
    read_login,
    read_request,
)
from egressd.policy.names import format_host, parse_authority
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of

type Outcome = Greeting | Login | Request | BadSocks | NeedMore
type Reader = Callable[[bytes], Outcome]

MOST = {read_greeting: 257, read_login: 513, read_request: 262}
"""Bytes of the longest message (RFC 1928 §3 and §4, RFC 1929 §2)."""


def check(data: bytes) -> None:
    """Hold every law of each message."""
    for reader, most in MOST.items():
        _check(reader, most, data)


def _check(reader: Reader, most: int, data: bytes) -> None:
    outcome = reader(data)
    for pieces in pieces_of(data):
        assert _verdict(_in_pieces(reader, pieces)) == _verdict(outcome), (
            "what is read depends on how it was cut"
        )
    if isinstance(outcome, NeedMore):
        assert len(data) < most, "more is waited for than any message has"
        return
    for junk in JUNK:
        assert _verdict(reader(data + junk)) == _verdict(outcome), "what lies behind a message changes it"
    if isinstance(outcome, BadSocks):
        assert not outcome.reply or outcome.reply[1] != 0, "a refusal that reads as success"
        return
    assert 0 < outcome.size <= min(most, len(data))
    for at in offsets_of(data, outcome.size):
        assert isinstance(reader(data[:at]), NeedMore), "a message that is not all there"
    if isinstance(outcome, Request):
        host = outcome.authority.host
        assert 0 < outcome.authority.port < 65_536
        assert isinstance(host, tuple | IPv4Address | IPv6Address)
        spelled = f"{format_host(host)}:{outcome.authority.port}"
        assert parse_authority(spelled, None) == outcome.authority, "another host than CONNECT would read"


def _verdict(outcome: Outcome) -> object:
    return (outcome.reason, outcome.reply) if isinstance(outcome, BadSocks) else outcome


def _in_pieces(reader: Reader, pieces: Iterable[bytes]) -> Outcome:
    """As the door reads: until anything but NeedMore comes out."""
    seen = b""
    for piece in pieces:
        seen += piece
        outcome = reader(seen)
        if not isinstance(outcome, NeedMore):
            return outcome
    return reader(b"") if not seen else NeedMore()


def parse(data: bytes) -> None:
    """Read all three."""
    for reader in MOST:
        reader(data)


TARGET = Target(
    "socks",
    check,
    parse,
    seeds=(
        b"\x05\x01\x00",
        b"\x05\x03\x00\x01\x02",
        b"\x05\x00",
        b"\x04\x01\x00\x50\x01\x02\x03\x04user\x00",
        b"\x04\x01\x00\x50\x00\x00\x00\x01\x00api.example.com\x00",
        b"\x01\x05sbx-1\x06secret",
        b"\x01\x00\x00",
        b"\x05\x01\x00\x03\x0fapi.example.com\x01\xbb\x16\x03\x01",
        b"\x05\x01\x00\x01\x5d\xb8\xd8\x22\x00\x50",
        b"\x05\x01\x00\x04" + bytes(15) + b"\x01\x01\xbb",
        b"\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00",
        b"\x05\x03\x00\x01\x00\x00\x00\x00\x00\x00",
        b"\x05\x01\x00\x03\x17evil.test\x00.allowed.test\x01\xbb",
        b"GET / HTTP/1.1\r\n\r\n",
    ),
    words=(
        b"\x05",
        b"\x01",
        b"\x00",
        b"\x03",
        b"\x04",
        b"\x02",
        b"\xff",
        b"api.example.com",
        b"127.0.0.1",
        b"@",
        b"0x7f.1",
    ),
    most=600,
)
