"""A worker's descriptors: plenty for whoever needs them, and a share for each where they are scarce."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.descriptors import EACH, LEAST, LISTENING, OURS, Descriptors


def room(connections: int, sandboxes: int) -> Descriptors:
    """Descriptors for so many connections of so many sandboxes."""
    return Descriptors(OURS + LISTENING * sandboxes + EACH * connections, lambda: sandboxes)


def taken(descriptors: Descriptors, most: int, held: int = 0) -> int:
    """How many of `most` connections one sandbox gets that has `held`."""
    count = 0
    while count < most and descriptors.take(held + count):
        count += 1
    return count


def test_one_sandbox_alone_gets_all() -> None:
    descriptors = room(400, 1)
    assert taken(descriptors, 1000) == 400
    descriptors.give()
    assert descriptors.take(399)


def test_a_greedy_one_gets_half_and_the_others_their_share_all_the_same() -> None:
    descriptors = room(400, 4)
    assert taken(descriptors, 1000) == 200
    assert [taken(descriptors, 1000) for _ in range(2)] == [100, 100]


def test_the_least_is_everybodys_where_there_are_many() -> None:
    descriptors = room(400, 100)
    assert taken(descriptors, 1000) == 200
    assert [taken(descriptors, 1000) for _ in range(3)] == [LEAST] * 3


@given(st.integers(0, 5_000), st.integers(0, 200), st.lists(st.integers(0, 30), max_size=200))
def test_no_more_are_taken_than_there_are(limit: int, sandboxes: int, asking: list[int]) -> None:
    descriptors = Descriptors(limit, lambda: sandboxes)
    held = [0] * 31
    for who in asking * 20:
        if descriptors.take(held[who]):
            held[who] += 1
    assert sum(held) * EACH <= max(LEAST * EACH, limit)
