"""`egressd review` as people call it, in each of its forms."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app
from egressd.cli.review_forms import as_csv, as_html, as_text
from egressd.rulefiles.review import SECTIONS, Row, Use

HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m"
PROFILE = """schema: 1
profile: a
allow:
  - id: wild
    hosts: ["*.example.com"]
"""


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    made = tmp_path / "rules"
    (made / "profiles").mkdir(parents=True)
    (made / "organisation.yaml").write_text("schema: 1\nowner: security\n")
    (made / "profiles" / "a.yaml").write_text(PROFILE)
    return made


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["review", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_text_names_each_thing_with_its_place(rules: Path) -> None:
    status, out, _ = run("--rules", rules)
    assert status == 0
    assert out.splitlines() == [
        "Without an owner:",
        "  a (profiles/a.yaml:1) nobody can be asked about this file; in a",
        "Widest: what opens most, with points to sort by:",
        "  wild (profiles/a.yaml:4) 30: 1 wildcard, every path; in a",
        "which rules are unused is told by a journal: --journal FILE",
    ]
    assert run("--rules", rules, "--section", "expiring")[1].splitlines()[0] == "nothing to look at"


def test_a_journal_tells_what_is_unused(rules: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    used = {"event": "decision", "profile": "a", "rule": "wild", "verdict": "allow", "layer": "request"}
    journal.write_text("")
    found = json.loads(run("--rules", rules, "--journal", journal, "--format", "json")[1])
    assert [row["rule"] for row in found["rows"] if row["section"] == "unused"] == ["wild"]
    assert found["notes"][0].startswith("nothing was recorded since ")
    journal.write_text(json.dumps(used | {"time": "2999-01-01T00:00:00.000000Z"}) + "\n")
    status, out, _ = run("--rules", rules, "--journal", journal, "--section", "widest")
    assert (status, out.splitlines()[1].partition("; in a; ")[2]) == (0, "used once, last on 2999-01-01")
    journal.write_text(json.dumps(used | {"time": "2000-01-01T00:00:00.000000Z"}) + "\n")
    assert "unused" in run("--rules", rules, "--journal", journal, "--format", "csv")[1]


@pytest.mark.parametrize("words", [("--unused", "soon"), ("--section", "all"), ("--journal", "/nonexistent")])
def test_what_cannot_be_read_is_status_2(rules: Path, words: tuple[str, str]) -> None:
    assert run("--rules", rules, *words)[0] == 2


ROWS = [
    Row(section, HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, detail, Use(1, HOSTILE))
    for section, detail in zip(SECTIONS, (HOSTILE, "=1+1", "+1", "@x", "-1"), strict=True)
]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_the_page_runs_nothing_and_loads_nothing() -> None:
    page = as_html(ROWS, [HOSTILE], HOSTILE)
    tags = _Tags()
    tags.feed(page)
    assert not {"script", "link", "img", "iframe", "a", "form", "object"} & set(tags.seen)
    assert not [name for name in tags.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert "\x1b" not in page
    assert not re.search(r"url\(|@import|https?:", page)
    assert "default-src &#x27;none&#x27;" in page


def test_no_cell_of_the_table_is_a_formula() -> None:
    read = list(csv.reader(io.StringIO(as_csv(ROWS))))
    assert len(read) == len(ROWS) + 1
    assert not [cell for row in read for cell in row if cell.startswith(("=", "+", "-", "@"))]
    assert read[2][5] == "'=1+1"


def test_every_line_of_the_text_is_printable() -> None:
    assert all(line.isprintable() for line in as_text(ROWS, [HOSTILE]))
