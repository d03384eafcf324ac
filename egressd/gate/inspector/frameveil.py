"""The frames of a WebSocket from an origin, masked: messages across their fragments, each control frame for itself. Pure.

Frames were checked before (`websocket.FrameCheck`) and have no extensions. A message that did not come whole in one piece is told
in fragments of our own (RFC 6455 §5.4 lets whoever stands between do so where nothing is negotiated): what is held back of it
stops no ping then, and every piece that is written is whole frames. As much of it as could be a secret's beginning always waits
for its end, so that the cuts don't tell whether it is one.
"""

from __future__ import annotations

from typing import Final

from egressd.credentials.scrub import SteadyScrubber
from egressd.gate.inspector.veil import Veil

_FINAL: Final = 0x80
_CLOSE: Final = 0x8
_CONTROL: Final = 0x8
"""The bit that makes an opcode a control frame's."""


class FrameVeil:
    """Masks one direction, whose frames are not masked in the sense of the RFC."""

    __slots__ = ("_head", "_left", "_message", "_opcode", "_payload", "_said", "_scrubber", "_veil")

    def __init__(self, veil: Veil) -> None:
        """The first frame comes next; `veil` is that of the upgrade."""
        self._veil = veil
        self._scrubber = SteadyScrubber(veil.mask)
        self._head = bytearray()
        self._left = -1  # bytes of a payload still to come; -1 between frames
        self._opcode = 0  # of the frame, with its final bit
        self._payload = bytearray()  # of a control frame
        self._message = 0  # the opcode of the message, 0 once it was said
        self._said = bytearray()  # what may be said of the message in the next fragment

    def feed(self, data: bytes) -> bytes:
        """Return the frames that go on once `data` has come."""
        out, at = bytearray(), 0
        while at < len(data) or self._left == 0:
            if self._left < 0:
                at = self._read_head(data, at)
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._opcode & _CONTROL:
                self._payload += piece
            else:
                self._said += self._scrubber.feed(piece)
            if self._left == 0:
                self._end_frame(out)
        self._speak(out, final=False)
        return bytes(out)

    def _read_head(self, data: bytes, at: int) -> int:
        self._head += data[at : at + 1]
        head = self._head
        wide = {126: 2, 127: 8}.get(head[1] & 0x7F, 0) if len(head) > 1 else 0
        if len(head) >= 2 and len(head) == 2 + wide:
            self._opcode = head[0]
            self._left = int.from_bytes(head[2:]) if wide else head[1] & 0x7F
            if self._opcode & 0x0F in (0x1, 0x2):
                self._message = self._opcode & 0x0F
            self._head = bytearray()
        return at + 1

    def _end_frame(self, out: bytearray) -> None:
        self._left = -1
        if self._opcode & _CONTROL:
            self._speak(out, final=False)
            payload, self._payload = bytes(self._payload), bytearray()
            out += _frame(self._opcode, self._control(payload))
        elif self._opcode & _FINAL:
            self._said += self._scrubber.finish()
            self._veil.note(self._scrubber.found)
            self._scrubber = SteadyScrubber(self._veil.mask)
            self._speak(out, final=True)
            self._message = 0

    def _control(self, payload: bytes) -> bytes:
        """The code of a Close frame is no text."""
        code = payload[:2] if self._opcode & 0x0F == _CLOSE else b""
        return code + self._veil.text(payload[len(code) :])

    def _speak(self, out: bytearray, *, final: bool) -> None:
        """Say what there is of the message; it goes on in continuation frames."""
        if self._said or final:
            out += _frame((_FINAL if final else 0) | self._message, bytes(self._said))
            self._said = bytearray()
            self._message = 0


def _frame(first: int, payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes((first, size)) + payload
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2) + payload
    return bytes((first, 127)) + size.to_bytes(8) + payload
