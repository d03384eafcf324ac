"""Token buckets by an injected clock: what passes in any window, what a next process finds, when a transfer waits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.buckets import PATIENCE, QUANTUM, TELLINGS, KeptBucket, Meter, TokenBucket

TIMES = st.lists(st.floats(0, 1_000, allow_nan=False), max_size=60)
STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400)), max_size=60)
"""Seconds that pass, then units that are asked for."""


def test_a_bucket_starts_full_and_refills_at_its_rate() -> None:
    bucket = TokenBucket(3, 60)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(119.9)
    assert bucket.take(120.1)


def test_a_bucket_never_holds_more_than_its_amount() -> None:
    bucket = TokenBucket(2, 1)
    assert bucket.take(0.0)
    assert [bucket.take(1_000_000.0) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("units", [-1.0, float("-inf"), float("nan"), float("inf"), 3.0])
def test_units_that_are_negative_or_more_than_the_bucket_holds_are_never_granted(units: float) -> None:
    bucket = TokenBucket(2, 1)
    assert not bucket.take(0.0, units)
    assert bucket.take(0.0, 2.0)


def test_a_refusal_takes_nothing() -> None:
    bucket = TokenBucket(2, 1)
    assert not bucket.take(0.0, 2.5)
    assert bucket.take(0.0, 2.0)


def test_wait_tells_when_the_units_could_be_taken() -> None:
    bucket = TokenBucket(10, 10)
    assert bucket.wait(0.0, 10) == 0
    assert bucket.take(0.0, 10)
    assert bucket.wait(0.0, 4) == pytest.approx(4)
    assert bucket.wait(3.0, 4) == pytest.approx(1)
    assert bucket.wait(3.0, 11) == float("inf")


def test_a_clock_that_steps_back_fills_nothing() -> None:
    bucket = TokenBucket(1, 10)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert not bucket.take(105.0)
    assert bucket.take(110.0)


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1), (1, 0), (-1, 1), (1, -1), (float("nan"), 1)])
def test_a_bucket_of_nothing_is_refused(amount: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(amount, seconds)


@given(TIMES, st.integers(1, 20), st.integers(1, 20))
def test_no_order_of_clock_readings_grants_more_than_burst_plus_rate(
    times: list[float], amount: int, seconds: int
) -> None:
    bucket = TokenBucket(amount, seconds)
    granted = sum(bucket.take(now) for now in times)
    span = max(times) - min(times) if times else 0
    assert granted <= amount + span * amount / seconds + 1e-6


@given(STEPS, st.integers(1, 500), st.integers(1, 100))
def test_in_any_window_no_more_passes_than_the_amount_and_what_the_rate_gives(
    steps: list[tuple[float, int]], amount: int, seconds: int
) -> None:
    bucket = TokenBucket(amount, seconds)
    now, passed = 0.0, []
    for gap, units in steps:
        now += gap
        if bucket.take(now, units):
            passed.append((now, units))
    for first, (began, _) in enumerate(passed):
        total = 0
        for ended, units in passed[first:]:
            total += units
            assert total <= amount + (ended - began) * amount / seconds + 1e-6


@given(STEPS, st.integers(1, 500), st.integers(1, 500), st.integers(1, 100))
def test_another_rate_fills_nothing(
    steps: list[tuple[float, int]], amount: int, other: int, seconds: int
) -> None:
    bucket, now = TokenBucket(amount, seconds), 0.0
    for gap, units in steps:
        now += gap
        bucket.take(now, units)
        before = bucket.level(now)
        bucket.resize(now, *(other, seconds) if bucket.amount == amount else (amount, seconds))
        assert bucket.level(now) == min(before, bucket.amount)


class Life:
    """A bucket over the deaths of the processes that held it: control keeps what was told, and the time since."""

    def __init__(self, amount: int, seconds: int) -> None:
        self.amount, self.seconds = amount, seconds
        self.now = 0.0
        self.kept: tuple[float, float] | None = None
        self.tellings = 0
        self.bucket = self.fresh()

    def fresh(self) -> KeptBucket:
        return KeptBucket(self.amount, self.seconds, self.keep)

    def keep(self, tokens: float) -> None:
        self.kept = (tokens, self.now)
        self.tellings += 1

    def die(self, delay: float = 0.0) -> None:
        """The process dies; another one is there after a while."""
        self.bucket = self.fresh()
        self.now += delay
        if self.kept is not None:
            tokens, told = self.kept
            self.bucket.restore(self.now, tokens, self.now - told)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400), st.booleans()), max_size=60),
    st.integers(1, 500),
    st.integers(1, 100),
)
def test_no_death_at_any_moment_fills_a_bucket(
    steps: list[tuple[float, int, bool]], amount: int, seconds: int
) -> None:
    life, passed, began = Life(amount, seconds), 0, None
    for gap, units, dies in steps:
        life.now += gap
        if life.bucket.take(life.now, units):
            passed += units
            began = life.now if began is None else began
        if dies:
            before = life.bucket.level(life.now)
            life.die()
            assert life.bucket.level(life.now) <= before + 1e-6
    span = life.now - began if began is not None else 0.0
    assert passed <= amount + span * amount / seconds + 1e-6


def test_what_a_death_costs_is_a_small_part_of_the_amount() -> None:
    life = Life(1600, 3600)
    for _ in range(800):
        assert life.bucket.take(life.now)
    life.die()
    assert 800 - 2 * 1600 // TELLINGS <= life.bucket.level(life.now) <= 800


def test_a_small_amount_is_kept_exactly() -> None:
    life = Life(5, 3600)
    assert [life.bucket.take(life.now) for _ in range(3)] == [True] * 3
    life.die()
    assert life.bucket.level(life.now) == 2
    assert [life.bucket.take(life.now) for _ in range(3)] == [True, True, False]


def test_time_passes_for_a_bucket_that_nobody_holds() -> None:
    life = Life(10, 10)
    assert life.bucket.take(life.now, 10)
    life.die(delay=4.0)
    assert life.bucket.level(life.now) == pytest.approx(4)
    life.die(delay=1000.0)
    assert life.bucket.level(life.now) == 10


def test_a_bucket_tells_its_level_seldom() -> None:
    life = Life(1_000_000, 3600)
    for _ in range(1000):
        assert life.bucket.take(life.now, 1000)
    assert life.tellings <= TELLINGS + 1


def test_what_is_told_comes_before_what_is_spent() -> None:
    told: list[float] = []
    bucket = KeptBucket(160, 60, told.append)
    assert bucket.take(0.0)
    assert told == [160 - 1 - 10]


# bytes


def test_a_meter_without_buckets_binds_nothing() -> None:
    meter = Meter()
    assert meter.room(0.0, 10**9) == 10**9
    assert meter.pause(0.0, 10**9) == 0
    meter.take(0.0, 10**9)


def test_the_fullest_bucket_does_not_matter() -> None:
    meter = Meter((TokenBucket(1000, 1000), TokenBucket(10, 1000)))
    assert meter.room(0.0, 500) == 10
    meter.take(0.0, 10)
    assert meter.room(0.0, 500) == 0
    assert meter.pause(0.0, 500) == math.inf


def test_what_there_is_no_room_for_cannot_be_taken() -> None:
    with pytest.raises(RuntimeError):
        Meter((TokenBucket(10, 1),)).take(0.0, 11)


def test_a_fast_limit_waits_for_pieces_worth_sending() -> None:
    meter = Meter((TokenBucket(100_000, 1),))
    meter.take(0.0, 100_000 - QUANTUM + 1)
    assert meter.room(0.0, 50_000) == 0
    pause = meter.pause(0.0, 50_000)
    assert 0 < pause <= PATIENCE
    assert meter.room(pause, 50_000) == QUANTUM
    assert meter.room(0.0, 100) == 100, "what is smaller than a piece needs no more"


def test_a_slow_limit_gives_its_last_drops_and_then_nothing() -> None:
    meter = Meter((TokenBucket(50_000, 86_400),))
    meter.take(0.0, 49_000)
    assert meter.room(0.0, 50_000) == 1000
    meter.take(0.0, 1000)
    assert meter.room(0.0, 50_000) == 0
    assert meter.pause(0.0, 50_000) == math.inf
    assert meter.wait(0.0, 50_000) == pytest.approx(QUANTUM * 86_400 / 50_000)


def test_an_amount_smaller_than_a_piece_passes_as_a_whole() -> None:
    meter = Meter((TokenBucket(1000, 1),))
    assert meter.room(0.0, 5000) == 1000
    meter.take(0.0, 1000)
    assert meter.room(0.5, 5000) == 0
    assert meter.pause(0.5, 5000) == pytest.approx(0.5)
    assert meter.room(1.0, 5000) == 1000


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 300_000)), max_size=60),
    st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from([1, 60, 86_400])), min_size=1, max_size=3),
)
def test_no_meter_lets_more_pass_than_any_of_its_buckets(
    steps: list[tuple[float, int]], rates: list[tuple[int, int]]
) -> None:
    meter = Meter(TokenBucket(*rate) for rate in rates)
    now, moments, passed = 0.0, [0.0], [0]
    for gap, most in steps:
        now += gap
        room = meter.room(now, most)
        assert 0 <= room <= most
        assert room or meter.pause(now, most) > 0, "no room and no wait would spin"
        meter.take(now, room)
        moments.append(now)
        passed.append(room)
    for amount, seconds in rates:
        assert sum(passed) <= amount + now * amount / seconds + 1e-3
    assert all(a <= b for a, b in pairwise(moments))
