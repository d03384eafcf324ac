"""What the tests of the DNS server stand on: a sandbox, a recorder and a store that can fail, clients that wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any

import dns.message
import dns.rcode

from egressd.gate.dns.server import DnsServer
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.limits import Budget
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.journal.record import Record
from egressd.policy.attempt import Address, Name
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy

PATIENCE = 10.0


def policy(*hosts: str) -> CompiledPolicy:
    entries = tuple(
        EffectiveEntry(
            id=host.lstrip("*."), place=f"p.yaml:{line}", effect="allow", hosts=(host,), requests=("GET /**",)
        )
        for line, host in enumerate(hosts, 1)
    )
    return compile_policy(EffectivePolicy(profile="p", entries=entries))


@dataclass
class Book:
    """A recorder that remembers, and can be made to fail."""

    records: list[Record] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    put_error: Exception | None = None
    commit_error: Exception | None = None

    def put(self, record: Record) -> None:
        if self.put_error is not None:
            raise self.put_error
        self.records.append(record)

    async def commit(self, record: Record) -> None:
        await asyncio.sleep(0)
        if self.commit_error is not None:
            raise self.commit_error
        self.log.append(f"commit {record.host}")
        self.records.append(record)

    def told(self) -> list[tuple[str | None, str | None]]:
        return [(record.verdict, record.reason) for record in self.records]

    def total(self) -> int:
        return sum(record.count or 1 for record in self.records)


@dataclass
class Ground:
    """One served sandbox."""

    server: DnsServer
    sandbox: Sandbox
    book: Book
    udp_port: int
    tcp_port: int
    stored: list[tuple[Name, IPv4Address]]

    async def exchange(self, message: bytes) -> bytes:
        """Send one datagram and return the reply."""
        with self.client() as sock:
            sock.send(message)
            return await receive(sock)

    async def ask(self, name: str, qtype: str = "A", **options: Any) -> dns.message.Message:
        query = dns.message.make_query(name, qtype, use_edns=0, **options)
        return dns.message.from_wire(await self.exchange(query.to_wire()))

    async def outcome(self, name: str, qtype: str = "A") -> str:
        """Return the address that a name leads to, or the result code."""
        reply = await self.ask(name, qtype)
        return str(reply.answer[0][0]) if reply.answer else dns.rcode.to_text(reply.rcode())

    def client(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.connect(("127.0.0.1", self.udp_port))
        return sock

    @asynccontextmanager
    async def tcp(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.tcp_port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def receive(sock: socket.socket) -> bytes:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.get_running_loop().sock_recv(sock, 65535)


async def until(holds: Callable[[], bool]) -> None:
    """Wait on a condition, with a deadline."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 the conditions are plain state, nothing sets an event
            await asyncio.sleep(0.005)


def query(name: str, qtype: str = "A", ident: int = 1) -> bytes:
    return dns.message.make_query(name, qtype, use_edns=0, id=ident).to_wire()


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(2) + message for message in messages)


async def unframed(reader: asyncio.StreamReader) -> dns.message.Message:
    async with asyncio.timeout(PATIENCE):
        length = int.from_bytes(await reader.readexactly(2))
        return dns.message.from_wire(await reader.readexactly(length))


@asynccontextmanager
async def serving(
    *hosts: str,
    settings: Settings | None = None,
    store: Callable[[Name, IPv4Address], Any] | None = None,
    names: SyntheticNames | None = None,
    rcvbuf: int | None = None,
    tcp: type[socket.socket] = socket.socket,
    own: tuple[Address, ...] | None = None,
) -> AsyncIterator[Ground]:
    """Serve a sandbox that may reach `hosts` on loopback sockets."""
    settings = settings or Settings()
    book = Book()
    stored: list[tuple[Name, IPv4Address]] = []

    async def keep(name: Name, address: IPv4Address) -> None:
        book.log.append(f"store {'.'.join(name)}")
        stored.append((name, address))
        if store is not None:
            await store(name, address)

    sandbox = Sandbox(
        "s1", policy(*hosts), names or SyntheticNames(settings.dns_names), Budget(settings), {"task": "t"}
    )
    server = DnsServer(sandbox, settings, book, keep, own=own)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if rcvbuf is not None:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    udp.bind(("127.0.0.1", 0))
    listener = tcp(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    ports = udp.getsockname()[1], listener.getsockname()[1]
    server.serve_udp(udp)
    server.serve_tcp(listener)
    try:
        yield Ground(server, sandbox, book, *ports, stored)
    finally:
        await server.close()
