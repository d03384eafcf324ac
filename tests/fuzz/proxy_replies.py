"""What an operator's proxy answers to a CONNECT, in any pieces, beside h11."""

from __future__ import annotations

import contextlib

import h11

from egressd.gate.via import REPLY_LIMIT, Declined, Established, NeedMore, read_reply
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of


def check(data: bytes) -> None:
    """Hold every law of replies."""
    outcome = read_reply(data)
    for pieces in pieces_of(data):
        seen, found = b"", read_reply(b"")
        for piece in pieces:
            seen += piece
            found = read_reply(seen)
            if not isinstance(found, NeedMore):
                break
        assert found == outcome, "the reply depends on how it was cut"
    if isinstance(outcome, NeedMore):
        assert len(data) < REPLY_LIMIT
        return
    for junk in JUNK:
        assert read_reply(data + junk) == outcome, "what lies behind a reply changes it"
    if isinstance(outcome, Established):
        assert data[: outcome.size].endswith(b"\r\n\r\n")
        for at in offsets_of(data, outcome.size):
            assert isinstance(read_reply(data[:at]), NeedMore), "a tunnel before the reply is whole"
        _agree_with_h11(data, outcome)
    else:
        assert isinstance(outcome, Declined)


def _agree_with_h11(data: bytes, outcome: Established) -> None:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="CONNECT", target="a.test:443", headers=[("Host", "a.test")]))
    client.send(h11.EndOfMessage())
    with contextlib.suppress(h11.RemoteProtocolError):
        client.receive_data(data)
        event = client.next_event()
        if isinstance(event, h11.Response):
            assert 200 <= event.status_code < 300
            assert client.trailing_data[0] == data[outcome.size :]


TARGET = Target(
    "proxy_replies",
    check,
    read_reply,
    seeds=(
        b"HTTP/1.1 200 Connection established\r\n\r\n220 hello\r\n",
        b"HTTP/1.0 200\r\nVia: 1.1 proxy\r\n\r\n\x16\x03\x03",
        b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=x\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 503 x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\n\n",
    ),
    words=(b"\r\n", b"\r\n\r\n", b"\n", b"HTTP/1.1 200 ", b"Content-Length: 5", b"\0", b"\r", b" "),
    most=700,
)
