"""Header sections as frames bring them, and what they may cost."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder

from egressd.gate.inspector.http2 import faults, frames
from egressd.gate.inspector.http2.frames import Frame
from egressd.gate.inspector.http2.sections import MAX_CONTINUATIONS, TABLE_BYTES, Sections

FIELDS = ((b":method", b"GET"), (b"x-a", b"\xff"))
BLOCK = Encoder().encode(FIELDS)
HEAD_BYTES = 1000


def sections() -> Sections:
    return Sections(HEAD_BYTES)


def head(payload: bytes, flags: int = 0) -> Frame:
    return Frame(frames.HEADERS, flags, 1, payload)


def more(payload: bytes) -> Frame:
    return Frame(frames.CONTINUATION, 0, 1, payload)


def test_a_section_is_whole_however_it_was_cut() -> None:
    for at in range(len(BLOCK)):
        reading = sections()
        assert reading.begin(head(BLOCK[:at], frames.END_STREAM))
        assert (reading.stream, reading.flags) == (1, frames.END_STREAM)
        assert reading.go_on(more(BLOCK[at:])) is None
        assert reading.end() == FIELDS
        assert reading.stream is None


def test_padding_that_does_not_fit_begins_nothing() -> None:
    reading = sections()
    assert not reading.begin(head(b"\x05abc", frames.PADDED))
    assert reading.stream is None


@pytest.mark.parametrize(
    "pieces",
    [[b"x" * (2 * HEAD_BYTES + 1)], [b""] * (MAX_CONTINUATIONS + 1)],
    ids=["too many bytes", "too many frames"],
)
def test_a_section_without_end_is_not_kept(pieces: list[bytes]) -> None:
    reading = sections()
    assert reading.begin(head(b""))
    assert [reading.go_on(more(piece)) for piece in pieces][-1] == faults.ENDLESS_SECTION


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        (b"\xff\xff\xff\xff\xff\xff\xff", faults.UNREADABLE_SECTION),
        (b"\x3f\xe1\xff\x7f", faults.UNREADABLE_SECTION),
        (Encoder().encode([(b"a", b"b" * 3 * HEAD_BYTES)]), faults.LARGE_SECTION),
    ],
    ids=["no such index", "a table larger than was agreed", "more than could be wanted"],
)
def test_what_cannot_be_decompressed_is_a_fault(block: bytes, fault: object) -> None:
    reading = sections()
    assert reading.begin(head(block))
    assert reading.end() == fault


@pytest.mark.parametrize("size", [0, 100, TABLE_BYTES, 1 << 30])
def test_the_table_towards_a_peer_is_as_large_as_both_allow(size: int) -> None:
    writing, reading = sections(), Decoder()
    reading.max_allowed_table_size = TABLE_BYTES
    writing.allow_table(size)
    assert tuple(reading.decode(writing.encode(FIELDS), raw=True)) == FIELDS
    assert reading.header_table_size == min(size, TABLE_BYTES)


def test_a_secret_is_never_put_into_the_table() -> None:
    writing = sections()
    secret = [(b"authorization", b"Bearer s3cret")]
    first = writing.encode(secret)
    assert writing.encode(secret) == first  # nothing to refer to
    assert b"Bearer s3cret" in first
