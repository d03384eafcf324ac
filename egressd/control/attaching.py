"""Where `egressd run` hands its sandboxes to the daemon: it makes the namespace and its sockets, the daemon has them served.

A sandbox that came this way lives as long as its connection: a `run` that dies, however it dies, ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from egressd.control import peers
from egressd.control.config import Config, comparable
from egressd.control.handover import (
    TO_DAEMON,
    VERSION,
    Ended,
    Enter,
    Entered,
    Gone,
    Made,
    Proved,
    Refused,
    Revoked,
    Served,
    ToDaemon,
)
from egressd.control.lives import Life
from egressd.control.roster import Full, Roster, Wanted
from egressd.control.sandboxes import SandboxListener
from egressd.control.supervisor import WorkerFailed
from egressd.control.surroundings import BadInput, check_labels
from egressd.control.trust import Trust
from egressd.control.voice import say
from egressd.control.wirings import NotWired, Plain
from egressd.gate.channel import Channel, ChannelBroken, sealed, unsealed
from egressd.wiring.launch import writable
from egressd.wiring.ruleset import Counted
from egressd.wiring.spec import SandboxSpec

ENTER_SECONDS: Final = 10.0
MAKE_SECONDS: Final = 120.0
PROVE_SECONDS: Final = 120.0
COUNT_SECONDS: Final = 3.0
"""How long a `run` that was told of the end may take to kill its command and to read the kernel's counts."""
WAITING: Final = 64
"""Connections that have not led to a sandbox yet."""
_SPEC: Final = TypeAdapter(SandboxSpec | None)


class Attaching:
    """The attach socket's side of the daemon."""

    def __init__(self, roster: Roster, config: Config, trust: Trust, sock: socket.socket) -> None:
        """Nobody is accepted before `start`."""
        self._roster, self._config, self._sock = roster, config, sock
        self.trust = trust
        """What the next one to come is shown."""
        self._accepting: asyncio.Task[None] | None = None
        self._visitors: set[asyncio.Task[None]] = set()
        self.waiting = 0

    def start(self) -> None:
        """Accept from now on."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def stop(self) -> None:
        """Accept nobody any more, and let the visitors go."""
        if self._accepting is not None:
            self._accepting.cancel()
        for visitor in self._visitors:
            visitor.cancel()
        await asyncio.gather(*self._visitors, *filter(None, [self._accepting]), return_exceptions=True)
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # out of descriptors: those who wait are accepted when there are some
                say(f"attach: {error.strerror}")
                await asyncio.sleep(0.2)
                continue
            visitor = loop.create_task(self._receive(client))
            self._visitors.add(visitor)
            visitor.add_done_callback(self._visitors.discard)

    async def _receive(self, client: socket.socket) -> None:
        try:
            why = peers.refusal(peers.peer_of(client))
        except OSError:
            client.close()
            return
        if why is None and self.waiting >= WAITING:
            why = "too many are waiting"
        visit = _Visit(self, client)
        try:
            if why is not None:
                visit.refuse(why)
            else:
                await visit.serve(self._roster, self._config, self.trust)
        finally:
            visit.close()


class _Over(Exception):
    """The other side is gone, said what it may not, or took too long."""


class _Visit:
    """One `egressd run`."""

    def __init__(self, owner: Attaching, client: socket.socket) -> None:
        self._owner = owner
        self._inbox: asyncio.Queue[tuple[ToDaemon, list[int]] | None] = asyncio.Queue()
        self.counted: asyncio.Future[Counted | None] = asyncio.get_running_loop().create_future()
        self._channel: Channel[Any] = Channel(client, TO_DAEMON, self._on_message, self._on_closed)

    def _on_message(self, message: ToDaemon, fds: list[int]) -> None:
        if self._inbox.qsize() >= 4:  # each answer is waited for: nobody sends ahead
            raise ValueError("out of turn")
        if isinstance(message, Ended) and not self.counted.done():
            tally = message.counted
            self.counted.set_result(Counted(**tally.model_dump()) if tally is not None else None)
        self._inbox.put_nowait((message, fds))

    def _on_closed(self, _: str) -> None:
        if not self.counted.done():
            self.counted.set_result(None)
        self._inbox.put_nowait(None)

    def close(self) -> None:
        """Let go of the connection and of what nobody took."""
        self._channel.finish()
        while not self._inbox.empty():
            for fd in (self._inbox.get_nowait() or (None, []))[1]:
                os.close(fd)

    def send(self, message: Entered | Served | Refused | Revoked | Gone, fds: Sequence[int] = ()) -> None:
        """Say something; whoever is gone hears nothing."""
        with contextlib.suppress(ChannelBroken):
            self._channel.send(message, fds)

    def refuse(self, detail: str, hint: str = "") -> None:
        """Say why not."""
        self.send(Refused(detail=detail[:8000], hint=hint))

    async def serve(self, roster: Roster, config: Config, trust: Trust) -> None:
        """Carry a sandbox from its first word to its end."""
        life: Life | None = None
        self._owner.waiting += 1
        waiting = True
        try:
            enter, _ = await self._next(Enter, ENTER_SECONDS)
            if enter.version != VERSION:
                raise BadInput("this daemon is of another version\nhint: restart it, or use --standalone")
            check_labels(enter.labels)
            life = roster.enter(Wanted(enter.profile, "namespace", enter.labels, enter.traceparent))
            self._owner.waiting -= 1
            waiting = False
            self._tell_entered(life, config, trust)
            made, fds = await self._next(Made, MAKE_SECONDS)
            spec, listeners = _taken(made, fds)
            _check(config, spec, listeners)
            await roster.carry(life, _Attached(self, life.id, listeners), spec)
            self.send(Served())
            await self._next(Proved, PROVE_SECONDS)
            roster.ready(life)
            await self._next(Ended, None)
        except _Over:
            pass
        except (BadInput, NotWired, Full, WorkerFailed, OSError) as error:
            detail, _, hint = str(error).partition("\nhint: ")
            self.refuse(detail or type(error).__name__, hint)
        finally:
            if waiting:
                self._owner.waiting -= 1
            if life is not None:
                proved = life.stage == "ready"
                await roster.end(life, "ended" if proved else "failed")
                self.send(Gone())

    async def _next[M](self, kind: type[M], seconds: float | None) -> tuple[M, list[int]]:
        """Return the next message, which must be of this kind, with its descriptors; raises _Over."""
        try:
            async with asyncio.timeout(seconds):
                item = await self._inbox.get()
        except TimeoutError:
            raise _Over from None
        if item is None or not isinstance(item[0], kind):
            for fd in item[1] if item is not None else ():
                os.close(fd)
            raise _Over
        return item[0], item[1]

    def _tell_entered(self, life: Life, config: Config, trust: Trust) -> None:
        file = life.keyring.file
        payloads = (
            life.keyring.policy.model_dump_json(),
            file.model_dump_json(by_alias=True, exclude_unset=True)
            if file is not None and file.credentials
            else "null",
            json.dumps(life.keyring.placeholders),
        )
        fds: list[int] = []
        try:
            fds.extend(sealed(payload.encode()) for payload in payloads)
            told = (str(trust.directory), trust.system_certificates)
            self.send(Entered(sandbox=life.id, trust=told, configuration=comparable(config)), fds)
        finally:
            for fd in fds:
                os.close(fd)


class _Attached(Plain):
    """The wiring of a sandbox that a `run` made."""

    def __init__(self, visit: _Visit, sandbox: str, listeners: Sequence[SandboxListener]) -> None:
        super().__init__(listeners)
        self._visit, self._sandbox = visit, sandbox

    async def halt(self, why: str) -> None:
        """Have its command killed; one that has ended needs no word."""
        if not self._visit.counted.done():
            self._visit.send(Revoked(why=why))

    async def close(self) -> Counted | None:
        """Return what the kernel counted, by the word of the `run` that made it."""
        try:
            async with asyncio.timeout(COUNT_SECONDS):
                counted = await asyncio.shield(self._visit.counted)
        except TimeoutError:
            counted = None
        if counted is None:
            say(
                f"{self._sandbox}: the kernel's counts were not told, so nobody knows whether a record is missing"
            )
        return counted


def _taken(made: Made, fds: list[int]) -> tuple[SandboxSpec | None, list[SandboxListener]]:
    """Return what came with a message; raises NotWired with nothing left open."""
    listeners: list[SandboxListener] = []
    try:
        if len(fds) != len(made.listeners) + 1:
            raise NotWired("descriptors are missing")
        spec = _SPEC.validate_json(unsealed(fds.pop(0)))
        for each in made.listeners:
            sock = socket.socket(fileno=fds[0])
            fds.pop(0)
            sock.setblocking(False)
            listeners.append(SandboxListener(each.kind, each.family, sock, each.port, each.hops))
    except (ValidationError, ChannelBroken, OSError, NotWired) as error:
        for listener in listeners:
            listener.socket.close()
        for fd in fds:
            os.close(fd)
        raise NotWired(f"what was handed over cannot be used: {type(error).__name__}") from None
    return spec, listeners


def _check(config: Config, spec: SandboxSpec | None, listeners: Sequence[SandboxListener]) -> None:
    """Nothing that a sandbox can write is ever read as a rule (law 9): raises BadInput, its listeners closed.

    There is no spec of what runs already: its files are its maker's.
    """
    if spec is None:
        return
    for path in (config.rules, config.credentials):
        if writable(spec, str(path)):
            for listener in listeners:
                listener.socket.close()
            raise BadInput(
                f"the sandbox could write {path} or a folder above it, which everybody lives by\n"
                "hint: run it elsewhere, or use --standalone, which reads rules once"
            )
