"""`egressd report` as people call it."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app
from egressd.cli.report_parts import Denied, Overview

DAY = (dt.datetime.now(dt.UTC) + dt.timedelta(days=3)).date()
RULES = f"""schema: 1
profile: a
owner: platform
allow:
  - id: one
    hosts: [one.example.com]
  - id: trial
    hosts: [trial.example.com]
    mode: observe
    observe_until: {DAY}
deny:
  - id: admin
    hosts: [one.example.com]
    requests: ["ANY /admin/**"]
    mode: observe
    observe_until: {DAY}
"""


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    made = tmp_path / "rules"
    (made / "profiles").mkdir(parents=True)
    (made / "organisation.yaml").write_text("schema: 1\n")
    (made / "profiles" / "a.yaml").write_text(RULES)
    return made


def record(number: int, host: str, path: str = "/x", /, **more: Any) -> dict[str, Any]:
    return {
        "time": f"2026-11-30T10:00:{number:02}.000000Z",
        "event": "decision",
        "layer": "request",
        "verdict": "allow",
        "reason": "rule",
        "profile": "a",
        "sandbox": f"sbx-{number}",
        "attempt_id": f"{number:028x}",
        "host": host,
        "port": 443,
        "scheme": "https",
        "method": "GET",
        "path": path,
    } | more


NOTED: dict[str, Any] = {"would_deny": True, "would_reason": "not_allowed"}
RECORDS = [
    record(1, "one.example.com"),
    record(2, "one.example.com", "/admin/users", **NOTED),
    record(3, "one.example.com", "/admin/users", **NOTED),
    record(4, "trial.example.com", reason="observed", **NOTED),
    record(5, "one.example.com", reason="observed", **NOTED),
    record(6, "evil.example.com", verdict="deny", reason="not_allowed"),
    record(7, "trial.example.com", layer="connection", treatment="inspect", reason="observed", **NOTED),
    record(8, "trial.example.com", layer="dns", reason="observed", **NOTED),
    record(9, "gone.example.com", reason="rule"),
]


def journal(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_what_would_break_is_told_by_whom_it_would_break_for(tmp_path: Path, rules: Path) -> None:
    path = journal(tmp_path / "j.jsonl", RECORDS)
    status, out, _ = run("report", path, "--rules", rules, "--what-if-enforced")
    assert status == 1
    assert out.splitlines() == [
        "What would break if this were enforced today:",
        "  4 attempts passed only because something observed; 1 of them are allowed by now",
        "  would be denied: 4",
        "    2 x GET https://one.example.com/admin/… by admin (profiles/a.yaml:12); a, ask platform; sbx-2, sbx-3, "
        f"like {2:028x}",
        f"    1 x GET https://gone.example.com/x (not_allowed); a, ask platform; sbx-9, like {9:028x}",
        f"    1 x GET https://trial.example.com/x (not_allowed); a, ask platform; sbx-4, like {4:028x}",
    ]
    found = json.loads(run("report", path, "--rules", rules, "--what-if-enforced", "--json")[1])
    assert set(found) == {"enforced"}
    assert [(row["kind"], row["times"], row["sandboxes"]) for row in found["enforced"]["breaks"]] == [
        ("denied", 2, 2),
        ("denied", 1, 1),
        ("denied", 1, 1),
    ]


def test_where_nothing_would_break_the_status_says_so(tmp_path: Path, rules: Path) -> None:
    path = journal(tmp_path / "j.jsonl", RECORDS[:1])
    status, out, _ = run("report", path, "--rules", rules, "--what-if-enforced")
    assert (status, out.splitlines()[-1]) == (0, "  nothing would break")


def test_the_whole_report_has_every_section(tmp_path: Path, rules: Path) -> None:
    path = journal(tmp_path / "j.jsonl", RECORDS)
    status, out, _ = run("report", path, "--rules", rules)
    assert status == 0
    assert out.splitlines()[:8] == [
        "All attempts:",
        "  9 by 9 sandboxes",
        "  from 2026-11-30T10:00:01.000000Z to 2026-11-30T10:00:09.000000Z",
        "  by verdict: would-deny 6, allow 2, deny 1",
        "  by layer: request 7, connection 1, dns 1",
        "  by profile: a 9",
        "",
        "Denied:",
    ]
    assert out.splitlines()[8] == "  1 x evil.example.com (not_allowed); a"
    late = json.loads(run("report", path, "--rules", rules, "--json", "--since", "2026-11-30T10:00:09Z")[1])
    assert late["overview"]["attempts"] == 1
    assert run("report", path, "--rules", rules, "--profile", "b")[1].splitlines()[1] == "  0 by 0 sandboxes"


def test_the_configured_journal_comes_with_what_was_rotated_out_of_it(
    tmp_path: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = journal(tmp_path / "j.jsonl", RECORDS[1:])
    journal(tmp_path / "j.jsonl.d" / "20261130T100001Z-000000000001.jsonl", RECORDS[:1])
    monkeypatch.setenv("EGRESSD_JOURNAL", str(path))
    found = json.loads(run("report", "--rules", rules, "--json")[1])
    assert found["overview"]["attempts"] == len(RECORDS)


def test_what_cannot_be_read_is_said(tmp_path: Path, rules: Path) -> None:
    assert run("report", tmp_path / "none", "--rules", rules)[0] == 2
    path = journal(tmp_path / "j.jsonl", RECORDS)
    assert run("report", path, "--rules", tmp_path / "none")[0] == 2
    assert run("report", path, "--rules", rules, "--since", "yesterday")[0] == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
NAMES = ["verdict", "layer", "profile", "sandbox", "time", "count", "host", "rule", "reason", "would_deny"]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(NAMES), JSON | st.sampled_from(["deny", "allow", "dns"])), max_size=4
    )
)
def test_sections_take_any_record(records: list[dict[str, Any]]) -> None:
    for part in (Overview(), Denied()):
        for each in records:
            part.take(each)
        told = [*part.lines()]
        assert all(line.isprintable() for line in told)
        json.dumps(part.as_json())
