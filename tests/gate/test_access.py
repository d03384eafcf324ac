"""egressd.internal/access: what a sandbox may ask there, and what it is shown; nothing that it sends becomes more than text."""

from __future__ import annotations

import json
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.access import plea_of, pleaded
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.internal import answer
from egressd.gate.limits import Budget
from egressd.gate.messages import PLEA_LIMIT, WHY_LIMIT, Petitioned
from egressd.gate.pages import Asked, Page, Plea, Unanswered
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.gate.standing import Row, Standing
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy


def sandbox(*rows: Row) -> Sandbox:
    policy = compile_policy(EffectivePolicy(profile="p"))
    return Sandbox("sbx-1", policy, SyntheticNames(1), Budget(Settings()), standing=Standing(rows=rows))


def asked(target: str, method: str = "POST", **fields: bool) -> Page | Plea | Unanswered:
    return answer(Asked(method, target, **fields), sandbox(), b"", 0.0)


GOOD = {"request": "POST https://pay.test/v1/refunds", "why": "ticket 9"}


def test_a_request_and_its_reason_are_a_plea() -> None:
    assert asked(f"/access?{urlencode(GOOD)}") == Plea(GOOD["request"], GOOD["why"])


@pytest.mark.parametrize(
    ("query", "status"),
    [
        pytest.param("", 400, id="nothing"),
        pytest.param("request=GET%20https://a.test/", 400, id="no reason"),
        pytest.param("why=x", 400, id="no request"),
        pytest.param("request=a&why=", 400, id="an empty reason"),
        pytest.param("request=a&request=b", 400, id="one twice"),
        pytest.param("request=a&why=b&more=c", 400, id="more than that"),
        pytest.param(f"request={'a' * (PLEA_LIMIT + 1)}&why=b", 400, id="too long a request"),
        pytest.param(f"request=a&why={'b' * (WHY_LIMIT + 1)}", 400, id="too long a reason"),
        pytest.param("&" * 1000, 400, id="separators alone"),
    ],
)
def test_what_is_no_plea_is_told_how_to_ask(query: str, status: int) -> None:
    found = asked(f"/access?{query}")
    assert isinstance(found, Unanswered)
    assert found.status == status


@pytest.mark.parametrize(
    ("method", "target", "fields", "status", "allow"),
    [
        ("POST", "/policy", {}, 405, "GET, HEAD"),
        ("PUT", "/access", {}, 405, "GET, HEAD, POST"),
        ("POST", "/access", {"body": True}, 400, None),
        ("POST", "/access/", {}, 405, "GET, HEAD"),
        ("GET", "/access", {"upgrade": True}, 400, None),
    ],
)
def test_nothing_else_is_taken(
    method: str, target: str, fields: dict[str, bool], status: int, allow: str | None
) -> None:
    found = asked(target, method, **fields)
    assert isinstance(found, Unanswered)
    assert (found.status, found.allow) == (status, allow)


@given(st.text(max_size=600), st.text(max_size=600))
def test_whatever_is_sent_is_a_bounded_plea_or_none(request: str, why: str) -> None:
    found = plea_of(f"/access?request={quote(request, errors='replace')}&why={quote(why, errors='replace')}")
    assert isinstance(found, Plea | Unanswered)
    if isinstance(found, Plea):
        assert 0 < len(found.request) <= PLEA_LIMIT
        assert 0 < len(found.why) <= WHY_LIMIT


@given(st.text(max_size=300))
def test_any_query_has_an_answer(query: str) -> None:
    assert isinstance(plea_of(f"/access?{query}"), Plea | Unanswered)


def test_how_requests_stand_is_shown_on_lines_of_our_own() -> None:
    rows = (
        Row(id="apr-2", what="GET https://a.test/\n\x1b[2J", state="waiting", asked=0.0),
        Row(
            id="apr-1",
            what="POST https://b.test/",
            state="approved",
            asked=1e300,
            until=900.0,
            covers="POST https://b.test/, with…",
        ),
    )
    page = answer(Asked("GET", "/access"), sandbox(*rows), b"", 0.0)
    assert isinstance(page, Page)
    text = page.body.decode("ascii")
    assert "\x1b" not in text
    assert '1970-01-01T00:00:00Z apr-2 "GET https://a.test/\\n\\u001b[2J"\n  waits for a person' in text
    assert "  until 1970-01-01T00:15:00Z" in text
    told = answer(Asked("GET", "/access", json=True), sandbox(*rows), b"", 0.0)
    assert isinstance(told, Page)
    assert [row["state"] for row in json.loads(told.body)["requests"]] == ["waiting", "approved"]


@pytest.mark.parametrize(
    ("state", "status"),
    [("waiting", None), ("approved", None), ("denied", None), ("refused", 422), (None, 503)],
)
def test_what_comes_of_a_plea_is_said_at_once(state: str | None, status: int | None) -> None:
    came = (
        Petitioned.model_validate({"ticket": 1, "state": state, "approval": "apr-1", "detail": "no"})
        if state
        else None
    )
    for as_json in (False, True):
        found = pleaded(came, as_json=as_json)
        assert (found.status if isinstance(found, Unanswered) else None) == status
        if isinstance(found, Page) and as_json:
            assert json.loads(found.body)["state"] == state
