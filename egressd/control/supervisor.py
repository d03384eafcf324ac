"""The supervisor: starts workers, gives them sandboxes, writes what they record, replaces the dead.

Control trusts a worker with its own sandboxes and with nothing else: a record for another sandbox, a pair that contradicts
an earlier
one or a malformed message ends the worker. While no worker lives, a sandbox's connections wait in the backlog of the sockets
that
control holds; nothing leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import time
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egressd.control.ca import Authority, issue_worker_intermediate
from egressd.control.desk import Desk
from egressd.control.host import local_addresses, may_become
from egressd.control.lending import Lending
from egressd.control.process import WorkerProcess
from egressd.control.reconciliation import Kind
from egressd.control.recording import Recording
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import SharedListeners, Sources
from egressd.control.voice import say
from egressd.credentials.providers.base import read_file
from egressd.gate.channel import Channel, ChannelBroken, sealed
from egressd.gate.messages import (
    TO_CONTROL,
    Adopt,
    Adopted,
    Ask,
    Claim,
    Claimed,
    Configure,
    Gone,
    Identity,
    Pair,
    Ready,
    Recall,
    Records,
    Renew,
    Revoke,
    Serve,
    Serving,
    Share,
    Sharing,
    Spent,
    Stored,
    ToControl,
    Unshare,
    Written,
)
from egressd.gate.settings import Settings
from egressd.journal.record import NOBODY
from egressd.journal.writer import BadRecord, Journal
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason

_RECALLED = 1000
"""Leases that one message ends."""
_DEPARTED = 4096
"""Sandboxes that are gone and of which a worker may still tell."""
_NOBODYS = {NOBODY: None}
_ADOPTING = 1000
"""Sandboxes that one message puts under new rules."""
WORKER_UID = 1337
"""The uid and gid a worker takes when control is root; no sandbox may have it."""
_START_TIMEOUT = 20.0
_RENEW_BEFORE = 12 * 3600.0
"""Seconds before the end of an intermediate's day at which the worker gets the next."""
_RENEW_LOOK = 60.0
_RESTARTS = 8
_RESTART_WINDOW = 60.0
_FIRST_PAUSE = 0.1
_LAST_PAUSE = 2.0
"""Seconds between two starts of which the first failed, doubled each time: descriptors or memory may be back by then."""


class WorkerFailed(Exception):
    """A worker could not be started, or died too often to be started again."""


@dataclass(slots=True)
class _Worker:
    """A running worker process and its channel."""

    name: str
    process: WorkerProcess
    channel: Channel[Any]
    ready: asyncio.Future[None]
    renew_at: float = 0.0
    """Unix seconds by which its intermediate is replaced."""
    lost: str = ""
    """Why it is gone, or no longer believed."""


class Supervisor:
    """One worker and the sandboxes it carries. `failed` is called when no worker can be kept alive."""

    def __init__(
        self,
        settings: Settings,
        authority: Authority,
        journal: Journal,
        *,
        failed: Callable[[str], None] = say,
        first: WorkerProcess | None = None,
        lending: Lending | None = None,
        sources: Sources | None = None,
        proxy_credentials: Path | None = None,
    ) -> None:
        """Nothing runs before `start`, but for `first`: a process that was started early, to be the first worker.

        Without `lending` no worker gets a credential. `sources` are those of every worker, where there are several.
        `proxy_credentials` is the file with `user:password` for the proxy in the settings, read for each worker anew.
        """
        self._settings = settings
        self._authority = authority
        self._records = Recording(journal)
        self._failed = failed
        self._first = first
        self._desk = Desk(lending)
        self._sandboxes: dict[str, SandboxState] = {}
        self._shares: dict[str, SharedListeners] = {}
        self._sources = sources or Sources()
        self._proxy_credentials = proxy_credentials
        self._worker: _Worker | None = None
        self._departed: OrderedDict[str, None] = (
            OrderedDict()
        )  # a last record of theirs may still be on its way
        self._deaths = 0
        self._starts: list[float] = []
        self._count = 0
        self._stopping = False
        self._waiting: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def worker_pid(self) -> int | None:
        """The pid of the worker's process, None while there is none."""
        return self._worker.process.pid if self._worker is not None else None

    async def start(self) -> None:
        """Start the worker and return once it is ready; raises WorkerFailed."""
        await self._spawn()
        self._task(self._renew())

    async def add(self, sandbox: SandboxState) -> None:
        """Have the sandbox carried; returns once its sockets are served.

        Raises WorkerFailed, and ValueError where its source is another's.
        """
        source, interface = sandbox.source, sandbox.interface
        if source is not None and not self._sources.claim(sandbox.id, source, interface):
            raise ValueError(f"{sandbox.source} is the source of another sandbox")
        self._sandboxes[sandbox.id] = sandbox
        self._records.begin(sandbox.id)
        self._records.note("sandbox", sandbox, "created")
        serving = self._expect("serving", sandbox.id)
        if self._worker is not None:
            self._give(self._worker, sandbox)
        await self._await(serving, "the worker did not serve the sandbox")

    async def adopt(self, policies: dict[str, EffectivePolicy]) -> None:
        """Put sandboxes (by id) under new policies; returns once new attempts are judged by them."""
        changed: dict[str, list[str]] = {}
        for sandbox_id, policy in policies.items():
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is not None and sandbox.policy != policy:
                sandbox.policy = policy
                self._records.note("policy", sandbox, "adopted")
                changed.setdefault(policy.digest(), []).append(sandbox_id)
        waits = []
        for ids in changed.values():
            payload = self._sandboxes[ids[0]].policy_payload()
            for start in range(0, len(ids), _ADOPTING):
                some = tuple(ids[start : start + _ADOPTING])
                waits.append(self._expect("adopted", some[0]))
                try:
                    self._send(Adopt(sandboxes=some), (payload,))
                except OSError as error:
                    self._lose(f"cannot be told of new rules: {error.strerror}")
        for wait in waits:
            try:
                await self._await(wait, "the worker did not take the policy")
            except WorkerFailed:
                self._lose("it did not take new rules")  # its successor starts from them
                raise

    async def remove(self, sandbox_id: str, *, shutdown: bool = False) -> None:
        """End the sandbox: flows cut, listeners closed here and in the worker, ends written."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            return
        if self._worker is not None:  # else nothing of it is open anywhere
            gone = self._expect("gone", sandbox_id)
            self._send(Revoke(sandbox=sandbox_id, reason="shutdown" if shutdown else "revoked"))
            try:
                await self._await(gone, "the worker did not let the sandbox go", seconds=3.0)
            except WorkerFailed:  # it may still carry flows of a sandbox that has ended
                self._lose("it did not let a sandbox go")
        reason = Reason.SHUTDOWN if shutdown else Reason.REVOKED
        self._records.end_all({sandbox_id}, reason)
        self._records.note("sandbox", sandbox, "gone")
        del self._sandboxes[sandbox_id]
        self._sources.release(sandbox_id)
        self._departed[sandbox_id] = None
        while len(self._departed) > _DEPARTED:
            self._departed.popitem(last=False)
        for listener in sandbox.listeners:
            listener.socket.close()
        await self._desk.end(sandbox_id)  # last: nothing of it is under way any more

    def recall(self, leases: Sequence[str]) -> None:
        """Have the worker end these leases (by id), and what is under way with them."""
        for start in range(0, len(leases), _RECALLED):
            try:
                self._send(Recall(leases=tuple(leases[start : start + _RECALLED])))
            except OSError as error:
                self._lose(f"cannot be told of ended leases: {error.strerror}")

    async def share(self, shared: SharedListeners) -> None:
        """Have listeners served for every sandbox that proves itself there; raises WorkerFailed."""
        self._shares[shared.id] = shared
        sharing = self._expect("sharing", shared.id)
        if self._worker is not None:
            self._give_shared(self._worker, shared)
        await self._await(sharing, "the worker did not serve the shared listeners")

    async def unshare(self, shared_id: str) -> None:
        """Close shared listeners, here and in the worker; connections whose sandbox was known go on."""
        shared = self._shares.get(shared_id)
        if shared is None:
            return
        if self._worker is not None:
            closed = self._expect("sharing", shared_id)
            self._send(Unshare(share=shared_id))
            with contextlib.suppress(WorkerFailed):
                await self._await(closed, "the worker did not close the shared listeners", seconds=3.0)
        self._shares.pop(shared_id, None)
        for listener in shared.listeners:
            listener.socket.close()

    async def stop(self) -> None:
        """End every sandbox and the worker; afterwards no record of a worker is written any more."""
        for shared_id in tuple(self._shares):
            await self.unshare(shared_id)
        for sandbox_id in tuple(self._sandboxes):
            await self.remove(sandbox_id, shutdown=True)
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        worker, self._worker = self._worker, None
        if worker is not None:
            await _end(worker.process)
            worker.channel.finish()  # what it said while it was waited for in vain
        self._records.end_all(set(self._departed), Reason.SHUTDOWN)

    # the worker

    async def _spawn(self) -> None:
        now = time.monotonic()
        self._starts = [start for start in self._starts if now - start < _RESTART_WINDOW] + [now]
        if len(self._starts) > _RESTARTS:
            raise WorkerFailed(f"the worker died {_RESTARTS} times within {_RESTART_WINDOW:.0f} s")
        try:
            worker = self._execute()
        except OSError as error:
            self._starts.pop()  # nothing was started that could have died
            raise WorkerFailed(f"no worker can be started: {error.strerror or error}") from error
        try:
            self._configure(worker)
            await self._await(worker.ready, "the worker did not get ready", seconds=_START_TIMEOUT)
            if worker.lost:  # since it said that it was ready
                raise WorkerFailed(f"worker {worker.name} is gone ({worker.lost})")
            self._worker = worker
            for sandbox in self._sandboxes.values():
                self._give(worker, sandbox)
            for shared in self._shares.values():
                self._give_shared(worker, shared)
        except BaseException as error:
            if self._worker is worker:
                self._worker = None
            worker.channel.close()
            await _end(worker.process)
            if isinstance(error, Exception) and not isinstance(error, WorkerFailed):
                self._starts.pop()  # it was no fault of the worker's
                raise WorkerFailed(f"a worker could not be given its work: {error}") from error
            raise

    def _execute(self) -> _Worker:
        """Start the process; raises OSError with nothing left open."""
        self._count += 1
        process, self._first = self._first or WorkerProcess(), None
        worker: _Worker
        channel: Channel[Any] = Channel(
            process.channel,
            TO_CONTROL,
            lambda message, fds: self._on_message(worker, message, fds),
            lambda reason: self._on_lost(worker, reason),
        )
        worker = _Worker(f"w{self._count}", process, channel, asyncio.get_running_loop().create_future())
        return worker

    def _configure(self, worker: _Worker) -> None:
        identity = Identity(uid=WORKER_UID, gid=WORKER_UID) if may_become(WORKER_UID) else None
        message = Configure(
            worker=worker.name,
            settings=self._settings,
            identity=identity,
            own_addresses=local_addresses(),
            certificate=self._authority.pem.decode("ascii"),
        )
        payloads = [self._issuer(worker)]
        if self._proxy_credentials is not None:
            payloads.append(read_file(str(self._proxy_credentials)).encode("utf-8"))
        with _sealed(*payloads) as fds:
            worker.channel.send(message, fds)

    def _issuer(self, worker: _Worker) -> bytes:
        issued = issue_worker_intermediate(self._authority, worker.name, time.time())
        worker.renew_at = issued.not_after - _RENEW_BEFORE
        return json.dumps({"chain": issued.chain_pem.decode(), "key": issued.key_pem.decode()}).encode()

    def _give(self, worker: _Worker, sandbox: SandboxState) -> None:
        levels = sandbox.levels_payload(time.monotonic())
        message = Serve(
            sandbox=sandbox.id,
            labels=sandbox.labels,
            traceparent=sandbox.traceparent,
            listeners=tuple(listener.spec for listener in sandbox.listeners),
            placeholders=sandbox.placeholders,
            token=sandbox.token,
            source=sandbox.source,
            interface=sandbox.interface,
            answers=sandbox.answers,
            own=sandbox.own,
        )
        payloads = sandbox.policy_payload(), sandbox.pairs_payload(), levels
        # ChannelBroken: it is dying, and its successor gets the sandbox
        with _sealed(*payloads) as fds, contextlib.suppress(ChannelBroken):
            worker.channel.send(
                message, [*fds, *(listener.socket.fileno() for listener in sandbox.listeners)]
            )

    def _give_shared(self, worker: _Worker, shared: SharedListeners) -> None:
        specs = tuple(listener.spec for listener in shared.listeners)
        with contextlib.suppress(ChannelBroken):  # as above
            worker.channel.send(
                Share(share=shared.id, interface=shared.interface, listeners=specs),
                [listener.socket.fileno() for listener in shared.listeners],
            )

    def _send(
        self, message: Adopt | Revoke | Renew | Recall | Unshare, payloads: Sequence[bytes] = ()
    ) -> None:
        """Tell the worker, if there is one; raises OSError where it could not be told."""
        if self._worker is None:
            return
        # ChannelBroken: it is dying, and its successor starts from the newest state
        with _sealed(*payloads) as fds, contextlib.suppress(ChannelBroken):
            self._worker.channel.send(message, fds)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_LOOK)
            worker = self._worker
            if worker is not None and time.time() > worker.renew_at:  # by the wall: certificates end by it
                before = worker.renew_at
                try:
                    self._send(Renew(), (self._issuer(worker),))
                except OSError as error:
                    worker.renew_at = before  # at the next look
                    say(f"worker {worker.name} was not given its next certificate: {error.strerror}")

    def _on_lost(self, worker: _Worker, reason: str) -> None:
        """The worker is gone or no longer to be believed: write the ends it owes, start another."""
        worker.lost = reason or "lost"
        if not worker.ready.done():  # who starts it hears of it, and starts the next
            worker.ready.set_exception(WorkerFailed(f"worker {worker.name}: {reason}"))
            worker.ready.exception()  # seen, whether or not somebody still waits
        if worker is not self._worker or self._stopping:
            return
        self._worker = None
        self._deaths += 1
        say(f"worker {worker.name} is gone ({reason}); starting another")
        self._task(self._replace(worker))

    def _lose(self, why: str) -> None:
        """End the worker: it would go on by what no longer holds, and its successor starts from the newest state."""
        if (worker := self._worker) is not None:
            worker.channel.close()
            self._on_lost(worker, why)

    async def _replace(self, worker: _Worker) -> None:
        await _end(worker.process)
        self._records.end_all(set(self._sandboxes), Reason.WORKER_DIED)
        pause, told = _FIRST_PAUSE, ""
        while not self._stopping:
            try:
                await self._spawn()
            except WorkerFailed as failure:
                if len(self._starts) > _RESTARTS:
                    self._failed(str(failure))
                    return
                if str(failure) != told:
                    told = str(failure)
                    say(f"{told}; nothing leaves meanwhile")
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    # messages

    def _on_message(self, worker: _Worker, message: ToControl, fds: list[int]) -> None:
        for fd in fds:  # a worker has none to give
            os.close(fd)
        match message:
            case Records():
                self._on_records(worker, message)
            case Pair() | Spent():
                self._keep(worker, message)
            case Ask():
                carried = functools.partial(self._carried_by, worker, message.sandbox)
                self._task(self._desk.answer(worker.channel, message, carried))
            case Ready():
                if not worker.ready.done():
                    worker.ready.set_result(None)
            case Claim():
                self._on_claim(worker, message)
            case Serving() | Sharing() | Gone() | Adopted():
                self._on_done(message)

    def _on_done(self, message: Serving | Sharing | Gone | Adopted) -> None:
        match message:
            case Serving():
                self._met("serving", message.sandbox)
            case Sharing():
                self._met("sharing", message.share)
            case Gone():
                self._met("gone", message.sandbox)
            case Adopted():
                for sandbox_id in message.sandboxes:
                    self._met("adopted", sandbox_id)

    def _keep(self, worker: _Worker, message: Pair | Spent) -> None:
        """Keep what the next worker has to know of a sandbox."""
        sandbox = self._sandboxes.get(message.sandbox)
        if isinstance(message, Spent):
            if sandbox is not None:
                sandbox.keep_level(message.owner, message.kind, message.tokens, time.monotonic())
            return
        if sandbox is not None:
            sandbox.keep_pair(message.name, message.address)
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile
            worker.channel.send(Stored(pair=message.pair))

    def _on_claim(self, worker: _Worker, message: Claim) -> None:
        """Keep a source as a sandbox's, once and for as long as it lives."""
        sandbox = self._sandboxes.get(message.sandbox)
        ok = sandbox is not None and sandbox.source in (None, message.source)
        interface = sandbox.interface if sandbox is not None else ""
        ok = ok and self._sources.claim(message.sandbox, message.source, interface)
        if ok and sandbox is not None and sandbox.source is None:
            sandbox.source = message.source
            self._records.note("sandbox", sandbox, "bound to its source")
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile
            worker.channel.send(Claimed(claim=message.claim, ok=ok))

    def _carried_by(self, worker: _Worker, sandbox_id: str) -> SandboxState | None:
        """Return a sandbox if this worker is the one that carries it."""
        return self._sandboxes.get(sandbox_id) if worker is self._worker else None

    def _on_records(self, worker: _Worker, message: Records) -> None:
        allowed = ChainMap[str, Any](self._sandboxes, self._departed, _NOBODYS)
        if self._records.may_block and not self._stopping:
            self._task(self._commit(worker, message, allowed))
        else:  # BadRecord: what no sound worker sends ends it
            self._written(worker, message, ok=self._records.append(message.records, allowed))

    async def _commit(self, worker: _Worker, message: Records, allowed: Collection[str]) -> None:
        try:
            ok = await self._records.commit(message.records, allowed)
        except BadRecord as error:
            worker.channel.close()
            self._on_lost(worker, str(error))
        else:
            self._written(worker, message, ok=ok)

    def _written(self, worker: _Worker, message: Records, *, ok: bool) -> None:
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile
            worker.channel.send(Written(batch=message.batch, ok=ok))

    def recorded(self, sandbox_id: str) -> Mapping[Kind, int]:
        """Return what the records of a sandbox account for, once nothing more is written of it; later nothing is known of it."""
        return self._records.recorded(sandbox_id)

    @property
    def deaths(self) -> int:
        """How many workers have died so far."""
        return self._deaths

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Write control's own records; a journal that cannot take them is complained of, never fatal."""
        self._records.write(records)

    # waiting

    def _expect(self, what: str, sandbox_id: str) -> asyncio.Future[None]:
        return self._waiting.setdefault((what, sandbox_id), asyncio.get_running_loop().create_future())

    def _met(self, what: str, sandbox_id: str) -> None:
        if (future := self._waiting.pop((what, sandbox_id), None)) is not None and not future.done():
            future.set_result(None)

    async def _await(
        self, future: asyncio.Future[None], complaint: str, seconds: float = _START_TIMEOUT
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(future)
        except TimeoutError:
            raise WorkerFailed(complaint) from None

    def _task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.contextmanager
def _sealed(*payloads: bytes) -> Iterator[list[int]]:
    """Sealed copies of payloads as descriptors, closed afterwards; raises OSError with none left open."""
    fds: list[int] = []
    try:
        for payload in payloads:
            fds.append(sealed(payload))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


async def _end(process: WorkerProcess) -> None:
    process.kill()
    await process.wait()
