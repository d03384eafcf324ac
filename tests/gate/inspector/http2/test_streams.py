"""Which streams are open, which were, and which nobody has opened yet."""

from __future__ import annotations

import pytest

from egressd.gate.inspector.http2.frames import MAX_WINDOW
from egressd.gate.inspector.http2.streams import ASSUMED, Streams


def ours() -> Streams:
    return Streams(server=False, send=10, window=20)


def theirs() -> Streams:
    return Streams(server=True, send=10, window=20)


def test_our_streams_have_odd_numbers_in_order_and_are_idle_before() -> None:
    streams = ours()
    assert [streams.is_idle(number) for number in (1, 2, 3)] == [True, True, True]
    assert [streams.open(), streams.open()] == [1, 3]
    assert [streams.is_idle(number) for number in (1, 2, 3, 4, 5)] == [False, True, False, True, True]


def test_a_stream_of_the_peers_that_was_refused_is_idle_no_more_and_was_not_accepted() -> None:
    streams = theirs()
    streams.highest = 1
    streams.accept(1)
    streams.highest = 5
    assert [streams.is_idle(number) for number in (1, 3, 5, 7, 2)] == [False, False, False, True, True]
    assert (streams.accepted, list(streams)) == (1, [1])


def test_only_the_client_opens_streams() -> None:
    with pytest.raises(AssertionError):
        theirs().open()


def test_no_more_are_opened_than_the_peer_takes_at_a_time() -> None:
    streams = ours()
    for _ in range(ASSUMED):
        assert streams.can_open
        streams.open()
    assert not streams.can_open
    streams.most = ASSUMED + 1
    assert streams.can_open


def test_numbers_run_out() -> None:
    streams = ours()
    streams._next = MAX_WINDOW
    assert streams.can_open
    assert streams.open() == MAX_WINDOW
    assert not streams.can_open


@pytest.mark.parametrize(("said", "heard"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_stream_is_forgotten_once_both_sides_have_said_all(said: bool, heard: bool) -> None:
    streams = ours()
    stream = streams[streams.open()]
    stream.said_end, stream.heard_end = said, heard
    assert streams.settle(1, stream) is (said and heard)
    assert (1 in streams) is not (said and heard)


def test_a_change_of_the_first_window_moves_those_of_open_streams_even_below_nothing() -> None:
    streams = ours()
    stream = streams[streams.open()]
    stream.send -= 10
    assert streams.resize(4)
    assert stream.send == -6
    assert streams[streams.open()].send == 4


def test_a_window_that_a_change_makes_too_large_is_none() -> None:
    streams = ours()
    streams[streams.open()].send = MAX_WINDOW
    assert not streams.resize(11)
