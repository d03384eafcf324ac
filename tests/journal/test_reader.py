"""Reading a journal back, whatever has become of it."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.journal.reader import (
    LINE_LIMIT,
    BadFilter,
    Filter,
    HostFilter,
    Tally,
    parse_host_filter,
    parse_since,
    read,
)
from egressd.journal.record import timestamp, to_line

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


def found(content: bytes, wanted: Filter | None = None) -> tuple[list[dict[str, Any]], Tally]:
    tally = Tally()
    return [line.fields for line in read(io.BytesIO(content), wanted, tally)], tally


@pytest.mark.parametrize(
    ("content", "records", "torn"),
    [
        pytest.param(b"", [], 0, id="an empty file"),
        pytest.param(b'{"seq":1}\n{"seq":2}\n', [1, 2], 0, id="whole lines"),
        pytest.param(b'{"seq":1}\n{"se', [1], 1, id="a torn last line"),
        pytest.param(b'{"seq":1}\n{"se\n{"seq":3}\n', [1, 3], 1, id="a torn line in the middle"),
        pytest.param(b'{"seq":1}\n{"seq":2}', [1, 2], 0, id="a last line that lacks only its newline"),
        pytest.param(b'{"seq":1}\n\n{"seq":2}\n', [1, 2], 0, id="an empty line, left by a recovery"),
        pytest.param(b"\0\0\0\n[1]\n7\n\xff\xfe\n", [], 4, id="lines that are no records"),
        pytest.param(b"[" * 60_000 + b'\n{"seq":2}\n', [2], 1, id="a line nested deeper than any stack"),
        pytest.param(b'{"seq":' + b"9" * 5000 + b'}\n{"seq":2}\n', [2], 1, id="a number of 5,000 digits"),
        pytest.param(b'{"seq":"' + b"x" * 300_000 + b'"}\n{"seq":2}\n', [2], 1, id="a line that is too long"),
        pytest.param(b"x" * (LINE_LIMIT + 1) + b'\n{"seq":2}\n', [2], 1, id="a line too long by one byte"),
        pytest.param(b"x" * 300_000, [], 1, id="one endless line"),
    ],
)
def test_what_is_whole_is_read_and_what_is_torn_is_counted(
    content: bytes, records: list[int], torn: int
) -> None:
    fields, tally = found(content)
    assert [record["seq"] for record in fields] == records
    assert (tally.records, tally.torn) == (len(records), torn)


@given(st.lists(st.binary(max_size=40)))
def test_reading_is_total(lines: list[bytes]) -> None:
    found(b"\n".join(lines))


RECORDS: list[dict[str, Any]] = [
    {"time": timestamp(NOW - 7200), "sandbox": "a", "verdict": "allow", "host": "api.example.com"},
    {"time": timestamp(NOW - 3600), "sandbox": "b", "verdict": "deny", "host": "example.com"},
    {"time": timestamp(NOW - 60), "sandbox": "a", "verdict": "deny", "host": "[2001:db8::1]"},
    {
        "time": timestamp(NOW - 1),
        "sandbox": "a",
        "event": "end",
        "address": "192.0.2.7",
        "host": "badexample.com",
    },
    {"time": 7, "sandbox": ["a"], "verdict": {}, "host": 9},
]


@pytest.mark.parametrize(
    ("wanted", "indexes"),
    [
        pytest.param(Filter(), [0, 1, 2, 3, 4], id="no filter"),
        pytest.param(Filter(sandbox="a"), [0, 2, 3], id="a sandbox"),
        pytest.param(Filter(verdict="deny"), [1, 2], id="a verdict"),
        pytest.param(Filter(sandbox="a", verdict="deny"), [2], id="both at once"),
        pytest.param(Filter(host=HostFilter("example.com")), [1], id="a host and nothing below it"),
        pytest.param(
            Filter(host=HostFilter(".example.com", below=True)), [0], id="what is below a host, not the host"
        ),
        pytest.param(Filter(host=HostFilter("2001:db8::1")), [2], id="an IPv6 host, in brackets in a record"),
        pytest.param(Filter(host=HostFilter("192.0.2.7")), [3], id="an address that was dialled"),
        pytest.param(Filter(since=timestamp(NOW - 3600)), [1, 2, 3], id="since a time, that included"),
    ],
)
def test_filters(wanted: Filter, indexes: list[int]) -> None:
    fields, tally = found(b"".join(to_line(record) for record in RECORDS), wanted)
    assert fields == [RECORDS[index] for index in indexes]
    assert tally.records == len(RECORDS)


@pytest.mark.parametrize(
    ("text", "filter_"),
    [
        ("example.com", HostFilter("example.com")),
        ("EXAMPLE.com.", HostFilter("example.com")),
        ("localhost", HostFilter("localhost")),
        ("*.Example.com", HostFilter(".example.com", below=True)),
        ("*.com", HostFilter(".com", below=True)),
        ("192.0.2.1", HostFilter("192.0.2.1")),
        ("0xc0000201", HostFilter("192.0.2.1")),
        ("2001:DB8::1", HostFilter("2001:db8::1")),
        ("[2001:db8::1]", HostFilter("2001:db8::1")),
    ],
)
def test_a_host_filter_is_read_by_the_one_parser_of_names(text: str, filter_: HostFilter) -> None:
    assert parse_host_filter(text) == filter_


@pytest.mark.parametrize(
    "text", ["", "*", "*.", "a b", "a*.example.com", "*.192.0.2.1", "exämple.com", "http://a"]
)
def test_a_host_filter_that_is_no_host_is_refused(text: str) -> None:
    assert isinstance(parse_host_filter(text), BadFilter)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("90s", "2027-01-15T07:58:30.000000Z"),
        ("30m", "2027-01-15T07:30:00.000000Z"),
        ("2h", "2027-01-15T06:00:00.000000Z"),
        ("7d", "2027-01-08T08:00:00.000000Z"),
        ("1w", "2027-01-08T08:00:00.000000Z"),
        ("2027-01-01", "2027-01-01T00:00:00.000000Z"),
        ("2027-01-01T10:00:00Z", "2027-01-01T10:00:00.000000Z"),
        ("2027-01-01t10:00:00.5z", "2027-01-01T10:00:00.500000Z"),
        ("2027-01-01 10:00", "2027-01-01T10:00:00.000000Z"),
        ("2027-01-01T10:00:00+02:00", "2027-01-01T08:00:00.000000Z"),
    ],
)
def test_since_is_an_age_or_a_time(text: str, time: str) -> None:
    assert parse_since(text, NOW) == time


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "h",
        "-2h",
        "2 h",
        "2y",
        "1.5h",
        "٢h",
        "999999w",
        "2027-13-01",
        "2027-02-30",
        "0001-01-01T00:00:00+14:00",
    ],
)
def test_since_that_is_neither_is_refused(text: str) -> None:
    assert isinstance(parse_since(text, NOW), BadFilter)


@given(st.text())
def test_filters_are_total(text: str) -> None:
    parse_host_filter(text)
    parse_since(text, NOW)


class Endless(io.RawIOBase):
    """A journal of `count` lines that exists only while it is read."""

    def __init__(self, count: int) -> None:
        self.lines: Iterator[bytes] = (to_line({"seq": n, "host": "a" * 200}) for n in range(count))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        line = next(self.lines, b"")
        buffer[: len(line)] = line
        return len(line)


def test_a_big_file_is_read_in_flat_memory() -> None:
    tracemalloc.start()
    try:
        with io.BufferedReader(Endless(20_000)) as file:
            for line in read(file):
                assert line.fields["host"]
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_the_raw_line_is_what_stands_in_the_file() -> None:
    raw = b'{ "seq": 1,  "z": "\\u001b"}'
    (line,) = read(io.BytesIO(raw + b"\n"))
    assert line.raw == raw
    assert json.loads(raw) == line.fields
