"""Compiling: what contradicts itself is refused, and a look-up costs the same among many rules as among few."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import pytest

from egressd.policy.compile import compile_policy, end_of, looks_registrable
from egressd.policy.decide import decide
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from tests.policy.entries import NOON, allow, ask, deny, entry, policy, request


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        pytest.param(allow(), "names no destination", id="no destination"),
        pytest.param(allow("Api.allowed.test"), "write 'api.allowed.test'", id="a host that is not normal"),
        pytest.param(allow("*"), "every host", id="a bare star"),
        pytest.param(allow("a.test", public_web=True), "stands alone", id="hosts beside public_web"),
        pytest.param(allow(addresses=("10.0.0.1/8",)), "addresses", id="IP-18 host bits"),
        pytest.param(allow(addresses=("010.0.0.0/8",)), "addresses", id="IP-18 leading zeros"),
        pytest.param(
            allow(addresses=("10.0.0.1",)), "write '10.0.0.1/32'", id="IP-18 a network without its length"
        ),
        pytest.param(allow(addresses=("::ffff:10.0.0.0/104",)), "addresses", id="IP-18 mapped IPv4"),
        pytest.param(allow(addresses=("fd00::%eth0/64",)), "no zone", id="IP-18 a zone"),
        pytest.param(
            allow("a.test", addresses=("169.254.0.0/16",)), "no rule can allow", id="IP-17 a floor range"
        ),
        pytest.param(allow("a.test", addresses=("127.0.0.1/32",)), "no rule can allow", id="IP-17 loopback"),
        pytest.param(
            allow("a.test", addresses=("198.18.1.0/24",)), "no rule can allow", id="IP-17 synthetic addresses"
        ),
        pytest.param(
            deny("a.test", addresses=("10.0.0.0/8",)), "not both", id="a deny of hosts and addresses"
        ),
        pytest.param(allow("a.test", schemes=()), "no scheme", id="no scheme"),
        pytest.param(allow("a.test", ports=()), "no port", id="no port"),
        pytest.param(allow("a.test", ports=(0,)), "1 to 65535", id="port 0"),
        pytest.param(allow("a.test", ports=(65536,)), "1 to 65535", id="port 65536"),
        pytest.param(
            allow("a.test", treatment="tunnel", requests=("GET /",)), "not read", id="requests in a tunnel"
        ),
        pytest.param(
            allow("a.test", treatment="relay", credential="c"), "not read", id="a credential in a relay"
        ),
        pytest.param(
            allow("a.test", treatment="tunnel", schemes=("http",)), "TLS hello", id="a tunnel of http"
        ),
        pytest.param(
            allow("a.test", credential="c"), "names its requests", id="a credential without requests"
        ),
        pytest.param(
            allow("a.test", credential="c", requests=("GET /",), schemes=("https", "http")),
            "https only",
            id="a credential in clear",
        ),
        pytest.param(
            deny("a.test", credential="c", requests=("GET /",)), "deny", id="a credential in a deny"
        ),
        pytest.param(allow("a.test", requests=("get /",)), "capitals", id="a bad request"),
        pytest.param(allow(public_web=True, schemes=("http",)), "https only", id="public_web in clear"),
        pytest.param(
            allow(public_web=True, requests=("POST /**",)), "only reads", id="public_web that writes"
        ),
        pytest.param(
            allow(public_web=True, requests=("ANY /**",)), "only reads", id="public_web of any method"
        ),
        pytest.param(
            allow(public_web=True, requests=("GET,WEBSOCKET /**",)),
            "only reads",
            id="public_web of WebSockets",
        ),
        pytest.param(ask(public_web=True), "an allow", id="public_web that asks"),
    ],
)
def test_a_contradiction_does_not_compile(broken: EffectiveEntry, why: str) -> None:
    with pytest.raises(ValueError, match=broken.place) as caught:
        policy(broken)
    assert why in str(caught.value)


def test_observing_needs_an_end() -> None:
    with pytest.raises(ValueError, match="ends"):
        compile_policy(EffectivePolicy(profile="agent", mode="observe"))


def test_a_wide_range_that_holds_a_piece_of_the_floor_compiles() -> None:
    policy(allow("a.test", addresses=("0.0.0.0/0", "fc00::/7", "10.0.0.0/8")))


def test_the_digest_names_the_policy() -> None:
    one = allow("a.test", id="one", place="p:1")
    assert policy(one).digest == policy(one).digest == policy(one).effective.digest()
    assert policy(one).digest != policy(one, deny("b.test")).digest
    assert policy(one).profile == "agent"
    assert policy(one).mode == "enforce"


def test_an_entry_ends_with_its_last_day() -> None:
    assert end_of(dt.date(2027, 3, 31)) == dt.datetime(2027, 4, 1, tzinfo=dt.UTC).timestamp()
    assert end_of(None) == float("inf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (("example", "com"), True),
        (("com",), False),
        ((), False),
        (("a", "test"), False),
        (("db", "internal"), False),
        (("x", "local"), False),
        (("x", "xn--p1ai"), True),
        (("x", "a-b"), False),
    ],
)
def test_names_that_could_be_registered(name: tuple[str, ...], expected: bool) -> None:
    assert looks_registrable(name) is expected


def test_what_is_public_web_is_told_from_outside() -> None:
    web = EffectivePolicy(profile="agent", entries=(allow(public_web=True),))
    attempt = request("GET https://lab.test/")
    assert not decide(compile_policy(web), attempt, NOON).allowed
    assert decide(compile_policy(web, registrable=lambda name: len(name) == 2), attempt, NOON).allowed


def _many(count: int) -> EffectivePolicy:
    fields: dict[str, Any] = {"id": "many", "place": "p:1"}
    half = count // 2
    entries = [
        entry("allow", *(f"h{n}.example.com" for n in range(half)), **fields),
        *(entry("deny", f"*.d{n}.example.com", **fields) for n in range(half)),
    ]
    return EffectivePolicy(profile="agent", entries=tuple(entries))


def _cost(count: int) -> float:
    compiled = compile_policy(_many(count))
    attempts = [
        request("GET https://h7.example.com/"),
        request("GET https://a.b.d7.example.com/"),
        request("GET https://no.test/"),
    ]
    verdicts = [decide(compiled, attempt, NOON).verdict for attempt in attempts]
    assert verdicts == ["allow", "deny", "deny"]
    best = float("inf")
    for _ in range(20):
        started = time.thread_time()
        for attempt in attempts * 20:
            decide(compiled, attempt, NOON)
        best = min(best, time.thread_time() - started)
    return best


def test_a_decision_costs_the_same_among_a_hundred_thousand_hosts() -> None:
    few, many = _cost(100), _cost(100_000)
    assert many < few * 10, f"{few / 60 * 1e6:.1f} us among 100 hosts, {many / 60 * 1e6:.1f} us among 100,000"
