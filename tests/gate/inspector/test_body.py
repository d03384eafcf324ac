"""Bodies: what comes out is what was sent, however it was cut; what cannot be read is said to be so, for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.body import (
    CHUNK_LINE,
    PIECE,
    TRAILER_BYTES,
    BodyReader,
    Broken,
    End,
    HeadBuffer,
    Part,
    Piece,
    reader_of,
)
from egressd.gate.inspector.head import CHUNKED, UNTIL_CLOSE, Length


def read(length: Length, *pieces: bytes) -> tuple[bytes, Part, bytes, BodyReader]:
    """Feed pieces; return the body, the last part that is none of it, and what is left."""
    reader, buffer = reader_of(length), HeadBuffer(65536)
    body = b""
    last: Part = None
    for piece in pieces:
        buffer += piece
        while isinstance(part := reader.read(buffer), Piece):
            assert 0 < len(part.data) <= 2 * PIECE or length is not CHUNKED
            body += part.data
        last = part
        if last is not None:
            break
    return body, last, bytes(buffer), reader


def single(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


CHUNKS = {
    "nothing": (b"0\r\n\r\n", b"", End()),
    "one": (b"3\r\nabc\r\n0\r\n\r\n", b"abc", End()),
    "several": (b"1\r\na\r\n0A\r\n0123456789\r\n00\r\n\r\n", b"a0123456789", End()),
    "extensions": (b'3;a=b\r\nabc\r\n0 ; q="\xe4"\r\n\r\n', b"abc", End()),
    "trailers": (b"1\r\na\r\n0\r\nX: 1\r\nY:\t2 \r\n\r\n", b"a", End(((b"X", b"1"), (b"Y", b"2")))),
}


@pytest.mark.parametrize(("raw", "body", "end"), CHUNKS.values(), ids=CHUNKS)
def test_chunks_are_read_whole_byte_by_byte_and_with_more_behind(raw: bytes, body: bytes, end: End) -> None:
    for pieces in ([raw], single(raw), [raw + b"GET"]):
        got, last, left, reader = read(CHUNKED, *pieces)
        assert (got, last) == (body, end)
        assert left == (b"GET" if pieces[0].endswith(b"GET") else b"")
        assert reader.read(HeadBuffer(1)) == end  # it stays over


BAD_CHUNKS = {
    "no number": b"x\r\n",
    "nothing for a number": b"\r\n",
    "a sign": b"+1\r\na\r\n",
    "a prefix": b"0x1\r\na\r\n",
    "space before": b" 1\r\na\r\n",
    "space behind": b"1 \r\na\r\n",
    "an underscore": b"1_0\r\n",
    "a bare LF": b"1\na\r\n",
    "more than it says": b"1\r\nab\r\n",
    "a LF after the data": b"1\r\na\n",
    "a number beyond all bounds": b"1000000000000000\r\n",
    "a control character in an extension": b"1;a=\0\r\na\r\n",
    "a line without end": b"1;" + b"a" * (CHUNK_LINE + 1),
    "a bad trailer": b"0\r\nA b: c\r\n\r\n",
    "a folded trailer": b"0\r\nA: b\r\n c\r\n\r\n",
    "a trailer with a bare LF": b"0\r\nA: b\n\r\n",
    "trailers without end": b"0\r\n" + b"A: b\r\n" * (TRAILER_BYTES // 6 + 1),
    "a trailer line without end": b"0\r\nA: " + b"b" * (TRAILER_BYTES + 1),
}


@pytest.mark.parametrize("raw", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_bad_chunks_are_refused_whole_and_byte_by_byte(raw: bytes) -> None:
    for pieces in ([raw], single(raw)):
        _, last, _, reader = read(CHUNKED, *pieces)
        assert isinstance(last, Broken)
        more = HeadBuffer(1)
        more += b"1\r\na\r\n0\r\n\r\n"
        assert reader.read(more) == last  # nothing mends it


def test_many_small_chunks_make_one_piece() -> None:
    reader, buffer = reader_of(CHUNKED), HeadBuffer(65536)
    buffer += b"1\r\nx\r\n" * 10_000
    assert reader.read(buffer) == Piece(b"x" * 10_000)


def test_a_sized_body_takes_its_size_and_no_more() -> None:
    for pieces in ([b"abcdef"], single(b"abcdef")):
        body, last, _, _ = read(4, *pieces)
        assert (body, last) == (b"abcd", End())
    assert read(0, b"abc")[:3] == (b"", End(), b"abc")


def test_an_open_body_takes_everything_and_ends_with_its_connection() -> None:
    body, last, left, reader = read(UNTIL_CLOSE, b"abc", b"def")
    assert (body, last, left, reader.whole_at_close()) == (b"abcdef", None, b"", True)


@pytest.mark.parametrize("length", [CHUNKED, 3])
def test_a_body_with_an_end_of_its_own_is_not_whole_when_the_connection_ends(length: Length) -> None:
    assert not reader_of(length).whole_at_close()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_any_cut_gives_the_same_body(chunks: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    body, last, left, _ = read(CHUNKED, *pieces)
    assert (body, last, left) == (b"".join(chunks), End(), b"")


@given(st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    read(CHUNKED, raw)
    read(CHUNKED, *single(raw))
