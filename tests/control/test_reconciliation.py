"""The kernel's counts against the records: only what is missing is told, of the right layer."""

from __future__ import annotations

from typing import Any

import pytest

from egressd.control.reconciliation import Found, losses
from egressd.journal.admission import admit
from egressd.policy.reasons import Reason
from egressd.wiring.drops import Dropped
from egressd.wiring.ruleset import Counted

SANDBOX = "sbx-1"


def record(layer: str, event: str = "decision", **fields: Any) -> dict[str, Any]:
    return {"event": event, "sandbox": SANDBOX, "layer": layer} | fields


RECORDS = [
    record("connection", channel="transparent"),
    record("connection", channel="connect"),
    record("connection", channel="transparent", count=10),
    record("connection", "end", channel="transparent"),
    record("request", channel="transparent"),
    record("dns", channel="dns-udp"),
    record("dns", channel="dns-udp", count=4),
    record("dns", "lost", channel="dns-udp", count=100),
    record("dns", channel="dns-tcp"),
    record("dns", channel="dns-tcp", further=True),
    record("dns", channel="dns-tcp", further=True, count=7),
    record("packet", channel="nflog", count=2),
    record("connection", sandbox="sbx-2"),
]
FOUND = Counted(connections=12, dns_connections=1, dns_datagrams=105, packets=2)


def lost(counted: Counted, records: list[dict[str, Any]] = RECORDS) -> list[dict[str, Any]]:
    found = Found()
    found.begin(SANDBOX)
    found.feed(records)
    return [each.as_dict() for each in losses(SANDBOX, counted, found.end(SANDBOX), Reason.WORKER_DIED)]


def test_as_many_records_as_attempts_leave_nothing_to_tell() -> None:
    assert lost(FOUND) == []


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        pytest.param(Counted(13, 1, 105, 2), ("connection", None, 1, "worker_died"), id="a connection"),
        pytest.param(Counted(12, 3, 105, 2), ("dns", "dns-tcp", 2, "worker_died"), id="connections to the resolver"),
        pytest.param(Counted(12, 1, 115, 2), ("dns", "dns-udp", 10, "worker_died"), id="queries"),
        pytest.param(Counted(12, 1, 105, 3), ("packet", "nflog", 1, "protocol_not_allowed"), id="a packet"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_by_layer_and_number(counted: Counted, told: tuple[Any, ...]) -> None:
    (record,) = lost(counted)
    fields = "layer", "channel", "count", "reason"
    assert tuple(record.get(name) for name in fields) == told
    assert admit(record, None, 0.0)["event"] == "lost"


def test_more_records_than_attempts_hide_no_loss_of_another_kind() -> None:
    (record,) = lost(Counted(connections=5, dns_connections=1, dns_datagrams=106, packets=2))
    assert (record["channel"], record["count"]) == ("dns-udp", 1)


def test_all_is_missing_where_nothing_was_recorded() -> None:
    assert [record["count"] for record in lost(FOUND, [])] == [12, 1, 105, 2]


def test_a_sandbox_is_counted_from_its_beginning_to_its_end() -> None:
    found = Found()
    found.feed(RECORDS)
    assert found.end(SANDBOX) == {}
    found.begin(SANDBOX)
    found.feed(RECORDS)
    assert found.end(SANDBOX)["connections"] == 12
    assert found.end(SANDBOX) == {}


def test_of_what_was_only_dropped_all_is_missing() -> None:
    records_ = losses(SANDBOX, Dropped(3, 2), {"dns_datagrams": 100, "packets": 100}, Reason.REVOKED)
    assert [(each.layer, each.count) for each in records_] == [("dns", 3), ("packet", 2)]
    assert losses(SANDBOX, Dropped(), {}, Reason.REVOKED) == []
