"""Request targets and the patterns that cover them, beside what origins make of a path. Input: pattern, newline, target."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote, urlsplit

from egressd.policy.paths import BadPattern, upper_escapes
from egressd.policy.paths import Target as RequestTarget
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.requestline import parse_request_line
from tests.fuzz.target import Target

_METHODS = (
    ("GET", None),
    ("HEAD", None),
    ("POST", None),
    ("get", None),
    ("CONNECT", None),
    ("GET", "websocket"),
)


def check(data: bytes) -> None:
    """Hold every law of targets and patterns."""
    text = data.decode("latin-1")
    first, _, rest = text.partition("\n")
    parse_request_line(text)
    parse_request_line(data.decode("utf-8", "surrogateescape"))
    target = RequestTarget(rest)
    _check_target(target)
    pattern = parse_request_pattern(first)
    if isinstance(pattern, BadPattern):
        return
    again = parse_request_pattern(pattern.text)
    assert isinstance(again, RequestPattern)
    assert again.text == pattern.text, "a pattern in normal form is not its own normal form"
    for method, upgrade in _METHODS:
        allows = pattern.refuses(method, upgrade, target) is None
        if not allows or not target.is_canonical or not target.is_origin_form:
            continue
        assert method not in ("CONNECT",)
        assert method != "get" or pattern.methods is None
        assert pattern.denies(method, upgrade, target), "an allow covers what the same deny does not"
        for other in (upper_escapes(rest), _lower_escapes(rest)):
            assert pattern.refuses(method, upgrade, RequestTarget(other)) is None, (
                "a spelling changes the verdict"
            )


def _lower_escapes(text: str) -> str:
    head, *escaped = text.split("%")
    return "%".join([head, *(piece[:2].lower() + piece[2:] for piece in escaped)])


def _check_target(target: RequestTarget) -> None:
    assert target.segments
    assert target.plain
    assert target.opened
    if not (target.is_origin_form and target.is_canonical):
        return
    path = target.path
    once = unquote(path, errors="strict")
    assert unquote(once) == once, "a second decoding reads another path"
    # A trailing slash is the only thing that normalising takes away from a path with one reading.
    assert posixpath.normpath(once) == (once.rstrip("/") or "/"), (
        "an origin that normalises reads another path"
    )
    assert not set(once) & {"\\", ";", "\0"}
    split = urlsplit(f"https://h.test{target.raw}")
    assert (upper_escapes(split.path), split.fragment) == (path, "")


def parse(data: bytes) -> object:
    """Read pattern and target, and match them."""
    first, _, rest = data.decode("latin-1").partition("\n")
    pattern, target = parse_request_pattern(first), RequestTarget(rest)
    if isinstance(pattern, BadPattern):
        return target.is_canonical
    return pattern.refuses("GET", None, target), pattern.denies("GET", None, target)


TARGET = Target(
    "requests",
    check,
    parse,
    seeds=(
        b"GET,HEAD /**\n/a/b",
        b"ANY /a/*/c\n/a/b/c?x=1",
        b"GET /a?k=v\n/a?k=v",
        b"POST /a?k=v&*\n/a?z=1&k=v",
        b"WEBSOCKET /ws\n/ws",
        b"GET /@*%2F*\n/@x%2Fy",
        b"GET /a/**/z\n/a/b/c/z",
        b"ANY,WEBSOCKET /x*y*z\n/xaybz",
        b"GET /?\n/?",
        b"GET /a\n/%61",
        b"GET /a\n/a/../a",
        b"GET /caf%C3%A9\n/caf%c3%a9",
        b"GET https://a.test/b",
        b"tcp://a.test:443",
        b"dns:a.test/AAAA",
        b"GET /a/**\n/a/%252e%252e/b",
        b"GET /" + b"*a" * 30 + b"\n/" + b"a" * 90,
    ),
    words=(
        b"/**",
        b"*",
        b"%2F",
        b"%2f",
        b"%25",
        b"%2e",
        b"..",
        b"//",
        b";",
        b"\\",
        b"?",
        b"&",
        b"=",
        b"&*",
        b"%00",
        b"\n",
        b"ANY ",
        b"GET ",
        b",",
        b"[]",
        b"%C0%AE",
        b"%E2%84%AA",
        b"#",
    ),
    most=600,
)
