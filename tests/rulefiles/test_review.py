"""What a review finds, and in which order."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.review import Row, Usage, openness, review
from egressd.rulefiles.source import RuleSource

TODAY = dt.date(2026, 12, 1)
NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC).timestamp()
AGENT: dict[str, Any] = {
    "schema": 1,
    "profile": "agent",
    "owner": "platform",
    "groups": ["shared"],
    "allow": [
        {"id": "api", "hosts": ["api.example.com"], "requests": ["GET /v1/**"], "credential": "key"},
        {"id": "wild", "hosts": ["*.example.net"], "requests": ["ANY /**"]},
        {"id": "ends", "hosts": ["e.example.com"], "requests": ["GET /x"], "expires": "2026-12-03"},
        {"id": "ended", "hosts": ["f.example.com"], "requests": ["GET /x"], "expires": "2026-11-29"},
        {
            "id": "watched",
            "hosts": ["g.example.com"],
            "requests": ["GET /x"],
            "mode": "observe",
            "observe_until": "2026-12-20",
        },
    ],
    "deny": [{"id": "no", "hosts": ["no.example.com"]}],
}
OTHER: dict[str, Any] = {
    "schema": 1,
    "profile": "other",
    "mode": "observe",
    "observe_until": "2026-12-10",
    "groups": ["shared"],
    "allow": [{"id": "db", "hosts": ["db.example.com"], "treatment": "relay", "ports": [5432]}],
}
SHARED = {
    "schema": 1,
    "group": "shared",
    "owner": "docs-team",
    "allow": [{"id": "docs", "hosts": ["docs.example.com"]}],
}


@pytest.fixture(scope="module")
def rules() -> Rules:
    files = {
        "organisation.yaml": {
            "schema": 1,
            "owner": "security",
            "deny": [{"id": "sink", "hosts": ["sink.example.org"]}],
        },
        "profiles/agent.yaml": AGENT,
        "profiles/other.yaml": OTHER,
        "groups/shared.yaml": SHARED,
    }
    source = RuleSource({path: json.dumps(said).encode() for path, said in files.items()})
    found = load_source(source, now=NOW)
    assert isinstance(found, Rules), str(found)
    return found


def of(rows: list[Row], section: str) -> list[tuple[str, str]]:
    return [(row.what, row.detail) for row in rows if row.section == section]


def test_every_section_has_what_belongs_there(rules: Rules) -> None:
    rows = review(rules, TODAY)
    assert of(rows, "unused") == [], "nobody knows without a journal"
    assert of(rows, "expiring") == [
        ("ended", "ends 2026-11-29, over for 2 days"),
        ("ends", "ends 2026-12-03, 2 days left"),
        ("other", "observes until 2026-12-10, 9 days left"),
        ("watched", "observes until 2026-12-20, 19 days left"),
    ]
    assert of(rows, "ownerless") == [("other", "nobody can be asked about this file")]
    assert of(rows, "credentialed") == [("api", "key: api.example.com")]
    assert of(rows, "widest") == [
        ("wild", "60: 1 wildcard, any method, writes on every path"),
        ("db", "40: a relay, which nobody reads"),
        ("docs", "5: every path"),
    ]


def test_a_rule_that_profiles_share_is_one_subject_of_its_file_s_owner(rules: Rules) -> None:
    (row,) = [row for row in review(rules, TODAY) if row.section == "widest" and row.what == "docs"]
    assert (row.profiles, row.owner) == (("agent", "other"), "docs-team")


def record(rule: str, **more: Any) -> dict[str, Any]:
    time = "2026-11-30T10:00:00.000000Z"
    return {"time": time, "profile": "agent", "rule": rule, "verdict": "allow", "layer": "request"} | more


@pytest.mark.parametrize(
    ("met", "used"),
    [
        pytest.param(record("api"), "api", id="a request"),
        pytest.param(record("docs", profile="other"), "docs", id="a shared rule in one of its profiles"),
        pytest.param(record("no", verdict="deny", layer="dns"), "no", id="a denial of a look-up"),
        pytest.param(record("sink", verdict="deny", layer="dns"), "sink", id="the organisation's denial"),
        pytest.param(
            record("db", profile="other", layer="connection", treatment="relay"), "db", id="a relay"
        ),
        pytest.param(record("api", layer="dns"), None, id="a look-up that leads to requests"),
        pytest.param(
            record("api", layer="connection", treatment="inspect"), None, id="a connection that is read"
        ),
        pytest.param(record("api", profile="other"), None, id="a rule of this name elsewhere"),
        pytest.param({"rule": ["api"], "profile": {}, "layer": "request"}, None, id="no record of ours"),
    ],
)
def test_what_decided_something_is_used(rules: Rules, met: dict[str, Any], used: str | None) -> None:
    usage = Usage(rules)
    usage.take(met)
    everything = {"api", "wild", "ends", "ended", "watched", "no", "docs", "db", "sink"}
    assert {name for name, _ in of(review(rules, TODAY, usage=usage), "unused")} == everything - {used}


def test_what_a_denial_would_deny_is_a_use_of_it(rules: Rules) -> None:
    usage = Usage(rules)
    usage.take(record("api", would_rule="no", count=3))
    (row,) = [
        row
        for row in review(rules, TODAY, usage=usage)
        if row.what == "api" and row.section == "credentialed"
    ]
    assert row.use is not None
    assert (row.use.times, row.use.last) == (3, "2026-11-30T10:00:00.000000Z")
    assert "no" not in [name for name, _ in of(review(rules, TODAY, usage=usage), "unused")]


JSON = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.lists(st.integers(), max_size=2)
)


@given(
    st.dictionaries(
        st.sampled_from(["time", "profile", "rule", "verdict", "layer", "count", "would_rule"]), JSON
    )
)
def test_any_record_can_be_taken(rules: Rules, fields: dict[str, Any]) -> None:
    Usage(rules).take(fields)


def test_points_grow_with_what_is_opened(rules: Rules) -> None:
    entries = {entry.id: entry for entry in rules.effective("agent").entries}
    narrow, wide = entries["api"], entries["wild"]
    assert openness([narrow])[0] < openness([wide])[0] == openness([narrow, wide])[0]
