"""What a peer may send us before we have taken what it sent (RFC 9113 §5.2, §6.9)."""

from __future__ import annotations


class Window:
    """Shrinks by what comes, and is given back, by no less than the half of it, what was taken."""

    __slots__ = ("left", "owed", "size")

    def __init__(self, size: int) -> None:
        """The peer may send `size` bytes, and nothing was taken yet."""
        self.left = self.size = size
        """Bytes that the peer may send: now, and when everything is taken."""
        self.owed = 0
        """Bytes that were taken and not yet given back."""

    def spend(self, count: int) -> bool:
        """Count `count` bytes that have come; returns whether the peer was allowed to send them."""
        self.left -= count
        return self.left >= 0

    def give_back(self, count: int, most: int = 0) -> int:
        """Count `count` bytes as taken; returns by how many bytes to raise the peer's window now, 0 for not yet.

        It is doubled as long as it stays within `most`, and filled up to that at the last.
        """
        self.owed += count
        if 2 * self.owed < self.size:
            return 0
        growth = max(0, min(self.size, most - self.size))
        back, self.owed = self.owed + growth, 0
        self.size += growth
        self.left += back
        return back
