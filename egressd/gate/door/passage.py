"""What an accepted connection has come to, and the ends that there are for it: carried, inspected, refused in its words."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import Literal

from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.dialer import DialFailed
from egressd.gate.door.arrival import Tls
from egressd.gate.door.entrance import CHANNELS, Entrance
from egressd.gate.door.judgement import Judgement
from egressd.gate.door.splice import Splice
from egressd.gate.door.words import (
    ALERT_ACCESS_DENIED,
    ALERT_INTERNAL_ERROR,
    ALERT_NO_APPLICATION_PROTOCOL,
    ALERT_UNRECOGNIZED_NAME,
    alert,
    answered_in,
    last_word,
)
from egressd.gate.inspector import inspect
from egressd.gate.inspector.refusal import Refused, refuse_http
from egressd.gate.inspector.upstream import Opened, OpenFailed, open_early
from egressd.gate.permission import Place
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.sandbox import Sandbox
from egressd.gate.tls.leaves import HTTP2
from egressd.gate.tls.stream import ClientRejectedCa, accept_tls
from egressd.journal.record import clip
from egressd.policy.attempt import ConnectionAttempt, Decision, Name
from egressd.policy.names import BadHost, format_host, hide_userinfo
from egressd.policy.reasons import Reason

_MISMATCHES = frozenset(
    {Reason.SNI_MISMATCH, Reason.BAD_HOST, Reason.NON_ASCII_HOST, Reason.USERINFO_IN_AUTHORITY, Reason.NO_SNI}
)
_H2 = HTTP2.encode("ascii")


class Passage:
    """One accepted connection: its socket, what is known of it, and its records, of which there is one decision."""

    def __init__(
        self,
        sock: socket.socket,
        sandbox: Sandbox,
        services: Services,
        entrance: Entrance,
        on_written: Callable[[], None],
    ) -> None:
        """Nothing is known but how it came in, and it is denied; `on_written` is called once an allow is recorded."""
        self.sock = sock
        self.entrance = entrance
        self.connection = Connection(
            sandbox, services, CHANNELS[entrance.way], Destination(port=0), source=entrance.source
        )
        self.judgement = Judgement(self.connection)
        self.recorded = False
        """Whether its decision is."""
        self.allowed = False
        self.handed_on = False
        """Somebody else closes the socket."""
        self.said = False
        """A last word was sent, which a reset would destroy."""
        self.ended = Reason.COMPLETED
        self.splice: Splice | None = None
        self.upstream: Place | None = None
        self._on_written = on_written

    def may_live(self, now: float) -> bool:
        """Say whether opaque bytes may still pass, to this address, as they pass.

        What is inspected is judged again by its engine, request by request.
        """
        connection, before = self.connection, self.connection.decision
        if not self.allowed or before.treatment == "inspect" or connection.host is None:
            return True
        scheme: Literal["https", "tcp"] = "https" if connection.tls else "tcp"
        port = connection.destination.port
        decision = self.judgement.judge(ConnectionAttempt(connection.host, port, scheme), now)
        lives = decision.allowed and decision.treatment == before.treatment
        if lives and self.upstream is not None:
            return self.judgement.permits(decision)(self.upstream) is None
        return lives

    def deny(self, reason: Reason, detail: str | None = None) -> None:
        """Record the denial; what the client is told is the caller's business."""
        self.decided(Decision("deny", reason), detail)

    def decided(self, decision: Decision, detail: str | None = None, raw: bytes = b"") -> None:
        """Record a decision, the first one."""
        self.connection.decision = decision
        if self.recorded:
            return
        self.recorded = True
        record = self.connection.record("decision", "connection").decided(decision)
        record.detail = detail
        record.host_raw = clip(hide_userinfo(raw.decode("utf-8", "backslashreplace")), 256) if raw else None
        self.connection.services.recorder.put(record)
        if decision.verdict == "ask" and decision.treatment != "inspect":
            self._mention()

    def _mention(self) -> None:
        """Put a connection that nobody would read to people; what is read is put to them request by request."""
        asking, host = self.connection.services.asking, self.connection.host
        if asking is not None and host is not None:
            scheme: Literal["https", "tcp"] = "https" if self.connection.tls else "tcp"
            port = self.connection.destination.port
            asking.mention(self.connection.sandbox.id, ConnectionAttempt(host, port, scheme))

    async def commit(self, decision: Decision, detail: str | None = None) -> None:
        """Record an allow and return once it is written; only then may a byte go upstream."""
        self.connection.decision = decision
        record = self.connection.record("decision", "connection").decided(decision)
        record.detail = detail
        await self.connection.services.recorder.commit(record)
        self.recorded = self.allowed = True
        self._on_written()  # the rules may have changed while it was written

    def end(self) -> None:
        """Record how an allowed connection ended."""
        record = self.connection.record("end", "connection")
        record.reason = self.ended.value
        record.duration_ms = round((time.monotonic() - self.connection.started) * 1000, 3)
        if self.splice is not None:
            record.bytes_up, record.bytes_down = self.splice.up, self.splice.down
        if self.upstream is not None:
            record.upstream = str(self.upstream)
        self.connection.services.recorder.put(record)

    async def carry_opaque(self, decision: Decision, data: bytes, detail: str | None = None) -> None:
        """Record an allow, dial, and carry bytes that nobody looks into until an end."""
        connection = self.connection
        host = connection.host
        assert host is not None
        await self.commit(decision, detail)
        port = connection.destination.port
        dialed = await connection.services.dialer.dial(host, port, self.judgement.permits(decision))
        if isinstance(dialed, DialFailed):
            self.ended = dialed.reason
            if connection.tls:
                await self.say(alert(ALERT_INTERNAL_ERROR))
            return
        self.upstream = dialed.address
        assert self.judgement.account is not None
        self.splice = Splice(
            self.sock,
            dialed.sock,
            connection.services.settings.idle_timeout,
            upload=self.judgement.account.upload,
            download=self.judgement.account.download,
        )
        self.handed_on = True
        self.ended = await self.splice.run(data)

    def sentence(self) -> str:
        """Return what an HTTP client would read about this refusal."""
        connection = self.connection
        # Only denied names lead to the address that explains; which one it was, nobody said.
        reason = Reason.NOT_ALLOWED if self.judgement.explained else connection.decision.reason
        port = connection.destination.port
        host = None if self.judgement.explained else connection.host
        refused = Refused(connection.attempt_id, connection.sandbox.id, host, port)
        return refuse_http(reason, refused).phrase

    async def say(self, data: bytes) -> None:
        """Send a last word."""
        self.said = await last_word(self.sock, data) or self.said

    async def inspect_tls(
        self, context: ssl.SSLContext, data: bytes, opened: Opened | OpenFailed | None = None
    ) -> None:
        """Finish TLS with a certificate of ours, and hand what is inside to the inspector."""
        loop = asyncio.get_running_loop()
        self.handed_on = True
        timeout = self.connection.services.settings.handshake_timeout
        try:
            stream = await accept_tls(loop, self.sock, context, data, timeout)
        except ClientRejectedCa:
            self.ended = Reason.CLIENT_REJECTED_CA
            return
        except (OSError, TimeoutError):
            self.ended = Reason.BAD_TLS
            return
        self.connection.alpn = stream.alpn.decode("ascii") if stream.alpn is not None else None
        await inspect(self.connection, stream, opened=opened)

    async def refuse_tls(self, decision: Decision, claimed: Name | BadHost | None, arrival: Tls) -> None:
        """Finish TLS and explain where a certificate for the claimed name can be made; else an alert."""
        if decision.reason is Reason.UNKNOWN_PROTOCOL:
            await self.say(alert(ALERT_NO_APPLICATION_PROTOCOL))
            return
        explainable = isinstance(claimed, tuple) or (
            claimed is None and self.connection.destination.proved is not None
        )
        if explainable and decision.reason not in _MISMATCHES:
            name = claimed if isinstance(claimed, tuple) else self.connection.destination.proved
            assert name is not None
            context = self.connection.services.leaves.explain_context_for(
                self.connection.sandbox.id, format_host(name), time.monotonic(), answered_in(arrival.hello)
            )
            if context is not None:
                await self.inspect_tls(context, arrival.data)
                return
        mismatch = decision.reason in _MISMATCHES
        await self.say(alert(ALERT_UNRECOGNIZED_NAME if mismatch else ALERT_ACCESS_DENIED))

    def leaf(self, alpn: str) -> ssl.SSLContext:
        """Return a TLS context with a certificate for its host."""
        assert self.connection.host is not None
        return self.connection.services.leaves.context_for(format_host(self.connection.host), alpn)

    async def mirror(
        self, decision: Decision, claimed: Name | BadHost | None, arrival: Tls, detail: str | None
    ) -> None:
        """Offer a client that speaks HTTP/2 what the server speaks, and so find that out first: the record, the dial, the client.

        Where the server cannot be reached or speaks HTTP/1 alone, the client is told so in a protocol that it has offered.
        """
        try:
            await self.commit(decision, detail)
        except AuditUnavailable:
            denied = Decision("deny", Reason.AUDIT_UNAVAILABLE, decision.entry)
            self.decided(denied, detail)
            await self.refuse_tls(denied, claimed, arrival)
            return
        opened = await open_early(self.connection, self.judgement.permits(decision))
        alpn = answered_in(arrival.hello)
        if isinstance(opened, Opened):
            if opened.stream.alpn == _H2:
                alpn = HTTP2
            elif alpn == HTTP2:
                opened.stream.close()
                opened = OpenFailed(Reason.UPSTREAM_NO_HTTP2, "the client offers HTTP/2 alone")
        try:
            await self.inspect_tls(self.leaf(alpn), arrival.data, opened)
        finally:
            if isinstance(opened, Opened):
                opened.stream.close()  # which does nothing where it was used
