"""A question as a rule for good: the patch applies, the rules with it pass their check, and what would not is not proposed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from egressd.control.approvals.proposal import NoProposal, propose
from egressd.control.approvals.subject import Case, assess, subject_of
from egressd.policy.attempt import RequestAttempt
from egressd.policy.decide import decide
from egressd.policy.grants import Scope
from egressd.rulefiles.load import Rules, load_rules

NOW = 1_800_000_000.0
BOX = "sbx-00000000000000000001"
BLOCK = """schema: 1
profile: p
owner: tests
mode: enforce
allow:
  # what agents need
  - hosts: [open.example.com]
ask:
  - id: asking
    hosts: [pay.example.com]
    requests: ["ANY /**"]
tests:
  - {allow: "GET https://open.example.com/"}
"""


def rules_of(folder: Path, profile: str = BLOCK) -> Rules:
    (folder / "profiles").mkdir(parents=True)
    (folder / "organisation.yaml").write_text("schema: 1\nowner: tests\n")
    (folder / "profiles/p.yaml").write_text(profile)
    rules = load_rules(folder, now=NOW)
    assert isinstance(rules, Rules), rules
    return rules


def case_of(
    rules: Rules, path: str = "/v1/refunds/4711", host: str = "pay.example.com", method: str = "POST"
) -> Case:
    subject = subject_of(BOX, "https", host, 443, method, path)
    case = assess(rules.compiled("p"), subject, NOW) if not hasattr(subject, "detail") else subject
    assert isinstance(case, Case), case
    return case


@pytest.mark.parametrize(
    ("scope", "line"),
    [("request", "POST /v1/refunds/4711"), ("template", "POST /v1/refunds/*"), ("host", "ANY /**")],
)
@pytest.mark.parametrize("form", ["block", "without lists", "no newline at the end"])
def test_the_patch_applies_and_the_rules_allow_it_then(
    tmp_path: Path, scope: Scope, line: str, form: str
) -> None:
    text = BLOCK
    if form == "without lists":
        text = BLOCK.partition("allow:\n")[0] + "ask:" + BLOCK.partition("ask:")[2].partition("tests:")[0]
    elif form == "no newline at the end":
        text = BLOCK.rstrip("\n")
    rules = rules_of(tmp_path / "rules", text)
    case = case_of(rules, host="new.example.com" if scope == "host" else "pay.example.com")
    made = propose(rules.source, case, scope, "proposed from apr-1", NOW)
    patch = tmp_path / "allow.patch"
    patch.write_text(made.patch)
    subprocess.run(
        ["git", "apply", "-p1", str(patch)], cwd=tmp_path / "rules", check=True, capture_output=True
    )
    again = load_rules(tmp_path / "rules", now=NOW)
    assert isinstance(again, Rules), again
    host = case.subject.host
    found = decide(
        again.compiled("p"),
        RequestAttempt(tuple(host.split(".")), 443, "https", "POST", "/v1/refunds/4711"),
        NOW,
    )
    assert found.allowed
    assert found.entry is not None
    assert (found.entry.id, found.entry.requests) == (made.rule, (line,))
    assert again.tests == rules.tests + 1
    assert "# what agents need" in (tmp_path / "rules/profiles/p.yaml").read_text() or form == "without lists"


@pytest.mark.parametrize(
    ("profile", "path", "scope", "why"),
    [
        pytest.param(
            BLOCK.replace("ANY /**", "POST /v1/refunds/4711"), "/v1/refunds/4711", "request", "another rule",
            id="a rule as narrow",
        ),
        pytest.param(
            BLOCK + '  - {ask: "POST https://pay.example.com/v1/refunds/4711"}\n', "/v1/refunds/4711", "request",
            "would not load", id="a test of the rules",
        ),
        pytest.param(BLOCK, "/v1/*", "request", "cannot be spelled", id="a path with a star of its own"),
        pytest.param(BLOCK, "/v1/plain", "template", "none of what", id="a template where there is none"),
        pytest.param(BLOCK, "/v1/plain", "connection", "none of what", id="a connection where requests are read"),
        pytest.param(
            BLOCK.replace("allow:\n  # what agents need\n  - hosts: [open.example.com]", "allow: [{hosts: [open.example.com]}]"),
            "/v1/plain", "request", "one item a line", id="a list on one line",
        ),
    ],
)  # fmt: skip
def test_what_would_not_do_is_not_proposed(
    tmp_path: Path, profile: str, path: str, scope: Scope, why: str
) -> None:
    rules = rules_of(tmp_path, profile)
    with pytest.raises(NoProposal, match=why):
        propose(rules.source, case_of(rules, path), scope, "proposed", NOW)
