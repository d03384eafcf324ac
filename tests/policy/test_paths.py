"""Paths: the table of the rule language, what is ambiguous, and matching in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from egressd.policy.paths import (
    MAX_PATTERN,
    MAX_SEGMENTS,
    BadPattern,
    PathPattern,
    Target,
    parse_path_pattern,
)


def pattern(text: str) -> PathPattern:
    found = parse_path_pattern(text)
    assert isinstance(found, PathPattern)
    return found


@pytest.mark.parametrize(
    ("text", "path", "allowed"),
    [
        pytest.param("/a/b", "/a/b", True, id="a literal path"),
        pytest.param("/a/b", "/a/b/", False, id="anchored at the end"),
        pytest.param("/a/b", "/x/a/b", False, id="anchored at the start"),
        pytest.param("/a/b", "/A/b", False, id="an allow minds case"),
        pytest.param("/", "/", True, id="the root"),
        pytest.param("/a/*", "/a/b", True, id="a star is a segment"),
        pytest.param("/a/*", "/a/", False, id="a star is one character at least"),
        pytest.param("/a/*", "/a/b/c", False, id="a star stays in its segment"),
        pytest.param("/*.tar.gz", "/x.tar.gz", True, id="a star before text"),
        pytest.param("/*.tar.gz", "/.tar.gz", False, id="a star before text is not nothing"),
        pytest.param("/a*b*c", "/aXbYc", True, id="two stars"),
        pytest.param("/a*b*c", "/abbc", False, id="two stars take a character each"),
        pytest.param("/a*b*c", "/aabbcc", True, id="two stars find later letters"),
        pytest.param("/*a", "/aa", True, id="a star takes the letter that follows it too"),
        pytest.param("/a/**", "/a/", True, id="a double star includes the bare slash"),
        pytest.param("/a/**", "/a", False, id="a double star excludes the path without it"),
        pytest.param("/a/**", "/a/b/c/", True, id="a double star crosses segments"),
        pytest.param("/a/**", "/ab", False, id="a double star keeps the segment before it"),
        pytest.param("/**", "/", True, id="everything includes the root"),
        pytest.param("/**/b", "/b", True, id="a double star in front may be nothing"),
        pytest.param("/**/b", "/a/a/b", True, id="a double star in front may be much"),
        pytest.param("/**/b", "/ab", False, id="a double star in front is whole segments"),
        pytest.param("/a/**/b/**/c", "/a/b/c", True, id="two double stars may be nothing"),
        pytest.param("/a/**/b/**/c", "/a/x/b/y/b/c", True, id="two double stars find a later middle"),
        pytest.param("/a/**/b/**/c", "/a/x/c", False, id="two double stars keep the middle"),
        pytest.param("/**/*.git/info/refs", "/g/h/r.git/info/refs", True, id="a glob behind a double star"),
        pytest.param("/**/", "/a/", True, id="a slash at the end is a segment"),
        pytest.param("/@*%2F*", "/@acme%2fpkg", True, id="an encoded slash that is spelled"),
        pytest.param("/@*%2F*", "/@acme%2Fpkg", True, id="an encoded slash in either case"),
        pytest.param("/@*%2F*", "/@acme/pkg", False, id="an encoded slash is no slash"),
        pytest.param("/@*%2F*", "/@a%2Fb%2Fc", False, id="an encoded slash once, not twice"),
        pytest.param("/*", "/a%2Fb", False, id="a star takes no encoded slash"),
        pytest.param("/x/**", "/x/a%2Fb", False, id="a double star takes no encoded slash"),
        pytest.param("/x/**", "/x/y/a%2Fb", False, id="nor later"),
        pytest.param("/**", "/a%2Fb", True, id="everything is everything"),
        pytest.param("/a%20b", "/a%20b", True, id="an escape as it stands"),
        pytest.param("/%C3%A9", "/%c3%a9", True, id="hex digits in either case"),
        pytest.param("/a", "/a?b", True, id="the query is not the path"),
    ],
)
def test_allow(text: str, path: str, allowed: bool) -> None:
    target = Target(path)
    assert target.is_canonical
    assert pattern(text).allows(target) is allowed


@pytest.mark.parametrize(
    ("text", "path", "denied"),
    [
        pytest.param("/admin/**", "/ADMIN/x", True, id="without case"),
        pytest.param("/admin", "/adm%C4%B1n", False, id="another letter is another letter"),
        pytest.param("/%C3%84", "/%C3%A4", True, id="without case beyond ASCII"),
        pytest.param("/@evil/**", "/%40evil/x", True, id="an escaped delimiter is the delimiter"),
        pytest.param("/%40evil/**", "/@evil/x", True, id="the other way round"),
        pytest.param("/a/b", "/a%2Fb", True, id="an encoded slash separates"),
        pytest.param("/a%2Fb", "/a/b", True, id="a spelled one is met by a plain one"),
        pytest.param("/*", "/a%2Fb", True, id="an encoded slash is a letter too"),
        pytest.param("/a/**", "/a/b%2Fc", True, id="a double star takes it"),
        pytest.param("/a*c", "/a*c", True, id="a literal star in the target"),
        pytest.param("/a%2Ac", "/a*c", True, id="an escaped star is literal"),
        pytest.param("/a%2Ac", "/abc", False, id="an escaped star is no joker"),
        pytest.param("/admin", "/admin/x", False, id="anchored"),
    ],
)
def test_deny_reads_wider(text: str, path: str, denied: bool) -> None:
    assert pattern(text).denies(Target(path)) is denied


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/public/../secret", id="HTTP-16 dot segments"),
        pytest.param("/public/./x", id="HTTP-16 a single dot"),
        pytest.param("/public/..", id="HTTP-16 dots at the end"),
        pytest.param("/..", id="HTTP-16 dots alone"),
        pytest.param("/public/%2e%2e/secret", id="HTTP-16 escaped dots"),
        pytest.param("/public/.%2E/secret", id="HTTP-16 half escaped dots"),
        pytest.param("/public/..;/secret", id="HTTP-16 a path parameter"),
        pytest.param("/public/x;y", id="HTTP-16 any semicolon"),
        pytest.param("/public/x%3by", id="HTTP-16 an escaped semicolon"),
        pytest.param("/public//../secret", id="HTTP-16 a double slash"),
        pytest.param("//x", id="HTTP-16 a double slash in front"),
        pytest.param("/x//", id="HTTP-16 a double slash at the end"),
        pytest.param("/public\\..\\secret", id="HTTP-16 backslashes"),
        pytest.param("/public%5c..%5csecret", id="HTTP-16 escaped backslashes"),
        pytest.param("/public%2f..%2fsecret", id="HTTP-16 dots between escaped slashes"),
        pytest.param("/@a%2F..", id="HTTP-16 dots behind an escaped slash"),
        pytest.param("/a%2F%2Fb", id="HTTP-16 two escaped slashes"),
        pytest.param("/a/%2Fb", id="HTTP-16 an escaped slash behind a slash"),
        pytest.param("/a%2F", id="HTTP-16 an escaped slash at the end"),
        pytest.param("/%61dmin", id="an escaped letter"),
        pytest.param("/a%2Db", id="an escaped hyphen"),
        pytest.param("/%7Euser", id="an escaped tilde"),
        pytest.param("/%35", id="an escaped digit"),
        pytest.param("/a%5Fb", id="an escaped underscore"),
        pytest.param("/%252e%252e/x", id="an escape of an escape"),
        pytest.param("/a%00.txt", id="NUL"),
        pytest.param("/a%0d%0ab", id="line ends"),
        pytest.param("/a%", id="a percent sign alone"),
        pytest.param("/a%2", id="half an escape"),
        pytest.param("/a%zz", id="no hex digits"),
        pytest.param("/a%u002e", id="an escape of another kind"),
        pytest.param("/%c0%ae%c0%ae/", id="overlong dots"),
        pytest.param("/%e9", id="Latin-1"),
        pytest.param("/\u00e9", id="raw text outside ASCII"),
        pytest.param("/\udcff", id="a raw byte"),
    ],
)
def test_ambiguous(path: str) -> None:
    assert not Target(path).is_canonical


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/a/b/",
        "/.well-known/x",
        "/...",
        "/a..b",
        "/..a",
        "/a%20b",
        "/%C3%A9",
        "/@a%2Fb",
        "/a:b@c,d=e+f!$&'()*",
        "/50%25",
        "/a|b[c]",
    ],
)
def test_canonical(path: str) -> None:
    assert Target(path + "?../%2e//;").is_canonical


@pytest.mark.parametrize(
    "raw", ["*", "", "a", "http://x/", "/a b", "/a\tb", "/a#b", "/a\0", "/a?b\r\n", "/\x7f"]
)
def test_what_is_no_origin_form(raw: str) -> None:
    assert not Target(raw).is_origin_form


@pytest.mark.parametrize(
    ("text", "why", "proposal"),
    [
        pytest.param("a/b", "starts with", "/a/b", id="no slash in front"),
        pytest.param("", "starts with", None, id="nothing"),
        pytest.param("/a**", "whole segments", None, id="a double star inside a segment"),
        pytest.param("/a/***", "whole segments", None, id="three stars"),
        pytest.param("/a/**/**/b", "twice", "/a/**/b", id="two double stars in a row"),
        pytest.param("/{repo}/x", "not filled in", None, id="a parameter left over"),
        pytest.param("/caf\u00e9", "wire", "/caf%C3%A9", id="text outside ASCII"),
        pytest.param("/a b", "escape", None, id="a space"),
        pytest.param("/a;b", "character", None, id="a semicolon"),
        pytest.param("/a/../b", "no request can match", None, id="dot segments"),
        pytest.param("/a//b", "no request can match", None, id="a double slash"),
        pytest.param("/%61", "no request can match", None, id="a needless escape"),
        pytest.param("/" + "a" * MAX_PATTERN, "characters", None, id="too long"),
    ],
)
def test_a_pattern_that_cannot_stand(text: str, why: str, proposal: str | None) -> None:
    found = parse_path_pattern(text)
    assert isinstance(found, BadPattern)
    assert why in found.detail
    assert found.proposal == proposal
    if proposal is not None:
        assert isinstance(parse_path_pattern(proposal), PathPattern)


def test_rank_orders_literal_before_star_before_double_star() -> None:
    assert [pattern(text).rank for text in ("/a", "/*", "/a*b/c", "/**", "/*/**")] == [0, 1, 1, 2, 2]


PIECES = st.sampled_from(["a", "b", "ab", "*", "a*", "*b", "a*b", "**", "@*%2F*", "%20", ""])
PATTERNS = st.lists(PIECES, min_size=1, max_size=6).map(lambda pieces: "/" + "/".join(pieces))
PATHS = st.lists(
    st.text("abA@", max_size=4) | st.sampled_from(["a%2Fb", "@a%2Fb", "%20"]), min_size=1, max_size=7
).map(lambda pieces: "/" + "/".join(pieces))


def as_regex(text: str) -> str:
    """The same pattern as the regular expression that we do not use."""
    out = ""
    segments = text[1:].split("/")
    for position, segment in enumerate(segments):
        if segment == "**":
            last = position == len(segments) - 1
            out += r"/(?:(?!%2F)[^/])*(?:/(?:(?!%2F)[^/])*)*" if last else r"(?:/(?:(?!%2F)[^/])*)*"
        else:
            out += "/" + "(?:(?!%2F)[^/])+".join(map(re.escape, segment.split("*")))
    return out


@given(PATTERNS, PATHS)
@example("/**/a/**/b", "/a/a/b/a/b")
def test_the_automaton_is_the_regular_expression(text: str, path: str) -> None:
    found = parse_path_pattern(text)
    target = Target(path)
    if isinstance(found, PathPattern) and target.is_canonical and not found.is_everything:
        assert found.allows(target) is (re.fullmatch(as_regex(text), path) is not None)
        if found.allows(target):
            assert found.denies(target)


@given(st.text(max_size=60))
@example("/%")
@example("/\ud800%ff")
def test_a_target_is_total(raw: str) -> None:
    target = Target(raw)
    assert isinstance(target.is_canonical, bool)
    assert isinstance(target.is_origin_form, bool)
    for text in ("/a/*", "/**/a*b/**", "/@*%2F*"):
        pattern(text).allows(target)
        pattern(text).denies(target)
    parse_path_pattern(raw)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/**/a/**/a/**/a/**/a/**/b", "/a" * MAX_SEGMENTS),
        ("/" + "a*" * 200 + "b", "/" + "a" * 64_000),
        ("/**/" + "/".join(["a*"] * 40) + "/b/**", "/aa" * MAX_SEGMENTS),
    ],
    ids=["segments", "letters", "globs"],
)
def test_no_pattern_is_slow(text: str, path: str) -> None:
    compiled, started = pattern(text), time.perf_counter()
    assert not compiled.allows(Target(path))
    assert not compiled.denies(Target(path))
    assert (
        time.perf_counter() - started < 0.5
    )  # milliseconds when nothing else runs; a backtracking matcher would not come back


def test_a_path_of_too_many_segments_is_never_allowed_and_always_denied() -> None:
    long = Target("/a" * (MAX_SEGMENTS + 1))
    assert not pattern("/a/**").allows(long)
    assert pattern("/b").denies(long)
    assert pattern("/b").denies(Target("/a" + "%2Fa" * MAX_SEGMENTS))
    assert pattern("/**").allows(long)
    assert pattern("/a/**").allows(Target("/a" * MAX_SEGMENTS))
