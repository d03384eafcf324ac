"""Listeners that many sandboxes share, in one worker: who may come by them, and where each connection goes.

Where many workers carry the sandboxes of one network, one of them has its listeners: there the others' are neighbours, known by
the same proofs, and each of their connections is handed to its own worker by way of control. Listeners of one interface know the
sandboxes behind that interface and no others, so that an address is worth nothing at another one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from egressd.gate.buckets import TokenBucket
from egressd.gate.channel import ChannelBroken
from egressd.gate.connection import Services
from egressd.gate.dns.server import DnsServer
from egressd.gate.dns.shared import SharedResolver, carry_shared
from egressd.gate.door.accept import Acceptor
from egressd.gate.door.entrance import CHANNELS, Entrance
from egressd.gate.door.hops import read_networks
from egressd.gate.door.lobby import Lobby
from egressd.gate.door.splice import reset_on_close
from egressd.gate.door.tokens import Register, read_address
from egressd.gate.messages import (
    ARRIVAL_LIMIT,
    Claim,
    Claimed,
    Introduce,
    Introduced,
    ListenerSpec,
    Neighbour,
    Serve,
    Share,
    Welcome,
)
from egressd.gate.packet_log import PacketCounts, SharedPacketLog
from egressd.gate.strangers import Strangers, Stray
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

CLAIM_TIMEOUT: Final = 3.0
"""Seconds that control may take to keep a source."""
_BURST_SECONDS: Final = 2.0


class Tenancy(Protocol):
    """What a sandbox of this worker is to its shared listeners."""

    dns: DnsServer
    packets: PacketCounts

    async def visit(self, client: socket.socket, entrance: Entrance) -> None:
        """Carry a connection to its end."""


class Send(Protocol):
    """Says something to control; raises ChannelBroken, or OSError when there are no descriptors for it."""

    def __call__(self, message: Claim | Introduce, descriptors: Sequence[int] = ()) -> None:
        """Send it."""


class _Listener(Protocol):
    def close(self) -> None:
        """Take what waits, and close."""

    def leave(self) -> None:
        """Let what waits wait for a successor, and close."""


class Sharing:
    """The shared listeners of a worker and the sandboxes that may use them.

    `send` asks control to keep a source, or to hand a neighbour its connection.
    """

    def __init__(self, services: Services, tenant_of: Callable[[str], Tenancy | None], send: Send) -> None:
        """Nothing is shared before `share`, and nobody known before `enter`."""
        self._registers: dict[str, Register] = {}
        self._interfaces: dict[str, str] = {}
        self._tenant_of = tenant_of
        self._send = send
        self._settings = services.settings
        self._strangers = Strangers(services.recorder)
        self._shares: dict[str, tuple[Lobby, list[_Listener]]] = {}
        self._packet_logs: dict[str, SharedPacketLog] = {}
        self._claims: dict[int, asyncio.Future[bool]] = {}
        self._introductions: dict[int, asyncio.Future[str | None]] = {}
        self._introducing: set[asyncio.Task[None]] = set()
        self._neighbours: dict[str, TokenBucket] = {}
        self._number = 0

    def enter(self, message: Serve | Neighbour) -> None:
        """Know a sandbox by what control says of it; raises ValueError."""
        token = bytes.fromhex(message.token) if message.token is not None else None
        source = read_address(message.source) if message.source is not None else None
        if token is not None or source is not None:
            self._register(message.interface).enter(message.sandbox, token, source)
            self._interfaces[message.sandbox] = message.interface
        if isinstance(message, Neighbour):
            # What its worker would refuse is not worth control's time: the same budget as there (`limits.Budget`).
            rate = self._settings.new_connections_per_second
            self._neighbours[message.sandbox] = TokenBucket(_BURST_SECONDS * rate, _BURST_SECONDS)

    def leave(self, sandbox: str) -> None:
        """Know it no longer: its token and its source are a stranger's."""
        self._neighbours.pop(sandbox, None)
        interface = self._interfaces.pop(sandbox, None)
        if interface is None:
            return
        if interface in self._packet_logs:  # what it has sent so far is still its own
            self._packet_logs[interface].drain()
        self._register(interface).leave(sandbox)

    def _register(self, interface: str) -> Register:
        return self._registers.setdefault(interface, Register())

    def share(self, message: Share, sockets: Sequence[socket.socket]) -> None:
        """Serve these listeners, which are closed by `unshare`; raises ValueError."""
        if message.share in self._shares:
            raise ValueError("shared already")
        register = self._register(message.interface)
        lobby = Lobby(self._settings, register, self._strangers, self._claim, self._admit)
        listeners: list[_Listener] = []
        self._shares[message.share] = lobby, listeners
        for spec, sock in zip(message.listeners, sockets, strict=True):
            listeners.append(self._listen(spec, sock, lobby, message.interface))

    async def unshare(self, share: str) -> None:
        """Close the listeners of a share; who is in its lobby must leave, who was known goes on."""
        lobby, listeners = self._shares.pop(share, (None, ()))
        for listener in listeners:
            listener.close()
            self._forget_log(listener)
        await asyncio.sleep(0)  # what was accepted last begins, and is recorded
        if lobby is not None:
            await lobby.close()
        self._strangers.flush()

    def step_aside(self) -> None:
        """Leave every listener to a successor; who is in a lobby, or known, goes on."""
        for _, listeners in self._shares.values():
            for listener in listeners:
                listener.leave()
                self._forget_log(listener)
            listeners.clear()
        self._strangers.flush()

    def guests(self) -> list[asyncio.Task[None]]:
        """Return what is in the lobbies, or on its way to a neighbour."""
        return [*(task for lobby, _ in self._shares.values() for task in lobby.guests), *self._introducing]

    def _forget_log(self, listener: _Listener) -> None:
        self._packet_logs = {at: log for at, log in self._packet_logs.items() if log is not listener}

    def _listen(self, spec: ListenerSpec, sock: socket.socket, lobby: Lobby, interface: str) -> _Listener:
        hops = read_networks(spec.hops)

        def resolver_of(source: Address) -> DnsServer | None:
            tenant = self._tenant_at(interface, source)
            return tenant.dns if tenant is not None else None

        async def carry_dns(client: socket.socket) -> None:
            carry_shared(client, resolver_of, self._strangers)

        match spec.kind:
            case "dns-udp":
                return SharedResolver(sock, resolver_of, self._strangers)
            case "dns-tcp":
                return Acceptor(sock, carry_dns)
            case "nflog":
                return self._log_packets(sock, interface)
            case way:
                return Acceptor(sock, lambda client: lobby.receive(client, way, spec.port, hops))

    def _log_packets(self, sock: socket.socket, interface: str) -> _Listener:
        def counts_of(source: Address) -> PacketCounts | None:
            tenant = self._tenant_at(interface, source)
            return tenant.packets if tenant is not None else None

        log = self._packet_logs[interface] = SharedPacketLog(sock, counts_of, self._strangers)
        return log

    def _tenant_at(self, interface: str, source: Address) -> Tenancy | None:
        owner = self._register(interface).owner(source)
        return self._tenant_of(owner) if owner is not None else None

    async def _admit(self, sandbox: str, client: socket.socket, entrance: Entrance) -> None:
        tenant = self._tenant_of(sandbox)
        if tenant is not None:
            await tenant.visit(client, entrance)
            return
        reason: str | None = Reason.REVOKED  # since it was known
        if sandbox in self._neighbours:
            task = asyncio.current_task()
            assert task is not None
            self._introducing.add(task)
            try:
                reason = await self._introduce(sandbox, client, entrance)
            finally:
                self._introducing.discard(task)
        if reason is not None:
            self._strangers.note(Stray("connection", CHANNELS[entrance.way], Reason(reason), entrance.source))
            reset_on_close(client)
        client.close()

    # neighbours

    async def _introduce(self, sandbox: str, client: socket.socket, entrance: Entrance) -> str | None:
        """Have control hand a connection to the worker of its sandbox; returns why nobody has it, if so."""
        if not self._neighbours[sandbox].take(time.monotonic()):
            return Reason.RATE_LIMITED
        if len(entrance.data) > ARRIVAL_LIMIT or entrance.way not in ("explicit", "socks"):
            return Reason.HEAD_TOO_LARGE
        self._number += 1
        number = self._number
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._introductions[number] = answer
        message = Introduce(
            introduction=number,
            sandbox=sandbox,
            way=entrance.way,
            source=str(entrance.source),
            data=base64.b64encode(entrance.data).decode("ascii"),
            greeted=entrance.greeted,
        )
        try:
            self._send(message, (client.fileno(),))
            return await answer  # control's alone to give: who gave up would answer a second time
        except OSError:
            return Reason.TOO_MANY_CONNECTIONS
        except ChannelBroken:  # and with it this worker
            return Reason.SHUTDOWN
        finally:
            self._introductions.pop(number, None)

    def introduced(self, message: Introduced) -> None:
        """Hear control's answer."""
        answer = self._introductions.get(message.introduction)
        if answer is not None:
            with contextlib.suppress(asyncio.InvalidStateError):
                answer.set_result(message.reason)

    async def welcome(self, message: Welcome, client: socket.socket) -> None:
        """Carry a connection of one of our own that another worker has accepted."""
        client.setblocking(False)
        data = base64.b64decode(message.data, validate=True)
        source = read_address(message.source)
        entrance = Entrance(message.way, source=source, data=data, greeted=message.greeted)
        await self._admit(message.sandbox, client, entrance)

    # sources

    async def _claim(self, sandbox: str, source: Address) -> bool:
        """Have control keep a source; raises TimeoutError or ChannelBroken."""
        self._number += 1
        number = self._number
        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._claims[number] = kept
        try:
            self._send(Claim(claim=number, sandbox=sandbox, source=str(source)))
            async with asyncio.timeout(CLAIM_TIMEOUT):
                return await kept
        finally:
            self._claims.pop(number, None)

    def claimed(self, message: Claimed) -> None:
        """Hear control's answer."""
        kept = self._claims.get(message.claim)
        if kept is not None:
            with contextlib.suppress(asyncio.InvalidStateError):
                kept.set_result(message.ok)
