"""Token buckets: how much of something passes in a time, and how a transfer is slowed down or cut by it.

The law: no more passes in any time than the amount plus what the rate gives in that time, also where another process
goes on with a bucket whose own has died.

Pure: every clock reading is handed in. Readings are seconds of one monotonic clock; a reading before the
last one counts as no time having passed, so that no clock step can fill a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

QUANTUM: Final = 16 * 1024
"""Bytes worth waiting for: a slow limit passes pieces of this size (or its whole amount), not one byte at a time."""
PATIENCE: Final = 2.0
"""Seconds that a transfer waits for QUANTUM bytes; where they do not come in that time it is cut."""
TELLINGS: Final = 16
"""A bucket tells its level about so many times for each amount that passes, and each time holds so much of it back."""


class TokenBucket:
    """Lets `amount` units pass per `seconds`, at most `amount` at once; full at the start.

    Raises ValueError for an amount or time that is not positive: a limit of nothing is a deny rule, not a
    bucket.
    """

    __slots__ = ("_last", "_rate", "_tokens", "amount", "seconds")

    def __init__(self, amount: float, seconds: float) -> None:
        if not (amount > 0 and seconds > 0):
            raise ValueError(f"a bucket needs a positive amount and time, not {amount} per {seconds} s")
        self.amount = float(amount)
        self.seconds = float(seconds)
        self._rate = self.amount / self.seconds
        self._tokens = self.amount
        self._last: float | None = None

    def level(self, now: float) -> float:
        """Return the units that are there."""
        self._refill(now)
        return self._tokens

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
        if units <= self._tokens:
            return 0.0
        if units > self.amount or not self._rate:
            return math.inf
        return (units - self._tokens) / self._rate

    def resize(self, now: float, amount: float, seconds: float) -> None:
        """Go on at another rate; the level stays, but for what the new amount cannot hold."""
        self._refill(now)
        fresh = TokenBucket(amount, seconds)
        self.amount, self.seconds, self._rate = fresh.amount, fresh.seconds, fresh._rate
        self._tokens = min(self._tokens, self.amount)

    def _refill(self, now: float) -> None:
        if self._last is None:
            self._last = now
        elapsed = now - self._last
        if elapsed > 0:
            self._tokens = min(self.amount, self._tokens + elapsed * self._rate)
            self._last = now


class KeptBucket(TokenBucket):
    """A bucket that another process can go on with, which will never find it fuller than it is.

    `keep` is given a level that lies `amount // TELLINGS` units below the true one, before those units are spent; with the
    refill since, and held below the amount by as much, it is at no later time above the true level.
    """

    __slots__ = ("_ahead", "_keep", "_parted")

    def __init__(self, amount: float, seconds: float, keep: Callable[[float], None]) -> None:
        super().__init__(amount, seconds)
        self._keep = keep
        self._ahead = 0.0  # units that may still be spent before the level is told again
        self._parted = False

    def take(self, now: float, units: float = 1.0) -> bool:
        """See TokenBucket; where needed the level is told before this returns."""
        if not super().take(now, units):
            return False
        self._ahead -= units
        if self._ahead < 0 and not self._parted:
            self._tell()
        return True

    def resize(self, now: float, amount: float, seconds: float) -> None:
        """See TokenBucket; the level is told, as the one that was is no longer worth the same."""
        super().resize(now, amount, seconds)
        if self._parted:
            self._rate = 0.0
        else:
            self._tell()

    def part(self, now: float, share: float) -> None:
        """Tell the last level and keep `share` of it, which is never refilled: a successor goes on with the rest."""
        if self._parted:
            return
        kept = max(0.0, self.level(now)) * share
        self._keep(self._tokens - kept)
        self._tokens, self._rate, self._parted = kept, 0.0, True

    def restore(self, now: float, tokens: float, age: float) -> None:
        """Take over a level that was told `age` seconds ago: it has been refilled since, and by no more than that."""
        held_back = self.amount - self.amount // TELLINGS
        self._tokens = min(held_back, tokens + max(0.0, age) * self._rate)
        self._last = now
        self._ahead = 0.0

    def empty(self) -> None:
        """Let nothing pass any more: all of it is another process'."""
        self._tokens, self._rate, self._parted = 0.0, 0.0, True

    def _tell(self) -> None:
        self._ahead = self.amount // TELLINGS
        self._keep(self._tokens - self._ahead)


class Meter:
    """Bytes of one direction, bound by every one of its buckets at once; none of them: unbound."""

    __slots__ = ("_buckets",)

    def __init__(self, buckets: Iterable[TokenBucket] = ()) -> None:
        self._buckets = tuple(buckets)

    def room(self, now: float, most: int) -> int:
        """Return how many of `most` bytes may pass now; 0 for none. `take` those that do pass."""
        if not self._buckets:
            return most
        level = min(int(bucket.level(now)) for bucket in self._buckets)
        if level >= self._worthwhile(most):
            return min(level, most)
        # The last drops are not waited with, where more does not come in time.
        return (
            0 if self.pause(now, most) <= PATIENCE else max(0, level)
        )  # a dead worker's may be below nothing

    def take(self, now: float, count: int) -> None:
        """Count bytes that are let pass; RuntimeError when there is no room for them, and then they may not."""
        for bucket in self._buckets:
            if not bucket.take(now, count):
                raise RuntimeError("bytes that no limit has room for")

    def pause(self, now: float, most: int) -> float:
        """Return the seconds after which to ask again, infinity where the transfer is to be cut."""
        longest = self.wait(now, most)
        return longest if longest <= PATIENCE else math.inf

    def wait(self, now: float, most: int) -> float:
        """Return the seconds until a piece worth waiting for is there, however long."""
        wanted = self._worthwhile(most)
        return max((bucket.wait(now, wanted) for bucket in self._buckets), default=0.0)

    def _worthwhile(self, most: int) -> int:
        return min(most, QUANTUM, *(int(bucket.amount) for bucket in self._buckets))
