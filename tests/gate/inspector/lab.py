"""A sandbox, an origin and the inspector between them, on loopback sockets of this process.

The dialer is a fake that leads to the origin (loopback is on the floor of the real one), everything else is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, cast

from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.dialer import Dialed, DialFailed
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.inspector.engine import Engine
from egressd.gate.limits import Budget
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.gate.tls.stream import accept_plain
from egressd.journal.record import Record
from egressd.policy.attempt import Address, Decision, Name
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.reasons import Reason

if TYPE_CHECKING:
    from egressd.gate.dialer import Dialer
    from egressd.gate.tls.leaves import Leaves

NAME: Name = ("origin", "test", "example")
HOST = ".".join(NAME)
PUBLIC = IPv4Address("93.184.216.34")
DEADLINE = 40.0

type Origin = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Records:
    """A recorder that keeps what it is given; `broken` fails commits, `gate` holds them."""

    def __init__(self) -> None:
        self.all: list[Record] = []
        self.broken = False
        self.gate: asyncio.Event | None = None

    def put(self, record: Record) -> None:
        record.as_dict()
        self.all.append(record)

    async def commit(self, record: Record) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.broken:
            raise AuditUnavailable
        self.put(record)

    def decisions(self) -> list[tuple[str | None, str | None]]:
        """Verdict and reason of every decision, in order."""
        return [(record.verdict, record.reason) for record in self.all if record.event == "decision"]

    def ends(self) -> list[str | None]:
        """Reason of every end, in order."""
        return [record.reason for record in self.all if record.event == "end"]

    def of(self, event: str) -> list[Record]:
        return [record for record in self.all if record.event == event]


class LoopbackDialer:
    """Leads every permitted dial to one loopback port, as if that were the address that the name resolves to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address: Address = PUBLIC
        self.dials: list[tuple[Name | Address, int]] = []
        self.failure: DialFailed | None = None

    async def dial(
        self, host: Name | Address, port: int, permit: Callable[[Address], Reason | None]
    ) -> Dialed | DialFailed:
        self.dials.append((host, port))
        if self.failure is not None:
            return self.failure
        reason = permit(self.address)
        if reason is not None:
            return DialFailed(reason, f"{self.address} refused")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return Dialed(sock, self.address)


def entry(**changes: object) -> EffectiveEntry:
    """The one rule of the lab: anything but upgrades, over http, on ports 80 and 8444."""
    values: dict[str, object] = {
        "id": "origin",
        "place": "rules/profiles/lab.yaml:7",
        "effect": "allow",
        "hosts": (HOST,),
        "schemes": ("http",),
        "ports": (80, 8444),
        "requests": ("ANY /**",),
    }
    return EffectiveEntry.model_validate(values | changes)


@dataclass
class Lab:
    """What a test has in its hands."""

    records: Records
    dialer: LoopbackDialer
    sandbox: Sandbox
    services: Services
    engines: list[Engine] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def connection(self) -> Connection:
        made = Connection(self.sandbox, self.services, "transparent", Destination(80, proved=NAME))
        made.host = NAME
        made.decision = Decision("allow", Reason.RULE)
        return made

    async def dial(self, connection: Connection | None = None, first: bytes = b"") -> Client:
        """Connect as the sandbox does; what the door would have read is `first`."""
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        outer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        outer.setblocking(False)
        await loop.sock_connect(outer, listener.getsockname())
        inner, _ = listener.accept()
        listener.close()
        stream = await accept_plain(loop, inner, b"")
        engine = Engine(connection or self.connection(), stream)
        self.engines.append(engine)
        task = loop.create_task(engine.run(first))
        self.tasks.append(task)
        reader, writer = await asyncio.open_connection(sock=outer)
        client = Client(reader, writer, task)
        self.clients.append(client)
        return client


@dataclass
class Answer:
    """A response as the client got it; `interim` are the statuses before it."""

    status: int
    phrase: str
    headers: dict[str, str]
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    interim: list[int] = field(default_factory=list)


@dataclass
class Client:
    """A client that speaks exactly the bytes it is given, and reads strictly."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    task: asyncio.Task[None]

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(self, head: str, body: bytes = b"", *, host: str | None = HOST) -> Answer:
        """Send `METHOD target` with more header lines, and read the answer."""
        line, *fields = head.split("\n")
        lines = [f"{line} HTTP/1.1", *([f"Host: {host}"] if host else []), *fields]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return await self.answer(line.split(" ")[0])

    async def head(self) -> Answer:
        async with asyncio.timeout(DEADLINE):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        status_line, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        version, status, phrase = status_line.split(" ", 2)
        assert version == "HTTP/1.1"
        return Answer(int(status), phrase, fields_of(lines))

    async def answer(self, method: str = "GET") -> Answer:
        """Read interim responses and a final one with its body."""
        interim = []
        while (head := await self.head()).status < 200:
            interim.append(head.status)
        head.interim = interim
        if method == "HEAD" or head.status in (204, 304):
            return head
        async with asyncio.timeout(DEADLINE):
            if head.headers.get("transfer-encoding") == "chunked":
                await self._chunks(head)
            elif "content-length" in head.headers:
                head.body = await self.reader.readexactly(int(head.headers["content-length"]))
            else:
                head.body = await self.reader.read()
        return head

    async def _chunks(self, head: Answer) -> None:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            head.body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        lines = []
        while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
            lines.append(line.decode().strip())
        head.trailers = fields_of(lines)

    async def closed(self) -> bytes:
        """Wait until the server closes; returns what still came."""
        async with asyncio.timeout(DEADLINE):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def over(self) -> None:
        """Close, and wait until the inspector has let go."""
        await self.close()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(self.task, return_exceptions=True)


def fields_of(lines: list[str]) -> dict[str, str]:
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        assert name.lower() not in fields or name.lower() == "set-cookie", f"{name} twice"
        fields[name.lower()] = value.strip()
    return fields


@contextlib.asynccontextmanager
async def laboratory(
    origin: Origin, *entries: EffectiveEntry, settings: Settings | None = None
) -> AsyncIterator[Lab]:
    """The lab with this origin; at the end no task, stream or live thing may be left."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await origin(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024 * 1024)
    settings = settings or Settings()
    records = Records()
    dialer = LoopbackDialer(server.sockets[0].getsockname()[1])
    policy = compile_policy(EffectivePolicy(profile="lab", entries=entries or (entry(),)))
    sandbox = Sandbox("sb-1", policy, SyntheticNames(16), Budget(settings))
    services = Services(settings, records, cast("Dialer", dialer), cast("Leaves", None))
    lab = Lab(records, dialer, sandbox, services)
    try:
        yield lab
    finally:
        for engine in lab.engines:
            engine.cut(Reason.SHUTDOWN)
        await asyncio.gather(*lab.tasks, return_exceptions=True)
        for client in lab.clients:
            await client.close()
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
        assert not sandbox.live


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until something holds, looking often; TimeoutError when it never does."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 # what is waited for are states of objects that know no event
            await asyncio.sleep(0.002)


def run(test: Coroutine[None, None, None]) -> None:
    """Run a test to its end in a loop of its own; debug mode of asyncio is left off, as its log is not ours."""

    async def bounded() -> None:
        async with asyncio.timeout(4 * DEADLINE):
            await test

    asyncio.run(bounded())
