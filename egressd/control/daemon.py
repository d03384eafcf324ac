"""`egressd serve`: the daemon, from its first look at the configuration to its last word to the service manager.

It begins closed: sockets are opened when workers stand and predecessors' remains are gone, and readiness is told last. It ends
by a signal (a drain), or because no worker can be kept; either way everything of every sandbox is taken down first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from egressd.control import peers, succession
from egressd.control.api_server import ApiServer
from egressd.control.approvals.establishment import Establishment
from egressd.control.approvals.office import Office
from egressd.control.archive import Archive
from egressd.control.attaching import Attaching
from egressd.control.ca import load_or_create
from egressd.control.config import Config
from egressd.control.config_check import explicit_spec
from egressd.control.container import ContainerWiring
from egressd.control.estate import Estate, StateError
from egressd.control.explicit import ExplicitWiring
from egressd.control.gateway import GatewayWiring
from egressd.control.health import Health
from egressd.control.journaling import Keeper
from egressd.control.lending import Lending
from egressd.control.lives import Life
from egressd.control.notify import Notifier
from egressd.control.rollback import RolledBack, go_back
from egressd.control.roster import Roster
from egressd.control.rulebook import keep_copy, kept_rules, read_rules, reread_rules
from egressd.control.secrecy import close_process, keep_from_swap, secret_variables
from egressd.control.sidecar import SidecarWiring
from egressd.control.succession import Succession
from egressd.control.supervisor import Supervisor, WorkerFailed
from egressd.control.surroundings import BadInput
from egressd.control.trust import Trust, build_trust
from egressd.control.vigil import Vigil
from egressd.control.voice import say
from egressd.control.watch import LOOK, Marks, changes, marks
from egressd.control.wirings import Wiring
from egressd.credentials.broker import Broker
from egressd.credentials.providers.base import take_variables
from egressd.journal.record import Event, Record, new_id
from egressd.journal.writer import JournalUnavailable
from egressd.policy.credential import CredentialsFile
from egressd.wiring.inherited import taken

COULD_NOT_RUN: Final = 3
_WORKERS: Final = 4
"""Most workers where nobody said how many."""
_NOBODYS: Final = "-"
"""Stands for the sandbox in a record of the daemon itself."""
_NO_CREDENTIALS: Final = CredentialsFile.model_construct(schema_version=1, credentials={})


class Daemon:
    """One daemon; `run` is its life."""

    def __init__(self, config: Config, environ: Mapping[str, str], notifier: Notifier) -> None:
        """Read the rules; raises BadInput with every problem."""
        self._config, self._environ, self._notifier = config, environ, notifier
        self._marks = marks(config.rules, config.credentials)  # before: what changes meanwhile is read again
        self._rules = read_rules(config, environ)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: str | None = None
        self._ready = False
        self._vigil: Vigil | None = None
        self._over_tcp: ApiServer | None = None
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.archive = Archive(config.state_dir, config.rules)

    async def run(self) -> int:
        """Serve until told to end; returns the exit status. Raises StateError, CaError, JournalUnavailable, WorkerFailed, …"""
        close_process()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        async with contextlib.AsyncExitStack() as stack:
            self._watch_signals(
                stack
            )  # first: a signal that comes early is not the death of a daemon that is half there
            estate = Estate(self._config.state_dir)
            stack.callback(estate.close)
            self._supervisor = await self._start(stack, estate)
            await self._open(stack)
            self._ready = True
            self._task(self._watch(self._marks))
            self._task(self._follow_authority())
            if self._vigil is not None:
                self._task(self._vigil.keep())
            if self._notifier.watchdog is not None:
                self._task(self._feed_watchdog(self._notifier.watchdog / 2))
            say(f"serving: {self._config.control_socket}")
            self._notifier.tell("READY=1", f"STATUS={len(self.roster.rules.profiles)} profiles")
            await self._stopping.wait()
            self._notifier.tell("STOPPING=1")
            await self._drain()
        return COULD_NOT_RUN if self._failure is not None else 0

    # starting

    async def _start(self, stack: contextlib.AsyncExitStack, estate: Estate) -> Supervisor:
        """Start workers and what carries sandboxes; every step is undone by `stack`."""
        config = self._config
        health = Health(self._is_ready)
        stack.push_async_callback(health.stop)
        if config.serve.health:
            await health.start(config.serve.health)
        authority = load_or_create(config.ca, time.time())
        self._trust = build_trust(config.ca.trust, authority.trusted_pem)
        keeper = Keeper(config, has_stdout=True)
        stack.push_async_callback(keeper.close)
        journal = self._journal = keeper.journal
        file = self._rules.credentials or _NO_CREDENTIALS
        if file.credentials and (unlocked := keep_from_swap()) is not None:
            say(unlocked)
        take_variables(secret_variables(file))
        lending = Lending(Broker(file, ca_bundle=config.upstream.ca_bundle), file)
        stack.push_async_callback(lending.close)
        self._approvals = Establishment(config, lambda: self.roster.rules.source)
        supervisor = Supervisor(
            config.settings(),
            authority,
            journal,
            workers=config.serve.workers or min(len(os.sched_getaffinity(0)), _WORKERS),
            failed=self._worker_failed,
            lending=lending,
            proxy_credentials=config.proxy_credentials,
            approvals=self._approvals.office,
        )
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        stack.push_async_callback(self._approvals.close)
        self._approvals.open(supervisor)
        self._succession = Succession(config.ca, authority, self._show, supervisor.follow)
        wirings = self._wirings(supervisor)
        self._vigil = Vigil(wirings, lambda detail: self._note(detail, "sandbox"))
        for wiring in wirings:
            stack.push_async_callback(wiring.end)
            await wiring.begin()
        most = config.serve.sandboxes
        self.roster = Roster(supervisor, estate, self._rules, file, lending, most=most, wirings=wirings)
        stack.push_async_callback(self.roster.end_all, "drained")
        if (problem := keep_copy(config, self._rules)) is not None:
            say(problem)
        if left := await self.roster.sweep():
            say(f"{left} sandboxes of a daemon that was killed were taken down")
        return supervisor

    def _wirings(self, supervisor: Supervisor) -> Collection[Wiring]:
        """Return what sandboxes can be asked for by."""
        found: list[Wiring] = []
        spec = explicit_spec(self._config.explicit)
        if spec is not None:
            host = self._config.explicit.host or spec.addresses[0]
            found.append(ExplicitWiring(spec, supervisor, host=host, answers=self._config.dns.answers))
        if self._config.gateway.interfaces:
            interfaces = self._config.gateway.interfaces
            found.append(GatewayWiring(interfaces, supervisor.share, supervisor.unshare))
        if given := taken(os.environ):
            if self._config.serve.api.listen:
                raise StateError(
                    "serve.api.listen: as a sidecar egressd shares every address with its sandbox",
                    "use the control socket, in a volume that the sandbox does not mount",
                )
            found.append(SidecarWiring(given))
        if os.geteuid() == 0:  # nobody else enters a container's network, or sees who is in it
            found.append(ContainerWiring(self._over))
        return found

    def _over(self, sandbox: str, why: str) -> None:
        """A sandbox has ended by itself."""
        life = self.roster.find(sandbox)
        if life is not None and life.over is None:
            say(f"{sandbox}: {why}")
            self._task(self._let_go(life, why))

    async def _let_go(self, life: Life, why: str) -> None:
        await self.roster.end(life, "ended", why)

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Let in who may ask."""
        config = self._config
        control = self._socket(stack, config.control_socket, socket.SOCK_STREAM)
        attach = self._socket(stack, config.attach_socket, socket.SOCK_SEQPACKET)
        attaching = self._attaching = Attaching(self.roster, config, self._trust, attach)
        stack.push_async_callback(attaching.stop)
        attaching.start()
        api = ApiServer()
        stack.push_async_callback(api.stop)
        await api.start_unix(self, control)
        if config.serve.api.listen:
            self._over_tcp = ApiServer()
            stack.push_async_callback(self._over_tcp.stop)
            await self._over_tcp.start_tcp(self, config.serve.api)

    def _socket(self, stack: contextlib.AsyncExitStack, path: Path, kind: socket.SocketKind) -> socket.socket:
        sock = peers.listen(path, kind)
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(sock.close)
        return sock

    # being

    @property
    def approvals(self) -> Office:
        """What its sandboxes ask people for."""
        return self._approvals.office

    def _is_ready(self) -> bool:
        if not self._ready or self._stopping.is_set() or self._vigil is None:
            return False
        return self._vigil.sound and any(pid is not None for pid in self._supervisor.worker_pids)

    def _worker_failed(self, why: str) -> None:
        """One that cannot be kept is tried again in a while; where there is no other, everything ends."""
        if any(pid is not None for pid in self._supervisor.worker_pids):
            say(f"{why}; nothing leaves its sandboxes until one stands again")
            return
        say(f"{why}; every sandbox is ended")
        self._failure = why
        self._hurry.set()
        self._stopping.set()

    def _watch_signals(self, stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._stop,
            signal.SIGINT: self._stop,
            signal.SIGHUP: lambda: self._task(self._hang_up()),
            signal.SIGUSR1: self._reopen,
            signal.SIGUSR2: lambda: self._task(self._roll()),
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
            stack.callback(loop.remove_signal_handler, number)

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def _reopen(self) -> None:
        if not self._ready:  # it is open for the first time, or about to be
            return
        try:
            self._journal.reopen()
        except JournalUnavailable as error:
            say(f"the journal was not reopened, the old file stays in use: {error}")
        else:
            say("journal reopened")

    async def _hang_up(self) -> None:
        if not self._ready:  # all is read for the first time, and followed from then on
            return
        self._notifier.reloading()
        await self._try_reload()
        for what, reload in (("control API", self._over_tcp), ("approvals", self._approvals)):
            try:
                if reload is not None:
                    reload.reload()
            except StateError as error:
                say(f"the {what}'s files were not read anew, the old ones stay in force: {error}")
        self._notifier.tell("READY=1")

    def _show(self, trust: Trust) -> None:
        self._trust = self._attaching.trust = trust

    async def _follow_authority(self) -> None:
        while True:
            await asyncio.sleep(succession.LOOK)
            self._succession.look(time.time())

    async def _roll(self) -> None:
        """Replace every worker by a fresh one; no connection is refused meanwhile."""
        if not self._ready:
            return
        try:
            await self._supervisor.roll()
        except WorkerFailed as failure:
            say(f"workers were not replaced: {failure}")
        else:
            say("every worker was replaced by a fresh one")

    async def _feed_watchdog(self, pause: float) -> None:
        while True:
            self._notifier.tell("WATCHDOG=1")
            await asyncio.sleep(pause)

    async def _drain(self) -> None:
        """Let nobody in any more, and wait for those who are there to end: for a while, or until told to hurry."""
        self.roster.closed = True
        for task in self._tasks:
            task.cancel()
        deadline = time.monotonic() + self._config.serve.drain_timeout
        if living := len(self.roster.living):
            say(f"draining: {living} sandboxes")
        while self.roster.living and not self._hurry.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._hurry.wait()
        await self.roster.end_all("drained")

    # rules

    async def reload(self) -> list[str]:
        """Read rules and credentials anew and put them in force whole; returns what the operator is told.

        Raises BadInput and changes nothing, WorkerFailed where a worker does not take them: its successor will.
        """
        async with self._reloading:
            try:
                rules = await reread_rules(self._config, self._environ)
                before = self.roster.rules.digest
                notes = await self.roster.adopt(rules, rules.credentials or _NO_CREDENTIALS)
            except BadInput as error:
                self._note(f"refused: {error}")
                raise
            if rules.digest != before or notes:
                self._note("adopted", rules=rules.digest)
            if (problem := await asyncio.to_thread(keep_copy, self._config, rules)) is not None:
                notes.append(problem)
            if (passed := self.archive.passed()) is not None:
                notes.append(
                    f"the folder ({passed.folder}) is passed over since somebody went back, until it changes"
                )
            return notes

    async def roll_back(self, wanted: str | None, by: str) -> RolledBack:
        """Put kept rules in force (see `go_back`), and have it recorded."""
        async with self._reloading:
            try:
                back = await go_back(
                    self.archive,
                    self.roster,
                    lambda digest: kept_rules(self._config, self._environ, digest),
                    wanted,
                    by,
                )
            except BadInput as error:
                self._note(f"refused: going back: {error}")
                raise
            told = f"went back from {back.before} to {back.digest}, by {by}"
            self._note(told, rules=back.digest)
            say("\n".join((told, *back.notes)))
            return back

    async def _try_reload(self) -> BadInput | None:
        """Reload and tell the operator; returns why not. Never raises."""
        try:
            notes = await self.reload()
        except BadInput as error:
            say(f"rules not reloaded, the old ones stay in force:\n{error}")
            return error
        except WorkerFailed as failure:
            say(f"rules reloaded, {failure}")
        except Exception as error:  # noqa: BLE001 -- no thread, no memory: no reason to follow the files no longer
            say(f"rules not reloaded: {type(error).__name__}: {error}")
            return BadInput(type(error).__name__, passing=True)
        else:
            say("\n".join((f"rules in force: {self.roster.rules.digest}", *notes)))
        return None

    async def _watch(self, known: Marks) -> None:
        """Follow the rule files (law 9)."""
        rules, credentials = self._config.rules, self._config.credentials
        async for seen in changes(rules, known, credentials):
            while (problem := await self._try_reload()) is not None and problem.passing:
                await asyncio.sleep(LOOK)
                if marks(rules, credentials) != seen:  # the watch tells, once they rest
                    break

    def _note(self, detail: str, event: Event = "policy", rules: str | None = None) -> None:
        """Record something of the daemon's own; `rules` is the digest of those that are in force by it."""
        attempt_id = new_id()
        record = Record(
            event=event,
            sandbox=_NOBODYS,
            attempt_id=attempt_id,
            root_id=attempt_id,
            policy=rules,
            detail=detail,
        )
        self._supervisor.write([record.as_dict()])

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
