"""WebSocket frames in any pieces, beside wsproto. Input: a byte of options, then the frames."""

from __future__ import annotations

import struct

from wsproto.frame_protocol import CloseReason, FrameProtocol, ParseFailed

from egressd.gate.inspector.websocket import FrameCheck
from tests.fuzz.target import Target, pieces_of

_CLOSE = 8

type Seen = tuple[str | None, int, bool, bool, bool]


def _read(pieces: list[bytes], *, masked: bool, extended: bool) -> Seen:
    check_of = FrameCheck(masked=masked, extended=extended)
    problem = None
    for piece in pieces:
        problem = problem or check_of.feed(piece)
    return problem, check_of.frames, check_of.closing, check_of.between, bool(check_of._head)


def check(data: bytes) -> None:
    """Hold every law of frames."""
    if not data:
        return
    masked, extended, sent = bool(data[0] & 1), bool(data[0] & 2), data[1:]
    seen = _read([sent], masked=masked, extended=extended)
    for pieces in pieces_of(sent):
        assert _read(pieces, masked=masked, extended=extended) == seen, (
            "the frames depend on how they were cut"
        )
    problem, frames, _, _, in_head = seen
    assert frames <= len(sent) // 2
    if problem is not None:
        again = _read([sent, b"\x81\0"], masked=masked, extended=extended)
        assert again[0] == problem, "more bytes mend a bad frame"
    elif not extended and not in_head:  # a head is judged when it is whole, and passes nothing alone
        _agree_with_wsproto(sent, seen, masked=masked)


def _agree_with_wsproto(sent: bytes, seen: Seen, *, masked: bool) -> None:
    """As many frames, the same end: another count would be another message."""
    reader = FrameProtocol(client=not masked, extensions=[])
    reader.receive_bytes(sent)
    ended = closed = 0
    try:
        for frame in reader.received_frames():
            ended += frame.frame_finished
            closed = frame.frame_finished and int(frame.opcode) == _CLOSE
            if closed:
                break
    except ParseFailed as error:
        # It looks into payloads too, which we do not; what it says of the frames themselves must be said by us.
        if "CLOSE" in str(error) or error.code == CloseReason.INVALID_FRAME_PAYLOAD_DATA:
            return
        raise AssertionError(f"wsproto refuses a frame that we pass: {error}") from error
    _, frames, closing, between, _ = seen
    if not closed:
        assert frames - ended in (0, 1)
        assert not between or frames == ended
    assert not closed or closing


def frame_of(opcode: int, payload: bytes, *, mask: bool = True, final: bool = True) -> bytes:
    """Return one frame."""
    size = len(payload)
    wide = b"" if size < 126 else struct.pack("!H", size) if size < 65536 else struct.pack("!Q", size)
    short = size if size < 126 else 126 if size < 65536 else 127
    key = b"KEYS" if mask else b""
    return bytes((0x80 * final | opcode, 0x80 * mask | short)) + wide + key + payload


TARGET = Target(
    "websockets",
    check,
    lambda data: FrameCheck(masked=True, extended=False).feed(data),
    seeds=(
        b"\x01" + frame_of(1, b"hello") + frame_of(8, b"\x03\xe8"),
        b"\0" + frame_of(2, b"x" * 200, mask=False) + frame_of(9, b"", mask=False),
        b"\x01" + frame_of(1, b"a", final=False) + frame_of(9, b"p") + frame_of(0, b"b"),
        b"\x03" + b"\xc1\x80KEYS",
        b"\x01" + frame_of(3, b""),
        b"\0" + frame_of(1, b"ab", mask=False) * 12,
    ),
    words=(
        b"\x81\x80KEYS",
        b"\x81\0",
        b"\x01\x81KEYSx",
        b"\x80\x80KEYS",
        b"\x89\x80KEYS",
        b"\x88\x80KEYS",
        b"\xfe\0\x7e",
        b"\xff\0\0\0\0\0\x01\0\0",
        b"\x7f",
    ),
    most=900,
)
