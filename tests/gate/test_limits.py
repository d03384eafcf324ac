from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.limits import Budget, Fold, TokenBucket
from egressd.gate.settings import Settings

TIMES = st.lists(st.floats(0, 1_000, allow_nan=False), max_size=60)


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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100, allow_nan=False)), max_size=60))
def test_nothing_folded_is_lost(calls: list[tuple[str, float]]) -> None:
    fold: Fold[str] = Fold(10)
    seen = 0
    for key, now in calls:
        seen += sum(count for _, count in fold.take(now))
        seen += fold.first(key, now)
    assert seen + sum(count for _, count in fold.drain()) == len(calls)
    assert not fold


def test_the_first_of_a_kind_is_recorded_and_the_rest_counted_once_the_window_ends() -> None:
    fold: Fold[str] = Fold(10)
    assert [fold.first("a", now) for now in (0.0, 1.0, 2.0)] == [True, False, False]
    assert fold.first("b", 5.0)
    assert fold.take(9.9) == []
    assert fold.take(10.0) == [("a", 2)]
    assert fold.first("a", 10.5)
    assert fold.take(15.0) == []


def test_connections_are_counted_and_given_back() -> None:
    budget = Budget(Settings(connections=2))
    assert [budget.connection() for _ in range(3)] == [True, True, False]
    budget.release()
    assert budget.open_connections == 1
    assert budget.connection()


def test_a_second_release_is_an_error_and_not_a_wider_limit() -> None:
    budget = Budget(Settings(connections=1))
    assert budget.connection()
    budget.release()
    with pytest.raises(RuntimeError):
        budget.release()
    assert [budget.connection() for _ in range(2)] == [True, False]


def test_dns_queries_are_counted_by_the_minute() -> None:
    budget = Budget(Settings(dns_queries_per_minute=2))
    assert [budget.dns_query(0.0) for _ in range(3)] == [True, True, False]
    assert budget.dns_query(30.0)
