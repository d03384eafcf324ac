"""Bodies of HTTP/1, in any pieces, beside h11's chunked reader. Input: a byte that chooses the framing, then the bytes."""

from __future__ import annotations

import re

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

from egressd.gate.inspector.body import Broken, End, HeadBuffer, Piece, reader_of
from egressd.gate.inspector.head import CHUNKED, UNTIL_CLOSE, Length
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of

type Read = tuple[bytes, End | Broken | None, bytes]
"""The body, how it ended, and what is left behind it."""


def _read(length: Length, pieces: list[bytes]) -> Read:
    reader, buffer = reader_of(length), HeadBuffer(1024)
    body, final = bytearray(), None
    for piece in [b"", *pieces]:
        buffer += piece
        while final is None and (part := reader.read(buffer)) is not None:
            if isinstance(part, Piece):
                assert part.data, "a piece of nothing"
                body += part.data
            else:
                final = part
    return bytes(body), final, bytes(buffer)


def _length_of(choice: int) -> Length:
    if choice < 0xC0:
        return CHUNKED
    return UNTIL_CLOSE if choice == 0xFF else choice - 0xC0


def check(data: bytes) -> None:
    """Hold every law of bodies."""
    if not data:
        return
    length, sent = _length_of(data[0]), data[1:]
    body, final, rest = _read(length, [sent])
    assert len(body) + len(rest) <= len(sent)
    for pieces in pieces_of(sent):
        again = _read(length, pieces)
        assert again[:2] == (body, final), "the body depends on how it was cut"
        assert not isinstance(final, End) or again[2] == rest
    if isinstance(final, End):
        size = len(sent) - len(rest)
        for at in offsets_of(sent, size):
            cut = _read(length, [sent[:at]])
            assert cut[1] is None, "a body that is not all there has ended"
            assert body.startswith(cut[0])
        for junk in JUNK:
            assert _read(length, [sent[:size] + junk]) == (body, final, junk), (
                "what lies behind a body changes it"
            )
    if length is CHUNKED and isinstance(final, End):
        assert _by_the_book(sent) == (body, rest), "the grammar has no such body"
    if length is CHUNKED and not isinstance(final, Broken):
        _agree_with_h11(sent, body, final, rest)


def _by_the_book(sent: bytes) -> tuple[bytes, bytes] | None:
    """The chunked coding as its grammar has it (RFC 9112 section 7.1), in the plainest way; None where it does not fit."""
    body = b""
    while (line := _CHUNK.match(sent)) is not None:
        size, sent = int(line[1], 16), sent[line.end() :]
        if size == 0:
            trailers = _TRAILERS.match(sent)
            return None if trailers is None else (body, sent[trailers.end() :])
        if sent[size : size + 2] != b"\r\n":
            return None
        body, sent = body + sent[:size], sent[size + 2 :]
    return None


_CHUNK = re.compile(rb"([0-9A-Fa-f]+)[ \t]*(?:;[^\r\n\0]*)?\r\n")
_TRAILERS = re.compile(rb"(?:[^\s:]+:[^\r\n\0]*\r\n)*\r\n")


def _agree_with_h11(sent: bytes, body: bytes, final: End | Broken | None, rest: bytes) -> None:
    buffer, reader, theirs = ReceiveBuffer(), ChunkedReader(), bytearray()
    buffer += sent
    try:
        while (event := reader(buffer)) is not None:
            if isinstance(event, h11.EndOfMessage):
                assert (bytes(theirs), bytes(buffer)) == (body, rest), "h11 reads another body"
                assert isinstance(final, End)
                fields = [(name.lower(), value) for name, value in final.trailers]
                assert list(event.headers) == fields, "h11 reads other trailers"
                return
            theirs += event.data
    except h11.LocalProtocolError:
        return
    assert final is None, "we have read the end of a body and h11 waits for more"
    assert bytes(theirs) == body


TARGET = Target(
    "bodies",
    check,
    lambda data: _read(CHUNKED, [data]),
    seeds=(
        b"\05\r\nhello\r\n0\r\n\r\nGET /",
        b"\05;a=b\r\nhello\r\n3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n",
        b"\00\r\n\r\n",
        b"\000A\r\n0123456789\r\n0;x\r\n\r\n",
        b"\xc5hello world",
        b"\xffuntil the end",
        b"\xc0",
        b"\0" + b"1\r\na\r\n" * 20 + b"0\r\n\r\n",
        b"\0fffffffffffffff\r\nabc",
        b"\05\nhello\n0\n\n",
        b"\05 ;x\r\nhello\r\n0\r\nA: b\r\n c\r\n\r\n",
    ),
    words=(
        b"\r\n",
        b"\n",
        b"0\r\n\r\n",
        b"1\r\n",
        b";",
        b"0x",
        b"+1",
        b"-1",
        b" ",
        b"\t",
        b"X: y\r\n",
        b"ffffffff",
        b"_",
        b"\0",
        b"\r",
        b"Content-Length: 3\r\n",
        b"10\r\n",
        b"\x0b",
    ),
    most=1000,
)
