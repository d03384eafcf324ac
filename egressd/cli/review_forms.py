"""The forms of `egressd review`: text, one HTML page that loads nothing, CSV that no spreadsheet takes for formulas, and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from egressd.cli.rows import printable

if TYPE_CHECKING:
    from egressd.rulefiles.review import Row

TITLES = {
    "unused": "Unused: decided nothing in the recorded traffic",
    "expiring": "Expiring",
    "ownerless": "Without an owner",
    "widest": "Widest: what opens most, with points to sort by",
    "credentialed": "With a credential",
}
COLUMNS = ("section", "rule", "place", "profiles", "owner", "detail", "uses", "last used")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
body { color: #1a1a1a; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } caption { text-align: left; color: #555 }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #ddd }
td { overflow-wrap: anywhere } code { font-size: .9em }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #161616 } th, td { border-color: #333 } caption { color: #aaa }
}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def as_text(rows: list[Row], notes: list[str]) -> Iterator[str]:
    """Yield the review for people at a terminal."""
    for section, group in groupby(rows, key=lambda row: row.section):
        yield f"{TITLES[section]}:"
        for row in group:
            yield printable("  " + "; ".join(_parts(row)))
    if not rows:
        yield "nothing to look at"
    yield from map(printable, notes)


def as_html(rows: list[Row], notes: list[str], heading: str) -> str:
    """Return one page that needs nothing else: no script, no other file, every value escaped."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_cell(heading)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_cell(heading)}</h1>",
        *(f"<p>{_cell(note)}</p>" for note in notes),
    ]
    for section, group in groupby(rows, key=lambda row: row.section):
        made = list(group)
        parts.append(f'<h2 id="{section}">{_cell(TITLES[section])}</h2>')
        parts.append(f"<table><caption>{len(made)}</caption><thead><tr>")
        parts += [f'<th scope="col">{_cell(name)}</th>' for name in COLUMNS[1:]]
        parts.append("</tr></thead><tbody>")
        for row in made:
            _, rule, place, *rest = _cells(row)
            cells = [f"<code>{_cell(rule)}</code>", f"<code>{_cell(place)}</code>", *map(_cell, rest)]
            parts.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        parts.append("</tbody></table>")
    if not rows:
        parts.append("<p>Nothing to look at.</p>")
    return "\n".join((*parts, "</body></html>\n"))


def as_csv(rows: list[Row]) -> str:
    """Return a table with a header; a cell that a spreadsheet would compute begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([f"'{text}" if text.startswith(_FORMULA) else text for text in _cells(row)])
    return out.getvalue()


def as_json(rows: list[Row], notes: list[str]) -> dict[str, object]:
    """Return the review as plain values with stable keys."""
    return {
        "rows": [
            {
                "section": row.section,
                "rule": row.what,
                "place": row.place,
                "profiles": list(row.profiles),
                "owner": row.owner,
                "detail": row.detail,
                "uses": row.use.times if row.use is not None else None,
                "last_used": (row.use.last or None) if row.use is not None else None,
            }
            for row in rows
        ],
        "notes": notes,
    }


def _cells(row: Row) -> list[str]:
    uses = (str(row.use.times), row.use.last) if row.use is not None else ("", "")
    named = (row.section, row.what, row.place, ", ".join(row.profiles), row.owner or "", row.detail)
    return [printable(text) for text in (*named, *uses)]


def _parts(row: Row) -> Iterator[str]:
    yield f"{row.what} ({row.place}) {row.detail}"
    if row.profiles:
        yield f"in {', '.join(row.profiles)}"
    if row.owner is not None:
        yield f"ask {row.owner}"
    if row.use is not None and row.use.times:
        times = "once" if row.use.times == 1 else f"{row.use.times:,} times"
        yield f"used {times}, last on {row.use.last[:10]}"


def _cell(text: str) -> str:
    return escape(printable(text))
