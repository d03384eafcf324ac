"""Names that are spelled nearly alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.rulefiles.lookalikes import is_near, near_pairs

NAMES = st.text("abl1o0.", min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("github.com", "githud.com"),
        ("github.com", "gihtub.com"),
        ("github.com", "githb.com"),
        ("github.com", "githubb.com"),
        ("github.com", "xgithub.com"),
        ("github.com", "github.co"),
        ("google.com", "g00g1e.com"),
        ("modern.org", "modem.org"),
    ],
)
def test_near(one: str, other: str) -> None:
    assert is_near(one, other)
    assert is_near(other, one)
    assert list(near_pairs([one, other])) == [(min(one, other), max(one, other))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("github.com", "github.com"),
        ("github.com", "gitlab.com"),
        ("github.com", "hub.github.com"),
        ("abcdef.org", "badcef.org"),
        ("gcr.io", "ghcr.io"),
        ("x.ai", "z.ai"),
    ],
)
def test_not_near_enough_to_be_told(one: str, other: str) -> None:
    assert list(near_pairs([one, other])) == []


@given(NAMES, NAMES)
def test_near_is_said_both_ways_and_never_of_one_name(one: str, other: str) -> None:
    assert is_near(one, other) == is_near(other, one)
    assert not is_near(one, one)


@given(st.lists(st.text("abl1o0.", min_size=6, max_size=8), max_size=8))
def test_no_near_pair_is_missed(names: list[str]) -> None:
    every = {(one, other) for one in names for other in names if one < other and is_near(one, other)}
    assert set(near_pairs(names)) == every
