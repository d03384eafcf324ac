"""Names that are spelled nearly alike: `regsitry.npmjs.org`, `pypi0.org`, `githud.com`.

Two names are near when one edit leads from one to the other (a letter put in, left out, exchanged, or two swapped), or when they
look the same in a careless font.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

SHORTEST = 6
"""Below that many characters names are near each other by chance."""

_MEANT = frozenset({frozenset({"gcr.io", "ghcr.io"})})
"""Pairs that are both what they seem."""

_LOOKS = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s"})


def near_pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each pair of different names that are near, in order; linear in their number, not quadratic."""
    shelves: dict[str, set[str]] = defaultdict(set)
    for name in set(names):
        if len(name) >= SHORTEST:
            for key in _keys(name):
                shelves[key].add(name)
    pairs = {
        (one, other)
        for shelf in shelves.values()
        for one in shelf
        for other in shelf
        if one < other and frozenset({one, other}) not in _MEANT and is_near(one, other)
    }
    yield from sorted(pairs)


def near_ones(names: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each of `names` that is near a known one and none itself, with that one; linear in their number."""
    shelves: dict[str, list[str]] = defaultdict(list)
    meant = set(known)
    for name in sorted(meant):
        if len(name) >= SHORTEST:
            for key in _keys(name):
                shelves[key].append(name)
    for name in names if shelves else ():
        if len(name) < SHORTEST or name in meant:
            continue
        found = (other for key in _keys(name) for other in shelves.get(key, ()))
        near = next((o for o in found if is_near(name, o) and frozenset({name, o}) not in _MEANT), None)
        if near is not None:
            yield name, near


def is_near(one: str, other: str) -> bool:
    """Return whether two different names are one edit apart, or look the same."""
    if one == other:
        return False
    if _look(one) == _look(other):
        return True
    if abs(len(one) - len(other)) > 1:
        return False
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    rest, other_rest = one[start:], other[start:]
    return (
        rest[1:] == other_rest[1:]
        or rest[1:] == other_rest
        or rest == other_rest[1:]
        or (rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:])
    )


def _keys(name: str) -> Iterator[str]:
    """What two near names have in common: how they look, themselves, or themselves without one letter."""
    yield f"~{_look(name)}"
    yield name
    for index in range(len(name)):
        yield name[:index] + name[index + 1 :]


def _look(name: str) -> str:
    return name.translate(_LOOKS).replace("rn", "m").replace("vv", "w")
