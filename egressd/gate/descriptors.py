"""The descriptors of a worker, which all its sandboxes share: one that opens many does not keep the others from opening any.

While there are plenty, whoever needs one gets it. Where half are taken, a sandbox gets no more than its share. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

OURS: Final = 256
"""Descriptors of the worker itself, those of resolvers and leases included."""
LISTENING: Final = 24
"""Descriptors of a sandbox before its first connection."""
EACH: Final = 2
"""Descriptors of a connection: to the client, and to where it leads."""
LEAST: Final = 16
"""Connections that a sandbox has a share of, however many sandboxes there are."""


class Descriptors:
    """Counts connections of all sandboxes; `sandboxes` says how many there are now."""

    def __init__(self, limit: int, sandboxes: Callable[[], int]) -> None:
        """`limit` is how many descriptors the process may have."""
        self._limit = limit
        self._sandboxes = sandboxes
        self._taken = 0

    def take(self, held: int) -> bool:
        """Take what a connection needs for a sandbox that has `held` of them; False where others need it more."""
        sandboxes = max(1, self._sandboxes())
        most = max(LEAST, (self._limit - OURS - LISTENING * sandboxes) // EACH)
        if self._taken >= most or (self._taken * 2 >= most and held >= max(LEAST, most // sandboxes)):
            return False
        self._taken += 1
        return True

    def give(self) -> None:
        """Give back what one connection had."""
        self._taken -= 1
