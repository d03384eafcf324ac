"""Content codings undone: whole, byte by byte, with junk behind; bombs by the piece, and no body that raises."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
import zlib
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.body import Broken
from egressd.gate.inspector.inflate import PIECE, Coding, Inflater, coding_of

TEXT = b"data: hello world\n\n" * 50


def bare(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


CODED: dict[str, tuple[Coding, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip, stored": ("gzip", lambda data: gzip.compress(data, 0)),
    "gzip in two members": ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
    "gzip with zeros behind": ("gzip", lambda data: gzip.compress(data) + b"\0" * 20),
    "deflate": ("deflate", zlib.compress),
    "deflate without its wrapping": ("deflate", bare),
}


def undone(coding: Coding, pieces: Iterable[bytes]) -> tuple[bytes, Broken | None]:
    inflater, out = Inflater(coding), b""
    for data in pieces:
        for piece in inflater.feed(data):
            if isinstance(piece, Broken):
                return out, piece
            assert 0 < len(piece) <= PIECE
            out += piece
    return out, inflater.finish()


@pytest.mark.parametrize("name", CODED)
def test_a_coding_is_undone_however_it_is_cut(name: str) -> None:
    coding, code = CODED[name]
    data = code(TEXT)
    assert undone(coding, [data]) == (TEXT, None)
    assert undone(coding, (data[at : at + 1] for at in range(len(data)))) == (TEXT, None)


@pytest.mark.parametrize("name", CODED)
def test_a_body_that_is_cut_short_is_not_whole(name: str) -> None:
    coding, code = CODED[name]
    data = code(TEXT).rstrip(b"\0")
    for size in (1, 2, 11, len(data) // 2, len(data) - 1):
        _, problem = undone(coding, [data[:size]])
        assert problem is not None


@pytest.mark.parametrize("name", CODED)
def test_junk_behind_the_end_is_refused(name: str) -> None:
    coding, code = CODED[name]
    out, problem = undone(coding, [code(TEXT), b"junk"])
    assert (out, problem is not None) == (TEXT, True)
    assert undone(coding, [code(TEXT) + b"junk"])[1] is not None


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_is_not_coded_is_refused_and_what_is_empty_is_empty(coding: Coding) -> None:
    assert undone(coding, [b"plain text"])[1] is not None
    assert undone(coding, []) == (b"", None)
    assert undone(coding, [b""]) == (b"", None)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_was_flushed_comes_out_at_once(coding: Coding) -> None:
    coder = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    inflater = Inflater(coding)
    for number in range(3):
        event = b"data: %d\n\n" % number
        assert list(inflater.feed(coder.compress(event) + coder.flush(zlib.Z_SYNC_FLUSH))) == [event]


@pytest.mark.parametrize("name", ["gzip", "deflate", "deflate without its wrapping"])
def test_a_bomb_is_undone_piece_by_piece_and_nothing_of_it_kept(name: str) -> None:
    coding, code = CODED[name]
    bomb = code(bytes(64 * 1024 * 1024))
    tracemalloc.start()
    try:
        size = 0
        for piece in Inflater(coding).feed(bomb):
            assert isinstance(piece, bytes)
            size += len(piece)
        assert size == 64 * 1024 * 1024
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


NAMED = {
    "none": ([], None),
    "identity": ([b"identity", b" "], None),
    "gzip": ([b"GZIP"], "gzip"),
    "its old name": ([b" x-gzip "], "gzip"),
    "deflate": ([b"identity, deflate"], "deflate"),
}
UNREAD = {
    "Brotli": [b"br"],
    "Zstandard": [b"zstd"],
    "compress": [b"compress"],
    "gzip twice": [b"gzip, gzip"],
    "gzip in two fields": [b"gzip", b"gzip"],
    "gzip under another": [b"gzip", b"br"],
    "an upload's own": [b"aws-chunked"],
    "nonsense": [b"gzip;q=1"],
}


@pytest.mark.parametrize(("values", "coding"), NAMED.values(), ids=NAMED)
def test_what_is_read(values: list[bytes], coding: Coding | None) -> None:
    assert coding_of(values) == coding


@pytest.mark.parametrize("values", UNREAD.values(), ids=UNREAD)
def test_what_is_not_read(values: list[bytes]) -> None:
    assert isinstance(coding_of(values), Broken)


@given(
    st.sampled_from(["gzip", "deflate"]), st.binary(max_size=80), st.lists(st.integers(0, 200), max_size=4)
)
def test_reading_is_total_and_no_cut_changes_it(coding: Coding, junk: bytes, places: list[int]) -> None:
    data = gzip.compress(TEXT)[:60] + junk if len(junk) % 2 else junk
    cuts = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    pieces = [data[first:last] for first, last in itertools.pairwise(cuts)]
    out, problem = undone(coding, pieces)
    whole, whole_problem = undone(coding, [data])
    assert (problem is None) == (whole_problem is None)
    assert out.startswith(whole) or whole.startswith(out)
    if problem is None:
        assert out == whole
