"""A name server for tests: answers as its handler says, over UDP and TCP on one loopback port, and remembers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

type Transport = Literal["udp", "tcp"]
type Handler = Callable[[dns.message.Message, Transport], Iterable[bytes]]


@dataclass
class Authority:
    """The server's address and what it was asked: transport, name as spelled, type."""

    port: int
    asked: list[tuple[Transport, str, str]] = field(default_factory=list)
    queries: list[dns.message.Message] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    @property
    def udp(self) -> str:
        return f"udp://127.0.0.1:{self.port}"

    @property
    def names(self) -> list[tuple[str, str]]:
        return sorted((name.lower(), kind) for _, name, kind in self.asked)


def answer(
    query: dns.message.Message, *lines: str, rcode: str = "NOERROR", authority: Iterable[str] = ()
) -> bytes:
    """Return a reply whose answer section holds zone-file lines (`owner ttl IN type data`)."""
    reply = dns.message.make_response(query, recursion_available=True)
    reply.set_rcode(dns.rcode.from_text(rcode))
    for section, texts in ((reply.answer, lines), (reply.authority, authority)):
        for text in texts:
            owner, ttl, rdclass, kind, data = text.split(None, 4)
            section.append(dns.rrset.from_text(owner, int(ttl), rdclass, kind, data))
    return reply.to_wire()


def zone(**records: str) -> Handler:
    """Answer from `name_kind="data"` pairs, dots written as `__`; NXDOMAIN for unknown names."""
    table = {tuple(key.rsplit("_", 1)): value for key, value in records.items()}

    def handle(query: dns.message.Message, _transport: Transport) -> Iterable[bytes]:
        [question] = query.question
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        key = name.replace(".", "__")
        data = table.get((key, kind))
        if data is not None:
            return [answer(query, *(f"{name}. 60 IN {kind} {item}" for item in data.split()))]
        known = any(held == key for held, *_ in table)
        soa = ["test. 60 IN SOA . . 1 1 1 1 60"]
        return [answer(query, rcode="NOERROR" if known else "NXDOMAIN", authority=soa)]

    return handle


def silent(_query: dns.message.Message, _transport: Transport) -> Iterable[bytes]:
    return []


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, authority: Authority, handler: Handler) -> None:
        self.authority = authority
        self.handler = handler
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.DatagramTransport)
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self.transport is not None
        self.authority.ports.append(addr[1])
        for reply in handled(self.authority, self.handler, data, "udp"):
            self.transport.sendto(reply, addr)


def handled(authority: Authority, handler: Handler, data: bytes, transport: Transport) -> Iterable[bytes]:
    query = dns.message.from_wire(data)
    [question] = query.question
    authority.queries.append(query)
    authority.asked.append(
        (transport, question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype))
    )
    return handler(query, transport)


def one_port() -> tuple[socket.socket, socket.socket]:
    """Return a UDP and a TCP socket on the same free loopback port."""
    for _ in range(100):
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            tcp.bind(udp.getsockname())
        except OSError:  # somebody has the TCP port
            udp.close()
            tcp.close()
        else:
            return udp, tcp
    raise OSError("no port is free for both")


@asynccontextmanager
async def authority(handler: Handler) -> AsyncIterator[Authority]:
    loop = asyncio.get_running_loop()
    udp, tcp = one_port()
    found = Authority(udp.getsockname()[1])

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
            for reply in handled(found, handler, data, "tcp"):
                writer.write(len(reply).to_bytes(2) + reply)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(found, handler), sock=udp)
    server = await asyncio.start_server(carry, sock=tcp)
    try:
        yield found
    finally:
        transport.close()
        server.close()
        await asyncio.sleep(0)
