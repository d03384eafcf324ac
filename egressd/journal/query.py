"""Queries: `sandbox:web verdict:deny host:*.io since:2h` as a test of records, on their fields and, faster, on their bytes.

Every term must hold. A term with several values, `reason:doh,ip_literal`, holds where one of them does; in a text `*` stands for
anything. Total: a field of a wrong type matches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from egressd.journal.reader import BadFilter, HostFilter, parse_host_filter, parse_since

_TEXT_KEYS: Final = {
    **{key: key for key in ("event", "layer", "channel", "reason", "rule", "treatment", "profile", "policy")},
    **{
        key: key
        for key in ("method", "path", "qtype", "credential", "lease", "grant", "alert", "source", "upstream")
    },
}
_SPECIAL: Final = ("sandbox", "verdict", "host", "port", "status", "label", "id", "since", "until")
KEYS: Final = (*_SPECIAL, *_TEXT_KEYS)
"""What a term may begin with."""

_VERDICTS: Final = ("allow", "deny", "ask", "would-deny")
_ON_ENDS_TOO: Final = frozenset(
    {
        "sandbox",
        "host",
        "port",
        "label",
        "id",
        "since",
        "until",
        "layer",
        "channel",
        "treatment",
        "profile",
        "policy",
    }
    | {"method"}
)
"""What an `end` carries as its decision does."""
_VALUES_LIMIT = 64

type Test = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Term:
    """One condition: its key, its values as they were written, what it asks of a record, and bytes that such a line holds."""

    key: str
    values: tuple[str, ...]
    holds: Test
    needle: bytes | None = None


@dataclass(frozen=True)
class Query:
    """Conditions that must all hold."""

    terms: tuple[Term, ...] = ()

    def wants(self, fields: Mapping[str, Any]) -> bool:
        """Say whether a record is asked for."""
        return all(term.holds(fields) for term in self.terms)

    @cached_property
    def needles(self) -> tuple[bytes, ...]:
        """Bytes that every line that is asked for holds, if egressd wrote it."""
        return tuple(term.needle for term in self.terms if term.needle is not None)

    def likely(self, line: bytes) -> bool:
        """Say whether a line that egressd wrote may be asked for, by its bytes."""
        return all(needle in line for needle in self.needles)

    def likely_or_end(self, line: bytes) -> bool:
        """Say the same, or that it may be the end of an attempt that is."""
        return self.likely(line) or (b'"event":"end"' in line and self.of_ends.likely(line))

    @cached_property
    def of_ends(self) -> Query:
        """What of it an `end` can be held against."""
        return Query(tuple(term for term in self.terms if term.key in _ON_ENDS_TOO))

    @property
    def since(self) -> str | None:
        """The time before which nothing is asked for, if one was given."""
        return max((term.values[0] for term in self.terms if term.key == "since"), default=None)


def is_term(text: str) -> bool:
    """Say whether a word is meant as a term: it begins with a key and a colon."""
    key, colon, _ = text.partition(":")
    return bool(colon) and key in KEYS


def parse_query(words: Iterable[str], now: float) -> Query | BadFilter:
    """Return the query that the words write, or what is wrong with the first that is none; `now` is Unix seconds."""
    terms: list[Term] = []
    for word in words:
        key, _, text = word.partition(":")
        term = parse_term(key, text, now)
        if isinstance(term, BadFilter):
            return BadFilter(f"{word}: {term.problem}")
        terms.append(term)
    return Query(tuple(terms))


def parse_term(key: str, text: str, now: float) -> Term | BadFilter:
    """Return the term of a key, or what is wrong with its value."""
    values = tuple(part for part in text.split(",") if part)
    if key not in KEYS:
        return BadFilter(f"no such key; there are {', '.join(KEYS)}")
    if not 0 < len(values) <= _VALUES_LIMIT:
        return BadFilter("a value is wanted behind the colon")
    match key:
        case "since" | "until":
            return _time_term(key, text, now)
        case "host":
            return _host_term(values)
        case "verdict":
            return _verdict_term(values)
        case "port" | "status":
            return _number_term(key, values)
        case "sandbox":
            return Term(key, values, _any([_is_sandbox(value) for value in values]))
        case "label":
            return _label_term(values)
        case "id":
            return Term(
                key,
                values,
                lambda fields: fields.get("attempt_id") in values or fields.get("root_id") in values,
            )
        case _:
            return _text_term(key, _TEXT_KEYS[key], values)


def text_test(value: str) -> Callable[[Any], bool]:
    """Return what holds for a text that is `value`, in which `*` stands for anything."""
    if "*" not in value:
        return lambda found: bool(found == value)
    pattern = re.compile(".*".join(map(re.escape, value.split("*"))), re.DOTALL)
    return lambda found: isinstance(found, str) and pattern.fullmatch(found) is not None


def _any(tests: list[Test]) -> Test:
    return tests[0] if len(tests) == 1 else lambda fields: any(test(fields) for test in tests)


def _time_term(key: str, text: str, now: float) -> Term | BadFilter:
    moment = parse_since(text, now)
    if isinstance(moment, BadFilter):
        return moment
    # one format and one zone: text order is time order
    if key == "since":
        return Term(key, (moment,), lambda fields: _text(fields, "time") >= moment)
    return Term(key, (moment,), lambda fields: "" < _text(fields, "time") < moment)


def _host_term(values: tuple[str, ...]) -> Term | BadFilter:
    hosts: list[HostFilter] = []
    for value in values:
        host = parse_host_filter(value)
        if isinstance(host, BadFilter):
            return host
        hosts.append(host)
    needle = hosts[0].text.encode("ascii") if len(hosts) == 1 else None
    return Term("host", values, lambda fields: any(host.matches(dict(fields)) for host in hosts), needle)


def _verdict_term(values: tuple[str, ...]) -> Term | BadFilter:
    if not set(values) <= set(_VERDICTS):
        return BadFilter(f"one of {', '.join(_VERDICTS)} is wanted")

    def holds(fields: Mapping[str, Any]) -> bool:
        would = fields.get("would_deny") is True
        return ("would-deny" in values and would) or fields.get("verdict") in values

    (only, *more) = values
    return Term("verdict", values, holds, None if more or only == "would-deny" else _needle("verdict", only))


def _number_term(key: str, values: tuple[str, ...]) -> Term | BadFilter:
    if not all(value.isascii() and value.isdigit() and len(value) <= 5 for value in values):
        return BadFilter("a number is wanted")
    numbers = frozenset(map(int, values))

    def holds(fields: Mapping[str, Any]) -> bool:
        found = fields.get(key)
        return type(found) is int and found in numbers

    return Term(key, values, holds)


def _is_sandbox(value: str) -> Test:
    """Return what holds for a sandbox by its id or the beginning of it, or by the text of one of its labels."""
    matches = text_test(value)

    def holds(fields: Mapping[str, Any]) -> bool:
        sandbox, labels = fields.get("sandbox"), fields.get("labels")
        if matches(sandbox) or (
            value.startswith("sbx-") and isinstance(sandbox, str) and sandbox.startswith(value)
        ):
            return True
        return isinstance(labels, dict) and any(matches(text) for text in labels.values())

    return holds


def _label_term(values: tuple[str, ...]) -> Term | BadFilter:
    pairs = [value.partition("=") for value in values]
    if not all(name and equals for name, equals, _ in pairs):
        return BadFilter("label:NAME=VALUE is wanted")
    tests = [(name, text_test(text)) for name, _, text in pairs]

    def holds(fields: Mapping[str, Any]) -> bool:
        labels = fields.get("labels")
        return isinstance(labels, dict) and any(name in labels and test(labels[name]) for name, test in tests)

    return Term("label", values, holds)


def _text_term(key: str, field: str, values: tuple[str, ...]) -> Term:
    tests = [text_test(value) for value in values]
    needle = _needle(field, values[0]) if len(values) == 1 and "*" not in values[0] else None
    return Term(key, values, lambda fields: any(test(fields.get(field)) for test in tests), needle)


def _needle(field: str, value: str) -> bytes:
    return f'"{field}":{json.dumps(value)}'.encode("ascii")


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""
