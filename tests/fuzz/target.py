"""What a fuzz target is, and the ways of cutting its input that all targets share."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

EVERY_OFFSET = 64
"""Inputs up to so many bytes are truncated at every offset, longer ones at so many of them."""


@dataclass(frozen=True, slots=True)
class Target:
    """One parser under fuzzing.

    `check` runs the parser and every law of it on one input, and raises AssertionError where one is broken; anything
    else that it raises is a crash of the parser. `seeds` are good inputs, `words` what the parser's grammar is made
    of; no input is longer than `most` bytes. `parse` is the parser alone, for counting its steps.
    """

    name: str
    check: Callable[[bytes], None]
    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    most: int = 2048
    quick: int = 2000
    """Inputs of the ordinary suite: about a second's worth."""


def chance_of(data: bytes) -> random.Random:
    """Return a source of chance that is the same whenever the input is: a crash happens again."""
    return random.Random(zlib.crc32(data))


def pieces_of(data: bytes) -> Iterator[list[bytes]]:
    """Give the input whole, byte by byte (where that is not too many), and in pieces of chance."""
    yield [data]
    if len(data) <= 512:
        yield [data[at : at + 1] for at in range(len(data))]
    chance = chance_of(data)
    cuts = sorted({0, len(data), *(chance.randrange(len(data) + 1) for _ in range(4))})
    yield [data[begin:end] for begin, end in pairwise(cuts)]


def offsets_of(data: bytes, end: int | None = None) -> list[int]:
    """Return the offsets before `end` (the input's length) at which it is truncated."""
    size = len(data) if end is None else end
    if size <= EVERY_OFFSET:
        return list(range(size))
    return sorted({*chance_of(data).sample(range(size), EVERY_OFFSET // 4), size - 1})


JUNK = (b"\0", b"A", b"\r\n", b"\xff\xff", b"\x16\x03\x01\x00\x05", b"GET / HTTP/1.1\r\n\r\n")
"""What may lie behind an input that has ended."""
