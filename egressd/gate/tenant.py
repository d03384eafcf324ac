"""A sandbox in its worker, with everything of it that is open here."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
import time
from collections.abc import Callable

from egressd.gate.connection import Services
from egressd.gate.denials import Remembering
from egressd.gate.dns.server import DnsServer, Store
from egressd.gate.door.accept import Acceptor
from egressd.gate.door.entrance import Entrance
from egressd.gate.door.hops import read_networks
from egressd.gate.door.visit import Visit
from egressd.gate.floods import Folding
from egressd.gate.messages import ListenerSpec
from egressd.gate.packet_log import PacketCounts, PacketLog
from egressd.gate.sandbox import Sandbox
from egressd.policy.grants import granted
from egressd.policy.reasons import Reason

_CUT_TIMEOUT = 1.0


class Tenant:
    """A sandbox, its listeners and what came by them. `store` has control keep a name's address."""

    def __init__(self, sandbox: Sandbox, services: Services, store: Store) -> None:
        """Nothing is listened on before `listen`."""
        self.sandbox = sandbox
        folding = Folding(services.recorder)
        self.services = dataclasses.replace(services, recorder=Remembering(folding, sandbox.denials))
        self.dns = DnsServer(sandbox, services.settings, self.services.recorder, store, own=sandbox.own)
        self.packets = PacketCounts(sandbox, self.services.recorder)
        self.visits: set[asyncio.Task[None]] = set()
        self._closers: list[Callable[[], None]] = [folding.close, self.packets.flush]
        self._listeners: list[Acceptor | PacketLog] = []
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, spec: ListenerSpec, sock: socket.socket) -> None:
        """Serve one of the sandbox's own listeners, which it owns from then on; raises ValueError."""
        if spec.kind == "dns-udp":
            self.dns.serve_udp(sock)
        elif spec.kind == "dns-tcp":
            self.dns.serve_tcp(sock)
        elif spec.kind == "nflog":
            self._listeners.append(PacketLog(sock, self.packets))
        else:
            entrance = Entrance(spec.kind, spec.port, hops=read_networks(spec.hops))
            self._listeners.append(Acceptor(sock, lambda client: self.visit(client, entrance)))

    def rejudge(self) -> None:
        """Judge every open flow again, now and whenever something of the policy or of its grants expires."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.sandbox.revoked:
            return
        sandbox = self.sandbox
        sandbox.policy = granted(sandbox.policy, sandbox.standing.grants, sandbox.id)
        now = time.time()
        for live in tuple(sandbox.live):
            live.rejudge(now)
        left = self.sandbox.policy.next_change(now) - now
        if left < math.inf:  # looked at hourly at the latest: the wall clock may be set
            self._timer = asyncio.get_running_loop().call_later(min(left, 3600.0), self.rejudge)

    async def step_aside(self) -> None:
        """Leave the listeners to a successor, with all that it has to know; what is open goes on to its end."""
        for listener in self._listeners:
            listener.leave()
        self._listeners.clear()
        await self.dns.leave()
        self.sandbox.retiring = True
        for live in tuple(self.sandbox.live):
            live.retire()
        self.sandbox.budget.part(time.monotonic(), self.sandbox.policy.effective)

    async def close(self, reason: Reason) -> None:
        """End every flow and listener; returns once the end records are handed over."""
        if self._timer is not None:
            self._timer.cancel()
        self.sandbox.revoked = True
        for close in self._closers:
            close()
        for listener in self._listeners:
            listener.close()
        await asyncio.sleep(0)  # what was accepted last begins, and is recorded
        for live in tuple(self.sandbox.live):
            live.cut(reason)
        await self.dns.close()
        if self.visits:
            await asyncio.wait(self.visits, timeout=_CUT_TIMEOUT)

    async def visit(self, client: socket.socket, entrance: Entrance) -> None:
        """Carry one accepted connection, known to `close` while it lasts."""
        task = asyncio.current_task()
        assert task is not None
        self.visits.add(task)
        try:
            await Visit(client, self.sandbox, self.services, entrance).run()
        finally:
            self.visits.discard(task)
