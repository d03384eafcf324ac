from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import HostPattern
from egressd.policy.paths import Target
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.overlaps import HostIndex, covers, request_covers, requests_meet


def entry(
    *hosts: str, requests: tuple[str, ...] = ("GET /**",), ports: tuple[int, ...] = (443,)
) -> EffectiveEntry:
    return EffectiveEntry(id="e", place="", effect="allow", hosts=hosts, requests=requests, ports=ports)


labels = st.lists(st.sampled_from(["a", "b"]), min_size=2, max_size=4).map(tuple)
hosts = st.builds(HostPattern, labels, st.booleans())


def text_of(pattern: HostPattern) -> str:
    return ("*." if pattern.wildcard else "") + ".".join(pattern.name)


@given(hosts, hosts)
def test_the_index_finds_just_the_patterns_that_share_a_name(one: HostPattern, other: HostPattern) -> None:
    met = list(HostIndex([entry(text_of(one))]).meeting(other))
    names = [one.name, other.name, ("x", *one.name), ("x", *other.name)]
    assert bool(met) == any(one.matches(name) and other.matches(name) for name in names)


@given(hosts, hosts, labels)
def test_what_covers_matches_whatever_the_narrow_one_matches(
    wide: HostPattern, narrow: HostPattern, name: tuple[str, ...]
) -> None:
    if covers(wide, narrow) and narrow.matches(name):
        assert wide.matches(name)


segments = st.lists(st.sampled_from(["a", "b", "ab", "*", "a*", "**"]), min_size=1, max_size=4)
paths = segments.map(lambda parts: re.sub(r"/\*\*(/\*\*)+", "/**", "/" + "/".join(parts)))
targets = st.lists(st.sampled_from(["a", "b", "ab", "abc"]), min_size=1, max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)


def pattern(text: str) -> RequestPattern:
    found = parse_request_pattern(text)
    assert isinstance(found, RequestPattern)
    return found


@given(paths, paths, targets)
def test_two_patterns_that_take_one_request_are_never_said_not_to_meet(
    one: str, other: str, target: str
) -> None:
    both = [f"GET {one}", f"GET {other}"]
    if all(pattern(text).refuses("GET", None, Target(target)) is None for text in both):
        assert requests_meet(entry(requests=(both[0],)), entry(requests=(both[1],)))


@given(paths, paths, targets)
def test_what_is_said_to_be_covered_is(wide: str, narrow: str, target: str) -> None:
    if not request_covers(pattern(f"GET {wide}"), pattern(f"GET {narrow}")):
        return
    if pattern(f"GET {narrow}").refuses("GET", None, Target(target)) is None:
        assert pattern(f"GET {wide}").refuses("GET", None, Target(target)) is None


@pytest.mark.parametrize(
    ("wide", "narrow", "is_covered"),
    [
        ("GET /acme/*/info", "GET /acme/tools/info", True),
        ("GET /acme/*/info", "GET /acme/t*/info", True),
        ("GET /acme/t*/info", "GET /acme/*/info", False),
        ("GET /*/**", "GET /a/**", True),
        ("GET /a/*", "GET /a/**", False),
        ("GET /a/**/c", "GET /a/*/b/c", True),
        ("GET /a/**/c", "GET /a/b/c/d", False),
        ("GET /a/**", "GET /a/x/**/y/**", True),
        ("GET /a/*/**", "GET /a/**", False),
        ("GET /a/**", "GET /a", False),
        ("GET /*", "GET /a%2Fb", False),
        ("GET,POST /a", "GET /a", True),
        ("GET /a", "GET,POST /a", False),
        ("ANY /a", "WEBSOCKET /a", False),
        ("GET /a", "GET /a?k=v", True),
        ("GET /a?k=v", "GET /a", False),
    ],
)
def test_a_request_covers_another_where_it_takes_all_of_it(wide: str, narrow: str, is_covered: bool) -> None:
    assert request_covers(pattern(wide), pattern(narrow)) is is_covered


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (entry(requests=("GET /a",)), entry(requests=("POST /a",)), False),
        (entry(requests=("ANY /a",)), entry(requests=("POST /a",)), True),
        (entry(requests=("WEBSOCKET /a",)), entry(requests=("GET /a",)), False),
        (entry(requests=("WEBSOCKET /a",)), entry(requests=("ANY /a",)), False),
        (entry(requests=("ANY,WEBSOCKET /a",)), entry(requests=("WEBSOCKET /a",)), True),
        (entry(requests=("GET /a/**",)), entry(requests=("GET /b/**",)), False),
        (entry(requests=("GET /*/x",)), entry(requests=("GET /a/*",)), True),
        (entry(requests=("GET /**",)), entry(requests=("GET /a",), ports=(8443,)), False),
    ],
)
def test_methods_paths_and_ports_keep_requests_apart(
    one: EffectiveEntry, other: EffectiveEntry, meet: bool
) -> None:
    assert requests_meet(one, other) is meet
    assert requests_meet(other, one) is meet
