"""The demo's comparison: whatever is not as the rules say is a surprise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from egressd.lab.demo.books import (
    Expectation,
    accounts,
    fits,
    imbalances,
    leaks,
    surprises,
)
from egressd.lab.demo.performer import Outcome
from egressd.lab.demo.stage import Left
from egressd.lab.demo.tally import Sent

ALLOW = {
    "event": "decision",
    "layer": "request",
    "verdict": "allow",
    "reason": "rule",
    "rule": "api",
    "host": "a.example",
}
DENY = {
    "event": "decision",
    "layer": "request",
    "verdict": "deny",
    "reason": "not_allowed",
    "host": "b.example",
}
WELCOME = Expectation(True, (ALLOW,))
REFUSED = Expectation(False, (DENY | {"rule": None},))
DID, FAILED = Outcome(True, "200", 1, 0), Outcome(False, "403 no", 1, 0)


@pytest.mark.parametrize(
    ("expectation", "inside", "outside", "records", "expected"),
    [
        pytest.param(WELCOME, DID, None, [ALLOW], [], id="allowed and recorded"),
        pytest.param(REFUSED, FAILED, DID, [DENY], [], id="refused, recorded, real"),
        pytest.param(
            WELCOME, FAILED, None, [ALLOW], ["it failed: 403 no"], id="allowed by the rules and failed"
        ),
        pytest.param(REFUSED, DID, DID, [DENY], ["it succeeded"], id="denied by the rules and succeeded"),
        pytest.param(
            WELCOME, DID, None, [], ["there is no record of request allow rule api a.example"], id="no record"
        ),
        pytest.param(
            REFUSED,
            FAILED,
            DID,
            [DENY | {"reason": "ip_literal"}],
            ["there is no record of request deny not_allowed b.example"],
            id="another reason",
        ),
        pytest.param(
            REFUSED,
            FAILED,
            DID,
            [DENY | {"rule": "some"}],
            ["there is no record of request deny not_allowed b.example"],
            id="a rule where the default should have decided",
        ),
        pytest.param(
            WELCOME,
            DID,
            None,
            [ALLOW, DENY],
            ["there is a record of request deny not_allowed b.example"],
            id="a denial on the way",
        ),
        pytest.param(
            REFUSED, FAILED, FAILED, [DENY], ["without egressd it fails too: 403 no"], id="no real attack"
        ),
        pytest.param(
            REFUSED,
            FAILED,
            None,
            [DENY],
            ["without egressd it fails too: it was not made"],
            id="not tried outside",
        ),
    ],
)
def test_what_is_not_as_the_rules_say_is_a_surprise(
    expectation: Expectation,
    inside: Outcome,
    outside: Outcome | None,
    records: list[dict[str, Any]],
    expected: list[str],
) -> None:
    assert surprises(expectation, inside, outside, records) == expected


def test_a_wish_for_none_is_a_wish_for_absence() -> None:
    assert fits({"rule": None, "layer": "dns"}, {"layer": "dns"})
    assert not fits({"rule": None}, {"rule": "api"})
    assert not fits({"rule": "api"}, {})


ATTEMPTS: list[dict[str, Any]] = [
    {"layer": "dns", "channel": "dns-udp"},
    {"layer": "dns", "channel": "dns-udp", "count": 3},
    {"layer": "dns", "channel": "dns-tcp"},
    {"layer": "connection"},
    {"layer": "connection"},
    {"layer": "request"},
    {"layer": "packet", "count": 2},
]
SENT = Sent(connections=2, dns_udp=4, dns_tcp=1, refused_packets=2)
OUTCOMES = [Outcome(True, "", 1, 0), Outcome(False, "", 0, 2)]


def test_folded_records_count_for_what_they_stand_for() -> None:
    found = accounts(SENT, OUTCOMES, ATTEMPTS)
    assert [(account.sent, account.recorded) for account in found] == [
        (4, 4),
        (1, 1),
        (2, 2),
        (1, 1),
        (2, 2),
        (2, 2),
    ]
    assert imbalances(found, SENT, []) == []


@pytest.mark.parametrize(
    ("sent", "dropped", "lost", "words"),
    [
        pytest.param(
            SENT, 1, [], "4 DNS queries over UDP were sent and 1 recorded", id="a record is missing"
        ),
        pytest.param(
            replace(SENT, connections=3), None, [], "3 TCP connections were sent", id="one was not recorded"
        ),
        pytest.param(
            replace(SENT, missed=1), None, [], "the capture in the sandbox missed 1", id="the count is blind"
        ),
        pytest.param(SENT, None, [{"count": 2}], "2 records were lost", id="the journal admits a loss"),
    ],
)
def test_books_that_do_not_balance_are_told(
    sent: Sent, dropped: int | None, lost: list[dict[str, Any]], words: str
) -> None:
    attempts = [record for number, record in enumerate(ATTEMPTS) if number != dropped]
    found = imbalances(accounts(sent, OUTCOMES, attempts), sent, lost)
    assert len(found) == 1
    assert words in found[0]


CLEAN = Left(attacker=0, metadata=0, queries=("a.example",), strangers=(), lost=0)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        pytest.param(replace(CLEAN, attacker=2), "2 packets reached the attacker", id="the attacker"),
        pytest.param(replace(CLEAN, metadata=1), "1 packets reached a metadata endpoint", id="metadata"),
        pytest.param(
            replace(CLEAN, queries=("a.example", "x.evil")), "DNS was asked for x.evil", id="a name"
        ),
        pytest.param(replace(CLEAN, strangers=("192.0.2.1",)), "packets went to 192.0.2.1", id="a stranger"),
        pytest.param(replace(CLEAN, lost=4), "the capture outside missed 4", id="a blind capture"),
    ],
)
def test_what_left_without_need_is_told(left: Left, words: str) -> None:
    assert leaks(CLEAN, {"a.example", "b.example"}) == []
    [told] = leaks(left, {"a.example"})
    assert words in told
