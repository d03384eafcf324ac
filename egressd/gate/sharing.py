"""Listeners that many sandboxes share, in one worker: who may come by them, and where each connection goes.

The sandboxes are those of this worker alone; a token of another worker's sandbox is a stranger's here. Listeners of one interface
know the sandboxes behind that interface and no others, so that an address is worth nothing at another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from egressd.gate.connection import Services
from egressd.gate.dns.server import DnsServer
from egressd.gate.dns.shared import SharedResolver, carry_shared
from egressd.gate.door.accept import Acceptor
from egressd.gate.door.entrance import CHANNELS, Entrance
from egressd.gate.door.hops import read_networks
from egressd.gate.door.lobby import Lobby
from egressd.gate.door.splice import reset_on_close
from egressd.gate.door.tokens import Register, read_address
from egressd.gate.messages import Claim, Claimed, ListenerSpec, Serve, Share
from egressd.gate.packet_log import PacketCounts, SharedPacketLog
from egressd.gate.strangers import Strangers, Stray
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

CLAIM_TIMEOUT: Final = 3.0
"""Seconds that control may take to keep a source."""


class Tenancy(Protocol):
    """What a sandbox of this worker is to its shared listeners."""

    dns: DnsServer
    packets: PacketCounts

    async def visit(self, client: socket.socket, entrance: Entrance) -> None:
        """Carry a connection to its end."""


class _Listener(Protocol):
    def close(self) -> None:
        """Take what waits, and close."""

    def leave(self) -> None:
        """Let what waits wait for a successor, and close."""


class Sharing:
    """The shared listeners of a worker and the sandboxes that may use them. `send` asks control to keep a source."""

    def __init__(
        self, services: Services, tenant_of: Callable[[str], Tenancy | None], send: Callable[[Claim], None]
    ) -> None:
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
        self._claim_number = 0

    def enter(self, message: Serve) -> None:
        """Know a sandbox by what control says of it; raises ValueError."""
        token = bytes.fromhex(message.token) if message.token is not None else None
        source = read_address(message.source) if message.source is not None else None
        if token is not None or source is not None:
            self._register(message.interface).enter(message.sandbox, token, source)
            self._interfaces[message.sandbox] = message.interface

    def leave(self, sandbox: str) -> None:
        """Know it no longer: its token and its source are a stranger's."""
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
        """Return what is in the lobbies."""
        return [task for lobby, _ in self._shares.values() for task in lobby.guests]

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
        # Revoked since it was known.
        self._strangers.note(Stray("connection", CHANNELS[entrance.way], Reason.REVOKED, entrance.source))
        reset_on_close(client)
        client.close()

    # sources

    async def _claim(self, sandbox: str, source: Address) -> bool:
        """Have control keep a source; raises TimeoutError or ChannelBroken."""
        self._claim_number += 1
        number = self._claim_number
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
