"""The inspector between two streams that exist in memory alone: a test says what arrives, and reads what was done."""

from __future__ import annotations

import asyncio
import ssl
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, cast
from unittest import mock

from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.inspector import uplink
from egressd.gate.inspector.engine import Engine
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.upstream import Opened, OpenFailed
from egressd.gate.limits import Budget
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.gate.tls.stream import ByteStream, StreamOwner
from egressd.policy.attempt import Decision
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, NAME, Records, entry

if TYPE_CHECKING:
    from egressd.gate.dialer import Dialer
    from egressd.gate.tls.leaves import Leaves


PUBLIC = IPv4Address("93.184.216.34")
VERIFYING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What an upstream over TLS was verified by."""


class FakeStream:
    """What a `ByteStream` is to its owner; `written` and `state` say what the owner did."""

    alpn: bytes | None = None
    cipher = tls_version = None
    tls = False
    clean: bool | None = None

    def __init__(self) -> None:
        self.owner: StreamOwner | None = None
        self.written = b""
        self.state = "open"
        self.reading = True
        self.paused = False
        self.waiting = 0
        self._held: list[bytes] = []

    @property
    def closed(self) -> bool:
        return self.state != "open"

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self._end("closed")

    def linger(self) -> None:
        self._end("lingering")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, state: str) -> None:
        if not self.closed:
            self.state = state

    def is_read(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        held, self._held = self._held, []
        for data in held:
            asyncio.get_running_loop().call_soon(self.arrive, data)

    def arrive(self, data: bytes) -> None:
        """Data comes; like a socket's it waits while nobody reads."""
        if not self.reading:
            self._held.append(data)
        elif self.owner is not None and not self.closed:
            self.owner.on_data(cast(ByteStream, self), data)

    def end(self) -> None:
        """The peer ends its side."""
        if self.owner is not None and not self.closed and self.reading:
            self.clean = True
            self.owner.on_eof(cast(ByteStream, self))

    def lose(self) -> None:
        """The stream is gone."""
        self.state = "lost" if not self.closed else self.state
        if self.owner is not None:
            self.owner.on_lost(cast(ByteStream, self), None)


type Early = FakeStream | OpenFailed | None


class Scene:
    """One connection; `client` is the sandbox's stream, `upstreams` are those that were opened, in order."""

    def __init__(self, *entries: EffectiveEntry, tls: bool = False, early: Early = None) -> None:
        """Under these rules, or the lab's one; `early` is what the door has dialled, by a stream if it succeeded."""
        policy = compile_policy(EffectivePolicy(profile="lab", entries=entries or (entry(),)))
        settings = Settings()
        self.records = Records()
        sandbox = Sandbox("sb-1", policy, SyntheticNames(1), Budget(settings))
        services = Services(settings, self.records, cast("Dialer", None), cast("Leaves", None))
        port = 443 if tls else 80
        self.context = VERIFYING if tls else None
        connection = Connection(sandbox, services, "transparent", Destination(port, proved=NAME))
        connection.host, connection.tls = NAME, tls
        connection.decision = Decision("allow", Reason.RULE)
        self.client = FakeStream()
        self.upstreams: list[FakeStream] = []
        opened = self._opened(early, port) if isinstance(early, FakeStream) else early
        self.engine = Engine(connection, cast(ByteStream, self.client), opened)
        self._patch = mock.patch.object(uplink, "open_upstream", self._open)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Scene:
        self._patch.start()
        self._task = asyncio.get_running_loop().create_task(self.engine.run())
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.cut(Reason.SHUTDOWN)
        self._patch.stop()
        assert self._task is not None
        await self._task

    async def _open(self, exchange: Exchange) -> Opened:
        assert exchange.admitted
        assert exchange.bound is not None
        assert exchange.permits(PUBLIC) is None
        return self._opened(FakeStream(), exchange.bound.port)

    def _opened(self, stream: FakeStream, port: int) -> Opened:
        self.upstreams.append(stream)
        return Opened(cast(ByteStream, stream), PUBLIC, "sb-1", HOST, port, self.context)

    def fill(self, stream: FakeStream, *, full: bool) -> None:
        """The peer of a stream stops to read, or goes on."""
        stream.paused = full
        told = self.engine.on_pause if full else self.engine.on_resume
        told(cast(ByteStream, stream))

    async def settle(self) -> None:
        """Let everything happen that is ready to."""
        for _ in range(8):
            await asyncio.sleep(0)

    async def says(self, data: bytes) -> bytes:
        """The client says something; returns what it is answered."""
        before = len(self.client.written)
        self.client.arrive(data)
        await self.settle()
        return self.client.written[before:]

    async def origin_says(self, data: bytes) -> bytes:
        """The last upstream says something; returns what reaches the client of it."""
        before = len(self.client.written)
        self.upstreams[-1].arrive(data)
        await self.settle()
        return self.client.written[before:]
