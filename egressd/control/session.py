"""One sandboxed command from nothing to its exit status: the session behind `egressd run`.

Everything is made before the command starts and proved from inside: the rules read back, an allowed name resolves, a denied
one leads
nowhere. What cannot be proved stops the start.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path

from egressd.control.ca import load_or_create
from egressd.control.config import Config
from egressd.control.process import WorkerProcess
from egressd.control.reconciliation import losses
from egressd.control.sandboxes import SandboxListener, SandboxState, new_sandbox_id
from egressd.control.supervisor import Supervisor, WorkerFailed
from egressd.control.trust import Trust, build_trust, java_store_paths, system_bundle_paths, trust_environment
from egressd.control.voice import say
from egressd.control.watch import LOOK, changes, marks
from egressd.gate.denials import PROBE
from egressd.gate.settings import Settings
from egressd.journal.record import Record, new_id
from egressd.journal.writer import Journal
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.problems import Code
from egressd.wiring import ruleset
from egressd.wiring.launch import writable
from egressd.wiring.namespace import Bind, Namespace, SandboxSpec, WiringError
from egressd.wiring.ruleset import Counted

_SYNTHETIC = ip_network("198.18.0.0/15")
_EXPLAIN = ip_address(ruleset.EXPLAIN)
_PASSED = ("PATH", "USER", "SHELL", "TERM", "LANG", "TZ")
"""What the command gets of the caller's environment, besides LC_* and what `--env` names."""
TRUST_INSIDE = "/run/egressd-trust"
_COUNT_TIMEOUT = 10.0
_CERTS = "/etc/ssl/certs"
"""Where OpenSSL and GnuTLS of Debian and its kin look by themselves; elsewhere the bundle files and variables must do."""


class NotReady(Exception):
    """The boundary could not be proved from inside, so the command was not started."""


class BadInput(Exception):
    """Rules, profile or options that cannot be used; exit status 2.

    `passing` says that a file could not be read, which may be otherwise a moment later without any change of the file.
    """

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


@dataclass(frozen=True, slots=True)
class _NotReloaded:
    """Why rules were not put in force, and whether that may pass by itself."""

    text: str
    passing: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of `egressd run` asks for."""

    command: tuple[str, ...]
    profile: str
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    env: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    ready_timeout: float = 10.0
    uid: int | None = None
    workspace: Path = field(default_factory=Path.cwd)


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
        self._marks = marks(config.rules)  # before reading: what changes meanwhile is read again
        self._rules = _read_rules(config.rules)
        self._policy = _effective(self._rules, request.profile)
        self._failure: asyncio.Future[int] | None = None
        self._namespace: Namespace | None = None

    async def run(self) -> int:
        """Make the sandbox, run the command, take everything down; returns the command's exit status."""
        settings = self._config.settings()
        authority = load_or_create(self._config.ca, time.time())
        trust = build_trust(self._config.ca.trust, authority.pem)
        spec = self._spec(trust)
        _check_addons(spec, self._config.inspect.addons)
        journal = Journal(self._config.journal)
        supervisor = Supervisor(settings, authority, journal, failed=self._worker_failed, first=self._first)
        self._failure = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervisor.start())
                made = group.create_task(self._make(spec))
            namespace = made.result()
            for note in namespace.notes:
                say(note)
            await self._serve(supervisor, namespace)
            async with asyncio.timeout(self._request.ready_timeout):
                await self._prove(namespace, settings)
            self._note(supervisor, "ready")
            return await self._carry(supervisor, namespace, spec)
        finally:
            await self._take_down(supervisor, self._namespace)
            journal.close()

    async def _make(self, spec: SandboxSpec) -> Namespace:
        """Make the namespace and read its rules back; raises NotReady where they are not as wanted."""
        self._namespace = await Namespace.make(spec, timeout=self._request.ready_timeout)
        async with asyncio.timeout(self._request.ready_timeout):
            missing = await self._namespace.missing_rules()
        if missing:
            raise NotReady(f"firewall rules are not in place: {missing[0]}")
        return self._namespace

    async def _serve(self, supervisor: Supervisor, namespace: Namespace) -> None:
        listeners = [SandboxListener(each.kind, each.family, each.socket) for each in namespace.listeners]
        state = SandboxState(
            self.id, self._policy, listeners, dict(self._request.labels), self._request.traceparent
        )
        await supervisor.add(state)

    async def _carry(self, supervisor: Supervisor, namespace: Namespace, spec: SandboxSpec) -> int:
        """Run the command beside the rule watcher; a worker that cannot be kept ends it."""
        assert self._failure is not None
        command = asyncio.create_task(namespace.launch(self._request.command))
        watcher = asyncio.create_task(self._watch(supervisor, spec))
        try:
            await asyncio.wait({command, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if command.done():
                return command.result()
            return self._failure.result()
        finally:
            for task in (command, watcher):
                task.cancel()
            await asyncio.gather(command, watcher, return_exceptions=True)

    async def _take_down(self, supervisor: Supervisor, namespace: Namespace | None) -> None:
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

    def _note(self, supervisor: Supervisor, detail: str) -> None:
        attempt_id = new_id()
        record = Record(
            event="sandbox",
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

    # what the sandbox is

    def _spec(self, trust: Trust) -> SandboxSpec:
        request, config = self._request, self._config
        try:
            binds = tuple(Bind.parse(text) for text in request.binds)
        except ValueError as error:
            raise BadInput(str(error)) from None
        home = self._environ.get("HOME") or "/"
        return SandboxSpec(
            workspace=str(request.workspace),
            env=self._command_environment(home),
            home=home,
            uid=request.uid,
            binds=binds,
            sockets=request.sockets,
            masks=tuple(str(path) for path in config.private_paths()),
            trust=_trusted(trust),
            seeds={name: str(path) for name, path in trust.nss.items()},
            hostname="sandbox",
        )

    def _command_environment(self, home: str) -> dict[str, str]:
        environ = self._environ
        env = {name: environ[name] for name in environ if name in _PASSED or name.startswith("LC_")}
        env.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
        env |= {"HOME": home, "EGRESSD_SANDBOX": self.id}
        env |= trust_environment(TRUST_INSIDE)
        if os.path.isdir(_CERTS):
            env["SSL_CERT_DIR"] = _CERTS
        else:
            del env["SSL_CERT_DIR"]
        for text in self._request.env:
            name, equals, value = text.partition("=")
            if not name:
                raise BadInput(f"--env {text!r}: no name")
            if equals:
                env[name] = value
            elif name in environ:
                env[name] = environ[name]
        return env

    # readiness

    async def _prove(self, namespace: Namespace, settings: Settings) -> None:
        """Try the boundary from inside; raises NotReady with what did not hold."""
        # Where names are only observed, any but one below the floor is let through.
        observing = self._policy.mode == "observe"
        below = "localhost" if observing else "invalid.test"
        denied = await namespace.probe_dns(f"{PROBE}{secrets.token_hex(8)}.{below}")
        explained = settings.dns_denied == "explain" and not observing
        held = denied.addresses == (str(_EXPLAIN),) if explained else denied.rcode == 3
        if not held:
            raise NotReady(
                f"a denied name was answered with {denied.addresses or denied.error or denied.rcode}"
            )
        allowed = next((name for name in _allowed_names(self._policy)), None)
        if allowed is not None:
            answer = await namespace.probe_dns(allowed)
            if not answer.addresses or not all(
                ip_address(a) in _SYNTHETIC and ip_address(a) != _EXPLAIN for a in answer.addresses
            ):
                raise NotReady(
                    f"the allowed name {allowed} was answered with {answer.addresses or answer.error or answer.rcode}"
                )

    # reload

    async def _watch(self, supervisor: Supervisor, spec: SandboxSpec) -> None:
        """Follow the rule files: parse, validate, run their tests, swap whole.

        A bad change changes nothing and says why (law 9).
        """
        if writable(spec, str(self._config.rules)):
            say(
                f"the sandbox can write {self._config.rules} or a folder above it: rules were read once and are not reloaded"
            )
            return
        async for seen in changes(self._config.rules, self._marks):
            told = ""
            while (problem := await self._reload(supervisor)) is not None:
                if problem.text != told:
                    say(f"rules not reloaded, the old ones stay in force:\n{problem.text}")
                    self._note_policy(supervisor, problem.text)
                    told = problem.text
                if not problem.passing:
                    break
                await asyncio.sleep(LOOK)
                if marks(self._config.rules) != seen:  # the watch tells, once they rest
                    break

    async def _reload(self, supervisor: Supervisor) -> _NotReloaded | None:
        """Read the rules and put them in force where they differ; returns why not. Never raises: the watch goes on."""
        try:
            policy = _effective(
                await asyncio.to_thread(_read_rules, self._config.rules), self._request.profile
            )
        except BadInput as error:
            return _NotReloaded(str(error), passing=error.passing)
        except Exception as error:  # noqa: BLE001 -- no thread, no memory: no reason to follow the files no longer
            return _NotReloaded(f"{type(error).__name__}: {error}", passing=True)
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

    def _note_policy(self, supervisor: Supervisor, problem: str) -> None:
        attempt_id = new_id()
        record = Record(
            event="policy",
            sandbox=self.id,
            attempt_id=attempt_id,
            root_id=attempt_id,
            profile=self._policy.profile,
            policy=self._policy.digest(),
            detail=f"refused: {problem}",
        )
        supervisor.write([record.as_dict()])


async def _counted(namespace: Namespace) -> Counted | str:
    """What the kernel counted, or why that is not known."""
    try:
        async with asyncio.timeout(_COUNT_TIMEOUT):
            return await namespace.counted() or "a packet rule is gone"
    except (WiringError, OSError, TimeoutError) as error:
        return str(error) or type(error).__name__


def _trusted(trust: Trust) -> dict[str, str]:
    """Return what of the host's trust stores is covered by ours, by path inside."""
    covered = {_CERTS: trust.certs} if os.path.isdir(_CERTS) else {}
    covered |= {f"{TRUST_INSIDE}/{path.name}": path for path in (trust.certificate, trust.bundle, trust.java)}
    covered |= {str(path): trust.bundle for path in system_bundle_paths()}
    covered |= {str(path): trust.java_default for path in java_store_paths()}
    return {inside: str(path) for inside, path in covered.items()}


def _check_addons(spec: SandboxSpec, paths: Sequence[str]) -> None:
    """Addons run in the worker: what a sandbox can write never becomes code there. Raises BadInput."""
    for path in paths:
        if not os.path.isfile(path):
            raise BadInput(f"inspect.addons: {path} is no file")
        if writable(spec, path):
            raise BadInput(
                f"inspect.addons: the sandbox can write {path} or a folder above it\n"
                "hint: keep addons outside the workspace and everything that --bind names"
            )


def _read_rules(directory: Path) -> Rules:
    loaded = load_rules(directory)
    if isinstance(loaded, Rules):
        return loaded
    raise BadInput(str(loaded), passing=any(problem.code is Code.UNREADABLE for problem in loaded))


def _effective(rules: Rules, profile: str) -> EffectivePolicy:
    if profile not in rules.profiles:
        known = ", ".join(sorted(rules.profiles)) or "none"
        raise BadInput(f"there is no profile {profile!r}\nhint: profiles here: {known}")
    return rules.effective(profile)


def _allowed_names(policy: EffectivePolicy) -> Sequence[str]:
    denied = {
        host
        for entry in policy.entries
        if entry.effect == "deny" and not entry.requests
        for host in entry.hosts
    }
    return [
        host
        for entry in policy.entries
        if entry.effect == "allow" and entry.expires is None
        for host in entry.hosts
        if not host.startswith("*") and host not in denied
    ]
