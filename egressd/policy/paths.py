"""Paths: the one canonical form in which they are judged, and the patterns of rules that cover them.

The theory. An origin may read a path otherwise than we do: it folds dot segments, joins double slashes, cuts
at `;`, takes `\\` for `/`, decodes once or twice. So where a rule looks at paths at all, a path that has more
than one reading is refused before any pattern is tried; what is left is compared segment by segment, exactly
as it stands. Escapes compare with their hex digits in upper case (RFC 3986, 6.2.2.1); nothing is decoded for
an allow. An encoded slash is a letter that only a pattern which spells it covers: neither `*` nor `**` do.

A deny reads wider, for there the danger is the request that it misses: without case, with every escape
decoded, and with an encoded slash both as a letter and as a separator.

Matching is linear in the path. `**` is a loop in a small automaton whose states are the bits of an integer;
`*` inside a segment is a search from left to right that never goes back. There are no regular expressions
over patterns (CFG-05).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal
from urllib.parse import quote, unquote_to_bytes

MAX_PATTERN = 1024
MAX_SEGMENTS = 1024

SLASH = "%2F"

_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_NEVER = re.compile(r"[\x00-\x20\x7f#]")
_PCHAR = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@%/-]+")

# Everything of a path that has a second reading; escapes are in upper case already. Each line is one way
# origins differ.
_AMBIGUOUS = re.compile(
    r"[^\x21-\x7e]"  # raw bytes outside ASCII: decoded as anything
    r"|//|%2F%2F|/%2F|%2F/|%2F\Z"  # merged or kept
    r"|(?:/|%2F)\.\.?(?=/|%2F|\Z)"  # dot segments
    r"|[\\;]|%5C|%3B"  # a separator, a path parameter
    r"|%(?![0-9A-F]{2})"  # left alone, dropped or refused; also IIS' %uXXXX
    r"|%(?:2D|2E|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE])"  # unreserved: equal to the plain letter
    r"|%[01][0-9A-F]|%7F"  # controls: NUL ends a string
    r"|%25[0-9A-Fa-f]{2}"  # decoded twice
)


@dataclass(frozen=True, slots=True)
class BadPattern:
    """A request or path pattern that cannot stand in a rule: what is wrong, and the text that was probably
    meant.
    """

    detail: str
    proposal: str | None = None


def upper_escapes(text: str) -> str:
    """Return `text` with the hex digits of its escapes in upper case."""
    return _ESCAPE.sub(lambda match: match[0].upper(), text) if "%" in text else text


def decode(text: str) -> str:
    """Return `text` with every escape decoded and case folded: total, bytes that are no UTF-8 survive as
    surrogates.
    """
    return (
        unquote_to_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogateescape").casefold()
    )


@dataclass(frozen=True)
class Target:
    """A request target taken apart once; what only some rules need is worked out when they ask."""

    raw: str

    @cached_property
    def path(self) -> str:
        """The path, its escapes in upper case."""
        return upper_escapes(self.raw.partition("?")[0])

    @cached_property
    def query(self) -> str | None:
        """The query, its escapes in upper case; None when there is no `?`."""
        _, mark, query = self.raw.partition("?")
        return upper_escapes(query) if mark else None

    @property
    def is_origin_form(self) -> bool:
        """Whether the target is a path at all: it starts with `/` and holds no space, control or fragment."""
        return self.raw.startswith("/") and not _NEVER.search(self.raw)

    @cached_property
    def is_canonical(self) -> bool:
        """Whether the path has one reading only. An encoded slash may stand in it: patterns judge that."""
        if _AMBIGUOUS.search(self.path):
            return False
        if "%" not in self.path:
            return True
        try:
            unquote_to_bytes(self.path).decode("utf-8")
        except UnicodeDecodeError:
            return False  # overlong and other broken UTF-8: `%C0%AE` was a dot to some
        return True

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """The path between its slashes, as it stands."""
        return tuple(self.path[1:].split("/"))

    @cached_property
    def plain(self) -> tuple[str, ...]:
        """The segments as a deny reads them, an encoded slash being a letter."""
        return tuple(map(_plain, self.segments))

    @cached_property
    def opened(self) -> tuple[str, ...]:
        """The segments as a deny reads them, an encoded slash being a separator."""
        return tuple(map(decode, self.path.replace(SLASH, "/")[1:].split("/")))


@dataclass(frozen=True)
class PathPattern:
    """The path of a rule. `text` is in normal form, `rank` orders by specificity: 0 literal, 1 with `*`, 2
    with `**`.
    """

    text: str
    rank: Literal[0, 1, 2]
    _allow: _Automaton = field(repr=False, compare=False)

    @property
    def is_everything(self) -> bool:
        """Whether this is `/**`, the only pattern that does not look at paths."""
        return self.text == "/**"

    def allows(self, target: Target) -> bool:
        """Say whether an allow or ask with this path covers a target; unless `is_everything`, a canonical
        one.
        """
        if self.is_everything:
            return True
        return len(target.segments) <= MAX_SEGMENTS and self._allow.covers(target.segments)

    def denies(self, target: Target) -> bool:
        """Say whether a deny with this path covers a target."""
        if self.is_everything or len(target.opened) > MAX_SEGMENTS or self._deny.covers(target.plain):
            return True
        return (SLASH in self.text or SLASH in target.path) and self._deny_opened.covers(target.opened)

    @cached_property
    def _deny(self) -> _Automaton:
        return _automaton(self.text[1:].split("/"), _plain, crosses=True)

    @cached_property
    def _deny_opened(self) -> _Automaton:
        return _automaton(self.text.replace(SLASH, "/")[1:].split("/"), decode, crosses=True)


def parse_path_pattern(raw: str) -> PathPattern | BadPattern:
    """Return the path pattern that `raw` spells, or what is wrong with it.

    A pattern that no request can match, because what it spells is never canonical, is an error too.
    """
    text = upper_escapes(raw)
    problem = _bad_text(text) or _bad_globs(text)
    if problem is not None:
        return problem
    segments = text[1:].split("/")
    rank: Literal[0, 1, 2] = 2 if "**" in segments else 1 if "*" in text else 0
    return PathPattern(text, rank, _automaton(segments, str, crosses=False))


def _bad_text(text: str) -> BadPattern | None:
    if not text.startswith("/"):
        return BadPattern("a path starts with '/'", f"/{text}" if _PCHAR.fullmatch(text) else None)
    if len(text) > MAX_PATTERN:
        return BadPattern(f"a path pattern has at most {MAX_PATTERN} characters")
    if "{" in text or "}" in text:
        return BadPattern("a parameter in braces was not filled in")
    if not text.isascii():
        escaped = quote(text, safe="/*%!$&'()+,=:@~", errors="surrogatepass")
        proposal = escaped if Target(escaped).is_canonical else None
        return BadPattern("a path is written as it stands on the wire, escaped", proposal)
    if not _PCHAR.fullmatch(text):
        return BadPattern(
            "the path holds a character that no path may hold; write it as an escape (%20 for a space)"
        )
    if not Target(text).is_canonical:
        return BadPattern(
            "no request can match: dot segments, '//', ';', '\\' and needless escapes are refused first"
        )
    return None


def _bad_globs(text: str) -> BadPattern | None:
    segments = text[1:].split("/")
    if any("**" in segment and segment != "**" for segment in segments):
        return BadPattern("'**' stands for whole segments, between slashes; inside a segment write '*'")
    if any(pair == ("**", "**") for pair in pairwise(segments)):
        return BadPattern("'**' twice in a row says no more than once", re.sub(r"/\*\*(/\*\*)+", "/**", text))
    return None


def _plain(segment: str) -> str:
    """Decode a segment for a deny, but leave its encoded slashes as the letters `%2f`."""
    return SLASH.casefold().join(map(decode, segment.split(SLASH)))


# A segment pattern: between encoded slashes, pieces; between stars, literal parts. One part alone has no
# star.
type _Pieces = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Automaton:
    """A pattern for segments: bit `i` of the state says that the first `i` items are matched.

    `literals` and `globs` say which items a segment fits, `anything` are items that any segment fits, `loops`
    are the items `**`, which stay where they are on any segment and may be stepped over at once. Without
    `crosses`, none of the wild items take an encoded slash.
    """

    literals: dict[str, int]
    globs: tuple[tuple[int, _Pieces], ...]
    anything: int
    loops: int
    final: int
    crosses: bool

    def covers(self, segments: Sequence[str]) -> bool:
        states = 1 | (1 & self.loops) << 1
        for segment in segments:
            fits = self.literals.get(segment, 0)
            for bit, pieces in self.globs:
                if states & bit and _fits(pieces, segment, self.crosses):
                    fits |= bit
            stay = 0
            if self.crosses or SLASH not in segment:
                fits |= self.anything
                stay = states & self.loops
            states = (states & fits) << 1 | stay
            states |= (states & self.loops) << 1
            if not states:
                return False
        return bool(states & self.final)


def _automaton(segments: Sequence[str], spell: Callable[[str], str], *, crosses: bool) -> _Automaton:
    """Compile pattern segments; `spell` brings the literal text between stars into the form in which targets
    are compared.
    """
    items = list(segments)
    if items[-1] == "**":
        # At the end it takes one segment at least, be it empty: `/a/**` covers `/a/` and not `/a`.
        items.insert(-1, "")
    literals: dict[str, int] = {}
    globs: list[tuple[int, _Pieces]] = []
    anything = loops = 0
    for position, item in enumerate(items):
        bit = 1 << position
        if item == "**":
            loops |= bit
        elif position == len(items) - 2 and items[-1] == "**":
            anything |= bit
        elif "*" in item:
            pieces = [item] if crosses else item.split(SLASH)
            globs.append((bit, tuple(tuple(map(spell, piece.split("*"))) for piece in pieces)))
        else:
            literal = spell(item)
            literals[literal] = literals.get(literal, 0) | bit
    return _Automaton(literals, tuple(globs), anything, loops, 1 << len(items), crosses)


def _fits(pieces: _Pieces, segment: str, crosses: bool) -> bool:
    texts = [segment] if crosses else segment.split(SLASH)
    return len(texts) == len(pieces) and all(map(_piece_fits, pieces, texts))


def _piece_fits(parts: tuple[str, ...], text: str) -> bool:
    """Whether `text` is the parts with one character or more between each two; the leftmost find is enough."""
    if len(parts) == 1:
        return text == parts[0]
    if not text.startswith(parts[0]):
        return False
    position = len(parts[0])
    for part in parts[1:-1]:
        found = text.find(part, position + 1)
        if found < 0:
            return False
        position = found + len(part)
    return len(text) - len(parts[-1]) > position and text.endswith(parts[-1])
