"""Heads, parsed strictly: each case whole, byte by byte and with junk behind it; nothing raises on any bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.body import HeadBuffer
from egressd.gate.inspector.head import (
    CHUNKED,
    UNTIL_CLOSE,
    BadHead,
    HeadScan,
    RequestHead,
    ResponseHead,
    connection_options,
    parse_fields,
    parse_request_head,
    parse_response_head,
)
from egressd.policy.reasons import Reason


def request(text: str) -> RequestHead | BadHead:
    return parse_request_head(text.encode("latin-1") + b"\r\n\r\n")


def response(text: str, method: bytes = b"GET", version: bytes = b"HTTP/1.1") -> ResponseHead | BadHead:
    return parse_response_head(text.encode("latin-1") + b"\r\n\r\n", method, version)


REQUESTS = {
    "the least": ("GET / HTTP/1.1", (b"GET", b"", b"", b"/", 0, False)),
    "a query": ("GET /a?b=c%20d HTTP/1.1", (b"GET", b"", b"", b"/a?b=c%20d", 0, False)),
    "odd but legal characters": (
        'GET /a|b"<>^`{}\\ HTTP/1.1',
        (b"GET", b"", b"", b'/a|b"<>^`{}\\', 0, False),
    ),
    "absolute": ("GET http://h:80/a HTTP/1.1", (b"GET", b"http", b"h:80", b"/a", 0, False)),
    "absolute without a path": ("GET HTTP://h HTTP/1.1", (b"GET", b"http", b"h", b"/", 0, False)),
    "absolute with a query alone": ("GET https://h?x HTTP/1.1", (b"GET", b"https", b"h", b"/?x", 0, False)),
    "options of the server": ("OPTIONS * HTTP/1.1", (b"OPTIONS", b"", b"", b"*", 0, False)),
    "an extension method": ("M-SEARCH / HTTP/1.1", (b"M-SEARCH", b"", b"", b"/", 0, False)),
    "a length": ("PUT / HTTP/1.1\r\nContent-Length: 12", (b"PUT", b"", b"", b"/", 12, False)),
    "a length of nothing": ("PUT / HTTP/1.1\r\nContent-Length: 0", (b"PUT", b"", b"", b"/", 0, False)),
    "chunked, shouted": (
        "PUT / HTTP/1.1\r\ntransfer-ENCODING:\tCHUNKED ",
        (b"PUT", b"", b"", b"/", CHUNKED, False),
    ),
    "close": ("GET / HTTP/1.1\r\nConnection: a, Close", (b"GET", b"", b"", b"/", 0, True)),
    "HTTP/1.0": ("GET / HTTP/1.0\r\nConnection: keep-alive", (b"GET", b"", b"", b"/", 0, True)),
}


@pytest.mark.parametrize(("text", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_says_what_it_says(text: str, expected: tuple[object, ...]) -> None:
    head = request(text)
    assert isinstance(head, RequestHead)
    assert (head.method, head.scheme, head.authority, head.path, head.length, head.close) == expected


def test_fields_keep_order_spelling_and_duplicates_and_lose_the_space_round_values() -> None:
    head = request("GET / HTTP/1.1\r\nB:  x \t y \r\na:\r\nb: \xe4")
    assert isinstance(head, RequestHead)
    assert head.fields == ((b"B", b"x \t y"), (b"a", b""), (b"b", b"\xe4"))


def test_a_refused_head_keeps_method_and_target_for_the_record() -> None:
    assert request("PUT /x HTTP/1.1\r\nA b: c") == BadHead(
        Reason.BAD_HEADER, "a header name is malformed", b"PUT", b"/x"
    )


RESPONSES = {
    "the least": ("HTTP/1.1 200", b"GET", (200, b"", UNTIL_CLOSE, True)),
    "an empty phrase": ("HTTP/1.1 200 ", b"GET", (200, b"", UNTIL_CLOSE, True)),
    "a phrase outside ASCII": ("HTTP/1.1 404 \xe4 b", b"GET", (404, b"\xe4 b", UNTIL_CLOSE, True)),
    "a length": ("HTTP/1.1 200 OK\r\nContent-Length: 3", b"GET", (200, b"OK", 3, False)),
    "chunked": ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"GET", (200, b"OK", CHUNKED, False)),
    "to HEAD": ("HTTP/1.1 200 OK\r\nContent-Length: 3", b"HEAD", (200, b"OK", 0, False)),
    "to HEAD, chunked": ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"HEAD", (200, b"OK", 0, False)),
    "no content": ("HTTP/1.1 204 No\r\nContent-Length: 3", b"GET", (204, b"No", 0, False)),
    "not modified": ("HTTP/1.1 304 Not\r\nContent-Length: 3", b"GET", (304, b"Not", 0, False)),
    "interim": ("HTTP/1.1 103 Early", b"GET", (103, b"Early", 0, False)),
    "HTTP/1.0": ("HTTP/1.0 200 OK\r\nContent-Length: 3", b"GET", (200, b"OK", 3, True)),
}


@pytest.mark.parametrize(("text", "method", "expected"), RESPONSES.values(), ids=RESPONSES)
def test_a_response_says_what_it_says(text: str, method: bytes, expected: tuple[object, ...]) -> None:
    head = response(text, method)
    assert isinstance(head, ResponseHead)
    assert (head.status, head.phrase, head.length, head.close) == expected


BAD_RESPONSES = {
    "no status": "HTTP/1.1 OK",
    "two digits": "HTTP/1.1 20 OK",
    "four digits": "HTTP/1.1 2000 OK",
    "a leading zero": "HTTP/1.1 099 No",
    "two spaces": "HTTP/1.1  200 OK",
    "another version": "HTTP/1.2 200 OK",
    "a control character": "HTTP/1.1 200 a\x07",
    "both lengths": "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nTransfer-Encoding: chunked",
    "chunked in HTTP/1.0": "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked",
    "chunked without content": "HTTP/1.1 204 No\r\nTransfer-Encoding: chunked",
    "a length that differs from itself": "HTTP/1.1 200 OK\r\nContent-Length: 1\r\ncontent-length: 2",
}


@pytest.mark.parametrize("text", BAD_RESPONSES.values(), ids=BAD_RESPONSES)
def test_a_response_that_could_say_two_things_is_the_upstreams_fault(text: str) -> None:
    head = response(text)
    assert isinstance(head, BadHead)
    assert head.reason is Reason.UPSTREAM_PROTOCOL


def test_a_chunked_answer_to_an_old_client_is_refused() -> None:
    head = response("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", version=b"HTTP/1.0")
    assert isinstance(head, BadHead)


@pytest.mark.parametrize("text", [text for text, _ in REQUESTS.values()], ids=list(REQUESTS))
@pytest.mark.parametrize("junk", [b"", b"GET", b"\r\n\r\n", b"\0\n"])
def test_a_head_ends_at_its_empty_line_however_it_arrives(text: str, junk: bytes) -> None:
    raw = text.encode("latin-1") + b"\r\n\r\n"
    whole = HeadBuffer(65536)
    whole += raw + junk
    assert (whole.take_head(), bytes(whole)) == (raw, junk)
    drop = HeadBuffer(65536)
    for byte in raw[:-1]:
        drop += bytes([byte])
        assert drop.take_head() is None
    drop += raw[-1:] + junk
    assert (drop.take_head(), bytes(drop)) == (raw, junk)


def test_one_empty_line_before_each_head_is_skipped_and_no_more() -> None:
    buffer = HeadBuffer(65536)
    buffer += b"\r\nGET / HTTP/1.1\r\n\r\n\r\nGET /2 HTTP/1.1\r\n\r\n\r\n\r\n"
    assert buffer.take_head() == b"GET / HTTP/1.1\r\n\r\n"
    assert buffer.take_head() == b"GET /2 HTTP/1.1\r\n\r\n"
    assert isinstance(buffer.take_head(), BadHead)


def test_a_bare_line_feed_behind_an_empty_line_is_seen_however_it_arrives() -> None:
    for pieces in ([b"\r\n\nGET / HTTP/1.1\r\n\r\n"], [b"\r", b"\n", b"\nGET / HTTP/1.1\r\n\r\n"]):
        buffer, found = HeadBuffer(65536), None
        for piece in pieces:
            buffer += piece
            found = found or buffer.take_head()
        assert isinstance(found, BadHead)


def test_a_bare_line_feed_is_seen_before_the_head_ends() -> None:
    scan = HeadScan()
    assert scan.find(b"GET / HTTP/1.1\r\nA: b\nC") == BadHead(Reason.BAD_HEADER, "a line ends without CR")


@pytest.mark.parametrize("size", [63, 64, 65])
def test_the_limit_is_the_size_of_the_whole_head(size: int) -> None:
    raw = b"GET /".ljust(size - 13, b"x") + b" HTTP/1.1\r\n\r\n"
    assert len(raw) == size
    buffer = HeadBuffer(64)
    buffer += raw
    assert (buffer.take_head() == raw) is (size <= 64)


def test_connection_options_are_a_list_in_every_spelling() -> None:
    fields = parse_fields([b"Connection: a,, B ,\tclose", b"CONNECTION: d"])
    assert not isinstance(fields, BadHead)
    assert connection_options(fields) == {b"a", b"b", b"close", b"d"}


HEADISH = st.lists(
    st.sampled_from(
        [
            b"GET",
            b" ",
            b"/",
            b"HTTP/1.1",
            b"\r\n",
            b"\n",
            b"\r",
            b":",
            b"Host",
            b"a",
            b"\0",
            b"\t",
            b"chunked",
        ]
    )
    | st.binary(max_size=4),
    max_size=30,
).map(b"".join)


@given(HEADISH)
def test_no_bytes_raise_and_what_passes_has_no_line_left_in_it(raw: bytes) -> None:
    head = parse_request_head(raw)
    if isinstance(head, RequestHead):
        for name, value in head.fields:
            assert not set(name + value) & set(b"\r\n\0")
        assert not set(head.method + head.target + head.path + head.authority) & set(b" \t\r\n\0")
    parse_response_head(raw, b"GET", b"HTTP/1.1")
    HeadScan().find(raw)


@given(HEADISH, st.data())
def test_pieces_never_change_what_a_head_is(raw: bytes, data: st.DataObject) -> None:
    whole, pieces = HeadBuffer(256), HeadBuffer(256)
    whole += raw
    expected = whole.take_head()
    found = None
    at = 0
    while at < len(raw) and found is None:
        step = data.draw(st.integers(1, len(raw) - at))
        pieces += raw[at : at + step]
        at += step
        found = pieces.take_head()
    assert type(found) is type(expected)
    if isinstance(expected, bytes):
        assert found == expected
