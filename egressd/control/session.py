"""One sandboxed command from nothing to its exit status: the session behind `egressd run`.

Everything is made before the command starts and proved from inside: the rules read back, an allowed name resolves, a denied
one leads
nowhere. What cannot be proved stops the start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from egressd.control.approvals.establishment import Establishment
from egressd.control.approvals.window import serve_alone
from egressd.control.ca import load_or_create
from egressd.control.config import Config
from egressd.control.journaling import Keeper
from egressd.control.keyring import Exposed, Keyring
from egressd.control.process import WorkerProcess
from egressd.control.proof import NotReady, prove
from egressd.control.reconciliation import losses
from egressd.control.rulebook import Rulebook, effective, keep_copy, read_rules, reread_rules
from egressd.control.sandboxes import SandboxListener, SandboxState, new_sandbox_id
from egressd.control.secrecy import close_process, keep_from_swap
from egressd.control.supervisor import Supervisor, WorkerFailed
from egressd.control.surroundings import BadInput, Request, spec_of
from egressd.control.trust import build_trust
from egressd.control.voice import say
from egressd.control.watch import LOOK, changes, marks
from egressd.journal.record import Event, Record, new_id
from egressd.policy.reasons import Reason
from egressd.wiring.container import Container
from egressd.wiring.launch import writable
from egressd.wiring.namespace import Namespace, SandboxSpec, WiringError
from egressd.wiring.ruleset import Counted

_COUNT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class _NotReloaded:
    """Why rules were not put in force, and whether that may pass by itself."""

    text: str
    passing: bool


class Session:
    """A sandbox, its worker and its command."""

    def __init__(
        self,
        request: Request,
        config: Config,
        environ: Mapping[str, str],
        first: WorkerProcess | None = None,
    ) -> None:
        """Read rules and profile; raises BadInput with every problem. `first` is to be the first worker, if there is one yet."""
        self._request = request
        self._config = config
        self._environ = environ
        self._first = first
        self.id = new_sandbox_id()
        self._marks = marks(config.rules, config.credentials)  # before: what changes meanwhile is read again
        rules = read_rules(config, environ)
        self._rules: Rulebook = rules
        self._policy = effective(rules, request.profile, dict(request.labels))
        self._keyring = Keyring(rules.credentials, self._policy, config.upstream.ca_bundle)
        if self._keyring.used and rules.credentials is None:
            raise BadInput(
                f"the profile {request.profile} attaches credentials, and there is no {config.credentials}"
            )
        self._failure: asyncio.Future[int] | None = None
        self._namespace: Namespace | Container | None = None

    async def run(self) -> int:
        """Make the sandbox, run the command, take everything down; returns the command's exit status."""
        close_process()
        settings = self._config.settings()
        authority = load_or_create(self._config.ca, time.time())
        trust = build_trust(self._config.ca.trust, authority.trusted_pem)
        self._keep(self._rules)  # before there is a sandbox: the state directory is masked if it is there
        spec, notes = spec_of(self._request, self._config, self._environ, self.id, trust, self._keyring)
        if self._keyring.used and (unlocked := keep_from_swap()) is not None:
            notes.append(unlocked)
        lending = self._keyring.begin()
        keeper = Keeper(self._config, has_stdout=False)
        self._approvals = Establishment(self._config, lambda: self._rules.source)
        supervisor = Supervisor(
            settings,
            authority,
            keeper.journal,
            failed=self._worker_failed,
            first=self._first,
            lending=lending,
            proxy_credentials=self._config.proxy_credentials,
            approvals=self._approvals.office,
        )
        self._failure = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervisor.start())
                made = group.create_task(self._make(spec))
            namespace = made.result()
            for note in (*notes, *namespace.notes):
                say(note)
            await self._serve(supervisor, namespace)
            self._approvals.open(supervisor)
            async with asyncio.timeout(self._request.ready_timeout):
                await prove(namespace, self._policy, settings.dns_denied)
            self._note(supervisor, "sandbox", "ready")
            if self._request.attaches:
                say(f"attached: {self.id}")
            return await self._carry(supervisor, namespace, spec)
        finally:
            await self._take_down(supervisor, self._namespace)
            await self._approvals.close()
            await self._keyring.close()
            await keeper.close()

    def _keep(self, rules: Rulebook) -> None:
        """Keep a copy of rules that come into force, so that somebody can go back to them."""
        if (problem := keep_copy(self._config, rules)) is not None:
            say(problem)

    async def _make(self, spec: SandboxSpec | None) -> Namespace | Container:
        """Make the namespace and read its rules back; raises NotReady where they are not as wanted."""
        self._namespace = await place_of(self._request, spec)
        async with asyncio.timeout(self._request.ready_timeout):
            missing = await self._namespace.missing_rules()
        if missing:
            raise NotReady(f"firewall rules are not in place: {missing[0]}")
        return self._namespace

    async def _serve(self, supervisor: Supervisor, namespace: Namespace | Container) -> None:
        listeners = [SandboxListener(each.kind, each.family, each.socket) for each in namespace.listeners]
        state = SandboxState(
            self.id,
            self._policy,
            listeners,
            dict(self._request.labels),
            self._request.traceparent,
            placeholders=self._keyring.placeholders,
        )
        await supervisor.add(state)

    async def _carry(
        self, supervisor: Supervisor, namespace: Namespace | Container, spec: SandboxSpec | None
    ) -> int:
        """Run the command beside the rule watcher; a worker that cannot be kept ends it."""
        assert self._failure is not None
        command = asyncio.create_task(namespace.launch(self._request.command))
        watcher = asyncio.create_task(self._watch(supervisor, spec))
        asks = any(entry.effect == "ask" for entry in self._policy.entries)
        window = asyncio.create_task(serve_alone(self._config, self.id, self._approvals.office, asks=asks))
        try:
            await asyncio.wait({command, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if command.done():
                return command.result()
            return self._failure.result()
        finally:
            for task in (command, watcher, window):
                task.cancel()
            await asyncio.gather(command, watcher, window, return_exceptions=True)

    async def _take_down(self, supervisor: Supervisor, namespace: Namespace | Container | None) -> None:
        if namespace is None:
            await supervisor.stop()
            return
        await namespace.end()  # from here on nothing more is sent, so that the kernel's counts are final
        counting = asyncio.create_task(_counted(namespace))
        await supervisor.remove(self.id, shutdown=True)
        await supervisor.stop()  # first: a record that came later would be missing now and found then
        self._reconcile(supervisor, await counting)
        await namespace.destroy()

    def _reconcile(self, supervisor: Supervisor, counted: Counted | str) -> None:
        """Hold the kernel's own counts against the records; what is missing is written down as such (law 8)."""
        if isinstance(counted, str):
            say(
                f"the kernel's counts could not be read, so nobody knows whether a record is missing: {counted}"
            )
            return
        reason = Reason.WORKER_DIED if supervisor.deaths else Reason.SHUTDOWN
        lost = losses(self.id, counted, supervisor.recorded(self.id), reason)
        supervisor.write([record.as_dict() for record in lost])

    def _worker_failed(self, why: str) -> None:
        say(f"{why}; nothing can leave the sandbox, so it is ended")
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(125)

    def _note(self, supervisor: Supervisor, event: Event, detail: str) -> None:
        attempt_id = new_id()
        record = Record(
            event=event,
            sandbox=self.id,
            attempt_id=attempt_id,
            root_id=attempt_id,
            profile=self._policy.profile,
            policy=self._policy.digest(),
            labels=self._request.labels or None,
            traceparent=self._request.traceparent,
            detail=detail,
        )
        supervisor.write([record.as_dict()])

    # reload

    async def _watch(self, supervisor: Supervisor, spec: SandboxSpec | None) -> None:
        """Follow the rule files: parse, validate, run their tests, swap whole.

        A bad change changes nothing and says why (law 9).
        """
        rules, credentials = self._config.rules, self._config.credentials
        for path in (rules, credentials):
            if spec is not None and writable(spec, str(path)):
                say(
                    f"the sandbox can write {path} or a folder above it: rules were read once and are not reloaded"
                )
                return
        async for seen in changes(rules, self._marks, credentials):
            told = ""
            while (problem := await self._reload(supervisor, spec)) is not None:
                if problem.text != told:
                    say(f"rules not reloaded, the old ones stay in force:\n{problem.text}")
                    self._note(supervisor, "policy", f"refused: {problem.text}")
                    told = problem.text
                if not problem.passing:
                    break
                await asyncio.sleep(LOOK)
                if marks(rules, credentials) != seen:  # the watch tells, once they rest
                    break

    async def _reload(self, supervisor: Supervisor, spec: SandboxSpec | None) -> _NotReloaded | None:
        """Read the rules and put them in force where they differ; returns why not. Never raises: the watch goes on."""
        try:
            rules = await reread_rules(self._config, self._environ)
            policy = effective(rules, self._request.profile, dict(self._request.labels))
            told = self._keyring.adopt(rules.credentials, policy, spec)
        except BadInput as error:
            return _NotReloaded(str(error), passing=error.passing)
        except Exposed as exposed:
            return _NotReloaded(str(exposed), passing=False)
        except Exception as error:  # noqa: BLE001 -- no thread, no memory: no reason to follow the files no longer
            return _NotReloaded(f"{type(error).__name__}: {error}", passing=True)
        if told is not None:
            supervisor.recall(told.ended)
            say("\n".join(("credentials reloaded", *told.notes)))
            self._note(supervisor, "policy", "credentials adopted")
        await asyncio.to_thread(self._keep, rules)
        self._rules = rules
        if policy == self._policy:
            return None
        self._policy = policy
        try:
            await supervisor.adopt({self.id: policy})
        except WorkerFailed as failure:  # its successor starts from the new policy
            say(f"rules reloaded: policy {policy.digest()}, {failure}")
        else:
            say(f"rules reloaded: policy {policy.digest()}")
        return None


async def place_of(request: Request, spec: SandboxSpec | None) -> Namespace | Container:
    """Make the namespace, or wire the container that is there already; raises BadInput, WiringError."""
    if spec is not None:
        return await Namespace.make(spec, timeout=request.ready_timeout)
    try:
        return await Container.make(request.pid, request.netns, timeout=request.ready_timeout)
    except ValueError as error:
        raise BadInput(str(error)) from None


async def _counted(namespace: Namespace | Container) -> Counted | str:
    """What the kernel counted, or why that is not known."""
    try:
        async with asyncio.timeout(_COUNT_TIMEOUT):
            return await namespace.counted() or "a packet rule is gone"
    except (WiringError, OSError, TimeoutError) as error:
        return str(error) or type(error).__name__
