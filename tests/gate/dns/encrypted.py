"""Name servers for tests that speak TLS and HTTPS on loopback, well or badly, and remember."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import dns.message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from egressd.gate.dns.upstream import ResolveFailed, Resolver
from egressd.lab.pki import Authority as Pki
from egressd.policy.attempt import Address, Name
from tests.gate.dns.authority import Handler, answer

NAME = "dns.example"
API: Name = ("api", "allowed", "test")
DEADLINE = 10.0
MEDIA_TYPE = "application/dns-message"

type Kind = Literal["tls", "https"]
type Found = tuple[Address, ...] | ResolveFailed
type Session = Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """A server's address, who trusts it, and what happened to it."""

    port: int
    ca_file: str
    pki: Pki
    connections: int = 0
    ended: int = 0
    queries: list[dns.message.Message] = field(default_factory=list)
    wires: list[bytes] = field(default_factory=list)
    heads: list[list[tuple[str, str]]] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def url(self, kind: Kind, name: str | None = NAME) -> str:
        proven = "" if name is None else f"#{name}"
        return f"{kind}://127.0.0.1:{self.port}{proven}"

    def resolver(self, kind: Kind, timeout: float = 5.0, *, ipv6: bool = False) -> Resolver:
        return Resolver(self.url(kind), timeout, ca_file=self.ca_file, ipv6=lambda: ipv6)

    def note(self, wire: bytes) -> dns.message.Message:
        query = dns.message.from_wire(wire)
        self.queries.append(query)
        self.wires.append(wire)
        return query

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110 plain state
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serve(
    session: Session,
    folder: Path,
    *,
    kind: Kind = "tls",
    alpn: tuple[str, ...] | None = None,
    kinds: dict[str, str] | None = None,
    context: Callable[[ssl.SSLContext], None] | None = None,
    clear: bool = False,
) -> AsyncIterator[Server]:
    """Run `session` for each connection; `kinds` are the lab's kinds of certificates by name."""
    pki = Pki(("127.0.0.1",))
    pki.kinds.update(kinds or {})
    ca_file = folder / "ca.pem"
    ca_file.write_bytes(pki.root_pem())
    tls = pki.listening_context(alpn if alpn is not None else {"tls": ("dot",), "https": ("h2",)}[kind])
    if context is not None:
        context(tls)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        found.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ProtocolError):
            await session(found, reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        found.ended += 1

    listener = await asyncio.start_server(carry, "127.0.0.1", 0, ssl=None if clear else tls)
    found = Server(listener.sockets[0].getsockname()[1], str(ca_file), pki)
    try:
        yield found
    finally:
        listener.close()
        for writer in found.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def resolve(resolver: Resolver, *names: Name) -> list[Found]:
    """Resolve names one after the other, then close."""
    try:
        return [await resolver.resolve(name) for name in names or (API,)]
    finally:
        await resolver.close()


def run[T](main: Awaitable[T]) -> T:
    """Run a scenario within the deadline; what asyncio would only log is a failure."""
    complaints: list[dict[str, object]] = []

    async def bounded() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(3 * DEADLINE):
            return await main

    result = asyncio.run(bounded())
    assert complaints == []
    return result


# DNS over TLS


async def read_query(server: Server, reader: asyncio.StreamReader) -> dns.message.Message:
    """Return the next query; raises IncompleteReadError at the end."""
    return server.note(await reader.readexactly(int.from_bytes(await reader.readexactly(2))))


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(2) + message for message in messages)


def dot(handler: Handler) -> Session:
    """Answer each query as the handler says."""

    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            query = await read_query(server, reader)
            writer.write(framed(*handler(query, "tcp")))

    return session


# DNS over HTTPS

type Headers = list[tuple[str, str]]


@dataclass
class Response:
    """What a DoH server says to one request; a header given as None is left out."""

    body: bytes = b""
    status: str = "200"
    headers: dict[str, str | None] = field(default_factory=dict)
    more: Headers = field(default_factory=list)

    def head(self) -> Headers:
        own: dict[str, str | None] = {"content-type": MEDIA_TYPE, "content-length": str(len(self.body))}
        merged = own | self.headers
        return [
            (":status", self.status),
            *((key, value) for key, value in merged.items() if value is not None),
            *self.more,
        ]


type Respond = Callable[[dns.message.Message], Response | None]


class Http2:
    """The server's side of one HTTP/2 connection."""

    def __init__(
        self,
        server: Server,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: dict[int, int] | None = None,
    ) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.h2 = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.resets: list[int] = []
        self._bodies: dict[int, bytes] = {}
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(settings)
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    async def requests(self) -> AsyncIterator[tuple[int, dns.message.Message]]:
        """Yield stream and query of each request that is whole."""
        while data := await self.reader.read(65_536):
            for event in self.h2.receive_data(data):
                match event:
                    case RequestReceived():
                        headers = [(str(key), str(value)) for key, value in event.headers]
                        self.server.heads.append(headers)
                        self._bodies[event.stream_id] = b""
                    case DataReceived():
                        self._bodies[event.stream_id] += event.data
                    case StreamReset():
                        self.resets.append(event.stream_id)
                    case StreamEnded():
                        yield event.stream_id, self.server.note(self._bodies.pop(event.stream_id))
            self.flush()

    async def send(self, stream: int, response: Response) -> None:
        self.h2.send_headers(stream, response.head())
        body = response.body
        while body:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if not room:
                self.flush()
                data = await self.reader.read(65_536)
                if not data:
                    return
                self.h2.receive_data(data)
                continue
            self.h2.send_data(stream, body[:room])
            body = body[room:]
        self.h2.end_stream(stream)
        self.flush()


def doh(respond: Respond, settings: dict[int, int] | None = None) -> Session:
    """Answer each request as `respond` says, None for never."""

    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http2 = Http2(server, reader, writer, settings)
        async for stream, query in http2.requests():
            response = respond(query)
            if response is not None:
                await http2.send(stream, response)

    return session


def good(query: dns.message.Message) -> bytes:
    """Every name has the address 11.0.0.1 and no other."""
    [question] = query.question
    name = question.name.to_text()
    if question.rdtype == dns.rdatatype.A:
        return answer(query, f"{name} 60 IN A 11.0.0.1")
    return answer(query, authority=["test. 60 IN SOA . . 1 1 1 1 60"])


def encrypted(kind: Kind, reply: Callable[[dns.message.Message], Iterable[bytes]]) -> Session:
    """The same handler over either transport: no reply is silence."""
    if kind == "tls":
        return dot(lambda query, _: reply(query))

    def respond(query: dns.message.Message) -> Response | None:
        replies = list(reply(query))
        return Response(replies[0]) if replies else None

    return doh(respond)
