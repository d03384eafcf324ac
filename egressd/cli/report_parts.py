"""The sections of `egressd report`: each takes every decision of the journal once, and then tells what it came to.

A section is total (a journal holds what hostile programs sent) and bounded, and tells the same as text and as plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from egressd.cli.rows import printable

if TYPE_CHECKING:  # the reader of rules takes longer to import than `--help` should
    from egressd.rulefiles.breakage import Breakage, Met

MOST_SHOWN = 40
"""Rows of a section in text; JSON has them all."""
_MOST_KEPT = 5000
_OTHERS = ("others", "", "other attempts", "")


class Part(Protocol):
    """A section."""

    name: str
    title: str

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record."""

    def lines(self) -> Iterator[str]:
        """Yield what it came to, for people."""

    def as_json(self) -> dict[str, object]:
        """Return the same as plain values with stable keys."""


class Overview:
    """How much there was, of what, by how many, and from when to when."""

    name = "overview"
    title = "All attempts"

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._verdicts: Counter[str] = Counter()
        self._layers: Counter[str] = Counter()
        self._profiles: Counter[str] = Counter()
        self._sandboxes: set[str] = set()
        self._first, self._last = "", ""

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record."""
        times = times_of(fields)
        verdict = fields.get("verdict")
        noted = verdict == "allow" and fields.get("would_deny") is True
        self._verdicts["would-deny" if noted else verdict if verdict in ("allow", "ask") else "deny"] += times
        layer = fields.get("layer")
        self._layers[layer if layer in ("dns", "connection", "request", "packet") else "other"] += times
        profile = text_of(fields, "profile") or "none"
        if profile in self._profiles or len(self._profiles) < _MOST_KEPT:
            self._profiles[profile] += times
        if len(self._sandboxes) < _MOST_KEPT * 20:
            self._sandboxes.add(text_of(fields, "sandbox"))
        time = text_of(fields, "time")
        self._first = min(filter(None, (self._first, time)), default="")
        self._last = max(self._last, time)

    def lines(self) -> Iterator[str]:
        """Yield what it came to, for people."""
        yield f"{sum(self._verdicts.values()):,} by {_count(len(self._sandboxes), 'sandbox', 'sandboxes')}"
        if self._first:
            yield printable(f"from {self._first} to {self._last}")
        for what, counted in (
            ("verdict", self._verdicts),
            ("layer", self._layers),
            ("profile", self._profiles),
        ):
            told = ", ".join(f"{name} {number:,}" for name, number in counted.most_common(MOST_SHOWN))
            yield printable(f"by {what}: {told or 'none'}")

    def as_json(self) -> dict[str, object]:
        """Return the same as plain values with stable keys."""
        return {
            "first": self._first or None,
            "last": self._last or None,
            "attempts": sum(self._verdicts.values()),
            "sandboxes": len(self._sandboxes),
            "verdicts": dict(self._verdicts.most_common()),
            "layers": dict(self._layers.most_common()),
            "profiles": dict(self._profiles.most_common()),
        }


class Denied:
    """What was denied, or would have to be asked for, most often."""

    name = "denied"
    title = "Denied"

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._rows: Counter[tuple[str, str, str, str]] = Counter()

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record."""
        if fields.get("verdict") not in ("deny", "ask"):
            return
        host = text_of(fields, "host") or text_of(fields, "host_raw") or text_of(fields, "address")
        row = (text_of(fields, "profile"), text_of(fields, "reason"), host, text_of(fields, "rule"))
        if row not in self._rows and len(self._rows) >= _MOST_KEPT:
            row = _OTHERS
        self._rows[row] += times_of(fields)

    def lines(self) -> Iterator[str]:
        """Yield what it came to, for people."""
        for (profile, reason, host, rule), times in self._rows.most_common(MOST_SHOWN):
            by = f" by {rule}" if rule else ""
            yield printable(f"{times:,} x {host or 'no host'} ({reason}{by}); {profile or 'no profile'}")
        yield from more(len(self._rows) - MOST_SHOWN)
        if not self._rows:
            yield "nothing"

    def as_json(self) -> dict[str, object]:
        """Return the same as plain values with stable keys."""
        return {
            "rows": [
                {
                    "profile": profile or None,
                    "reason": reason,
                    "host": host or None,
                    "rule": rule or None,
                    "times": n,
                }
                for (profile, reason, host, rule), n in self._rows.most_common()
            ]
        }


class Enforced:
    """What would break if the rules of today were enforced today."""

    name = "enforced"
    title = "What would break if this were enforced today"

    def __init__(self, breakage: Breakage) -> None:
        """Judge by the rules that `breakage` has."""
        self._breakage = breakage
        self.take = breakage.take

    @property
    def breaks(self) -> bool:
        """Whether anything would."""
        return bool(self._breakage.breaks())

    def lines(self) -> Iterator[str]:
        """Yield what it came to, for people."""
        found = self._breakage
        yield f"{found.noted:,} attempts passed only because something observed; {found.settled:,} of them are allowed by now"
        for kind, words in _KINDS.items():
            rows = [(row, met) for row, met in found.breaks().items() if row.kind == kind]
            if not rows:
                continue
            yield f"{words}: {sum(met.times for _, met in rows):,}"
            for row, met in islice(rows, MOST_SHOWN):
                by = f" by {row.rule}" if row.rule else f" ({row.reason})" if row.reason else ""
                owner = found.owner(row.profile)
                whom = f", ask {owner}" if owner else ""
                yield printable(f"  {met.times:,} x {row.what}{by}; {row.profile}{whom}; {_who(met)}")
            yield from (f"  {line}" for line in more(len(rows) - MOST_SHOWN))
        if not self.breaks:
            yield "nothing would break"
        for why, number in sorted(found.unjudged.items()):
            yield f"not judged: {number:,} ({why})"

    def as_json(self) -> dict[str, object]:
        """Return the same as plain values with stable keys."""
        found = self._breakage
        return {
            "noted": found.noted,
            "settled": found.settled,
            "breaks": [
                {
                    "kind": row.kind,
                    "profile": row.profile,
                    "owner": found.owner(row.profile),
                    "what": row.what,
                    "reason": row.reason or None,
                    "rule": row.rule,
                    "times": met.times,
                    "sandboxes": len(met.sandboxes),
                    "example": met.example or None,
                }
                for row, met in found.breaks().items()
            ],
            "not_judged": dict(sorted(found.unjudged.items())),
        }


_KINDS = {
    "denied": "would be denied",
    "asked": "would have to be asked for",
    "uncertain": "denied or not, depending on what was not recorded",
}


def times_of(fields: Mapping[str, Any]) -> int:
    """Return how many attempts a record stands for."""
    count = fields.get("count")
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text, short enough to be kept; empty for any other."""
    value = fields.get(name)
    return value[:300] if isinstance(value, str) else ""


def more(left: int) -> Iterator[str]:
    """Yield the line that says how many rows are not shown, if any."""
    if left > 0:
        yield f"… and {left:,} more"


def _who(met: Met) -> str:
    shown = sorted(met.sandboxes)[:2]
    rest = f" and {len(met.sandboxes) - len(shown)} more" if len(met.sandboxes) > len(shown) else ""
    example = f", like {met.example}" if met.example else ""
    return f"{', '.join(shown)}{rest}{example}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
