"""How a denial looks: the same facts in every form, and nothing that should not be said."""

from __future__ import annotations

import json
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.refusal import Refused, prefers_json, refuse_http
from egressd.policy.reasons import WORDS, Reason

REFUSED = Refused("a1", "sb-1", ("api", "example", "com"), 443, "GET")


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_makes_a_well_formed_answer(reason: Reason) -> None:
    refusal = refuse_http(reason, REFUSED)
    head, _, body = refusal.to_http1().partition(b"\r\n\r\n")
    lines = head.decode("ascii").split("\r\n")
    assert lines[0] == f"HTTP/1.1 {refusal.status} {refusal.phrase}"
    assert 400 <= refusal.status < 600
    assert refusal.phrase.isprintable()
    assert len(lines[0]) < 512
    assert WORDS[reason].says in refusal.phrase
    assert refusal.phrase.endswith(f": api.example.com:443 (reason {reason.value})")
    assert body.decode().splitlines()[0] == refusal.phrase
    fields = dict(line.split(": ", 1) for line in lines[1:])
    assert int(fields["content-length"]) == len(body)
    assert (fields["x-egressd-reason"], fields["x-egressd-attempt"]) == (reason.value, "a1")
    assert refusal.to_http1(head_only=True) == head + b"\r\n\r\n"


def test_an_upstream_error_is_not_called_a_denial() -> None:
    assert refuse_http(Reason.UPSTREAM_DNS, REFUSED).phrase.startswith(
        "egressd: upstream error: the host's name"
    )
    assert refuse_http(Reason.UPSTREAM_TIMEOUT, REFUSED).status == 504


@pytest.mark.parametrize("accept", [None, "application/json"])
def test_no_address_is_named_not_even_the_one_that_was_asked_for(accept: str | None) -> None:
    refusal = refuse_http(
        Reason.IP_LITERAL, Refused("a1", "sb-1", IPv4Address("10.1.2.3"), 80, "GET", accept)
    )
    assert b"10.1.2.3" not in refusal.to_http1()
    assert b"a bare address" in refusal.to_http1()


def test_what_is_not_known_is_not_said() -> None:
    refusal = refuse_http(Reason.BAD_REQUEST, Refused("a1", "sb-1", accept="application/json"))
    assert refusal.phrase == "egressd: denied: the request is malformed (reason bad_request)"
    assert set(json.loads(refusal.body)) == {
        "error",
        "reason",
        "message",
        "sandbox",
        "attempt",
        "hint",
        "more",
    }


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/html, */*", False),
        ("application/json", True),
        ("application/problem+json", True),
        ("application/vnd.npm.install-v1+json; q=1.0, application/json; q=0.8, */*", True),
        ("application/json, text/plain, */*", True),
        ("text/plain, application/json;q=0.5", False),
        ("application/json;q=0", False),
        ("APPLICATION/JSON", True),
        ("application/jsonp", False),
        ("x" * 5000 + ", application/json", False),
        (";;;,,,;q=", False),
        ("application/json;q=2", True),
    ],
)
def test_json_is_for_who_asks_for_it(accept: str | None, expected: bool) -> None:
    assert prefers_json(accept) is expected


@given(st.text(max_size=300))
def test_no_accept_raises(accept: str) -> None:
    prefers_json(accept)
    refuse_http(Reason.NOT_ALLOWED, Refused("a1", "sb-1", ("a", "b"), 1, accept, accept))
