"""Attempts that stand for what rules speak of: one or a few for each pattern, and for each two patterns that meet.

Two sets of rules that decide all of them alike decide alike, as far as any two patterns tell; where three must meet to make a
difference, it may be missed. The words below are taken to be no rule's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from egressd.policy.attempt import Address, Attempt, ConnectionAttempt, Name, RequestAttempt
from egressd.policy.compile import CompiledPolicy, Level, Rule
from egressd.policy.paths import Target
from egressd.policy.requests import RequestPattern

SAMPLE = "sample-of-egressd"
ANY_METHOD = "SAMPLE"
"""Stands for every method that no rule names."""
OTHER = f"{SAMPLE}=1"
"""A parameter that no rule names."""
MOST_PATTERNS = 64
"""Patterns on one host that are met with each other; of more, the rest stands alone."""

_WORD = "x-of-egressd"
_LANES = (("https", 443), ("http", 80))
_METHODS = ("GET", "POST", "PUT", "DELETE", ANY_METHOD)

type Lane = tuple[str, int]
type Scheme = Literal["https", "http", "tcp"]


@dataclass(frozen=True, slots=True)
class Witness:
    """An attempt and what it stands for: a path pattern (empty for a path that none takes), one of so many `paths` of it, and the
    query; of a connection both are empty."""

    attempt: Attempt
    pattern: str = ""
    paths: int = 1
    query: str = ""


def levels(policy: CompiledPolicy, host: Name | Address) -> list[Level]:
    """Return the rules that speak of a host, by level."""
    return policy.levels_of_name(host) if isinstance(host, tuple) else policy.levels_of_address(host)


def witnesses(host: Name | Address, rules: Iterable[Rule]) -> Iterator[Witness]:
    """Yield connections to a host and requests on it, for all that the rules say of it."""
    found = list(rules)
    patterns = list({pattern.text: pattern for rule in found for pattern in rule.patterns}.values())
    requests = list(_requests(patterns))
    for scheme, port in _lanes(found):
        yield Witness(ConnectionAttempt(host, port, scheme))
        if scheme == "tcp":
            continue
        for pattern, paths, query, method, upgrade, target in requests:
            attempt = RequestAttempt(host, port, scheme, method, target + query, upgrade=upgrade)
            yield Witness(attempt, pattern, paths, query)


def _lanes(rules: list[Rule]) -> list[tuple[Scheme, int]]:
    found: dict[tuple[Scheme, int], None] = {("https", 443): None, ("http", 80): None}
    every: tuple[Scheme, ...] = ("tcp", "https", "http")
    for rule in rules:
        for port in sorted(rule.ports or ()):
            found |= {(scheme, port): None for scheme in every if rule.is_opaque or scheme in rule.schemes}
    return list(found)


type _Request = tuple[str, int, str, str, str | None, str]


def _requests(patterns: list[RequestPattern]) -> Iterator[_Request]:
    """Yield pattern, number of its paths, query, method, upgrade and path; last those for what no pattern takes."""
    named = {method for pattern in patterns for method in pattern.methods or ()}
    methods = [*_METHODS, *sorted(named - {*_METHODS})]
    taken: set[str] = set()
    for text in dict.fromkeys(pattern.path.text for pattern in patterns):
        paths = _sampled(text)
        taken |= {*paths}
        for path in paths:
            yield from _with_queries(text, len(paths), path, methods, patterns)
    for one, other in itertools.combinations(patterns[:MOST_PATTERNS], 2):
        path = meeting_path(one.path.text, other.path.text) or ""
        if path and path not in taken:
            taken.add(path)
            yield from _with_queries(path.replace(_WORD, "*"), 1, path, methods, patterns)
    yield from _with_queries("", 1, f"/{_WORD}/{_WORD}.none", methods, [])


def _with_queries(
    text: str, paths: int, path: str, methods: list[str], patterns: list[RequestPattern]
) -> Iterator[_Request]:
    target = Target(path)
    here = [pattern for pattern in patterns if pattern.path.allows(target)]
    named = {"?" + "&".join(one.query.pairs) for one in here if one.query is not None and one.query.pairs}
    for query in ["", *sorted(named), *(f"{query}&{OTHER}" for query in sorted(named)), f"?{OTHER}"]:
        for method in methods:
            yield text, paths, query, method, None, path
        if not text or any(pattern.websocket for pattern in here):
            yield text, paths, query, "GET", "websocket", path


@functools.lru_cache(maxsize=4096)
def _sampled(path: str) -> tuple[str, ...]:
    choices: list[list[str]] = []
    segments = path[1:].split("/")
    for index, segment in enumerate(segments):
        if segment != "**":
            choices.append([segment.replace("*", _WORD)])
        elif index == len(segments) - 1:
            choices.append([_WORD, f"{_WORD}/{_WORD}", ""])
        else:
            choices.append([_WORD, "\0"])
    made = (
        "/" + "/".join(part for part in chosen if part != "\0")
        for chosen in itertools.islice(itertools.product(*choices), 16)
    )
    return tuple(dict.fromkeys(made))


@functools.lru_cache(maxsize=16384)
def meeting_path(one: str, other: str) -> str | None:
    """Return a path that both path patterns take; None when none was found."""
    left, right = tuple(one[1:].split("/")), tuple(other[1:].split("/"))

    @functools.cache
    def walk(i: int, j: int) -> tuple[str, ...] | None:
        if i == len(left) and j == len(right):
            return ()
        a = left[i] if i < len(left) else None
        b = right[j] if j < len(right) else None
        if a == "**" and b == "**":
            last = i + 1 == len(left) or j + 1 == len(right)
            both = walk(i + 1, j + 1)
            return (_WORD, *both) if last and both is not None else both
        if a == "**":
            empty = walk(i + 1, j) if i + 1 < len(left) else None
            return empty if empty is not None else _taking(b, walk, (i, j + 1), (i + 1, j + 1))
        if b == "**":
            empty = walk(i, j + 1) if j + 1 < len(right) else None
            return empty if empty is not None else _taking(a, walk, (i + 1, j), (i + 1, j + 1))
        if a is None or b is None:
            return None
        segment = _segment(a, b)
        rest = walk(i + 1, j + 1) if segment is not None else None
        return (segment, *rest) if segment is not None and rest is not None else None

    found = walk(0, 0)
    return None if found is None else "/" + "/".join(found)


def _taking(
    segment: str | None,
    walk: Callable[[int, int], tuple[str, ...] | None],
    stay: tuple[int, int],
    leave: tuple[int, int],
) -> tuple[str, ...] | None:
    """`**` takes the other side's segment, and goes on or stays."""
    if segment is None:
        return None
    for place in (leave, stay):
        rest = walk(*place)
        if rest is not None:
            return (segment.replace("*", _WORD), *rest)
    return None


def _segment(one: str, other: str) -> str | None:
    """Return a segment that fits both; the fixed ends of two globs are laid over each other."""
    if "*" not in one and "*" not in other:
        return one if one == other else None
    if "*" in one and "*" in other:
        heads = sorted((one.partition("*")[0], other.partition("*")[0]), key=len)
        tails = sorted((one.rpartition("*")[2], other.rpartition("*")[2]), key=len)
        agree = heads[1].startswith(heads[0]) and tails[1].endswith(tails[0])
        middles = [part for glob in (one, other) for part in glob.split("*")[1:-1]]
        return f"{heads[1]}{_WORD.join(['', *middles, ''])}{tails[1]}" if agree else None
    glob, literal = (one, other) if "*" in one else (other, one)
    head, tail = glob.partition("*")[0], glob.rpartition("*")[2]
    fits = literal.startswith(head) and literal.endswith(tail) and len(literal) > len(head) + len(tail)
    return literal if fits else None
