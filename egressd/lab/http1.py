"""A small HTTP/1.1 server for origins that must be able to misbehave: what a handler writes is what goes
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from egressd.lab.sightings import SeenRequest

_ESTABLISHED = 1  # the first byte of tcp_info (linux/tcp.h, include/net/tcp_states.h)
_IDLE = 120.0
_BLOCK = 256 * 1024


class BadRequest(Exception):
    """The bytes are no request that this server reads."""


@dataclass
class Connection:
    """One accepted connection and what is known of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: int = 0

    async def write(self, data: bytes) -> None:
        """Sends bytes as they are; raises OSError when the client is gone."""
        if self.writer.get_extra_info("ssl_object") is not None and self._client_closed():
            raise ConnectionResetError("the client closed its TLS")
        self.writer.write(data)
        await self.writer.drain()

    def _client_closed(self) -> bool:
        """Whether a TLS client sent close_notify or FIN.

        TLS has no half-closed state here, and asyncio swallows what is written in it: it would count as sent.
        """
        state = self.writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return self.reader.at_eof() or state[0] != _ESTABLISHED

    def cut(self) -> None:
        """Resets the connection, without a TLS close_notify."""
        self.writer.transport.abort()


class Exchange:
    """One request and the way to answer it; `seen` is its record."""

    def __init__(self, connection: Connection, seen: SeenRequest) -> None:
        self.connection = connection
        self.seen = seen
        self.keep = seen.header("connection") != "close"
        self._body_read = False
        self._hash = hashlib.sha256()

    @property
    def query(self) -> dict[str, str]:
        """The query's keys and values, undecoded."""
        pairs = (pair.partition("=") for pair in self.seen.target.partition("?")[2].split("&"))
        return {key: value for key, _, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The request body as it arrives, counted and hashed; nothing the second time."""
        if self._body_read:
            return
        self._body_read = True
        if self.seen.header("expect") == "100-continue":
            await self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = (self.seen.header("transfer-encoding") or "").lower() == "chunked"
        async for block in self._chunked() if chunked else self._counted(self._length()):
            self.seen.body_bytes += len(block)
            self._hash.update(block)
            self.seen.body_sha256 = self._hash.hexdigest()
            yield block

    async def body(self) -> bytes:
        """The whole body in memory, for handlers of small ones."""
        return b"".join([block async for block in self.chunks()])

    async def start(self, status: int, headers: dict[str, str], *, framing: str = "") -> None:
        """Sends the head of an answer; `framing` adds a Content-Length or Transfer-Encoding line as it is."""
        self.seen.status = status
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"
        lines = [f"HTTP/1.1 {status} {phrase}", *(f"{key}: {value}" for key, value in headers.items())]
        lines += [framing] if framing else []
        await self.connection.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def send(self, data: bytes) -> None:
        """Sends body bytes of the answer."""
        await self.connection.write(data)
        self.seen.sent += len(data)

    async def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Sends a whole answer with its Content-Length; HEAD gets the head alone."""
        bodiless = status in {204, 304}
        framing = "" if bodiless else f"Content-Length: {len(body)}"
        await self.start(status, {"Server": "lab", **(headers or {})}, framing=framing)
        if body and not bodiless and self.seen.method != "HEAD":
            await self.send(body)

    def _length(self) -> int:
        value = self.seen.header("content-length") or "0"
        if not value.isascii() or not value.isdigit():
            raise BadRequest("content-length")
        return int(value)

    async def _counted(self, length: int) -> AsyncIterator[bytes]:
        while length:
            block = await self.connection.reader.read(min(length, _BLOCK))
            if not block:
                raise asyncio.IncompleteReadError(b"", length)
            length -= len(block)
            yield block

    async def _chunked(self) -> AsyncIterator[bytes]:
        reader = self.connection.reader
        while True:
            line = await reader.readuntil(b"\r\n")
            try:
                size = int(line.partition(b";")[0].strip(), 16)
            except ValueError as error:
                raise BadRequest("chunk size") from error
            if size == 0:
                break
            async for block in self._counted(size):
                yield block
            if await reader.readexactly(2) != b"\r\n":
                raise BadRequest("chunk end")
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            self.seen.trailers.append(_header(line))


Handler = Callable[[Exchange], Awaitable[None]]


async def serve_connection(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    handler: Handler,
    remember: Callable[[SeenRequest], None],
    sni: Mapping[ssl.SSLObject, str],
) -> None:
    """Serves one connection's requests one after the other until either side ends it."""
    connection = Connection(reader, writer)
    seen: SeenRequest | None = None
    try:
        while True:
            async with asyncio.timeout(_IDLE):
                head = await _read_head(reader)
            if head is None:
                return
            seen = _parse(head, writer, sni)
            remember(seen)
            connection.requests += 1
            exchange = Exchange(connection, seen)
            await handler(exchange)
            async for _ in exchange.chunks():
                pass  # what the handler left unread
            if not exchange.keep:
                return
            seen = None
    except BadRequest as error:
        with contextlib.suppress(OSError):
            await connection.write(
                f"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nX-Why: {error}\r\n\r\n".encode()
            )
    except (TimeoutError, asyncio.IncompleteReadError, OSError, ssl.SSLError):
        if seen is not None:
            seen.aborted = True
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BadRequest("cut head") from error
        return None
    except asyncio.LimitOverrunError as error:
        raise BadRequest("head too long") from error


def _parse(head: bytes, writer: asyncio.StreamWriter, sni: Mapping[ssl.SSLObject, str]) -> SeenRequest:
    lines = head.split(b"\r\n")[:-2]
    words = lines[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("request line")
    headers = [_header(line) for line in lines[1:]]
    host = next((value for key, value in headers if key == "host"), "")
    peer, local = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
    tls = writer.get_extra_info("ssl_object")
    return SeenRequest(
        method=words[0],
        host=_without_port(host.lower()),
        target=words[1],
        headers=headers,
        peer=f"{plain_address(peer[0])}:{peer[1]}",
        address=plain_address(local[0]),
        port=local[1],
        tls=tls is not None,
        sni=None if tls is None else sni.get(tls),
    )


def plain_address(address: str) -> str:
    """An IPv4 address that a dual-stack socket shows as IPv6, in its own form."""
    return address.removeprefix("::ffff:") if "." in address else address


def _header(line: bytes) -> list[str]:
    name, _, value = line.decode("latin-1").partition(":")
    return [name.strip().lower(), value.strip()]


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and not name.endswith(":") else host
