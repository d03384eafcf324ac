"""What a person should look at: once, with a count, and within bounded memory."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.journal.admission import admit
from egressd.journal.alerts import QUIET_SECONDS, WINDOW_SECONDS, Alerts
from egressd.journal.record import FIELDS, Record

NOW = 1_800_000_000.0


def a_record(**fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "event": "decision",
        "sandbox": "box",
        "attempt_id": "a",
        "root_id": "r",
        "verdict": "deny",
    }
    return Record(**usual | {"layer": "request"} | fields).as_dict()


@pytest.mark.parametrize(
    ("reason", "alert"),
    [("floor_metadata", "metadata"), ("placeholder_leak", "placeholder"), ("client_credentials", "key")],
)
def test_some_reasons_are_alerts_and_control_may_write_them(reason: str, alert: str) -> None:
    found = Alerts().feed([a_record(reason=reason, host="a.example"), a_record(reason="not_allowed")], NOW)
    assert [(each["alert"], each["host"], each["root_id"]) for each in found] == [(alert, "a.example", "r")]
    admit(found[0], None, NOW)


def test_the_same_again_only_counts_until_a_while_has_passed() -> None:
    alerts = Alerts()
    tried = a_record(reason="floor_metadata", address="169.254.169.254", layer="packet", count=3)
    assert [each["count"] for each in alerts.feed([tried], NOW)] == [3]
    assert alerts.feed([tried] * 10, NOW + QUIET_SECONDS - 1) == []
    assert len(alerts.feed([tried | {"sandbox": "other"}], NOW + 1)) == 1
    assert [each["count"] for each in alerts.feed([tried], NOW + QUIET_SECONDS)] == [33]


def queries(count: int, name: str, *, length: int = 60) -> list[dict[str, Any]]:
    return [
        a_record(
            layer="dns", reason="not_allowed", host=f"{hashlib.sha256(b'%d' % n).hexdigest()[:length]}.{name}"
        )
        for n in range(count)
    ]


def test_long_names_below_one_domain_are_a_tunnel() -> None:
    (found,) = Alerts().feed(queries(50, "t.evil.co.uk"), NOW)
    assert (found["alert"], found["layer"]) == ("dns_tunnel", "dns")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(queries(12, "cdn.example.com"), id="a few"),
        pytest.param(queries(300, "example.com", length=12), id="many that are short"),
        pytest.param(queries(1, "example.com") * 500, id="the same name again and again"),
        pytest.param(
            [query for n in range(40) for query in queries(5, f"example{n}.com")],
            id="a few of each of many domains",
        ),
    ],
)
def test_what_is_no_tunnel(asked: list[dict[str, Any]]) -> None:
    assert Alerts().feed(asked, NOW) == []


def test_a_slow_trickle_below_the_rate_is_none_either() -> None:
    alerts = Alerts()
    for turn in range(20):
        assert alerts.feed(queries(10, "example.com"), NOW + turn * (WINDOW_SECONDS + 1)) == []


def test_memory_is_bounded_whatever_comes() -> None:
    alerts = Alerts()
    for n in range(6000):
        alerts.feed([a_record(reason="floor_metadata", host=f"h{n}"), *queries(1, f"x{n}.com")], NOW)
    assert len(alerts._raised) <= 4096
    assert len(alerts._asked) <= 4096


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), st.none() | st.text(max_size=4) | st.integers())))
def test_it_is_total(records: list[dict[str, Any]]) -> None:
    Alerts().feed(({"event": "decision", "layer": "dns"} | each for each in records), NOW)
