"""The first request on an explicit proxy connection, in any pieces, beside h11."""

from __future__ import annotations

import contextlib

import h11

from egressd.gate.door.connect import Absolute, BadHead, NeedMore, Tunnel, parse_proxy_head
from egressd.policy.names import parse_authority
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of


def check(data: bytes) -> None:
    """Hold every law of proxy heads."""
    outcome = parse_proxy_head(data)
    for pieces in pieces_of(data):
        found = _in_pieces(pieces)
        assert _verdict(found) == _verdict(outcome), "the head depends on how it was cut"
    if isinstance(outcome, Tunnel):
        assert data[: outcome.size].endswith(b"\r\n\r\n")
        for at in offsets_of(data, outcome.size):
            assert not isinstance(parse_proxy_head(data[:at]), Tunnel), "a tunnel whose head is not all there"
        for junk in JUNK:
            assert parse_proxy_head(data[: outcome.size] + junk) == outcome, (
                "what lies behind a head changes it"
            )
    if isinstance(outcome, Absolute):
        for junk in JUNK:
            assert parse_proxy_head(data + junk) == outcome
    if isinstance(outcome, Tunnel | Absolute):
        _agree_with_h11(data, outcome)


def _agree_with_h11(data: bytes, outcome: Tunnel | Absolute) -> None:
    """What h11 reads as a request leads to where we think it does."""
    server = h11.Connection(h11.SERVER)
    with contextlib.suppress(h11.RemoteProtocolError):
        server.receive_data(data)
        event = server.next_event()
        if not isinstance(event, h11.Request):
            return
        assert (event.method == b"CONNECT") is isinstance(outcome, Tunnel)
        target = bytes(event.target)
        if isinstance(outcome, Tunnel):
            assert parse_authority(target, None) == outcome.authority
            trailing, _ = server.trailing_data
            assert not trailing or data[outcome.size :].startswith(trailing)
        else:
            assert target.lower().startswith(b"http://")


def _verdict(outcome: object) -> object:
    return (type(outcome), outcome.reason) if isinstance(outcome, BadHead) else outcome


def _in_pieces(pieces: list[bytes]) -> object:
    """As the door reads: until anything but NeedMore comes out."""
    seen = b""
    for piece in pieces:
        seen += piece
        outcome = parse_proxy_head(seen)
        if not isinstance(outcome, NeedMore):
            return outcome
    return NeedMore()


TARGET = Target(
    "proxy_heads",
    check,
    parse_proxy_head,
    seeds=(
        b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n\x16\x03\x01",
        b"CONNECT [2606:4700::1111]:443 HTTP/1.0\r\nUser-Agent: x\r\nProxy-Authorization: Basic eDp5\r\n\r\n",
        b"GET http://api.example.com/a?b HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST http://user@h.test:81/ HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET https://a.test/ HTTP/1.1\r\n\r\n",
        b"\x05\x01\0",
        b"\x04\x01\0\x50",
        b"\x16\x03\x01\0\x05",
        b"CONNECT a.test:443 HTTP/1.1\nHost: x\n\n",
        b"CONNECT a.test:443 HTTP/1.1\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n",
    ),
    words=(
        b"\r\n",
        b"\n",
        b"\r\n\r\n",
        b"CONNECT ",
        b" HTTP/1.1",
        b":443",
        b"http://",
        b"Host: ",
        b"Content-Length: 5",
        b"\0",
        b" ",
        b"Transfer-Encoding: chunked",
        b"@",
        b"#",
        b"?",
        b"\r",
        b"evil.test",
    ),
    most=700,
)
