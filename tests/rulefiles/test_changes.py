"""What `explain` proposes does what it says, and no more than that is proposed where the organisation has the last word."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.compile import compile_policy
from egressd.rulefiles.claims import judge
from egressd.rulefiles.explain import Explanation, explain
from egressd.rulefiles.load import Rules
from egressd.rulefiles.requestline import Asked, parse_request_line
from tests.rulefiles.test_composition import NOW, load

SERVICE = {
    "schema": 1,
    "service": "forge",
    "description": "fetching",
    "owner": "team",
    "reviewed": "2026-11-30",
    "sources": ["its manual"],
    "parameters": {"repos": {"type": "repo"}, "region": {"type": "enum", "values": ["eu", "us"]}},
    "entries": [
        {
            "hosts": ["{region}.forge.example.com"],
            "requests": ["GET /{repo}/info?x=1", "POST /{repo}.git/fetch"],
        },
        {"hosts": ["*.cdn.example.com"], "requests": ["GET /{region}/{repo}/**"]},
    ],
}


def told(request: str, organisation: dict[str, object] | None = None, **profile: object) -> Explanation:
    rules = load(
        organisation={"schema": 1} | (organisation or {}),
        services__forge=SERVICE,
        profiles__p={"schema": 1, "profile": "p", **profile},
    )
    assert isinstance(rules, Rules), str(rules)
    asked = parse_request_line(request)
    assert isinstance(asked, Asked), asked
    return explain(rules, "p", asked, NOW)


def whats(found: Explanation) -> list[str]:
    return [change.what for change in found.changes]


@pytest.mark.parametrize(
    ("request_", "values"),
    [
        ("POST https://eu.forge.example.com/a/b.git/fetch", {"region": ["eu"], "repos": ["a/b"]}),
        ("GET https://us.forge.example.com/a/b/info?x=1", {"region": ["us"], "repos": ["a/b"]}),
        ("GET https://x.cdn.example.com/eu/a/b/c/d", {"region": ["eu"], "repos": ["a/b"]}),
        ("GET https://us.forge.example.com/a/b/info?x=2", None),
        ("GET https://ap.forge.example.com/a/b/info?x=1", None),
        ("PUT https://eu.forge.example.com/a/b.git/fetch", None),
    ],
)
def test_a_service_is_proposed_with_the_values_that_the_request_has(
    request_: str, values: dict[str, list[str]] | None
) -> None:
    proposed = [change.text for change in told(request_).changes if "service: forge" in change.text]
    if values is None:
        assert proposed == []
    else:
        (text,) = proposed
        (entry,) = yaml.safe_load(text)["allow"]
        assert entry == {"service": "forge", "with": values}


def test_the_narrowest_comes_first() -> None:
    found = told("GET https://us.forge.example.com/a/b/c")
    assert whats(found) == [
        "this request alone",
        "every path in /a/b/",
        "reading everything on us.forge.example.com",
    ]


def test_where_everybody_has_a_place_the_whole_host_is_not_proposed() -> None:
    assert whats(told("GET https://github.com/a/b")) == ["this request alone", "every path in /a/"]


@pytest.mark.parametrize(
    ("organisation", "says"),
    [
        (
            {"ceiling": {"allow": [{"hosts": ["*.example.net"]}]}},
            "is beyond the organisation's ceiling (/organisation.yaml:1)",
        ),
        ({"deny": [{"hosts": ["a.example.com"]}]}, "a deny wins over every allow"),
    ],
)
def test_what_the_organisation_has_no_room_for_is_not_proposed(
    organisation: dict[str, object], says: str
) -> None:
    found = told("GET https://a.example.com/x/y", organisation)
    assert whats(found) == [""]
    assert says in found.changes[0].text


REQUESTS = st.builds(
    "{} {}://{}{}".format,
    st.sampled_from(["GET", "POST", "HEAD", "DELETE", "WEBSOCKET"]),
    st.sampled_from(["https", "http"]),
    st.sampled_from(["a.example.com", "eu.forge.example.com", "x.cdn.example.com:8443", "github.com"]),
    st.sampled_from(
        [
            "/",
            "/a",
            "/a/b/info?x=1",
            "/a/b.git/fetch",
            "/a//b",
            "/a/%2e",
            "/a/b?x=1&y=2",
            "/*",
            '/"',
            "/a%2Fb",
        ]
    ),
)
LINES = st.one_of(
    REQUESTS, st.sampled_from(["tcp://a.example.com:22", "dns:a.example.com", "GET https://1.2.3.4/"])
)


@settings(max_examples=150, deadline=None)
@given(LINES, st.booleans())
def test_every_proposal_alone_allows_what_was_asked(request_: str, near: bool) -> None:
    own: dict[str, Any] = (
        {"allow": [{"id": "own", "hosts": ["a.example.com"], "requests": ["GET /only"]}]} if near else {}
    )
    found = told(request_, **own)
    for change in found.changes if found.decision.verdict == "deny" else ():
        if not change.what:
            continue
        if change.text.startswith("allow:"):
            (entry,) = yaml.safe_load(change.text)["allow"]
            allow = [*own.get("allow", []), json.loads(json.dumps(entry))]
        else:
            request = change.text.split('"')[1]
            allow = [{"id": "own", "hosts": ["a.example.com"], "requests": ["GET /only", request]}]
        rules = load(
            organisation={"schema": 1},
            services__forge=SERVICE,
            profiles__p={"schema": 1, "profile": "p", "allow": allow},
        )
        assert isinstance(rules, Rules), (change, str(rules))
        policy = compile_policy(rules.effective("p"))
        assert judge(policy, found.asked, NOW).allowed, change
