"""A record as a row that a person reads: the columns of `egressd log`, in text that is safe on a terminal.

A journal holds what hostile programs sent. Every cell is made printable here: control characters, terminal
escapes, bidirectional overrides and combining marks leave as backslash escapes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

_CELL_LIMIT = 2048
_SIZES = ("B", "kB", "MB", "GB", "TB")


class Row(NamedTuple):
    """One record's cells; `mark` says how the verdict is coloured: a verdict, an event or `would-deny`."""

    time: str
    sandbox: str
    layer: str
    verdict: str
    what: str
    reason: str
    rule: str
    times: str
    mark: str


HEADER = Row("TIME (UTC)", "SANDBOX", "LAYER", "VERDICT", "WHAT", "REASON", "RULE", "COUNT", "")


def row_of(fields: Mapping[str, Any]) -> Row:
    """Return the row of a record; total, whatever the fields hold."""
    cell = _Cells(fields)
    event, verdict = cell("event"), cell("verdict")
    if fields.get("would_deny") is True and verdict == "allow":
        verdict = "would-deny"
    mark = verdict if event == "decision" and verdict else event
    return Row(
        time=_time(cell("time")),
        sandbox=cell("sandbox"),
        layer=cell("layer"),
        verdict=mark,
        what=_what(cell, event),
        reason=_reason(cell),
        rule=" ".join(filter(None, (cell("rule"), cell("place")))),
        times=cell("count"),
        mark=mark,
    )


def printable(text: str) -> str:
    """Return the text with everything that is not plainly visible as a backslash escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _visible(char) else _escaped(char) for char in text)


def readable_size(count: int) -> str:
    """Return a number of bytes in at most three digits and a decimal unit."""
    size = float(count)
    for unit in _SIZES:
        if size < 999.5 or unit == _SIZES[-1]:
            break
        size /= 1000
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"


class _Cells:
    """The fields as printable texts, empty where there is none."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def __call__(self, name: str) -> str:
        value = self.fields.get(name)
        if value is None:
            return ""
        text = value if isinstance(value, str) else str(value)
        return printable(text[:_CELL_LIMIT])

    def number(self, name: str) -> float | None:
        value = self.fields.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _what(cell: _Cells, event: str) -> str:
    if event in {"sandbox", "policy", "approval", "lost"}:
        return cell("detail")
    target = _target(cell)
    told = event == "end" or "ended" in cell.fields
    return " ".join(filter(None, (target, _course(cell)))) if told else target


def _reason(cell: _Cells) -> str:
    """Return why it was decided so and, of a folded record, how it ended where that was not well."""
    ended = cell("ended")
    return (
        f"{cell('reason')}, then {ended}"
        if ended not in ("", "completed", "client_closed")
        else cell("reason")
    )


def _target(cell: _Cells) -> str:
    host = cell("host") or cell("host_raw") or cell("address")
    match cell("layer"):
        case "dns":
            return f"DNS {cell('qtype') or '?'} {host}"
        case "request":
            scheme = cell("scheme")
            usual = {"https": "443", "http": "80"}.get(scheme)
            port = cell("port")
            authority = host if port in ("", usual) else f"{host}:{port}"
            query = f"?{cell('query')}" if "query" in cell.fields else ""
            return f"{cell('method') or '?'} {scheme or '?'}://{authority}{cell('path')}{query}"
        case layer:
            protocol = cell("protocol") or ("tcp" if layer == "connection" else "?")
            if ":" in host and not host.startswith("["):
                host = f"[{host}]"
            port = cell("port")
            return f"{protocol} {host}:{port}" if port else f"{protocol} {host}"


def _course(cell: _Cells) -> str:
    """Say how it went: status, bytes, duration."""
    parts = [cell("status")]
    for name, word in (("bytes_up", "up"), ("bytes_down", "down")):
        count = cell.number(name)
        if count is not None:
            parts.append(f"{word} {readable_size(int(count))}" if abs(count) < 2**63 else f"{word} ?")
    duration = cell.number("duration_ms")
    if duration is not None:
        parts.append(f"{duration / 1000:.3g} s" if duration >= 1000 else f"{duration:.3g} ms")
    said = ", ".join(filter(None, parts))
    return f"({said})" if said else ""


def _time(text: str) -> str:
    # microseconds order the file; a person needs milliseconds
    return f"{text[:23]}Z" if len(text) == 27 and text.endswith("Z") else text


def _visible(char: str) -> bool:
    return char.isprintable() and not unicodedata.category(char).startswith("M")


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
