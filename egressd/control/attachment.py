"""`egressd run` beside a daemon: makes the sandbox here, has it served there, runs the command, and ends with it.

The namespace and egressd's sockets in it are made by this process, which hands the sockets over and keeps none: when the daemon
lets go of them, or dies, nothing listens in the sandbox any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from egressd.control.config import Config, comparable
from egressd.control.handover import (
    TO_RUN,
    Ended,
    Enter,
    Entered,
    Gone,
    Made,
    Proved,
    Refused,
    Revoked,
    Served,
    Tally,
    ToRun,
)
from egressd.control.keyring import Keyring
from egressd.control.proof import NotReady, prove
from egressd.control.secrecy import close_process
from egressd.control.session import place_of
from egressd.control.surroundings import BadInput, Request, spec_of
from egressd.control.trust import Trust
from egressd.control.voice import say
from egressd.gate.channel import Channel, ChannelBroken, sealed, unsealed
from egressd.gate.messages import ListenerSpec
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectivePolicy
from egressd.wiring.container import Container
from egressd.wiring.errors import WiringError
from egressd.wiring.namespace import Namespace
from egressd.wiring.spec import SandboxSpec

_OWN_FAILURE: Final = 125
_COUNT_SECONDS: Final = 10.0
_GONE_SECONDS: Final = 10.0
_FILE: Final = TypeAdapter(CredentialsFile | None)
_SPEC: Final = TypeAdapter(SandboxSpec | None)
_STANDALONE: Final = "`--standalone` runs it without the daemon"


class Attachment:
    """A sandbox that a daemon serves, and its command."""

    def __init__(
        self, request: Request, config: Config, environ: Mapping[str, str], sock: socket.socket
    ) -> None:
        """`sock` is connected to the daemon's attach socket, and is closed by `run`."""
        self._request, self._config, self._environ, self._sock = request, config, environ, sock
        self._namespace: Namespace | Container | None = None

    async def run(self) -> int:
        """Make the sandbox, run the command, take everything down; returns the command's exit status."""
        close_process()
        self._answers: asyncio.Queue[tuple[ToRun, list[int]]] = asyncio.Queue()
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._channel: Channel[Any] = Channel(self._sock, TO_RUN, self._on_message, self._on_closed)
        try:
            spec, policy, notes = await self._enter()
            namespace = await self._make(spec)
            for note in (*notes, *namespace.notes):
                say(note)
            await self._hand_over(namespace, spec)
            async with asyncio.timeout(self._request.ready_timeout):
                await prove(namespace, policy, self._config.dns.denied)
            self._send(Proved())
            if self._request.attaches:
                say(f"attached: {self._sandbox}")
            return await self._carry(namespace)
        finally:
            await self._take_down()

    # the daemon's words

    def _on_message(self, message: ToRun, fds: list[int]) -> None:
        match message:
            case Revoked():
                self._end(f"the sandbox was ended ({message.why})")
            case Gone():
                self._gone.set()
            case _:
                self._answers.put_nowait((message, fds))

    def _on_closed(self, _: str) -> None:
        self._end("the daemon is gone; nothing can leave the sandbox, so it is ended")
        self._gone.set()

    def _end(self, why: str) -> None:
        if not self._over.done():
            self._over.set_result(why)

    def _send(self, message: Enter | Made | Proved | Ended, fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(ChannelBroken):  # `_over` says so
            self._channel.send(message, fds)

    async def _answer[M](self, kind: type[M]) -> tuple[M, list[int]]:
        """Return the daemon's answer; raises BadInput with what it says instead, NotReady where it says nothing."""
        waiting = asyncio.ensure_future(self._answers.get())
        try:
            async with asyncio.timeout(self._request.ready_timeout):
                await _first(waiting, self._over)
        except TimeoutError:
            raise NotReady(f"the daemon did not answer in {self._request.ready_timeout:g} s") from None
        finally:
            if not waiting.done():
                waiting.cancel()
        if not waiting.done() or waiting.cancelled():
            raise NotReady(self._over.result())
        message, fds = waiting.result()
        if isinstance(message, kind):
            return message, fds
        for fd in fds:
            os.close(fd)
        if isinstance(message, Refused):
            raise BadInput(f"{message.detail}{f'{chr(10)}hint: {message.hint}' if message.hint else ''}")
        raise NotReady("the daemon speaks another version of this protocol")

    # making

    async def _enter(self) -> tuple[SandboxSpec | None, EffectivePolicy, list[str]]:
        request = self._request
        self._send(Enter(profile=request.profile, labels=request.labels, traceparent=request.traceparent))
        entered, fds = await self._answer(Entered)
        payloads = [unsealed(fd) for fd in fds]
        self._sandbox = entered.sandbox
        if differing := _differing(entered.configuration, comparable(self._config)):
            raise BadInput(f"the daemon goes by another configuration: {differing}\nhint: {_STANDALONE}")
        policy = EffectivePolicy.model_validate_json(payloads[0])
        keyring = Keyring(_FILE.validate_json(payloads[1]), policy, self._config.upstream.ca_bundle)
        keyring.placeholders = json.loads(payloads[2])
        trust = Trust(Path(entered.trust[0]), entered.trust[1])
        spec, notes = spec_of(request, self._config, self._environ, entered.sandbox, trust, keyring)
        return spec, policy, notes

    async def _make(self, spec: SandboxSpec | None) -> Namespace | Container:
        # Its maker has read the rules back, the last thing it did before it gave the sockets away.
        namespace = self._namespace = await place_of(self._request, spec)
        return namespace

    async def _hand_over(self, namespace: Namespace | Container, spec: SandboxSpec | None) -> None:
        # The daemon judges by what it sees and by the names of its variables; their values are the caller's.
        told = None
        if spec is not None:
            told = dataclasses.replace(spec, env=dict.fromkeys(spec.env, ""), trust={}, seeds={})
        payload = sealed(_SPEC.dump_json(told))
        try:
            listeners = tuple(
                ListenerSpec.model_validate({"kind": each.kind, "family": each.family})
                for each in namespace.listeners
            )
            self._send(
                Made(listeners=listeners),
                (payload, *(each.socket.fileno() for each in namespace.listeners)),
            )
        finally:
            os.close(payload)
        await self._answer(Served)
        for each in namespace.listeners:
            each.socket.close()

    # running

    async def _carry(self, namespace: Namespace | Container) -> int:
        command = asyncio.create_task(namespace.launch(self._request.command))
        try:
            await _first(command, self._over)
            if command.done():
                return command.result()
            say(self._over.result())
            return _OWN_FAILURE
        finally:
            command.cancel()
            await asyncio.gather(command, return_exceptions=True)

    async def _take_down(self) -> None:
        try:
            if self._namespace is not None:
                await (
                    self._namespace.end()
                )  # from here on nothing more is sent, so that the kernel's counts are final
                self._send(Ended(counted=await _tally(self._namespace)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GONE_SECONDS):
                        await self._gone.wait()
        finally:
            self._channel.finish()
            if self._namespace is not None:
                await self._namespace.destroy()


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Return when one of these is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _tally(namespace: Namespace | Container) -> Tally | None:
    try:
        async with asyncio.timeout(_COUNT_SECONDS):
            counted = await namespace.counted()
    except (WiringError, OSError, TimeoutError) as error:
        say(f"the kernel's counts could not be read: {str(error) or type(error).__name__}")
        return None
    return Tally(**counted._asdict()) if counted is not None else None


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Say which keys have another value there, and which value."""
    normal = json.loads(json.dumps(ours))
    keys = sorted(key for key in {*theirs, *normal} if theirs.get(key) != normal.get(key))
    return "; ".join(
        f"{key} is {json.dumps(theirs.get(key))}, here {json.dumps(normal.get(key))}" for key in keys
    )
