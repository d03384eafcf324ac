from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.attempt import ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.rulefiles.claims import Claims
from egressd.rulefiles.fixtures import Fixtures
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.recorded import Recorded, Unplayable, read_recorded, readings
from egressd.rulefiles.source import RuleSource
from egressd.rulefiles.testrun import TestRun, read_tests, run_tests

NOW = 1_796_126_400.0
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "records.md"
REQUEST = {
    "event": "decision",
    "layer": "request",
    "verdict": "allow",
    "reason": "rule",
    "rule": "docs",
    "profile": "box",
    "sandbox": "sbx-1",
    "host": "docs.example.com",
    "port": 443,
    "scheme": "https",
    "method": "GET",
    "path": "/a",
}


def read(**changes: object) -> Recorded | Unplayable:
    return read_recorded({key: value for key, value in (REQUEST | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "GET https://docs.example.com/a"),
        ({"query": "k=<3>&<2>"}, "GET https://docs.example.com/a?k=<3>&<2>"),
        ({"scheme": "http", "port": 8080}, "GET http://docs.example.com:8080/a"),
        ({"layer": "dns", "qtype": "AAAA"}, "dns:docs.example.com/AAAA"),
        ({"layer": "connection"}, "https://docs.example.com:443"),
        (
            {"layer": "connection", "treatment": "relay", "scheme": "http", "port": 5432},
            "tcp://docs.example.com:5432",
        ),
        ({"host": None, "address": "2001:db8::1"}, "GET https://[2001:db8::1]/a"),
        ({"verdict": "deny", "reason": "upgrade_not_allowed"}, "WEBSOCKET https://docs.example.com/a"),
    ],
    ids=[
        "a request",
        "a query",
        "another port",
        "a look-up",
        "a connection",
        "a relay",
        "an address",
        "a WebSocket",
    ],
)
def test_a_record_is_an_attempt_again(changes: dict[str, object], text: str) -> None:
    found = read(**changes)
    assert isinstance(found, Recorded)
    assert found.text == text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer": "packet"}, "a packet, which no rule judges"),
        ({"reason": "bad_tls", "verdict": "deny"}, "decided by something else than rules"),
        ({"host": None}, "without a host"),
        ({"host": "\x1b[2J"}, "without a host"),
        ({"method": None}, "folded with others, without what was asked for"),
        ({"path": "/x…[70000 bytes, sha256 0123456789abcdef]"}, "too long to have been kept whole"),
        ({"profile": 7}, "no decision under a profile"),
    ],
)
def test_what_cannot_be_judged_anew_says_why(changes: dict[str, object], why: str) -> None:
    assert read(**changes) == Unplayable(why)


def test_a_query_is_read_as_every_pair_that_a_rule_names_and_that_fits() -> None:
    found = read(query="service=<15>&x=<1>")
    assert isinstance(found, Recorded)
    pairs = ["service=git-upload-pack", "service=git-receive-pack", "x=1", "y=2"]
    targets = [attempt.target for attempt in readings(found, pairs) if isinstance(attempt, RequestAttempt)]
    assert targets == [
        "/a?service=000000000000000&x=0",
        "/a?service=000000000000000&x=1",
        "/a?service=git-upload-pack&x=0",
        "/a?service=git-upload-pack&x=1",
    ]


def test_the_records_of_the_page_are_read() -> None:
    lines = [json.loads(line) for line in PAGE.read_text().splitlines() if line.startswith('{"time"')]
    kinds = {
        type(found.attempt)
        for line in lines
        if line["event"] == "decision" and isinstance(found := read_recorded(line), Recorded)
    }
    assert kinds == {DnsQuestion, ConnectionAttempt, RequestAttempt}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.lists(st.integers(), max_size=2)
)
ODD = st.sampled_from(
    ["decision", "request", "dns", "connection", "allow", "deny", "rule", "https", "GET", "a.b", 443]
)


@given(
    st.dictionaries(st.sampled_from([*sorted(REQUEST), "query", "count", "qtype", "address"]), VALUES | ODD)
)
def test_reading_is_total_and_what_it_makes_can_be_written_and_read_as_tests(
    fields: dict[str, object],
) -> None:
    fixtures = Fixtures()
    for merged in (fields, REQUEST | fields):
        found = read_recorded(merged)
        if isinstance(found, Recorded):
            assert found.text
            assert list(readings(found, ["k=v"]))
        fixtures.add(merged)
    text = "\n".join(fixtures.lines())
    if text:
        assert isinstance(read_tests(text.encode(), "t.yaml"), Claims), text


def test_what_was_decided_is_decided_again_by_the_same_rules() -> None:
    files = {
        "organisation.yaml": b"schema: 1\n",
        "profiles/box.yaml": b"""schema: 1
profile: box
allow:
  - {id: docs, hosts: [docs.example.com]}
  - {id: db, hosts: [db.example.com], treatment: relay, ports: [5432]}
""",
    }
    rules = load_source(RuleSource(files), now=NOW)
    assert isinstance(rules, Rules)
    fixtures = Fixtures()
    for changes in (
        {},
        {},
        {"verdict": "deny", "reason": "method_not_allowed", "rule": None, "method": "POST"},
        {
            "layer": "connection",
            "treatment": "relay",
            "scheme": "http",
            "port": 5432,
            "host": "db.example.com",
            "rule": "db",
        },
        {
            "layer": "connection",
            "verdict": "deny",
            "reason": "not_allowed",
            "rule": None,
            "host": "x.example.com",
        },
        {"layer": "dns", "verdict": "deny", "reason": "not_allowed", "rule": None, "host": "x.example.com"},
        {"query": "k=<3>"},
        {"verdict": "deny", "reason": "bad_tls"},
        {"path": '/"x\\y'},
    ):
        fixtures.add({key: value for key, value in (REQUEST | changes).items() if value is not None})
    text = "\n".join(fixtures.lines())
    assert text.count("\n  - {") == 6
    assert fixtures.left_out == {
        "the values of its query are not recorded": 1,
        "decided by something else than rules": 1,
    }
    claims = read_tests(text.encode(), "t.yaml")
    assert isinstance(claims, Claims), str(claims)
    run = run_tests(rules, NOW, [claims])
    assert isinstance(run, TestRun), str(run)
    assert [outcome.failure for outcome in run.outcomes if '"x' not in outcome.asked.text] == [None] * 5
