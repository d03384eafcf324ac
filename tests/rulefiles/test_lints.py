from __future__ import annotations

import datetime as dt
import json
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from sarif_pydantic import Sarif

from egressd.policy.attempt import RequestAttempt
from egressd.policy.decide import decide
from egressd.rulefiles.lints import WHY, lint
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import LINTS, Code, Problem
from egressd.rulefiles.reports import as_github, as_sarif
from egressd.rulefiles.source import RuleSource
from tests.rulefiles.test_composition import NOW, attempts, load, sections

ROOT = Path(__file__).resolve().parent.parent.parent
TODAY = dt.date(2026, 12, 1)


def test_every_lint_says_why() -> None:
    assert set(WHY) == LINTS


def test_the_page_has_every_lint_with_its_reason() -> None:
    rows = [f"| `{code}` | {why} |" for code, why in WHY.items()]
    page = (ROOT / "docs" / "lints.md").read_text().splitlines()
    start = page.index("|---|---|") + 1
    assert page[start : start + len(rows)] == rows


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_called_shadowed_never_decides(data: st.DataObject) -> None:
    said = data.draw(sections())
    rules = load(organisation={"schema": 1}, profiles__p={"schema": 1, "profile": "p", **said})
    if not isinstance(rules, Rules):
        return
    dead = {
        problem.message.split("'")[1]
        for problem in lint(rules, TODAY)
        if problem.code in (Code.SHADOWED, Code.DUPLICATE_RULE)
    }
    denials = {entry.id for entry in rules.effective("p").entries if entry.effect == "deny"}
    for attempt in attempts(ambiguous=False):
        decision = decide(rules.compiled("p"), attempt, NOW)
        if decision.entry is None or decision.entry.id in denials:
            continue
        # an inspected connection is let in for any rule that might take a request on it
        if isinstance(attempt, RequestAttempt) or decision.treatment != "inspect":
            assert decision.entry.id not in dead, (attempt, decision)


PROBLEMS = [
    Problem("rules/a b.yaml", 3, 7, Code.UNKNOWN_KEY, "'method' is 100% wrong", "write `requests`"),
    Problem("rules/a,b:c.yaml", 1, 1, Code.WIDE_PORTS, "9 ports"),
]


def test_sarif_is_what_the_standard_says() -> None:
    log = json.loads(json.dumps(as_sarif(PROBLEMS, "1.0")))
    read = Sarif.model_validate(log)
    (run,) = read.runs
    assert [(each.rule_id, each.level) for each in run.results or []] == [
        ("unknown_key", "error"),
        ("wide_ports", "warning"),
    ]
    assert log["runs"][0]["results"][0]["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "rules/a%20b.yaml"},
        "region": {"startLine": 3, "startColumn": 7},
    }
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert [rules[each["ruleIndex"]]["id"] for each in log["runs"][0]["results"]] == [
        "unknown_key",
        "wide_ports",
    ]


def test_a_problem_is_one_workflow_command_whatever_it_holds() -> None:
    assert [as_github(problem) for problem in PROBLEMS] == [
        "::error file=rules/a b.yaml,line=3,col=7,title=egressd unknown_key"
        "::'method' is 100%25 wrong%0Ahint: write `requests`",
        "::warning file=rules/a%2Cb%3Ac.yaml,line=1,col=1,title=egressd wide_ports::9 ports",
    ]


def test_many_rules_are_looked_through_in_time() -> None:
    """100,000 hosts in 2,000 rules, as in the aim: generous, for other tests run beside this one."""
    entries = [
        {
            "id": f"r{n}",
            "hosts": [f"h{n}-{m}.example{n % 7}.com" for m in range(50)],
            "requests": ["GET /a/**"],
        }
        for n in range(2000)
    ]
    files = {
        "organisation.yaml": {"schema": 1, "owner": "o", "ceiling": {"allow": [{"public_web": "read"}]}},
        "profiles/p.yaml": {"schema": 1, "profile": "p", "owner": "o", "allow": entries},
    }
    source = RuleSource({path: json.dumps(value).encode() for path, value in files.items()})
    began = time.process_time()
    rules = load_source(source, now=NOW)
    assert isinstance(rules, Rules), str(rules)
    assert lint(rules, TODAY) == []
    assert time.process_time() - began < 30
