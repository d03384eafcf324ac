from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.attempt import ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.decide import decide
from egressd.rulefiles import replay
from egressd.rulefiles.load import Rules
from egressd.rulefiles.replay import Impact, between, with_record
from tests.rulefiles.test_composition import NOW, attempts, load, sections
from tests.rulefiles.test_recorded import ODD, REQUEST, VALUES


def rules(**said: object) -> Rules:
    found = load(organisation={"schema": 1}, profiles__box={"schema": 1, "profile": "box", **said})
    assert isinstance(found, Rules), str(found)
    return found


DOCS = {
    "id": "docs",
    "hosts": ["docs.example.com"],
    "requests": ["GET /a/**", "GET /q?service=git-upload-pack"],
}
GIT = {"path": "/q", "query": "service=<15>"}


def replayed(said: Rules, *records: dict[str, object]) -> dict[str, int]:
    impact = Impact(with_record(said.policies, NOW))
    for record in records:
        impact.take({key: value for key, value in (REQUEST | record).items() if value is not None})
    return impact_of(impact)


def impact_of(impact: Impact) -> dict[str, int]:
    found: dict[str, int] = {"same": impact.same} if impact.same else {}
    for row, seen in impact.rows.items():
        found[row.kind] = found.get(row.kind, 0) + seen.times
    return found | dict(impact.skipped)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"path": "/a/b"}, {"same": 1}),
        ({"path": "/b"}, {"denied": 1}),
        ({"path": "/a/b", "verdict": "deny", "reason": "not_allowed", "rule": None}, {"allowed": 1}),
        ({"path": "/b", "verdict": "deny", "reason": "not_allowed", "rule": None}, {"same": 1}),
        (GIT, {"uncertain": 1}),
        ({"path": "/q", "query": "service=<16>"}, {"denied": 1}),
        ({"path": "/a/b", "query": "x=<1>"}, {"same": 1}),
        ({"path": "/a/b", "verdict": "deny", "reason": "rate_limited"}, {"same": 1}),
        ({"path": "/b", "verdict": "allow", "reason": "grant", "rule": "gnt-0123456789abcdef"}, {"same": 1}),
        (
            {"path": "/a/b", "verdict": "allow", "reason": "grant", "rule": "gnt-0123456789abcdef"},
            {"allowed": 1},
        ),
        ({"path": "/b", "count": 7}, {"denied": 7}),
        ({"profile": "gone"}, {"a profile that these rules do not have": 1}),
        ({"verdict": "deny", "reason": "bad_tls"}, {"decided by something else than rules": 1}),
    ],
    ids=[
        *(
            "as it was",
            "no longer allowed",
            "allowed now",
            "still denied",
            "a value that a rule names, perhaps",
        ),
        *(
            "a value of another length",
            "any query",
            "a limit is no rule",
            "an approval of what no rule speaks of",
            "a rule in the place of an approval",
            "a record of seven",
            "no profile",
            "no rule",
        ),
    ],
)
def test_a_record_comes_out_as_the_rules_say(record: dict[str, object], expected: dict[str, int]) -> None:
    assert replayed(rules(allow=[DOCS]), record) == expected


def test_a_websocket_is_not_taken_for_a_request_that_is_denied() -> None:
    socket = rules(allow=[{"id": "docs", "hosts": ["docs.example.com"], "requests": ["WEBSOCKET /a"]}])
    assert replayed(socket, {"path": "/a"}) == {"same": 1}


def test_two_sets_of_rules_are_compared_by_what_the_record_must_have_been() -> None:
    """The length of the value fits, and the recorded rule could not have allowed any other."""
    old, new = rules(allow=[DOCS]), rules()
    impact = Impact(between(old.policies, new.policies, NOW))
    impact.take(REQUEST | GIT)
    assert impact_of(impact) == {"denied": 1}


@given(sections(), sections(), st.integers(0, 10**9))
def test_side_by_side_is_what_decide_says_of_each(
    before: dict[str, list[dict[str, object]]], after: dict[str, list[dict[str, object]]], pick: int
) -> None:
    both = [
        load(organisation={"schema": 1}, profiles__p={"schema": 1, "profile": "p", **said})
        for said in (before, after)
    ]
    old, new = both
    if not isinstance(old, Rules) or not isinstance(new, Rules):
        return
    tried = [
        one
        for one in attempts(ambiguous=False)
        if not isinstance(one, RequestAttempt) or "?" not in one.target
    ]
    attempt = tried[pick % len(tried)]
    was = decide(old.compiled("p"), attempt, NOW)
    record: dict[str, object] = {
        "event": "decision",
        "profile": "p",
        "verdict": was.verdict,
        "reason": was.reason.value,
    }
    if was.entry is not None:
        record["rule"] = was.entry.id
    if isinstance(attempt, DnsQuestion):
        record |= {"layer": "dns", "host": ".".join(attempt.name), "qtype": "A"}
    else:
        assert isinstance(attempt.host, tuple)
        record |= {"host": ".".join(attempt.host), "port": attempt.port, "scheme": attempt.scheme}
        record |= {"layer": "connection"}
    if isinstance(attempt, RequestAttempt):
        if attempt.upgrade:
            return
        record |= {"layer": "request", "method": attempt.method, "path": attempt.target}
    impact = Impact(between(old.policies, new.policies, NOW))
    impact.take(record)
    becomes = decide(new.compiled("p"), attempt, NOW)
    words = {"allow": "allowed", "ask": "asked", "deny": "denied"}
    expected = None if was.verdict == becomes.verdict else words[becomes.verdict]
    kinds = {row.kind for row in impact.rows} & {*words.values()}
    assert kinds == ({expected} if expected else set()), (attempt, was, becomes, impact.skipped)
    assert isinstance(attempt, DnsQuestion | ConnectionAttempt | RequestAttempt)


@given(
    st.dictionaries(
        st.sampled_from([*sorted(REQUEST), "query", "count", "qtype", "attempt_id"]), VALUES | ODD
    )
)
def test_no_record_breaks_it(fields: dict[str, object]) -> None:
    said = rules(allow=[DOCS])
    for compare in (with_record(said.policies, NOW), between(said.policies, rules().policies, NOW)):
        impact = Impact(compare)
        for merged in (fields, REQUEST | fields):
            impact.take(merged)
        assert (
            impact.same + sum(impact.skipped.values()) + sum(seen.times for seen in impact.rows.values()) >= 2
        )


def crowd(number: int) -> Iterator[dict[str, object]]:
    for n in range(number):
        yield REQUEST | {"host": f"h{n % 9001}.example.com", "path": f"/p{n}/x", "sandbox": f"sbx-{n % 997}"}


def test_memory_is_flat_however_long_the_journal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is bounded by rows and by what is remembered, not by records: four times the records, the same memory."""
    monkeypatch.setattr(replay, "MOST_REMEMBERED", 500)
    monkeypatch.setattr(replay, "MOST_ROWS", 300)
    said = rules(allow=[DOCS])
    peaks = []
    for number in (1_500, 6_000):
        impact = Impact(with_record(said.policies, NOW))
        tracemalloc.start()
        try:
            for record in crowd(number):
                impact.take(record)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(impact.rows) == 301
        assert impact.total("denied") == number
    assert peaks[1] < peaks[0] * 2, peaks  # caches that are bounded may fill meanwhile


def test_json_of_a_journal_line_is_what_is_taken() -> None:
    impact = Impact(with_record(rules(allow=[DOCS]).policies, NOW))
    impact.take(json.loads(json.dumps(REQUEST | {"path": "/b/secret?", "attempt_id": "a" * 28})))
    (row,) = impact.rows
    assert (row.what, impact.rows[row].example) == ("GET https://docs.example.com/b/…", "a" * 28)
