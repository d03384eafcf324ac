"""One request on an HTTP/2 connection and what waits to go on of it, in either direction."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mitmproxy import http

from egressd.gate.buckets import Meter
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.head import Field, Length, RequestHead
from egressd.gate.inspector.http2 import frames
from egressd.gate.inspector.http2.link import Link
from egressd.gate.inspector.outgoing import Outgoing, Watch

if TYPE_CHECKING:
    from egressd.gate.inspector.http2.sieve import Sieve

UNBOUND: Final = Meter()
"""The limits of what egressd itself says."""


AHEAD: Final = 64 * 1024
"""Bytes of a body that may wait for the upstream while more of it is asked for than its window."""


@dataclass(frozen=True, slots=True)
class Section:
    """A header section that waits to be sent; `size` is what it counts against limits."""

    fields: tuple[Field, ...]

    @property
    def size(self) -> int:
        """The bytes of the fields, uncompressed: what a peer says once it cannot have for less the second time."""
        return sum(len(name) + len(value) for name, value in self.fields)


class Course:
    """What waits to go on in one direction, in order; bounded by the windows that its sender was given."""

    __slots__ = ("_debt", "_items", "ended", "said_end", "waiting")

    def __init__(self) -> None:
        """Nothing waits."""
        self._items: deque[Section | bytes] = deque()
        self._debt = 0  # of the section that is next, still to be paid to the limits
        self.waiting = 0
        """Bytes of bodies that wait."""
        self.ended = False
        """Nothing is added any more."""
        self.said_end = False
        """The end was sent."""

    def begin(self, section: Section) -> None:
        """Put the head before everything else."""
        self._items.appendleft(section)
        self._debt = section.size

    def add(self, data: bytes) -> None:
        """Add bytes of the body."""
        if data:
            self._items.append(data)
            self.waiting += len(data)

    def end(self, trailers: Section | None = None) -> None:
        """Add the end."""
        if trailers is not None:
            self._debt = self._debt if self._items else trailers.size
            self._items.append(trailers)
        self.ended = True

    def clear(self) -> int:
        """Forget all that waits, the end too; returns how many bytes of a body that was."""
        count, self.waiting = self.waiting, 0
        self._items.clear()
        self.ended = False
        return count

    @property
    def data(self) -> bytes:
        """All bytes of a body that wait."""
        return b"".join(item for item in self._items if not isinstance(item, Section))

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._items) or (self.ended and not self.said_end)

    def wants(self, link: Link, stream: int | None) -> int:
        """How many bytes its next piece would count against limits if the peer's windows alone decided; 0 for none."""
        head = self._items[0] if self._items else b""
        if isinstance(head, Section):
            return self._debt
        return max(0, min(len(head), frames.FRAME_BYTES, link.room(stream) if stream is not None else 0))

    @property
    def is_at_end(self) -> bool:
        """Whether the end is all that is still to be sent."""
        return self.ended and not self.said_end and not self._items

    @property
    def is_at_section(self) -> bool:
        """Whether a header section is next."""
        return bool(self._items) and isinstance(self._items[0], Section)

    def pay(self, count: int) -> None:
        """Pay for a part of the section that is next."""
        self._debt -= count

    @property
    def section(self) -> Section | None:
        """The header section that is next and paid for."""
        head = self._items[0] if self._items else None
        return head if isinstance(head, Section) and self._debt <= 0 else None

    def send(self, link: Link, stream: int, most: int) -> int:
        """Send the next piece, at most `most` bytes of a body; returns how many bytes of a body that was."""
        head = self._items.popleft() if self._items else b""
        if isinstance(head, Section):
            last = self.ended and not self._items
            link.send_head(stream, head.fields, end=last)
            following = self._items[0] if self._items else None
            self._debt = following.size if isinstance(following, Section) else 0
            self.said_end = last
            return 0
        if len(head) > most:
            self._items.appendleft(head[most:])
            head = head[:most]
        elif self._items and isinstance(self._items[0], Section):
            self._debt = self._items[0].size
        self.waiting -= len(head)
        self.said_end = self.ended and not self._items
        link.send_data(stream, head, end=self.said_end)
        return len(head)


@dataclass(slots=True, eq=False)
class Lane:
    """A stream of the client, the exchange on it, and the upstream's stream once it has one."""

    stream: int
    moved: float
    exchange: Exchange
    flow: http.HTTPFlow | None = None
    undecided: RequestHead | None = None
    """A GET or HEAD that did not say whether a body follows: its next frame will."""
    task: asyncio.Task[None] | None = None
    up: Course = field(default_factory=Course)
    down: Course = field(default_factory=Course)
    upstream: int | None = None
    ready: bool = False
    """It may open a stream of the upstream as soon as that takes one more."""
    length: Length = None
    """Bytes that the request's body must have, and has still to bring."""
    down_length: Length = None
    interim: int = 0
    heard_end: bool = False
    """The request is complete."""
    responded: bool = False
    """The final response has arrived."""
    begun: bool = False
    """Its head was sent to the client, so that no other answer is possible."""
    answered: bool = False
    """egressd itself answers; nothing goes upstream any more."""
    watch: Watch | None = None
    """Looks at its body, once there is any."""
    outgoing: Outgoing | None = None
    """What its body becomes, once it is admitted."""
    ahead: int = 0
    """Bytes of its client's window that were given back before they went on."""
    sieve: Sieve | None = None
    """What the response's body passes through, where it could bring a credential back."""
    grpc: bool = False
    trailers_dropped: bool = False

    @property
    def heard_all(self) -> bool:
        """Whether the response is complete, though perhaps not yet sent."""
        return self.down.ended or (self.sieve is not None and self.sieve.ended)

    @property
    def method(self) -> bytes:
        """The method, as the response is read by it."""
        return (self.exchange.method or "").encode("latin-1")

    def due(self, sent: int) -> int:
        """Return how much of its client's window to give back after `sent` bytes more of its body went on.

        What waits to be signed is given back at once while little else waits: else a window would be the longest chunk.
        """
        paid = min(self.ahead, sent)
        self.ahead -= paid
        due, held = sent - paid, self.outgoing.held if self.outgoing is not None else 0
        if held > self.ahead and self.up.waiting < AHEAD:
            due, self.ahead = due + held - self.ahead, held
        return due

    def meter(self, *, up: bool) -> Meter:
        """What limits the bytes of one direction."""
        account = self.exchange.account
        if account is None or self.answered:
            return UNBOUND
        return account.upload if up else account.download


def brings(left: Length, count: int, *, ended: bool) -> Length | str:
    """Return what is left of a body's declared length after `count` more bytes, or what is wrong with them."""
    if left is None:
        return None
    if count > left:
        return "more data than the length that was declared"
    if ended and count < left:
        return "less data than the length that was declared"
    return left - count
