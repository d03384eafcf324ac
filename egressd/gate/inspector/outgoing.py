"""What an admitted request becomes on its way out: its head sealed, its body watched, and kept or signed anew where need be."""

from __future__ import annotations

from typing import Final

from mitmproxy import http

from egressd.credentials import attach, placeholders
from egressd.credentials.attach import Body, Refused
from egressd.gate.inspector.credential import seal
from egressd.gate.inspector.exchange import Exchange
from egressd.policy.reasons import Reason

WATCHED: Final = 64 * 1024
"""Bytes at the beginning of a body in which placeholders are looked for."""

_LONGEST: Final = 512
"""Characters of the longest placeholder."""

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
        assert exchange.admitted
        self._exchange = exchange
        self._watch = Watch(exchange)
        self._whole = bytearray()

    @property
    def waits(self) -> bool:
        """Whether the head can be made only when the body is whole."""
        return self._exchange.body is Body.WHOLE

    def head(self, request: http.Request) -> http.Request | Refused:
        """Return the request as its head is to be written."""
        return seal(self._exchange, request)

    def body(self, data: bytes) -> bytes | Refused:
        """Return what is to be written for a piece of the body."""
        if self._watch.finds(data):
            return LEAK
        if not self.waits:
            return data
        self._whole += data
        if len(self._whole) > attach.WHOLE_MOST:
            return Refused(Reason.UNSIGNABLE, f"a body of more than {attach.WHOLE_MOST} bytes")
        return b""

    def end(self, request: http.Request) -> tuple[http.Request | None, bytes] | Refused:
        """Return what is still to be written at the end of the body: a head where it had to wait, and bytes."""
        if not self.waits:
            return None, b""
        payload = bytes(self._whole)
        if payload:
            request.headers.pop("transfer-encoding", None)
            request.headers["content-length"] = str(len(payload))
        sealed = seal(self._exchange, request, payload)
        return sealed if isinstance(sealed, Refused) else (sealed, payload)
