"""Listeners that many sandboxes share, in one worker: who may come by them, and where each connection goes.

The sandboxes are those of this worker alone; a token of another worker's sandbox is a stranger's here.
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
from egressd.gate.strangers import Strangers, Stray
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

CLAIM_TIMEOUT: Final = 3.0
"""Seconds that control may take to keep a source."""


class Tenancy(Protocol):
    """What a sandbox of this worker is to its shared listeners."""

    dns: DnsServer | None

    async def visit(self, client: socket.socket, entrance: Entrance) -> None:
        """Carry a connection to its end."""


class Sharing:
    """The shared listeners of a worker and the sandboxes that may use them. `send` asks control to keep a source."""

    def __init__(
        self, services: Services, tenant_of: Callable[[str], Tenancy | None], send: Callable[[Claim], None]
    ) -> None:
        """Nothing is shared before `share`, and nobody known before `enter`."""
        self._register = Register()
        self._tenant_of = tenant_of
        self._send = send
        self._settings = services.settings
        self._strangers = Strangers(services.recorder)
        self._shares: dict[str, tuple[Lobby, list[Callable[[], None]]]] = {}
        self._claims: dict[int, asyncio.Future[bool]] = {}
        self._claim_number = 0

    def enter(self, message: Serve) -> None:
        """Know a sandbox by what control says of it; raises ValueError."""
        token = bytes.fromhex(message.token) if message.token is not None else None
        source = read_address(message.source) if message.source is not None else None
        if token is not None or source is not None:
            self._register.enter(message.sandbox, token, source)

    def leave(self, sandbox: str) -> None:
        """Know it no longer: its token and its source are a stranger's."""
        self._register.leave(sandbox)

    def share(self, message: Share, sockets: Sequence[socket.socket]) -> None:
        """Serve these listeners, which are closed by `unshare`; raises ValueError."""
        if message.share in self._shares:
            raise ValueError("shared already")
        lobby = Lobby(self._settings, self._register, self._strangers, self._claim, self._admit)
        closers: list[Callable[[], None]] = []
        self._shares[message.share] = lobby, closers
        for spec, sock in zip(message.listeners, sockets, strict=True):
            closers.append(self._listen(spec, sock, lobby))

    async def unshare(self, share: str) -> None:
        """Close the listeners of a share; who is in its lobby must leave, who was known goes on."""
        lobby, closers = self._shares.pop(share, (None, ()))
        for close in closers:
            close()
        await asyncio.sleep(0)  # what was accepted last begins, and is recorded
        if lobby is not None:
            await lobby.close()
        self._strangers.flush()

    def _listen(self, spec: ListenerSpec, sock: socket.socket, lobby: Lobby) -> Callable[[], None]:
        hops = read_networks(spec.hops)
        match spec.kind:
            case "dns-udp":
                return SharedResolver(sock, self._resolver_of, self._strangers).close
            case "dns-tcp":
                return Acceptor(sock, self._carry_dns).close
            case "explicit" | "socks" | "direct" as way:
                return Acceptor(sock, lambda client: lobby.receive(client, way, spec.port, hops)).close
            case _:
                raise ValueError(f"a listener of kind {spec.kind} cannot be shared")

    async def _carry_dns(self, client: socket.socket) -> None:
        carry_shared(client, self._resolver_of, self._strangers)

    def _resolver_of(self, source: Address) -> DnsServer | None:
        owner = self._register.owner(source)
        tenant = self._tenant_of(owner) if owner is not None else None
        return tenant.dns if tenant is not None else None

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
