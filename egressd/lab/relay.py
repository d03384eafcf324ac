"""A site that is another server in the world: what it answers comes from a port of the world's own loopback, byte for byte."""

from __future__ import annotations

import asyncio

from egressd.lab.http1 import Exchange

_BLOCK = 256 * 1024
_BETWEEN_NEIGHBOURS = {"connection", "keep-alive", "expect", "proxy-connection"}


class Relay:
    """Hands each request on over plain HTTP/1.1, on a connection of its own, and ends the client's with it."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def answer(self, exchange: Exchange) -> None:
        """Hands on head and body as they came; 502 when nobody listens."""
        exchange.keep = False
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            await exchange.reply(502, b"nobody listens there\n", {"Connection": "close"})
            return
        try:
            await self._send(exchange, writer)
            await self._hand_back(exchange, reader)
        finally:
            writer.close()

    async def _send(self, exchange: Exchange, writer: asyncio.StreamWriter) -> None:
        seen = exchange.seen
        chunked = (seen.header("transfer-encoding") or "").lower() == "chunked"
        lines = [f"{seen.method} {seen.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in seen.headers if name not in _BETWEEN_NEIGHBOURS]
        lines += ["connection: close", "x-forwarded-proto: https"]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        async for block in exchange.chunks():
            writer.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            await writer.drain()
        if chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _hand_back(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.split("\r\n")[:-2]
        exchange.seen.status = int(status.split(" ")[1])
        kept = [line for line in lines if line.partition(":")[0].lower() not in _BETWEEN_NEIGHBOURS]
        await exchange.connection.write(
            "\r\n".join([status, *kept, "Connection: close", "", ""]).encode("latin-1")
        )
        while block := await reader.read(_BLOCK):
            await exchange.send(block)
