"""The forms of `egressd log` beside the plain table: folded, summed, exported, followed; and `egressd top`."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from egressd.cli import log, log_source, top
from egressd.cli.folding import folded
from egressd.cli.log_summary import Sums
from egressd.cli.top import picture
from egressd.journal.query import Query
from egressd.journal.reader import Line
from egressd.journal.record import FIELDS, Record, timestamp, to_line
from egressd.journal.rotation import Terms
from egressd.journal.writer import Journal

ROOT = Path(__file__).resolve().parents[2]

app = typer.Typer()
log.register(app)
top.register(app)


def a_record(event: str = "decision", **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "event": event,
        "sandbox": "box",
        "attempt_id": "a",
        "root_id": "a",
        "layer": "request",
    }
    return Record(**usual | fields).as_dict()


def allowed(number: int, host: str = "pypi.org", **fields: Any) -> dict[str, Any]:
    more: dict[str, Any] = {
        "verdict": "allow",
        "reason": "rule",
        "host": host,
        "method": "GET",
        "scheme": "https",
    }
    more["path"] = f"/{number}"
    return a_record(attempt_id=f"a{number}", **more | fields)


def ended(number: int, host: str = "pypi.org", **fields: Any) -> dict[str, Any]:
    more: dict[str, Any] = {
        "reason": "completed",
        "host": host,
        "status": 200,
        "bytes_up": 10,
        "bytes_down": 2000,
    }
    return a_record("end", attempt_id=f"a{number}", duration_ms=5.0, **more | fields)


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(map(to_line, records)))
    return path


def run(*args: str | Path, verb: str = "log") -> Result:
    return CliRunner().invoke(app, [verb, *map(str, args)])


def rows(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.stderr
    return [[cell.strip() for cell in line.split("  ") if cell] for line in result.stdout.splitlines()]


# --- folding


def test_an_attempt_and_its_end_are_one_row(tmp_path: Path) -> None:
    file = write(tmp_path / "j", allowed(1), allowed(2), ended(2, reason="upstream_closed"), ended(1))
    told = rows(run(file))[1:]
    assert [row[4:6] for row in told] == [
        ["GET https://pypi.org/1 (200, up 10 B, down 2 kB, 5 ms)", "rule"],
        ["GET https://pypi.org/2 (200, up 10 B, down 2 kB, 5 ms)", "rule, then upstream_closed"],
    ]
    assert len(rows(run(file, "--each"))) == 5


def test_a_refused_attempt_is_one_row_whether_or_not_it_has_an_end(tmp_path: Path) -> None:
    file = write(
        tmp_path / "j",
        allowed(1, verdict="deny", status=403),
        ended(1, status=403),
        allowed(2, verdict="deny"),
    )
    assert [row[3:5] for row in rows(run(file))[1:]] == [
        ["deny", "GET https://pypi.org/1"],
        ["deny", "GET https://pypi.org/2"],
    ]


def test_an_end_comes_with_its_decision_where_a_term_asks_for_what_ends_do_not_say(tmp_path: Path) -> None:
    file = write(tmp_path / "j", allowed(1), ended(1), allowed(2, verdict="deny"), ended(3))
    assert [row[4] for row in rows(run(file, "verdict:allow"))[1:]] == [
        "GET https://pypi.org/1 (200, up 10 B, down 2 kB, 5 ms)"
    ]


def test_an_end_whose_decision_is_not_there_stands_alone(tmp_path: Path) -> None:
    assert rows(run(write(tmp_path / "j", ended(1))))[1][3] == "end"


def test_what_never_ends_holds_up_no_more_than_a_bound() -> None:
    class Endless:
        """Lines without end, after the first of which nothing ends."""

        seen = 0

        def __iter__(self) -> Iterator[Line]:
            while True:
                self.seen += 1
                yield Line(allowed(self.seen), b"")

    endless = Endless()
    assert next(folded(endless, Query()))["attempt_id"] == "a1"
    assert endless.seen < 30_000


NAMES = st.sampled_from(["event", "attempt_id", "verdict", "layer", "reason", "status", "host", "labels"])
TEXTS = st.sampled_from(["decision", "end", "allow", "request", "a", "b"])


@given(
    st.lists(st.dictionaries(NAMES, TEXTS | st.none() | st.lists(st.text(max_size=1)) | st.just({"a": {}})))
)
def test_folding_and_summing_are_total(records: list[dict[str, Any]]) -> None:
    shown = list(folded([Line(fields, b"") for fields in records], Query()))
    assert len(shown) <= len(records)
    sums = Sums()
    for fields in records:
        sums.feed(fields)
    assert picture(records, 60, (80, 24))


# --- rotated files, terms and indexes


def test_rotated_files_are_read_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", state=tmp_path / "state", terms=Terms(max_size=1))
    for number in range(3):
        journal.append([allowed(number)])
    journal.close()
    told = [json.loads(line) for line in run(tmp_path / "j", "--json", "event:decision").stdout.splitlines()]
    assert [record["seq"] for record in told] == [1, 3, 5]


@pytest.mark.parametrize(
    "flags", [[], ["--index"], ["--no-index"]], ids=["as usual", "by an index", "without one"]
)
def test_terms_and_options_ask_together(tmp_path: Path, flags: list[str]) -> None:
    file = write(
        tmp_path / "j", allowed(1), allowed(2, "x.io"), allowed(3, "y.io", verdict="deny"), ended(2, "x.io")
    )
    told = rows(run(file, "host:*.io", "--verdict", "allow", *flags))[1:]
    assert [row[4] for row in told] == ["GET https://x.io/2 (200, up 10 B, down 2 kB, 5 ms)"]
    assert (tmp_path / "j.d").exists() == (flags == ["--index"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["verdict:maybe"], "verdict:maybe: one of allow"),
        (["one", "two"], "two: one journal at a time"),
        (["--csv", "--json"], "exclude each other"),
        (["--follow", "--summary"], "exclude each other"),
    ],
)
def test_what_cannot_be_asked_is_status_2(args: list[str], words: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


# --- sums


@pytest.mark.parametrize("flags", [[], ["--index"]], ids=["by reading", "by an index"])
def test_sums_are_by_sandbox_and_registered_domain(tmp_path: Path, flags: list[str]) -> None:
    hour = "2027-01-15T08:00:00.000000Z"
    file = write(
        tmp_path / "j",
        *(allowed(n, f"{n}.files.example.co.uk", time=hour) for n in range(3)),
        a_record("end", attempt_id="c0", layer="connection", host="0.files.example.co.uk", time=hour),
        ended(0, "0.files.example.co.uk", time=hour),
        allowed(5, "www.example.co.uk", verdict="deny", count=40, time=hour, labels={"name": "web"}),
        allowed(6, "192.0.2.1", verdict="deny", sandbox="other", time=hour),
        a_record("sandbox", detail="gone"),
    )
    assert rows(run(file, "--summary", *flags))[1:] == [
        ["box", "name=web", "example.co.uk", "3", "40", "0", "10 B", "2 kB", "2027-01-15T08:00:00"],
        ["other", "192.0.2.1", "0", "1", "0", "0 B", "0 B", "2027-01-15T08:00:00"],
    ]
    assert [row[2] for row in rows(run(file, "--summary", "verdict:deny", "sandbox:other", *flags))[1:]] == [
        "0"
    ]


@pytest.mark.parametrize("flags", [[], ["--index"]], ids=["by reading", "by an index"])
@pytest.mark.parametrize("words", [[], ["since:9d"]], ids=["of all", "of some"])
def test_sums_of_what_no_wire_carries_are_no_error(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    now = timestamp(time.time())
    most = [ended(n, bytes_up=2**63 - 1, bytes_down=2**60, time=now) for n in range(20)]
    assert rows(run(write(tmp_path / "j", *most), "--summary", *words, *flags))[1][:3] == [
        "box",
        "pypi.org",
        "0",
    ]


# --- export


def test_csv_has_every_field_and_no_cell_that_a_spreadsheet_would_run(tmp_path: Path) -> None:
    record = allowed(1, path="=HYPERLINK(1)\x1b[2J", labels={"name": 'a,"b'})
    told = list(csv.DictReader(io.StringIO(run(write(tmp_path / "j", record), "--csv").stdout)))
    assert tuple(told[0]) == FIELDS
    assert told[0]["path"] == "'=HYPERLINK(1)\\x1b[2J"
    assert json.loads(told[0]["labels"]) == {"name": 'a,"b'}
    assert told[0]["seq"] == ""


def test_ocsf_is_an_event_a_line(tmp_path: Path) -> None:
    told = run(
        write(tmp_path / "j", allowed(1), ended(1), allowed(2)), "--ocsf", "verdict:allow"
    ).stdout.splitlines()
    assert [json.loads(line)["http_request"]["url"]["path"] for line in told] == ["/1", "/2"]


# --- following


def test_following_prints_what_is_written_over_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, state=tmp_path / "state", terms=Terms(max_size=600))
    journal.append([allowed(1)])
    argv = [sys.executable, "-m", "egressd", "log", str(path), "--follow", "--json", "event:decision"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        assert process.stdout is not None
        try:
            for number in range(1, 5):
                line = process.stdout.readline()
                assert json.loads(line)["path"] == f"/{number}"
                journal.append([allowed(number + 1)])
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, 3)
        finally:
            watchdog.cancel()
            process.kill()
            journal.close()


# --- top


def now(**fields: Any) -> dict[str, Any]:
    return allowed(1, time=timestamp(time.time()), **fields)


def test_top_once_draws_the_last_while(tmp_path: Path) -> None:
    old = allowed(1, time=timestamp(time.time() - 3600))
    file = write(tmp_path / "j", old, now(), now(verdict="deny", reason="not_allowed", host="b.evil.com"))
    shown = run(file, "--once", "--window", "900", verb="top").stdout
    assert shown.startswith("2 attempts in 900 s (0.0/s), 50.0 % denied or asked for, 1 sandboxes")
    assert "evil.com" in shown
    assert "LATEST DENIALS" in shown
    assert shown.splitlines()[-1].endswith("box  deny  GET https://b.evil.com/1  not_allowed")


@given(st.dictionaries(st.sampled_from(FIELDS), st.text() | st.integers() | st.none(), min_size=1))
def test_no_control_character_reaches_the_terminal_from_top(fields: dict[str, Any]) -> None:
    records = [{"event": "decision", "verdict": "deny"} | fields]
    for line in picture(records, 60, (100, 30)):
        assert line.isprintable()


def test_top_fits_the_terminal() -> None:
    records = [now(host=f"h{n}.example{n}.com", verdict="deny") for n in range(100)]
    lines = picture(records, 60, (80, 24))
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)


def test_a_large_file_gets_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_source, "INDEX_FROM", 100)
    file = write(tmp_path / "j", allowed(1), allowed(2))
    assert len(rows(run(file, "path:/2"))) == 2
    assert os.listdir(tmp_path / "j.d") == ["j.index"]
