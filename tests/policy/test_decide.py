"""The decision: the normative table, line by line, each with verdict, reason and rule."""

from __future__ import annotations

import datetime as dt
from ipaddress import ip_address

import pytest

from egressd.policy.attempt import Attempt, ConnectionAttempt, Decision, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import decide, permit_address, trials
from egressd.policy.reasons import Reason
from tests.policy.entries import NOON, allow, ask, connection, deny, policy, question, request


def verdict(compiled: CompiledPolicy, attempt: Attempt, now: float = NOON) -> tuple[str, str, str | None]:
    """Verdict, reason and rule, as a record has them."""
    found = decide(compiled, attempt, now)
    return found.verdict, found.reason.value, found.entry.id if found.entry else None


API = allow("api.allowed.test", id="api", requests=("GET,HEAD /v1/**", "POST /v1/messages", "POST /v1/x?k=v"))
WILD = allow("*.wild.test", id="wild")
TUNNEL = allow("pinned.test", id="tunnel", treatment="tunnel")
RELAY = allow("db.test", id="relay", treatment="relay", ports=(5432,))
PLAIN = allow("plain.test", id="plain", schemes=("http", "https"), ports=(443, 80, 8080))
LITERAL = allow(id="literal", addresses=("10.1.0.0/16", "11.0.0.0/24"), ports=(8443,))
SOCKET = allow("ws.test", id="socket", requests=("GET /**", "WEBSOCKET /live"))
ASKING = ask("pay.test", id="asking")
EVIL = deny("evil.wild.test", "*.evil.wild.test", id="evil")
ORG = deny("paste.wild.test", id="org", origin="organisation")
GIT = deny(
    "git.wild.test",
    id="no-push",
    requests=("ANY /**/git-receive-pack", "GET /**/info/refs?service=git-receive-pack"),
)
EVERYTHING = policy(API, WILD, TUNNEL, RELAY, PLAIN, LITERAL, SOCKET, ASKING, EVIL, GIT, ORG)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(
            "GET https://api.allowed.test/v1/models", ("allow", "rule", "api"), id="what a rule allows"
        ),
        pytest.param(
            "GET https://API.Allowed.Test./v1/models", ("allow", "rule", "api"), id="in any spelling"
        ),
        pytest.param("GET https://other.test/", ("deny", "not_allowed", None), id="a host without a rule"),
        pytest.param(
            "GET https://x.api.allowed.test/v1/a",
            ("deny", "not_allowed", None),
            id="a name below an exact one",
        ),
        pytest.param(
            "GET https://evilapi.allowed.test/v1/a",
            ("deny", "not_allowed", None),
            id="NAME-04 no label boundary",
        ),
        pytest.param(
            "GET https://api.allowed.test.evil.test/", ("deny", "not_allowed", None), id="NAME-05 a prefix"
        ),
        pytest.param(
            "GET https://api.allowed.test:22/v1/a",
            ("deny", "port_not_allowed", None),
            id="NAME-25 another port",
        ),
        pytest.param(
            "GET http://api.allowed.test/v1/a", ("deny", "scheme_not_allowed", None), id="cleartext"
        ),
        pytest.param(
            "GET http://api.allowed.test:443/v1/a",
            ("deny", "scheme_not_allowed", None),
            id="cleartext on 443",
        ),
        pytest.param(
            "DELETE https://api.allowed.test/v1/a", ("deny", "method_not_allowed", None), id="another method"
        ),
        pytest.param(
            "get https://api.allowed.test/v1/a",
            ("deny", "method_not_allowed", None),
            id="HTTP-15 small letters",
        ),
        pytest.param(
            "POST https://api.allowed.test/v1/files",
            ("deny", "method_not_allowed", None),
            id="a path for reading",
        ),
        pytest.param(
            "POST https://api.allowed.test/v2/x", ("deny", "path_not_allowed", None), id="another path"
        ),
        pytest.param(
            "GET https://api.allowed.test/v1",
            ("deny", "path_not_allowed", None),
            id="the path without its slash",
        ),
        pytest.param(
            "POST https://api.allowed.test/v1/x?k=w", ("deny", "query_not_allowed", None), id="another query"
        ),
        pytest.param("POST https://api.allowed.test/v1/x?k=v", ("allow", "rule", "api"), id="the query"),
        pytest.param(
            "GET https://api.allowed.test/v1/../v2",
            ("deny", "path_ambiguous", None),
            id="HTTP-16 dot segments",
        ),
        pytest.param(
            "GET https://api.allowed.test/v1/a%2Fb", ("deny", "path_not_allowed", None), id="an encoded slash"
        ),
        pytest.param(
            "GET https://plain.test/a/../b//c;d%2e%2Fe",
            ("allow", "rule", "plain"),
            id="without path rules any path",
        ),
        pytest.param("GET https://plain.test", ("deny", "path_ambiguous", None), id="no path at all"),
        pytest.param(
            "GET https://plain.test/a b", ("deny", "path_ambiguous", None), id="a space in the target"
        ),
        pytest.param(
            "CONNECT https://plain.test/", ("deny", "method_not_allowed", None), id="HTTP-10 CONNECT"
        ),
        pytest.param(
            "TRACE https://pinned.test/", ("deny", "method_not_allowed", "tunnel"), id="TRACE beside a tunnel"
        ),
        pytest.param(
            "POST https://x.wild.test/",
            ("deny", "method_not_allowed", None),
            id="by default only GET and HEAD",
        ),
        pytest.param("GET https://x.wild.test/", ("allow", "rule", "wild"), id="NAME-17 below a wildcard"),
        pytest.param("GET https://a.b.wild.test/", ("allow", "rule", "wild"), id="NAME-18 two labels below"),
        pytest.param("GET https://wild.test/", ("deny", "not_allowed", None), id="NAME-17 the apex"),
        pytest.param("GET https://_x.wild.test/", ("allow", "rule", "wild"), id="NAME-22 an odd name"),
        pytest.param(
            "GET https://evil.wild.test/", ("deny", "denied_by_rule", "evil"), id="CFG-12 deny wins"
        ),
        pytest.param(
            "GET https://x.evil.wild.test/", ("deny", "denied_by_rule", "evil"), id="a wildcard deny"
        ),
        pytest.param(
            "GET http://evil.wild.test:99/",
            ("deny", "denied_by_rule", "evil"),
            id="a deny on every port and scheme",
        ),
        pytest.param(
            "GET https://paste.wild.test/",
            ("deny", "denied_by_organisation", "org"),
            id="the organisation's deny",
        ),
        pytest.param(
            "GET https://git.wild.test/a/info/refs", ("allow", "rule", "wild"), id="beside a deny of requests"
        ),
        pytest.param(
            "GET https://git.wild.test/a/info/refs?service=git-receive-pack",
            ("deny", "denied_by_rule", "no-push"),
            id="a deny of a query",
        ),
        pytest.param(
            "GET https://git.wild.test/a/INFO/refs?x=1&service=git-receive%2Dpack",
            ("deny", "denied_by_rule", "no-push"),
            id="a deny in another spelling",
        ),
        pytest.param(
            "POST https://git.wild.test/a/git-receive-pack",
            ("deny", "denied_by_rule", "no-push"),
            id="a deny of a path",
        ),
        pytest.param(
            "GET https://git.wild.test/a/%67it",
            ("deny", "path_ambiguous", None),
            id="a deny looks at paths too",
        ),
        pytest.param("GET https://pay.test/", ("ask", "approval_required", "asking"), id="what a rule asks"),
        pytest.param(
            "POST https://pay.test/", ("deny", "method_not_allowed", None), id="what an ask does not cover"
        ),
        pytest.param(
            "GET http://plain.test/", ("allow", "rule", "plain"), id="cleartext where a rule says so"
        ),
        pytest.param(
            "GET http://plain.test:8080/", ("allow", "rule", "plain"), id="cleartext on a port of its own"
        ),
        pytest.param(
            "GET http://plain.test:443/",
            ("deny", "scheme_not_allowed", None),
            id="no cleartext on 443 beside https",
        ),
        pytest.param(
            "GET https://plain.test:80/", ("deny", "scheme_not_allowed", None), id="no TLS on 80 beside http"
        ),
        pytest.param(
            "DELETE https://pinned.test/a;b",
            ("allow", "rule", "tunnel"),
            id="what a tunnel carries is not judged",
        ),
        pytest.param(
            "GET https://10.1.2.3:8443/",
            ("allow", "rule", "literal"),
            id="a literal address that a rule names",
        ),
        pytest.param("GET https://167838211:8443/", ("allow", "rule", "literal"), id="in another spelling"),
        pytest.param(
            "GET https://10.1.2.3/",
            ("deny", "port_not_allowed", None),
            id="a literal address on another port",
        ),
        pytest.param(
            "GET https://11.0.1.1:8443/", ("deny", "ip_literal", None), id="IP-15 a public literal address"
        ),
        pytest.param(
            "GET https://192.168.1.1:8443/", ("deny", "ip_literal", None), id="a private literal address"
        ),
        pytest.param(
            "GET https://[2606:4700::1]/", ("deny", "ip_literal", None), id="a literal IPv6 address"
        ),
        pytest.param(
            "GET http://169.254.169.254/latest/", ("deny", "floor_metadata", None), id="META-01 metadata"
        ),
        pytest.param(
            "GET http://[::ffff:a9fe:a9fe]/", ("deny", "floor_metadata", None), id="IP-05 mapped metadata"
        ),
        pytest.param("GET http://0x7f.1/", ("deny", "floor_loopback", None), id="IP-02 loopback"),
        pytest.param(
            "GET http://metadata/", ("deny", "floor_metadata", None), id="META-05 metadata by its short name"
        ),
        pytest.param("GET http://intranet/", ("deny", "floor_name", None), id="NAME-26 a single label"),
    ],
)
def test_requests(line: str, expected: tuple[str, str, str | None]) -> None:
    assert verdict(EVERYTHING, request(line)) == expected


@pytest.mark.parametrize(
    ("url", "expected", "treatment"),
    [
        pytest.param("https://api.allowed.test", ("allow", "rule", "api"), "inspect", id="inspected"),
        pytest.param("https://pinned.test", ("allow", "rule", "tunnel"), "tunnel", id="a tunnel"),
        pytest.param(
            "http://pinned.test", ("deny", "scheme_not_allowed", None), "inspect", id="no tunnel in clear"
        ),
        pytest.param("tcp://db.test:5432", ("allow", "rule", "relay"), "relay", id="a relay"),
        pytest.param("https://db.test:5432", ("allow", "rule", "relay"), "relay", id="TLS inside a relay"),
        pytest.param(
            "tcp://db.test:5433", ("deny", "port_not_allowed", None), "inspect", id="a relay's other port"
        ),
        pytest.param(
            "tcp://api.allowed.test:443",
            ("deny", "scheme_not_allowed", None),
            "inspect",
            id="POL-05 raw bytes on 443",
        ),
        pytest.param(
            "tcp://api.allowed.test:22",
            ("deny", "port_not_allowed", None),
            "inspect",
            id="NAME-25 raw bytes on 22",
        ),
        pytest.param(
            "https://git.wild.test",
            ("allow", "rule", "wild"),
            "inspect",
            id="a deny of requests leaves the host open",
        ),
        pytest.param(
            "https://evil.wild.test", ("deny", "denied_by_rule", "evil"), "inspect", id="a denied host"
        ),
        pytest.param(
            "tcp://evil.wild.test:22",
            ("deny", "denied_by_rule", "evil"),
            "inspect",
            id="raw bytes to a denied host",
        ),
        pytest.param(
            "https://pay.test",
            ("ask", "approval_required", "asking"),
            "inspect",
            id="a host that is only asked for",
        ),
        pytest.param(
            "https://nowhere.test", ("deny", "not_allowed", None), "inspect", id="a host without a rule"
        ),
        pytest.param(
            "https://10.1.2.3:8443", ("allow", "rule", "literal"), "inspect", id="a literal address"
        ),
        pytest.param(
            "tcp://168.63.129.16:53", ("deny", "floor_metadata", None), "inspect", id="META-06 on every port"
        ),
    ],
)
def test_connections(url: str, expected: tuple[str, str, str | None], treatment: str) -> None:
    assert verdict(EVERYTHING, connection(url)) == expected
    assert decide(EVERYTHING, connection(url), NOON).treatment == treatment


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("api.allowed.test", ("allow", "rule", "api"), id="an allowed name"),
        pytest.param("db.test", ("allow", "rule", "relay"), id="a relayed name"),
        pytest.param("x.api.allowed.test", ("deny", "not_allowed", None), id="DNS-04 below an exact name"),
        pytest.param("git.wild.test", ("allow", "rule", "wild"), id="a name with denied requests"),
        pytest.param("evil.wild.test", ("deny", "denied_by_rule", "evil"), id="a denied name"),
        pytest.param("pay.test", ("ask", "approval_required", "asking"), id="a name that is asked for"),
        pytest.param("metadata.google.internal", ("deny", "floor_metadata", None), id="META-05 metadata"),
        pytest.param("4.3.2.1.in-addr.arpa", ("deny", "floor_name", None), id="a reverse name"),
    ],
)
def test_questions(name: str, expected: tuple[str, str, str | None]) -> None:
    assert verdict(EVERYTHING, question(name)) == expected


def test_a_name_is_not_looked_up_when_every_port_of_it_is_denied() -> None:
    rules = (
        allow("a.test", id="a", schemes=("https", "http"), ports=(443, 80)),
        deny("a.test", id="d", ports=(443,)),
    )
    assert verdict(policy(*rules), question("a.test")) == ("allow", "rule", "a")
    closed = policy(*rules, deny("a.test", id="e", ports=(80,)))
    assert verdict(closed, question("a.test")) == ("deny", "denied_by_rule", "e")  # of the lowest port


def test_a_name_is_asked_for_when_one_of_its_ports_is_denied_and_another_is_asked_for() -> None:
    rules = policy(ask("a.test", id="q", ports=(443, 8443)), deny("a.test", ports=(443,)))
    assert verdict(rules, question("a.test")) == ("ask", "approval_required", "q")


@pytest.mark.parametrize(
    ("upgrade", "line", "expected"),
    [
        pytest.param(
            "websocket", "GET https://ws.test/live", ("allow", "rule", "socket"), id="a WebSocket on its path"
        ),
        pytest.param(
            "websocket",
            "GET https://ws.test/other",
            ("deny", "upgrade_not_allowed", None),
            id="HTTP-14 on another",
        ),
        pytest.param(
            "websocket",
            "GET https://plain.test/",
            ("deny", "upgrade_not_allowed", None),
            id="without a pattern",
        ),
        pytest.param(
            "websocket",
            "POST https://ws.test/live",
            ("deny", "method_not_allowed", None),
            id="by another method",
        ),
        pytest.param(
            "h2c", "GET https://ws.test/live", ("deny", "upgrade_not_allowed", "socket"), id="HTTP-11 h2c"
        ),
        pytest.param(
            "", "GET https://ws.test/live", ("deny", "upgrade_not_allowed", "socket"), id="an empty token"
        ),
        pytest.param(
            "websocket", "GET https://pinned.test/", ("allow", "rule", "tunnel"), id="inside a tunnel"
        ),
    ],
)
def test_upgrades(upgrade: str, line: str, expected: tuple[str, str, str | None]) -> None:
    assert verdict(EVERYTHING, request(line, upgrade=upgrade)) == expected


@pytest.mark.parametrize(
    ("requests", "line", "expected"),
    [
        pytest.param(
            ["GET,POST /**"], "POST https://a.test/dns-query", ("deny", "doh", "a"), id="by a wide rule"
        ),
        pytest.param(
            ["POST /dns-*"], "POST https://a.test/dns-query", ("deny", "doh", "a"), id="by a pattern"
        ),
        pytest.param(
            ["POST /dns-query"], "POST https://a.test/dns-query", ("allow", "rule", "a"), id="spelled"
        ),
        pytest.param(
            ["GET /dns-query"],
            "GET https://a.test/dns-query?dns=AAAB",
            ("allow", "rule", "a"),
            id="spelled, by GET",
        ),
        pytest.param(
            ["POST /dns-query", "GET,POST /**"],
            "POST https://a.test/other",
            ("deny", "doh", "a"),
            id="another path",
        ),
        pytest.param(
            ["GET /x"], "POST https://a.test/x", ("deny", "method_not_allowed", None), id="not allowed anyway"
        ),
    ],
)
def test_dns_26_a_dns_question_passes_only_where_its_path_is_spelled(
    requests: list[str], line: str, expected: tuple[str, str, str | None]
) -> None:
    rules = policy(allow("a.test", id="a", requests=tuple(requests)))
    assert verdict(rules, request(line, doh=True)) == expected


def test_dns_26_a_dns_question_is_not_observed() -> None:
    rules = policy(observe_until=dt.date(2027, 4, 1))
    assert verdict(rules, request("POST https://nowhere.test/dns-query", doh=True)) == ("deny", "doh", None)


def test_reading_carries_no_body_and_no_long_target() -> None:
    rules = policy(allow("a.test", id="a", requests=("ANY /**",)), allow(id="web", public_web=True))
    fits, over = "/" + "x" * (8 * 1024 - 1), "/" + "x" * 8 * 1024
    assert verdict(rules, request("GET https://a.test/", body=True)) == ("deny", "body_not_allowed", "a")
    assert verdict(rules, request("HEAD https://a.test/", body=True)) == ("deny", "body_not_allowed", "a")
    assert verdict(rules, request("DELETE https://a.test/", body=True)) == ("allow", "rule", "a")
    assert verdict(rules, request(f"GET https://a.test{fits}")) == ("allow", "rule", "a")
    assert verdict(rules, request(f"GET https://a.test{over}")) == ("deny", "target_too_long", "a")
    wide = "/" + "\u00e9" * 4096  # counted in bytes
    assert verdict(rules, request(f"GET https://a.test{wide}")) == ("deny", "target_too_long", "a")
    assert verdict(rules, request(f"POST https://a.test{over}")) == ("allow", "rule", "a")
    assert verdict(rules, request(f"GET https://example.com{fits[: 2 * 1024]}")) == ("allow", "rule", "web")
    assert verdict(rules, request(f"GET https://example.com{fits[: 2 * 1024 + 1]}")) == (
        "deny",
        "target_too_long",
        "web",
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("GET https://example.com/", ("allow", "rule", "web"), id="a name of the public web"),
        pytest.param("POST https://example.com/", ("deny", "method_not_allowed", None), id="only reading"),
        pytest.param("GET http://example.com/", ("deny", "scheme_not_allowed", None), id="only https"),
        pytest.param("GET https://example.com:8443/", ("deny", "port_not_allowed", None), id="only its port"),
        pytest.param("GET https://db.corp.internal/", ("deny", "not_allowed", None), id="no private suffix"),
        pytest.param("GET https://8.8.8.8/", ("deny", "ip_literal", None), id="no addresses"),
        pytest.param("GET https://pastebin.com/x", ("deny", "denied_by_rule", "sink"), id="deny wins"),
        pytest.param(
            "GET https://api.example.com/",
            ("ask", "approval_required", "wild"),
            id="a wildcard is more specific",
        ),
    ],
)
def test_public_web(line: str, expected: tuple[str, str, str | None]) -> None:
    rules = policy(
        allow(id="web", public_web=True), deny("pastebin.com", id="sink"), ask("*.example.com", id="wild")
    )
    assert verdict(rules, request(line)) == expected


@pytest.mark.parametrize(
    ("rules", "line", "winner"),
    [
        pytest.param(
            [allow("*.b.test", id="w"), allow("a.b.test", id="x")], "GET /", "x", id="exact before wildcard"
        ),
        pytest.param(
            [allow("*.test.test", id="n"), allow("*.b.test", id="w")],
            "GET /",
            "w",
            id="the wildcard that matches",
        ),
        pytest.param(
            [allow("b.test", "*.b.test", id="s"), allow("*.a.b.test", id="l")],
            "GET /",
            "s",
            id="not a longer one that does not",
        ),
        pytest.param(
            [
                allow("a.b.test", id="s", requests=("GET /**",)),
                allow("a.b.test", id="l", requests=("GET /x",)),
            ],
            "GET /x",
            "l",
            id="a literal path before everything",
        ),
        pytest.param(
            [
                allow("a.b.test", id="d", requests=("GET /x/**",)),
                allow("a.b.test", id="s", requests=("GET /x/*",)),
            ],
            "GET /x/y",
            "s",
            id="a star before a double star",
        ),
        pytest.param(
            [allow("a.b.test", id="1"), allow("a.b.test", id="2")], "GET /", "1", id="then file order"
        ),
        pytest.param([allow("a.b.test", id="1"), ask("a.b.test", id="2")], "GET /", "2", id="a tie asks"),
        pytest.param(
            [ask("a.b.test", id="1"), allow("a.b.test", id="2")],
            "GET /",
            "1",
            id="a tie asks in either order",
        ),
        pytest.param(
            [ask("*.b.test", id="1"), allow("a.b.test", id="2")],
            "GET /",
            "2",
            id="a more specific allow does not ask",
        ),
        pytest.param(
            [allow("*.b.test", id="1"), ask("a.b.test", id="2")], "GET /", "2", id="a more specific ask asks"
        ),
        pytest.param(
            [ask("a.b.test", id="1"), allow("a.b.test", id="2", requests=("GET /x",))],
            "GET /x",
            "2",
            id="by path as well",
        ),
        pytest.param(
            [allow("a.b.test", id="1", requests=("POST /**",)), allow("*.b.test", id="2")],
            "GET /",
            "2",
            id="only of those that cover",
        ),
    ],
)
def test_the_most_specific_entry_wins(rules: list[object], line: str, winner: str) -> None:
    method, path = line.split(" ")
    found = decide(policy(*rules), request(f"{method} https://a.b.test{path}"), NOON)  # type: ignore[arg-type]  # rows of entries
    assert found.entry is not None
    assert found.entry.id == winner


def test_the_longest_wildcard_wins() -> None:
    rules = policy(allow("*.test.example", id="short"), allow("*.b.test.example", id="long"))
    assert verdict(rules, request("GET https://a.b.test.example/")) == ("allow", "rule", "long")
    assert verdict(rules, request("GET https://a.test.example/")) == ("allow", "rule", "short")


def test_the_treatment_is_that_of_the_most_specific_entry() -> None:
    inspected = allow("a.b.test", id="inspected")
    tunnelled = allow("*.b.test", id="tunnelled", treatment="tunnel")
    rules = policy(tunnelled, inspected)
    assert decide(rules, connection("https://a.b.test"), NOON).treatment == "inspect"
    assert decide(rules, connection("https://c.b.test"), NOON).treatment == "tunnel"
    # What the tunnel would carry unseen does not come in by the side door of a request that is seen.
    assert verdict(rules, request("POST https://a.b.test/")) == ("deny", "method_not_allowed", None)
    both = (allow("a.test", id="1", treatment="tunnel"), allow("a.test", id="2"))
    assert decide(policy(*both), connection("https://a.test"), NOON).treatment == "tunnel"
    assert decide(policy(*reversed(both)), connection("https://a.test"), NOON).treatment == "inspect"


def test_a_tunnel_is_denied_or_asked_as_a_whole() -> None:
    tunnel = allow("a.test", id="t", treatment="tunnel")
    for attempt in (connection("https://a.test"), request("GET https://a.test/")):
        asking = policy(tunnel, ask("a.test", id="q", requests=("POST /x",)))
        assert verdict(asking, attempt) == ("ask", "approval_required", "q")
        denying = policy(tunnel, deny("a.test", id="d", requests=("POST /x",)))
        assert verdict(denying, attempt) == ("deny", "denied_by_rule", "d")


def test_a_connection_is_open_when_some_request_on_it_may_be_allowed() -> None:
    rules = policy(
        ask("a.test", id="q", requests=("POST /x",)), allow("a.test", id="a", requests=("GET /y",))
    )
    assert verdict(rules, connection("https://a.test")) == ("allow", "rule", "a")
    assert verdict(rules, request("POST https://a.test/x")) == ("ask", "approval_required", "q")
    assert verdict(rules, request("GET https://a.test/y")) == ("allow", "rule", "a")


def test_a_deny_covers_what_it_names() -> None:
    open_ = allow("a.test", schemes=("https", "http"), ports=(443, 80, 8443))
    https, http, other = (
        connection(url) for url in ("https://a.test", "http://a.test", "https://a.test:8443")
    )

    def denied(**fields: object) -> list[bool]:
        return [
            not decide(policy(open_, deny("a.test", **fields)), attempt, NOON).allowed
            for attempt in (https, http, other)
        ]

    assert denied() == [True, True, True]
    assert denied(ports=(443,)) == [True, False, False]
    assert denied(schemes=("http",)) == [False, True, False]
    assert denied(schemes=("https",)) == [True, False, True]
    # An entry with exactly the defaults may be one that says nothing, and then means the whole host.
    assert denied(schemes=("https",), ports=(443,)) == [True, True, True]


def test_the_organisation_is_named_first() -> None:
    rules = policy(allow("a.test"), deny("a.test", id="p"), deny("a.test", id="o", origin="organisation"))
    assert verdict(rules, request("GET https://a.test/")) == ("deny", "denied_by_organisation", "o")


def test_an_entry_is_absent_after_its_last_day() -> None:
    day = dt.date(2027, 3, 31)
    last = dt.datetime(2027, 3, 31, 23, 59, 59, tzinfo=dt.UTC).timestamp()
    rules = policy(
        allow("a.test", id="a", expires=day), allow("b.test", id="b"), deny("b.test", id="d", expires=day)
    )
    assert verdict(rules, request("GET https://a.test/"), last) == ("allow", "rule", "a")
    assert verdict(rules, request("GET https://a.test/"), last + 1) == ("deny", "not_allowed", None)
    assert verdict(rules, question("a.test"), last + 1) == ("deny", "not_allowed", None)
    assert verdict(rules, request("GET https://b.test/"), last) == ("deny", "denied_by_rule", "d")
    assert verdict(rules, request("GET https://b.test/"), last + 1) == ("allow", "rule", "b")
    assert verdict(rules, request("GET https://a.test/"), float("nan")) == ("deny", "not_allowed", None)
    assert verdict(rules, request("GET https://b.test/"), float("nan")) == ("deny", "denied_by_rule", "d")


def test_an_expired_path_rule_no_longer_asks_for_canonical_paths() -> None:
    rules = policy(
        allow("a.test", id="a"), deny("a.test", requests=("GET /x",), expires=dt.date(2027, 3, 30))
    )
    assert verdict(rules, request("GET https://a.test/y/../z")) == ("allow", "rule", "a")


OBSERVED = ("allow", "observed", None)


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        pytest.param(request("POST https://nowhere.test/x"), OBSERVED, id="a host without a rule"),
        pytest.param(request("POST https://a.test/x"), OBSERVED, id="a method"),
        pytest.param(request("GET http://a.test/x"), OBSERVED, id="a scheme"),
        pytest.param(request("GET https://a.test:8443/x"), OBSERVED, id="a port"),
        pytest.param(request("GET https://a.test/live", upgrade="websocket"), OBSERVED, id="a WebSocket"),
        pytest.param(connection("https://nowhere.test"), OBSERVED, id="a connection"),
        pytest.param(question("nowhere.test"), OBSERVED, id="a look-up"),
        pytest.param(question("d.test"), ("deny", "denied_by_rule", "d"), id="a look-up of a denied name"),
        pytest.param(request("GET https://a.test/x"), ("allow", "rule", "a"), id="what a rule allows"),
        pytest.param(
            request("GET https://d.test/"), ("deny", "denied_by_rule", "d"), id="a deny still denies"
        ),
        pytest.param(
            request("GET https://n.test/x/y"),
            ("deny", "denied_by_rule", "n"),
            id="a deny of a path still denies",
        ),
        pytest.param(
            request("GET https://n.test/%78/y"),
            ("deny", "path_ambiguous", None),
            id="and is not walked round",
        ),
        pytest.param(
            request("GET https://q.test/"), ("ask", "approval_required", "q"), id="an ask still asks"
        ),
        pytest.param(
            request("GET https://nowhere.test/", body=True),
            ("deny", "body_not_allowed", None),
            id="limits still hold",
        ),
        pytest.param(
            request("GET https://nowhere.test/" + "x" * 8192),
            ("deny", "target_too_long", None),
            id="of targets too",
        ),
        pytest.param(
            request("GET https://nowhere.test/", upgrade="h2c"),
            ("deny", "upgrade_not_allowed", None),
            id="of upgrades",
        ),
        pytest.param(
            request("CONNECT https://nowhere.test/"), ("deny", "method_not_allowed", None), id="of methods"
        ),
        pytest.param(
            connection("tcp://nowhere.test:22"), ("deny", "not_allowed", None), id="unread bytes need a rule"
        ),
        pytest.param(
            connection("https://8.8.8.8"), ("deny", "ip_literal", None), id="a bare address is a name error"
        ),
        pytest.param(
            connection("https://169.254.169.254"),
            ("deny", "floor_metadata", None),
            id="the floor still holds",
        ),
        pytest.param(question("localhost"), ("deny", "floor_name", None), id="for names too"),
    ],
)
def test_observing(attempt: Attempt, expected: tuple[str, str, str | None]) -> None:
    last = dt.date(2027, 3, 31)
    rules = policy(
        allow("a.test", id="a", requests=("GET /**",)),
        deny("d.test", id="d"),
        deny("n.test", id="n", requests=("GET /x/**",)),
        ask("q.test", id="q"),
        observe_until=last,
    )
    assert verdict(rules, attempt) == expected
    found = decide(rules, attempt, NOON)
    assert found.would_deny is (found.reason is Reason.OBSERVED)
    after = decide(rules, attempt, NOON + 86400)
    assert after.reason is not Reason.OBSERVED
    assert after.verdict == ("deny" if found.reason is Reason.OBSERVED else found.verdict)


@pytest.mark.parametrize(
    ("addresses", "address", "expected"),
    [
        pytest.param((), "11.0.0.1", None, id="a public address"),
        pytest.param((), "10.0.0.5", Reason.SPECIAL_ADDRESS, id="IP-12 a private address"),
        pytest.param((), "127.0.0.1", Reason.FLOOR_LOOPBACK, id="IP-12 loopback"),
        pytest.param((), "::ffff:11.0.0.1", Reason.SPECIAL_ADDRESS, id="IP-05 a mapped address"),
        pytest.param(("10.20.0.0/16",), "10.20.1.1", None, id="a range that the rule names"),
        pytest.param(("10.20.0.0/16",), "10.21.1.1", Reason.ADDRESS_OUTSIDE_RULE, id="beside it"),
        pytest.param(("10.20.0.0/16",), "11.0.0.1", Reason.ADDRESS_OUTSIDE_RULE, id="a public one beside it"),
        pytest.param(("10.20.0.0/16",), "fd00::1", Reason.ADDRESS_OUTSIDE_RULE, id="of the other family"),
        pytest.param(
            ("0.0.0.0/0",),
            "169.254.169.254",
            Reason.FLOOR_METADATA,
            id="IP-17 META-12 the floor under a wide range",
        ),
        pytest.param(
            ("fc00::/7",), "fd00:ec2::254", Reason.FLOOR_METADATA, id="IP-17 the floor under unique local"
        ),
        pytest.param(
            ("100.64.0.0/10",), "100.100.100.200", Reason.FLOOR_METADATA, id="IP-17 the floor in shared space"
        ),
    ],
)
def test_the_addresses_that_may_be_dialled(
    addresses: tuple[str, ...], address: str, expected: Reason | None
) -> None:
    rules = policy(allow("a.test", addresses=addresses))
    found = decide(rules, request("GET https://a.test/"), NOON)
    assert found.allowed
    assert permit_address(rules, found, ip_address(address)) is expected


def test_nothing_is_dialled_for_what_is_not_allowed() -> None:
    address = ip_address("11.0.0.1")
    for found in (Decision("deny", Reason.NOT_ALLOWED), Decision("ask", Reason.APPROVAL_REQUIRED)):
        assert permit_address(EVERYTHING, found, address) is found.reason


def test_what_is_only_observed_is_dialled_at_public_addresses() -> None:
    rules = policy(observe_until=dt.date(2027, 4, 1))
    found = decide(rules, request("GET https://a.test/"), NOON)
    assert permit_address(rules, found, ip_address("11.0.0.1")) is None
    assert permit_address(rules, found, ip_address("10.0.0.1")) is Reason.SPECIAL_ADDRESS


def test_a_deny_of_a_network_holds_for_names_too() -> None:
    wide = allow("a.test", addresses=("10.0.0.0/8",))
    rules = policy(
        wide,
        deny(
            addresses=("10.9.0.0/16",), ports=(22, 443), expires=dt.date(2027, 3, 31), origin="organisation"
        ),
    )
    found = decide(rules, request("GET https://a.test/"), NOON)
    inside = ip_address("10.9.1.1")
    assert permit_address(rules, found, ip_address("10.8.1.1")) is None
    assert permit_address(rules, found, inside) is Reason.DENIED_BY_ORGANISATION
    assert permit_address(rules, found, inside, port=443, now=NOON) is Reason.DENIED_BY_ORGANISATION
    assert permit_address(rules, found, inside, port=8443, now=NOON) is None
    assert permit_address(rules, found, inside, port=443, now=NOON + 86400) is None


def test_a_deny_of_requests_on_a_network_does_not_hold_for_names() -> None:
    rules = policy(allow("a.test"), deny(addresses=("11.0.0.0/24",), requests=("GET /x",)))
    found = decide(rules, request("GET https://a.test/x"), NOON)
    assert permit_address(rules, found, ip_address("11.0.0.1")) is None


def test_a_literal_address_is_not_observed_on_another_port() -> None:
    rules = policy(allow(addresses=("11.0.0.0/24",), ports=(8443,)), observe_until=dt.date(2027, 4, 1))
    assert verdict(rules, connection("https://11.0.0.1")) == ("deny", "port_not_allowed", None)


def test_the_narrowest_network_decides_on_a_literal_address() -> None:
    rules = policy(
        allow(id="wide", addresses=("10.0.0.0/8",), ports=(443,)),
        ask(id="narrow", addresses=("10.1.0.0/16",), ports=(443,)),
        deny(id="no", addresses=("10.1.1.0/24",)),
    )
    assert verdict(rules, connection("https://10.2.0.1")) == ("allow", "rule", "wide")
    assert verdict(rules, request("GET https://10.1.0.1/")) == ("ask", "approval_required", "narrow")
    assert verdict(rules, connection("https://10.1.1.1")) == ("deny", "denied_by_rule", "no")
    found = decide(rules, connection("https://10.2.0.1"), NOON)
    assert permit_address(rules, found, ip_address("10.2.0.1")) is None
    assert permit_address(rules, found, ip_address("11.0.0.1")) is Reason.ADDRESS_OUTSIDE_RULE


def test_an_entry_that_nobody_compiled_permits_nothing() -> None:
    found = Decision("allow", Reason.RULE, allow("a.test", addresses=("nonsense",)))
    assert permit_address(EVERYTHING, found, ip_address("11.0.0.1")) is Reason.ADDRESS_OUTSIDE_RULE


@pytest.mark.parametrize(
    "name", [(), ("",), ("A", "test"), ("a", "1"), ("a.b", "test"), ("x" * 64, "test"), ("a", "test", "")]
)
def test_a_ready_made_name_that_is_none_is_denied(name: tuple[str, ...]) -> None:
    rules = policy(allow("*.test.test"), observe_until=dt.date(2027, 4, 1))
    for attempt in (
        DnsQuestion(name),
        ConnectionAttempt(name, 443, "https"),
        RequestAttempt(name, 443, "https", "GET", "/"),
    ):
        assert verdict(rules, attempt) == ("deny", "bad_host", None)
        assert trials(rules, attempt, NOON) == ()


def test_an_empty_policy_denies_everything() -> None:
    for attempt in (question("a.test"), connection("https://a.test"), request("GET https://a.test/")):
        assert verdict(policy(), attempt) == ("deny", "not_allowed", None)


def test_trials_tell_what_each_rule_said() -> None:
    rules = policy(
        allow("*.b.test", id="wild", requests=("POST /**",)),
        allow("a.b.test", id="old", expires=dt.date(2027, 3, 30)),
        allow("a.b.test", id="port", ports=(8443,)),
        allow("a.b.test", id="yes"),
        deny("a.b.test", id="no", requests=("GET /x",)),
        allow("c.test", id="elsewhere"),
    )
    said = [
        (trial.entry.id, trial.outcome, trial.why)
        for trial in trials(rules, request("GET https://a.b.test/"), NOON)
    ]
    assert said == [
        ("old", "expired", None),
        ("port", "misses", Reason.PORT_NOT_ALLOWED),
        ("yes", "covers", None),
        ("no", "misses", Reason.PATH_NOT_ALLOWED),
        ("wild", "misses", Reason.METHOD_NOT_ALLOWED),
    ]
    covering = [
        trial.entry.id
        for trial in trials(rules, request("GET https://a.b.test/x"), NOON)
        if trial.outcome == "covers"
    ]
    assert covering == ["yes", "no"]
    assert [trial.outcome for trial in trials(rules, connection("https://a.b.test"), NOON)] == [
        "expired",
        "misses",
        "covers",
        "covers",
        "covers",
    ]
    assert len(trials(rules, question("a.b.test"), NOON)) == 5
