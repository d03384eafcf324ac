"""Grants: what they let through, what never, and for how long; each row with verdict, reason, rule and grant."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from egressd.policy.attempt import Attempt, ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import decide
from egressd.policy.grants import Grant, granted
from tests.policy.entries import NOON, allow, ask, connection, deny, policy, question, request

BOX = "sbx-00000000000000000001"
RULES = policy(
    ask("pay.test", id="asking", requests=("ANY /**",), limits={}),
    ask("keyed.test", id="keyed", requests=("POST /v1/**",), credential="stripe"),
    ask("pinned.test", id="pinned", treatment="tunnel"),
    ask("db.test", id="relayed", treatment="relay", ports=(5432,)),
    allow("half.test", id="half", requests=("GET /open",)),
    deny("evil.test", id="evil"),
    deny("half.test", id="never", requests=("ANY /never/**",)),
)


def grant(number: int = 1, **fields: Any) -> Grant:
    """A grant for POST /v1/refunds on pay.test, for a quarter of an hour from noon on."""
    given: dict[str, Any] = {
        "id": f"gnt-{number:016x}", "sandbox": BOX, "policy": RULES.digest, "host": "pay.test", "scheme": "https",
        "port": 443, "scope": "request", "method": "POST", "path": "/v1/refunds", "begins": NOON, "ends": NOON + 900,
    }  # fmt: skip
    return Grant(**(given | fields))


def judged(*grants: Grant, rules: CompiledPolicy = RULES, sandbox: str = BOX) -> CompiledPolicy:
    return granted(rules, grants, sandbox)


def verdict(rules: CompiledPolicy, attempt: Attempt, now: float = NOON + 1) -> tuple[str, str, str | None]:
    found = decide(rules, attempt, now)
    assert (found.grant is not None) == (found.reason.value == "grant")
    return found.verdict, found.reason.value, found.entry.id if found.entry else None


ASKS = ("ask", "approval_required", "asking")
ALLOWED = ("allow", "grant", "asking")
HOST: dict[str, Any] = {"scope": "host", "method": "", "path": ""}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("POST https://pay.test/v1/refunds", ALLOWED, id="the request that was reviewed"),
        pytest.param("POST https://pay.test/v1/refunds?a=b", ALLOWED, id="with whatever query"),
        pytest.param("GET https://pay.test/v1/refunds", ASKS, id="another method"),
        pytest.param("post https://pay.test/v1/refunds", ASKS, id="the method in other letters"),
        pytest.param("POST https://pay.test/v1/refunds/", ASKS, id="a slash more"),
        pytest.param("POST https://pay.test/v1/refunds/2", ASKS, id="a path below"),
        pytest.param("POST https://pay.test/V1/refunds", ASKS, id="other letters"),
        pytest.param("POST https://pay.test/v1/%72efunds", ASKS, id="a needless escape"),
        pytest.param("POST https://pay.test/v1/x/../refunds", ASKS, id="dot segments that lead there"),
        pytest.param("POST https://pay.test//v1/refunds", ASKS, id="a double slash"),
        pytest.param("POST https://pay.test/v1/refunds;a=b", ASKS, id="a path parameter"),
        pytest.param("POST https://pay.test/v1\\refunds", ASKS, id="a backslash"),
        pytest.param("POST https://pay.test/v1%2Frefunds", ASKS, id="an encoded slash"),
        pytest.param(
            "POST https://pay.test:8443/v1/refunds", ("deny", "port_not_allowed", None), id="a port"
        ),
        pytest.param("POST http://pay.test/v1/refunds", ("deny", "scheme_not_allowed", None), id="cleartext"),
        pytest.param("POST https://x.pay.test/v1/refunds", ("deny", "not_allowed", None), id="a name below"),
    ],
)
def test_a_grant_for_a_request_covers_that_request(line: str, expected: tuple[str, str, str | None]) -> None:
    assert verdict(judged(grant()), request(line)) == expected


@pytest.mark.parametrize(
    ("path", "method", "covered"),
    [
        ("/users/7/keys", "POST", True),
        ("/users/%2E%2E/keys", "POST", False),
        ("/users/../keys", "POST", False),
        ("/users//keys", "POST", False),
        ("/users/7%2F8/keys", "POST", False),
        ("/users/7/8/keys", "POST", False),
        ("/users/7/keys", "GET", False),
    ],
)
def test_a_template_stands_for_one_whole_segment(path: str, method: str, *, covered: bool) -> None:
    rules = judged(grant(scope="template", path="/users/*/keys"))
    found = verdict(rules, request(f"{method} https://pay.test{path}"))
    assert found == (ALLOWED if covered else ASKS)


def test_a_star_in_a_request_that_was_reviewed_is_a_star() -> None:
    rules = judged(grant(path="/v1/*"))
    assert verdict(rules, request("POST https://pay.test/v1/*")) == ALLOWED
    assert verdict(rules, request("POST https://pay.test/v1/refunds")) == ASKS


@pytest.mark.parametrize(
    ("fields", "now"),
    [
        pytest.param({}, NOON + 900, id="when it has ended"),
        pytest.param({}, NOON - 1, id="when the clock was set back before it was given"),
        pytest.param({}, math.nan, id="when the clock tells no number"),
        pytest.param({}, math.inf, id="when the clock tells infinity"),
        pytest.param({"sandbox": "sbx-00000000000000000002"}, NOON, id="when it is another sandbox's"),
        pytest.param({"policy": "0" * 16}, NOON, id="when it was reviewed under other rules"),
        pytest.param({"spent": True, "once": True}, NOON, id="when it was for one request, which has come"),
        pytest.param({"ends": NOON}, NOON, id="when it has no time at all"),
        pytest.param({"scope": "template", "path": "/v1/**"}, NOON, id="when its template is wider than any made here"),
        pytest.param({"scope": "template", "path": "v1"}, NOON, id="when its template is none"),
        pytest.param({"host": "PAY.test"}, NOON, id="when its host is not in normal form"),
        pytest.param({"scope": "connection"}, NOON, id="when its scope and its path do not fit"),
        pytest.param({"scope": "connection", "method": "", "path": ""}, NOON, id="when it is for bytes that nobody reads"),
        pytest.param({"path": "", "method": ""}, NOON, id="when it says no path"),
        pytest.param({"scheme": "tcp"}, NOON, id="when it is for raw bytes"),
    ],
)  # fmt: skip
def test_a_grant_is_nothing(fields: dict[str, Any], now: float) -> None:
    rules = judged(grant(**fields))
    for attempt in (
        request("POST https://pay.test/v1/refunds"),
        question("pay.test"),
        connection("https://pay.test:443"),
    ):
        if now is not math.nan and now is not math.inf:
            assert verdict(rules, attempt, now) == ASKS
        assert not decide(rules, attempt, now).allowed


def test_other_rules_end_a_grant() -> None:
    other = policy(*RULES.effective.entries, allow("new.test", id="new"))
    assert judged(grant(), rules=other).grants == {}


def test_a_name_may_be_looked_up_and_connected_to_for_a_grant() -> None:
    rules = judged(grant(), grant(2, host="else.test"))
    for host, rule in (("pay.test", "asking"), ("else.test", "gnt-0000000000000002")):
        assert verdict(rules, question(host)) == ("allow", "grant", rule)
        assert verdict(rules, connection(f"https://{host}")) == ("allow", "grant", rule)
    assert verdict(rules, connection("tcp://else.test:443"))[0] == "deny"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("POST https://evil.test/", ("deny", "denied_by_rule", "evil"), id="a host that is denied"),
        pytest.param("GET https://half.test/never/x", ("deny", "denied_by_rule", "never"), id="a path that is denied"),
        pytest.param("GET https://localhost/", ("deny", "floor_name", None), id="a name on the floor"),
        pytest.param("GET http://169.254.169.254/", ("deny", "floor_metadata", None), id="metadata"),
        pytest.param("TRACE https://else.test/", ("deny", "not_allowed", None), id="a method that is never carried"),
        pytest.param("GET https://half.test/open", ("allow", "rule", "half"), id="what a rule allows by itself"),
        pytest.param("DELETE https://half.test/open", ("allow", "grant", "gnt-0000000000000002"), id="and what it only misses"),
    ],
)  # fmt: skip
def test_no_grant_is_above_a_denial_or_the_floor(line: str, expected: tuple[str, str, str | None]) -> None:
    hosts = ("evil.test", "half.test", "localhost", "else.test")
    rules = judged(*(grant(number, host=host, **HOST) for number, host in enumerate(hosts, 1)))
    assert verdict(rules, request(line)) == expected


def test_a_grant_gets_no_body_past_the_law_and_no_dns_question() -> None:
    rules = judged(grant(**HOST))
    assert verdict(rules, request("GET https://pay.test/x", body=True)) == (
        "deny",
        "body_not_allowed",
        "asking",
    )
    assert verdict(rules, request("POST https://pay.test/x", doh=True)) == ("deny", "doh", "asking")
    upgrade = request("GET https://pay.test/x", upgrade="websocket")
    assert not decide(rules, upgrade, NOON + 1).allowed


def test_a_websocket_has_a_grant_of_its_own() -> None:
    rules = judged(grant(method="WEBSOCKET", path="/live"))
    upgrade = request("GET https://pay.test/live", upgrade="websocket")
    asks = policy(ask("pay.test", id="asking", requests=("WEBSOCKET /live",)))
    rules = judged(grant(method="WEBSOCKET", path="/live", policy=asks.digest), rules=asks)
    assert verdict(rules, upgrade) == ALLOWED
    assert not decide(rules, request("GET https://pay.test/live"), NOON + 1).allowed


def test_the_terms_are_those_of_the_rule_that_asks() -> None:
    rules = judged(grant(1, host="keyed.test", path="/v1/a"), grant(2, host="keyed.test", path="/v2/a"))
    found = decide(rules, request("POST https://keyed.test/v1/a"), NOON + 1)
    assert found.entry is not None
    assert (found.verdict, found.entry.credential) == ("allow", "stripe")
    other = decide(rules, request("POST https://keyed.test/v2/a"), NOON + 1)
    assert other.entry is not None
    assert (other.verdict, other.entry.credential, other.entry.addresses) == ("allow", None, ())


def test_what_nobody_reads_is_granted_as_a_connection() -> None:
    raw: dict[str, Any] = {"scope": "connection", "method": "", "path": ""}
    rules = judged(
        grant(1, host="pinned.test", **raw), grant(2, host="db.test", scheme="tcp", port=5432, **raw)
    )
    tunnel = decide(rules, connection("https://pinned.test:443"), NOON + 1)
    assert (tunnel.verdict, tunnel.reason, tunnel.treatment) == ("allow", "grant", "tunnel")
    relay = decide(rules, connection("tcp://db.test:5432"), NOON + 1)
    assert (relay.verdict, relay.reason, relay.treatment) == ("allow", "grant", "relay")
    assert (
        verdict(
            judged(grant(1, host="pinned.test", once=True, **raw)), connection("https://pinned.test:443")
        )[0]
        == "ask"
    )
    assert (
        verdict(judged(grant(1, host="pinned.test", **HOST)), connection("https://pinned.test:443"))[0]
        == "ask"
    )


def test_a_spent_grant_is_its_holders_alone() -> None:
    spent = grant(once=True, spent=True)
    line = "POST https://pay.test/v1/refunds"
    held = decide(judged(spent), _redeemed(line, spent.id), NOON + 1)
    assert (held.verdict, held.grant, held.once) == ("allow", spent.id, True)
    assert verdict(judged(spent), request(line)) == ASKS
    assert verdict(judged(spent), _redeemed(line, "gnt-000000000000000f")) == ASKS
    assert verdict(judged(spent), _redeemed("POST https://pay.test/v1/other", spent.id)) == ASKS
    assert verdict(judged(spent), _redeemed(line, spent.id), spent.ends) == ASKS


def test_a_grant_for_many_is_used_before_one_for_a_single_request() -> None:
    rules = judged(grant(1, once=True), grant(2))
    found = decide(rules, request("POST https://pay.test/v1/refunds"), NOON + 1)
    assert (found.grant, found.once) == ("gnt-0000000000000002", False)


def test_what_is_open_is_looked_at_again_when_a_grant_ends() -> None:
    assert RULES.next_change(NOON) == math.inf
    assert judged(grant()).next_change(NOON) == NOON + 900


def test_observing_needs_no_grant() -> None:
    rules = policy(allow("a.test"), observe_until=dt.date(2027, 4, 30))
    found = decide(
        judged(grant(host="b.test", policy=rules.digest), rules=rules),
        request("POST https://b.test/v1/refunds"),
        NOON,
    )
    assert (found.reason, found.would_deny) == ("observed", True)


@pytest.mark.parametrize(
    "fields",
    [{"id": "g"}, {"port": 0}, {"scope": "all"}, {"ends": math.inf}, {"begins": math.nan}, {"path": "/" * 2000}, {"more": 1}],
)  # fmt: skip
def test_what_is_no_grant_does_not_load(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        grant(**fields)


_PATHS = st.lists(
    st.sampled_from(["a", "b", "%2e", "..", ".", "", "*", "%2F", "A", "a;b", "%61"]), min_size=1, max_size=4
)
_HOSTS = st.sampled_from(
    ["pay.test", "keyed.test", "pinned.test", "half.test", "evil.test", "else.test", "localhost"]
)


@given(
    host=_HOSTS,
    path=_PATHS,
    method=st.sampled_from(["GET", "POST", "TRACE", "HEAD"]),
    scope=st.sampled_from(["request", "template", "host", "connection"]),
    granted_host=_HOSTS,
    granted_path=_PATHS,
)
def test_a_grant_changes_asks_and_default_denials_alone(
    host: str, path: list[str], method: str, scope: str, granted_host: str, granted_path: list[str]
) -> None:
    spelled = scope in ("request", "template")
    one = grant(
        host=granted_host,
        scope=scope,
        method="POST" if spelled else "",
        path="/" + "/".join(granted_path) if spelled else "",
    )
    attempts: list[DnsQuestion | ConnectionAttempt | RequestAttempt] = [
        request(f"{method} https://{host}/{'/'.join(path)}"),
        question(host),
        connection(f"https://{host}"),
    ]
    for attempt in attempts:
        before, after = decide(RULES, attempt, NOON + 1), decide(judged(one), attempt, NOON + 1)
        if before == after:
            continue
        assert before.verdict == "ask" or (before.verdict == "deny" and before.entry is None)
        assert before.reason.value in (
            "approval_required",
            "not_allowed",
            "path_not_allowed",
            "method_not_allowed",
        )
        assert (after.verdict, after.grant, granted_host) == ("allow", one.id, host)


def _redeemed(line: str, held: str) -> RequestAttempt:
    found = request(line)
    return RequestAttempt(found.host, found.port, found.scheme, found.method, found.target, redeemed=held)
