from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.attempt import DnsQuestion
from egressd.policy.decide import decide
from egressd.policy.paths import PathPattern, Target, parse_path_pattern
from egressd.rulefiles.difference import Difference, change_of, difference
from egressd.rulefiles.load import Rules
from egressd.rulefiles.witnesses import meeting_path
from tests.rulefiles.test_composition import NOW, attempts, load, sections


def rules(said: dict[str, object], **more: object) -> Rules:
    found = load(organisation={"schema": 1}, profiles__p={"schema": 1, "profile": "p", **said}, **more)
    assert isinstance(found, Rules), str(found)
    return found


def rows(before: dict[str, object], after: dict[str, object]) -> list[tuple[str, str]]:
    found = difference(rules(before), rules(after), NOW)
    return [(row.kind, row.what) for one in found for row in one.rows]


A = {"id": "a", "hosts": ["a.example.com"], "requests": ["GET,HEAD /x/**"]}
B = {"id": "b", "hosts": ["b.example.com"]}
WILD = {"id": "w", "hosts": ["*.example.com"]}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"allow": [A, B]}, {"allow": [B, A]}, []),
        ({"allow": [A]}, {"allow": [{**A, "id": "other"}]}, []),
        ({"allow": [A]}, {"allow": [{**A, "requests": ["GET /x/**", "HEAD /x/**"]}]}, []),
        ({}, {"allow": [A]}, [("allowed", "GET,HEAD https://a.example.com/x/**")]),
        ({"allow": [A]}, {}, [("denied", "GET,HEAD https://a.example.com/x/**")]),
        (
            {"allow": [A]},
            {"allow": [{**A, "requests": ["GET,HEAD /**"]}]},
            [("allowed", "GET,HEAD https://a.example.com/**")],
        ),
        ({"allow": [A]}, {"ask": [A]}, [("asked", "GET,HEAD https://a.example.com/x/**")]),
        (
            {"allow": [WILD]},
            {"allow": [WILD], "deny": [{"hosts": ["a.example.com"], "requests": ["GET /x/y"]}]},
            [("denied", "GET,HEAD https://a.example.com/x/y")],
        ),
        (
            {"allow": [{"id": "t", "hosts": ["a.example.com"], "treatment": "tunnel"}]},
            {"allow": [{"id": "t", "hosts": ["a.example.com"], "requests": ["ANY /**"]}]},
            [
                ("denied", "WEBSOCKET https://a.example.com/… (any other path)"),
                ("inspected", "ANY https://a.example.com/**"),
            ],
        ),
        (
            {"allow": [{**B, "limits": {"requests": "1/minute"}}]},
            {"allow": [{**B, "limits": {"requests": "2/minute"}}]},
            [("terms", "limits of b")],
        ),
        (
            {"allow": [{"id": "n", "addresses": ["192.0.2.7/32"], "ports": [443]}]},
            {},
            [("denied", "GET,HEAD https://192.0.2.7/**")],
        ),
    ],
    ids=[
        "another order",
        "another id",
        "the same in other words",
        "a new rule",
        "one less",
        "a wider path",
        "asked for now",
        "a denial below a wildcard",
        "read now",
        "other limits",
        "an address",
    ],
)
def test_a_difference_is_what_is_decided(
    before: dict[str, object], after: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    assert rows(before, after) == expected


def test_profiles_that_come_and_go_are_told_of() -> None:
    one = rules({}, profiles__q={"schema": 1, "profile": "q", "allow": [A]})
    found = difference(one, rules({}), NOW)
    assert [(each.profile, each.only, len(each.rows)) for each in found] == [("q", "before", 1)]
    assert difference(one, one, NOW) == []


@settings(max_examples=150, deadline=None)
@given(sections(), sections())
def test_whatever_two_rules_decide_differently_is_told(
    before: dict[str, list[dict[str, object]]], after: dict[str, list[dict[str, object]]]
) -> None:
    both = [
        load(organisation={"schema": 1}, profiles__p={"schema": 1, "profile": "p", **said})
        for said in (before, after)
    ]
    if not all(isinstance(each, Rules) for each in both):
        return
    old, new = both
    assert isinstance(old, Rules)
    assert isinstance(new, Rules)
    told: list[Difference] = difference(old, new, NOW)
    kinds = {row.kind for one in told for row in one.rows}
    for attempt in attempts(ambiguous=False):
        if isinstance(attempt, DnsQuestion):
            continue
        kind = change_of(decide(old.compiled("p"), attempt, NOW), decide(new.compiled("p"), attempt, NOW))
        assert kind is None or told, (attempt, kind)
        if not hasattr(attempt, "target") and ({kind} | kinds) & {"allowed", "asked", "denied"}:
            continue  # a connection, which its requests tell of
        assert kind is None or kind in kinds, (attempt, kind, told)


SEGMENTS = st.lists(st.sampled_from(["a", "b", "*", "a*", "*b", "a*b", "**"]), min_size=1, max_size=4)


@given(SEGMENTS, SEGMENTS)
def test_a_path_where_two_patterns_meet_is_taken_by_both(one: list[str], other: list[str]) -> None:
    parsed = [parse_path_pattern("/" + "/".join(segments)) for segments in (one, other)]
    if not all(isinstance(each, PathPattern) for each in parsed):
        return
    left, right = parsed
    assert isinstance(left, PathPattern)
    assert isinstance(right, PathPattern)
    path = meeting_path(left.text, right.text)
    if path is not None:
        assert left.allows(Target(path)), path
        assert right.allows(Target(path)), path
    elif "*" not in left.text:
        assert not right.allows(Target(left.text))
