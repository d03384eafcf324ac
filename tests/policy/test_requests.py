"""Request patterns: methods, queries, upgrades, and the words for a pattern that cannot stand."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from egressd.policy.paths import BadPattern, Target
from egressd.policy.reasons import Reason
from egressd.policy.requests import RequestPattern, is_carried, parse_request_pattern

PATH = Reason.PATH_NOT_ALLOWED
METHOD = Reason.METHOD_NOT_ALLOWED
QUERY = Reason.QUERY_NOT_ALLOWED
UPGRADE = Reason.UPGRADE_NOT_ALLOWED


def pattern(text: str) -> RequestPattern:
    found = parse_request_pattern(text)
    assert isinstance(found, RequestPattern)
    return found


@pytest.mark.parametrize(
    ("text", "method", "target", "refused"),
    [
        pytest.param("GET /a", "GET", "/a", None, id="the method"),
        pytest.param("GET /a", "HEAD", "/a", METHOD, id="GET is not HEAD"),
        pytest.param("GET,HEAD /a", "HEAD", "/a", None, id="one of the methods"),
        pytest.param("POST /a", "post", "/a", METHOD, id="HTTP-15 methods mind case"),
        pytest.param("GET /a", "GETT", "/a", METHOD, id="HTTP-15 a longer method"),
        pytest.param("ANY /a", "PROPFIND", "/a", None, id="ANY is any method"),
        pytest.param("ANY /a", "CONNECT", "/a", METHOD, id="ANY is not CONNECT"),
        pytest.param("ANY /a", "connect", "/a", METHOD, id="HTTP-15 in no case"),
        pytest.param("ANY /a", "TRACE", "/a", METHOD, id="ANY is not TRACE"),
        pytest.param("ANY /a", "G T", "/a", METHOD, id="ANY is a token"),
        pytest.param("ANY /a", "", "/a", METHOD, id="ANY is not nothing"),
        pytest.param("WEBSOCKET /a", "GET", "/a", METHOD, id="a WebSocket pattern is no GET"),
        pytest.param("GET /a", "POST", "/b", PATH, id="the path is the first thing told"),
        pytest.param("GET /a", "GET", "/a?x=1", None, id="without a question mark any query"),
        pytest.param("GET /a?", "GET", "/a", None, id="a bare question mark: no query"),
        pytest.param("GET /a?", "GET", "/a?", None, id="a bare question mark: an empty query"),
        pytest.param("GET /a?", "GET", "/a?x", QUERY, id="a bare question mark: no parameter"),
        pytest.param("GET /a?k=v", "GET", "/a?k=v", None, id="that key and value"),
        pytest.param("GET /a?k=v", "GET", "/a", QUERY, id="that key is needed"),
        pytest.param("GET /a?k=v", "GET", "/a?k=w", QUERY, id="that value is needed"),
        pytest.param("GET /a?k=v", "GET", "/a?k=V", QUERY, id="a value minds case"),
        pytest.param("GET /a?k=v", "GET", "/a?k=v&k=v", QUERY, id="exactly once"),
        pytest.param("GET /a?k=v", "GET", "/a?k=v&x=1", QUERY, id="and no other"),
        pytest.param("GET /a?k=v", "GET", "/a?k=v&", QUERY, id="not even an empty one"),
        pytest.param("GET /a?k=v", "GET", "/a?k=%76", QUERY, id="nothing is decoded"),
        pytest.param("GET /a?k=v", "GET", "/a?k=v?", QUERY, id="a second question mark is text"),
        pytest.param("GET /a?k=v&l=w", "GET", "/a?l=w&k=v", None, id="two keys in any order"),
        pytest.param("GET /a?list&k=v", "GET", "/a?list&k=v", None, id="a key without a value"),
        pytest.param(
            "GET /a?list", "GET", "/a?list=", QUERY, id="a key without a value is not one with an empty one"
        ),
        pytest.param("GET /a?k=%2f", "GET", "/a?k=%2F", None, id="hex digits in either case"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&x=1&y=2", None, id="others too"),
        pytest.param("GET /a?k=v&*", "GET", "/a?x=1&k=v", None, id="others before it"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v", None, id="others need not be"),
        pytest.param("GET /a?k=v&*", "GET", "/a?x=1", QUERY, id="others alone"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&k=w", QUERY, id="the key twice"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&%6b=w", QUERY, id="the key escaped"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&K=w", QUERY, id="the key in capitals"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&k[]=w", QUERY, id="the key as a list"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&+k=w", QUERY, id="the key behind a space"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&k%00x=w", QUERY, id="the key before NUL"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&k", QUERY, id="the key without a value"),
        pytest.param("GET /a?k=v&*", "GET", "/a?k=v&x=1;k=w", QUERY, id="the key behind a semicolon"),
        pytest.param("GET /a?a_b=v&*", "GET", "/a?a_b=v&a.b=w", QUERY, id="the key with a dot"),
    ],
)
def test_allow(text: str, method: str, target: str, refused: Reason | None) -> None:
    assert pattern(text).refuses(method, None, Target(target)) is refused


@pytest.mark.parametrize(
    ("text", "method", "refused"),
    [
        pytest.param("WEBSOCKET /a", "GET", None, id="a WebSocket needs its pattern"),
        pytest.param("GET,WEBSOCKET /a", "GET", None, id="beside methods"),
        pytest.param("ANY,WEBSOCKET /a", "GET", None, id="beside ANY"),
        pytest.param("GET /a", "GET", UPGRADE, id="GET is no upgrade"),
        pytest.param("ANY /a", "GET", UPGRADE, id="ANY is no upgrade"),
        pytest.param("WEBSOCKET /a", "POST", METHOD, id="the handshake is a GET"),
        pytest.param("WEBSOCKET /b", "GET", PATH, id="on its path"),
        pytest.param("WEBSOCKET /a?k=v", "GET", QUERY, id="with its query"),
    ],
)
def test_websocket(text: str, method: str, refused: Reason | None) -> None:
    assert pattern(text).refuses(method, "websocket", Target("/a")) is refused


@pytest.mark.parametrize(
    ("text", "method", "upgrade", "target", "denied"),
    [
        pytest.param("GET /a", "GET", None, "/a", True, id="the method"),
        pytest.param("GET /a", "get", None, "/a", True, id="HTTP-15 without case"),
        pytest.param("GET /a", "HEAD", None, "/a", True, id="GET for HEAD"),
        pytest.param("HEAD /a", "GET", None, "/a", False, id="not HEAD for GET"),
        pytest.param("GET /a", "POST", None, "/a", False, id="another method"),
        pytest.param("GET /a", "GET", "websocket", "/a", True, id="GET for the handshake"),
        pytest.param("WEBSOCKET /a", "GET", "websocket", "/a", True, id="the handshake"),
        pytest.param("WEBSOCKET /a", "GET", None, "/a", False, id="the handshake alone"),
        pytest.param("ANY /a", "TRACE", "h2c", "/a", True, id="ANY is everything"),
        pytest.param("ANY /a", "GET", None, "/b", False, id="another path"),
        pytest.param("GET /a?k=v", "GET", None, "/a?x=1&k=v&y", True, id="other keys beside it"),
        pytest.param("GET /a?k=v", "GET", None, "/a?K=%56", True, id="in another spelling"),
        pytest.param("GET /a?k=v", "GET", None, "/a?k=w&k=v", True, id="the second time"),
        pytest.param("GET /a?k=v", "GET", None, "/a?x;k=v", True, id="behind a semicolon"),
        pytest.param("GET /a?k=v;w", "GET", None, "/a?k=v;w", True, id="with a semicolon in the value"),
        pytest.param("GET /a?k=v", "GET", None, "/a?k=w", False, id="another value"),
        pytest.param("GET /a?k=v", "GET", None, "/a", False, id="no query"),
    ],
)
def test_deny_reads_wider(text: str, method: str, upgrade: str | None, target: str, denied: bool) -> None:
    assert pattern(text.replace(";", "%3B")).denies(method, upgrade, Target(target)) is denied


@pytest.mark.parametrize(
    ("text", "why", "proposal"),
    [
        pytest.param("/a", "written like", "GET,HEAD /a", id="no method"),
        pytest.param("GET", "written like", "GET /**", id="no path"),
        pytest.param("get, head  /a", "written like", "GET,HEAD /a", id="spaces and small letters"),
        pytest.param("GET, HEAD /a", "written like", "GET,HEAD /a", id="a space behind the comma"),
        pytest.param("", "written like", None, id="nothing"),
        pytest.param("GET https://x.test/a", "written like", None, id="a URL"),
        pytest.param("get /a", "capitals", "GET /a", id="small letters"),
        pytest.param("GET,,HEAD /a", "capitals", None, id="an empty method"),
        pytest.param("CONNECT /a", "never carried", None, id="CONNECT"),
        pytest.param("GET,TRACE /a", "never carried", None, id="TRACE"),
        pytest.param("GET,GET /a", "twice", "GET /a", id="a method twice"),
        pytest.param("ANY,GET /a", "every other", "ANY /a", id="ANY and another"),
        pytest.param("GET /a/**/**", "twice", "GET /a/**", id="a bad path keeps its method in the proposal"),
        pytest.param("GET /a?*", "every query", None, id="any query"),
        pytest.param("GET /a?k=*", "at the end", None, id="a star for a value"),
        pytest.param("GET /a?k=v&k=w", "twice", None, id="a key twice"),
        pytest.param("GET /a?k=v&&l=w", "written like", None, id="an empty parameter"),
        pytest.param("GET /a?k=a b", "written like", None, id="a space in the query"),
        pytest.param("GET /a?k={x}", "written like", None, id="a parameter left over"),
    ],
)
def test_a_pattern_that_cannot_stand(text: str, why: str, proposal: str | None) -> None:
    found = parse_request_pattern(text)
    assert isinstance(found, BadPattern)
    assert why in found.detail
    assert found.proposal == proposal
    if proposal is not None:
        assert isinstance(parse_request_pattern(proposal), RequestPattern)


def test_the_text_is_kept_in_normal_form() -> None:
    assert pattern("GET,POST /a%2fb?k=%c3").text == "GET,POST /a%2Fb?k=%C3"


def test_what_is_carried_is_a_token() -> None:
    assert [
        method
        for method in ("GET", "M-SEARCH", "Trace", "", "A B", "G\u00c9T", "PATCH")
        if is_carried(method)
    ] == [
        "GET",
        "M-SEARCH",
        "PATCH",
    ]


@given(st.text(max_size=40), st.text(max_size=10), st.sampled_from([None, "websocket"]), st.text(max_size=40))
@example("GET /\ud800?\ud800", "\ud800", None, "/?\ud800=%ff")
def test_everything_is_total(text: str, method: str, upgrade: str | None, target: str) -> None:
    parse_request_pattern(text)
    for line in ("ANY,WEBSOCKET /**", "GET /a?k=v&*", "GET /**?", "POST /*?x"):
        pattern(line).refuses(method, upgrade, Target(target))
        pattern(line).denies(method, upgrade, Target(target))


@given(st.lists(st.sampled_from(["k=v", "k=w", "x=1", "K=v", "", "k", "a;k=v"]), max_size=5))
def test_what_an_allow_covers_a_deny_covers_too(pieces: list[str]) -> None:
    target = Target("/a?" + "&".join(pieces))
    for line in ("GET /a", "GET /a?", "GET /a?k=v", "GET /a?k=v&*", "GET /a?k=v&x=1"):
        if pattern(line).refuses("GET", None, target) is None:
            assert pattern(line).denies("GET", None, target)
