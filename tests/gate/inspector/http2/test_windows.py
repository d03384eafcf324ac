"""A window is a promise: the peer may send what it was told, and not a byte more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.http2.windows import Window


@pytest.mark.parametrize(
    ("came", "may"),
    [((100,), True), ((99, 1), True), ((101,), False), ((60, 41), False)],
    ids=["all of it", "all of it in two", "a byte too much", "a byte too much in two"],
)
def test_no_more_may_come_than_the_window_holds(came: tuple[int, ...], may: bool) -> None:
    window = Window(100)
    assert [window.spend(count) for count in came][-1] is may


def test_little_is_given_back_only_when_it_is_half_of_the_window() -> None:
    window = Window(100)
    assert window.spend(100)
    assert [window.give_back(count) for count in (20, 29, 1, 50)] == [0, 0, 50, 50]
    assert window.left == 100


def test_a_window_doubles_up_to_its_most() -> None:
    window, told = Window(100), []
    for _ in range(5):
        left = window.left
        assert window.spend(left)
        told.append(window.give_back(left, most=350))
    assert told == [200, 350, 350, 350, 350]
    assert window.size == 350


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2000)), max_size=30),
)
def test_what_is_left_and_what_is_owed_are_the_window_less_what_waits(
    size: int, steps: list[tuple[int, int]]
) -> None:
    """The law of memory: what waits and what may still come never exceed the window, whatever was taken when."""
    window, waits, promised = Window(size), 0, size
    for came, most in steps:
        came = min(came, window.left)
        assert window.spend(came)
        promised -= came
        waits += came
        taken = waits // 2 or waits
        waits -= taken
        promised += window.give_back(taken, most)
        assert promised == window.left >= 0
        assert window.left + window.owed + waits == window.size <= max(size, *(most for _, most in steps))
        assert 2 * window.owed < window.size
