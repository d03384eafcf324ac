"""What a connection's destination and first bytes come to: law 3 and the policy, asked for one connection. No I/O.

The names that must agree here are the one that the destination proves and the one that the hello claims; what requests claim is
judged by the inspector.
"""

from __future__ import annotations

import time

from egressd.gate import internal
from egressd.gate.account import Account
from egressd.gate.connection import Connection
from egressd.gate.permission import Permission
from egressd.gate.tls.hello import ClientHello
from egressd.gate.tls.leaves import HTTP1, HTTP2
from egressd.policy.attempt import Address, ConnectionAttempt, Decision, Name
from egressd.policy.decide import decide
from egressd.policy.names import BadHost
from egressd.policy.reasons import Reason

_HTTP = frozenset({HTTP2.encode("ascii"), HTTP1.encode("ascii"), b"http/1.0"})


class Judgement:
    """The policy of one connection's sandbox, asked about that connection.

    `explained` says that the destination is the address that denied names lead to, so that only the claimed name is known.
    """

    def __init__(self, connection: Connection) -> None:
        """Nothing is known of the destination yet."""
        self.connection = connection
        self.explained = False
        self.account: Account | None = None

    @property
    def nameless(self) -> bool:
        """Whether the destination stands for no host of its own: an address of ours, where many names lead."""
        target = self.connection.destination
        return self.explained or (target.proved is None and target.address is None)

    def judge(self, attempt: ConnectionAttempt, now: float | None = None) -> Decision:
        """Return what the policy of this moment says of an attempt; `now` in Unix seconds, the present by default."""
        moment = time.time() if now is None else now
        return internal.judge(attempt) or decide(self.connection.sandbox.policy, attempt, moment)

    def any_scheme(self, host: Name | Address, port: int) -> bool:
        """Say whether anything that TLS or HTTP could bring might be allowed there."""
        return any(self.judge(ConnectionAttempt(host, port, scheme)).allowed for scheme in ("https", "http"))

    def any_way(self) -> bool:
        """Say whether anything at all might be allowed at the destination."""
        target = self.connection.destination
        host = target.proved or target.address
        if host is None:
            return False
        raw = self.judge(ConnectionAttempt(host, target.port, "tcp")).allowed
        return raw or self.any_scheme(host, target.port)

    def refine(self, decision: Decision) -> Decision:
        """A name at the explaining address was denied when it was looked up.

        If it is allowed by now, it must be looked up again.
        """
        if self.explained and decision.allowed:
            return Decision("deny", Reason.SYNTHETIC_UNMAPPED)
        return decision

    def judge_hello(self, claimed: Name | BadHost | None, hello: ClientHello) -> Decision:
        """Judge the hello; what will be inspected must offer some HTTP, if it offers anything."""
        decision = self._agree(claimed)
        if (
            decision.allowed
            and decision.treatment == "inspect"
            and hello.alpn
            and _HTTP.isdisjoint(hello.alpn)
        ):
            return Decision("deny", Reason.UNKNOWN_PROTOCOL, decision.entry)
        return decision

    def _agree(self, claimed: Name | BadHost | None) -> Decision:
        """Judge the hello against the destination (law 3) and set the connection's host."""
        connection = self.connection
        target = connection.destination
        if isinstance(claimed, BadHost):
            connection.host = target.proved or target.address if not self.nameless else None
            return Decision("deny", claimed.reason)
        if target.proved is not None:
            connection.host = target.proved
            if claimed is not None and claimed != target.proved:
                return Decision("deny", Reason.SNI_MISMATCH)
        elif self.nameless:
            if claimed is None:
                return Decision("deny", Reason.NO_SNI)
            connection.host = claimed
        else:
            return self._judge_literal(claimed)
        return self.refine(self.judge(ConnectionAttempt(connection.host, target.port, "https")))

    def _judge_literal(self, claimed: Name | None) -> Decision:
        """A bare address: an entry for the address, or one for the claimed name whose `addresses` cover it."""
        connection = self.connection
        address, port = connection.destination.address, connection.destination.port
        assert address is not None
        connection.host = address
        decision = self.judge(ConnectionAttempt(address, port, "https"))
        if decision.allowed or claimed is None or decision.reason is not Reason.IP_LITERAL:
            if decision.allowed and decision.treatment == "inspect" and claimed is not None:
                return Decision("deny", Reason.SNI_MISMATCH, decision.entry)
            return decision
        named = self.judge(ConnectionAttempt(claimed, port, "https"))
        covered = named.allowed and named.entry is not None and named.entry.addresses
        if covered and self.permits(named)(address) is None:
            connection.host = claimed
            return named
        return decision

    def permits(self, decision: Decision) -> Permission:
        """Return what says of each resolved address why it may not be dialled for this decision, if it may not."""
        return Permission(self.connection.sandbox.policy, decision, self.connection.destination.port)

    def within_limits(self, decision: Decision, size: int = 0) -> tuple[Decision, str | None]:
        """Count an allowed connection against the limits of its rule and its profile; over one it is denied, and which.

        One that is not read counts as one request, whose `size` bytes go up first; of one that is, each request will count.
        """
        connection, sandbox = self.connection, self.connection.sandbox
        if not decision.allowed or decision.reason is Reason.INTERNAL_PAGE or connection.host is None:
            return decision, None
        now = time.monotonic()
        self.account = account = sandbox.budget.account(
            now, sandbox.policy.effective, decision.entry, connection.host
        )
        if decision.treatment == "inspect":
            over = account.connect(now, connection.attempt_id)
        else:
            over = account.request(now, connection.attempt_id, connection.host, size)
        if over is None:
            return decision, None
        connection.retry_after = over.retry_after
        return Decision("deny", over.reason, decision.entry, decision.treatment), over.limit
