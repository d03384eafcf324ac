"""The exchange that an HTTP/1 connection is at, and how it ends: by its response, by an answer of ours, or cut short.

What `http2.lanes` is for many exchanges at a time, this is for one after the other. Whatever is refused or breaks ends the
connection too: the client gets one answer that says why (if the response had not begun), and nothing of it is carried on.
"""

from __future__ import annotations

from typing import Protocol

from egressd.gate.connection import Connection
from egressd.gate.inspector.conduit import Conduit
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.http1.sandbox_side import SandboxSide
from egressd.gate.inspector.pace import Pace, Starved
from egressd.gate.inspector.pipe import PipeLayer
from egressd.gate.inspector.veil import Veil
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason


class Owner(Protocol):
    """The connection that the exchanges are on."""

    @property
    def sandbox_side(self) -> SandboxSide | PipeLayer:
        """Who speaks to the sandbox."""

    def leave(self) -> None:
        """Let the client have what was written for it, then close."""

    def finish(self) -> None:
        """Be over at once."""


class Turn:
    """At most one `exchange`, whose bytes go through the conduit; between two of them there is none."""

    def __init__(self, connection: Connection, conduit: Conduit, pace: Pace, owner: Owner) -> None:
        """Nothing was asked yet."""
        self.exchange: Exchange | None = None
        self._connection = connection
        self._conduit = conduit
        self._pace = pace
        self._owner = owner

    @property
    def veil(self) -> Veil | None:
        """What the response passes through."""
        return self.exchange.veil if self.exchange is not None else None

    def begin(self) -> None:
        """Begin with a request that nobody has judged yet: even one that breaks the judge leaves a record."""
        self.exchange = Exchange(self._connection)

    def take(self, exchange: Exchange) -> None:
        """Go on with the exchange that the request has become, by its limits."""
        self.exchange = exchange
        self._pace.bind(exchange.account)

    def came(self, count: int) -> None:
        """Count bytes that have come from the upstream."""
        if self.exchange is not None:
            self.exchange.down += count

    def withhold(self) -> None:
        """Forget what has not left yet."""
        if self.exchange is not None:
            self.exchange.up -= self._conduit.withhold()

    # how it ends

    def complete(self, detail: str | None = None) -> None:
        """End an exchange whose messages are both complete; another one may follow."""
        assert self.exchange is not None
        self.exchange.end(Reason.COMPLETED, detail)
        self.exchange = None

    def end(self, reason: Reason, detail: str | None = None) -> None:
        """Let go upstream what may, and end the exchange, if there is one; what has to wait never left."""
        if self.exchange is not None:
            self._conduit.flush()
            self.withhold()
            self.exchange.end(reason, detail)

    def leave(self, reason: Reason, detail: str | None = None) -> None:
        """End the exchange, if there is one, and with it the connection."""
        self.end(reason, detail)
        self._owner.leave()

    def cut(self, reason: Reason) -> None:
        """End the exchange at once; nothing more of it leaves."""
        if self.exchange is not None:
            self.withhold()
            self.exchange.end(reason)

    def deny(self) -> None:
        """Answer a request that the addon has not admitted."""
        exchange = self.exchange
        assert exchange is not None
        if exchange.refusal is None:
            exchange.refuse(Reason.INTERNAL_ERROR)
        self._answer(exchange, exchange.ending)

    def reject(self, reason: Reason, detail: str, method: bytes = b"", target: bytes = b"") -> None:
        """Answer and record an attempt that never became a request."""
        exchange = self.exchange = Exchange(self._connection)
        if method:
            exchange.method, exchange.target = method.decode("ascii", "replace"), target.decode("latin-1")
        exchange.deny(Decision("deny", reason), detail)
        self._answer(exchange, Reason.COMPLETED)

    def left(self, *, partial: bool) -> None:
        """Take note that the client has gone between two exchanges, or in the middle of a head (`partial`)."""
        if partial:
            self.reject(Reason.BAD_REQUEST, "closed before the end of the head")
        self._owner.leave()

    def starve(self, starved: Starved) -> None:
        """End an exchange that a limit has no room for, and will have none soon."""
        if self.exchange is not None:
            self.exchange.retry_after = starved.retry_after
        self.fail(Reason.RATE_LIMITED, starved.detail)

    def rejudge(self, now: float) -> None:
        """End an exchange that the rules no longer allow."""
        if self.exchange is not None and not self.exchange.may_live(now):
            self.fail(Reason.POLICY_CHANGED, "judged again")

    def overdue(self) -> None:
        """End what was waited for too long, and the connection with it."""
        side = self._owner.sandbox_side
        if self.exchange is not None and side.client_ended:
            self.fail(Reason.CLIENT_CLOSED, "ended its side, and took no answer")
        elif self.exchange is not None:
            waiting = side.request_done and not side.begun
            reason = Reason.UPSTREAM_TIMEOUT if waiting else Reason.IDLE_TIMEOUT
            self.fail(reason, "no bytes in either direction")
        elif side.buf:
            self.reject(Reason.HEAD_TIMEOUT, "the head did not end in time")
        else:
            self._owner.leave()  # idle between requests: nobody is owed a word

    def crash(self, detail: str) -> None:
        """End with an error of our own, between two exchanges too."""
        self.exchange = self.exchange or Exchange(self._connection)
        self.withhold()
        self.fail(Reason.INTERNAL_ERROR, detail)

    def fail(self, reason: Reason, detail: str) -> None:
        """End an exchange that cannot go on: by an answer that says why, or where one has begun by cutting it short."""
        exchange, side = self.exchange, self._owner.sandbox_side
        if exchange is None:
            self._owner.leave()
        elif reason is Reason.CLIENT_CLOSED:
            self.leave(reason, detail)
        elif not side.begun:
            exchange.give_up(reason, detail)
            self._answer(exchange, reason, detail)
        elif side.framed:
            self.end(reason, detail)
            self._conduit.to_client(side.last_word(reason))
            self._owner.leave()  # the client sees that the response is incomplete
        else:
            self.end(reason, detail)
            self._conduit.abort()
            self._owner.finish()

    def _answer(self, exchange: Exchange, ended: Reason, detail: str | None = None) -> None:
        """Write the exchange's refusal instead of a response, and leave."""
        assert exchange.refusal is not None
        self.withhold()
        self._conduit.to_client(exchange.refusal.to_http1(head_only=exchange.method == "HEAD"))
        exchange.end(ended, detail)
        self._owner.leave()
