"""One side of one HTTP/2 connection (RFC 9113): frames in, events out; heads and data in, frames out. No I/O, no clock.

The theory: what a peer does wrong to one stream ends that stream, and what it does wrong to the connection ends the
connection, once, as `Broken`, after which nothing is read. Flow control is the owner's: bytes count against the windows of
their stream and of the connection until the owner says that somebody has taken them. Work that carries nothing (resets,
pings, settings, empty frames, window updates by the byte) is paid out of a `Patience` that bytes and answers fill; when it
is empty, the peer floods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from egressd.gate.inspector.head import Field
from egressd.gate.inspector.http2 import faults, frames
from egressd.gate.inspector.http2.events import Broken, Data, Event, GoingAway, Head, Reset, Roomier, Surplus
from egressd.gate.inspector.http2.frames import Code, Frame, FrameReader, Oversized
from egressd.gate.inspector.http2.patience import Patience
from egressd.gate.inspector.http2.sections import Sections
from egressd.gate.inspector.http2.streams import Stream, Streams
from egressd.gate.inspector.http2.windows import Window

DEFAULT_WINDOW: Final = 65_535
"""What every window is before anybody says otherwise (§6.9.2)."""

_UNWANTED_BYTES: Final = 16 * 1024 * 1024
"""Bytes that a peer may still send on a stream that it has the whole answer on. There are clients that show no answer whose
stream was reset before they had sent all (curl 7.88), and some that wait for the end of theirs (Node)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What we let a peer do: bytes of a head, of the windows of a stream (at first, and at most) and of the connection."""

    head_bytes: int
    window: int
    most_window: int
    connection_window: int
    streams: int = 100


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
        self._sections = Sections(terms.head_bytes)
        self._out: list[bytes] = []
        self._streams = Streams(server=server, send=DEFAULT_WINDOW, window=terms.window)
        self._said_goaway = False
        self._send = DEFAULT_WINDOW
        self._window = Window(terms.connection_window)
        self._awaiting = frames.PREFACE if server else b""
        self._settled = False  # the peer's settings were its first frame
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
        return self._streams.can_open and not self.broken

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    @property
    def in_head(self) -> bool:
        """Whether the peer is in the middle of a header section, so that it can say nothing else."""
        return self._sections.stream is not None

    def open(self) -> int:
        """Begin a stream of ours; `can_open` must hold."""
        assert self.can_open
        return self._streams.open()

    def send_head(self, stream: int, fields: Iterable[Field], *, end: bool = False) -> int:
        """Send a header section on an open stream; returns its bytes."""
        block = self._sections.encode(fields)
        flow = self._streams[stream]
        assert not flow.said_end
        written = frames.header_block(stream, block, end=end)
        self._out.append(written)
        flow.said_end = end
        self._settle(stream, flow)
        return len(written)

    def send_data(self, stream: int, data: bytes, *, end: bool = False) -> int:
        """Send data for which there is `room`, at most a frame of it; returns its bytes."""
        flow = self._streams[stream]
        assert not flow.said_end
        assert len(data) <= min(frames.FRAME_BYTES, max(0, self.room(stream)))
        flow.send -= len(data)
        self._send -= len(data)
        self._out.append(frames.head_of(frames.DATA, frames.END_STREAM if end else 0, stream, len(data)))
        self._out.append(data)
        self.patience.earn(len(data) >> 10)
        flow.said_end = end
        self._settle(stream, flow)
        return frames.HEADER_BYTES + len(data)

    def _settle(self, stream: int, flow: Stream) -> None:
        if self._streams.settle(stream, flow):
            self.patience.earn(self.patience.RESET)

    def room(self, stream: int) -> int:
        """How many bytes the stream takes now; 0 or less for none."""
        flow = self._streams.get(stream)
        return min(self._send, flow.send) if flow is not None else 0

    def reset(self, stream: int, code: Code) -> None:
        """End a stream at once; what the peer still sends on it is dropped. Nothing happens to one that is over."""
        if self._streams.pop(stream, None) is not None and not self.broken:
            self._out.append(frames.reset(stream, code))

    def let_finish(self, stream: int) -> None:
        """Drop what the peer still sends on a stream on which we have said all, instead of resetting it at once."""
        flow = self._streams.get(stream)
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
            self._out.append(frames.goaway(self._streams.accepted, code))

    # for the owner: what was taken of what came

    def taken(self, stream: int, count: int, *, keeps_up: bool) -> None:
        """Give a stream's window back `count` bytes; it grows where whoever takes them `keeps_up`."""
        flow = self._streams.get(stream)
        if flow is None or flow.heard_end:
            return
        back = flow.window.give_back(count, self._terms.most_window if keeps_up else 0)
        if back:
            self._out.append(frames.window_update(stream, back))

    def give_back(self, size: int) -> None:
        """Give the connection's window back `size` bytes."""
        back = self._window.give_back(size)
        if back:
            self._out.append(frames.window_update(0, back))

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
                problem = faults.NO_PREFACE
            self._awaiting, data = self._awaiting[size:], data[size:]
        self._reader.feed(data)
        while problem is None and (frame := self._reader.next()) is not None:
            problem = self._read(frame, events)
        if problem is not None:
            self.broken = True
            self._out.append(frames.goaway(self._streams.accepted, problem.code))
            events.append(problem)
        return events

    def _read(self, frame: Frame | Oversized, events: list[Event]) -> Broken | None:
        if isinstance(frame, Oversized):
            return faults.LONG_FRAME
        if not self._settled:
            if frame.kind != frames.SETTINGS or frame.flags & frames.ACK:
                return faults.NO_SETTINGS
            self._settled = True
        if self.in_head and (frame.kind, frame.stream) != (frames.CONTINUATION, self._sections.stream):
            return faults.INSIDE_SECTION
        step = self._steps.get(frame.kind)
        if step is None:
            return self._pay(1)  # an extension (§5.5)
        return step(frame, events)

    def _pay(self, cost: int) -> Broken | None:
        return None if self.patience.spend(cost, self._now) else faults.FLOOD

    def _data(self, frame: Frame, events: list[Event]) -> Broken | None:
        stream, size = frame.stream, len(frame.payload)
        if stream == 0:
            return faults.NOT_FOR_STREAM_0
        data = frames.unpadded(frame)
        if data is None:
            return faults.BAD_PADDING
        if not self._window.spend(size):
            return faults.OVER_WINDOW
        flow = self._streams.get(stream)
        ended = bool(frame.flags & frames.END_STREAM)
        if flow is None:
            self.give_back(size)
            return faults.NO_STREAM if self._streams.is_idle(stream) else self._pay(1)
        if flow.heard_end:
            return faults.LATE_DATA
        if not flow.window.spend(size):
            return faults.OVER_WINDOW
        if size > len(data):
            self.give_back(size - len(data))
            self.taken(stream, size - len(data), keeps_up=False)
        flow.heard_end = ended
        self._settle(stream, flow)
        if flow.unwanted is not None:
            self._drop_data(stream, flow, len(data))
            return None if data or ended else self._pay(1)
        events.append(Data(stream, data, len(data), ended))
        return None if data or ended else self._pay(1)

    def _drop_data(self, stream: int, flow: Stream, size: int) -> None:
        self.give_back(size)
        assert flow.unwanted is not None
        flow.unwanted -= size
        if flow.unwanted <= 0:
            self.reset(stream, Code.NO_ERROR)
        else:
            self.taken(stream, size, keeps_up=False)

    def _drop_unwanted(self) -> None:
        """Make room for streams that somebody wants."""
        for stream, flow in tuple(self._streams.items()):
            if flow.unwanted is not None:
                self.reset(stream, Code.NO_ERROR)

    def _headers(self, frame: Frame, events: list[Event]) -> Broken | None:
        if frame.stream == 0:
            return faults.NOT_FOR_STREAM_0
        if self._streams.is_idle(frame.stream) and (not self._server or frame.stream % 2 == 0):
            return faults.NO_STREAM
        if not self._sections.begin(frame):
            return faults.BAD_PADDING
        return self._end_section(events) if frame.flags & frames.END_HEADERS else None

    def _continuation(self, frame: Frame, events: list[Event]) -> Broken | None:
        if not self.in_head:
            return faults.CONTINUES_NOTHING
        problem = self._sections.go_on(frame)
        ends = problem is None and frame.flags & frames.END_HEADERS
        return self._end_section(events) if ends else problem

    def _end_section(self, events: list[Event]) -> Broken | None:
        stream, ended = self._sections.stream, bool(self._sections.flags & frames.END_STREAM)
        assert stream is not None
        fields = self._sections.end()
        if isinstance(fields, Broken):
            return fields
        flow = self._streams.get(stream)
        if flow is not None:
            if flow.heard_end:
                return faults.LATE_SECTION
            if self._server and not ended:
                self.reset(stream, Code.PROTOCOL_ERROR)  # trailers end their stream (§8.1)
                events.append(Reset(stream, Code.PROTOCOL_ERROR, ours=True))
                return None
            flow.heard_end = ended
            self._settle(stream, flow)
            events.append(Head(stream, fields, ended, opens=False))
            return None
        if not self._streams.is_idle(stream):
            return self._pay(1)  # of a stream that is over here, but not yet there
        self._streams.highest = stream
        if len(self._streams) >= self._terms.streams:
            self._drop_unwanted()
        if self.leaving or len(self._streams) >= self._terms.streams:
            if self.leaving:
                self.go_away()
            self._out.append(frames.reset(stream, Code.REFUSED_STREAM))
            events.append(Surplus(stream, fields))
            return self._pay(self.patience.RESET)
        flow = self._streams.accept(stream)
        flow.heard_end = ended
        events.append(Head(stream, fields, ended, opens=True))
        return None

    def _priority(self, frame: Frame, _events: list[Event]) -> Broken | None:
        if frame.stream == 0:
            return faults.NOT_FOR_STREAM_0
        return faults.BAD_SIZE if len(frame.payload) != 5 else self._pay(1)

    def _rst_stream(self, frame: Frame, events: list[Event]) -> Broken | None:
        number = frames.number_of(frame.payload)
        if frame.stream == 0:
            return faults.NOT_FOR_STREAM_0
        if number is None:
            return faults.BAD_SIZE
        if self._streams.is_idle(frame.stream):
            return faults.NO_STREAM
        if self._streams.pop(frame.stream, None) is not None:
            events.append(Reset(frame.stream, Code.of(number)))
        return self._pay(self.patience.RESET)

    def _settings(self, frame: Frame, events: list[Event]) -> Broken | None:
        values = frames.settings_of(frame.payload)
        if frame.stream != 0:
            return faults.SETTINGS_OF_STREAM
        if values is None or (frame.flags & frames.ACK and values):
            return faults.BAD_SIZE
        if frame.flags & frames.ACK:
            return self._pay(1)
        window = values.get(frames.INITIAL_WINDOW_SIZE, self._streams.send)
        if window > frames.MAX_WINDOW:
            return faults.LARGE_WINDOW
        push, most = values.get(frames.ENABLE_PUSH, 0), values.get(frames.MAX_FRAME_SIZE, frames.FRAME_BYTES)
        if push > (1 if self._server else 0) or not frames.FRAME_BYTES <= most < 2**24:
            return faults.BAD_SETTING
        if not self._streams.resize(window):
            return faults.LARGE_WINDOW
        self._streams.most = values.get(frames.MAX_CONCURRENT_STREAMS, self._streams.most)
        if frames.HEADER_TABLE_SIZE in values:
            self._sections.allow_table(values[frames.HEADER_TABLE_SIZE])
        self._out.append(frames.frame(frames.SETTINGS, frames.ACK, 0))
        events.append(Roomier())
        return self._pay(1 + len(frame.payload) // 60)

    def _push_promise(self, _frame: Frame, _events: list[Event]) -> Broken | None:
        return faults.PUSH

    def _ping(self, frame: Frame, _events: list[Event]) -> Broken | None:
        if frame.stream != 0:
            return faults.PING_OF_STREAM
        if len(frame.payload) != 8:
            return faults.BAD_SIZE
        if not frame.flags & frames.ACK:
            self._out.append(frames.frame(frames.PING, frames.ACK, 0, frame.payload))
        return self._pay(1)

    def _goaway(self, frame: Frame, events: list[Event]) -> Broken | None:
        found = frames.goaway_of(frame.payload)
        if frame.stream != 0:
            return faults.GOAWAY_OF_STREAM
        if found is None:
            return faults.BAD_SIZE
        events.append(GoingAway(found[0], Code.of(found[1])))
        return self._pay(self.patience.RESET)

    def _window_update(self, frame: Frame, events: list[Event]) -> Broken | None:
        number = frames.number_of(frame.payload)
        if number is None:
            return faults.BAD_SIZE
        increment = number & frames.MAX_WINDOW
        if frame.stream == 0:
            self._send += increment
            if increment == 0 or self._send > frames.MAX_WINDOW:
                return faults.TOO_MUCH_WINDOW if increment else faults.NO_WINDOW
        elif self._streams.is_idle(frame.stream):
            return faults.NO_STREAM
        elif (flow := self._streams.get(frame.stream)) is not None:
            flow.send += increment
            if increment == 0 or flow.send > frames.MAX_WINDOW:
                code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
                self.reset(frame.stream, code)
                events.append(Reset(frame.stream, code, ours=True))
                return self._pay(self.patience.RESET)
        events.append(Roomier())
        return self._pay(1)
