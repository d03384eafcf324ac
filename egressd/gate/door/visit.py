"""One accepted connection from its first byte to its end: learn the destination, judge, then hand on or refuse.

Every visit leaves exactly one `decision` record (layer connection), and an `end` record if it was allowed. It is denied
until the policy says otherwise; an exception anywhere ends it as `internal_error`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import sys
import time
import traceback
from ipaddress import IPv4Address, ip_address
from typing import Literal

from egressd.gate import internal
from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.dialer import DialFailed
from egressd.gate.dns.gatekeeper import EXPLAIN
from egressd.gate.dns.synthetic import RANGE
from egressd.gate.door import socks
from egressd.gate.door.arrival import Http, Tls, Unreadable, first_bytes, original_destination
from egressd.gate.door.connect import Absolute, BadHead
from egressd.gate.door.entrance import (
    CHANNELS,
    TRANSPARENT,
    Entrance,
    Listening,
    any_method,
    claimed_host,
    greet,
    proxy_head,
    socks_request,
    source_of,
)
from egressd.gate.door.hops import BadHop, bare
from egressd.gate.door.judgement import Judgement
from egressd.gate.door.socks import BadSocks
from egressd.gate.door.splice import Splice, reset_on_close
from egressd.gate.door.ssh import refuse_ssh, speaks_ssh
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
from egressd.gate.tls.stream import ClientRejectedCa, accept_plain, accept_tls
from egressd.journal.record import clip
from egressd.policy.attempt import Address, ConnectionAttempt, Decision, Name
from egressd.policy.names import Authority, BadHost, format_host, hide_userinfo, parse_name
from egressd.policy.reasons import Reason

_EXPLAINABLE = frozenset({80, 443})
"""Ports where a client is told of a denial in HTTP, after its proxy protocol has said yes."""
_EXPLAIN_WAIT = 2.0
"""Seconds that a connection to a destination that is denied whatever it says may take to say something we can answer in."""
_ACCEPT_FIELD = re.compile(rb"\r?\n[Aa][Cc][Cc][Ee][Pp][Tt]:[ \t]*([^\r\n]{0,1024})")
_MISMATCHES = frozenset(
    {Reason.SNI_MISMATCH, Reason.BAD_HOST, Reason.NON_ASCII_HOST, Reason.USERINFO_IN_AUTHORITY, Reason.NO_SNI}
)
_H2 = HTTP2.encode("ascii")


class Visit:
    """The life of one accepted socket; `run` owns it."""

    def __init__(
        self, sock: socket.socket, sandbox: Sandbox, services: Services, entrance: Entrance = TRANSPARENT
    ) -> None:
        """Nothing is known of the connection but how it came in, and it is denied."""
        self.sock = sock
        self.entrance = entrance
        self.connection = Connection(
            sandbox,
            services,
            CHANNELS[entrance.way],
            Destination(port=0),
            source=entrance.source,
        )
        self._judgement = Judgement(self.connection)
        self._recorded = False
        self._allowed = False
        self._handed_on = False  # somebody else closes the socket
        self._said = False  # a last word was sent, which a reset would destroy
        self._cut: Reason | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = Reason.COMPLETED
        self._splice: Splice | None = None
        self._upstream: Place | None = None

    def cut(self, reason: Reason) -> None:
        """End the visit at once, whatever it is doing."""
        self._cut = self._cut or reason
        if self._task is not None:
            self._task.cancel()

    def retire(self) -> None:
        """Go on: a connection is one thing, and who inspects its requests retires for itself."""

    def rejudge(self, now: float) -> None:
        """Cut opaque bytes that the rules no longer let pass, or no longer to this address, or not as they pass.

        What is inspected is judged again by its engine, request by request.
        """
        connection, before = self.connection, self.connection.decision
        if not self._allowed or before.treatment == "inspect" or connection.host is None:
            return
        scheme: Literal["https", "tcp"] = "https" if connection.tls else "tcp"
        port = connection.destination.port
        decision = self._judgement.judge(ConnectionAttempt(connection.host, port, scheme), now)
        lives = decision.allowed and decision.treatment == before.treatment
        if lives and self._upstream is not None:
            lives = self._judgement.permits(decision)(self._upstream) is None
        if not lives:
            self.cut(Reason.POLICY_CHANGED)

    async def run(self) -> None:
        """Carry the connection to its end; never raises but for a cancellation that is not a cut."""
        sandbox = self.connection.sandbox
        self._task = asyncio.current_task()
        sandbox.live.add(self)
        over = sandbox.budget.connection(time.monotonic())
        admitted = over is None
        try:
            if sandbox.revoked:
                self._deny(Reason.REVOKED)
            elif over is not None:
                self._deny(over.reason, over.limit)
            else:
                await self._enter()
        except asyncio.CancelledError:
            self._ended = self._cut or Reason.SHUTDOWN
            if self._cut is None:
                raise
        except AuditUnavailable:
            self._ended = Reason.AUDIT_UNAVAILABLE
            self._deny(Reason.AUDIT_UNAVAILABLE)
        except Exception:  # noqa: BLE001 -- law 1: denied, recorded, and the operator is told
            self._ended = Reason.INTERNAL_ERROR
            traceback.print_exc(limit=8, file=sys.stderr)
        finally:
            self._close(admitted)

    def _close(self, admitted: bool) -> None:
        sandbox = self.connection.sandbox
        sandbox.live.discard(self)
        if admitted:
            sandbox.budget.release()
        sandbox.budget.leave(self.connection.attempt_id)
        if not self._recorded:
            self._deny(self._ended if self._ended is not Reason.COMPLETED else Reason.INTERNAL_ERROR)
        if self._allowed:
            self._end()
        if not self._handed_on:
            if not self._said:
                reset_on_close(self.sock)
            self.sock.close()

    # records

    def _deny(self, reason: Reason, detail: str | None = None) -> None:
        """Record the denial; what the client is told is the caller's business."""
        self._decided(Decision("deny", reason), detail)

    def _decided(self, decision: Decision, detail: str | None = None, raw: bytes = b"") -> None:
        self.connection.decision = decision
        if self._recorded:
            return
        self._recorded = True
        record = self.connection.record("decision", "connection").decided(decision)
        record.detail = detail
        record.host_raw = clip(hide_userinfo(raw.decode("utf-8", "backslashreplace")), 256) if raw else None
        self.connection.services.recorder.put(record)

    async def _commit(self, decision: Decision, detail: str | None = None) -> None:
        """Record an allow and return once it is written; only then may a byte go upstream."""
        self.connection.decision = decision
        record = self.connection.record("decision", "connection").decided(decision)
        record.detail = detail
        await self.connection.services.recorder.commit(record)
        self._recorded = self._allowed = True
        self.rejudge(time.time())  # the rules may have changed while it was written

    def _end(self) -> None:
        record = self.connection.record("end", "connection")
        record.reason = self._ended.value
        record.duration_ms = round((time.monotonic() - self.connection.started) * 1000, 3)
        if self._splice is not None:
            record.bytes_up, record.bytes_down = self._splice.up, self._splice.down
        if self._upstream is not None:
            record.upstream = str(self._upstream)
        self.connection.services.recorder.put(record)

    # the destination

    async def _enter(self) -> None:
        if self.entrance.hops:
            settings = self.connection.services.settings
            source = await source_of(self.sock, self.entrance.hops, settings.first_bytes_timeout)
            if isinstance(source, BadHop):
                self._deny(Reason.BAD_HOP, source.detail)
                return
            self.connection.source = source
        match self.entrance.way:
            case "transparent":
                await self._transparent()
            case "explicit":
                await self._explicit()
            case "socks":
                await self._socks()
            case "direct":
                await self._direct()

    async def _transparent(self) -> None:
        destination = original_destination(self.sock)
        if destination is None:
            self._deny(Reason.NO_ORIGINAL_DST)
            return
        address, port = destination
        self.connection.destination = target = Destination(port=port, address=address)
        if isinstance(address, IPv4Address) and address in RANGE:
            names = self.connection.sandbox.names
            target.proved = names.name_of(address) if address != internal.ADDRESS else internal.NAME
            self._judgement.explained = address == EXPLAIN
            if target.proved is None and not self._judgement.explained:
                self._deny(Reason.SYNTHETIC_UNMAPPED)
                return
            if target.proved is not None:
                self.connection.root_id = names.root_of(target.proved) or self.connection.root_id
        await self._learn(b"")

    async def _direct(self) -> None:
        """A connection to egressd's own address: the port says how it is meant, and the client alone for which name."""
        self.connection.destination = Destination(port=self.entrance.port)
        await self._learn(self.entrance.data)

    async def _explicit(self) -> None:
        settings = self.connection.services.settings
        listening = Listening(self.sock, self.entrance.data, settings.head_timeout, settings.head_bytes)
        head = await proxy_head(listening)
        if isinstance(head, BadHead):
            await self._refuse_head(head, listening.data)
            return
        self._lead_to(head.authority, tunnel=not isinstance(head, Absolute))
        if isinstance(head, Absolute):
            self.connection.channel = "absolute"
            await self._http(Http(listening.data))
            return
        await asyncio.get_running_loop().sock_sendall(
            self.sock, b"HTTP/1.1 200 Connection established\r\n\r\n"
        )
        await self._learn(listening.data[head.size :])

    async def _socks(self) -> None:
        settings = self.connection.services.settings
        listening = Listening(self.sock, self.entrance.data, settings.head_timeout, settings.head_bytes)
        if not self.entrance.greeted:
            login = await greet(listening, any_method)
            if isinstance(login, BadSocks):
                await self._refuse_socks(login)
                return
            if login is not None:  # who it is, the listener has said
                await listening.say(socks.judge_login(ok=True))
        request = await socks_request(listening)
        if isinstance(request, BadSocks):
            await self._refuse_socks(request)
            return
        self._lead_to(request.authority, tunnel=True)
        target = self.connection.destination
        if target.port not in _EXPLAINABLE and not self._judgement.any_way():
            # Nothing that speaks there could be told in its own protocol; SOCKS can.
            self.connection.host = request.authority.host
            refused = self._judgement.judge(ConnectionAttempt(request.authority.host, target.port, "tcp"))
            self._decided(refused)
            await self._say(socks.reply(socks.NOT_ALLOWED))
            return
        await asyncio.get_running_loop().sock_sendall(self.sock, socks.reply(socks.SUCCEEDED))
        await self._learn(listening.data)

    def _lead_to(self, authority: Authority, *, tunnel: bool) -> None:
        self.connection.destination = target = Destination(port=authority.port)
        if isinstance(authority.host, tuple):
            target.proved = authority.host
        elif not (tunnel and self._is_ours(authority)):
            target.address = authority.host

    def _is_ours(self, authority: Authority) -> bool:
        """Whether a proxy's client was led here by a name that it asked for itself; for which one, only the client can say."""
        own = self.connection.sandbox.own
        if own is None or authority.port not in _EXPLAINABLE:
            return False
        return authority.host in (own or (bare(ip_address(self.sock.getsockname()[0])),))

    async def _refuse_socks(self, refused: BadSocks) -> None:
        self._decided(Decision("deny", refused.reason), refused.detail, refused.authority)
        if refused.reply:
            await self._say(refused.reply)

    async def _refuse_head(self, head: BadHead, data: bytes) -> None:
        self._decided(Decision("deny", head.reason), head.detail, head.authority)
        if head.reason is Reason.CLIENT_CLOSED:
            return
        accept = _ACCEPT_FIELD.search(data)
        refused = Refused(
            self.connection.attempt_id,
            self.connection.sandbox.id,
            accept=accept.group(1).decode("latin-1") if accept else None,
            hint=head.hint,
        )
        await self._say(refuse_http(head.reason, refused).to_http1())

    # the first bytes

    async def _learn(self, data: bytes) -> None:
        settings = self.connection.services.settings
        target = self.connection.destination
        host = target.proved or target.address
        timeout = settings.first_bytes_timeout
        if self._judgement.explained:
            # Who waits for a server to speak first must learn of it too.
            timeout = min(timeout, _EXPLAIN_WAIT)
        elif host is not None:
            raw = self._judgement.judge(ConnectionAttempt(host, target.port, "tcp"))
            if raw.allowed and raw.treatment == "relay":
                self.connection.host = host
                raw, limit = self._judgement.within_limits(raw, len(data))
                if raw.allowed:
                    await self._carry_opaque(raw, data)
                else:
                    self._decided(raw, limit)
                return
            if not self._judgement.any_scheme(host, target.port):
                timeout = min(timeout, _EXPLAIN_WAIT)
        arrival = await first_bytes(self.sock, data, timeout)
        if isinstance(arrival, Tls):
            await self._tls(arrival)
        elif isinstance(arrival, Http):
            await self._http(arrival)
        else:
            self._unreadable(arrival, host)
            if speaks_ssh(arrival.data):
                await self._say(refuse_ssh(self._sentence()))

    def _unreadable(self, arrival: Unreadable, host: Name | Address | None) -> None:
        self.connection.host = host
        decision = Decision("deny", arrival.reason)
        if host is not None and not self._judgement.explained:
            rules = self._judgement.judge(ConnectionAttempt(host, self.connection.destination.port, "tcp"))
            if not rules.allowed and not self._judgement.any_scheme(host, self.connection.destination.port):
                decision = rules  # it was denied whatever it would have said
        self._decided(decision, arrival.detail)

    async def _http(self, arrival: Http) -> None:
        target = self.connection.destination
        host: Name | Address | BadHost | None = target.proved or target.address
        data = arrival.data
        if host is None or self._judgement.explained:
            settings = self.connection.services.settings
            seconds = _EXPLAIN_WAIT if self._judgement.explained else settings.head_timeout
            listening = Listening(self.sock, data, seconds, settings.head_bytes)
            host = await claimed_host(listening)
            data = listening.data
        if isinstance(host, BadHost):
            decision = Decision("deny", Reason.NOT_ALLOWED if self._judgement.explained else host.reason)
        else:
            self.connection.host = host
            self._join(host)
            decision = self._judgement.refine(
                self._judgement.judge(ConnectionAttempt(host, target.port, "http"))
            )
        if decision.allowed and decision.treatment != "inspect":
            decision = Decision("deny", Reason.SCHEME_NOT_ALLOWED, decision.entry)
        decision, limit = self._judgement.within_limits(decision)
        self._decided(decision, limit)
        self._allowed = decision.allowed
        loop = asyncio.get_running_loop()
        self._handed_on = True
        stream = await accept_plain(loop, self.sock, b"")
        await inspect(self.connection, stream, data)

    def _join(self, host: Name | Address | None) -> None:
        """Join the story of the query that led a client to our own address by this name."""
        connection = self.connection
        if self._judgement.nameless and connection.sandbox.own is not None and isinstance(host, tuple):
            connection.root_id = connection.sandbox.names.root_of(host) or connection.root_id

    # TLS

    async def _tls(self, arrival: Tls) -> None:
        connection, hello = self.connection, arrival.hello
        connection.tls = True
        detail = "ech" if hello.ech else None
        claimed: Name | BadHost | None = None
        if hello.sni is not None:
            connection.sni = clip(hello.sni)
            claimed = parse_name(hello.sni)
        self._join(claimed if isinstance(claimed, tuple) else None)
        decision, limit = self._judgement.within_limits(
            self._judgement.judge_hello(claimed, hello), len(arrival.data)
        )
        if not decision.allowed:
            self._decided(decision, limit or detail)
            await self._refuse_tls(decision, claimed, arrival)
        elif decision.treatment != "inspect":
            await self._carry_opaque(decision, arrival.data, detail)
        elif _H2 in hello.alpn and decision.reason is not Reason.INTERNAL_PAGE:
            await self._mirror(decision, claimed, arrival, detail)
        else:
            context = self._leaf(answered_in(hello))
            self._decided(decision, detail)
            self._allowed = True
            await self._inspect_tls(context, arrival.data)

    def _leaf(self, alpn: str) -> ssl.SSLContext:
        assert self.connection.host is not None
        return self.connection.services.leaves.context_for(format_host(self.connection.host), alpn)

    async def _mirror(
        self, decision: Decision, claimed: Name | BadHost | None, arrival: Tls, detail: str | None
    ) -> None:
        """Offer a client that speaks HTTP/2 what the server speaks, and so find that out first: the record, the dial, the client.

        Where the server cannot be reached or speaks HTTP/1 alone, the client is told so in a protocol that it has offered.
        """
        try:
            await self._commit(decision, detail)
        except AuditUnavailable:
            denied = Decision("deny", Reason.AUDIT_UNAVAILABLE, decision.entry)
            self._decided(denied, detail)
            await self._refuse_tls(denied, claimed, arrival)
            return
        opened = await open_early(self.connection, self._judgement.permits(decision))
        alpn = answered_in(arrival.hello)
        if isinstance(opened, Opened):
            if opened.stream.alpn == _H2:
                alpn = HTTP2
            elif alpn == HTTP2:
                opened.stream.close()
                opened = OpenFailed(Reason.UPSTREAM_NO_HTTP2, "the client offers HTTP/2 alone")
        try:
            await self._inspect_tls(self._leaf(alpn), arrival.data, opened)
        finally:
            if isinstance(opened, Opened):
                opened.stream.close()  # which does nothing where it was used

    async def _refuse_tls(self, decision: Decision, claimed: Name | BadHost | None, arrival: Tls) -> None:
        """Finish TLS and explain where a certificate for the claimed name can be made; else an alert."""
        if decision.reason is Reason.UNKNOWN_PROTOCOL:
            await self._say(alert(ALERT_NO_APPLICATION_PROTOCOL))
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
                await self._inspect_tls(context, arrival.data)
                return
        mismatch = decision.reason in _MISMATCHES
        await self._say(alert(ALERT_UNRECOGNIZED_NAME if mismatch else ALERT_ACCESS_DENIED))

    async def _inspect_tls(
        self, context: ssl.SSLContext, data: bytes, opened: Opened | OpenFailed | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._handed_on = True
        timeout = self.connection.services.settings.handshake_timeout
        try:
            stream = await accept_tls(loop, self.sock, context, data, timeout)
        except ClientRejectedCa:
            self._ended = Reason.CLIENT_REJECTED_CA
            return
        except (OSError, TimeoutError):
            self._ended = Reason.BAD_TLS
            return
        self.connection.alpn = stream.alpn.decode("ascii") if stream.alpn is not None else None
        await inspect(self.connection, stream, opened=opened)

    # opaque bytes

    async def _carry_opaque(self, decision: Decision, data: bytes, detail: str | None = None) -> None:
        connection = self.connection
        host = connection.host
        assert host is not None
        await self._commit(decision, detail)
        port = connection.destination.port
        dialed = await connection.services.dialer.dial(host, port, self._judgement.permits(decision))
        if isinstance(dialed, DialFailed):
            self._ended = dialed.reason
            if connection.tls:
                await self._say(alert(ALERT_INTERNAL_ERROR))
            return
        self._upstream = dialed.address
        assert self._judgement.account is not None
        self._splice = Splice(
            self.sock,
            dialed.sock,
            connection.services.settings.idle_timeout,
            upload=self._judgement.account.upload,
            download=self._judgement.account.download,
        )
        self._handed_on = True
        self._ended = await self._splice.run(data)

    def _sentence(self) -> str:
        """Return what an HTTP client would read about this refusal."""
        connection = self.connection
        # Only denied names lead to the address that explains; which one it was, nobody said.
        reason = Reason.NOT_ALLOWED if self._judgement.explained else connection.decision.reason
        port = connection.destination.port
        host = None if self._judgement.explained else connection.host
        refused = Refused(connection.attempt_id, connection.sandbox.id, host, port)
        return refuse_http(reason, refused).phrase

    async def _say(self, data: bytes) -> None:
        self._said = await last_word(self.sock, data) or self._said
