"""Limits of one sandbox: token buckets, counted connections, and repeats folded into counted records.

Pure: every clock reading is handed in. Readings are seconds of one monotonic clock; a reading before the
last one counts as no time having passed, so that no clock step can fill a bucket.
"""

from __future__ import annotations

from collections.abc import Hashable

from egressd.gate.settings import Settings

_MINUTE = 60.0


class TokenBucket:
    """Lets `amount` units pass per `seconds`, at most `amount` at once; full at the start.

    Raises ValueError for an amount or time that is not positive: a limit of nothing is a deny rule, not a
    bucket.
    """

    __slots__ = ("_amount", "_last", "_rate", "_tokens")

    def __init__(self, amount: float, seconds: float) -> None:
        if not (amount > 0 and seconds > 0):
            raise ValueError(f"a bucket needs a positive amount and time, not {amount} per {seconds} s")
        self._amount = float(amount)
        self._rate = amount / seconds
        self._tokens = self._amount
        self._last: float | None = None

    def take(self, now: float, units: float = 1.0) -> bool:
        """Take `units` and return True, or nothing and return False; negative units are never granted."""
        self._refill(now)
        if not 0 <= units <= self._tokens:
            return False
        self._tokens -= units
        return True

    def wait(self, now: float, units: float = 1.0) -> float:
        """Return the seconds until `units` could be taken; infinity for more than the bucket ever holds."""
        self._refill(now)
        if units > self._amount:
            return float("inf")
        return max(0.0, (units - self._tokens) / self._rate)

    def _refill(self, now: float) -> None:
        if self._last is None:
            self._last = now
        elapsed = now - self._last
        if elapsed > 0:
            self._tokens = min(self._amount, self._tokens + elapsed * self._rate)
            self._last = now


class Fold[K: Hashable]:
    """Folds repeats: the first of a kind in a window is recorded at once, the others are counted for later.

    Nothing is lost: firsts + the counts of `take` and `drain` = calls of `first`. Keys must come from a
    closed set (reason codes, channels), never from what a sandbox sent, or memory would grow with its
    imagination.
    """

    __slots__ = ("_counts", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: dict[K, tuple[float, int]] = {}

    def first(self, key: K, now: float) -> bool:
        """Return whether this is the first of its kind in its window; when it is not, it has been counted."""
        held = self._counts.get(key)
        if held is None:
            self._counts[key] = (now, 0)
            return True
        began, count = held
        self._counts[key] = (began, count + 1)
        return False

    def take(self, now: float) -> list[tuple[K, int]]:
        """Return and forget the repeats of every window that has ended, as (key, count ≥ 1)."""
        ended = [key for key, (began, _) in self._counts.items() if now - began >= self._seconds]
        counted = [(key, self._counts.pop(key)[1]) for key in ended]
        return [(key, count) for key, count in counted if count]

    def drain(self) -> list[tuple[K, int]]:
        """Return and forget all repeats, ended or not: for the end of the sandbox."""
        counted = [(key, count) for key, (_, count) in self._counts.items() if count]
        self._counts.clear()
        return counted

    def __bool__(self) -> bool:
        return bool(self._counts)


class Budget:
    """What one sandbox may use of its worker: open connections and DNS queries."""

    __slots__ = ("_limit", "_open", "_queries")

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.connections
        self._open = 0
        self._queries = TokenBucket(settings.dns_queries_per_minute, _MINUTE)

    @property
    def open_connections(self) -> int:
        """How many connections hold a place now."""
        return self._open

    def connection(self) -> bool:
        """Take a place for a connection, False when all are taken; each True is met by one `release`."""
        if self._open >= self._limit:
            return False
        self._open += 1
        return True

    def release(self) -> None:
        """Give a place back; RuntimeError when none is taken, as a second release would widen the limit."""
        if self._open == 0:
            raise RuntimeError("a connection was released that was never counted")
        self._open -= 1

    def dns_query(self, now: float) -> bool:
        """Count one DNS query, well-formed or not; False when this sandbox has asked too much of late."""
        return self._queries.take(now)
