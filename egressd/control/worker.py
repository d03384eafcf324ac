"""A worker's process as control holds it, and what each is given at its start.

What a worker is told is a message, with sealed payloads beside it where those are too large for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from egressd.control.ca import Authority, issue_worker_intermediate
from egressd.control.host import local_addresses, may_become
from egressd.control.process import WorkerProcess
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import SharedListeners
from egressd.credentials.providers.base import read_file
from egressd.gate.channel import Channel, ChannelBroken, sealed
from egressd.gate.messages import Configure, Identity, Renew, Serve, Share, Stand
from egressd.gate.settings import Settings
from egressd.gate.standing import NOTHING

WORKER_UID: Final = 1337
"""The uid and gid a worker takes when control is root; no sandbox may have it."""
_RENEW_BEFORE: Final = 12 * 3600.0
"""Seconds before the end of an intermediate's day at which the worker gets the next."""


_PATIENCE: Final = 20.0
"""Seconds in which a sound worker does what it is told, on a machine that has much else to do."""


class WorkerFailed(Exception):
    """A worker could not be started, or died too often to be started again."""


@dataclass(slots=True, eq=False)
class Worker:
    """A running worker process and its channel."""

    name: str
    process: WorkerProcess
    channel: Channel[Any]
    ready: asyncio.Future[None]
    drained: asyncio.Future[None]
    """It accepts nothing any more; who asked for that waits here."""
    renew_at: dict[str, float] = field(default_factory=dict)
    """Unix seconds by which its intermediate is replaced, for each root that it signs for."""
    lost: str = ""
    """Why it is gone, or no longer believed."""
    given: set[str] = field(default_factory=set)
    """The sandboxes that it was told to carry or to know, and the shared listeners that it was told to serve."""
    waits: dict[tuple[str, str], asyncio.Future[None]] = field(default_factory=dict)

    def expect(self, what: str, of: str) -> asyncio.Future[None]:
        """Return what is done once it says so, or once it is lost and nothing of it is left."""
        return self.waits.setdefault((what, of), asyncio.get_running_loop().create_future())

    def met(self, what: str, of: str) -> None:
        """It has said so."""
        if (future := self.waits.pop((what, of), None)) is not None and not future.done():
            future.set_result(None)

    def lose(self, why: str) -> None:
        """Believe it no more; nobody waits for its word in vain."""
        self.lost = self.lost or why or "lost"
        for starting in (self.ready, self.drained):
            if not starting.done():
                starting.set_exception(WorkerFailed(f"worker {self.name}: {self.lost}"))
                starting.exception()  # seen, whether or not somebody still waits
        for what, of in tuple(self.waits):
            self.met(what, of)

    def tell(
        self, message: BaseModel, payloads: Sequence[bytes] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Send a message; one that is dying is not told. Raises OSError where there are no descriptors for it."""
        with sealed_copies(*payloads) as fds, contextlib.suppress(ChannelBroken):
            self.channel.send(message, [*fds, *descriptors])

    async def end(self) -> None:
        """Kill it; returns once it is gone."""
        self.process.kill()
        await self.process.wait()


class Outfit:
    """What every worker gets: settings, the authority that its leaves go back to, and the way through the operator's proxy."""

    def __init__(
        self, settings: Settings, authority: Authority, proxy_credentials: Path | None = None
    ) -> None:
        """`proxy_credentials` is the file with `user:password`, read for each worker anew."""
        self._authorities = {authority.fingerprint: authority}
        self._current = authority.fingerprint
        self._settings = settings
        self._proxy_credentials = proxy_credentials

    @property
    def root(self) -> str:
        """The fingerprint of the authority that signs for sandboxes to come."""
        return self._current

    def follow(self, authority: Authority) -> None:
        """Have another authority sign for sandboxes to come; those that are there trust the one they began with."""
        self._authorities[authority.fingerprint] = authority
        self._current = authority.fingerprint

    def keep(self, roots: Collection[str]) -> None:
        """Forget the keys of authorities that no sandbox trusts any more, but for the current one."""
        wanted = {self._current, *roots}
        self._authorities = {root: held for root, held in self._authorities.items() if root in wanted}

    def configure(self, worker: Worker) -> None:
        """Tell a fresh worker who it is; raises OSError, ChannelBroken."""
        root = self._current
        message = Configure(
            worker=worker.name,
            settings=self._settings,
            identity=Identity(uid=WORKER_UID, gid=WORKER_UID) if may_become(WORKER_UID) else None,
            own_addresses=local_addresses(),
            root=root,
            certificate=self._authorities[root].trusted_pem.decode("ascii"),
        )
        payloads = [self._issuer(worker, root)]
        if self._proxy_credentials is not None:
            payloads.append(read_file(str(self._proxy_credentials)).encode("utf-8"))
        with sealed_copies(*payloads) as fds:
            worker.channel.send(message, fds)

    def give(self, worker: Worker, sandbox: SandboxState) -> None:
        """Hand a worker a sandbox; raises OSError."""
        worker.given.add(sandbox.id)
        if sandbox.root not in worker.renew_at:
            self.renew(worker, sandbox.root)
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
            root=sandbox.root,
        )
        levels = sandbox.levels_payload(time.monotonic())
        payloads = sandbox.policy_payload(), sandbox.pairs_payload(), levels
        worker.tell(message, payloads, [listener.socket.fileno() for listener in sandbox.listeners])
        if sandbox.standing != NOTHING:
            worker.tell(Stand(sandbox=sandbox.id), (sandbox.standing_payload(),))

    def share(self, worker: Worker, shared: SharedListeners) -> None:
        """Hand a worker shared listeners, once; raises OSError."""
        if shared.id in worker.given:
            return
        worker.given.add(shared.id)
        specs = tuple(listener.spec for listener in shared.listeners)
        worker.tell(
            Share(share=shared.id, interface=shared.interface, listeners=specs),
            descriptors=[listener.socket.fileno() for listener in shared.listeners],
        )

    def renew(self, worker: Worker, root: str) -> None:
        """Give a worker its next intermediate of a root, or its first; raises OSError, KeyError for one that is forgotten."""
        before = worker.renew_at.get(root)
        certificate = self._authorities[root].trusted_pem.decode("ascii")
        try:
            worker.tell(Renew(root=root, certificate=certificate), (self._issuer(worker, root),))
        except OSError:
            if before is None:
                del worker.renew_at[root]
            else:
                worker.renew_at[root] = before  # at the next look
            raise

    def renew_all(self, worker: Worker, now: float) -> None:
        """Give a worker whatever it needs next; `now` in Unix seconds. Raises OSError."""
        for root, when in tuple(worker.renew_at.items()):
            if root not in self._authorities:
                del worker.renew_at[root]
            elif now > when:  # by the wall: certificates end by it
                self.renew(worker, root)

    def _issuer(self, worker: Worker, root: str) -> bytes:
        issued = issue_worker_intermediate(self._authorities[root], worker.name, time.time())
        worker.renew_at[root] = issued.not_after - _RENEW_BEFORE
        return json.dumps({"chain": issued.chain_pem.decode(), "key": issued.key_pem.decode()}).encode()


@contextlib.contextmanager
def sealed_copies(*payloads: bytes) -> Iterator[list[int]]:
    """Sealed copies of payloads as descriptors, closed afterwards; raises OSError with none left open."""
    fds: list[int] = []
    try:
        for payload in payloads:
            fds.append(sealed(payload))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


async def within(future: asyncio.Future[None], complaint: str, seconds: float = _PATIENCE) -> None:
    """Return once it is done; raises WorkerFailed with the complaint after `seconds`, or as the future does."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.shield(future)
    except TimeoutError:
        raise WorkerFailed(complaint) from None
