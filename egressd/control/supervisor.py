"""The supervisor: the workers of this installation and the sandboxes they carry, what they record, and who is where.

There are as many posts as workers; a sandbox belongs to exactly one, where the fewest are. The shared listeners of one network
are all at one post. Its sandboxes are there too, unless nothing but connections comes by those listeners: these are handed on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from egressd.control.ca import Authority
from egressd.control.desk import Approvals, Desk
from egressd.control.flowtable import FlowTable
from egressd.control.lending import Lending
from egressd.control.neighbours import spreads
from egressd.control.post import Post
from egressd.control.process import WorkerProcess
from egressd.control.reconciliation import Kind
from egressd.control.recording import Recording
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import SharedListeners, Sources
from egressd.control.voice import say
from egressd.control.worker import WORKER_UID, Outfit, WorkerFailed
from egressd.gate.settings import Settings
from egressd.journal.writer import Journal
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason

__all__ = ["WORKER_UID", "Supervisor", "WorkerFailed"]

ROLL_SECONDS: Final = 30.0
"""Seconds in which a worker that is replaced ends what it has open."""
_RENEW_LOOK: Final = 60.0


class Supervisor:
    """`workers` workers and the sandboxes they carry. `failed` is called when one cannot be kept alive."""

    def __init__(
        self,
        settings: Settings,
        authority: Authority,
        journal: Journal,
        *,
        workers: int = 1,
        failed: Callable[[str], None] = say,
        first: WorkerProcess | None = None,
        lending: Lending | None = None,
        sources: Sources | None = None,
        proxy_credentials: Path | None = None,
        approvals: Approvals | None = None,
    ) -> None:
        """Nothing runs before `start`, but for `first`: a process that was started early, to be the first worker.

        Without `lending` no worker gets a credential, without `approvals` no person is asked for anything.
        `sources` are those of every supervisor, where there are several.
        `proxy_credentials` is the file with `user:password` for the proxy in the settings, read for each worker anew.
        """
        self._outfit = Outfit(settings, authority, proxy_credentials)
        self._records = Recording(journal)
        self._desk = Desk(lending, approvals)
        self._sources = sources or Sources()
        self._posts = [
            Post(
                f"w{number}",
                self._outfit,
                self._records,
                Desk(
                    lending, approvals
                ),  # one each, so that no worker's questions keep another's from being answered
                self._sources,
                failed,
                first if number == 1 else None,
            )
            for number in range(1, workers + 1)
        ]
        self._at: dict[str, Post] = {}
        self._networks: dict[str, Post] = {}
        self._shares: dict[str, Post] = {}
        self._flows = FlowTable()
        self._rolling = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def worker_pid(self) -> int | None:
        """The pid of the first worker's process, None while there is none."""
        return self.worker_pids[0]

    @property
    def worker_pids(self) -> tuple[int | None, ...]:
        """The pid of each post's worker, None where there is none now."""
        return tuple(post.worker.process.pid if post.worker is not None else None for post in self._posts)

    @property
    def deaths(self) -> int:
        """How many workers have died so far."""
        return sum(post.deaths for post in self._posts)

    async def start(self) -> None:
        """Start the workers and return once all are ready; raises WorkerFailed."""
        started = await asyncio.gather(*(post.start() for post in self._posts), return_exceptions=True)
        for problem in started:
            if problem is not None:
                raise problem
        self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def add(self, sandbox: SandboxState) -> None:
        """Have the sandbox carried; returns once its sockets are served.

        Raises WorkerFailed, and ValueError where its source is another's.
        """
        source, interface = sandbox.source, sandbox.interface
        if source is not None and not self._sources.claim(sandbox.id, source, interface):
            raise ValueError(f"{sandbox.source} is the source of another sandbox")
        sandbox.root = sandbox.root or self._outfit.root
        post = self._at[sandbox.id] = self._place(sandbox)
        self._records.begin(sandbox.id)
        self._records.note("sandbox", sandbox, "created")
        await post.add(sandbox)
        if (home := self._home_of(sandbox)) not in (None, post):
            assert home is not None
            await home.meet(sandbox, post)

    async def adopt(self, policies: dict[str, EffectivePolicy]) -> None:
        """Put sandboxes (by id) under new policies; returns once new attempts are judged by them. Raises WorkerFailed."""
        changed: dict[tuple[str, str], list[str]] = {}
        for sandbox_id, policy in policies.items():
            post = self._at.get(sandbox_id)
            sandbox = post.sandboxes.get(sandbox_id) if post is not None else None
            if post is not None and sandbox is not None and sandbox.policy.digest() != policy.digest():
                sandbox.policy = policy
                self._records.note("policy", sandbox, "adopted")
                changed.setdefault((post.name, policy.digest()), []).append(sandbox_id)
        told = [self._at[ids[0]].adopt(policies[ids[0]], ids) for ids in changed.values()]
        for problem in await asyncio.gather(*told, return_exceptions=True):
            if problem is not None:
                raise problem

    async def remove(self, sandbox_id: str, *, shutdown: bool = False) -> None:
        """End the sandbox: flows cut, listeners closed here and in the worker, ends written."""
        post = self._at.get(sandbox_id)
        sandbox = post.sandboxes.get(sandbox_id) if post is not None else None
        if post is None or sandbox is None:
            return
        reason = Reason.SHUTDOWN if shutdown else Reason.REVOKED
        home = self._home_of(sandbox)
        parting = [home.part(sandbox)] if home not in (None, post) and home is not None else []
        await asyncio.gather(post.remove(sandbox, reason), *parting)
        if self._at.pop(sandbox_id, None) is None:  # somebody else was first
            return
        self._records.end_all({sandbox_id}, reason)
        self._records.note("sandbox", sandbox, "gone")
        self._sources.release(sandbox_id)
        for listener in sandbox.listeners:
            listener.socket.close()
        await self._desk.end(sandbox_id)  # last: nothing of it is under way any more

    def find(self, sandbox_id: str) -> SandboxState | None:
        """Return a sandbox that is carried, None for any other."""
        post = self._at.get(sandbox_id)
        return post.sandboxes.get(sandbox_id) if post is not None else None

    def stand(self, sandbox_id: str) -> None:
        """Tell a sandbox's workers how its requests for access stand: what went by a grant that is gone is cut."""
        post = self._at.get(sandbox_id)
        sandbox = post.sandboxes.get(sandbox_id) if post is not None else None
        if post is not None and sandbox is not None:
            post.stand(sandbox)

    def recall(self, leases: Sequence[str]) -> None:
        """Have these leases (by id) ended, and what is under way with them."""
        for post in self._posts:
            post.recall(leases)

    async def share(self, shared: SharedListeners) -> None:
        """Have listeners served for every sandbox that proves itself there; raises WorkerFailed."""
        post = self._shares[shared.id] = self._home(shared.interface)
        await post.share(shared)

    async def unshare(self, shared_id: str) -> None:
        """Close shared listeners, here and in the worker; connections whose sandbox was known go on."""
        post = self._shares.pop(shared_id, None)
        shared = post.shares.get(shared_id) if post is not None else None
        if post is None or shared is None:
            return
        await post.unshare(shared_id)
        for listener in shared.listeners:
            listener.socket.close()

    async def roll(self, seconds: float = ROLL_SECONDS) -> None:
        """Replace every worker by a fresh one, one after the other, without a refused connection.

        A worker that is replaced ends what it has open within `seconds`. Raises WorkerFailed where a fresh one cannot be started;
        the one before serves on then.
        """
        async with self._rolling:
            for post in self._posts:
                await post.roll(seconds)

    async def stop(self) -> None:
        """End every sandbox and the workers; afterwards no record of a worker is written any more."""
        for shared_id in tuple(self._shares):
            await self.unshare(shared_id)
        await asyncio.gather(*(self.remove(sandbox_id, shutdown=True) for sandbox_id in tuple(self._at)))
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for post in self._posts:
            await post.stop()

    def follow(self, authority: Authority) -> None:
        """Have another authority sign for the sandboxes that are added from now on; those that are there notice nothing."""
        self._outfit.follow(authority)

    def recorded(self, sandbox_id: str) -> Mapping[Kind, int]:
        """Return what the records of a sandbox account for, once nothing more is written of it; later nothing is known of it."""
        return self._records.recorded(sandbox_id)

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Write control's own records; a journal that cannot take them is complained of, never fatal."""
        self._records.write(records)

    def recorded_all(self, records: Sequence[dict[str, Any]]) -> bool:
        """Write control's own records; returns whether they are in the journal."""
        return self._records.keep(records)

    def _place(self, sandbox: SandboxState) -> Post:
        home = self._home_of(sandbox)
        if home is not None and not self._spreads(sandbox.interface):
            return home
        return min(self._posts, key=lambda post: (len(post.sandboxes), post is not home))

    def _home_of(self, sandbox: SandboxState) -> Post | None:
        """Return where the listeners are that a sandbox shares with others, if it does."""
        if sandbox.token is None and sandbox.source is None:
            return None
        return self._home(sandbox.interface)

    def _spreads(self, network: str) -> bool:
        shares = [each for each in self._home(network).shares.values() if each.interface == network]
        return spreads([listener for each in shares for listener in each.listeners])

    def _home(self, network: str) -> Post:
        """Return where the shared listeners of a network (an interface, or all without one) and its sandboxes are."""
        if network not in self._networks:
            taken = list(self._networks.values())
            self._networks[network] = min(
                self._posts, key=lambda post: (taken.count(post), len(post.sandboxes))
            )
        return self._networks[network]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_LOOK)
            if (full := self._flows.look()) is not None:
                say(f"the kernel's table of connections was full: {full.count} packets were dropped")
                self._records.write([full.as_dict()])
            self._outfit.keep({box.root for post in self._posts for box in post.sandboxes.values()})
            for worker in [worker for post in self._posts for worker in post.workers]:
                try:
                    self._outfit.renew_all(worker, time.time())
                except OSError as error:
                    say(f"worker {worker.name} was not given its next certificate: {error.strerror}")
