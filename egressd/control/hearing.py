"""What a worker says, and how far it is believed.

Control trusts a worker with the sandboxes of its post and with nothing else: a record or a name of another's, a pair that
contradicts an earlier one or a malformed message ends it. What it may say, control keeps: for the journal, and for the next
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from egressd.control.desk import Desk
from egressd.control.neighbours import Neighbours
from egressd.control.recording import Recording
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import Sources
from egressd.control.worker import Worker
from egressd.gate.channel import ChannelBroken
from egressd.gate.messages import (
    Adopted,
    Ask,
    Claim,
    Claimed,
    Drained,
    Gone,
    Introduce,
    Pair,
    Petition,
    Plea,
    Ready,
    Records,
    Redeem,
    Serving,
    Sharing,
    Spent,
    Stored,
    ToControl,
    Written,
)
from egressd.journal.record import NOBODY
from egressd.journal.writer import BadRecord

_DEPARTED: Final = 4096
"""Sandboxes that are gone and of which a last record may still be on its way."""


class Manned(Protocol):
    """The post whose workers are heard."""

    sandboxes: dict[str, SandboxState]
    worker: Worker | None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker that carries its sandboxes."""

    def lose(self, worker: Worker, why: str) -> None:
        """End a worker that is believed no more."""


class Hearing:
    """Hears the workers of one post. `run` starts what takes longer than a message may."""

    def __init__(
        self,
        post: Manned,
        records: Recording,
        desk: Desk,
        sources: Sources,
        run: Callable[[Any], object],
        neighbours: Neighbours | None = None,
    ) -> None:
        """Nothing was said yet."""
        self._post = post
        self._records = records
        self._desk = desk
        self._sources = sources
        self._run = run
        self._neighbours = neighbours or Neighbours({})
        self._departed: deque[str] = deque()
        self._own = {NOBODY}
        self._waiting: dict[tuple[str, str], asyncio.Future[None]] = {}
        self.stopping = False

    def expect(self, what: str, of: str) -> asyncio.Future[None]:
        """Return what is done once whoever has the post by then says so."""
        return self._waiting.setdefault((what, of), asyncio.get_running_loop().create_future())

    def enter(self, sandbox_id: str) -> None:
        """Believe what is said of a sandbox from now on."""
        self._own.add(sandbox_id)

    def leave(self, sandbox_id: str) -> None:
        """A sandbox is gone; what was said of it before may come later."""
        if (waiting := self._waiting.pop(("serving", sandbox_id), None)) is not None and not waiting.done():
            waiting.set_result(None)  # it was ended before its policy was read
        self._departed.append(sandbox_id)
        if len(self._departed) > _DEPARTED:
            self._own.discard(self._departed.popleft())

    def hear(self, worker: Worker, message: ToControl, fds: list[int]) -> None:
        """Take a message; raises ValueError for what no sound worker says."""
        if isinstance(message, Introduce) and len(fds) == 1 and message.sandbox in self._own:
            self._neighbours.introduce(worker, message, fds.pop(0))
            return
        for fd in fds:  # a worker has no other to give
            os.close(fd)
        match message:
            case Introduce():
                raise ValueError("hands on what is no neighbour's")
            case Records():
                self._on_records(worker, message)
            case Pair() | Spent():
                self._keep(worker, message)
            case Ask():
                carried = functools.partial(self._carried_by, worker, message.sandbox)
                self._run(self._desk.answer(worker.channel, message, carried))
            case Petition() | Plea() | Redeem():
                carried = functools.partial(self._carried_by, worker, message.sandbox)
                self._run(self._desk.put(worker.channel, message, carried))
            case Claim():
                self._on_claim(worker, message)
            case Ready() | Drained():
                step = worker.ready if isinstance(message, Ready) else worker.drained
                if not step.done():
                    step.set_result(None)
            case Serving() | Sharing() | Gone() | Adopted():
                self._on_done(worker, message)

    def _on_done(self, worker: Worker, message: Serving | Sharing | Gone | Adopted) -> None:
        what = message.type
        match message:
            case Serving() | Gone():
                of: tuple[str, ...] = (message.sandbox,)
            case Sharing():
                of = (message.share,)
            case Adopted():
                of = message.sandboxes
        for one in of:
            worker.met(what, one)
            if worker is self._post.worker and (future := self._waiting.pop((what, one), None)) is not None:
                future.set_result(None)  # nobody else has it in hand

    def _keep(self, worker: Worker, message: Pair | Spent) -> None:
        """Keep what the next worker has to know of a sandbox; ValueError for what is not its own."""
        sandbox = self._post.sandboxes.get(message.sandbox)
        if message.sandbox not in self._own:
            raise ValueError("speaks for a sandbox that is not its own")
        if isinstance(message, Spent):
            if sandbox is not None:
                sandbox.keep_level(
                    message.owner, message.kind, message.tokens, time.monotonic(), message.host
                )
            return
        if sandbox is not None:
            sandbox.keep_pair(message.name, message.address)
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile
            worker.channel.send(Stored(pair=message.pair))

    def _on_claim(self, worker: Worker, message: Claim) -> None:
        """Keep a source as a sandbox's, once and for as long as it lives."""
        sandbox = self._post.sandboxes.get(message.sandbox) or self._neighbours.find(message.sandbox)
        ok = sandbox is not None and sandbox.source in (None, message.source)
        interface = sandbox.interface if sandbox is not None else ""
        ok = ok and self._sources.claim(message.sandbox, message.source, interface)
        if ok and sandbox is not None and sandbox.source is None:
            sandbox.source = message.source
            self._records.note("sandbox", sandbox, "bound to its source")
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile
            worker.channel.send(Claimed(claim=message.claim, ok=ok))

    def _carried_by(self, worker: Worker, sandbox_id: str) -> SandboxState | None:
        """Return a sandbox if this worker is one that carries it."""
        return self._post.sandboxes.get(sandbox_id) if worker in self._post.workers else None

    def _on_records(self, worker: Worker, message: Records) -> None:
        for record in message.records:
            # Of a neighbour only what it was refused before it was known can be told here; more is for its own worker to say.
            if self._neighbours.find(str(record.get("sandbox"))) is not None and (
                record.get("event"),
                record.get("verdict"),
                record.get("layer"),
            ) != ("decision", "deny", "connection"):
                raise ValueError("records what a neighbour's worker would")
        if self._records.may_block and not self.stopping:
            self._run(self._commit(worker, message))
        else:  # BadRecord: what no sound worker sends ends it
            self._written(worker, message, ok=self._records.append(message.records, self._own, worker.name))

    async def _commit(self, worker: Worker, message: Records) -> None:
        try:
            ok = await self._records.commit(message.records, self._own, worker.name)
        except BadRecord as error:
            self._post.lose(worker, str(error))
        else:
            self._written(worker, message, ok=ok)

    def _written(self, worker: Worker, message: Records, *, ok: bool) -> None:
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile
            worker.channel.send(Written(batch=message.batch, ok=ok))
