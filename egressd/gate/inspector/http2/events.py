"""What one side of an HTTP/2 connection says, once its frames have been understood."""

from __future__ import annotations

from typing import NamedTuple

from egressd.gate.inspector.head import Field
from egressd.gate.inspector.http2.frames import Code
from egressd.policy.reasons import Reason


class Head(NamedTuple):
    """A header section: `opens` where it began its stream."""

    stream: int
    fields: tuple[Field, ...]
    ended: bool
    opens: bool


class Data(NamedTuple):
    """Bytes of a body. The owner gives `size` back to the connection and `len(data)` to the stream."""

    stream: int
    data: bytes
    size: int
    ended: bool


class Reset(NamedTuple):
    """A stream that ended before its time, by the peer or (`ours`) because of what the peer did to it."""

    stream: int
    code: Code
    ours: bool = False


class Surplus(NamedTuple):
    """A stream more than was agreed, or one after our GOAWAY: refused already, the peer may open it elsewhere."""

    stream: int
    fields: tuple[Field, ...]


class Roomier(NamedTuple):
    """More may be sent, on some stream or on all."""


class GoingAway(NamedTuple):
    """The peer takes no streams after `last`; those up to it go on."""

    last: int
    code: Code


class Broken(NamedTuple):
    """The connection is over because of what the peer did; our GOAWAY is the last thing to be sent."""

    code: Code
    reason: Reason
    detail: str


type Event = Head | Data | Reset | Surplus | Roomier | GoingAway | Broken
