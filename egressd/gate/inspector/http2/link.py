"""One side of one HTTP/2 connection (RFC 9113): frames in, events out; heads and data in, frames out. No I/O, no clock.

The theory: what a peer does wrong to one stream ends that stream, and what it does wrong to the connection ends the
connection, once, as `Broken`, after which nothing is read. Flow control is the owner's: bytes count against the windows of
their stream and of the connection until the owner says that somebody has taken them. Work that carries nothing (resets,
pings, settings, empty frames, window updates by the byte) is paid out of a `Patience` that bytes and answers fill; when it
is empty, the peer floods.

hpack does the compression. Its table towards the peer stays at 4 KiB whatever the peer offers, so that no peer chooses how
much we remember; fields that may be secrets are never put into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from egressd.gate.inspector.head import Field
from egressd.gate.inspector.http2 import frames
from egressd.gate.inspector.http2.events import Broken, Data, Event, GoingAway, Head, Reset, Roomier, Surplus
from egressd.gate.inspector.http2.frames import Code, Frame, FrameReader, Oversized
from egressd.gate.inspector.http2.patience import Patience
from egressd.policy.reasons import Reason

DEFAULT_WINDOW: Final = 65_535
"""What every window is before anybody says otherwise (§6.9.2)."""

TABLE_BYTES: Final = 4096
MAX_CONTINUATIONS: Final = 32

_SECRET: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie", b"set-cookie", b"x-api-key"})
_UNWANTED_BYTES: Final = 16 * 1024 * 1024
"""Bytes that a peer may still send on a stream that it has the whole answer on. There are clients that show no answer whose
stream was reset before they had sent all (curl 7.88), and some that wait for the end of theirs (Node)."""

_ASSUMED_STREAMS: Final = 100
"""Streams that we open at a peer that has not said yet how many it takes."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What we let a peer do: bytes of a head, of the windows of a stream (at first, and at most) and of the connection."""

    head_bytes: int
    window: int
    most_window: int
    connection_window: int
    streams: int = 100


_NO_STREAM = Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a frame of a stream that was never opened")
_NOT_FOR_STREAM_0 = Broken(
    Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a frame that belongs to a stream, without one"
)
_BAD_SIZE = Broken(Code.FRAME_SIZE_ERROR, Reason.BAD_FRAMING, "a frame has another size than its kind")
_BAD_PADDING = Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a frame has more padding than bytes")
_OVER_WINDOW = Broken(Code.FLOW_CONTROL_ERROR, Reason.BAD_FRAMING, "more data than the window holds")
_FLOOD = Broken(Code.ENHANCE_YOUR_CALM, Reason.FLOOD, "frames that ask for work and carry nothing")


class _Flow:
    """A stream that is open in some direction."""

    __slots__ = ("heard_end", "left", "owed", "said_end", "send", "unwanted", "window")

    def __init__(self, send: int, window: int) -> None:
        self.send = send
        """Bytes that we may send."""
        self.left = self.window = window
        """Bytes that the peer may send; and when everything is taken."""
        self.owed = 0
        """Bytes that were taken and not yet given back."""
        self.heard_end = self.said_end = False
        self.unwanted: int | None = None
        """Bytes that are still dropped before the stream is reset; None where somebody wants them."""


class Link:
    """One side of one connection; what is to be written is fetched by `take`."""

    def __init__(self, terms: Terms, *, server: bool) -> None:
        """`server` is the side that the peer's streams come to. Our settings are the first thing to be sent."""
        self.broken = False
        self.leaving = False
        """No more streams are taken."""
        self.patience = Patience()
        self._terms = terms
        self._server = server
        self._reader = FrameReader()
        self._decoder = Decoder(max_header_list_size=2 * terms.head_bytes)
        self._encoder = Encoder()
        self._out: list[bytes] = []
        self._flows: dict[int, _Flow] = {}
        self._highest = self._taken = 0  # of the peer's streams: of all, and of those that were not refused
        self._said_goaway = False
        self._next = 1  # of ours
        self._send = DEFAULT_WINDOW
        self._left = terms.connection_window
        self._owed = 0
        self._peer_window = DEFAULT_WINDOW
        self._peer_streams = _ASSUMED_STREAMS
        self._awaiting = frames.PREFACE if server else b""
        self._settled = False  # the peer's settings were its first frame
        self._block: bytearray | None = None
        self._block_frames = 0
        self._block_of = self._block_flags = 0
        self._now = 0.0
        self._steps: dict[int, Callable[[Frame, list[Event]], Broken | None]] = {
            frames.DATA: self._data,
            frames.HEADERS: self._headers,
            frames.PRIORITY: self._priority,
            frames.RST_STREAM: self._rst_stream,
            frames.SETTINGS: self._settings,
            frames.PUSH_PROMISE: self._push_promise,
            frames.PING: self._ping,
            frames.GOAWAY: self._goaway,
            frames.WINDOW_UPDATE: self._window_update,
            frames.CONTINUATION: self._continuation,
        }
        self._greet()

    def _greet(self) -> None:
        values = {
            frames.INITIAL_WINDOW_SIZE: self._terms.window,
            frames.MAX_HEADER_LIST_SIZE: self._terms.head_bytes,
            frames.MAX_CONCURRENT_STREAMS: self._terms.streams,
        }
        if not self._server:
            self._out.append(frames.PREFACE)
            values[frames.ENABLE_PUSH] = 0
        self._out.append(frames.settings(values))
        self._out.append(frames.window_update(0, self._terms.connection_window - DEFAULT_WINDOW))

    # for the owner: sending

    def take(self) -> bytes:
        """Return and forget what is to be written."""
        out, self._out = self._out, []
        return b"".join(out)

    @property
    def can_open(self) -> bool:
        """Whether the peer takes one more stream of ours now."""
        return len(self._flows) < self._peer_streams and not self.broken and self._next <= frames.MAX_WINDOW

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return len(self._flows)

    @property
    def in_head(self) -> bool:
        """Whether the peer is in the middle of a header section, so that it can say nothing else."""
        return self._block is not None

    def open(self) -> int:
        """Begin a stream of ours; `can_open` must hold."""
        assert self.can_open
        assert not self._server
        stream, self._next = self._next, self._next + 2
        self._flows[stream] = _Flow(self._peer_window, self._terms.window)
        return stream

    def send_head(self, stream: int, fields: Iterable[Field], *, end: bool = False) -> int:
        """Send a header section on an open stream; returns its bytes."""
        listed = [(name, value, name in _SECRET) for name, value in fields]
        block = self._encoder.encode(listed, huffman=False)
        flow = self._flows[stream]
        assert not flow.said_end
        written = frames.header_block(stream, block, end=end)
        self._out.append(written)
        self._said(stream, flow, end=end)
        return len(written)

    def send_data(self, stream: int, data: bytes, *, end: bool = False) -> int:
        """Send data for which there is `room`, at most a frame of it; returns its bytes."""
        flow = self._flows[stream]
        assert not flow.said_end
        assert len(data) <= min(frames.FRAME_BYTES, max(0, self.room(stream)))
        flow.send -= len(data)
        self._send -= len(data)
        self._out.append(frames.head_of(frames.DATA, frames.END_STREAM if end else 0, stream, len(data)))
        self._out.append(data)
        self.patience.earn(len(data) >> 10)
        self._said(stream, flow, end=end)
        return frames.HEADER_BYTES + len(data)

    def _said(self, stream: int, flow: _Flow, *, end: bool) -> None:
        flow.said_end = flow.said_end or end
        if flow.said_end and flow.heard_end:
            del self._flows[stream]
            self.patience.earn(self.patience.RESET)

    def room(self, stream: int) -> int:
        """How many bytes the stream takes now; 0 or less for none."""
        flow = self._flows.get(stream)
        return min(self._send, flow.send) if flow is not None else 0

    def reset(self, stream: int, code: Code) -> None:
        """End a stream at once; what the peer still sends on it is dropped. Nothing happens to one that is over."""
        if self._flows.pop(stream, None) is not None and not self.broken:
            self._out.append(frames.reset(stream, code))

    def let_finish(self, stream: int) -> None:
        """Drop what the peer still sends on a stream on which we have said all, instead of resetting it at once."""
        flow = self._flows.get(stream)
        if flow is not None:
            assert flow.said_end
            flow.unwanted = _UNWANTED_BYTES

    def take_no_more(self) -> None:
        """Refuse streams from now on; the peer is told so once it opens one, or by `go_away`.

        Not before: there are clients that can hear nothing more on a connection after a GOAWAY.
        """
        self.leaving = True

    def go_away(self, code: Code = Code.NO_ERROR) -> None:
        """Take no more streams, and say so; those that are open go on. Said once."""
        self.leaving = True
        if not self._said_goaway and not self.broken:
            self._said_goaway = True
            self._out.append(frames.goaway(self._taken, code))

    # for the owner: what was taken of what came

    def taken(self, stream: int, count: int, *, keeps_up: bool) -> None:
        """Give a stream's window back `count` bytes; it grows where whoever takes them `keeps_up`."""
        flow = self._flows.get(stream)
        if flow is None or flow.heard_end:
            return
        flow.owed += count
        if 2 * flow.owed < flow.window:
            return
        growth = min(flow.window, self._terms.most_window - flow.window) if keeps_up else 0
        flow.window += growth
        flow.left += flow.owed + growth
        self._out.append(frames.window_update(stream, flow.owed + growth))
        flow.owed = 0

    def give_back(self, size: int) -> None:
        """Give the connection's window back `size` bytes."""
        self._owed += size
        if 2 * self._owed >= self._terms.connection_window:
            self._left += self._owed
            self._out.append(frames.window_update(0, self._owed))
            self._owed = 0

    # for the owner: receiving

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Return what `data` says, in order; `now` is in seconds of a clock that never goes back."""
        events: list[Event] = []
        if self.broken:
            return events
        self._now = now
        problem: Broken | None = None
        if self._awaiting:
            size = min(len(self._awaiting), len(data))
            if data[:size] != self._awaiting[:size]:
                problem = Broken(Code.PROTOCOL_ERROR, Reason.BAD_REQUEST, "no HTTP/2 preface")
            self._awaiting, data = self._awaiting[size:], data[size:]
        self._reader.feed(data)
        while problem is None and (frame := self._reader.next()) is not None:
            problem = self._read(frame, events)
        if problem is not None:
            self.broken = True
            self._out.append(frames.goaway(self._taken, problem.code))
            events.append(problem)
        return events

    def _read(self, frame: Frame | Oversized, events: list[Event]) -> Broken | None:
        if isinstance(frame, Oversized):
            return Broken(Code.FRAME_SIZE_ERROR, Reason.BAD_FRAMING, "a frame is longer than was agreed")
        if not self._settled:
            if frame.kind != frames.SETTINGS or frame.flags & frames.ACK:
                return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "the first frame is not SETTINGS")
            self._settled = True
        if self._block is not None and (frame.kind, frame.stream) != (frames.CONTINUATION, self._block_of):
            return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a frame inside a header section")
        step = self._steps.get(frame.kind)
        if step is None:
            return self._pay(1)  # an extension (§5.5)
        return step(frame, events)

    def _pay(self, cost: int) -> Broken | None:
        return None if self.patience.spend(cost, self._now) else _FLOOD

    def _is_idle(self, stream: int) -> bool:
        """Whether nobody has opened the stream yet; pushed ones are never opened."""
        return stream % 2 == 0 or (stream > self._highest if self._server else stream >= self._next)

    def _data(self, frame: Frame, events: list[Event]) -> Broken | None:
        stream, size = frame.stream, len(frame.payload)
        if stream == 0:
            return _NOT_FOR_STREAM_0
        data = frames.unpadded(frame)
        if data is None:
            return _BAD_PADDING
        self._left -= size
        if self._left < 0:
            return _OVER_WINDOW
        flow = self._flows.get(stream)
        ended = bool(frame.flags & frames.END_STREAM)
        if flow is None:
            self.give_back(size)
            return _NO_STREAM if self._is_idle(stream) else self._pay(1)
        if flow.heard_end:
            return Broken(Code.STREAM_CLOSED, Reason.BAD_FRAMING, "data after the end of its stream")
        flow.left -= size
        if flow.left < 0:
            return _OVER_WINDOW
        if size > len(data):
            self.give_back(size - len(data))
            self.taken(stream, size - len(data), keeps_up=False)
        self._heard(stream, flow, ended=ended)
        if flow.unwanted is not None:
            self._drop_data(stream, flow, len(data))
            return None if data or ended else self._pay(1)
        events.append(Data(stream, data, len(data), ended))
        return None if data or ended else self._pay(1)

    def _drop_data(self, stream: int, flow: _Flow, size: int) -> None:
        self.give_back(size)
        assert flow.unwanted is not None
        flow.unwanted -= size
        if flow.unwanted <= 0:
            self.reset(stream, Code.NO_ERROR)
        else:
            self.taken(stream, size, keeps_up=False)

    def _drop_unwanted(self) -> None:
        """Make room for streams that somebody wants."""
        for stream, flow in tuple(self._flows.items()):
            if flow.unwanted is not None:
                self.reset(stream, Code.NO_ERROR)

    def _heard(self, stream: int, flow: _Flow, *, ended: bool) -> None:
        flow.heard_end = flow.heard_end or ended
        if flow.said_end and flow.heard_end:
            del self._flows[stream]
            self.patience.earn(self.patience.RESET)

    def _headers(self, frame: Frame, events: list[Event]) -> Broken | None:
        if frame.stream == 0:
            return _NOT_FOR_STREAM_0
        if self._is_idle(frame.stream) and (not self._server or frame.stream % 2 == 0):
            return _NO_STREAM
        fragment = frames.fragment_of(frame)
        if fragment is None:
            return _BAD_PADDING
        self._block = bytearray(fragment)
        self._block_of, self._block_flags, self._block_frames = frame.stream, frame.flags, 0
        return self._end_block(events) if frame.flags & frames.END_HEADERS else None

    def _continuation(self, frame: Frame, events: list[Event]) -> Broken | None:
        if self._block is None:
            return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a continuation of nothing")
        self._block += frame.payload
        self._block_frames += 1
        if len(self._block) > 2 * self._terms.head_bytes or self._block_frames > MAX_CONTINUATIONS:
            return Broken(Code.ENHANCE_YOUR_CALM, Reason.HEAD_TOO_LARGE, "a header section without end")
        return self._end_block(events) if frame.flags & frames.END_HEADERS else None

    def _end_block(self, events: list[Event]) -> Broken | None:
        assert self._block is not None
        block, self._block = bytes(self._block), None
        fields = self._decoded(block)
        if isinstance(fields, Broken):
            return fields
        stream, ended = self._block_of, bool(self._block_flags & frames.END_STREAM)
        flow = self._flows.get(stream)
        if flow is not None:
            if flow.heard_end:
                return Broken(
                    Code.STREAM_CLOSED, Reason.BAD_FRAMING, "a header section after the end of its stream"
                )
            if self._server and not ended:
                self.reset(stream, Code.PROTOCOL_ERROR)  # trailers end their stream (§8.1)
                events.append(Reset(stream, Code.PROTOCOL_ERROR, ours=True))
                return None
            self._heard(stream, flow, ended=ended)
            events.append(Head(stream, fields, ended, opens=False))
            return None
        if not self._is_idle(stream):
            return self._pay(1)  # of a stream that is over here, but not yet there
        self._highest = stream
        if len(self._flows) >= self._terms.streams:
            self._drop_unwanted()
        if self.leaving or len(self._flows) >= self._terms.streams:
            if self.leaving:
                self.go_away()
            self._out.append(frames.reset(stream, Code.REFUSED_STREAM))
            events.append(Surplus(stream, fields))
            return self._pay(self.patience.RESET)
        self._taken = stream
        flow = self._flows[stream] = _Flow(self._peer_window, self._terms.window)
        flow.heard_end = ended
        events.append(Head(stream, fields, ended, opens=True))
        return None

    def _decoded(self, block: bytes) -> tuple[Field, ...] | Broken:
        try:
            return tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            return Broken(Code.ENHANCE_YOUR_CALM, Reason.HEAD_TOO_LARGE, "a header section is far too large")
        except (HPACKError, IndexError, ValueError, TypeError):
            return Broken(
                Code.COMPRESSION_ERROR, Reason.BAD_FRAMING, "a header section cannot be decompressed"
            )

    def _priority(self, frame: Frame, _events: list[Event]) -> Broken | None:
        if frame.stream == 0:
            return _NOT_FOR_STREAM_0
        return _BAD_SIZE if len(frame.payload) != 5 else self._pay(1)

    def _rst_stream(self, frame: Frame, events: list[Event]) -> Broken | None:
        number = frames.number_of(frame.payload)
        if frame.stream == 0:
            return _NOT_FOR_STREAM_0
        if number is None:
            return _BAD_SIZE
        if self._is_idle(frame.stream):
            return _NO_STREAM
        if self._flows.pop(frame.stream, None) is not None:
            events.append(Reset(frame.stream, Code.of(number)))
        return self._pay(self.patience.RESET)

    def _settings(self, frame: Frame, events: list[Event]) -> Broken | None:
        values = frames.settings_of(frame.payload)
        if frame.stream != 0:
            return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "settings of a stream")
        if values is None or (frame.flags & frames.ACK and values):
            return _BAD_SIZE
        if frame.flags & frames.ACK:
            return self._pay(1)
        window = values.get(frames.INITIAL_WINDOW_SIZE, self._peer_window)
        if window > frames.MAX_WINDOW:
            return Broken(Code.FLOW_CONTROL_ERROR, Reason.BAD_FRAMING, "a window is too large")
        push, most = values.get(frames.ENABLE_PUSH, 0), values.get(frames.MAX_FRAME_SIZE, frames.FRAME_BYTES)
        if push > (1 if self._server else 0) or not frames.FRAME_BYTES <= most < 2**24:
            return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a setting has no such value")
        for flow in self._flows.values():
            flow.send += window - self._peer_window
            if flow.send > frames.MAX_WINDOW:
                return Broken(Code.FLOW_CONTROL_ERROR, Reason.BAD_FRAMING, "a window is too large")
        self._peer_window = window
        self._peer_streams = values.get(frames.MAX_CONCURRENT_STREAMS, self._peer_streams)
        table = min(TABLE_BYTES, values.get(frames.HEADER_TABLE_SIZE, self._encoder.header_table_size))
        if table != self._encoder.header_table_size:
            self._encoder.header_table_size = table
        self._out.append(frames.frame(frames.SETTINGS, frames.ACK, 0))
        events.append(Roomier())
        return self._pay(1 + len(frame.payload) // 60)

    def _push_promise(self, _frame: Frame, _events: list[Event]) -> Broken | None:
        return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a push, which was never allowed")

    def _ping(self, frame: Frame, _events: list[Event]) -> Broken | None:
        if frame.stream != 0:
            return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a ping of a stream")
        if len(frame.payload) != 8:
            return _BAD_SIZE
        if not frame.flags & frames.ACK:
            self._out.append(frames.frame(frames.PING, frames.ACK, 0, frame.payload))
        return self._pay(1)

    def _goaway(self, frame: Frame, events: list[Event]) -> Broken | None:
        found = frames.goaway_of(frame.payload)
        if frame.stream != 0:
            return Broken(Code.PROTOCOL_ERROR, Reason.BAD_FRAMING, "a farewell of a stream")
        if found is None:
            return _BAD_SIZE
        events.append(GoingAway(found[0], Code.of(found[1])))
        return self._pay(self.patience.RESET)

    def _window_update(self, frame: Frame, events: list[Event]) -> Broken | None:
        number = frames.number_of(frame.payload)
        if number is None:
            return _BAD_SIZE
        increment = number & frames.MAX_WINDOW
        if frame.stream == 0:
            self._send += increment
            if increment == 0 or self._send > frames.MAX_WINDOW:
                code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
                return Broken(code, Reason.BAD_FRAMING, "a window grows by nothing, or by too much")
        elif self._is_idle(frame.stream):
            return _NO_STREAM
        elif (flow := self._flows.get(frame.stream)) is not None:
            flow.send += increment
            if increment == 0 or flow.send > frames.MAX_WINDOW:
                code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
                self.reset(frame.stream, code)
                events.append(Reset(frame.stream, code, ours=True))
                return self._pay(self.patience.RESET)
        events.append(Roomier())
        return self._pay(1)
