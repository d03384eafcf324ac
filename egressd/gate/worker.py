"""The worker process: carries the sandboxes that control hands it, and nothing else.

Control starts it with its end of the channel and nothing else (`start`). It imports everything, isolates and confines
itself, says `ready`, and then serves. It ends with the channel: without control there is no way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from egressd.gate import isolation, seccomp
from egressd.gate.account import Kind
from egressd.gate.asking import Asking
from egressd.gate.borrowing import Borrowing
from egressd.gate.channel import Channel, ChannelBroken, receive, unsealed
from egressd.gate.connection import Services
from egressd.gate.descriptors import Descriptors
from egressd.gate.dialer import Dialer
from egressd.gate.dns import upstream
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.dns.upstream import Resolver
from egressd.gate.door.tokens import read_address
from egressd.gate.inspector import warm as warm_inspector
from egressd.gate.inspector.site import BadAddon, load_addons
from egressd.gate.inspector.upstream import trusted
from egressd.gate.leases import Leases
from egressd.gate.limits import Budget
from egressd.gate.messages import (
    TO_WORKER,
    Adopt,
    Adopted,
    Ask,
    Claim,
    Claimed,
    Configure,
    Departed,
    Drain,
    Drained,
    Gone,
    Introduce,
    Introduced,
    Lent,
    Neighbour,
    Pair,
    Petition,
    Petitioned,
    Plea,
    Ready,
    Recall,
    Redeem,
    Redeemed,
    Renew,
    Revoke,
    Serve,
    Serving,
    Share,
    Sharing,
    Spent,
    Stand,
    Stored,
    ToWorker,
    Unshare,
    Welcome,
    Written,
)
from egressd.gate.payloads import read_issuer, read_levels, read_pairs
from egressd.gate.policies import Policies
from egressd.gate.reporting import ChannelRecorder
from egressd.gate.sandbox import Sandbox
from egressd.gate.sharing import Sharing as SharedListeners
from egressd.gate.standing import NOTHING, Standing, read_standing
from egressd.gate.tenant import Tenant
from egressd.gate.tls.leaves import Issuer, Leaves
from egressd.gate.via import Via, read_credentials
from egressd.policy.attempt import Name
from egressd.policy.reasons import Reason

_LAZY = (
    *("ascii", "idna", "latin_1", "utf_8", "unicode_escape", "punycode", "cp1252"),
    *("utf_16_le", "utf_16_be"),
)
_PAIR_TIMEOUT = 3.0


class Worker:
    """The sandboxes of one worker process and its services."""

    def __init__(self, services: Services, recorder: ChannelRecorder, root: str = "") -> None:
        """Build the worker before it has a channel; its services sign for sandboxes that trust `root`."""
        self._borrowing = Borrowing()
        self._leases = Leases(self._borrowing.ask)
        self._asking = Asking()
        self._services = dataclasses.replace(services, leases=self._leases, asking=self._asking)
        self._rooted = {root: self._services}
        self._recorder = recorder
        self._tenants: dict[str, Tenant] = {}
        self._policies = Policies()
        self._turn = asyncio.Lock()
        """Whoever reads a policy: what comes with one is carried out in the order in which it came."""
        self._foretold: dict[str, Standing] = {}
        """How the requests of those stand who are to come."""
        self._coming: dict[str, Serve] = {}
        """Whom to carry once the policy is read; whoever is revoked or left to a successor before is taken out."""
        self._room = Descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0], lambda: len(self._tenants))
        self._shared = SharedListeners(services, self._tenants.get, self._send)
        self._pairs: dict[int, asyncio.Future[None]] = {}
        self._pair = 0
        self._channel: Channel[Any] | None = None
        self._over: asyncio.Future[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket) -> str:
        """Serve until the channel closes; returns why it did."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._channel = Channel(sock, TO_WORKER, self._on_message, self._on_closed)
        self._recorder.attach(self._channel)
        self._borrowing.attach(self._send)
        self._asking.attach(self._send)
        self._channel.send(Ready())
        return await self._over

    def _on_closed(self, reason: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    def _on_message(self, message: ToWorker, fds: list[int]) -> None:
        match message:
            case Written() | Stored():
                self._on_kept(message)
            case Serve():
                self._come(message, fds)
            case Adopt():
                self._task(self._adopt(message, unsealed(fds.pop(0))))
            case Renew():
                self._renew(message, read_issuer(unsealed(fds.pop(0))))
            case Revoke() | Drain():
                self._task(self._revoke(message) if isinstance(message, Revoke) else self._drain(message))
            case Lent():
                self._borrowing.lent(message, fds)
            case Recall():
                self._recall(message)
            case Stand() | Petitioned() | Redeemed():
                self._on_approvals(message, fds)
            case Share() | Unshare() | Claimed() | Neighbour() | Departed() | Introduced() | Welcome():
                self._on_shared(message, fds)
            case Configure():
                raise ValueError("configured twice")

    def _on_kept(self, message: Written | Stored) -> None:
        if isinstance(message, Written):
            self._recorder.written(message.batch, ok=message.ok)
        elif (stored := self._pairs.pop(message.pair, None)) is not None and not stored.done():
            stored.set_result(None)

    def _on_approvals(self, message: Stand | Petitioned | Redeemed, fds: list[int]) -> None:
        if not isinstance(message, Stand):
            self._asking.heard(message)
            return
        standing = read_standing(unsealed(fds.pop(0)))
        if (tenant := self._tenants.get(message.sandbox)) is not None:
            tenant.sandbox.standing = standing
            tenant.rejudge()
            self._asking.moved(message.sandbox)
        elif message.sandbox in self._coming:
            self._foretold[message.sandbox] = standing

    def _on_shared(
        self,
        message: Share | Unshare | Claimed | Neighbour | Departed | Introduced | Welcome,
        fds: list[int],
    ) -> None:
        match message:
            case Share():
                self._shared.share(message, [socket.socket(fileno=fd) for fd in fds])
                self._send(Sharing(share=message.share))
            case Unshare():
                self._task(self._unshare(message.share))
            case Claimed():
                self._shared.claimed(message)
            case Neighbour():
                self._shared.enter(message)
                self._send(Serving(sandbox=message.sandbox))
            case Departed():
                self._shared.leave(message.sandbox)
                self._send(Gone(sandbox=message.sandbox))
            case Introduced():
                self._shared.introduced(message)
            case Welcome():
                self._task(self._shared.welcome(message, socket.socket(fileno=fds.pop(0))))

    def _send(
        self,
        message: Ready
        | Serving
        | Sharing
        | Adopted
        | Drained
        | Gone
        | Pair
        | Claim
        | Introduce
        | Spent
        | Ask
        | Petition
        | Plea
        | Redeem,
        descriptors: Sequence[int] = (),
    ) -> None:
        assert self._channel is not None
        self._channel.send(message, descriptors)

    def _recall(self, message: Recall) -> None:
        for lease in message.leases:
            self._leases.withdraw(lease)
        for tenant in self._tenants.values():
            tenant.rejudge()

    def _renew(self, message: Renew, issuer: Issuer) -> None:
        if (known := self._rooted.get(message.root)) is not None:
            known.leaves.replace_issuer(issuer)
            return
        certificate = message.certificate.encode("ascii")
        self._rooted[message.root] = dataclasses.replace(
            self._services, leaves=self._services.leaves.beside(issuer), certificate=certificate
        )

    def _come(self, message: Serve, fds: list[int]) -> None:
        known = message.sandbox in self._tenants or message.sandbox in self._coming
        if known or len(fds) != len(message.listeners) + 3:
            raise ValueError("serve")
        self._coming[message.sandbox] = message
        policy, pairs, levels = (unsealed(fds.pop(0)) for _ in range(3))
        listeners = [socket.socket(fileno=fd) for fd in fds]
        self._task(self._serve(message, policy, pairs, levels, listeners))

    async def _serve(
        self, message: Serve, payload: bytes, pairs: bytes, levels: bytes, listeners: list[socket.socket]
    ) -> None:
        async with self._turn:
            policy = await self._policies.read(payload)
            if self._coming.get(message.sandbox) is not message:
                for listener in listeners:
                    listener.close()
                return
            del self._coming[message.sandbox]
            settings = self._services.settings
            names = SyntheticNames(settings.dns_names)
            names.restore(read_pairs(pairs))
            budget = Budget(settings, lambda *level: self._keep(message.sandbox, *level), self._room)
            budget.restore(time.monotonic(), policy.effective, read_levels(levels))
            labels = dict(message.labels)
            sandbox = Sandbox(message.sandbox, policy, names, budget, labels, message.traceparent)
            self._carry(message, sandbox, listeners)

    def _carry(self, message: Serve, sandbox: Sandbox, listeners: list[socket.socket]) -> None:
        sandbox.standing = self._foretold.pop(sandbox.id, NOTHING)
        sandbox.placeholders.update(message.placeholders)
        self._services.placeholders.update(message.placeholders.values())
        if message.answers == "self":
            sandbox.own = tuple(map(read_address, message.own))
        tenant = self._tenants[sandbox.id] = Tenant(
            sandbox, self._rooted[message.root], lambda name, address: self._store(sandbox.id, name, address)
        )
        tenant.rejudge()
        for spec, listener in zip(message.listeners, listeners, strict=True):
            tenant.listen(spec, listener)
        self._shared.enter(message)
        self._send(Serving(sandbox=sandbox.id))

    async def _store(self, sandbox: str, name: Name, address: IPv4Address) -> None:
        """Have control keep a synthetic pair; returns once it is kept, raises TimeoutError or ChannelBroken."""
        self._pair += 1
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pairs[self._pair] = stored
        pair = self._pair
        try:
            self._send(Pair(pair=pair, sandbox=sandbox, name=".".join(name), address=str(address)))
            async with asyncio.timeout(_PAIR_TIMEOUT):
                await stored
        finally:
            self._pairs.pop(pair, None)

    def _keep(self, sandbox: str, owner: str, kind: Kind, tokens: float, host: str) -> None:
        """Have control keep a level, so that the next worker goes on from there; without control there is no next one."""
        with contextlib.suppress(ChannelBroken):
            self._send(Spent(sandbox=sandbox, owner=owner, kind=kind, tokens=tokens, host=host))

    async def _adopt(self, message: Adopt, payload: bytes) -> None:
        async with self._turn:
            policy = await self._policies.read(payload)
            for sandbox in message.sandboxes:
                if (tenant := self._tenants.get(sandbox)) is not None:
                    tenant.sandbox.policy = policy
                    self._leases.forget(sandbox)
                    tenant.sandbox.budget.adopt(time.monotonic(), policy.effective)
                    tenant.rejudge()
            self._send(Adopted(sandboxes=message.sandboxes, policy=policy.digest))

    async def _unshare(self, share: str) -> None:
        await self._shared.unshare(share)
        self._recorder.flush()
        self._send(Sharing(share=share))

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A worker that could not do what it was told is no worker any more: its successor is told it again."""
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._on_closed(f"{type(problem).__name__}: {problem}")

    async def _revoke(self, message: Revoke) -> None:
        self._coming.pop(message.sandbox, None)
        self._foretold.pop(message.sandbox, None)
        self._shared.leave(message.sandbox)
        tenant = self._tenants.pop(message.sandbox, None)
        if tenant is not None:
            await tenant.close(Reason(message.reason))
            self._leases.forget(message.sandbox)
            self._asking.forget(message.sandbox)
            self._services.placeholders.difference_update(tenant.sandbox.placeholders.values())
            self._recorder.flush()
        self._send(Gone(sandbox=message.sandbox))

    async def _drain(self, message: Drain) -> None:
        """Leave every listener to a successor, end what is open before long, and then this worker."""
        self._coming.clear()
        self._shared.step_aside()
        await asyncio.gather(*(tenant.step_aside() for tenant in self._tenants.values()))
        self._recorder.flush()
        self._send(Drained())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(message.seconds):
                while open_ := [*self._shared.guests(), *self._visits()]:
                    await asyncio.wait(open_)
        await asyncio.gather(*(tenant.close(Reason.SHUTDOWN) for tenant in self._tenants.values()))
        self._recorder.flush()
        assert self._channel is not None
        await self._channel.sent()
        self._on_closed("closed")

    def _visits(self) -> list[asyncio.Task[None]]:
        return [visit for tenant in self._tenants.values() for visit in tenant.visits]


def _warm() -> None:
    """Import what libraries import late: after isolation there is no file system to import from."""
    for codec in _LAZY:
        with contextlib.suppress(LookupError):
            "".encode(codec)
    upstream.warm()
    warm_inspector()


def _limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str]) -> int:
    """Run the worker; returns its exit status."""
    sock = socket.socket(fileno=int(arguments[0]))
    isolation.protect_process()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # a terminal's Ctrl-C is for the sandboxed command; control ends us
    sock.setblocking(True)
    try:
        message, fds = receive(sock, TO_WORKER)
    except ChannelBroken:
        return 0  # control had no use for a worker after all
    if not isinstance(message, Configure) or len(fds) not in (1, 2):
        raise ValueError("not configured")
    _warm()
    _limits()
    settings = message.settings
    issuer = read_issuer(unsealed(fds[0]))
    recorder = ChannelRecorder()
    own = frozenset(message.own_addresses)
    trusted(settings.upstream_ca)  # read now: after isolation there is no file
    resolver = Resolver(settings.dns_upstream, settings.dns_timeout, ca_file=settings.upstream_ca)
    via = None
    if settings.upstream_proxy is not None:
        authorization = read_credentials(unsealed(fds[1])) if len(fds) == 2 else None
        via = Via(settings.upstream_proxy, resolver, authorization)
    dialer = Dialer(resolver, settings.connect_timeout, own_addresses=own, via=via)
    identity = None if message.identity is None else (message.identity.uid, message.identity.gid)
    leaves = Leaves(issuer)
    try:
        inspection = load_addons(settings.inspect_addons)
    except BadAddon as error:
        print(f"egressd: worker: inspect.addons: {error}", file=sys.stderr)  # noqa: T201 -- stderr is talk
        return 1
    services = Services(settings, recorder, dialer, leaves, message.certificate.encode("ascii"), inspection)
    gc.freeze()  # what is here now is here to stay, and need not be looked through again and again
    gc.enable()
    isolation.isolate(identity, keep=(sock.fileno(),))
    leaves.settle(Path("/leaf.pem"))
    try:
        seccomp.confine()
    except seccomp.NotConfined as error:
        print(f"egressd: worker: {error}; it reads nothing without one", file=sys.stderr)  # noqa: T201 -- as above
        return 1
    reason = asyncio.run(Worker(services, recorder, message.root).run(sock))
    if reason != "closed":
        print(f"egressd: worker: channel {reason}", file=sys.stderr)  # noqa: T201 -- stderr is talk
    return 0


def start(arguments: list[str]) -> None:
    """Run the worker as a process; never returns."""
    try:
        status = main(arguments)
    except Exception:  # noqa: BLE001 -- the top of the process
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)
