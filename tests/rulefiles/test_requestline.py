from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.attempt import Attempt, ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.rulefiles.requestline import Asked, BadLine, parse_request_line

A = ("a", "example")
GOOD: list[tuple[str, Attempt]] = [
    ("GET https://a.example/x?y=1", RequestAttempt(A, 443, "https", "GET", "/x?y=1")),
    ("GET https://A.Example", RequestAttempt(A, 443, "https", "GET", "/")),
    ("GET https://a.example?y", RequestAttempt(A, 443, "https", "GET", "/?y")),
    ("POST http://a.example:8080/", RequestAttempt(A, 8080, "http", "POST", "/")),
    ("WEBSOCKET https://a.example/", RequestAttempt(A, 443, "https", "GET", "/", "websocket")),
    ("GET wss://a.example/", RequestAttempt(A, 443, "https", "GET", "/", "websocket")),
    ("GET http://0x7f.1/", RequestAttempt(IPv4Address("127.0.0.1"), 80, "http", "GET", "/")),
    ("GET http://[::1]:1/", RequestAttempt(IPv6Address("::1"), 1, "http", "GET", "/")),
    ("GET https://a.example//x/../y", RequestAttempt(A, 443, "https", "GET", "//x/../y")),
    ("tcp://a.example:22", ConnectionAttempt(A, 22, "tcp")),
    ("dns:a.example", DnsQuestion(A)),
    ("dns:a.example./TXT", DnsQuestion(A)),
]


@pytest.mark.parametrize(("text", "attempt"), GOOD, ids=[text for text, _ in GOOD])
def test_a_request_is_taken_as_written(text: str, attempt: Attempt) -> None:
    assert parse_request_line(text) == Asked(text, attempt, "TXT" if text.endswith("TXT") else "A")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GET",
        "https://a.example/",
        "get https://a.example/",
        "GET ftp://a.example/",
        "GET HTTPS://a.example/",
        "GET https://a.example/#x",
        "GET https://a.example/a b",
        "GET https://a.example/ü",
        "GET https://user@a.example/",
        "GET https://ü.example/",
        "GET https://a.example:0/",
        "GET  https://a.example/",
        "POST wss://a.example/",
        "tcp://a.example",
        "tcp://a.example:99999",
        "dns:",
        "dns:a..b",
        "dns:a.example/txt",
        "GET https://a.example/" + "x" * 20_000,
    ],
)
def test_what_is_no_request_says_why(text: str) -> None:
    found = parse_request_line(text)
    assert isinstance(found, BadLine)
    assert found.detail


@given(st.text(max_size=60))
def test_parsing_is_total(text: str) -> None:
    for prefix in ("", "GET https://", "tcp://", "dns:"):
        parse_request_line(prefix + text)
