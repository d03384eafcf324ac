"""WebSocket (RFC 6455): the handshake on both sides, and frames that are looked at but never kept. Pure and total.

A message is never put together: what is checked are the two to fourteen bytes before each payload, wherever the pieces of a
stream are cut. So a frame may be as long as it likes and costs no memory.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from egressd.gate.inspector.head import Field, connection_options
from egressd.policy.reasons import Reason

VERSION: Final = b"13"
_ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 §1.3."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = frozenset({0x8, 0x9, 0xA})
_MESSAGE = frozenset({0x1, 0x2})
_CLOSE = 0x8
_WIDE = {126: 2, 127: 8}
_LEAST = {126: 126, 127: 65536}

GOING_AWAY: Final = 1001
PROTOCOL: Final = 1002
POLICY: Final = 1008
RESTARTED: Final = 1012
"""Close codes (§7.4.1 and the registry of RFC 6455 §11.7)."""

_CODES = {
    Reason.REVOKED: POLICY,
    Reason.POLICY_CHANGED: POLICY,
    Reason.RATE_LIMITED: POLICY,
    Reason.BAD_FRAMING: PROTOCOL,
    Reason.UPSTREAM_PROTOCOL: PROTOCOL,
    Reason.SHUTDOWN: RESTARTED,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client asks for, as far as the answer must keep to it."""

    key: bytes
    protocols: frozenset[bytes]
    extensions: frozenset[bytes]


def parse_offer(method: str, fields: tuple[Field, ...]) -> Offer | str:
    """Return the opening handshake of a client (§4.2.1), or what is wrong with it."""
    if method != "GET":
        return "a WebSocket begins with GET"
    if b"upgrade" not in connection_options(fields):
        return "Connection does not name the upgrade"
    if _values(fields, b"sec-websocket-version") != [VERSION]:
        return "the WebSocket version is not 13"
    keys = _values(fields, b"sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0]):
        return "the WebSocket key is not sixteen bytes in base64, said once"
    protocols = _listed(fields, b"sec-websocket-protocol")
    if any(_TOKEN.fullmatch(protocol) is None for protocol in protocols):
        return "a WebSocket subprotocol is malformed"
    extensions = (
        name.partition(b";")[0].strip(b" \t") for name in _listed(fields, b"sec-websocket-extensions")
    )
    return Offer(keys[0], frozenset(protocols), frozenset(extensions))


@dataclass(frozen=True, slots=True)
class Agreed:
    """An upgrade that both sides agree on; with extensions, frames may carry reserved bits."""

    extended: bool


def check_answer(offer: Offer, fields: tuple[Field, ...]) -> Agreed | str:
    """Return what a server's 101 agrees to (§4.1), or why it is no answer to the offer."""
    if _values(fields, b"upgrade") != [b"websocket"] or b"upgrade" not in connection_options(fields):
        return "the answer upgrades to something else"
    accept = base64.b64encode(hashlib.sha1(offer.key + _ACCEPT, usedforsecurity=False).digest())
    if [value for name, value in fields if name.lower() == b"sec-websocket-accept"] != [accept]:
        return "the answer does not prove that the key was read"
    protocols = _listed(fields, b"sec-websocket-protocol")
    if len(protocols) > 1 or not offer.protocols.issuperset(protocols):
        return "the answer chooses a subprotocol that was not offered"
    extensions = [
        name.partition(b";")[0].strip(b" \t") for name in _listed(fields, b"sec-websocket-extensions")
    ]
    if not offer.extensions.issuperset(extensions):
        return "the answer chooses an extension that was not offered"
    return Agreed(extended=bool(extensions))


def close_frame(code: int, text: str) -> bytes:
    """Return the Close frame of a server (§5.5.1)."""
    payload = code.to_bytes(2) + text.encode("ascii", "replace")[:123]
    return bytes((0x80 | _CLOSE, len(payload))) + payload


def farewell_code(reason: Reason) -> int:
    """Return the close code by which a client is told why egressd ends its WebSocket."""
    return _CODES.get(reason, GOING_AWAY)


class FrameCheck:
    """The frames of one direction: `masked` from a client, `extended` where reserved bits were agreed on."""

    __slots__ = ("_extended", "_head", "_in_message", "_left", "_masked", "closing", "frames")

    def __init__(self, *, masked: bool, extended: bool) -> None:
        """The first frame comes next."""
        self._masked = masked
        self._extended = extended
        self._head = bytearray()
        self._left = 0
        self._in_message = False
        self.closing = False
        """A Close frame was seen: nothing may follow it."""
        self.frames = 0

    @property
    def between(self) -> bool:
        """Whether a frame of our own may be put in here."""
        return not self._left and not self._head

    def feed(self, data: bytes) -> str | None:
        """Look at what comes next; returns what is wrong with it, and then nothing of it may go on."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            if self.closing:
                return "a frame after the Close frame"
            missing = self._size() - len(self._head)
            self._head += data[at : at + missing]
            at = min(len(data), at + missing)
            if len(self._head) == self._size() and (problem := self._begin()) is not None:
                return problem
        return None

    def _size(self) -> int:
        """Bytes of the head that has begun, as far as it says yet."""
        if len(self._head) < 2:
            return 2
        return 2 + _WIDE.get(self._head[1] & 0x7F, 0) + (4 if self._head[1] & 0x80 else 0)

    def _begin(self) -> str | None:
        """Judge a whole head (§5.2) and await its payload."""
        head, self._head = self._head, bytearray()
        final, reserved, opcode = head[0] & 0x80, head[0] & 0x70, head[0] & 0x0F
        short = head[1] & 0x7F
        wide = _WIDE.get(short, 0)
        length = int.from_bytes(head[2 : 2 + wide]) if wide else short
        if bool(head[1] & 0x80) is not self._masked:
            return "a frame is masked in the wrong direction"
        if reserved and not self._extended:
            return "a frame has reserved bits that were not agreed on"
        if length >= 1 << 63 or length < _LEAST.get(short, 0):
            return "a frame has a length that is too long, or not written shortest"
        if opcode in _CONTROL:
            if not final or length > 125:
                return "a control frame is fragmented or too long"
        elif opcode in _MESSAGE or opcode == 0:
            if self._in_message is not (opcode == 0):
                return "a fragment of no message, or a message inside another"
            self._in_message = not final
        else:
            return "a frame has a reserved opcode"
        self._left = length
        self.frames += 1
        self.closing = opcode == _CLOSE
        return None


def _values(fields: tuple[Field, ...], name: bytes) -> list[bytes]:
    return [
        value.lower() if name == b"upgrade" else value for found, value in fields if found.lower() == name
    ]


def _listed(fields: tuple[Field, ...], name: bytes) -> list[bytes]:
    values = b",".join(value for found, value in fields if found.lower() == name).split(b",")
    return [value.strip(b" \t") for value in values if value.strip(b" \t")]


def _is_key(key: bytes) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False
