"""Inputs made of good ones: bytes changed, cut, doubled, spliced, and words of the grammar put in."""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF)
_BYTES = b'\0\t\n\r "#%&*+,-./0:;<=?@AZ[\\]_az{|}~\x7f\x80\xc0\xff'


class Mutator:
    """Makes inputs for one target; the same chance makes the same ones."""

    def __init__(self, chance: random.Random, words: Sequence[bytes], most: int) -> None:
        """No input gets longer than `most` bytes."""
        self._chance = chance
        self._words = words
        self._most = most
        self._steps = (
            self._flip, self._set, self._set, self._insert, self._delete, self._double, self._number,
            self._word, self._word, self._cut, self._swap,
        )  # fmt: skip

    def mutate(self, corpus: Sequence[bytes]) -> bytes:
        """Return a new input."""
        chance = self._chance
        data = bytearray(chance.choice(corpus))
        if chance.random() < 0.15:
            other = chance.choice(corpus)
            data = data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]
        for _ in range(1 + min(int(chance.expovariate(0.5)), 16)):
            chance.choice(self._steps)(data)
        return bytes(data[: self._most])

    def _at(self, data: bytearray) -> int:
        return self._chance.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._at(data) - 1] ^= 1 << self._chance.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._at(data) - 1] = self._chance.choice((self._chance.randrange(256), *_BYTES[::5]))

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = bytes(self._chance.choices(_BYTES, k=self._chance.choice((1, 1, 1, 2, 8))))

    def _delete(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self._chance.choice((1, 1, 2, 4, 16))]

    def _double(self, data: bytearray) -> None:
        begin, size = self._at(data), self._chance.choice((1, 2, 4, 16, 64))
        data[begin:begin] = data[begin : begin + size] * self._chance.choice((1, 1, 2, 8))
        del data[self._most :]

    def _number(self, data: bytearray) -> None:
        at, size = self._at(data), self._chance.choice((1, 2, 2, 4))
        value = self._chance.choice(_NUMBERS) & ((1 << 8 * size) - 1)
        data[at : at + size] = value.to_bytes(size, self._chance.choice(("big", "little")))

    def _word(self, data: bytearray) -> None:
        if self._words:
            at, word = self._at(data), self._chance.choice(self._words)
            data[at : at + self._chance.choice((0, 0, len(word)))] = word

    def _cut(self, data: bytearray) -> None:
        if self._chance.random() < 0.3:
            del data[self._at(data) :]

    def _swap(self, data: bytearray) -> None:
        first, second, size = self._at(data), self._at(data), self._chance.choice((1, 2, 8))
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
