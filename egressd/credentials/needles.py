"""Every way in which a secret may come back, as one automaton over bytes. Pure.

A *needle* is a row of slots: the secret itself, its hexadecimal digits, UTF-16, and what base64 makes of it at each of the three
places where it may begin in a triplet, so that it is found inside `user:secret` and any longer text. A slot may be *spelled*: by
the byte itself, percent-encoded (up to three times), escaped with up to three backslashes (`\\/`, `\\u002f`, `\\x2f`), or as an
HTML character reference; each slot on its own, so that no mixture hides a needle.

The automaton follows all needles at once. What it is in the middle of is a set of *threads* (needle, slot, what was read of its
spelling), each with its age in bytes; two threads in one place are one, the older. Sets that were met are kept with the edges
between them, so that most bytes cost a look-up; a new set costs as many steps as it has threads, which is the number of places
where a needle overlaps itself. Time is linear in the bytes whatever they are, and never depends on how they were cut.
"""

from __future__ import annotations

import functools
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import chain, product
from typing import Final, NamedTuple

CODED_LEAST: Final = 4
"""Bytes of a secret below which base64 and hexadecimal forms of it would be found everywhere."""

UNTOLD: Final = 8
"""Characters of a secret that are too many to be guessed: fewer at its end, and at its beginning, may be told or asked for."""

_STATES: Final = 1024
"""Sets of threads that are kept."""

_GLANCE: Final = 3
"""Bytes of a needle by which a place is found where it may begin."""

_FULL, _PARTIAL = 1, 2
_NAMED: Final = {"&": b"amp", "<": b"lt", ">": b"gt", '"': b"quot", "'": b"apos"}
_TWINS: Final = {"+": "+-", "-": "+-", "/": "/_", "_": "/_"}
"""The characters in which the two alphabets of base64 differ (RFC 4648 §5)."""

_BASE64: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class Slot(NamedTuple):
    """What one slot may be: by what was read of a spelling, whether that is one or begins one; and what goes on with it."""

    kinds: dict[bytes, int]
    following: dict[bytes, frozenset[int]]
    longest: int


class Needle(NamedTuple):
    """A row of slots; `tail` is one more that is masked if it follows: the character that holds a secret's last bits.

    At the end of a text `telling` slots of it or more count as a needle that was cut off.
    """

    slots: tuple[Slot, ...]
    telling: int
    tail: Slot | None = None

    @property
    def reach(self) -> int:
        """The most bytes that it can be spelled in."""
        slots = self.slots if self.tail is None else (*self.slots, self.tail)
        return sum(slot.longest for slot in slots)


type _Place = tuple[int, int, bytes]


class State:
    """A set of threads; `age` is that of the oldest one, so many bytes are undecided."""

    __slots__ = ("age", "edges", "threads")

    def __init__(self, threads: tuple[tuple[_Place, int], ...]) -> None:
        self.threads = threads
        self.age = max((age for _, age in threads), default=0)
        self.edges: dict[int, tuple[State, int]] = {}


class Automaton:
    """All needles of some secrets. It holds them: its repr says nothing, and it belongs where the secrets are."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Empty secrets are no needles; without any nothing is ever found."""
        self._needles = tuple(chain.from_iterable(map(needles_of, dict.fromkeys(filter(None, secrets)))))
        self._fresh = tuple(((number, 0, b""), 0) for number in range(len(self._needles)))
        self.start = State(())
        self.reach = max((needle.reach for needle in self._needles), default=0)
        """No more bytes than this are ever undecided."""
        self._states: dict[frozenset[tuple[_Place, int]], State] = {}
        self.glance = re.compile(self._heads()) if self._needles else re.compile(rb"(?!)")
        """Finds the next place where a needle may begin, or where the bytes end in what may become one."""

    def step(self, state: State, byte: int) -> tuple[State, int]:
        """Return what `byte` leads to, and how many of the bytes up to it are part of a needle."""
        found: dict[_Place, int] = {}
        masked = 0
        for (number, index, read), age in (*state.threads, *self._fresh):
            needle, spelling = self._needles[number], read + byte.to_bytes()
            slot = needle.slots[index] if index < len(needle.slots) else needle.tail
            kind = slot.kinds.get(spelling, 0) if slot is not None else 0
            if kind & _PARTIAL:
                _put(found, (number, index, spelling), age + 1)
            if kind & _FULL and index + 1 < len(needle.slots):
                _put(found, (number, index + 1, b""), age + 1)
            elif kind & _FULL:
                masked = max(masked, age + 1)
                if index + 1 == len(needle.slots) and needle.tail is not None:
                    _put(found, (number, index + 1, b""), 0)
        edge = state.edges[byte] = self._state(found), masked
        return edge

    def _state(self, found: dict[_Place, int]) -> State:
        if not found:
            return self.start
        key = frozenset(found.items())
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= _STATES:
                self._states.clear()
                self.start.edges.clear()
            state = self._states[key] = State(tuple(found.items()))
        return state

    def telling(self, state: State) -> int:
        """Return how many of the last bytes are so much of a needle that they count as one that was cut off."""
        needles = self._needles
        return max(
            (age for (number, index, _), age in state.threads if index >= needles[number].telling), default=0
        )

    def _heads(self) -> bytes:
        """The pattern of `glance`. It begins with literals: then the regular expression engine skips what is none of them."""
        places = frozenset(place for place, _ in self._fresh)
        first = ((byte, self._after(places, byte)) for byte in sorted(self._bytes(places)))
        return b"|".join(re.escape(byte.to_bytes()) + self._head(after, 1) for byte, after in first)

    def _head(self, places: frozenset[_Place], depth: int) -> bytes:
        if depth == _GLANCE or any(index == len(self._needles[number].slots) for number, index, _ in places):
            return b""
        ways: dict[bytes, list[int]] = {}
        for byte in sorted(self._bytes(places)):
            ways.setdefault(self._head(self._after(places, byte), depth + 1), []).append(byte)
        parts = (b"[" + b"".join(map(_in_class, found)) + b"]" + rest for rest, found in ways.items())
        return b"(?:" + b"|".join(parts) + rb"|\Z)"

    def _bytes(self, places: frozenset[_Place]) -> set[int]:
        return {
            byte
            for number, index, read in places
            for byte in self._needles[number].slots[index].following[read]
        }

    def _after(self, places: frozenset[_Place], byte: int) -> frozenset[_Place]:
        def places_after() -> Iterator[_Place]:
            for number, index, read in places:
                spelling = read + byte.to_bytes()
                kind = self._needles[number].slots[index].kinds.get(spelling, 0)
                if kind & _FULL:
                    yield number, index + 1, b""
                if kind & _PARTIAL:
                    yield number, index, spelling

        return frozenset(places_after())


def _put(found: dict[_Place, int], place: _Place, age: int) -> None:
    if found.get(place, -1) < age:
        found[place] = age


def _in_class(byte: int) -> bytes:
    return rb"\x%02x" % byte


def needles_of(secret: str) -> Iterator[Needle]:
    """Return the needles of one secret."""
    yield _needle(map(_letter, secret), len(secret))
    data = _encoded(secret)
    if len(data) < CODED_LEAST:
        return
    yield from (_base64(data, before) for before in range(3))
    yield _needle(map(_digit, data.hex()), len(data))
    wide = secret.encode("utf-16-le", "surrogatepass").rstrip(
        b"\0"
    )  # from its second byte on utf-16-be is the same
    yield _needle(map(_byte, wide), len(secret))


def _needle(slots: Iterable[Slot], size: int, tail: Slot | None = None) -> Needle:
    """A needle of a secret of `size` characters.

    What is masked at the end of a text says that it was right: whoever has a text of their own said back to them could ask for
    one character after the other, if few of them were enough. So all but the last `UNTOLD` must be there, and `UNTOLD` at least.
    """
    row = tuple(slots)
    least = max(UNTOLD, size - UNTOLD)
    return Needle(row, -(-len(row) * least // size), tail)


def _base64(data: bytes, before: int) -> Needle:
    """What is the same of the base64 of all texts in which `before` (modulo 3) bytes come before the data."""
    text = b64encode(bytes(before) + data).decode("ascii")
    bits = 8 * (before + len(data))
    core = tuple(map(_sextet, text[-(-8 * before // 6) : bits // 6]))
    if not bits % 6:
        return _needle(core, len(data))
    unknown = 6 - bits % 6
    known = _BASE64.index(text[bits // 6]) >> unknown
    rest = _BASE64[known << unknown : (known + 1) << unknown]
    return _needle(core, len(data), _spelled("".join(_TWINS.get(char, char) for char in rest)))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# Slots are kept and shared: each is a few characters of an alphabet, and tells nothing of a secret.


@functools.lru_cache(maxsize=512)
def _letter(char: str) -> Slot:
    """A character, in either case, in any spelling."""
    return _spelled(char.lower() + char.upper() if char.isascii() else char)


@functools.lru_cache(maxsize=64)
def _sextet(char: str) -> Slot:
    """A character of base64, in any spelling."""
    return _spelled(_TWINS.get(char, char))


@functools.lru_cache(maxsize=16)
def _digit(char: str) -> Slot:
    """A hexadecimal digit, in either case."""
    return _slot(char.encode() + char.upper().encode())


@functools.lru_cache(maxsize=256)
def _byte(byte: int) -> Slot:
    """A byte, as it is."""
    return _slot(byte.to_bytes())


@functools.lru_cache(maxsize=256)
def _spelled(chars: str) -> Slot:
    """Any of these characters, in any spelling."""
    return _made(chain.from_iterable(map(_spellings, chars)))


def _slot(choice: bytes) -> Slot:
    """Any of these bytes, as it is."""
    return _made(byte.to_bytes() for byte in choice)


def _made(spellings: Iterable[bytes]) -> Slot:
    words = set(spellings)
    kinds: dict[bytes, int] = dict.fromkeys(words, _FULL)
    following: dict[bytes, set[int]] = {}
    for word in words:
        for size in range(len(word)):
            following.setdefault(word[:size], set()).add(word[size])
            if size:
                kinds[word[:size]] = kinds.get(word[:size], 0) | _PARTIAL
    return Slot(kinds, {read: frozenset(found) for read, found in following.items()}, max(map(len, words)))


def _spellings(char: str) -> Iterator[bytes]:
    data, code = _encoded(char), ord(char)
    yield data
    if char == " ":
        yield b"+"
    for dashes in (b"\\", b"\\\\", b"\\\\\\"):
        if char.isascii() and not char.isalnum():
            yield dashes + data
        wide = char.encode("utf-16-be", "surrogatepass")
        units = [_cases(b"u%s" % wide[at : at + 2].hex().encode()) for at in range(0, len(wide), 2)]
        yield from (b"".join(dashes + unit for unit in row) for row in product(*units))
        if code < 0x100:
            yield from (dashes + word for word in _cases(b"x%02x" % code))
    for signs in (b"%", b"%25", b"%2525"):
        bytes_ = [_cases(b"%02x" % byte) for byte in data]
        yield from (b"".join(signs + digits for digits in row) for row in product(*bytes_))
    for number in (b"%d" % code, b"x%x" % code, b"X%x" % code):
        mark, digits = (number[:1], number[1:]) if number[:1] in b"xX" else (b"", number)
        for zero in (b"", b"0"):
            yield from (b"&#" + mark + zero + word + b";" for word in _cases(digits))
    if char in _NAMED:
        yield b"&" + _NAMED[char] + b";"


def _cases(digits: bytes) -> tuple[bytes, ...]:
    """A number in lower and in upper hexadecimal digits, its mark as it is."""
    mark, rest = (digits[:1], digits[1:]) if digits[:1] in (b"u", b"x") else (b"", digits)
    return tuple(dict.fromkeys((mark + rest.lower(), mark + rest.upper())))
