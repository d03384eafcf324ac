"""Rules that only observe: what they note, what they let through, and what they never touch."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from egressd.policy.attempt import Attempt
from egressd.policy.compile import compile_policy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from tests.policy.entries import NOON, allow, ask, connection, deny, policy, question, request

TODAY = dt.date(2027, 3, 31)
UNTIL: dict[str, Any] = {"mode": "observe", "observe_until": TODAY}

RULES = policy(
    deny("*.bad.test", id="floorless", origin="organisation"),
    allow("a.test", id="a", requests=("GET /**",), credential="key"),
    deny("a.test", id="secret", requests=("GET /secret/**",), **UNTIL),
    deny("*.bad.test", "lonely.test", id="noted", **UNTIL),
    allow("a.test", id="wide", requests=("ANY /**",), **UNTIL),
    allow("new.test", "x.bad.test", id="new", limits={"connections": 3}, **UNTIL),
    allow("db.test", id="db", treatment="relay", ports=(5432,), addresses=("10.0.0.7/32",), **UNTIL),
    ask("q.test", id="q"),
    deny("q.test", id="unasked", **UNTIL),
    allow("t.test", id="read"),
    allow("t.test", id="unread", treatment="tunnel", ports=(443, 8443), **UNTIL),
)

Row = tuple[str, str, str | None, str | None, str | None]


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        pytest.param(
            request("GET https://a.test/x"), ("allow", "rule", "a", None, None), id="an enforced allow is untouched"
        ),
        pytest.param(
            request("GET https://a.test/secret/1"),
            ("allow", "rule", "a", "denied_by_rule", "secret"),
            id="a denial notes what it would deny, and the request keeps its rule",
        ),
        pytest.param(
            request("POST https://a.test/x"),
            ("allow", "observed", "wide", "method_not_allowed", None),
            id="an allow stands in for the default deny",
        ),
        pytest.param(
            request("POST https://a.test/secret/1"),
            ("allow", "observed", "wide", "method_not_allowed", None),
            id="a denial of reading notes nothing of a POST",
        ),
        pytest.param(
            request("GET https://new.test/"),
            ("allow", "observed", "new", "not_allowed", None),
            id="a host that no other rule knows",
        ),
        pytest.param(
            request("POST https://new.test/"),
            ("deny", "not_allowed", None, None, None),
            id="what the allow does not cover is denied",
        ),
        pytest.param(
            connection("https://new.test"), ("allow", "observed", "new", "not_allowed", None), id="its connection"
        ),
        pytest.param(question("new.test"), ("allow", "observed", "new", "not_allowed", None), id="its look-up"),
        pytest.param(
            request("GET https://x.bad.test/"),
            ("deny", "denied_by_organisation", "floorless", None, None),
            id="the organisation's denial holds",
        ),
        pytest.param(
            question("x.bad.test"),
            ("deny", "denied_by_organisation", "floorless", None, None),
            id="for the look-up too",
        ),
        pytest.param(
            request("GET https://lonely.test/"),
            ("deny", "not_allowed", None, None, None),
            id="a denial that observes opens nothing",
        ),
        pytest.param(
            request("GET https://q.test/"),
            ("ask", "approval_required", "q", "denied_by_rule", "unasked"),
            id="what asks still asks",
        ),
        pytest.param(
            connection("tcp://db.test:5432"),
            ("allow", "observed", "db", "not_allowed", None),
            id="a relay that a rule names",
        ),
        pytest.param(
            connection("tcp://db.test:5433"), ("deny", "not_allowed", None, None, None), id="and no other port"
        ),
        pytest.param(
            connection("https://t.test:8443"),
            ("allow", "observed", "unread", "port_not_allowed", None),
            id="a tunnel beside a rule that reads",
        ),
        pytest.param(
            request("POST https://t.test/"),
            ("deny", "method_not_allowed", None, None, None),
            id="what an enforced rule reads no tunnel carries",
        ),
        pytest.param(
            connection("https://169.254.169.254"),
            ("deny", "floor_metadata", None, None, None),
            id="the floor",
        ),
    ],
)  # fmt: skip
def test_what_observing_rules_come_to(attempt: Attempt, expected: Row) -> None:
    found = decide(RULES, attempt, NOON)
    would = (found.would_reason, found.would_entry.id if found.would_entry is not None else None)
    assert (found.verdict, found.reason, found.entry.id if found.entry else None, *would) == expected
    assert found.would_deny is (found.would_reason is not None)
    over, enforced = decide(RULES, attempt, NOON + 86400), compile_policy(RULES.effective.enforced())
    assert (over.verdict, over.reason) == (
        decide(enforced, attempt, NOON).verdict,
        decide(enforced, attempt, NOON).reason,
    )
    assert not over.would_deny
    assert RULES.next_change(NOON) < NOON + 86400


def test_a_clock_that_tells_no_number_enforces() -> None:
    nan = float("nan")
    assert decide(RULES, request("GET https://a.test/secret/1"), nan).verdict == "deny"
    assert decide(RULES, request("GET https://new.test/"), nan).verdict == "deny"


def test_as_if_enforced_has_every_denial_and_no_allow_that_observes() -> None:
    enforced = RULES.effective.enforced()
    assert [entry.id for entry in enforced.entries if entry.effect == "allow"] == ["a", "read"]
    assert all(entry.mode == "enforce" and entry.observe_until is None for entry in enforced.entries)
    assert compile_policy(enforced).has_observers is False


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        pytest.param(allow("a.test", mode="observe"), "needs the day", id="without an end"),
        pytest.param(ask("a.test", **UNTIL), "an ask does not observe", id="an ask"),
        pytest.param(deny(addresses=("10.0.0.0/8",), **UNTIL), "too late", id="a denial of addresses"),
        pytest.param(
            allow("a.test", requests=("GET /",), credential="key", **UNTIL), "no credential", id="a credential"
        ),
    ],
)  # fmt: skip
def test_what_cannot_only_observe_does_not_compile(entry: EffectiveEntry, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compile_policy(EffectivePolicy(profile="agent", entries=(entry,)))
