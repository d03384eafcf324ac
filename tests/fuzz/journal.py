"""Records that a worker sends, and lines of a journal that somebody has had his hands on."""

from __future__ import annotations

import io
import json
from typing import Any

from egressd.journal.admission import BadRecord, admit, encode
from egressd.journal.reader import LINE_LIMIT, Tally, parse_host_filter, parse_since, read
from tests.fuzz.target import JUNK, Target, offsets_of

_NOW = 1_900_000_000.0
_LIMIT = 16 * 1024


def check(data: bytes) -> None:
    """Hold every law of records and lines."""
    tally = Tally()
    lines = list(read(io.BytesIO(data), tally=tally))
    assert len(lines) == tally.records <= data.count(b"\n") + 1
    for line in lines:
        assert b"\n" not in line.raw
        assert len(line.raw) <= LINE_LIMIT
        _check_record(line.fields)
    for junk in JUNK:
        more = list(read(io.BytesIO(data + b"\n" + junk)))
        assert more[: len(lines)] == lines, "what lies behind a line changes it"
    for at in offsets_of(data)[:8]:
        cut = list(read(io.BytesIO(data[:at])))
        assert len(cut) <= len(lines) + 1
    text = data.decode("utf-8", "replace")
    parse_since(text, _NOW)
    parse_host_filter(text)


def _check_record(fields: dict[str, Any]) -> None:
    try:
        admitted = admit(fields, {"sb-1"}, _NOW)
        line = encode(admitted, _LIMIT)
    except BadRecord as error:
        if len(str(error)) > 400:
            raise AssertionError("a refusal repeats what was sent") from error
        return
    assert len(line) <= _LIMIT
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1, "a record is more than one line"
    again = json.loads(line)
    assert (again["sandbox"], again["schema"]) == ("sb-1", 1)
    assert again["event"] in ("decision", "end", "lost")
    assert again["seq"] is None, "a worker numbers its own lines"
    (only,) = read(io.BytesIO(line))
    assert only.fields == again


def _line(**fields: Any) -> bytes:
    base = {
        "event": "decision",
        "sandbox": "sb-1",
        "attempt_id": "a1",
        "root_id": "a1",
        "layer": "request",
        "verdict": "deny",
        "reason": "not_allowed",
    }
    return json.dumps(base | fields).encode() + b"\n"


TARGET = Target(
    "journal",
    check,
    lambda data: list(read(io.BytesIO(data))),
    seeds=(
        _line(),
        _line(
            host="a.test",
            port=443,
            labels={"team": "x"},
            path="/a\u2028b",
            time="2030-03-17T17:46:40.000000Z",
        ),
        _line(event="end", status=200, bytes_up=1, bytes_down=2, duration_ms=0.5),
        _line(event="lost", count=3) + _line(sandbox="sb-2"),
        _line(path="x" * 3000, host_raw="\ud800"),
        b'{"event": "decision"',
        b"[1]\n{}\n",
        b"30m",
        b"2030-01-31T09:30:00Z",
        b"*.example.com",
    ),
    words=(
        b'"event": "policy"',
        b'"sandbox": "sb-2"',
        b'"seq": 1',
        b'"schema": 2',
        b"null",
        b"true",
        b"1e999",
        b"NaN",
        b"-1",
        b"\\n",
        b"\\ud800",
        b"\n",
        b"\\u0000",
        b'"labels": {}',
        b"[" * 40,
        b'"time": ',
        b"{",
        b"}",
        b'"',
        b",",
        b"9" * 30,
    ),
    most=5000,
)
