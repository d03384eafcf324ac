"""What an admitted request becomes on its way out: its head sealed, its body watched, kept to be looked into or signed anew."""

from __future__ import annotations

from typing import Final

from mitmproxy import http

from egressd.credentials import attach, placeholders
from egressd.credentials.attach import Body, Refused
from egressd.credentials.sigv4 import Unsignable
from egressd.credentials.sigv4_chunks import ChunkResigner
from egressd.gate.inspector.credential import Sealed, seal
from egressd.gate.inspector.exchange import Exchange
from egressd.policy import bodies
from egressd.policy.reasons import Reason

WATCHED: Final = 64 * 1024
"""Bytes at the beginning of a body in which placeholders are looked for."""

SIGNING_MOST: Final = 64 * 1024 * 1024
"""Bytes of bodies that wait to be signed, in all of a sandbox."""

_LONGEST: Final = 512
"""Characters of the longest placeholder."""

_UNSEALED: Final = Unsignable("its head is not made")
UNJUDGED: Final = Refused(Reason.BODY_MISMATCH, "the body was not held back")
LEAK: Final = Refused(Reason.PLACEHOLDER_LEAK, "the body")


class Watch:
    """Looks for placeholders at the beginning of a body: none has any business there."""

    __slots__ = ("_left", "_needles", "_others", "_tail")

    def __init__(self, exchange: Exchange) -> None:
        """Without placeholders in the worker there is nothing to look for."""
        connection = exchange.connection
        everywhere, mine = connection.services.placeholders, connection.sandbox.placeholders
        self._needles = tuple(mine.values())
        self._others = placeholders.Strangers(everywhere, self._needles)
        self._left = WATCHED if everywhere or mine else 0
        self._tail = b""

    def finds(self, data: bytes) -> bool:
        """Look at the next piece, and say whether a placeholder ends in it."""
        if self._left <= 0 or not data:
            return False
        text = self._tail + data[: self._left]
        self._left -= len(data)
        self._tail = text[-_LONGEST:]
        return placeholders.holds(self._needles, text, self._others)


class Outgoing:
    """One request on its way to the upstream. Each step returns what is to be written, or why nothing more is."""

    def __init__(self, exchange: Exchange) -> None:
        """Nothing has been written yet."""
        self._sandbox = exchange.connection.sandbox
        self.held = 0
        """Bytes of the body that wait to become a whole, or a whole chunk."""
        assert exchange.admitted
        self._exchange = exchange
        self._watch = Watch(exchange)
        self._whole = bytearray()
        self._chunks: ChunkResigner | None = None
        entry = exchange.decision.entry
        self._conditions = entry.body if entry is not None else ()

    def drop(self) -> None:
        """Let go of what was kept, which is not sent any more."""
        self._whole = bytearray()
        self._chunks = None
        self._hold(-self.held)

    def __del__(self) -> None:
        """However it ends, what it kept counts no longer."""
        self._sandbox.signing -= self.held

    @property
    def waits(self) -> bool:
        """Whether the head can be made only when the body is whole."""
        return self._exchange.body is Body.WHOLE

    def head(self, request: http.Request) -> Sealed | Refused:
        """Return what its head is made of."""
        sealed = seal(self._exchange, request)
        if isinstance(sealed, Refused):
            return sealed
        if self._exchange.body is Body.CHUNKS:
            if sealed.seed is None:
                return Refused(Reason.UNSIGNABLE, "nothing to sign its chunks from")
            self._chunks = ChunkResigner(sealed.seed)
        return sealed

    def body(self, data: bytes) -> bytes | Refused:
        """Return what is to be written for a piece of the body."""
        if self._watch.finds(data):
            return LEAK
        if self._exchange.body is Body.PASSES:
            return UNJUDGED if self._conditions else data
        self._hold(len(data))
        signed = self._signed(data)
        if isinstance(signed, Refused):
            self.drop()
        else:
            self._hold(-len(signed))
        return signed

    def _signed(self, data: bytes) -> bytes | Refused:
        if self._sandbox.signing > SIGNING_MOST:
            return Refused(Reason.UNSIGNABLE, "too much waits to be signed")
        if not self.waits:
            signed = self._chunks.feed(data) if self._chunks is not None else _UNSEALED
            return Refused(Reason.UNSIGNABLE, signed.detail) if isinstance(signed, Unsignable) else signed
        if self._conditions and self.held > bodies.MOST:
            return Refused(Reason.BODY_MISMATCH, f"the body is larger than {bodies.MOST // 1024} KiB")
        if self.held > attach.WHOLE_MOST:
            return Refused(Reason.UNSIGNABLE, f"a body of more than {attach.WHOLE_MOST} bytes")
        self._whole += data
        return b""

    def _hold(self, count: int) -> None:
        self.held += count
        self._sandbox.signing += count

    def end(self, request: http.Request) -> tuple[Sealed | None, bytes] | Refused:
        """Return what is still to be written at the end of the body: a head where it had to wait, and bytes."""
        if self._exchange.body is Body.CHUNKS:
            broken = self._chunks.finish() if self._chunks is not None else _UNSEALED
            return (None, b"") if broken is None else Refused(Reason.UNSIGNABLE, broken.detail)
        if not self.waits:
            return UNJUDGED if self._conditions else (None, b"")
        payload, self._whole = bytes(self._whole), bytearray()
        self._hold(-len(payload))
        if self._conditions and (why := bodies.refuses(self._conditions, payload)) is not None:
            return Refused(Reason.BODY_MISMATCH, why)
        request.headers.pop("transfer-encoding", None)
        request.headers["content-length"] = str(len(payload))
        sealed = seal(self._exchange, request, payload)
        return sealed if isinstance(sealed, Refused) else (sealed, payload)
