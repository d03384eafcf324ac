"""The journal's reader: whole records out of a file that may hold torn lines, filtered, in flat memory.

What a line cannot prove it does not say: a line that is no JSON object of at most 64 KiB is counted as torn
and skipped, and a field of a wrong type matches no filter.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol

from egressd.journal.record import timestamp
from egressd.policy.names import BadHost, format_host, parse_host

LINE_LIMIT = 64 * 1024
"""Longest line that is read, bytes; four times what the writer makes of one record."""

OURS = b'{"time":"'
"""How every line begins that egressd wrote."""

_AGE = re.compile(r"(\d{1,6})(s|m|h|d|w)\Z", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIMESTAMP = re.compile(
    r"\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?([Zz]|[+-]\d\d:\d\d)?)?\Z", re.ASCII
)


@dataclass(frozen=True, slots=True)
class BadFilter:
    """A filter that means nothing; `problem` is a sentence for the person who wrote it."""

    problem: str


@dataclass(frozen=True, slots=True)
class HostFilter:
    """One host, or with `below` every name below it and never the name itself."""

    text: str
    below: bool = False

    def matches(self, fields: dict[str, Any]) -> bool:
        """Say whether a record is about this host; the address that was dialled is one of its names."""
        host = fields.get("host")
        if self.below:
            return isinstance(host, str) and host.endswith(self.text)
        return host in (self.text, f"[{self.text}]") or fields.get("address") == self.text


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are wanted; None wants all. `since` is a timestamp as records carry it."""

    sandbox: str | None = None
    verdict: Literal["allow", "deny", "ask"] | None = None
    host: HostFilter | None = None
    since: str | None = None

    def wants(self, fields: dict[str, Any]) -> bool:
        """Say whether a record passes every filter that is set."""
        if self.sandbox is not None and fields.get("sandbox") != self.sandbox:
            return False
        if self.verdict is not None and fields.get("verdict") != self.verdict:
            return False
        if self.since is not None:
            time = fields.get("time")
            # one format and one zone: text order is time order
            if not isinstance(time, str) or time < self.since:
                return False
        return self.host is None or self.host.matches(fields)


class Wanted(Protocol):
    """A test of records."""

    def wants(self, fields: dict[str, Any]) -> bool:
        """Say whether a record passes."""


@dataclass(slots=True)
class Tally:
    """What a reading met: whole records, and lines that were none."""

    records: int = 0
    torn: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One record: its fields and its line as it stands in the file, without the newline."""

    fields: dict[str, Any]
    raw: bytes


def read(
    file: BinaryIO,
    wanted: Wanted | None = None,
    tally: Tally | None = None,
    *,
    likely: Callable[[bytes], bool] | None = None,
) -> Iterator[Line]:
    """Yield the wanted records of a journal in the order of the file; total, raises OSError only.

    `tally` counts every record and torn line on the way, wanted or not. A line that egressd wrote and that is not `likely`,
    by its bytes, is not read further, nor counted.
    """
    tally = tally if tally is not None else Tally()
    for raw in _lines(file):
        if likely is not None and raw.startswith(OURS) and not likely(raw):
            continue
        line = parse_line(raw)
        if line is None:
            tally.torn += 1
            continue
        tally.records += 1
        if wanted is None or wanted.wants(line.fields):
            yield line


def parse_line(raw: bytes) -> Line | None:
    """Return the record of a line without its newline, None where it is none; total."""
    fields = _fields(raw)
    return Line(fields, raw) if fields is not None else None


def parse_host_filter(text: str) -> HostFilter | BadFilter:
    """Return the filter for `host`, `*.suffix` or an address, in any spelling that a request may use."""
    below = text.startswith("*.")
    host = parse_host(text[2:] if below else text, bracketed=text.startswith("["))
    if isinstance(host, BadHost):
        return BadFilter(f"no host, no *.suffix and no address: {host.detail}")
    if below and not isinstance(host, tuple):
        return BadFilter("nothing is below an address")
    if below:
        return HostFilter("." + format_host(host), below=True)
    return HostFilter(format_host(host) if isinstance(host, tuple) else str(host))


def parse_since(text: str, now: float) -> str | BadFilter:
    """Return the timestamp that `text` stands for: an age (`90s`, `30m`, `2h`, `7d`, `1w`) before `now`,
    Unix seconds, or a date or time as RFC 3339 writes it, UTC unless it says otherwise.
    """
    age = _AGE.match(text)
    try:
        if age:
            return timestamp(now - int(age[1]) * _SECONDS[age[2]])
        if _TIMESTAMP.match(text):
            moment = dt.datetime.fromisoformat(text.upper())
            aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
            return timestamp(aware.timestamp())
    except (ValueError, OverflowError):
        pass
    return BadFilter("no age such as 30m, 2h or 7d, and no time such as 2030-01-31T09:30:00Z")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their newline; one over the limit is yielded cut, and so is torn."""
    while line := file.readline(LINE_LIMIT + 1):
        if not line.endswith(b"\n") and len(line) > LINE_LIMIT:
            _skip(file.readline)
            yield line
        elif line != b"\n":
            yield line.rstrip(b"\n")


def _skip(readline: Callable[[int], bytes]) -> None:
    while rest := readline(LINE_LIMIT):
        if rest.endswith(b"\n"):
            return


def _fields(line: bytes) -> dict[str, Any] | None:
    if len(line) > LINE_LIMIT:
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
