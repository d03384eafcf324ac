"""DNS over TLS: messages behind their lengths, answers in any order (RFC 7858, RFC 7766 §6.2.1)."""

from __future__ import annotations

import secrets
from typing import ClassVar, Final

from egressd.gate.dns.lines import GIVEN_UP, Answer, Line, ReplyError
from egressd.gate.dns.servers import Upstream
from egressd.gate.tls.stream import TlsStream

_HEADER: Final = 12
"""Bytes of a DNS message's header (RFC 1035 §4.1.1)."""


class DotLine(Line):
    """A line that tells answers apart by their ids.

    The id of a question that was given up stays taken, or its late answer would be another one's.
    """

    alpn: ClassVar[str] = "dot"  # registered by RFC 7858; many servers know no ALPN at all
    must_agree: ClassVar[bool] = False

    def __init__(self, stream: TlsStream, server: Upstream) -> None:
        super().__init__(stream, server)
        self._buffer = bytearray()
        self._given_up: set[int] = set()

    def _send(self, query: bytes) -> int:
        number = secrets.randbelow(1 << 16)
        while number in self._waiting or number in self._given_up:
            number = secrets.randbelow(1 << 16)
        # In one piece: a length on its own would make a segment of its own (RFC 7766 §8).
        self._stream.write(len(query).to_bytes(2) + number.to_bytes(2) + query[2:])
        return number

    def _receive(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 2:
            length = int.from_bytes(self._buffer[:2])
            if length < _HEADER:
                raise ReplyError("the server sends what is no DNS message")
            if len(self._buffer) < 2 + length:
                return
            message = bytes(self._buffer[2 : 2 + length])
            del self._buffer[: 2 + length]
            self._take(message)

    def _take(self, message: bytes) -> None:
        number = int.from_bytes(message[:2])
        if number in self._given_up:
            self._given_up.discard(number)
            self._note_answer()
        elif not self._complete(number, Answer(b"\0\0" + message[2:])):
            raise ReplyError("the server answers what was not asked")

    def _give_up(self, key: int) -> None:
        self._given_up.add(key)
        if len(self._given_up) >= GIVEN_UP:
            self.retired = True
