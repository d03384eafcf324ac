"""Many single attempts that turn out alike, told in few words: by pattern where all of its paths do, by method where all do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from egressd.policy.attempt import Address, ConnectionAttempt, Name, RequestAttempt
from egressd.policy.names import format_host
from egressd.policy.paths import PathPattern, Target, parse_path_pattern
from egressd.rulefiles.witnesses import ANY_METHOD, OTHER, SAMPLE, Witness

_WORD = "x-of-egressd"

type Told = tuple[Any, ...]
"""How an attempt turned out; what is equal is told together."""
type Lane = tuple[str, int]


@dataclass(slots=True)
class Sightings:
    """Collects witnesses on one host by how they turned out."""

    host: Name | Address
    connections: dict[Told, list[Lane]] = field(default_factory=lambda: defaultdict(list))
    requests: dict[tuple[Told, Lane], dict[tuple[str, str, str], set[str]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, witness: Witness, told: Told) -> None:
        """Take one witness; look-ups follow from connections and are left to them."""
        attempt = witness.attempt
        if isinstance(attempt, ConnectionAttempt):
            self.connections[told].append((attempt.scheme, attempt.port))
        elif isinstance(attempt, RequestAttempt):
            lane = (attempt.scheme, attempt.port)
            method = "WEBSOCKET" if attempt.upgrade else attempt.method
            shelf = self.requests.setdefault((told, lane), defaultdict(set))
            shelf[witness.pattern, witness.query, method].add(attempt.target.partition("?")[0])
            self.sizes[witness.pattern] = witness.paths

    def summed_up(self) -> Iterator[tuple[Told, str]]:
        """Yield how attempts turned out, and which; connections only where no request on them tells as much."""
        spoken = {lane for _, lane in self.requests}
        for (told, lane), shelf in self.requests.items():
            for methods, path in self._lines(shelf):
                yield told, f"{methods} {self._origin(lane)}{path}"
        for told, lanes in self.connections.items():
            for scheme, port in lanes:
                if (scheme, port) not in spoken:
                    yield told, f"{scheme}://{self._shown}:{port}"

    def _lines(self, shelf: dict[tuple[str, str, str], set[str]]) -> list[tuple[str, str]]:
        """Return methods and path of each line, what is said by a wider one left out."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for (pattern, query, method), paths in shelf.items():
            whole = len(paths) == self.sizes[pattern]
            for path in [pattern] if whole else sorted(path.replace(_WORD, "*") for path in paths):
                found[path, query].add(method)
        lines: dict[tuple[str, frozenset[str]], list[str]] = defaultdict(list)
        for (path, query), methods in found.items():
            left = methods - (found[path, ""] if query and (path, "") in found else set())
            for theirs in _wider(path, found):
                left = left - theirs
            if left:
                lines[f"{path or '/… (any other path)'}{_query(query)}", frozenset(left)].append(query)
        return [(_methods(methods), path) for path, methods in sorted(lines, key=lambda line: line[0])]

    @property
    def _shown(self) -> str:
        return format_host(self.host).replace(f"{SAMPLE}.", "*.")

    def _origin(self, lane: Lane) -> str:
        usual = {"https": 443, "http": 80}[lane[0]] == lane[1]
        return f"{lane[0]}://{self._shown}{'' if usual else f':{lane[1]}'}"


def _wider(path: str, found: dict[tuple[str, str], set[str]]) -> Iterator[set[str]]:
    """Yield the methods of patterns that are told of with any query, and cover the path; an unnamed one, all of it."""
    for (other, theirs), methods in found.items():
        if theirs or other == path or "*" not in other:
            continue
        pattern = parse_path_pattern(other)
        if isinstance(pattern, PathPattern) and (
            pattern.allows(Target(_literal(path))) if path else pattern.is_everything
        ):
            yield methods


def _literal(path: str) -> str:
    return path.replace("**", f"{_WORD}/{_WORD}").replace("*", _WORD)


def _methods(methods: frozenset[str]) -> str:
    if ANY_METHOD in methods:
        return "ANY,WEBSOCKET" if "WEBSOCKET" in methods else "ANY"
    return ",".join(sorted(methods))


def _query(query: str) -> str:
    if query == f"?{OTHER}":
        return " (with a query)"
    return query.replace(f"&{OTHER}", "&*")
