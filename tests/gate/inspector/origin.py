"""The origin of the lab: one small server with a page for every shape that an answer can have."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

BIG = 64 * 1024 * 1024


@dataclass
class Asked:
    """One request as the origin got it, and the connection it came on."""

    method: str
    target: str
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    count: int

    async def body(self) -> tuple[int, str, str]:
        """Read the body, keeping none of it: its length, its hash and its trailers."""
        size, digest, trailers = 0, hashlib.sha1(usedforsecurity=False), ""
        if self.headers.get("transfer-encoding") == "chunked":
            while length := int(await self.reader.readuntil(b"\r\n"), 16):
                data = await self.reader.readexactly(length)
                digest.update(data)
                size += length
                assert await self.reader.readexactly(2) == b"\r\n"
            while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
                trailers += line.decode()
            return size, digest.hexdigest(), trailers
        left = int(self.headers.get("content-length", "0"))
        while left:
            data = await self.reader.read(min(left, 65536))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            digest.update(data)
            size += len(data)
            left -= len(data)
        return size, digest.hexdigest(), trailers

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


type Page = Callable[[Asked], Awaitable[bool]]


class PathOrigin:
    """Answers by path; counts connections, and keeps the heads that it was sent."""

    def __init__(self) -> None:
        self.connections = 0
        self.heads = b""
        self.go_on = asyncio.Event()
        self.sent = 0
        self.lost = asyncio.Event()
        self.canned: dict[str, bytes] = {}
        """More pages: path → raw bytes, after which the origin closes."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        count = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads += head
                line, *lines = head.decode("latin-1").strip().split("\r\n")
                method, target, _ = line.split(" ")
                pairs = (text.partition(":") for text in lines)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                count += 1
                asked = Asked(method, target, headers, reader, writer, count)
                if not await self.page(asked)(asked):
                    break
        self.lost.set()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def page(self, asked: Asked) -> Page:
        path = asked.target.partition("?")[0].strip("/")
        if path in self.canned:
            return self.canned_page
        page: Page = getattr(self, f"page_{path}", self.page_echo)
        return page

    async def canned_page(self, asked: Asked) -> bool:
        await asked.say(self.canned[asked.target.strip("/")])
        return False

    async def page_echo(self, asked: Asked) -> bool:
        size, digest, trailers = await asked.body()
        about = {"n": size, "sha": digest, "trailers": trailers, "count": asked.count, "target": asked.target}
        content = json.dumps(about | {"headers": asked.headers}).encode()
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        return True

    async def page_n(self, asked: Asked) -> bool:
        content = str(asked.count).encode()
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        return True

    async def page_chunked(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n")
        await asked.say(b"6\r\n world\r\n0\r\n\r\n")
        return True

    async def page_204(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 204 No Content\r\n\r\n")
        return True

    async def page_304(self, asked: Asked) -> bool:
        await asked.say(b'HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\nETag: "a"\r\n\r\n')
        return True

    async def page_head(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n")
        return True

    async def page_sse(self, asked: Asked) -> bool:
        """Each event only after the test has seen the one before."""
        await asked.say(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for number in range(3):
            event = b"data: %d\n\n" % number
            await asked.say(b"%x\r\n%s\r\n" % (len(event), event))
            await self.go_on.wait()
            self.go_on.clear()
        await asked.say(b"0\r\n\r\n")
        return True

    async def page_nolen(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc")
        await asked.say(b"def")
        return False

    async def page_closeafter(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbye")
        return False

    async def page_cut(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
        return False

    async def page_big(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG)
        piece = b"x" * 65536
        while self.sent < BIG:
            await asked.say(piece)
            self.sent += len(piece)
        return True

    async def page_early(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 413 Too Large\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nbig\r\n0\r\n\r\n")
        await self.go_on.wait()
        return False

    async def page_103(self, asked: Asked) -> bool:
        await asked.say(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nAlt-Svc: h3\r\n\r\n"
        )
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal")
        return True

    async def page_trailers(self, asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n")
        await asked.say(b"X-Sum: 1\r\nSet-Cookie: a=b\r\nX-Egressd-Reason: rule\r\n\r\n")
        return True

    async def page_silent(self, _asked: Asked) -> bool:
        await self.go_on.wait()
        return False
