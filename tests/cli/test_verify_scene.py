"""What the probes begin with: a request that the rules allow, and names that they just do not."""

from __future__ import annotations

import datetime as dt

import pytest

from egressd.cli.verify_scene import MOST_EDGES, allowed_request, edges, is_allowed, wildcard_suffix
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import decide
from egressd.verify.scene import Allowed
from tests.policy.entries import NOON, allow, ask, deny, policy, question

SERVED = {"https": frozenset({443, 8443}), "http": frozenset({80})}
EVIL = "evil.example"


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        pytest.param(policy(allow("a.com")), Allowed("a.com", 443, "https", "GET", "/verify"), id="any path"),
        pytest.param(
            policy(allow("a.com", requests=("POST /x", "GET,HEAD /v1/*/b?k=v&*"))),
            Allowed("a.com", 443, "https", "GET", "/v1/verify/b?k=v"),
            id="a pattern is filled in",
        ),
        pytest.param(
            policy(allow("*.b.com"), allow("a.com")),
            Allowed("a.com", 443, "https", "GET", "/verify"),
            id="an exact name first",
        ),
        pytest.param(
            policy(allow("*.b.com")),
            Allowed("verify.b.com", 443, "https", "GET", "/verify"),
            id="below a wildcard",
        ),
        pytest.param(
            policy(allow("a.com", schemes=("http",), ports=(80,))),
            Allowed("a.com", 80, "http", "GET", "/verify"),
            id="in clear",
        ),
        pytest.param(
            policy(allow("a.com", ports=(9000, 8443))),
            Allowed("a.com", 8443, "https", "GET", "/verify"),
            id="a served port",
        ),
        pytest.param(policy(allow("a.com", ports=(9000,))), None, id="a port that nobody answers on"),
        pytest.param(policy(allow("a.com", requests=("POST /x",))), None, id="nothing to read"),
        pytest.param(policy(allow("a.com", treatment="tunnel")), None, id="a tunnel"),
        pytest.param(
            policy(allow("a.com", credential="c", requests=("GET /**",))), None, id="with a credential"
        ),
        pytest.param(policy(allow("a.com", addresses=("10.0.0.0/8",))), None, id="in a private range"),
        pytest.param(policy(allow("a.com"), deny("a.com")), None, id="what a denial takes back"),
        pytest.param(policy(ask("a.com")), None, id="what must be asked for"),
        pytest.param(policy(allow("a.com", expires=dt.date(2020, 1, 1))), None, id="what has expired"),
        pytest.param(policy(), None, id="nothing at all"),
        pytest.param(policy(observe_until=dt.date(2027, 4, 10)), None, id="what is only observed"),
    ],
)
def test_a_request_is_found_that_is_really_allowed(rules: CompiledPolicy, found: Allowed | None) -> None:
    assert allowed_request(rules, NOON, SERVED) == found


@pytest.mark.parametrize(
    ("rules", "suffix"),
    [
        pytest.param(policy(allow("a.com"), allow("*.b.com")), "b.com", id="a wildcard"),
        pytest.param(policy(allow("a.com")), "", id="none"),
        pytest.param(policy(allow("*.b.com"), deny("*.b.com")), "", id="one that is denied"),
    ],
)
def test_a_wildcard_is_found(rules: CompiledPolicy, suffix: str) -> None:
    assert wildcard_suffix(rules, NOON) == suffix


def test_beside_an_exact_name_lie_its_children_its_parent_and_what_looks_like_it() -> None:
    found = {edge.name: edge.what for edge in edges(policy(allow("api.a.com")), EVIL, NOON)}
    assert found == {
        "verify.api.a.com": "below api.a.com",
        "verifyapi.a.com": "ends as api.a.com does",
        "verify-api.a.com": "ends as api.a.com does, behind a hyphen",
        "api.a.com.evil.example": "begins as api.a.com does",
        "a.com": "above api.a.com",
    }


def test_beside_a_wildcard_lies_its_apex() -> None:
    found = {edge.name for edge in edges(policy(allow("*.a.com")), EVIL, NOON)}
    assert found == {"a.com", "verifya.com", "verify-a.com", "a.com.evil.example"}


def test_what_another_rule_allows_is_no_edge() -> None:
    found = {
        edge.name
        for edge in edges(policy(allow("api.a.com"), allow("a.com"), allow("*.api.a.com")), EVIL, NOON)
    }
    assert found.isdisjoint({"a.com", "verify.api.a.com", "api.a.com"})
    assert "verifyapi.a.com" in found


def test_every_edge_is_refused_by_the_rules_and_a_hundred_rules_get_their_turn() -> None:
    rules = policy(*(allow(f"host{number}.site{number}.com") for number in range(100)))
    found = edges(rules, EVIL, NOON)
    assert len(found) == MOST_EDGES
    assert not any(decide(rules, question(edge.name), NOON).allowed for edge in found)
    assert len({edge.name.split(".")[-2] for edge in found}) == MOST_EDGES


def test_what_observing_lets_through_is_an_edge_all_the_same() -> None:
    rules = policy(allow("api.a.com"), observe_until=dt.date(2027, 4, 10))
    assert "verify.api.a.com" in {edge.name for edge in edges(rules, EVIL, NOON)}


@pytest.mark.parametrize(
    ("rules", "name", "allowed"),
    [
        (policy(allow("a.com")), "a.com", True),
        (policy(allow("a.com")), "b.com", False),
        (policy(allow("a.com"), observe_until=dt.date(2027, 4, 10)), "b.com", False),
        (policy(allow("a.com")), "no name", False),
    ],
)
def test_a_name_is_allowed_by_a_rule_or_not_at_all(rules: CompiledPolicy, name: str, allowed: bool) -> None:
    assert is_allowed(rules, name, NOON) is allowed
