"""How much work that carries nothing a peer may ask for. Pure."""

from __future__ import annotations

from typing import Final


class Patience:
    """How many frames that carry nothing a peer may still send."""

    __slots__ = ("_level", "_then")

    FULL: Final = 2000
    PER_SECOND: Final = 100
    RESET: Final = 10
    """What a reset costs; an opened stream that is dropped at once has cost us a judgement (CVE-2023-44487)."""

    def __init__(self) -> None:
        """Full."""
        self._level = float(self.FULL)
        self._then: float | None = None

    def spend(self, cost: int, now: float) -> bool:
        """Take `cost`; False when there is not so much left. `now` is in seconds of a clock that never goes back."""
        if self._then is not None:
            self.earn((now - self._then) * self.PER_SECOND)
        self._then = now
        self._level -= cost
        return self._level >= 0

    def earn(self, gain: float) -> None:
        """Put something back."""
        self._level = min(self.FULL, self._level + gain)
