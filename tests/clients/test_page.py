"""docs/clients.md: every client is in it, and it reads back as what was measured."""

from __future__ import annotations

import pytest

from tests.clients import page
from tests.clients.catalogue import CLIENTS, Client, Use
from tests.clients.ground import ROOT, Outcome, Ran

SENTENCE = (
    "egressd: denied: no rule of this sandbox allows this destination: a.example:443 (reason not_allowed)"
)
PAGE = ROOT / "docs/clients.md"


def ran(output: str, status: int = 1, denied: tuple[str, ...] = ("not_allowed",)) -> Ran:
    return Ran("tool go", status, output, 0.25, denied)


@pytest.mark.parametrize(
    ("output", "readable"),
    [
        pytest.param(f"tool: 403 {SENTENCE}\n", "yes", id="the sentence"),
        pytest.param(
            "destination: a.example:443 (reason\n   not_allowed)\n", "yes", id="the sentence in two lines"
        ),
        pytest.param(SENTENCE.replace("not_allowed", "denied_by"), "no", id="the sentence of another reason"),
        pytest.param("tool: the server said 403 Forbidden\n", "status", id="the status"),
        pytest.param("[1:2/3:ERROR:handler.cc:403] failed\n", "no", id="a line's number is no status"),
        pytest.param("status = StatusCode.PERMISSION_DENIED\n", "status", id="gRPC's status"),
        pytest.param("no such package\n", "no", id="nothing"),
        pytest.param("", "no", id="silence"),
    ],
)
def test_readable_is_what_names_the_reason(output: str, readable: str) -> None:
    assert ran(output).readable == readable


def test_a_page_reads_back_as_it_was_measured() -> None:
    client = Client("a tool", (), "true", Use("tool come", "done"), Use("tool go"), helps="look twice")
    works = Outcome(client, "1.0", ran("done\n", 0, ()), ran(f"x | y\n{SENTENCE}\n", 7))
    text = page.render([works], {"another": "it is not installed"})
    assert page.read(text) == {"a tool": page.Row(works=True, readable="yes", status=7, tries=1)}
    assert "| another | | not tried: it is not installed |" in text


def test_a_failure_shows_in_the_table() -> None:
    client = Client("a tool", (), "true", Use("tool come", "done"), Use("tool go"))
    fails = Outcome(client, "1.0", ran("error: a | b\n", 0, ()), ran("nothing\n"))
    text = page.render([fails], {})
    assert "fails: `error: a \\| b`" in text
    assert page.read(text) == {"a tool": page.Row(works=False, readable="no", status=1, tries=1)}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("x" * 200 + f" {SENTENCE} " + "y" * 200, id="amid a long line"),
        pytest.param(
            f"Failed: 403 egressd: denied: no rule\nof this sandbox allows this\n{SENTENCE[60:]}", id="folded"
        ),
    ],
)
def test_a_long_line_keeps_the_reason(line: str) -> None:
    client = Client("a tool", (), "true", Use("tool come"), Use("tool go"))
    text = page.render([Outcome(client, "1.0", ran("", 0, ()), ran(line))], {})
    row = next(each for each in text.splitlines() if each.startswith("| a tool"))
    assert "egressd: denied" in row
    assert "(reason not_allowed)" in row
    assert len(row) < 330


def test_the_page_has_every_client_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    skipped = [line.split("|")[1].strip() for line in text.splitlines() if "| not tried: " in line]
    assert sorted([*page.read(text), *skipped]) == sorted(client.name for client in CLIENTS)
    assert skipped == [], "written on a machine that lacked a client"


def test_names_are_distinct() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
