"""How the impact of rules on recorded traffic looks: by kind of change and sandbox, the most frequent first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from egressd.cli.rows import printable

if TYPE_CHECKING:  # see check.py
    from egressd.rulefiles.replay import Impact, Kind, Row, Seen

MOST_SHOWN = 40
"""Rows of one kind in text; JSON has them all."""

_TITLES = {
    "allowed": "newly allowed",
    "asked": "newly asked for",
    "denied": "newly denied",
    "not inspected": "no longer inspected",
    "inspected": "newly inspected",
    "credential": "with another credential",
    "uncertain": "changed or not, depending on what was not recorded",
}


def impact_lines(impact: Impact) -> Iterator[str]:
    """Yield the impact for people."""
    from egressd.rulefiles.replay import KINDS

    for kind in KINDS:
        total = impact.total(kind)
        if not total:
            continue
        rows = _sorted(impact, kind)
        yield f"{_TITLES[kind]}: {total:,}"
        for row, seen in islice(rows, MOST_SHOWN):
            by = f" by {row.rule}" if row.rule else f" ({row.reason})" if row.reason else ""
            example = f", like {seen.example}" if seen.example else ""
            yield printable(
                f"  {seen.times:,} x {row.what}{by}; {row.profile}, sandbox {row.sandbox}{example}"
            )
        if len(rows) > MOST_SHOWN:
            yield f"  … and {len(rows) - MOST_SHOWN:,} more"
    yield f"unchanged: {impact.same:,}"
    for why, number in sorted(impact.skipped.items()):
        yield f"not judged: {number:,} ({why})"


def impact_json(impact: Impact) -> dict[str, object]:
    """Return the impact as plain values with stable keys."""
    from egressd.rulefiles.replay import KINDS

    return {
        "changes": [
            {
                "kind": row.kind,
                "profile": row.profile,
                "sandbox": row.sandbox,
                "what": row.what,
                "reason": row.reason or None,
                "rule": row.rule,
                "times": seen.times,
                "example": seen.example or None,
            }
            for kind in KINDS
            for row, seen in _sorted(impact, kind)
        ],
        "unchanged": impact.same,
        "not_judged": dict(sorted(impact.skipped.items())),
    }


def _sorted(impact: Impact, kind: Kind) -> list[tuple[Row, Seen]]:
    found = [(row, seen) for row, seen in impact.rows.items() if row.kind == kind]
    return sorted(found, key=lambda one: (-one[1].times, one[0].profile, one[0].sandbox, one[0].what))
