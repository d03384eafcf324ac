"""What a sandbox can read of its own refusals: all of them, folded and bounded; no address, no detail, nothing of others."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.denials import KEPT, Denials, Remembering
from egressd.gate.recorder import AuditUnavailable
from egressd.journal.record import Record
from egressd.policy.reasons import Reason


def record(**fields: Any) -> Record:
    known = {"event": "decision", "sandbox": "s", "attempt_id": "a1", "root_id": "a0", "verdict": "deny"}
    return Record(**(known | {"reason": "not_allowed"} | fields))


def told(*records: Record) -> list[tuple[str, str, int]]:
    denials = Denials()
    for each in records:
        denials.note(each)
    return [(denial.what, denial.reason.value, denial.count) for denial in denials.latest()]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        pytest.param({"layer": "dns", "host": "evil.test", "qtype": "A"}, "DNS A evil.test", id="a name"),
        pytest.param({"layer": "dns", "host_raw": "\\x1b[31m.test", "qtype": "A"}, "DNS A \\x1b[31m.test", id="no name"),
        pytest.param({"layer": "dns"}, "DNS", id="no query at all"),
        pytest.param(
            {"layer": "connection", "host": "evil.test", "port": 443, "scheme": "https"},
            "connection to evil.test port 443",
            id="a connection",
        ),
        pytest.param(
            {"layer": "connection", "host": "11.6.6.6", "address": "11.6.6.6", "port": 22},
            "connection to (a bare address) port 22",
            id="a bare address is only called one",
        ),
        pytest.param({"layer": "connection", "port": 0}, "connection to nowhere", id="no destination"),
        pytest.param(
            {"layer": "request", "host": "x.test", "port": 443, "scheme": "https", "method": "GET",
             "path": "/a", "query": "k=<3>"},
            "GET https://x.test/a?k=<3>",
            id="a request, its query without values",
        ),
        pytest.param(
            {"layer": "request", "host": "x.test", "port": 8080, "scheme": "http", "method": "POST", "path": "/a"},
            "POST http://x.test:8080/a",
            id="a request on another port",
        ),
        pytest.param(
            {"layer": "request", "host": "[2600:6:6::6]", "port": 80, "scheme": "http", "method": "GET", "path": "/"},
            "GET http://(a bare address)/",
            id="a request to a bare address",
        ),
        pytest.param(
            {"layer": "request", "host_raw": "a.test, b.test:81", "port": 0, "scheme": "http", "method": "GET", "path": "/"},
            "GET http://a.test, b.test:81/",
            id="a request whose names do not agree",
        ),
        pytest.param(
            {"layer": "packet", "protocol": "udp", "address": "11.6.6.6", "port": 443}, "udp packet to port 443", id="a packet"
        ),
        pytest.param({"layer": "packet", "protocol": "icmp", "address": "11.6.6.6"}, "icmp packet", id="a ping"),
    ],
)  # fmt: skip
def test_what_was_tried_is_told_in_the_sandbox_s_own_words(fields: dict[str, Any], what: str) -> None:
    assert told(record(**fields)) == [(what, "not_allowed", 1)]


def test_what_is_no_refusal_is_not_kept() -> None:
    assert (
        told(
            record(verdict="allow", reason="rule", layer="dns"),
            record(event="end", verdict=None, reason="completed", layer="request"),
            record(event="end", verdict=None, reason="client_closed", layer="request"),
            record(layer="dns", host="egressd-probe-1a2b.invalid.test", qtype="A"),
            record(event="lost", verdict=None, reason="audit_unavailable", count=3),
        )
        == []
    )


def test_asks_ends_that_deny_and_flows_that_were_cut_are_refusals_too() -> None:
    ask = record(verdict="ask", reason="approval_required", layer="dns", host="a.test", qtype="A")
    end = record(
        event="end", reason="special_address", layer="request", host="b.test", scheme="https", method="GET"
    )
    cut = record(
        event="end", verdict=None, reason="policy_changed", layer="connection", host="c.test", port=443
    )
    assert told(ask, end, cut) == [
        ("connection to c.test port 443", "policy_changed", 1),
        ("GET https://b.test", "special_address", 1),
        ("DNS A a.test", "approval_required", 1),
    ]


def test_repeats_are_counted_and_move_to_the_front() -> None:
    one = record(layer="dns", host="a.test", qtype="A")
    other = record(layer="dns", host="b.test", qtype="A")
    assert told(one, other, dataclasses.replace(one, attempt_id="a2", count=5)) == [
        ("DNS A a.test", "not_allowed", 6),
        ("DNS A b.test", "not_allowed", 1),
    ]


def test_the_ring_is_bounded_and_the_oldest_goes() -> None:
    denials = Denials()
    for number in range(3 * KEPT):
        denials.note(record(layer="dns", host=f"n{number}.test", qtype="A"))
    kept = [denial.what for denial in denials.latest()]
    assert len(denials) == KEPT
    assert kept[0] == f"DNS A n{3 * KEPT - 1}.test"
    assert kept[-1] == f"DNS A n{2 * KEPT}.test"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "event": st.sampled_from(["decision", "end", "lost"]),
            "layer": st.sampled_from([None, "dns", "connection", "request", "packet"]),
            "verdict": st.sampled_from([None, "deny", "ask", "allow"]),
            "reason": st.sampled_from([None, "no such reason", *Reason]),
            "host": st.none() | st.text(max_size=400),
            "host_raw": st.none() | st.text(max_size=400),
            "port": st.none() | st.integers(0, 65535),
            "method": st.none() | st.text(max_size=40),
            "path": st.none() | st.text(max_size=400),
            "query": st.none() | st.text(max_size=400),
            "qtype": st.none() | st.text(max_size=40),
            "protocol": st.none() | st.text(max_size=40),
            "count": st.none() | st.integers(1, 10**9),
        },
    )
)
def test_whatever_the_record_what_is_kept_is_one_short_printable_line(fields: dict[str, Any]) -> None:
    for what, _, _ in told(record(**fields)):
        assert what.isascii()
        assert what.isprintable()
        assert len(what) <= 310


def test_the_recorder_hands_on_everything_and_fails_as_the_one_behind_it() -> None:
    class Behind:
        def __init__(self) -> None:
            self.got: list[Record] = []

        def put(self, record: Record) -> None:
            self.got.append(record)

        async def commit(self, record: Record) -> None:
            self.got.append(record)
            raise AuditUnavailable

    behind, denials = Behind(), Denials()
    remembering = Remembering(behind, denials)
    denied, allowed = record(layer="dns", host="a.test"), record(verdict="allow", reason="rule", layer="dns")
    remembering.put(denied)
    with pytest.raises(AuditUnavailable):
        asyncio.run(remembering.commit(allowed))
    assert behind.got == [denied, allowed]
    assert len(denials) == 1
