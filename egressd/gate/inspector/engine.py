"""The engine: feeds one connection's bytes to mitmproxy's HTTP layer and carries out what the layer commands.

The layers do no I/O; this is where it happens, and where everything fails closed. Two rules hold it together:

* Nothing is written upstream unless the current exchange is admitted, which the addon does last of all.
* Whatever is refused or breaks ends the connection: the client gets one answer that says why (if the response
  had not begun), the layer is never resumed, so no state of it can carry a denied request on.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from mitmproxy.connection import ConnectionState
from mitmproxy.connection import Server as ServerConnection
from mitmproxy.proxy import commands, events

from egressd.gate.connection import Connection
from egressd.gate.inspector import outcomes
from egressd.gate.inspector.addon import HOOK_TIMEOUT, PolicyAddon, exchange_of
from egressd.gate.inspector.conduit import Conduit
from egressd.gate.inspector.deadlines import Deadlines
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.layers import InspectorLayer, client_of, context_of
from egressd.gate.inspector.pace import Pace, Starved
from egressd.gate.inspector.pipe import PipeLayer, upgrade
from egressd.gate.inspector.upstream import Opened, OpenFailed, leads_to, open_upstream, reason_of
from egressd.gate.inspector.veil import TURN
from egressd.gate.tls.stream import ByteStream
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason

READ_AHEAD: Final = 64 * 1024
"""Bytes of later, pipelined requests that are kept while one is being answered, beyond one head."""


HALF_CLOSED_IDLE: Final = 60.0
"""Seconds without bytes after which a client that has ended its side counts as gone: nothing else tells the two apart."""


class _Phase(enum.Enum):
    OPEN = enum.auto()
    LEAVING = enum.auto()
    """The last word is on its way to the client."""
    OVER = enum.auto()


class Engine:
    """One connection of a sandbox under inspection; owner of its stream and of at most one upstream stream."""

    def __init__(
        self, connection: Connection, stream: ByteStream, opened: Opened | OpenFailed | None = None
    ) -> None:
        """Nothing is read before `run`. `opened` is the upstream of the first request, if one was dialled early."""
        self.connection = connection
        self._opened = opened
        self.addon = PolicyAddon(connection)
        self._pace = Pace(self._go_on)
        self._conduit = Conduit(stream, self, self._pace)
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._client = client_of(connection, stream)
        self._server: ServerConnection | None = None
        self._layer: InspectorLayer | PipeLayer = InspectorLayer(
            context_of(connection, self._client), connection.services.settings.head_bytes
        )
        self._phase = _Phase.OPEN
        self._queue: deque[events.Event] = deque()
        self._busy = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._exchange: Exchange | None = None
        self._early = False  # the response is complete, its request is not
        self._deadlines = Deadlines(connection.services.settings, lambda: self._guard(self._overdue))
        self._steps: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.SendData: self._send,
            commands.OpenConnection: self._open,
            commands.CloseConnection: self._close,
            commands.CloseTcpConnection: self._close,
            commands.Log: self._log,
            outcomes.Answered: self._answered,
            outcomes.ClientLeft: self._client_left,
            outcomes.HalfClosed: lambda _: self._deadlines.await_bytes(HALF_CLOSED_IDLE),
            outcomes.Upgraded: self._upgraded,
            outcomes.Ended: self._ended,
            outcomes.Failed: lambda failed: self._failed(failed.reason, failed.detail),
            outcomes.Interim: self._interim,
            outcomes.Rejected: lambda rejected: self._unread(
                rejected.head.reason, rejected.head.detail, rejected.head.method, rejected.head.target
            ),
        }

    async def run(self, first: bytes = b"") -> None:
        """Carry the connection to its end; `first` was read from it before. Cancelling it cuts the connection."""
        live = self.connection.sandbox.live
        live.add(self)
        try:
            if self.connection.sandbox.retiring:
                self.retire()
            self._conduit.open()  # which tells nothing before this returns to the loop
            self._deadlines.await_head()
            self._feed(events.Start())
            if first:
                self._feed(events.DataReceived(self._client, first))
            await self._over
        except asyncio.CancelledError:
            self.cut(Reason.SHUTDOWN)
            raise
        finally:
            self.cut(Reason.INTERNAL_ERROR)
            live.discard(self)

    def cut(self, reason: Reason) -> None:
        """End both sides at once; an open exchange gets its `end` record with `reason`. Nothing is done twice."""
        if self._phase is _Phase.OVER:
            return
        if self._exchange is not None:
            self._exchange.up -= self._conduit.withhold()
            self._exchange.end(reason)
        self._conduit.abort(self._layer.sandbox_side.last_word(reason))
        self._finish()

    def retire(self) -> None:
        """Answer the request that is open or comes next, say that the connection closes behind it, and close it."""
        self._layer.sandbox_side.retiring = True

    def rejudge(self, now: float) -> None:
        """End the exchange that the rules no longer allow: by an answer if none has begun, else by cutting it short.

        Between exchanges there is nothing to judge: the next request is judged by the rules of its own time.
        """
        if self._is_open() and self._exchange is not None and not self._exchange.may_live(now):
            self._guard(lambda: self._failed(Reason.POLICY_CHANGED, "judged again"))

    # what the streams tell (StreamOwner)

    def on_ready(self, stream: ByteStream) -> None:
        """Both streams are ready before they get here."""

    def on_data(self, stream: ByteStream, data: bytes) -> None:
        """Feed what arrived."""
        if not self._is_open():
            return
        self._deadlines.moved()
        if stream is self._conduit.client:
            if self._tasks:
                self._conduit.hold()  # a decision or a dial is pending: what comes now would only pile up
            self._feed(events.DataReceived(self._client, data))
        elif self._conduit.is_upstream(stream) and self._server is not None:
            self._from_upstream(data)

    def _from_upstream(self, data: bytes) -> None:
        """Feed what the limits let pass."""
        data = self._pace.downward(data)
        if self._exchange is not None and self._exchange.veil is not None:
            self._sip(data)
            return
        if self._exchange is not None:
            self._exchange.down += len(data)
        self._feed(events.DataReceived(self._server, data) if data and self._server is not None else None)

    def _sip(self, data: bytes) -> None:
        """Feed by small pieces what may be coded, and keep what the client cannot take what it stands for of."""
        at, veil = 0, self._exchange.veil if self._exchange is not None else None
        enough = veil.undone + TURN if veil is not None else 0
        while at < len(data) and self._server is not None and self._is_open():
            if self._conduit.client.paused:
                self._pace.keep(data[at:])
                break
            veil = self._exchange.veil if self._exchange is not None else None
            if veil is not None and veil.undone >= enough:
                self._pace.keep(data[at:])
                self._loop.call_soon(self._go_on)
                break
            whole = veil is None or (self._layer.sandbox_side.begun and not veil.inflates)
            piece = data[at:] if whole or veil is None else data[at : at + veil.sip]
            at += len(piece)
            if self._exchange is not None:
                self._exchange.down += len(piece)
            self._feed(events.DataReceived(self._server, piece))
        self._feed()

    def on_eof(self, stream: ByteStream) -> None:
        """Feed the end of what one side sends."""
        if not self._is_open():
            return
        if stream is self._conduit.client:
            self._client.state &= ~ConnectionState.CAN_READ
            self._feed(events.ConnectionClosed(self._client))
        elif self._conduit.is_upstream(stream):
            self._upstream_ended(clean=stream.clean is not False)

    def on_lost(self, stream: ByteStream, exc: Exception | None) -> None:
        """End with the client; without its upstream an exchange fails, but the client may ask again."""
        if stream is self._conduit.client:
            if self._is_open() and self._exchange is not None:
                self._exchange.up -= self._conduit.withhold()
                self._exchange.end(Reason.CLIENT_CLOSED)
            self._conduit.drop_upstream()
            self._finish()
        elif self._is_open() and self._conduit.is_upstream(stream):
            if exc is not None and self._exchange is not None and not self._layer.sandbox_side.begun:
                self._guard(lambda: self._failed(reason_of(exc), "lost before a response"))
            else:
                self._upstream_ended(clean=False)

    def on_pause(self, _: ByteStream) -> None:
        """Stop reading from the other side."""
        self._steer()

    def on_resume(self, _: ByteStream) -> None:
        """Go on reading from the other side."""
        self._deadlines.moved()
        if self._is_open() and self._pace.keeps:
            self._from_upstream(b"")
        self._steer()

    def _upstream_ended(self, *, clean: bool) -> None:
        server = self._server
        if server is None or server.state is ConnectionState.CLOSED:
            return
        server.state = ConnectionState.CLOSED
        self._layer.upstream_unclean = not clean
        self._feed(events.ConnectionClosed(server))

    # the loop

    def _is_open(self) -> bool:
        return self._phase is _Phase.OPEN

    def _feed(self, event: events.Event | None = None) -> None:
        """Give the layer an event and carry out its commands, and those of the events that follow, in order."""
        if event is not None:
            self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 # law 1: whatever raised, a layer, a hook or this file, the exchange is refused
            self._crashed(error)
        finally:
            self._busy = False
        self._steer()

    def _work(self) -> None:
        while self._queue and self._is_open():
            for command in self._layer.handle_event(self._queue.popleft()):
                step = self._steps.get(type(command))
                if step is not None:
                    step(command)
                elif isinstance(command, commands.StartHook):
                    self._hook(command)
                else:
                    raise RuntimeError(f"the layer wants {type(command).__name__}")
                if not self._is_open():
                    break
        if self._early and not self._tasks and self._is_open():
            self._end_early()  # not before every hook is done, and the layer has written all of the response
        self._conduit.flush()

    def _send(self, command: commands.SendData) -> None:
        if command.connection is self._client:
            self._conduit.to_client(command.data)
            return
        exchange = self._exchange
        if exchange is None or not exchange.admitted:
            raise RuntimeError("bytes for the upstream of a request that is not admitted")
        if command.connection is self._server:
            upstream = self._conduit.upstream
            if exchange.lease is not None and upstream is not None and not upstream.verified:
                raise RuntimeError("a credential for an upstream that is not verified")
            exchange.up += len(command.data)
            self._conduit.to_upstream(command.data)

    def _close(self, command: commands.CloseConnection) -> None:
        if command.connection is self._client:
            self._leave()
        elif command.connection is self._server:
            self._conduit.flush()
            self._drop_upstream()

    def _log(self, command: commands.Log) -> None:
        if command.level >= logging.ERROR:
            raise RuntimeError("mitmproxy reports an error")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _resume(self) -> None:
        """Go on after a task's work; the task itself calls this as its last act, and so no longer counts."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)
        self._feed()

    def _interim(self, interim: outcomes.Interim) -> None:
        veil = self._exchange.veil if self._exchange is not None else None
        phrase, fields = interim.phrase, interim.fields
        if veil is not None:
            phrase, fields = veil.text(phrase), veil.fields(fields)
        lines = b"".join(b"%s: %s\r\n" % field for field in fields)
        self._conduit.to_client(b"HTTP/1.1 %d %s\r\n%s\r\n" % (interim.status, phrase, lines))

    # hooks and the upstream

    def _hook(self, command: commands.StartHook) -> None:
        """Call the addon directly; only a coroutine costs a task. The layer waits until the hook is done."""
        hook = getattr(self.addon, command.name, None)
        flow = command.args()[0]
        opening = command.name == "requestheaders"
        if opening:
            self._exchange = Exchange(self.connection)  # even a hook that raises at once leaves a record
            self._deadlines.await_bytes()
        work = hook(flow) if hook is not None else None
        if opening:
            self._exchange = exchange_of(flow)
            self._pace.bind(self._exchange.account)
        if work is not None:
            task = self._spawn(self._finish_hook(work, command))
            task.add_done_callback(lambda _: work.close())  # which a task that is cancelled early never began
        else:
            self._hooked(command)

    async def _finish_hook(self, work: Coroutine[Any, Any, None], command: commands.StartHook) -> None:
        try:
            async with asyncio.timeout(HOOK_TIMEOUT):
                await work
            if self._is_open():
                self._hooked(command)
        except Exception as error:  # noqa: BLE001 # as in _feed
            self._crashed(error)
        self._resume()

    def _hooked(self, command: commands.StartHook) -> None:
        if command.name == "requestheaders" and (self._exchange is None or not self._exchange.admitted):
            self._deny()
            return
        if command.name == "requestheaders" and isinstance(self._layer, InspectorLayer):
            self._layer.sandbox_side.veil = self._exchange.veil if self._exchange is not None else None
        if command.blocking:
            self._queue.append(events.HookCompleted(command))

    def _open(self, command: commands.OpenConnection) -> None:
        assert self._exchange is not None
        self._spawn(self._finish_open(command, self._exchange))

    async def _finish_open(self, command: commands.OpenConnection, exchange: Exchange) -> None:
        try:
            opened = self._take_opened(exchange) or await open_upstream(exchange)
            if not self._is_open():
                if isinstance(opened, Opened):
                    opened.stream.abort()
                return
            if isinstance(opened, OpenFailed):
                self._failed(opened.reason, opened.detail)
            elif exchange.lease is not None and not opened.verified:
                opened.stream.abort()
                self._failed(Reason.CREDENTIAL_NEEDS_TLS, "the upstream is not verified")
            else:
                exchange.upstream = opened.address
                self._adopt(command.connection, opened)
                self._queue.append(events.OpenConnectionCompleted(command, None))
        except Exception as error:  # noqa: BLE001 # as in _feed
            self._crashed(error)
        self._resume()

    def _take_opened(self, exchange: Exchange) -> Opened | OpenFailed | None:
        """Return what was dialled early, once, if it is where the exchange is bound and may go."""
        opened, self._opened = self._opened, None
        if isinstance(opened, Opened) and not leads_to(opened, exchange):
            opened.stream.close()
            return None
        return opened

    def _adopt(self, server: ServerConnection, opened: Opened) -> None:
        server.state = ConnectionState.OPEN
        server.peername = (str(opened.address), opened.port)
        server.alpn, server.cipher = opened.stream.alpn, opened.stream.cipher
        self._server = server
        self._layer.upstream_unclean = False
        self._conduit.adopt(opened)

    def _drop_upstream(self) -> None:
        if self._server is not None:
            self._server.state = ConnectionState.CLOSED
            self._server = None
        if self._exchange is not None:
            self._exchange.up -= self._conduit.withhold()
        self._conduit.drop_upstream()

    # how exchanges end

    def _answered(self, command: outcomes.Answered) -> None:
        exchange = self._exchange
        assert exchange is not None
        if command.early:
            self._early = True
            return
        if self._pace.holds_up:
            self._end(exchange, Reason.COMPLETED, "answered before the end of the request")
            self._leave()
            return
        if (behind := self._pace.take_down()) and self._server is not None:
            self._queue.append(events.DataReceived(self._server, behind))
        dropped = self._layer.sandbox_side.trailers_dropped
        exchange.end(Reason.COMPLETED, "request trailers dropped" if dropped else None)
        self._exchange = None
        self._deadlines.await_head()

    def _upgraded(self, command: outcomes.Upgraded) -> None:
        """Go on as a WebSocket: another layer takes over, with what both sides have said in the meantime."""
        exchange, server = self._exchange, self._server
        assert exchange is not None
        assert server is not None
        result = upgrade(exchange, command.head, self._client, server)
        if isinstance(result, str):
            self._failed(Reason.UPSTREAM_PROTOCOL, result)
            return
        early = self._layer.sandbox_side.buf
        self._layer, head = result
        exchange.status = 101
        self._conduit.to_client(head)
        self._deadlines.await_bytes()
        for connection, said in ((server, command.rest), (self._client, bytes(early))):
            if said:
                self._queue.append(events.DataReceived(connection, said))

    def _ended(self, command: outcomes.Ended) -> None:
        if self._exchange is not None:
            self._end(self._exchange, command.reason, command.detail)
        self._leave()

    def _end_early(self) -> None:
        """The origin has answered and wants no more of the request (RFC 9112 §9.3): the client shall see that and stop."""
        assert self._exchange is not None
        for command in self._layer.sandbox_side.end_response():
            self._steps[type(command)](command)
        self._end(self._exchange, Reason.COMPLETED, "answered before the end of the request")
        self._leave()

    def _end(self, exchange: Exchange, reason: Reason, detail: str | None = None) -> None:
        """Let go upstream what may, and end the exchange; what has to wait never left."""
        self._conduit.flush()
        exchange.up -= self._conduit.withhold()
        exchange.end(reason, detail)

    def _deny(self) -> None:
        """Answer a request that the addon has not admitted."""
        exchange = self._exchange
        assert exchange is not None
        if exchange.refusal is None:
            exchange.refuse(Reason.INTERNAL_ERROR)
        self._answer(exchange, exchange.ending)

    def _unread(self, reason: Reason, detail: str, method: bytes = b"", target: bytes = b"") -> None:
        """Answer and record an attempt that never became a request."""
        exchange = self._exchange = Exchange(self.connection)
        if method:
            exchange.method, exchange.target = method.decode("ascii", "replace"), target.decode("latin-1")
        exchange.deny(Decision("deny", reason), detail)
        self._answer(exchange, Reason.COMPLETED)

    def _failed(self, reason: Reason, detail: str) -> None:
        """End an exchange that cannot go on: by an answer that says why, or where one has begun by cutting it short."""
        exchange = self._exchange
        if exchange is None:
            self._leave()
        elif reason is Reason.CLIENT_CLOSED:
            self._end(exchange, reason, detail)
            self._leave()
        elif not self._layer.sandbox_side.begun:
            exchange.give_up(reason, detail)
            self._answer(exchange, reason, detail)
        elif self._layer.sandbox_side.framed:
            self._end(exchange, reason, detail)
            self._conduit.to_client(self._layer.sandbox_side.last_word(reason))
            self._leave()  # the client sees that the response is incomplete
        else:
            self._end(exchange, reason, detail)
            self._conduit.abort()
            self._finish()

    def _answer(self, exchange: Exchange, ended: Reason, detail: str | None = None) -> None:
        """Write the exchange's refusal instead of a response, and leave."""
        assert exchange.refusal is not None
        exchange.up -= self._conduit.withhold()
        self._conduit.to_client(exchange.refusal.to_http1(head_only=exchange.method == "HEAD"))
        exchange.end(ended, detail)
        self._leave()

    def _crashed(self, error: Exception) -> None:
        """Fail closed, and tell the operator."""
        if self._phase is _Phase.OVER:
            return
        traceback.print_exception(error, limit=8, file=sys.stderr)
        if not self._is_open():
            self.cut(Reason.INTERNAL_ERROR)
            return
        try:
            self._exchange = self._exchange or Exchange(self.connection)
            self._exchange.up -= self._conduit.withhold()
            self._failed(Reason.INTERNAL_ERROR, type(error).__name__)
        except Exception:  # noqa: BLE001 # not even that: then nothing is said at all
            self.cut(Reason.INTERNAL_ERROR)

    def _guard(self, step: Callable[[], None]) -> None:
        """Run a step that no layer commanded, under the same law as those."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 # as in _feed
            self._crashed(error)

    # how the connection ends

    def _client_left(self, command: outcomes.ClientLeft) -> None:
        if command.partial:
            self._unread(Reason.BAD_REQUEST, "closed before the end of the head")
        self._leave()

    def _leave(self) -> None:
        """Let the client have what was written for it, then close. Nothing more is judged or sent upstream."""
        if not self._is_open():
            return
        self._phase = _Phase.LEAVING
        self._queue.clear()
        self._stop_tasks()
        self._server = None
        self._deadlines.stop()
        if not self._conduit.leave():
            self._deadlines.moved()
            self._deadlines.await_reader()

    def _finish(self) -> None:
        self._phase = _Phase.OVER
        self._queue.clear()
        self._stop_tasks()
        self._deadlines.stop()
        if not self._over.done():
            self._over.set_result(None)

    def _stop_tasks(self) -> None:
        self._pace.stop()
        opened, self._opened = self._opened, None
        if isinstance(opened, Opened):
            opened.stream.close()
        for task in self._tasks - {asyncio.current_task(self._loop)}:
            task.cancel()

    # back-pressure and deadlines

    def _steer(self) -> None:
        if self._is_open():
            kept = len(self._layer.sandbox_side.buf)
            limit = READ_AHEAD + self.connection.services.settings.head_bytes
            self._conduit.steer(pending=bool(self._tasks), full=kept > limit)
            if not self._busy and (starved := self._pace.arm()) is not None:
                self._guard(lambda: self._starve(starved))

    def _go_on(self) -> None:
        """There may be room again for what waits."""
        if self._is_open():
            self._deadlines.moved()
            self._from_upstream(b"")

    def _starve(self, starved: Starved) -> None:
        if self._exchange is not None:
            self._exchange.retry_after = starved.retry_after
        self._failed(Reason.RATE_LIMITED, starved.detail)

    def _overdue(self) -> None:
        if self._phase is _Phase.LEAVING:
            self._go_on_leaving()
        elif self._exchange is not None and self._layer.sandbox_side.client_ended:
            self._failed(Reason.CLIENT_CLOSED, "ended its side, and took no answer")
        elif self._exchange is not None:
            side = self._layer.sandbox_side
            waiting = side.request_done and not side.begun
            reason = Reason.UPSTREAM_TIMEOUT if waiting else Reason.IDLE_TIMEOUT
            self._failed(reason, "no bytes in either direction")
        elif self._layer.sandbox_side.buf:
            self._unread(Reason.HEAD_TIMEOUT, "the head did not end in time")
        else:
            self._leave()  # idle between requests: nobody is owed a word

    def _go_on_leaving(self) -> None:
        """A client that reads slowly gets all of its answer; one that reads nothing is given up on."""
        left = self._conduit.left()
        if left:
            return
        if left is False:
            self._deadlines.moved()
        if self._deadlines.idle:
            self._conduit.abort()
            self._finish()
        else:
            self._deadlines.await_reader()
