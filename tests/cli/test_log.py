"""`egressd log`: what reaches a person, a pipe and a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from egressd.cli import log
from egressd.cli.log_table import print_table
from egressd.cli.rows import printable, readable_size, row_of
from egressd.journal.record import FIELDS, Record, to_line

app = typer.Typer()
log.register(app)
app.callback()(lambda: None)


def a_decision(**fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"event": "decision", "sandbox": "box", "attempt_id": "a", "root_id": "a"}
    return Record(**usual | fields).as_dict()


STORY = [
    a_decision(
        layer="request",
        verdict="allow",
        reason="rule",
        rule="pypi",
        place="profiles/a.yaml:7",
        host="pypi.org",
        port=443,
        scheme="https",
        method="GET",
        path="/simple/",
        time="2027-01-15T08:00:00.123456Z",
    ),
    a_decision(
        layer="connection",
        verdict="deny",
        reason="ip_literal",
        sandbox="other",
        address="192.0.2.7",
        port=8443,
        time="2027-01-15T08:00:01.000000Z",
    ),
]


def write(path: Path, *records: Mapping[str, Any] | bytes) -> Path:
    path.write_bytes(b"".join(each if isinstance(each, bytes) else to_line(dict(each)) for each in records))
    return path


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write(tmp_path / "journal.jsonl", *STORY)


def run(*args: str | Path, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["log", *map(str, args)], input=stdin, env=env)


def test_the_table_is_plain_text_with_the_newest_last(journal: Path) -> None:
    result = run(journal)
    assert result.exit_code == 0
    assert [line.split("  ") for line in squeezed(result.stdout)] == [
        ["TIME (UTC)", "SANDBOX", "LAYER", "VERDICT", "WHAT", "REASON", "RULE", "COUNT"],
        ["2027-01-15T08:00:00.123Z", "box", "request", "allow", "GET https://pypi.org/simple/", "rule",
         "pypi profiles/a.yaml:7"],
        ["2027-01-15T08:00:01.000Z", "other", "connection", "deny", "tcp 192.0.2.7:8443", "ip_literal"],
    ]  # fmt: skip


def test_the_columns_stand_below_each_other(journal: Path) -> None:
    header, *rows = run(journal).stdout.splitlines()
    assert [row.index(cell) for row, cell in zip(rows, ("rule", "ip_literal"), strict=True)] == [
        header.index("REASON")
    ] * 2


def squeezed(shown: str) -> list[str]:
    return [re.sub(" {2,}", "  ", line) for line in shown.splitlines()]


@pytest.mark.parametrize(
    ("filters", "hosts"),
    [
        pytest.param([], 2, id="none"),
        pytest.param(["--sandbox", "box"], 1, id="a sandbox"),
        pytest.param(["--verdict", "deny"], 1, id="a verdict"),
        pytest.param(["--host", "PyPI.org."], 1, id="a host in another spelling"),
        pytest.param(["--host", "*.org"], 1, id="what is below a name"),
        pytest.param(["--since", "2027-01-15T08:00:00.5Z"], 1, id="a time"),
        pytest.param(["--sandbox", "box", "--verdict", "deny"], 0, id="nothing fits both"),
    ],
)
def test_filters_choose_the_lines(journal: Path, filters: list[str], hosts: int) -> None:
    result = run(journal, "--json", *filters)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == hosts


def test_json_prints_the_lines_as_they_are(journal: Path) -> None:
    assert run(journal, "--json").stdout_bytes == journal.read_bytes()


def test_an_empty_journal_is_no_error(tmp_path: Path) -> None:
    result = run(write(tmp_path / "empty"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_torn_lines_are_counted_on_stderr(tmp_path: Path) -> None:
    result = run(write(tmp_path / "torn", STORY[0], b'{"torn\n', STORY[1], b'{"se'))
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 3
    assert "2 torn or foreign lines were skipped" in result.stderr


def test_standard_input_is_read_where_the_file_is_a_dash(journal: Path) -> None:
    assert run("-", "--json", stdin=journal.read_bytes()).stdout_bytes == journal.read_bytes()


def test_without_a_file_the_configured_journal_is_read(journal: Path) -> None:
    assert run("--json", env={"EGRESSD_JOURNAL": str(journal)}).stdout_bytes == journal.read_bytes()


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        pytest.param(["--host", "a b"], {}, "--host 'a b': no host", id="a host that is none"),
        pytest.param(["--since", "soon"], {}, "--since 'soon': no age", id="a time that is none"),
        pytest.param(["--verdict", "maybe"], {}, "verdict", id="a verdict that is none"),
        pytest.param(["/nowhere/j"], {}, "/nowhere/j: there is no such file", id="no file"),
        pytest.param(["/"], {}, "/: ", id="a directory"),
        pytest.param(["/dev/null"], {}, "no regular file", id="a device"),
        pytest.param([], {"EGRESSD_JOURNAL": "-"}, "egressd log -", id="a journal that went to stdout"),
        pytest.param([], {"EGRESSD_JOURNAL": "/nowhere/j"}, "hint: ", id="a journal not made yet"),
        pytest.param([], {"EGRESSD_DNS_DENIED": "?"}, "EGRESSD_DNS_DENIED", id="a bad configuration"),
    ],
)
def test_bad_input_is_status_2_and_said_on_stderr(args: list[str], env: dict[str, str], words: str) -> None:
    result = run(*args, env=env)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert run(tmp_path / "fifo").exit_code == 2


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    big = write(tmp_path / "big", *(STORY * 20_000))
    program = f"from egressd.cli import log; log.log([{str(big)!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(30) == 0


def test_a_locale_without_a_character_gets_its_escape(tmp_path: Path) -> None:
    file = write(tmp_path / "j", a_decision(layer="dns", host_raw="中", qtype="A"))
    ran = subprocess.run(
        [sys.executable, "-c", f"from egressd.cli import log; log.log([{str(file)!r}])"],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=True,
    )
    assert b"DNS A \\u4e2d" in ran.stdout


# --- what a terminal gets


def on_a_terminal(*records: dict[str, Any], width: int = 120) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system="standard", highlight=False)
    print_table(map(row_of, records), console)
    return out.getvalue()


def test_on_a_terminal_verdicts_have_colours_and_long_cells_are_cut() -> None:
    long = a_decision(
        layer="request", verdict="deny", reason="not_allowed", host="a.example", path="/x" * 200
    )
    shown = on_a_terminal(STORY[0], long)
    assert "\x1b[32mallow\x1b[0m" in shown
    assert "\x1b[31mdeny\x1b[0m" in shown
    assert all(len(line) <= 120 for line in printable_lines(shown))
    assert "…" in shown


def printable_lines(shown: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()


HOSTILE = st.text(st.characters(exclude_categories=())) | st.text(
    "\x1b\x9b]8;m\x07\r\n\x7f\u202e\u2028\u0301[31"
)


@given(st.dictionaries(st.sampled_from(FIELDS), HOSTILE))
def test_no_control_character_of_a_record_reaches_a_terminal(fields: dict[str, str]) -> None:
    shown = "\n".join(printable_lines(on_a_terminal(fields)))
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert len(shown.splitlines()) == 2


@given(
    st.dictionaries(
        st.sampled_from(FIELDS),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=4,
        ),
    )
)
def test_a_row_is_made_of_whatever_the_fields_hold(fields: dict[str, Any]) -> None:
    assert all(cell.isprintable() for cell in row_of(fields))


def test_a_foreign_line_with_raw_bytes_is_made_plain_in_json_too(tmp_path: Path) -> None:
    raw = '{"sandbox":"\x7f\u009b31m\u202e"}\n'.encode()
    printed = run(write(tmp_path / "foreign", raw), "--json").stdout_bytes
    assert printed.isascii()
    assert printed.decode()[:-1].isprintable()
    assert json.loads(printed) == json.loads(raw)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"layer": "dns", "host": "a.example", "qtype": "AAAA"}, "DNS AAAA a.example"),
        ({"layer": "dns", "host_raw": "\\xff"}, "DNS ? \\xff"),
        ({"layer": "connection", "host": "a.example", "port": 443}, "tcp a.example:443"),
        ({"layer": "connection", "address": "2001:db8::1", "port": 80}, "tcp [2001:db8::1]:80"),
        ({"layer": "packet", "protocol": "udp", "address": "192.0.2.1", "port": 443}, "udp 192.0.2.1:443"),
        ({"layer": "packet", "protocol": "icmp", "address": "192.0.2.1"}, "icmp 192.0.2.1"),
        (
            {"layer": "request", "method": "GET", "scheme": "http", "host": "a.example", "port": 80, "path": "/"},
            "GET http://a.example/",
        ),
        (
            {"layer": "request", "method": "GET", "scheme": "https", "host": "[::1]", "port": 80, "path": "/"},
            "GET https://[::1]:80/",
        ),
        (
            {"layer": "request", "method": "GET", "scheme": "https", "host": "a", "path": "/", "query": ""},
            "GET https://a/?",
        ),
        ({"event": "lost", "detail": "dropped by the firewall"}, "dropped by the firewall"),
        (
            {"event": "end", "layer": "connection", "host": "a.example", "port": 443, "bytes_up": 10,
             "bytes_down": 123_456, "duration_ms": 1234.5, "status": 200},
            "tcp a.example:443 (200, up 10 B, down 123 kB, 1.23 s)",
        ),
    ],
)  # fmt: skip
def test_what_was_tried_is_said_in_one_cell(fields: dict[str, Any], what: str) -> None:
    assert row_of({"event": "decision"} | fields).what == what


def test_what_only_observe_mode_let_through_does_not_look_allowed() -> None:
    assert row_of(a_decision(verdict="allow", would_deny=True)).verdict == "would-deny"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("grün 中", "grün 中"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("e\u0301", "e\\u0301"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (48_211, "48.2 kB"),
        (999_999, "1 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_readable_size(count: int, text: str) -> None:
    assert readable_size(count) == text
