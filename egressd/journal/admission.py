"""Admission: what control lets into the journal of what a worker sent, and the line that is made of it.

A worker parses hostile bytes and may have been taken over. It can still lie about its own sandboxes'
attempts; it cannot write for another sandbox, invent fields or structure, claim what control alone says, or
number, date or stretch its lines as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, get_args

from egressd.journal.record import FIELDS, SCHEMA, TEXT_LIMIT, Alert, clip, timestamp, to_line
from egressd.policy.reasons import Reason

CLOCK_TOLERANCE = 300.0
"""Seconds by which a worker's time may differ from control's before control writes its own: a stalled worker
delivers late, a forged time may not reorder the story."""

LABEL_COUNT = 32
LABEL_KEY_LIMIT = 64
LABEL_VALUE_LIMIT = 256

_CLIPPED_LIMIT = TEXT_LIMIT + 64  # a text that was clipped at its source ends with its length and hash
_MARK = re.compile(r"…\[\d{1,12} bytes, sha256 [0-9a-f]{16}\]\Z")
IDENTIFIER = "^[0-9A-Za-z._:-]{1,64}$"
_IDENTIFIER = re.compile(r"[0-9A-Za-z._:-]{1,64}\Z")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z", re.ASCII)

_WORKER_EVENTS = frozenset({"decision", "end", "lost"})
_CHAINED = ("prev", "signature")
"""What the chain says of a line; nobody else does, control's other parts neither."""
_CONTROL_FIELDS = frozenset({"alert", "torn", "key"})
CLOSED: dict[str, frozenset[str]] = {
    "event": _WORKER_EVENTS | {"sandbox", "policy", "approval", "alert", "head", "journal"},
    "layer": frozenset({"dns", "connection", "request", "packet"}),
    "verdict": frozenset({"allow", "deny", "ask"}),
    "reason": frozenset(Reason),
    "would_reason": frozenset(Reason),
    "treatment": frozenset({"inspect", "tunnel", "relay"}),
    "alert": frozenset(get_args(Alert.__value__)),
}
_IDENTIFIERS = frozenset({"attempt_id", "root_id", "grant"})
NUMBERS: dict[str, tuple[int, int]] = {
    "port": (0, 65_535),
    "count": (1, 2**53),
    "status": (0, 999),
    "bytes_up": (0, 2**63 - 1),
    "bytes_down": (0, 2**63 - 1),
    "duration_ms": (0, 2**53),
}
_ALWAYS = ("event", "sandbox", "attempt_id", "root_id")
NEEDED: dict[str, tuple[str, ...]] = {
    "decision": ("layer", "verdict", "reason"),
    "end": ("layer", "reason"),
    "lost": ("count",),
    "sandbox": (),
    "policy": (),
    "approval": ("detail",),
    "alert": ("alert",),
    "head": ("key",),
    "journal": ("detail",),
}


class BadRecord(Exception):
    """A record that no sound worker sends; nothing of its batch is written."""


def admit(fields: Mapping[str, Any], sandboxes: Collection[str] | None, now: float) -> dict[str, Any]:
    """Return the record, fit to be numbered and written; raises BadRecord.

    `sandboxes` are those of the worker that sent it; None marks control's own records, which alone may tell
    of a sandbox's or a policy's life. `now` is Unix seconds; a time further from it than CLOCK_TOLERANCE is
    replaced.
    """
    unknown = fields.keys() - _KNOWN
    if unknown:
        raise BadRecord(f"unknown field {clip(min(map(str, unknown)), 64)!r}")
    if fields.get("schema", SCHEMA) != SCHEMA or fields.get("seq") is not None:
        raise BadRecord("schema and seq are control's to say")
    if "prev" in fields or "signature" in fields:
        raise BadRecord("what stands before a line is the chain's to say")
    admitted: dict[str, Any] = {"time": _time(fields.get("time"), now), "schema": SCHEMA, "seq": None}
    for name, value in fields.items():
        if value is not None and name not in admitted:
            admitted[name] = _CHECKS[name](name, value)
    _check_whole(admitted, sandboxes)
    return admitted


def encode(fields: dict[str, Any], limit: int) -> bytes:
    """Return the line of an admitted record in at most `limit` bytes, its texts cut shorter as needed.

    Raises BadRecord when even its shortest form does not fit.
    """
    line = to_line(fields)
    shorter = TEXT_LIMIT
    while len(line) > limit:
        shorter //= 2
        if shorter < 32:
            raise BadRecord(f"a record of {len(line)} bytes")
        line = to_line({name: _shorten(value, shorter) for name, value in fields.items()})
    return line


def _shorten(value: Any, limit: int) -> Any:
    if isinstance(value, dict):
        return {clip(key, limit): clip(text, limit) for key, text in value.items()}
    if not isinstance(value, str) or len(value) <= limit:
        return value
    mark = _MARK.search(value) if len(value) > TEXT_LIMIT else None
    return value[:limit] + mark.group() if mark else clip(value, limit)


def _check_whole(record: Mapping[str, Any], sandboxes: Collection[str] | None) -> None:
    for name in _ALWAYS:
        if name not in record:
            raise BadRecord(f"no {name}")
    event = record["event"]
    for name in NEEDED[event]:
        if name not in record:
            raise BadRecord(f"{event} without {name}")
    if sandboxes is None:
        return
    if event not in _WORKER_EVENTS:
        raise BadRecord(f"event {event} from a worker")
    if not _CONTROL_FIELDS.isdisjoint(record):
        raise BadRecord("a field that is control's alone")
    if record["sandbox"] not in sandboxes:
        raise BadRecord("a record for another worker's sandbox")


def _time(value: Any, now: float) -> str:
    if isinstance(value, str) and _TIME.match(value):
        earliest, latest = _times_near(int(now))
        if earliest <= value <= latest:  # one format and one zone: text order is time order
            return value
    elif value is not None:
        raise BadRecord("time is not RFC 3339 UTC in microseconds")
    return timestamp(now)


@lru_cache(maxsize=2)
def _times_near(second: int) -> tuple[str, str]:
    return timestamp(second - CLOCK_TOLERANCE), timestamp(second + CLOCK_TOLERANCE)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{name} is not text")
    return value if value.isascii() and len(value) <= _CLIPPED_LIMIT else _clip_once(value)


def _clip_once(value: str) -> str:
    # clip() also makes lone surrogates harmless; what was clipped at its source keeps its own mark
    return clip(value, _CLIPPED_LIMIT if len(value) <= _CLIPPED_LIMIT else TEXT_LIMIT)


def _closed(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in CLOSED[name]:
        raise BadRecord(f"{name} is none of its values")
    return str(value)


def _identifier(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _IDENTIFIER.match(value):
        raise BadRecord(f"{name} is no identifier")
    return value


def _number(name: str, value: Any) -> int | float:
    low, high = NUMBERS[name]
    whole = name != "duration_ms"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise BadRecord(f"{name} is not a number")
    if not low <= value <= high:  # which NaN and the infinities are not either
        raise BadRecord(f"{name} is out of range")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRecord(f"{name} is neither true nor false")
    return value


def _labels(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > LABEL_COUNT:
        raise BadRecord(f"{name} is no mapping of at most {LABEL_COUNT}")
    labels: dict[str, str] = {}
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str) or len(key) > LABEL_KEY_LIMIT:
            raise BadRecord(f"{name} is not text to text")
        labels[clip(key)] = clip(text, LABEL_VALUE_LIMIT)
    return labels


def _check_of(name: str) -> Callable[[str, Any], Any]:
    if name in CLOSED:
        return _closed
    if name in NUMBERS:
        return _number
    if name in _IDENTIFIERS:
        return _identifier
    return {"labels": _labels, "would_deny": _flag, "further": _flag}.get(name, _text)


_KNOWN = frozenset(FIELDS)
_CHECKS = {name: _check_of(name) for name in FIELDS if name not in {"time", "schema", "seq", *_CHAINED}}
