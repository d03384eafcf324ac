"""The effective policy of a profile as one document to read, print and sign off: every line with where it is written.

The text is YAML; the origins are its comments. Denials come first, as `decide` reads them, then what is asked for, then what is
allowed, each in the order of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from egressd.policy.bodies import show
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, Rate
from egressd.policy.requests import DEFAULT_REQUESTS
from egressd.rulefiles.narrowing import LIMITS
from egressd.rulefiles.origins import DEFAULT, Origins
from egressd.rulefiles.source import RuleSource

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9._/-]*|[0-9]+|[0-9]+[A-Za-z]*/[a-z]+|[0-9]{4}-[0-9]{2}-[0-9]{2}")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_PERIODS = {1: "second", 60: "minute", 3600: "hour", 86400: "day"}
_UNITS = (
    (10**9, "GB"),
    (2**30, "GiB"),
    (10**6, "MB"),
    (2**20, "MiB"),
    (10**3, "kB"),
    (2**10, "KiB"),
    (1, ""),
)
_SECTIONS = ("deny", "ask", "allow")
_WIDEST = 72


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the document and where it comes from: `file:line`, `default`, or empty for a heading."""

    text: str
    origin: str = ""


def printout(policy: EffectivePolicy, source: RuleSource) -> list[Line]:
    """Return the document, line by line."""
    origins = Origins(source)
    name = policy.profile
    lines = [Line(f"profile: {name}", origins.of_profile(name, "profile"))]
    if policy.owner is not None:
        lines.append(Line(f"owner: {_scalar(policy.owner)}", origins.of_profile(name, "owner")))
    lines.append(Line(f"mode: {policy.mode}", origins.of_profile(name, "mode")))
    if policy.observe_until is not None:
        origin = origins.of_profile(name, "observe_until")
        lines.append(Line(f"observe_until: {policy.observe_until}", origin))
    limits = [(key, value) for key in LIMITS if (value := getattr(policy.limits, key)) is not None]
    if limits:
        lines.append(Line("limits:"))
    lines += [
        Line(f"  {key}: {_limit(key, value)}", origins.of_profile_limit(name, key)) for key, value in limits
    ]
    for effect in _SECTIONS:
        entries = [entry for entry in policy.entries if entry.effect == effect]
        if entries:
            lines.append(Line(f"{effect}:"))
        for entry in entries:
            first, *rest = _entry(entry, origins)
            lines.append(Line(f"  - {first.text}", first.origin))
            lines += [Line(f"    {line.text}", line.origin) for line in rest]
    return lines


def as_text(lines: list[Line]) -> str:
    """Return the lines as YAML with the origins as comments in a column of their own."""
    column = min(max((len(line.text) for line in lines), default=0), _WIDEST) + 2
    return "\n".join(
        f"{line.text:<{column}}{' ' if len(line.text) >= column else ''}# {line.origin}"
        if line.origin
        else line.text
        for line in lines
    )


def as_json(policy: EffectivePolicy, source: RuleSource) -> dict[str, object]:
    """Return the policy as plain values, its digest, and the same lines with their origins."""
    return {
        "digest": policy.digest(),
        "policy": json.loads(policy.model_dump_json()),
        "lines": [{"text": line.text, "origin": line.origin or None} for line in printout(policy, source)],
    }


def _entry(entry: EffectiveEntry, origins: Origins) -> Iterator[Line]:
    yield Line(f"id: {entry.id}", entry.place)
    yield from _mode(entry, origins)
    for key in ("hosts", "addresses"):
        yield from _items(entry, key, getattr(entry, key), origins)
    if entry.public_web:
        yield Line("public_web: read", origins.of(entry, "public_web"))
    if entry.effect != "deny" or entry.ports:
        if entry.treatment != "relay":
            yield Line(f"schemes: [{', '.join(entry.schemes)}]", origins.of(entry, "schemes"))
        yield Line(f"ports: [{', '.join(map(str, entry.ports))}]", origins.of(entry, "ports"))
    if entry.effect != "deny":
        yield Line(f"treatment: {entry.treatment}", origins.of(entry, "treatment"))
    requests = entry.requests
    if not requests and entry.effect != "deny" and entry.treatment == "inspect":
        requests = DEFAULT_REQUESTS
    yield from _items(entry, "requests", requests, origins)
    yield from _terms(entry, origins)
    limits = [(key, value) for key in LIMITS if (value := getattr(entry.limits, key)) is not None]
    if limits:
        yield Line("limits:", origins.of(entry, "limits"))
    for key, value in limits:
        yield Line(f"  {key}: {_limit(key, value)}", origins.of_limit(entry, key))
    if entry.expires is not None:
        yield Line(f"expires: {entry.expires}", origins.of(entry, "expires"))
    yield from _items(entry, "approvers", entry.approvers, origins)
    if entry.because is not None:
        yield Line(f"because: {_scalar(entry.because)}", origins.of(entry, "because"))


def _terms(entry: EffectiveEntry, origins: Origins) -> Iterator[Line]:
    if entry.body:
        yield Line(f"json: {show(entry.body)}", origins.of(entry, "json"))
    if entry.credential is not None:
        yield Line(f"credential: {entry.credential}", origins.of(entry, "credential"))


def _mode(entry: EffectiveEntry, origins: Origins) -> Iterator[Line]:
    if entry.mode == "observe":
        yield Line(f"mode: {entry.mode}", origins.of(entry, "mode"))
        yield Line(f"observe_until: {entry.observe_until}", origins.of(entry, "observe_until"))


def _items(entry: EffectiveEntry, key: str, values: tuple[str, ...], origins: Origins) -> Iterator[Line]:
    if not values:
        return
    places = origins.of_items(entry, key, values)
    yield Line(f"{key}:", places[0] if set(places) == {DEFAULT} else "")
    yield from (Line(f"  - {_scalar(value)}", place) for value, place in zip(values, places, strict=True))


def _scalar(text: str) -> str:
    """Return a text as YAML writes it on one line; JSON's quotes are YAML's too."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS and not text.isdecimal()
    return text if plain else json.dumps(text)


def _limit(key: str, value: Rate | int) -> str:
    if isinstance(value, int):
        return str(value)
    amount, unit = value.amount, ""
    if key.startswith(("upload", "download")):
        amount, unit = next((amount // size, unit) for size, unit in _UNITS if amount % size == 0)
    return f"{amount}{unit}/{_PERIODS.get(value.seconds, f'{value.seconds} seconds')}"
