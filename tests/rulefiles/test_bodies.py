"""`json:` of a rule in what is said of rules: narrowing, differences, printouts, explanations, tests."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from egressd.cli.explain import lines
from egressd.rulefiles.difference import difference
from egressd.rulefiles.explain import explain
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.printout import as_text, printout
from egressd.rulefiles.problems import Problems
from egressd.rulefiles.requestline import Asked, parse_request_line

NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC).timestamp()
RULE = """\
  - id: files
    hosts: [git.example.com]
    requests: ["POST /batch?"]
"""
LOOKS = RULE + "    json: {operation: download}\n"


def load(folder: Path, *, organisation: str = "", **profiles: str) -> Rules | Problems:
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    (folder / "organisation.yaml").write_text(f"schema: 1\n{organisation}")
    for name, text in profiles.items():
        (folder / "profiles" / f"{name}.yaml").write_text(f"schema: 1\nprofile: {name}\nowner: team\n{text}")
    return load_rules(folder, now=NOW)


def loaded(folder: Path, **profiles: str) -> Rules:
    rules = load(folder, **profiles)
    assert isinstance(rules, Rules), str(rules)
    return rules


@pytest.mark.parametrize(
    ("narrower", "holds"),
    [
        pytest.param("", True, id="the same body"),
        pytest.param("    json: {operation: download, ref: main}\n", True, id="one key more"),
        pytest.param("    json: {operation: [download, verify]}\n", False, id="one value more"),
        pytest.param("    json: {ref: main}\n", False, id="another key"),
        pytest.param(None, False, id="any body"),
    ],
)
def test_a_profile_that_extends_another_asks_for_as_much(
    tmp_path: Path, narrower: str | None, holds: bool
) -> None:
    text = "allow:\n" + (RULE if narrower is None else RULE + narrower if narrower else LOOKS)
    result = load(tmp_path, base=f"allow:\n{LOOKS}", mine=f"extends: base\n{text}")
    assert isinstance(result, Rules) is holds
    if isinstance(result, Problems):
        assert {problem.code.value for problem in result} == {"not_narrower"}


def test_a_ceiling_can_ask_for_bodies(tmp_path: Path) -> None:
    part = '    - {hosts: [git.example.com], requests: ["POST /batch?"], json: {operation: download}}\n'
    ceiling = f"ceiling:\n  allow:\n{part}"
    assert isinstance(load(tmp_path / "a", organisation=ceiling, mine=f"allow:\n{LOOKS}"), Rules)
    over = load(tmp_path / "b", organisation=ceiling, mine=f"allow:\n{RULE}")
    assert isinstance(over, Problems)
    assert {problem.code.value for problem in over} == {"over_ceiling"}
    assert '"POST /batch?" with any body on git.example.com' in str(over)


def test_a_difference_of_bodies_is_told(tmp_path: Path) -> None:
    before = loaded(tmp_path / "a", mine=f"allow:\n{LOOKS}")
    after = loaded(tmp_path / "b", mine=f"allow:\n{RULE}")
    (made,) = difference(before, after, NOW)
    assert [(row.kind, row.before, row.after) for row in made.rows] == [
        ("body", 'json: {"operation": "download"}', "any body")
    ]


def test_it_is_printed_and_explained(tmp_path: Path) -> None:
    rules = loaded(tmp_path, mine=f"allow:\n{LOOKS}")
    page = as_text(printout(rules.effective("mine"), rules.source))
    assert 'json: {"operation": "download"}' in page
    assert "profiles/mine.yaml:8" in page
    asked = parse_request_line("POST https://git.example.com/batch")
    assert isinstance(asked, Asked)
    explained = explain(rules, "mine", asked, NOW)
    assert 'if its body is JSON with {"operation": "download"}' in "\n".join(lines(explained, rules.root))
    assert explained.as_json()["body"] == {"operation": ["download"]}


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        ("{allow: 'POST https://git.example.com/batch', json: {operation: download}}", True),
        ("{allow: 'POST https://git.example.com/batch', json: {operation: upload}}", False),
        (
            "{deny: 'POST https://git.example.com/batch', json: {operation: upload}, reason: body_mismatch}",
            True,
        ),
        ("{deny: 'POST https://git.example.com/batch', json: {}, rule: files}", True),
        ("{allow: 'POST https://git.example.com/batch'}", True),
    ],
)
def test_a_test_can_give_a_body(tmp_path: Path, test: str, holds: bool) -> None:
    result = load(tmp_path, mine=f"allow:\n{LOOKS}tests:\n  - {test}\n")
    assert isinstance(result, Rules) is holds, str(result)
