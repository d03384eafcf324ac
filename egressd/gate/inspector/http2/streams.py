"""The streams of one HTTP/2 connection that are open in some direction, and whether any other one ever was (RFC 9113 §5.1)."""

from __future__ import annotations

from typing import Final

from egressd.gate.inspector.http2.frames import MAX_WINDOW
from egressd.gate.inspector.http2.windows import Window

ASSUMED: Final = 100
"""Streams that a peer is taken to allow that has not said yet how many."""


class Stream:
    """A stream that is open in some direction."""

    __slots__ = ("heard_end", "said_end", "send", "unwanted", "window")

    def __init__(self, send: int, window: int) -> None:
        """We may send `send` bytes, the peer `window`."""
        self.send = send
        self.window = Window(window)
        self.heard_end = self.said_end = False
        self.unwanted: int | None = None
        """Bytes that are still dropped before the stream is reset; None where somebody wants them."""


class Streams(dict[int, Stream]):
    """The open streams by their numbers; the client's are odd, and nobody else opens any."""

    def __init__(self, *, server: bool, send: int, window: int) -> None:
        """`server` is the side that the peer's streams come to; on each we may `send` so much at first, the peer a `window`."""
        super().__init__()
        self._server = server
        self.send = send
        self._window = window
        self._next = 1  # of ours
        self.most = ASSUMED
        """How many of ours the peer takes at a time."""
        self.highest = 0
        """The last that the peer has opened or tried to."""
        self.accepted = 0
        """The last of the peer's that was not refused."""

    def is_idle(self, number: int) -> bool:
        """Whether nobody has opened the stream yet; pushed ones are never opened."""
        return number % 2 == 0 or (number > self.highest if self._server else number >= self._next)

    @property
    def can_open(self) -> bool:
        """Whether the peer takes one more stream of ours, and there is a number left for it."""
        return len(self) < self.most and self._next <= MAX_WINDOW

    def open(self) -> int:
        """Begin a stream of ours; returns its number."""
        assert not self._server
        number, self._next = self._next, self._next + 2
        self[number] = Stream(self.send, self._window)
        return number

    def accept(self, number: int) -> Stream:
        """Take a stream of the peer's."""
        self.accepted = number
        stream = self[number] = Stream(self.send, self._window)
        return stream

    def resize(self, send: int) -> bool:
        """Let us `send` so much on every stream at first, on those that are open too (§6.9.2); returns whether that can be."""
        growth, self.send = send - self.send, send
        for stream in self.values():
            stream.send += growth
        return all(stream.send <= MAX_WINDOW for stream in self.values())

    def settle(self, number: int, stream: Stream) -> bool:
        """Forget a stream on which both sides have said all; returns whether they have."""
        over = stream.said_end and stream.heard_end
        if over:
            del self[number]
        return over
