"""HTTP/1 heads of requests and responses, beside h11 and mitmproxy's own reader: where they differ, ours refuses."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import h11
from mitmproxy import http
from mitmproxy.net.http.http1 import read as lax

from egressd.gate.inspector.binding import Bound, Names, bind
from egressd.gate.inspector.body import HeadBuffer
from egressd.gate.inspector.fields import onward_request, onward_response
from egressd.gate.inspector.head import (
    BadHead,
    Field,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
)
from egressd.gate.inspector.websocket import parse_offer
from egressd.policy.names import format_host, parse_authority
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of

_LIMIT = 1024
_HOST = ("api", "example", "com")
_FRAMING = re.compile(
    rb"(?i)[\r\n][\x00-\x20]*(?:content[^0-9a-z]length|transfer[^0-9a-z]encoding)[\x00-\x20]*:([^\r\n]*)"
)
_NAMES = Names(_HOST, 443, "https", sni="api.example.com")


def _cut(pieces: Iterable[bytes]) -> tuple[bytes | BadHead | None, bytes]:
    """Take the first head out of what arrives in pieces; and what is left."""
    buffer, taken = HeadBuffer(_LIMIT), None
    for piece in pieces:
        buffer += piece
        if taken is None:
            taken = buffer.take_head()
    return taken, bytes(buffer)


def _raw(data: bytes) -> bytes | None:
    """Return the head that begins the input, after holding the laws of finding it."""
    taken, rest = _cut([data])
    for pieces in pieces_of(data):
        again, left = _cut(pieces)
        if isinstance(taken, BadHead):
            assert isinstance(again, BadHead), "the head depends on how it was cut"
        else:
            assert (again, left) == (taken, rest), "the head depends on how it was cut"
    if not isinstance(taken, bytes):
        return None
    assert taken.endswith(b"\r\n\r\n")
    assert len(taken) <= _LIMIT
    assert data in (taken + rest, b"\r\n" + taken + rest)
    size = len(data) - len(rest)
    for at in offsets_of(data, size):
        assert not isinstance(_cut([data[:at]])[0], bytes), "a head that is not all there"
    for junk in JUNK:
        assert _cut([data[:size] + junk]) == (taken, junk), "what lies behind a head changes it"
    return taken


def check_request(data: bytes) -> None:
    """Hold every law of request heads."""
    raw = _raw(data)
    parse_request_head(data)
    head = parse_request_head(raw) if raw is not None else None
    if not isinstance(head, RequestHead):
        return
    assert head.method == head.method.upper() != b"CONNECT"
    assert head.path.startswith(b"/") or (head.path, head.method) == (b"*", b"OPTIONS")
    assert raw is not None
    _check_framing(raw, head.length)
    _agree_with_h11(raw, head)
    _agree_with_mitmproxy(raw, head)
    _check_binding(head)
    onward = onward_request(head.fields, b"api.example.com")
    assert [value for name, value in onward if name.lower() == b"host"] in (
        [b"api.example.com"],
        [b"api.example.com"] * len(_hosts(head)),
    )
    assert all(value == b"chunked" for name, value in onward if name.lower() == b"transfer-encoding")
    parse_offer("GET", head.fields)


def _check_framing(raw: bytes, length: int | None) -> None:
    """What any reader could take for framing is said once, and means what we make of it."""
    said = [value.strip() for value in _FRAMING.findall(raw)]
    assert len(said) <= 1, "a length is said twice"
    if length is None:
        assert said[0].lower() == b"chunked"
    elif length > 0:
        assert said == [b"%d" % length]


def _hosts(head: RequestHead) -> list[bytes]:
    return [value for name, value in head.fields if name.lower() == b"host"]


def _check_binding(head: RequestHead) -> None:
    found = bind(_NAMES, _hosts(head), head.authority)
    if isinstance(found, Bound):
        assert (found.host, found.port) == (_HOST, 443)
        for claim in (*_hosts(head), *([head.authority] if head.authority else ())):
            read = parse_authority(claim, 443)
            assert getattr(read, "host", None) == _HOST
            assert claim.lower().startswith(format_host(_HOST).encode())


def _same_fields(theirs: Iterable[tuple[bytes, bytes]], ours: tuple[Field, ...]) -> bool:
    return [(name.lower(), value) for name, value in theirs] == [
        (name.lower(), value) for name, value in ours
    ]


def _agree_with_h11(raw: bytes, head: RequestHead) -> None:
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    with contextlib.suppress(h11.RemoteProtocolError):
        server.receive_data(raw)
        event = server.next_event()
        assert isinstance(event, h11.Request), "h11 waits for more of what we take for a head"
        assert (event.method, event.target) == (head.method, head.target)
        assert b"HTTP/" + event.http_version == head.version
        assert _same_fields(event.headers, _as_h11(head.fields)), "h11 reads other fields"
        kind, count = _h11_framing(server)
        if head.length is None:
            assert kind == "ChunkedReader", "h11 frames another body"
        else:
            assert (kind, count) == ("ContentLengthReader", head.length), "h11 frames another body"


def _h11_framing(connection: h11.Connection) -> tuple[str, int | None]:
    reader = connection._reader
    if reader is None or not hasattr(reader, "read_eof"):
        return "ContentLengthReader", 0  # the message has ended
    return type(reader).__name__, getattr(reader, "_remaining", None)


def _as_h11(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """h11 folds the one coding that it knows; so does what we send on."""
    return tuple(
        (name, value.lower() if name.lower() == b"transfer-encoding" else value) for name, value in fields
    )


def _agree_with_mitmproxy(raw: bytes, head: RequestHead) -> None:
    with contextlib.suppress(ValueError):
        request = lax.read_request_head(raw.removesuffix(b"\r\n\r\n").split(b"\r\n"))
        assert request.data.method == head.method
        assert request.data.http_version == head.version
        assert _same_fields(request.headers.fields, head.fields), "mitmproxy reads other fields"
        if head.target.startswith(b"/"):
            assert request.data.path == head.path
        elif head.authority:
            assert (request.data.authority, request.data.path) == (head.authority, head.path)
        assert _framed(request) == head.length, "mitmproxy frames another body"


def _framed(request: http.Request, response: http.Response | None = None) -> int | None:
    return lax.expected_http_body_size(request, response)


def check_response(data: bytes) -> None:
    """Hold every law of response heads."""
    raw = _raw(data)
    parse_response_head(data, b"GET", b"HTTP/1.1")
    for method in (b"GET", b"HEAD"):
        head = parse_response_head(raw, method, b"HTTP/1.1") if raw is not None else None
        if not isinstance(head, ResponseHead):
            continue
        assert raw is not None
        if head.status >= 200 and head.status not in (204, 304) and method == b"GET":
            _check_framing(raw, head.length)
        onward_response(head.fields)
        _agree_on_response(raw, method, head)


def _agree_on_response(raw: bytes, method: bytes, head: ResponseHead) -> None:
    request = http.Request.make(method.decode(), "https://api.example.com/")
    with contextlib.suppress(ValueError):
        response = lax.read_response_head(raw.removesuffix(b"\r\n\r\n").split(b"\r\n"))
        assert response.status_code == head.status
        assert _same_fields(response.headers.fields, head.fields)
        if head.status >= 200:
            assert _framed(request, response) == head.length, "mitmproxy frames another body"
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    client.send(h11.Request(method=method, target="/", headers=[("host", "a.test")]))
    client.send(h11.EndOfMessage())
    with contextlib.suppress(h11.RemoteProtocolError):
        client.receive_data(raw)
        event = client.next_event()
        assert isinstance(event, h11.Response | h11.InformationalResponse)
        assert event.status_code == head.status
        assert _same_fields(event.headers, _as_h11(head.fields))
        if isinstance(event, h11.Response):
            kind, count = _h11_framing(client)
            assert {None: "ChunkedReader", -1: "Http10Reader"}.get(head.length, "ContentLengthReader") == kind
            assert kind != "ContentLengthReader" or count == head.length


_FIELD_WORDS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\r\n ",
    b": ",
    b":",
    b" :",
    b"\t",
    b"\0",
    b"Host: evil.test",
    b"Content-Length: 5",
    b"Content-Length: +5",
    b"content-length:0x5",
    b"Content_Length: 5",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding:\x0bchunked",
    b"chunked, chunked",
    b"\r\nContent-Length: 5",
    b"\r\nTransfer-Encoding: chunked",
    b"Connection: close, content-length",
    b"Expect: 100-continue",
    b"Upgrade: websocket",
    b" HTTP/1.1",
    b" HTTP/1.0",
    b"\xa0",
    b"\x85",
    b"\x80",
    b"@",
    b"//",
    b"#",
    b"http://",
    b"5, 5",
    b"Connection: upgrade",
)

REQUESTS = Target(
    "request_heads",
    check_request,
    parse_request_head,
    seeds=(
        b"GET /a?b=c HTTP/1.1\r\nHost: api.example.com\r\nAccept: */*\r\n\r\n",
        b"\r\nGET / HTTP/1.0\r\nHost: api.example.com:443\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 5\r\n\r\nhello",
        b"OPTIONS * HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: API.example.com.\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET https://api.example.com/x HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /ws HTTP/1.1\r\nHost: api.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"PUT /a HTTP/1.1\r\nHost: api.example.com\r\nExpect: 100-continue\r\nContent-Length: 0\r\nX: a\r\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"CONNECT a.test:443 HTTP/1.1\r\n\r\n",
        b"GET http://u@a.test#f HTTP/1.1\r\n\r\n",
    ),
    words=(b"GET ", b"post ", b"HEAD ", b"CONNECT ", b"OPTIONS * ", *_FIELD_WORDS),
    most=1200,
)

RESPONSES = Target(
    "response_heads",
    check_response,
    lambda data: parse_response_head(data, b"GET", b"HTTP/1.1"),
    seeds=(
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200\r\n\r\n",
        b"HTTP/1.0 302 Found it\r\nLocation: /\r\nServer: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Accept: x\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
    ),
    words=(b"HTTP/1.1 ", b"200 ", b"100 ", b"204 ", b"304 ", b"099 ", b"1000 ", *_FIELD_WORDS),
    most=1200,
)
