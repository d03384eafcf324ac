"""A response's body on its way through its veil: what came waits here as it came, and is masked only as fast as it is taken.

So what the windows bound is what the origin has sent, and however much a coded body stands for, little of that exists at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from egressd.gate.inspector.body import Broken
from egressd.gate.inspector.http2.lane import Course, Section
from egressd.gate.inspector.veil import Veil

READY: Final = 64 * 1024
"""Bytes that are masked and not yet taken above which nothing more is masked."""


class Sieve:
    """Between what came of one body and the course of what goes on."""

    __slots__ = ("_came", "_trailers", "_veil", "ended", "waiting")

    def __init__(self, veil: Veil) -> None:
        """Nothing has come yet."""
        self._veil = veil
        self._came: deque[bytes] = deque()
        self._trailers: Section | None = None
        self.waiting = 0
        """Bytes that came and are not masked yet."""
        self.ended = False
        """Nothing more comes."""

    def add(self, data: bytes) -> None:
        """Take bytes of the body."""
        if data:
            self._came.append(data)
            self.waiting += len(data)

    def end(self, trailers: Section | None) -> None:
        """Take the end."""
        self.ended, self._trailers = True, trailers

    def clear(self) -> int:
        """Forget what waits; returns how many bytes that was."""
        count, self.waiting = self.waiting, 0
        self._came.clear()
        return count

    def pass_on(self, course: Course) -> Broken | None:
        """Mask as much as the course has room for; returns what is wrong with the body, and then no more of it may go on."""
        while self._came and course.waiting < READY:
            data = self._came.popleft()
            sip = self._veil.sip
            if self._veil.inflates and len(data) > sip:
                self._came.appendleft(data[sip:])
                data = data[:sip]
            self.waiting -= len(data)
            for piece in self._veil.body(data):
                if isinstance(piece, Broken):
                    return piece
                course.add(piece)
        if self.ended and not self._came and not course.ended:
            for piece in self._veil.end():
                if isinstance(piece, Broken):
                    return piece
                course.add(piece)
            course.end(self._trailers)
        return None
