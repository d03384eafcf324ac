"""The sandbox's resolver on its sockets: one message in, one judgement, one record, at most one reply.

Every message, well-formed or not, is charged to the sandbox's budget and written down; what is over the
budget is folded into counted records. A name that has its address is answered at once. A new pair is
answered only after control has stored it and the record is written. Whatever fails on the way ends in
SERVFAIL, never in an answer; a failing send or receive is counted, never fatal.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from egressd.gate import internal
from egressd.gate.dns import datagrams, gatekeeper
from egressd.gate.dns import message as wire
from egressd.gate.dns.datagrams import Datagram
from egressd.gate.dns.gatekeeper import Plan
from egressd.gate.dns.ledger import TCP, TCP_FURTHER, UDP, Ledger, Way
from egressd.gate.recorder import AuditUnavailable, Recorder
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.policy.attempt import Address, Decision, DnsQuestion, Name
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import decide
from egressd.policy.reasons import Reason

type Store = Callable[[Name, IPv4Address], Awaitable[None]]
type Reply = bytes | None

DRAIN = 64
"""Messages or connections taken per wake-up, so that one sandbox's flood does not hold the loop."""
DATAGRAM = 4096
"""Longest message read; a longer one is cut and thereby malformed."""
WAITING = 64
"""Queries of one sandbox that may wait for control at the same time; further ones get SERVFAIL."""
CONNECTIONS = 32
"""TCP connections of one sandbox to its resolver; further ones are closed at once."""
IDLE = 5.0
"""Seconds for one whole message over TCP, and for a reply to be taken."""
STORE_TIMEOUT = 5.0
"""Seconds that a new pair may take to be stored and recorded."""
LAST_TURNS = 256
"""Most drains of one socket at the end, should a sandbox not stop sending."""
ACCEPT_PAUSE = 0.5
"""Seconds without accepting after accept() failed, so that no error spins the loop."""

_NO_QUERY = "a connection without a query"


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An allowed query for a name that has no stored address yet."""

    plan: Plan
    way: Way
    message: bytes
    here: Address | None
    policy: CompiledPolicy
    """By which the plan was made."""


class DnsServer:
    """Answers DNS for one sandbox on the sockets given to it, which it owns from then on.

    `store` hands a new pair to control and returns once it is stored; any exception means that it is not.
    `own` is None where each allowed name gets an address of its own; else every name leads to egressd: to these addresses, or
    where there are none to the one that the query was sent to. `clock` is Unix time (rules expire by it), `monotonic` that of
    the budget.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        settings: Settings,
        recorder: Recorder,
        store: Store,
        *,
        own: tuple[Address, ...] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0
        """Sends, receives and accepts that failed."""
        self._sandbox = sandbox
        self._settings = settings
        self._store = store
        self._own = own
        self._clock = clock
        self._monotonic = monotonic
        self._ledger = Ledger(sandbox, recorder, monotonic)
        self._readers: dict[socket.socket, Callable[[socket.socket], bool]] = {}
        self._accepted: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._storing: dict[Name, asyncio.Task[None]] = {}
        self._waiting = 0
        self._unrecorded: set[_Pending] = set()
        self._closed = False
        self._left = False
        self._own_sockets: list[socket.socket] = []

    def serve_udp(self, sock: socket.socket) -> None:
        """Answer what arrives on a bound UDP socket; call it in the running loop."""
        sock.setblocking(False)
        if self._own is not None:
            datagrams.ask_where(sock)
        self._readers[sock] = self._receive
        self._ledger.watch(sock)
        asyncio.get_running_loop().add_reader(sock, self._receive, sock)

    def serve_tcp(self, sock: socket.socket) -> None:
        """Answer on the connections of a listening TCP socket; call it in the running loop."""
        sock.setblocking(False)
        self._readers[sock] = self._accept
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    async def leave(self) -> None:
        """Let a successor read on; returns once every name that was promised an address has it, or never will.

        No further name gets one here, so that no two of the sandbox's resolvers ever give the same.
        """
        for sock in self._readers:
            asyncio.get_running_loop().remove_reader(sock)
        self._own_sockets.extend(self._readers)  # replies that are under way still go out by them
        self._readers.clear()
        self._ledger.unwatch()
        await asyncio.sleep(0)  # what was read last begins to be stored
        self._left = True
        if self._storing:
            await asyncio.wait(self._storing.values(), timeout=STORE_TIMEOUT)

    async def close(self) -> None:
        """Stop: record what has come and is not recorded, write the last counts, close all. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for sock, take in self._readers.items():
            asyncio.get_running_loop().remove_reader(sock)
            for _ in range(LAST_TURNS):
                if not take(sock):
                    break
        tasks = [*self._tasks, *self._storing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in tuple(self._unrecorded):
            self._unanswered(pending, Reason.SHUTDOWN)
        for accepted in self._accepted:  # of tasks that were cancelled before they began
            accepted.close()
            self._ledger.count((Reason.BAD_DNS, TCP, _NO_QUERY))
        self._ledger.close()
        for sock in (*self._readers, *self._own_sockets):
            sock.close()

    # what a message comes to

    def _answer(self, message: bytes, way: Way, here: Address | None) -> Reply | _Pending:
        """Judge a message and record it: the reply, or what has to wait for control first. Never raises."""
        try:
            if not self._sandbox.budget.dns_query(self._monotonic()):
                return self._over_budget(message, way)
            plan = self._plan(message, here)
            if (over := self._over_names(plan)) is not None:
                self._ledger.count((Reason.DNS_BUDGET, way, over), lambda: plan)
                return wire.brief(message, wire.REFUSED)
            if plan.kind != "reserve":
                return self._recorded(plan, way)
            if self._left:
                self._ledger.count(
                    (Reason.SHUTDOWN, way, "a new name at a resolver that is leaving"), lambda: plan
                )
                return wire.brief(message, wire.SERVFAIL)
            if self._waiting >= WAITING:
                self._ledger.count((Reason.DNS_BUDGET, way, "too many new names at once"), lambda: plan)
                return wire.brief(message, wire.SERVFAIL)
            pending = _Pending(plan, way, message, here, self._sandbox.policy)
            self._waiting += 1
            self._unrecorded.add(pending)
            return pending
        except Exception as error:  # noqa: BLE001 law 1: whatever went wrong while judging, it is denied
            self._ledger.count((Reason.INTERNAL_ERROR, way, type(error).__name__))
            return wire.brief(message, wire.SERVFAIL)

    def _plan(self, message: bytes, here: Address | None = None) -> Plan:
        own = self._own
        if own == () and here is not None:
            own = (here,)
        return gatekeeper.plan(message, self._judge, self._sandbox.names, self._settings.dns_denied, own)

    def _over_names(self, plan: Plan) -> str | None:
        """Count a name that gets an address for the first time; return the limit of its rule that it is over, if any."""
        if (
            plan.name is None
            or plan.decision.verdict == "deny"
            or (plan.kind != "reserve" and self._own is None)
        ):
            return None
        sandbox, now, entry = self._sandbox, self._monotonic(), plan.decision.entry
        if sandbox.policy.effective.limits.names is None and (entry is None or entry.limits.names is None):
            return None
        account = sandbox.budget.account(now, sandbox.policy.effective, entry)
        over = account.name(now, plan.name)
        return over.limit if over is not None else None

    def _judge(self, name: Name) -> Decision:
        if self._sandbox.revoked:
            return Decision("deny", Reason.REVOKED)
        question = DnsQuestion(name)
        return internal.judge(question) or decide(self._sandbox.policy, question, self._clock())

    def _over_budget(self, message: bytes, way: Way) -> Reply:
        """Refuse cheaply. REFUSED reads as a temporary failure; NXDOMAIN would deny names that exist."""
        kind = (Reason.DNS_BUDGET, way, "over the queries of a minute")
        self._ledger.count(kind, lambda: self._plan(message))
        return wire.brief(message, wire.REFUSED)

    def _recorded(self, plan: Plan, way: Way) -> Reply:
        """Write the record, then give the reply: what could not be handed over is not answered."""
        record = self._ledger.record(plan, way)
        self._ledger.write(record)
        if plan.name is not None and self._own is not None:
            self._sandbox.names.note(plan.name, record.attempt_id)
        elif plan.name is not None and plan.decision.verdict != "deny":
            self._sandbox.names.touch(plan.name, record.attempt_id)
        return plan.pack(udp=way is UDP)

    async def _reserve(self, pending: _Pending) -> Reply:
        """Give an allowed name its address, have pair and record stored, then answer."""
        plan, way = pending.plan, pending.way
        assert plan.name is not None  # only a name ever gets an address
        try:
            async with asyncio.timeout(STORE_TIMEOUT):
                address = await self._stored(plan.name)
                self._unrecorded.discard(pending)
                if isinstance(address, Reason):
                    return self._recorded(plan.refused(wire.NXDOMAIN, address), way)
                if self._sandbox.policy is not pending.policy:  # by now other rules are in force
                    return self._recorded(self._plan(pending.message, pending.here), way)
                record = self._ledger.record(plan, way)
                await self._ledger.commit(record)
            self._sandbox.names.touch(plan.name, record.attempt_id)
            return plan.with_address(address).pack(udp=way is UDP)
        except (AuditUnavailable, TimeoutError) as error:
            return self._unanswered(pending, Reason.AUDIT_UNAVAILABLE, error)
        except Exception as error:  # noqa: BLE001 law 1: a broken store answers nothing
            return self._unanswered(pending, Reason.INTERNAL_ERROR, error)
        finally:
            self._waiting -= 1

    def _unanswered(self, pending: _Pending, reason: Reason, error: Exception | None = None) -> Reply:
        self._unrecorded.discard(pending)
        refused = pending.plan.refused(wire.SERVFAIL, reason)
        record = self._ledger.record(refused, pending.way)
        if error is not None:
            record.detail = f"{refused.outcome}: {type(error).__name__}"
        self._ledger.note(record)
        return refused.pack(udp=pending.way is UDP)

    async def _stored(self, name: Name) -> IPv4Address | Reason:
        """Return the name's address once control has it; queries for one name share one request."""
        if self._left and self._sandbox.names.address_of(name) is None and name not in self._storing:
            raise RuntimeError("a new name at a resolver that is leaving")
        address = self._sandbox.names.reserve(name)
        if isinstance(address, Reason) or self._sandbox.names.address_of(name) is not None:
            return address
        task = self._storing.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._store_pair(name, address))
            self._storing[name] = task
            task.add_done_callback(lambda done: self._forget(name, done))
        await asyncio.shield(task)
        return address

    async def _store_pair(self, name: Name, address: IPv4Address) -> None:
        async with asyncio.timeout(STORE_TIMEOUT):  # its own: who asked first may be gone before
            await self._store(name, address)
        self._sandbox.names.confirm(name)

    def _forget(self, name: Name, task: asyncio.Task[None]) -> None:
        del self._storing[name]
        if not task.cancelled():
            task.exception()  # seen by who still waits; nobody has to

    # UDP

    def _receive(self, sock: socket.socket) -> bool:
        """Take what has come; returns whether there may be more."""
        for _ in range(DRAIN):
            try:
                datagram = datagrams.receive(sock, DATAGRAM)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:  # an ICMP error for an earlier reply
                self.failures += 1
                continue
            self.take(sock, datagram)
        self._ledger.arm()  # a full drain is what a flood looks like: see then what the kernel dropped
        return True

    def take(self, sock: socket.socket, datagram: Datagram) -> None:
        """Answer one message that came to `sock`, which need not be this server's own. Never raises."""
        here = datagram.here
        if here is None and self._own is not None:
            here = datagrams.local(sock)
        reply = self._answer(datagram.message, UDP, here)
        if isinstance(reply, _Pending):
            self._spawn(self._send_later(sock, reply, datagram))
        elif reply is not None:
            self._send(sock, reply, datagram)

    async def _send_later(self, sock: socket.socket, pending: _Pending, datagram: Datagram) -> None:
        reply = await self._reserve(pending)
        if reply is not None and not self._closed:
            self._send(sock, reply, datagram)

    def _send(self, sock: socket.socket, reply: bytes, datagram: Datagram) -> None:
        try:
            datagrams.reply(sock, reply, datagram)
        except OSError:  # a full buffer, a closed port, an ICMP error: the client asks again
            self.failures += 1

    # TCP

    def _accept(self, listener: socket.socket) -> bool:
        """Take the connections that wait; returns whether there may be more."""
        for _ in range(DRAIN):
            try:
                sock, _peer = listener.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:  # out of descriptors: wait for some to come back
                self.failures += 1
                self._pause(listener)
                return False
            self.carry(sock)
        return True

    def carry(self, sock: socket.socket) -> None:
        """Serve an accepted connection, from whichever listener."""
        if len(self._accepted) >= CONNECTIONS:
            sock.close()
            self._ledger.count((Reason.TOO_MANY_CONNECTIONS, TCP, "too many to the resolver"))
            return
        sock.setblocking(False)
        self._accepted.add(sock)
        self._spawn(self._carry(sock))

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)

        def resume() -> None:
            if not self._closed and not self._left:
                loop.add_reader(listener, self._accept, listener)

        loop.call_later(ACCEPT_PAUSE, resume)

    async def _carry(self, sock: socket.socket) -> None:
        """Serve one connection: message after message in order, each under its deadline (RFC 7766)."""
        writer = None
        way, problem = TCP, ""
        try:
            here = datagrams.local(sock)
            reader, writer = await asyncio.open_connection(sock=sock, limit=2 * DATAGRAM)
            # drain() then waits until the kernel has everything, so that the end loses nothing that was answered.
            writer.transport.set_write_buffer_limits(high=0)
            while isinstance(message := await self._next_message(reader), bytes):
                asked, way = way, TCP_FURTHER
                reply = self._answer(message, asked, here)
                if isinstance(reply, _Pending):
                    reply = await self._reserve(reply)
                if reply is None:
                    return
                writer.write(len(reply).to_bytes(2) + reply)
                async with asyncio.timeout(IDLE):
                    await writer.drain()
            problem = message
        except OSError:  # the client went away, or does not read (TimeoutError)
            self.failures += 1
        finally:
            if way is TCP:
                problem = problem or _NO_QUERY
            if problem:
                self._ledger.count((Reason.BAD_DNS, way, problem))
            self._accepted.discard(sock)
            if writer is None:
                sock.close()
            else:
                writer.transport.abort()  # close() would wait for ever for a client that does not read

    async def _next_message(self, reader: asyncio.StreamReader) -> bytes | str:
        """Return the next message; where there is none, what was wrong: nothing if the connection ended between two."""
        begun = False
        try:
            async with asyncio.timeout(IDLE):
                head = await reader.readexactly(2)
                begun = True
                length = int.from_bytes(head)
                if 0 < length <= DATAGRAM:
                    return await reader.readexactly(length)
            return "a message length that no query has"
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            begun = begun or bool(getattr(error, "partial", b""))
            return "cut off in a message" if begun else ""
        except TimeoutError:
            return "no whole message in time" if begun else ""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
