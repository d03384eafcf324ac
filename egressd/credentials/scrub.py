"""Masking: what streams to a sandbox loses every spelling of a secret, byte for byte, wherever it is cut. Pure.

The law: the bytes that come out are those that went in, with a `*` for each byte that belongs to a needle (`needles`) found
anywhere in the whole, and for each byte of the value of a masked JSON member; so every length stays true. Held back is a suffix
that begins a needle and nothing else. At the end such a suffix is masked if it is nearly all of a needle: a text that was cut off
would else tell a secret.

Whoever has an origin say back what they sent must not learn from what comes out whether a guess of a few characters was right,
or they would find a secret one character after the other. What is held back is such an answer, to be read off the cuts between
pieces; `SteadyScrubber` cuts where nothing depends on what is in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from egressd.credentials.needles import Automaton, State

MASK: Final = b"*"

type _Step = Callable[[bytes, int, bytearray], int]


class Mask:
    """What is masked for one lease: its secrets, and the values of the JSON members with these names. Made once, used by many."""

    __slots__ = ("automaton", "members")

    def __init__(self, secrets: Iterable[str], members: Iterable[str] = ()) -> None:
        """The repr shows neither."""
        self.automaton = Automaton(secrets)
        names = b"|".join(re.escape(name.encode("utf-8", "replace")) for name in sorted(members))
        self.members = re.compile(rb'"(?:%s)\\{0,3}"' % names) if names else None

    def whole(self, data: bytes) -> bytes:
        """Return `data`, which is all there is, masked: a header field, a close reason."""
        if self.members is None and self.automaton.glance.search(data) is None:
            return data
        scrubber = Scrubber(self)
        return scrubber.feed(data) + scrubber.finish()


class Scrubber:
    """Masks one text that comes in pieces."""

    __slots__ = ("_automaton", "_members", "_pending", "_state", "found")

    def __init__(self, mask: Mask) -> None:
        """The text begins."""
        self._automaton = mask.automaton
        self._state = mask.automaton.start
        self._pending = bytearray()
        self._members = _Members(mask.members) if mask.members is not None else None
        self.found = 0
        """Bytes that were masked."""

    @property
    def held(self) -> int:
        """Bytes that wait for what follows."""
        return len(self._pending)

    def feed(self, data: bytes) -> bytes:
        """Return what of the text is decided once `data` is known too; b"" when that is nothing."""
        decided = self._search(data)
        return self._mask_members(decided) if self._members is not None else decided

    def finish(self) -> bytes:
        """Return what was held back: the text has ended. The next piece begins a new one."""
        rest, size = self._pending, self._automaton.telling(self._state)
        if size:
            rest[-size:] = MASK * size
            self.found += size
        self._pending, self._state = bytearray(), self._automaton.start
        decided = bytes(rest)
        if self._members is not None:
            decided = self._mask_members(decided)
            self._members.begin()
        return decided

    def _mask_members(self, data: bytes) -> bytes:
        assert self._members is not None
        masked = self._members.feed(data)
        self.found += self._members.found
        return masked

    def _search(self, data: bytes) -> bytes:
        automaton, start, state = self._automaton, self._automaton.start, self._state
        if state is start and automaton.glance.search(data) is None:
            return data
        out, view, at = bytearray(), memoryview(data), 0
        while at < len(data):
            if state is start:
                found = automaton.glance.search(data, at)
                begins = found.start() if found is not None else len(data)
                out += view[at:begins]
                at = begins
            state, at = self._follow(state, view, at)
            decided = len(self._pending) - state.age
            out += self._pending[:decided]
            del self._pending[:decided]
        self._state = state
        return bytes(out)

    def _follow(self, state: State, view: memoryview, at: int) -> tuple[State, int]:
        """Go through the automaton from `at` on until it is in the middle of nothing; take what was read into what is pending."""
        automaton, start, begins = self._automaton, self._automaton.start, at
        ends: list[tuple[int, int]] = []
        for byte in view[at:]:
            edge = state.edges.get(byte)
            state, masked = edge if edge is not None else automaton.step(state, byte)
            at += 1
            if masked:
                ends.append((at, masked))
            if state is start:
                break
        pending = self._pending
        pending += view[begins:at]
        before = len(pending) - at
        untouched = at  # from the last end on backwards: no byte is masked twice, however needles overlap
        for end, size in reversed(ends):
            first, last = end - size, min(end, untouched)
            if first < last:
                pending[before + first : before + last] = MASK * (last - first)
                self.found += last - first
                untouched = first
        return state, at


class SteadyScrubber:
    """Masks as `Scrubber` does, and cuts what comes out where the text's length and line ends say, whatever else is in it."""

    __slots__ = ("_behind", "_kept", "_lines", "_reach", "_scrubber")

    def __init__(self, mask: Mask, *, lines: bool = False) -> None:
        """With `lines` everything up to a line end goes on at once, since no needle has one inside; what follows stays behind."""
        self._scrubber = Scrubber(mask)
        self._reach = mask.automaton.reach
        self._lines = lines
        self._kept = b""  # decided, and not out yet
        self._behind = 0  # bytes that are not out yet

    @property
    def found(self) -> int:
        """Bytes that were masked."""
        return self._scrubber.found

    def feed(self, data: bytes) -> bytes:
        """Return what goes on once `data` has come: all but as many bytes as a needle may have."""
        kept = self._kept + self._scrubber.feed(data)
        behind = self._behind + len(data)
        stays = min(behind, self._reach)
        if self._lines and (line := max(data.rfind(b"\n"), data.rfind(b"\r"))) >= 0:
            stays = min(stays, len(data) - line - 1)
        goes = min(behind - stays, len(kept))
        self._behind = behind - goes
        self._kept = kept[goes:]
        return kept[:goes]

    def finish(self) -> bytes:
        """Return what was held back: the text has ended. The next piece begins a new one."""
        rest, self._kept, self._behind = self._kept + self._scrubber.finish(), b"", 0
        return rest


class _Members:
    """Masks the values of some JSON members; holds nothing back, since a value comes after what says that it is one.

    JSON inside a JSON string is read too: its quotes have backslashes, as many before the end of a value as before its beginning.
    """

    _KEY_MOST: Final = 128
    _SPACE: Final = b" \t\r\n"
    _STOP: Final = re.compile(rb'[\\"\x00-\x1f]')

    __slots__ = ("_dashes", "_key", "_run", "_seen", "_step", "found")

    def __init__(self, key: re.Pattern[bytes]) -> None:
        self._key = key
        self.found = 0
        self.begin()

    def begin(self) -> None:
        """A text begins."""
        self._step: _Step = self._seek
        self._seen = b""
        self._dashes = self._run = 0

    def feed(self, data: bytes) -> bytes:
        """Return `data` with what of it belongs to values masked; `found` bytes of it."""
        out, at, self.found = bytearray(data), 0, 0
        while at < len(data):
            at = self._step(data, at, out)
        return bytes(out) if self.found else data

    def _seek(self, data: bytes, at: int, _: bytearray) -> int:
        text, before = (self._seen + data, len(self._seen)) if self._seen else (data, 0)
        key = self._key.search(text, at)
        if key is None:
            self._seen = text[max(at, len(text) - self._KEY_MOST) :]
            return len(data)
        self._seen, self._step = b"", self._colon
        return key.end() - before

    def _colon(self, data: bytes, at: int, _: bytearray) -> int:
        """Between a key and its colon."""
        if data[at] in self._SPACE:
            return at + 1
        colon = data[at] == 0x3A
        self._step, self._dashes = self._open if colon else self._seek, 0
        return at + colon

    def _open(self, data: bytes, at: int, _: bytearray) -> int:
        """Between a colon and the quote that begins its value."""
        if data[at] in self._SPACE and not self._dashes:
            return at + 1
        if data[at] == 0x5C and self._dashes < 3:
            self._dashes += 1
            return at + 1
        quote = data[at] == 0x22
        self._step, self._run = self._value if quote else self._seek, 0
        return at + quote

    def _value(self, data: bytes, at: int, out: bytearray) -> int:
        stop = self._STOP.search(data, at)
        end = stop.start() if stop is not None else len(data)
        if end > at:
            self._hide(out, at, end)
            self._run = 0
            return end
        if data[at] == 0x5C:
            self._run += 1
            if not self._dashes:
                self._hide(out, at, at + 1)
            return at + 1
        surplus = self._run - self._dashes
        ends = data[at] != 0x22 or (surplus >= 0 and surplus % (2 * (self._dashes + 1)) == 0)
        if not ends:
            self._hide(out, at, at + 1)
        self._run = 0
        self._step = self._seek if ends else self._value
        return at + 1

    def _hide(self, out: bytearray, begin: int, end: int) -> None:
        out[begin:end] = MASK * (end - begin)
        self.found += end - begin
