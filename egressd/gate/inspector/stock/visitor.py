"""A client of a stock mitmproxy under `addons/egress.py`: where its connection leads, and what was decided of it.

What the door does with sockets of its own, in the order in which mitmproxy tells of it: the destination (CONNECT, SOCKS), the
first bytes, the requests, the end. Every connection leaves one `decision` record, and an `end` if it was allowed.
"""

from __future__ import annotations

import time
from typing import Literal

from egressd.gate import internal
from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.door.arrival import Tls
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.sandbox import Sandbox
from egressd.journal.record import clip
from egressd.policy.attempt import Address, ConnectionAttempt, Decision
from egressd.policy.decide import decide
from egressd.policy.names import Authority, BadHost, format_host, parse_name
from egressd.policy.reasons import Reason


class Visitor:
    """One client connection; `exchange` is its request of now, `pin` what may be dialled for that, and as whom it was asked."""

    def __init__(self, sandbox: Sandbox, services: Services) -> None:
        """It has not said yet where it wants to go: each request in absolute form is judged for itself."""
        self.connection = Connection(sandbox, services, "absolute", Destination(0))
        self.connection.decision = Decision("deny", Reason.NOT_ALLOWED)
        self.tunnel = False
        self.exchange: Exchange | None = None
        self.pin: tuple[tuple[str, int], Address] | None = None
        self._recorded = False

    def lead_to(self, authority: Authority) -> None:
        """All that follows is for this destination (CONNECT, SOCKS); it is denied until `decide`."""
        host, old = authority.host, self.connection
        target = Destination(authority.port)
        if isinstance(host, tuple):
            target.proved = host
        else:
            target.address = host
        self.connection = Connection(old.sandbox, old.services, "connect", target)
        self.connection.host = host
        self.tunnel = True

    def judge(self, scheme: Literal["https", "http"]) -> Decision:
        """Return the decision on the destination for a scheme; what is not to be read is not carried here."""
        connection = self.connection
        assert connection.host is not None
        attempt = ConnectionAttempt(connection.host, connection.destination.port, scheme)
        decision = internal.judge(attempt) or decide(connection.sandbox.policy, attempt, time.time())
        if decision.allowed and decision.treatment != "inspect":
            return Decision("deny", Reason.SCHEME_NOT_ALLOWED, decision.entry)
        return decision

    def judge_hello(self, arrival: Tls) -> Decision:
        """Return the decision on a hello, whose name must be the destination's (law 3)."""
        connection, hello = self.connection, arrival.hello
        connection.tls = True
        if hello.sni is not None:
            connection.sni = clip(hello.sni)
            claimed = parse_name(hello.sni)
            if isinstance(claimed, BadHost):
                return Decision("deny", claimed.reason)
            if claimed != connection.host:
                return Decision("deny", Reason.SNI_MISMATCH)
        return self.judge("https")

    def decide(self, decision: Decision, detail: str | None = None) -> None:
        """Keep the decision on the connection, and write it down once."""
        self.connection.decision = decision
        self._record(decision, detail)

    def note(self, exchange: Exchange) -> None:
        """Write down a connection that carries requests in absolute form, by the first of them."""
        self._record(exchange.decision, None, exchange)

    def _record(self, decision: Decision, detail: str | None, exchange: Exchange | None = None) -> None:
        if self._recorded:
            return
        self._recorded = True
        record = self.connection.record("decision", "connection").decided(decision)
        record.detail = detail
        if exchange is not None and exchange.bound is not None:
            record.host, record.port = format_host(exchange.bound.host), exchange.bound.port
        self.connection.services.recorder.put(record)

    def leave(self) -> None:
        """Write the ends that are owed."""
        connection = self.connection
        if self.exchange is not None:
            self.exchange.end(Reason.CLIENT_CLOSED)
        if not self._recorded:
            self.decide(Decision("deny", Reason.CLIENT_CLOSED))
        if connection.decision.allowed:
            end = connection.record("end", "connection")
            end.reason = Reason.COMPLETED.value
            end.duration_ms = round((time.monotonic() - connection.started) * 1000, 3)
            connection.services.recorder.put(end)
