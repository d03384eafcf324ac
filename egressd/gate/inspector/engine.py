"""The engine: feeds one connection's bytes to mitmproxy's HTTP layer and carries out what the layer commands.

The layers do no I/O; this is where it happens, and where everything fails closed. Two rules hold it together:

* Nothing is written upstream unless the current exchange is admitted, which the addon does last of all (`uplink`).
* Whatever is refused or breaks ends the connection: the client gets one answer that says why (if the response
  had not begun), the layer is never resumed, so no state of it can carry a denied request on (`turn`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from mitmproxy.connection import ConnectionState
from mitmproxy.proxy import commands, events

from egressd.gate.connection import Connection
from egressd.gate.inspector import outcomes
from egressd.gate.inspector.addon import HOOK_TIMEOUT, PolicyAddon, exchange_of
from egressd.gate.inspector.conduit import Conduit
from egressd.gate.inspector.deadlines import Deadlines
from egressd.gate.inspector.exchange import EARLY, Exchange
from egressd.gate.inspector.http1.sandbox_side import SandboxSide
from egressd.gate.inspector.intake import Intake
from egressd.gate.inspector.layers import InspectorLayer, client_of, context_of
from egressd.gate.inspector.life import Life
from egressd.gate.inspector.messages import section
from egressd.gate.inspector.pace import Pace
from egressd.gate.inspector.pipe import PipeLayer, upgrade
from egressd.gate.inspector.tasks import Tasks
from egressd.gate.inspector.turn import Turn
from egressd.gate.inspector.uplink import Uplink
from egressd.gate.inspector.upstream import Opened, OpenFailed, reason_of
from egressd.gate.tls.stream import ByteStream
from egressd.policy.reasons import Reason

READ_AHEAD: Final = 64 * 1024
"""Bytes of later, pipelined requests that are kept while one is being answered, beyond one head."""


HALF_CLOSED_IDLE: Final = 60.0
"""Seconds without bytes after which a client that has ended its side counts as gone: nothing else tells the two apart."""


class Engine:
    """One connection of a sandbox under inspection; owner of its stream and of at most one upstream stream."""

    def __init__(
        self, connection: Connection, stream: ByteStream, opened: Opened | OpenFailed | None = None
    ) -> None:
        """Nothing is read before `run`. `opened` is the upstream of the first request, if one was dialled early."""
        self.connection = connection
        self.addon = PolicyAddon(connection, holds_bodies=True)
        self._life = Life()
        self._pace = Pace(self.go_on)
        self._conduit = Conduit(stream, self, self._pace)
        self._uplink = Uplink(self._conduit, opened)
        self._turn = Turn(connection, self._conduit, self._pace, self)
        self._intake = Intake(self, self._conduit, self._pace, self._turn, self._uplink)
        self._tasks = Tasks(self.feed, self._crashed)
        self._loop = asyncio.get_running_loop()
        self._client = client_of(connection, stream)
        self._layer: InspectorLayer | PipeLayer = InspectorLayer(
            context_of(connection, self._client), connection.services.settings.head_bytes
        )
        self._queue: deque[events.Event] = deque()
        self._busy = False
        self._early = False  # the response is complete, its request is not
        self._deadlines = Deadlines(connection.services.settings, lambda: self._guard(self._overdue))
        self._steps: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.SendData: self._send,
            commands.OpenConnection: self._open,
            commands.CloseConnection: self._close,
            commands.CloseTcpConnection: self._close,
            commands.Log: self._log,
            outcomes.Answered: self._answered,
            outcomes.ClientLeft: lambda left: self._turn.left(partial=left.partial),
            outcomes.HalfClosed: lambda _: self._deadlines.await_bytes(HALF_CLOSED_IDLE),
            outcomes.Upgraded: self._upgraded,
            outcomes.Ended: lambda ended: self._turn.leave(ended.reason, ended.detail),
            outcomes.Failed: lambda failed: self._turn.fail(failed.reason, failed.detail),
            outcomes.Interim: self._interim,
            outcomes.Rejected: lambda rejected: self._turn.reject(
                rejected.head.reason, rejected.head.detail, rejected.head.method, rejected.head.target
            ),
        }

    async def run(self, first: bytes = b"") -> None:
        """Carry the connection to its end; `first` was read from it before. Cancelling it cuts the connection."""
        await self._life.lead(self, self.connection.sandbox, lambda: self._begin(first))

    def _begin(self, first: bytes) -> None:
        if self.connection.sandbox.retiring:
            self.retire()
        self._conduit.open()  # which tells nothing before this returns to the loop
        self._deadlines.await_head()
        self.feed(events.Start())
        if first:
            self.feed(events.DataReceived(self._client, first))

    def cut(self, reason: Reason) -> None:
        """End both sides at once; an open exchange gets its `end` record with `reason`. Nothing is done twice."""
        if self._life.is_over():
            return
        self._turn.cut(reason)
        self._conduit.abort(self.sandbox_side.last_word(reason))
        self.finish()

    def retire(self) -> None:
        """Answer the request that is open or comes next, say that the connection closes behind it, and close it."""
        self.sandbox_side.retiring = True

    def rejudge(self, now: float) -> None:
        """End the exchange that the rules no longer allow: by an answer if none has begun, else by cutting it short.

        Between exchanges there is nothing to judge: the next request is judged by the rules of its own time.
        """
        if self.is_open():
            self._guard(lambda: self._turn.rejudge(now))

    # what the streams tell (StreamOwner)

    def on_ready(self, stream: ByteStream) -> None:
        """Both streams are ready before they get here."""

    def on_data(self, stream: ByteStream, data: bytes) -> None:
        """Feed what arrived."""
        if not self.is_open():
            return
        self._deadlines.moved()
        if stream is self._conduit.client:
            if self._tasks:
                self._conduit.hold()  # a decision or a dial is pending: what comes now would only pile up
            self.feed(events.DataReceived(self._client, data))
        elif self._conduit.is_upstream(stream) and self._uplink.server is not None:
            self._intake.take(data)

    def on_eof(self, stream: ByteStream) -> None:
        """Feed the end of what one side sends."""
        if not self.is_open():
            return
        if stream is self._conduit.client:
            self._client.state &= ~ConnectionState.CAN_READ
            self.feed(events.ConnectionClosed(self._client))
        elif self._conduit.is_upstream(stream):
            self._upstream_ended(clean=stream.clean is not False)

    def on_lost(self, stream: ByteStream, exc: Exception | None) -> None:
        """End with the client; without its upstream an exchange fails, but the client may ask again."""
        if stream is self._conduit.client:
            if self.is_open():
                self._turn.cut(Reason.CLIENT_CLOSED)
            self._conduit.drop_upstream()
            self.finish()
        elif self.is_open() and self._conduit.is_upstream(stream):
            if exc is not None and self._turn.exchange is not None and not self.sandbox_side.begun:
                self._guard(lambda: self._turn.fail(reason_of(exc), "lost before a response"))
            else:
                self._upstream_ended(clean=False)

    def on_pause(self, _: ByteStream) -> None:
        """Stop reading from the other side."""
        self._steer()

    def on_resume(self, _: ByteStream) -> None:
        """Go on reading from the other side."""
        self._deadlines.moved()
        if self.is_open() and self._pace.keeps:
            self._intake.take()
        self._steer()

    def _upstream_ended(self, *, clean: bool) -> None:
        server = self._uplink.ended()
        if server is not None:
            self._layer.upstream_unclean = not clean
            self.feed(events.ConnectionClosed(server))

    # the loop

    def is_open(self) -> bool:
        """Whether anything is still judged or sent upstream."""
        return self._life.is_open()

    @property
    def sandbox_side(self) -> SandboxSide | PipeLayer:
        """Who speaks to the sandbox."""
        return self._layer.sandbox_side

    def feed(self, event: events.Event | None = None) -> None:
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
        while self._queue and self.is_open():
            for command in self._layer.handle_event(self._queue.popleft()):
                step = self._steps.get(type(command))
                if step is not None:
                    step(command)
                elif isinstance(command, commands.StartHook):
                    self._hook(command)
                else:
                    raise RuntimeError(f"the layer wants {type(command).__name__}")
                if not self.is_open():
                    break
        if self._early and not self._tasks and self.is_open():
            self._end_early()  # not before every hook is done, and the layer has written all of the response
        self._conduit.flush()

    def _send(self, command: commands.SendData) -> None:
        if command.connection is self._client:
            self._conduit.to_client(command.data)
        else:
            self._uplink.send(self._turn.exchange, command.connection, command.data)

    def _close(self, command: commands.CloseConnection) -> None:
        if command.connection is self._client:
            self.leave()
        elif command.connection is self._uplink.server:
            self._conduit.flush()
            self._turn.withhold()
            self._uplink.drop()

    def _log(self, command: commands.Log) -> None:
        if command.level >= logging.ERROR:
            raise RuntimeError("mitmproxy reports an error")

    def _interim(self, interim: outcomes.Interim) -> None:
        veil = self._turn.veil
        phrase, fields = interim.phrase, interim.fields
        if veil is not None:
            phrase, fields = veil.text(phrase), veil.fields(fields)
        self._conduit.to_client(section(b"HTTP/1.1 %d %s" % (interim.status, phrase), fields))

    # hooks and the upstream

    def _hook(self, command: commands.StartHook) -> None:
        """Call the addon directly; only a coroutine costs a task. The layer waits until the hook is done."""
        hook = getattr(self.addon, command.name, None)
        flow = command.args()[0]
        opening = command.name == "requestheaders"
        if opening:
            self._turn.begin()
            self._deadlines.await_bytes()
        work = hook(flow) if hook is not None else None
        if opening:
            self._turn.take(exchange_of(flow))
        if work is not None:
            task = self._tasks.spawn(self._finish_hook(work, command))
            task.add_done_callback(lambda _: work.close())  # which a task that is cancelled early never began
        else:
            self._hooked(command)

    async def _finish_hook(self, work: Coroutine[Any, Any, None], command: commands.StartHook) -> None:
        async with asyncio.timeout(HOOK_TIMEOUT):
            await work
        if self.is_open():
            self._hooked(command)

    def _hooked(self, command: commands.StartHook) -> None:
        exchange = self._turn.exchange
        if command.name == "requestheaders" and (exchange is None or not exchange.admitted):
            self._turn.deny()
            return
        if command.name == "requestheaders" and isinstance(self._layer, InspectorLayer):
            self._layer.sandbox_side.veil = self._turn.veil
        if command.blocking:
            self._queue.append(events.HookCompleted(command))

    def _open(self, command: commands.OpenConnection) -> None:
        assert self._turn.exchange is not None
        self._tasks.spawn(self._finish_open(command, self._turn.exchange))

    async def _finish_open(self, command: commands.OpenConnection, exchange: Exchange) -> None:
        opened = await self._uplink.open(exchange)
        if not self.is_open():
            if isinstance(opened, Opened):
                opened.stream.abort()
        elif isinstance(opened, OpenFailed):
            self._turn.fail(opened.reason, opened.detail)
        else:
            self._uplink.adopt(command.connection, opened, exchange)
            self._layer.upstream_unclean = False
            self._queue.append(events.OpenConnectionCompleted(command, None))

    # how exchanges end

    def _answered(self, command: outcomes.Answered) -> None:
        if command.early:
            self._early = True
            return
        if self._pace.holds_up:
            self._turn.leave(Reason.COMPLETED, EARLY)
            return
        if (behind := self._pace.take_down()) and self._uplink.server is not None:
            self._queue.append(events.DataReceived(self._uplink.server, behind))
        self._turn.complete("request trailers dropped" if self.sandbox_side.trailers_dropped else None)
        self._deadlines.await_head()

    def _upgraded(self, command: outcomes.Upgraded) -> None:
        """Go on as a WebSocket: another layer takes over, with what both sides have said in the meantime."""
        exchange, server = self._turn.exchange, self._uplink.server
        assert exchange is not None
        assert server is not None
        result = upgrade(exchange, command.head, self._client, server)
        if isinstance(result, str):
            self._turn.fail(Reason.UPSTREAM_PROTOCOL, result)
            return
        early = self.sandbox_side.buf
        self._layer, head = result
        exchange.status = 101
        self._conduit.to_client(head)
        self._deadlines.await_bytes()
        for connection, said in ((server, command.rest), (self._client, bytes(early))):
            if said:
                self._queue.append(events.DataReceived(connection, said))

    def _end_early(self) -> None:
        """The origin has answered and wants no more of the request (RFC 9112 §9.3): the client shall see that and stop."""
        for command in self.sandbox_side.end_response():
            self._steps[type(command)](command)
        self._turn.leave(Reason.COMPLETED, EARLY)

    def _crashed(self, error: Exception) -> None:
        """Fail closed, and tell the operator."""
        if self._life.is_over():
            return
        traceback.print_exception(error, limit=8, file=sys.stderr)
        if not self.is_open():
            self.cut(Reason.INTERNAL_ERROR)
            return
        try:
            self._turn.crash(type(error).__name__)
        except Exception:  # noqa: BLE001 # not even that: then nothing is said at all
            self.cut(Reason.INTERNAL_ERROR)

    def _guard(self, step: Callable[[], None]) -> None:
        """Run a step that no layer commanded, under the same law as those."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 # as in `feed`
            self._crashed(error)

    # how the connection ends

    def leave(self) -> None:
        """Let the client have what was written for it, then close. Nothing more is judged or sent upstream."""
        if not self._life.leave():
            return
        self._stop()
        self._uplink.server = None
        if not self._conduit.leave():
            self._deadlines.moved()
            self._deadlines.await_reader()

    def finish(self) -> None:
        """Be over: nothing is waited for any more."""
        self._life.finish()
        self._stop()

    def _stop(self) -> None:
        self._queue.clear()
        self._pace.stop()
        self._uplink.release()
        self._tasks.stop()
        self._deadlines.stop()

    # back-pressure and deadlines

    def _steer(self) -> None:
        if self.is_open():
            kept = len(self.sandbox_side.buf)
            limit = READ_AHEAD + self.connection.services.settings.head_bytes
            self._conduit.steer(pending=bool(self._tasks), full=kept > limit)
            if not self._busy and (starved := self._pace.arm()) is not None:
                self._guard(lambda: self._turn.starve(starved))

    def go_on(self) -> None:
        """There may be room again for what waits."""
        if self.is_open():
            self._deadlines.moved()
            self._intake.take()

    def _overdue(self) -> None:
        if self.is_open():
            self._turn.overdue()
        else:
            self._go_on_leaving()

    def _go_on_leaving(self) -> None:
        """A client that reads slowly gets all of its answer; one that reads nothing is given up on."""
        left = self._conduit.left()
        if left:
            return
        if left is False:
            self._deadlines.moved()
        if self._deadlines.idle:
            self._conduit.abort()
            self.finish()
        else:
            self._deadlines.await_reader()
