"""What the demo expects is what `explain` says, and its list of moves is what the issue of a newcomer asks for."""

from __future__ import annotations

import io
import shutil
from typing import Any

import pytest
import typer
from rich.console import Console

from egressd.cli import demo
from egressd.cli.demo_table import DemoTable
from egressd.lab.demo.moves import FORBIDDEN, RULES, WELCOME, Move
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.shipped import shipped_rules


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    folder = tmp_path_factory.mktemp("demo") / "rules"
    with shipped_rules() as shipped:
        shutil.copytree(shipped, folder)
    (folder / "profiles" / "lab.yaml").write_text(RULES)
    loaded = load_rules(folder)
    assert isinstance(loaded, Rules), str(loaded)
    return loaded


def named(move: Move) -> str:
    return move.title


def test_there_are_enough_moves_and_each_has_its_name() -> None:
    assert len(WELCOME) >= 5
    assert len(FORBIDDEN) >= 14
    titles = [move.title for move in (*WELCOME, *FORBIDDEN)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("move", WELCOME, ids=named)
def test_the_rules_allow_what_the_demo_calls_welcome(rules: Rules, move: Move) -> None:
    expected = demo.expectation(rules, move)
    assert expected.allowed
    assert len(expected.records) == len(move.requests) > 0


@pytest.mark.parametrize("move", FORBIDDEN, ids=named)
def test_the_rules_refuse_what_the_demo_calls_forbidden(rules: Rules, move: Move) -> None:
    expected = demo.expectation(rules, move)
    assert not expected.allowed
    if move.ruling is None:
        assert expected.records[-1]["verdict"] == "deny"
    else:  # no REQUEST can say it; what a REQUEST does say, the rules allow, or the move would show nothing new
        assert all(demo.explained(rules, text)["verdict"] == "allow" for text in move.requests)


def test_an_expectation_is_the_record_that_must_be_found(rules: Rules) -> None:
    assert demo.explained(rules, "GET https://api.lab-origin.com/v1/models?page=2") == {
        "event": "decision", "layer": "request", "verdict": "allow", "reason": "rule", "rule": "api",
        "place": "profiles/lab.yaml:8", "scheme": "https", "host": "api.lab-origin.com", "port": 443, "method": "GET",
        "path": "/v1/models", "credential": None,
    }  # fmt: skip
    assert demo.explained(rules, "dns:x.evil-lab.com/TXT") == {
        "event": "decision", "layer": "dns", "verdict": "deny", "reason": "not_allowed", "rule": None, "place": None,
        "host": "x.evil-lab.com", "qtype": "TXT",
    }  # fmt: skip


def test_only_names_of_allowed_connections_may_be_asked_of_dns(rules: Rules) -> None:
    names = demo.needed_names(rules, (*WELCOME, *FORBIDDEN))
    assert "api.lab-origin.com" in names
    assert not any(
        "evil" in name or name in {"pastebin.com", "drop.lab-origin.com", "dns.google"} for name in names
    )


def test_missing_programs_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_PROGRAMS", {"no-such-program": "some-package", "sh": "dash"})
    with pytest.raises(typer.Exit) as ended:
        demo.demo()
    assert ended.value.exit_code == 3
    assert capsys.readouterr().err.endswith("hint: sudo apt-get install -y some-package\n")


ROW: dict[str, Any] = {
    "tried": "curl: [red]a thing[/]",
    "verdict": "deny",
    "law": None,
    "saw": "403 no rule",
    "record": {
        "layer": "request",
        "verdict": "deny",
        "reason": "denied_by_rule",
        "rule": "r",
        "place": "a.yaml:3",
    },
    "without": {"succeeded": True, "saw": "200 owned"},
    "surprises": [],
}


def shown(*rows: dict[str, Any], terminal: bool = False) -> str:
    table = DemoTable()
    page = io.StringIO()
    table._out = Console(file=page, width=160, force_terminal=terminal, highlight=False)
    for row in rows:
        table.add(row)
    return page.getvalue()


def test_a_row_says_what_was_tried_seen_and_written_down() -> None:
    header, row, *_ = shown(ROW).splitlines()
    assert header.split() == ["TRIED", "THE", "CLIENT", "SAW", "THE", "RECORD", "WITHOUT", "EGRESSD"]
    assert row.startswith("refused   curl: [red]a thing[/]"), "text is never markup"
    assert "403 no rule" in row
    assert "request: deny denied_by_rule, rule" in row
    assert row.rstrip().endswith("200 owned")


def test_a_surprise_cannot_be_overlooked() -> None:
    assert "SURPRISE" in shown({**ROW, "surprises": ["it succeeded"]})
    assert "! it succeeded" in shown({**ROW, "surprises": ["it succeeded"]})


def test_a_terminal_gets_colour_and_a_pipe_does_not() -> None:
    assert "\x1b[31mrefused" in shown(ROW, terminal=True)
    assert "\x1b" not in shown(ROW)
