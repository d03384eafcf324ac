"""A post: the place of one worker, and the sandboxes that belong to whoever has it.

Whoever has it may die, and the next one goes on with the sandboxes' names and budgets; or it steps aside for a successor, and
ends what is open. Meanwhile connections wait in the backlog of the sockets that control holds; nothing leaves and nobody is
refused. Sandboxes of other posts notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from pydantic import BaseModel

from egressd.control.desk import Desk
from egressd.control.hearing import Hearing
from egressd.control.neighbours import Arrival, Arrivals, Host, Neighbours
from egressd.control.process import WorkerProcess
from egressd.control.recording import Recording
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import SharedListeners, Sources
from egressd.control.voice import say
from egressd.control.worker import Outfit, Worker, WorkerFailed, within
from egressd.gate.channel import Channel
from egressd.gate.messages import (
    TO_CONTROL,
    Adopt,
    Departed,
    Drain,
    Recall,
    Revoke,
    Stand,
    Unshare,
)
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason

_AT_ONCE: Final = 1000
"""Ids in one message."""
_HANDED: Final = 16
"""Sandboxes that are handed over and not yet served: their descriptors are open twice."""
_READY_TIMEOUT: Final = 60.0
"""Seconds for a worker to import everything, on a machine that has much else to do; one that dies is found out at once."""
_CUT_TIMEOUT: Final = 3.0
_STEP_TIMEOUT: Final = 8.0
"""Seconds for a worker to step aside: longer than names take to be stored."""
_RESTARTS: Final = 8
_RESTART_WINDOW: Final = 60.0
_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 2.0
"""Seconds between two starts of which the first failed, doubled each time: descriptors or memory may be back by then."""
_LONG_PAUSE: Final = 30.0
"""Seconds after which a worker is tried again whose predecessors died too often."""


class _DiedTooOften(WorkerFailed):
    """No worker is started here for a while: whatever ends them would end the next one too."""


class Post:
    """The sandboxes of one worker at a time. `failed` is called when no worker can be kept alive here."""

    def __init__(
        self,
        name: str,
        outfit: Outfit,
        records: Recording,
        desk: Desk,
        sources: Sources,
        failed: Callable[[str], None],
        first: WorkerProcess | None = None,
    ) -> None:
        """Nothing runs before `start`, but for `first`: a process that was started early."""
        self.name = name
        self.deaths = 0
        self.sandboxes: dict[str, SandboxState] = {}
        self.shares: dict[str, SharedListeners] = {}
        self.worker: Worker | None = None
        self._outfit = outfit
        self._records = records
        self._failed = failed
        self._first = first
        self._leaving: set[Worker] = set()
        self._starts: list[float] = []
        self._count = 0
        self._filling = False  # whoever fills the post sees by itself that a worker was lost
        self._stopping = False
        self._neighbours = Neighbours(self.shares)
        self._arrivals = Arrivals()
        self._hearing = Hearing(self, records, desk, sources, self._task, self._neighbours)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Whoever has the post, and those that end what they have open."""
        return (*([self.worker] if self.worker is not None else []), *self._leaving)

    async def start(self) -> None:
        """Start the worker and return once it is ready; raises WorkerFailed."""
        self._filling = True
        try:
            await self._fill()
        finally:
            self._filling = False

    async def add(self, sandbox: SandboxState) -> None:
        """Have a sandbox carried from now on; returns once its sockets are served. Raises WorkerFailed."""
        self.sandboxes[sandbox.id] = sandbox
        self._hearing.enter(sandbox.id)
        serving = self._hearing.expect("serving", sandbox.id)
        if self.worker is not None:
            self._outfit.give(self.worker, sandbox)
        await within(serving, "the worker did not serve the sandbox")

    async def adopt(self, policy: EffectivePolicy, ids: Sequence[str]) -> None:
        """Have sandboxes, whose policy is this one by now, judged by it; raises WorkerFailed."""
        payload = policy.lines()
        waits: list[tuple[asyncio.Future[None], Worker]] = []
        for some in _portions(ids):
            waits += [(worker.expect("adopted", some[0]), worker) for worker in self.workers]
            self._tell(Adopt(sandboxes=some), "new rules", (payload,))
        for wait, worker in waits:
            try:
                await within(wait, "the worker did not take the policy")
            except WorkerFailed:
                self.lose(worker, "it did not take new rules")  # its successor starts from them
                raise

    async def remove(self, sandbox: SandboxState, reason: Reason) -> None:
        """Have everything of a sandbox ended here; returns once it is, or after a few seconds."""
        waits = [(worker.expect("gone", sandbox.id), worker) for worker in self.workers]
        shutdown = reason is Reason.SHUTDOWN
        self._tell(
            Revoke(sandbox=sandbox.id, reason="shutdown" if shutdown else "revoked"), "an ended sandbox"
        )
        for wait, worker in waits:
            try:
                await within(wait, "the worker did not let the sandbox go", _CUT_TIMEOUT)
            except WorkerFailed:  # it may still carry flows of a sandbox that has ended
                self.lose(worker, "it did not let a sandbox go")
        if self.sandboxes.pop(sandbox.id, None) is not None:
            self._hearing.leave(sandbox.id)
        for worker in self.workers:
            worker.given.discard(sandbox.id)
        self._arrivals.settle(self.worker, self.sandboxes)

    def stand(self, sandbox: SandboxState) -> None:
        """Have it known how a sandbox's requests for access stand."""
        self._tell(Stand(sandbox=sandbox.id), "an approval", (sandbox.standing_payload(),))

    def recall(self, leases: Sequence[str]) -> None:
        """Have these leases (by id) ended, and what is under way with them."""
        for some in _portions(leases):
            self._tell(Recall(leases=some), "ended leases")

    async def share(self, shared: SharedListeners) -> None:
        """Have listeners served for every sandbox that proves itself there; raises WorkerFailed."""
        self.shares[shared.id] = shared
        sharing = self._hearing.expect("sharing", shared.id)
        if self.worker is not None:
            self._outfit.share(self.worker, shared)
        await within(sharing, "the worker did not serve the shared listeners")

    async def unshare(self, shared_id: str) -> None:
        """Have shared listeners closed; connections whose sandbox was known go on."""
        self.shares.pop(shared_id, None)
        if self.worker is not None:
            closed = self.worker.expect("sharing", shared_id)
            self.worker.given.discard(shared_id)
            self._tell(Unshare(share=shared_id), "closed listeners")
            with contextlib.suppress(WorkerFailed):
                await within(closed, "the worker did not close the shared listeners", _CUT_TIMEOUT)

    async def meet(self, sandbox: SandboxState, host: Host) -> None:
        """Know a sandbox that another post carries, and that comes by shared listeners here. Raises WorkerFailed."""
        self._neighbours.enter(sandbox, host)
        self._hearing.enter(sandbox.id)
        known = self._hearing.expect("serving", sandbox.id)
        if self.worker is not None:
            self._neighbours.tell(self.worker, sandbox)
        await within(known, "the worker did not take note of a neighbour")

    async def part(self, sandbox: SandboxState) -> None:
        """Know it no longer; returns once none of its connections is handed on."""
        waits = [(worker.expect("gone", sandbox.id), worker) for worker in self.workers]
        self._neighbours.leave(sandbox.id)
        self._tell(Departed(sandbox=sandbox.id), "an ended neighbour")
        for wait, worker in waits:
            try:
                await within(wait, "the worker did not let a neighbour go", _CUT_TIMEOUT)
            except WorkerFailed:
                self.lose(worker, "it did not let a neighbour go")
        self._hearing.leave(sandbox.id)
        for worker in self.workers:
            worker.given.discard(sandbox.id)

    def welcome(self, arrival: Arrival) -> None:
        """Have a connection of a sandbox here taken that another post's worker accepted."""
        self._arrivals.take(arrival, self.worker)

    async def roll(self, seconds: float) -> None:
        """Put a fresh worker in the place of the one there is; that one ends what is open within `seconds`.

        Returns once the fresh one serves every sandbox. Raises WorkerFailed, and all stays as it was.
        """
        async with self._turn:
            successor = await self._spawn(counted=False)
            old = self.worker
            if (
                old is None or self._filling or self._stopping
            ):  # it has died: a fresh one is there or on its way
                successor.channel.close()
                await successor.end()
                return
            await asyncio.shield(self._task(self._change(old, successor, seconds)))

    async def _change(self, old: Worker, successor: Worker, seconds: float) -> None:
        self.worker = None  # what is added from here on is the successor's
        self._leaving.add(old)
        try:
            try:
                old.tell(Drain(seconds=seconds))
                await within(old.drained, "no answer", _STEP_TIMEOUT)
            except (OSError, WorkerFailed) as error:  # it has died, or hangs: then what is open ends here
                say(f"worker {old.name} does not step aside ({error}); it is ended")
                old.process.kill()
            self._task(self._see_off(old, seconds))
            await self._take_over(successor)
        except asyncio.CancelledError:  # all is being stopped, and nobody else knows of this one
            if self.worker is not successor:
                successor.channel.close()
                await successor.end()
            raise

    async def stop(self) -> None:
        """End every worker; afterwards nothing of one is written any more."""
        self._stopping = self._hearing.stopping = True
        self._arrivals.settle(None, ())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers, self.worker = self.workers, None
        for worker in workers:
            await worker.end()
            worker.channel.finish()  # what it said while it was waited for in vain
            self._records.end_worker(worker.name, Reason.SHUTDOWN)

    # who has the post

    async def _fill(self) -> None:
        """Start a worker and give it everything; raises WorkerFailed with none there."""
        worker = await self._spawn(counted=True)
        self.worker = worker
        try:
            await self._give_all(worker)
            if worker.lost:
                raise WorkerFailed(f"worker {worker.name} is gone ({worker.lost})")
        except BaseException as error:
            if self.worker is worker:
                self.worker = None
            worker.channel.close()
            worker.lose("could not be given its work")
            await worker.end()
            self._records.end_worker(worker.name, Reason.WORKER_DIED)
            if isinstance(error, Exception) and not isinstance(error, WorkerFailed):
                self._starts.pop()  # it was no fault of the worker's
                raise WorkerFailed(f"a worker could not be given its work: {error}") from error
            raise

    async def _spawn(self, *, counted: bool) -> Worker:
        """Start a worker that is ready and has nothing yet; raises WorkerFailed."""
        now = time.monotonic()
        self._starts = [start for start in self._starts if now - start < _RESTART_WINDOW]
        if counted and len(self._starts) >= _RESTARTS:
            raise _DiedTooOften(f"the worker died {_RESTARTS} times within {_RESTART_WINDOW:.0f} s")
        if counted:
            self._starts.append(now)
        try:
            worker = self._execute()
        except OSError as error:
            if counted:
                self._starts.pop()  # nothing was started that could have died
            raise WorkerFailed(f"no worker can be started: {error.strerror or error}") from error
        try:
            self._outfit.configure(worker)
            await within(worker.ready, "the worker did not get ready", _READY_TIMEOUT)
            if worker.lost:  # since it said that it was ready
                raise WorkerFailed(f"worker {worker.name} is gone ({worker.lost})")
        except BaseException as error:
            worker.channel.close()
            await worker.end()
            if isinstance(error, Exception) and not isinstance(error, WorkerFailed):
                if counted:
                    self._starts.pop()  # it was no fault of the worker's
                raise WorkerFailed(f"a worker could not be given its work: {error}") from error
            raise
        return worker

    def _execute(self) -> Worker:
        """Start the process; raises OSError with nothing left open."""
        self._count += 1
        process, self._first = self._first or WorkerProcess(), None
        worker: Worker
        channel: Channel[Any] = Channel(
            process.channel,
            TO_CONTROL,
            lambda message, fds: self._hearing.hear(worker, message, fds),
            lambda reason: self._on_lost(worker, reason),
        )
        loop = asyncio.get_running_loop()
        name = f"{self.name}-{self._count}"
        worker = Worker(name, process, channel, loop.create_future(), loop.create_future())
        return worker

    async def _take_over(self, successor: Worker) -> None:
        """Give a ready worker the post."""
        self._filling = True
        self.worker = successor
        try:
            await self._give_all(successor)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the post must be filled
            self.lose(successor, f"could not be given its work: {error}")
        finally:
            self._filling = False
        if successor.lost and not self._stopping:
            self._task(self._replace(successor))

    async def _see_off(self, old: Worker, seconds: float) -> None:
        """Wait until a worker that stepped aside has ended."""
        gone = old.expect("end", "")
        if not old.lost:
            with contextlib.suppress(WorkerFailed):
                await within(gone, "", seconds + _STEP_TIMEOUT)
        orderly = old.drained.done() and old.drained.exception() is None
        await old.end()
        old.channel.finish()
        self._records.end_worker(old.name, Reason.SHUTDOWN if orderly else Reason.WORKER_DIED)
        self._leaving.discard(old)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        """The worker is gone or no longer to be believed: write the ends it owes, start another."""
        worker.lose(reason)
        if worker is not self.worker or self._stopping:
            return
        self.worker = None
        self.deaths += 1
        say(f"worker {worker.name} is gone ({worker.lost}); starting another")
        if not self._filling:
            self._task(self._replace(worker))

    def lose(self, worker: Worker, why: str) -> None:
        """End a worker: it would go on by what no longer holds, and its successor starts from the newest state."""
        worker.channel.close()
        self._on_lost(worker, why)
        worker.process.kill()

    async def _replace(self, worker: Worker) -> None:
        self._filling = True
        try:
            await worker.end()
            self._records.end_worker(worker.name, Reason.WORKER_DIED)
            await self._keep_filling()
        finally:
            self._filling = False

    async def _keep_filling(self) -> None:
        pause, told = _FIRST_PAUSE, ""
        while not self._stopping:
            try:
                await self._fill()
            except _DiedTooOften as failure:
                self._failed(str(failure))
                pause = _LONG_PAUSE
            except WorkerFailed as failure:
                if str(failure) != told:
                    told = str(failure)
                    say(f"{told}; nothing leaves meanwhile")
            else:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    # what it is told

    async def _give_all(self, worker: Worker) -> None:
        """Hand everything over, a few sandboxes at a time; ends early where the worker does. Raises OSError."""
        handed: deque[asyncio.Future[None]] = deque()
        for sandbox in (*self.sandboxes.values(), *self._neighbours.states):
            if worker.lost:
                return
            neighbour = self._neighbours.find(sandbox.id) is sandbox
            if sandbox.id in worker.given or not (neighbour or sandbox.id in self.sandboxes):
                continue
            handed.append(worker.expect("serving", sandbox.id))
            (self._neighbours.tell if neighbour else self._outfit.give)(worker, sandbox)
            if len(handed) >= _HANDED:
                await within(handed.popleft(), "the worker did not serve a sandbox")
        for serving in handed:
            await within(serving, "the worker did not serve a sandbox")
        for shared in tuple(self.shares.values()):  # last: whoever comes by them is known by then
            self._outfit.share(worker, shared)
        self._arrivals.settle(worker, self.sandboxes)

    def _tell(self, message: BaseModel, what: str, payloads: Sequence[bytes] = ()) -> None:
        """Tell every worker of the post; one that cannot be told is ended."""
        for worker in self.workers:
            try:
                worker.tell(message, payloads)
            except OSError as error:
                self.lose(worker, f"cannot be told of {what}: {error.strerror}")

    def _task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _portions(ids: Iterable[str]) -> list[tuple[str, ...]]:
    every = tuple(ids)
    return [every[start : start + _AT_ONCE] for start in range(0, len(every), _AT_ONCE)]
