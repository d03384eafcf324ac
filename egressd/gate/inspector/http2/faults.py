"""What a peer can do wrong to a whole HTTP/2 connection, by the code that it is told (RFC 9113 §7) and the reason recorded."""

from __future__ import annotations

from typing import Final

from egressd.gate.inspector.http2.events import Broken
from egressd.gate.inspector.http2.frames import Code
from egressd.policy.reasons import Reason


def _framing(code: Code, detail: str) -> Broken:
    return Broken(code, Reason.BAD_FRAMING, detail)


# how it begins
NO_PREFACE: Final = Broken(Code.PROTOCOL_ERROR, Reason.BAD_REQUEST, "no HTTP/2 preface")
NO_SETTINGS: Final = _framing(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")

# frames, whatever they say
LONG_FRAME: Final = _framing(Code.FRAME_SIZE_ERROR, "a frame is longer than was agreed")
BAD_SIZE: Final = _framing(Code.FRAME_SIZE_ERROR, "a frame has another size than its kind")
BAD_PADDING: Final = _framing(Code.PROTOCOL_ERROR, "a frame has more padding than bytes")
FLOOD: Final = Broken(Code.ENHANCE_YOUR_CALM, Reason.FLOOD, "frames that ask for work and carry nothing")

# streams
NO_STREAM: Final = _framing(Code.PROTOCOL_ERROR, "a frame of a stream that was never opened")
NOT_FOR_STREAM_0: Final = _framing(Code.PROTOCOL_ERROR, "a frame that belongs to a stream, without one")
SETTINGS_OF_STREAM: Final = _framing(Code.PROTOCOL_ERROR, "settings of a stream")
PING_OF_STREAM: Final = _framing(Code.PROTOCOL_ERROR, "a ping of a stream")
GOAWAY_OF_STREAM: Final = _framing(Code.PROTOCOL_ERROR, "a farewell of a stream")
LATE_DATA: Final = _framing(Code.STREAM_CLOSED, "data after the end of its stream")
LATE_SECTION: Final = _framing(Code.STREAM_CLOSED, "a header section after the end of its stream")
PUSH: Final = _framing(Code.PROTOCOL_ERROR, "a push, which was never allowed")

# header sections
INSIDE_SECTION: Final = _framing(Code.PROTOCOL_ERROR, "a frame inside a header section")
CONTINUES_NOTHING: Final = _framing(Code.PROTOCOL_ERROR, "a continuation of nothing")
UNREADABLE_SECTION: Final = _framing(Code.COMPRESSION_ERROR, "a header section cannot be decompressed")
ENDLESS_SECTION: Final = Broken(Code.ENHANCE_YOUR_CALM, Reason.HEAD_TOO_LARGE, "a header section without end")
LARGE_SECTION: Final = Broken(
    Code.ENHANCE_YOUR_CALM, Reason.HEAD_TOO_LARGE, "a header section is far too large"
)

# windows and settings
OVER_WINDOW: Final = _framing(Code.FLOW_CONTROL_ERROR, "more data than the window holds")
LARGE_WINDOW: Final = _framing(Code.FLOW_CONTROL_ERROR, "a window is too large")
NO_WINDOW: Final = _framing(Code.PROTOCOL_ERROR, "a window grows by nothing, or by too much")
TOO_MUCH_WINDOW: Final = _framing(Code.FLOW_CONTROL_ERROR, "a window grows by nothing, or by too much")
BAD_SETTING: Final = _framing(Code.PROTOCOL_ERROR, "a setting has no such value")
