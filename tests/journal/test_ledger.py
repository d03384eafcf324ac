"""The ledger: who is still out when a worker dies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.journal.admission import admit
from egressd.journal.ledger import Ledger
from egressd.journal.record import Record, timestamp
from egressd.policy.reasons import Reason

THEN = 1_800_000_000.0


def record(
    event: Any = "decision", attempt: str = "a1", sandbox: str = "box", **fields: Any
) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "layer": "request",
        "verdict": "allow",
        "reason": "rule",
        "time": timestamp(THEN),
    }
    filled = usual | fields
    return Record(event=event, sandbox=sandbox, attempt_id=attempt, root_id="r1", **filled).as_dict()


def test_an_allowed_request_that_never_ended_gets_its_end() -> None:
    ledger = Ledger()
    ledger.feed([record(host="a.example", port=443, method="GET", policy="p1", labels={"task": "7"})])
    (end,) = ledger.close_all({"box"}, Reason.WORKER_DIED, now=THEN + 1.5)
    assert end == {
        "time": timestamp(THEN + 1.5),
        "schema": 1,
        "event": "end",
        "sandbox": "box",
        "attempt_id": "a1",
        "root_id": "r1",
        "layer": "request",
        "reason": "worker_died",
        "policy": "p1",
        "labels": {"task": "7"},
        "host": "a.example",
        "port": 443,
        "method": "GET",
        "duration_ms": 1500.0,
    }
    assert admit(end, None, THEN)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"verdict": "deny", "reason": "not_allowed"}, id="a denial"),
        pytest.param({"verdict": "ask", "reason": "approval_required"}, id="a question"),
        pytest.param({"layer": "dns"}, id="a look-up, which is over when it is answered"),
        pytest.param({"layer": "packet"}, id="a packet"),
        pytest.param({"event": "sandbox"}, id="a sandbox's life"),
    ],
)
def test_what_lasts_no_time_has_no_end(fields: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.feed([record(**fields)])
    assert ledger.close_all({"box"}, Reason.WORKER_DIED) == []


def test_what_ended_is_not_ended_again() -> None:
    ledger = Ledger()
    ledger.feed([record(attempt="a1"), record(attempt="a2"), record("end", attempt="a1")])
    assert [end["attempt_id"] for end in ledger.close_all({"box"}, Reason.SHUTDOWN)] == ["a2"]
    assert ledger.close_all({"box"}, Reason.SHUTDOWN) == []
    assert len(ledger) == 0


def test_only_the_sandboxes_named_are_closed_oldest_attempt_first() -> None:
    ledger = Ledger()
    ledger.feed([record(attempt="b"), record(attempt="a"), record(attempt="c", sandbox="other")])
    assert [end["attempt_id"] for end in ledger.close_all(["box"], Reason.REVOKED)] == ["b", "a"]
    assert len(ledger) == 1


def test_an_end_without_a_beginning_is_nothing() -> None:
    ledger = Ledger()
    ledger.feed([record("end"), record("end", sandbox="other")])
    assert ledger.close_all({"box", "other"}, Reason.WORKER_DIED) == []


def test_the_attempt_of_one_sandbox_is_not_ended_by_another() -> None:
    ledger = Ledger()
    ledger.feed([record(attempt="a1"), record("end", attempt="a1", sandbox="other")])
    assert len(ledger) == 1


def test_a_flood_in_one_sandbox_is_counted_and_costs_another_nothing() -> None:
    ledger = Ledger(limit=3)
    ledger.feed([record(attempt="other", sandbox="other")])
    ledger.feed(record(attempt=f"a{n}") for n in range(5))
    ends = ledger.close_all({"box", "other"}, Reason.WORKER_DIED)
    assert [end["attempt_id"] for end in ends if end["event"] == "end"] == ["a2", "a3", "a4", "other"]
    (lost,) = (end for end in ends if end["event"] == "lost")
    assert (lost["sandbox"], lost["count"], lost["reason"]) == ("box", 2, "worker_died")
    assert admit(lost, None, THEN)


@pytest.mark.parametrize("began", [None, "yesterday", timestamp(THEN + 60)])
def test_a_beginning_that_makes_no_sense_gives_no_negative_duration(began: str | None) -> None:
    ledger = Ledger()
    ledger.feed([record() | {"time": began}])
    (end,) = ledger.close_all({"box"}, Reason.WORKER_DIED, now=THEN)
    assert end.get("duration_ms", 0) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["decision", "end"]), st.integers(0, 5))))
def test_decisions_and_ends_balance(story: list[tuple[str, str, int]]) -> None:
    ledger = Ledger()
    still_open: set[tuple[str, str]] = set()
    for sandbox, event, number in story:
        ledger.feed([record(event, attempt=f"a{number}", sandbox=sandbox)])
        key = (sandbox, f"a{number}")
        still_open = still_open | {key} if event == "decision" else still_open - {key}
    ends = ledger.close_all("abc", Reason.WORKER_DIED)
    assert {(end["sandbox"], end["attempt_id"]) for end in ends} == still_open
    assert len(ends) == len(still_open)
