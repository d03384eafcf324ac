"""The roster: every sandbox of a daemon from the first word about it to the last trace.

One task ends a sandbox, whoever asks for it and however often, and nothing but this process's death interrupts it. Everything
that a sandbox holds hangs on its life: listeners, worker state, leases, source address, timer, the file on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from egressd.control.estate import Estate, Remains
from egressd.control.keyring import Exposed, Keyring
from egressd.control.lending import Lending
from egressd.control.lives import Ending, Life
from egressd.control.reconciliation import losses
from egressd.control.rulebook import Rulebook, effective
from egressd.control.sandboxes import SandboxState, new_sandbox_id
from egressd.control.secrecy import secret_variables
from egressd.control.supervisor import Supervisor
from egressd.control.surroundings import BadInput
from egressd.control.voice import say
from egressd.control.wirings import NotWired, Order, Wired, Wiring, WiringName
from egressd.credentials.providers.base import take_variables
from egressd.journal.record import Record, new_id
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason
from egressd.wiring.drops import Dropped
from egressd.wiring.errors import WiringError
from egressd.wiring.ruleset import Counted
from egressd.wiring.spec import SandboxSpec

_REMEMBERED: Final = 1_000
"""Lives that are over and still told of."""
_LOOK: Final = 30.0
"""Seconds between two looks at a clock that somebody may have set."""


class Full(Exception):
    """There are as many sandboxes as there may be, or the daemon is ending."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sandbox as somebody asks for it; `ttl` in seconds, the rest as in `wirings.Order`."""

    profile: str
    wiring: WiringName
    labels: Mapping[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    ttl: float | None = None
    source: str | None = None
    mac: str | None = None
    port: str | None = None
    pid: int | None = None
    netns: str | None = None


class Roster:
    """The living, and the last that were. `wirings` are those that the daemon makes itself."""

    def __init__(
        self,
        supervisor: Supervisor,
        estate: Estate,
        rules: Rulebook,
        file: CredentialsFile,
        lending: Lending,
        *,
        most: int,
        wirings: Collection[Wiring] = (),
    ) -> None:
        """Nobody lives yet. `file` is what `lending` goes by; it defines nothing where there is none."""
        self._supervisor = supervisor
        self._estate = estate
        self.rules: Rulebook = rules
        self.file = file
        self._lending = lending
        self._most = most
        self._wirings = {wiring.name: wiring for wiring in wirings}
        self._living: dict[str, Life] = {}
        self._gone: OrderedDict[str, Life] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False
        """Set when nobody is let in any more."""

    @property
    def living(self) -> tuple[Life, ...]:
        """Every sandbox that is not gone, oldest first."""
        return tuple(self._living.values())

    def find(self, sandbox: str) -> Life | None:
        """Return a life by its id, also one of the last that are over."""
        return self._living.get(sandbox) or self._gone.get(sandbox)

    def comes_from(self, address: str) -> bool:
        """Whether an address is a sandbox's."""
        return any(life.source == address for life in self._living.values())

    # beginning

    def enter(self, wanted: Wanted) -> Life:
        """Begin a life; raises Full, BadInput, OSError. Whoever begins it must have it carried or ended."""
        if self.closed:
            raise Full("the daemon is ending")
        if len(self._living) >= self._most:
            raise Full(f"there are {self._most} sandboxes (serve.sandboxes)")
        keyring = Keyring(self.file, effective(self.rules, wanted.profile, wanted.labels))
        if missing := keyring.missing():
            raise BadInput(
                f"the profile {wanted.profile} attaches what no file defines: {', '.join(missing)}"
            )
        life = Life(
            new_sandbox_id(),
            self._estate.next_generation(),
            wanted.profile,
            wanted.wiring,
            keyring,
            dict(wanted.labels),
            wanted.traceparent,
        )
        if wanted.ttl is not None:
            life.expires, life.until = life.created + wanted.ttl, time.monotonic() + wanted.ttl
        self._estate.note(Remains(life.id, life.wiring, life.profile, {}))
        self._living[life.id] = life
        self._look(life)
        return life

    async def create(self, wanted: Wanted) -> Life:
        """Make a sandbox; returns it ready.

        Raises Full, BadInput, NotWired, WorkerFailed, WiringError, OSError: it is gone then.
        """
        wiring = self._wirings.get(wanted.wiring)
        if wiring is None:
            raise NotWired(*_unoffered(wanted.wiring), asked=True)
        life = self.enter(wanted)
        life.made.clear()
        return await self._finish(self._make(life, wiring, wanted))

    async def _make(self, life: Life, wiring: Wiring, wanted: Wanted) -> Life:
        order = Order(
            id=life.id,
            generation=life.generation,
            profile=life.profile,
            labels=life.labels,
            source=wanted.source,
            mac=wanted.mac,
            port=wanted.port,
            pid=wanted.pid,
            netns=wanted.netns,
        )
        try:
            self._estate.note(Remains(life.id, wiring.name, life.profile, wiring.traces(order)))
            try:
                wired = await wiring.make(order)
            finally:
                life.made.set()  # from here to `carry` nothing else runs
            await self.carry(life, wired)
            self.ready(life)
            if life.stage != "ready":
                raise NotWired("the sandbox has ended meanwhile", asked=True)
        except BaseException:
            await self.end(life, "failed")
            raise
        return life

    async def carry(self, life: Life, wired: Wired, spec: SandboxSpec | None = None) -> None:
        """Have it served; from here on the life owns `wired`. Raises WorkerFailed, NotWired; whoever began it ends it then."""
        if life.stage == "gone":
            await _undone(wired)
            raise NotWired("the sandbox has ended meanwhile", asked=True)
        life.wired, life.spec = wired, spec
        if life.over is not None:  # which closes it
            raise NotWired("the sandbox has ended meanwhile", asked=True)
        life.state = SandboxState(
            life.id,
            life.keyring.policy,
            wired.listeners,
            life.labels,
            life.traceparent,
            token=wired.token,
            source=wired.source,
            interface=wired.interface,
            answers=wired.answers,
            own=wired.own,
            placeholders=life.keyring.placeholders,
            expires=life.expires,
        )
        try:
            await self._supervisor.add(life.state)
        except ValueError as error:  # its source is another's
            life.state = None
            raise NotWired(str(error), asked=True) from None

    def ready(self, life: Life) -> None:
        """It may be used from now on; nothing where it has ended meanwhile."""
        if life.stage == "creating":
            life.stage = "ready"
            self._supervisor.write([life.note("ready")])

    # ending

    async def end(self, life: Life, ending: Ending, by: str = "") -> Life:
        """End it, or wait until it is gone; returns it. `by` says who asked, for the record. Cancelling does not stop it."""
        if life.over is None:
            life.stage, life.ending = "ending", ending
            life.over = self._task(self._end(life, by))
        await asyncio.shield(life.over)
        return life

    async def end_all(self, ending: Ending, by: str = "") -> int:
        """End everybody who lives now; returns how many."""
        lives = self.living
        await asyncio.gather(*(self.end(life, ending, by) for life in lives))
        return len(lives)

    async def _end(self, life: Life, by: str) -> None:
        if life.timer is not None:
            life.timer.cancel()
        shutdown = life.ending == "drained"
        if life.state is not None or life.ending == "revoked":
            joined = ": " if life.ending == "ended" else " by "  # by itself, and why
            self._supervisor.write([life.note(f"{life.ending}{joined + by if by else ''}")])
        await life.made.wait()
        try:
            if life.wired is not None:
                halted = self._task(life.wired.halt(life.ending or "ended"))
                if life.state is not None:
                    await self._supervisor.remove(life.id, shutdown=shutdown)
                await halted
                self._reconcile(life, await life.wired.close(), shutdown=shutdown)
        except Exception as error:  # noqa: BLE001 -- whatever fails, the rest is taken down, and somebody must hear of it
            say(f"{life.id}: not everything could be taken down: {type(error).__name__}: {error}")
        else:
            self._estate.forget(life.id)  # else what is left is looked for at the next start
        for listener in life.wired.listeners if life.wired is not None else ():
            listener.socket.close()
        life.stage, life.ended = "gone", time.time()
        del self._living[life.id]
        self._gone[life.id] = life
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def _reconcile(self, life: Life, counted: Counted | Dropped | None, *, shutdown: bool) -> None:
        """Hold the kernel's own counts against the records (law 8)."""
        found = self._supervisor.recorded(life.id)
        if counted is not None:
            reason = Reason.SHUTDOWN if shutdown else Reason.REVOKED
            if self._supervisor.deaths:
                reason = Reason.WORKER_DIED
            lost = losses(life.id, counted, found, reason)
            self._supervisor.write([record.as_dict() for record in lost])

    def _look(self, life: Life) -> None:
        """End it when its time is up, and look again until then."""
        if life.until is None or life.over is not None:
            return
        if life.expired():
            self._task(self.end(life, "expired"))
            return
        left = min(life.until - time.monotonic(), (life.expires or 0.0) - time.time(), _LOOK)
        life.timer = asyncio.get_running_loop().call_later(max(left, 0.001), self._look, life)

    async def sweep(self) -> int:
        """Take down what killed predecessors left; returns of how many sandboxes."""
        count = 0
        for remains in tuple(self._estate.remains()):
            wiring = next((one for name, one in self._wirings.items() if name == remains.wiring), None)
            try:
                if wiring is not None:
                    await wiring.sweep(remains.traces)
                elif remains.traces:
                    raise NotWired(f"this daemon has no wiring {remains.wiring!r}")
            except (WiringError, NotWired, OSError) as error:
                say(f"{remains.id}, left by a daemon that was killed, could not be taken down: {error}")
                continue
            self._supervisor.write([_left(remains)])
            self._estate.forget(remains.id)
            count += 1
        return count

    # rules

    async def adopt(self, rules: Rulebook, file: CredentialsFile) -> list[str]:
        """Put everybody under other rules, whose credentials are `file`'s; returns what the operator is told.

        Raises BadInput and changes nothing where somebody cannot live under them, WorkerFailed where a worker does not take
        them.
        """
        lives = [life for life in self.living if life.over is None]
        policies = {life.id: self._policy(life, rules, file) for life in lives}
        notes = []
        if file != self.file:
            self._supervisor.recall([lease.id for lease in self._lending.replace(file)])
            take_variables(secret_variables(file) - secret_variables(self.file))
            notes.append("credentials reloaded")
        self.rules, self.file = rules, file
        for life in lives:
            notes += [f"{life.id}: {note}" for note in life.keyring.follow(file, policies[life.id])]
        changed = {
            life.id: policies[life.id] for life in lives if life.state is not None
        }  # who is not carried yet will be under the new ones
        await self._supervisor.adopt(changed)
        return notes

    @staticmethod
    def _policy(life: Life, rules: Rulebook, file: CredentialsFile) -> EffectivePolicy:
        try:
            policy = effective(rules, life.profile, life.labels)
            life.keyring.admit(file, policy, life.spec)
        except BadInput as error:
            raise BadInput(f"{life.id} lives under {life.profile}, and {error}") from None
        except Exposed as exposed:
            raise BadInput(f"{life.id}: {exposed}\nhint: `egressd sandbox revoke {life.id}` first") from None
        return policy

    # tasks

    async def _finish[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end, whether or not somebody still waits for it."""
        return await asyncio.shield(self._task(work))

    def _task[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits hears of it; nobody may


def _unoffered(wiring: str) -> tuple[str, str]:
    if wiring == "explicit":
        return (
            "this daemon has no listeners for the wiring explicit",
            "set explicit.addresses in egressd.yaml",
        )
    if wiring == "namespace":
        return (
            "a sandbox of the wiring namespace is made by `egressd run`, or of a container by root's daemon",
            "`egressd run` attaches to this daemon by itself",
        )
    return f"this daemon does not offer the wiring {wiring}", ""


async def _undone(wired: Wired) -> None:
    await wired.close()
    for listener in wired.listeners:
        listener.socket.close()


def _left(remains: Remains) -> dict[str, Any]:
    attempt_id = new_id()
    return Record(
        event="sandbox",
        sandbox=remains.id,
        attempt_id=attempt_id,
        root_id=attempt_id,
        profile=remains.profile or None,
        detail="gone: its daemon was killed",
    ).as_dict()
