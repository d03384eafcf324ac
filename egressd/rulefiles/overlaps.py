"""Which entries can meet: hosts that two patterns share, requests that two patterns share.

Used where two entries may not contradict each other. An answer "they meet" may be too careful, never too lax.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from egressd.policy.attempt import Name
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import HostPattern, parse_pattern
from egressd.policy.paths import Target
from egressd.policy.requests import RequestPattern, parse_request_pattern

_ANY = "\x01"
_MOST_SAMPLES = 2000


class HostIndex:
    """Finds the entries whose hosts meet a pattern, without comparing each with each."""

    def __init__(self, entries: Iterable[EffectiveEntry]) -> None:
        self._exact: dict[Name, list[EffectiveEntry]] = defaultdict(list)
        self._wild: dict[Name, list[EffectiveEntry]] = defaultdict(list)
        self._below: dict[Name, list[EffectiveEntry]] = defaultdict(list)
        for entry in entries:
            for pattern in patterns(entry.hosts):
                name = pattern.name
                (self._wild if pattern.wildcard else self._exact)[name].append(entry)
                # A wildcard meets every pattern at or above its base, a name every wildcard strictly above it.
                for depth in range(len(name) if pattern.wildcard else len(name) - 1):
                    self._below[name[len(name) - 1 - depth :]].append(entry)

    def meeting(self, pattern: HostPattern) -> Iterator[EffectiveEntry]:
        """Yield the entries (some more than once) with a host that the pattern covers too."""
        name = pattern.name
        if pattern.wildcard:
            yield from self._below.get(name, ())
        else:
            yield from self._exact.get(name, ())
        for depth in range(1, len(name)):
            yield from self._wild.get(name[depth:], ())


def patterns(hosts: Iterable[str]) -> Iterator[HostPattern]:
    """Yield the patterns of hosts that have been checked."""
    for text in hosts:
        pattern = parse_pattern(text)
        if isinstance(pattern, HostPattern):
            yield pattern


def covers(wide: HostPattern, narrow: HostPattern) -> bool:
    """Return whether every name of `narrow` is one of `wide`."""
    if not narrow.wildcard:
        return wide.matches(narrow.name)
    return wide.wildcard and (wide.name == narrow.name or wide.matches(narrow.name))


def requests_meet(one: EffectiveEntry, other: EffectiveEntry) -> bool:
    """Return whether some request may be covered by both entries, as far as their methods and paths tell."""
    if not set(one.ports) & set(other.ports) or not set(one.schemes) & set(other.schemes):
        return False
    left, right = list(_requests(one)), list(_requests(other))
    return any(patterns_meet(first, second) for first in left for second in right)


def request_covers(wide: RequestPattern, narrow: RequestPattern) -> bool:
    """Return whether `wide` surely covers `narrow`: every path, every method, and the same query or any."""
    if wide.query is not None and wide.query != narrow.query:
        return False
    if narrow.websocket and not wide.websocket:
        return False
    if wide.methods is not None and (narrow.methods is None or not narrow.methods <= wide.methods):
        return False
    if wide.path.text == narrow.path.text or wide.path.is_everything:
        return True
    samples = _samples(narrow.path.text, wide.path.text.count("/") + 2)
    return samples is not None and all(wide.path.allows(Target(sample)) for sample in samples)


def _samples(path: str, most: int) -> Iterator[str] | None:
    """Return paths that stand for all that the pattern `path` takes; None for one with too many `**` to try.

    A `*` becomes a letter that no pattern spells, so that only a wild part of another pattern takes it, and whatever takes it
    takes any text. A `**` becomes that letter in each number of segments: beyond as many as the other pattern has, one more
    changes nothing.
    """
    *front, last = path[1:].split("/")
    runs: list[list[list[str]]] = []
    for segment in front:
        wild = [[_ANY] * number for number in range(most + 1)]
        runs.append(wild if segment == "**" else [[segment.replace("*", _ANY)]])
    ends = [[_ANY] * number for number in range(1, most + 1)]
    ends += [[*end[:-1], ""] for end in ends]
    runs.append(ends if last == "**" else [[last.replace("*", _ANY)]])
    if math.prod(map(len, runs)) > _MOST_SAMPLES:
        return None
    return ("/" + "/".join(itertools.chain(*chosen)) for chosen in itertools.product(*runs))


def _requests(entry: EffectiveEntry) -> Iterator[RequestPattern]:
    for text in entry.requests:
        pattern = parse_request_pattern(text)
        if isinstance(pattern, RequestPattern):
            yield pattern


def patterns_meet(one: RequestPattern, other: RequestPattern) -> bool:
    """Return whether some request may be covered by both patterns, as far as their methods and paths tell."""
    if not _methods_meet(one.methods, other.methods) and not (one.websocket and other.websocket):
        return False
    return _paths_meet(one.path.text[1:].split("/"), other.path.text[1:].split("/"))


def _methods_meet(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """None is any method; a pattern of WebSockets alone has none."""
    if one is None or other is None:
        return one != frozenset() and other != frozenset()
    return bool(one & other)


def _paths_meet(one: list[str], other: list[str]) -> bool:
    """Two glob sequences meet when they can be consumed together; a table of all pairs of positions."""
    row = [False] * (len(other) + 1)
    for i in range(len(one), -1, -1):
        below, row = row, [False] * (len(other) + 1)
        for j in range(len(other), -1, -1):
            if i == len(one) and j == len(other):
                row[j] = True
                continue
            left = one[i] if i < len(one) else None
            right = other[j] if j < len(other) else None
            skip = (left == "**" and below[j]) or (right == "**" and j < len(other) and row[j + 1])
            both = left is not None and right is not None and j < len(other) and below[j + 1]
            row[j] = bool(
                skip
                or (both and _segments_meet(left or "", right or ""))
                or _stays(left, right, below, row, j)
            )
    return row[0]


def _stays(left: str | None, right: str | None, below: list[bool], row: list[bool], j: int) -> bool:
    """`**` takes a segment of the other side and stays."""
    return (left == "**" and right is not None and row[j + 1]) or (
        right == "**" and left is not None and below[j]
    )


def _segments_meet(one: str, other: str) -> bool:
    """Two segments with `*` inside meet when their fixed ends agree; what is between is taken to agree."""
    if "**" in (one, other):
        return True
    if "*" not in one and "*" not in other:
        return one == other
    head_one, head_other = one.partition("*")[0], other.partition("*")[0]
    tail_one, tail_other = one.rpartition("*")[2], other.rpartition("*")[2]
    heads = head_one.startswith(head_other) or head_other.startswith(head_one)
    tails = tail_one.endswith(tail_other) or tail_other.endswith(tail_one)
    return heads and tails
