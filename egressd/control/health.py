"""The health endpoints: two paths, fixed answers, nothing about anybody. Whoever reaches the port may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from egressd.control.config_check import parse_listen
from egressd.control.estate import StateError

_MOST_BYTES: Final = 4096
_SECONDS: Final = 2.0
_MOST: Final = 64


class Health:
    """Answers `/healthz` while this process runs its loop, and `/readyz` by what `ready` says."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        """Nothing is listened on yet."""
        self._ready = ready
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, listen: str) -> None:
        """Listen at ADDRESS:PORT; raises StateError."""
        address, port = parse_listen(listen)
        try:
            self._server = await asyncio.start_server(
                self._serve, str(address), port, limit=_MOST_BYTES, backlog=_MOST
            )
        except OSError as error:
            raise StateError(
                f"serve.health {listen}: {error.strerror}",
                "another daemon may be there: set serve.health, or leave it empty",
            ) from None

    async def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MOST:
                async with asyncio.timeout(_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _response(b"405 Method Not Allowed", b"no\n", words[0] == b"HEAD")
        match words[1].partition(b"?")[0]:
            case b"/healthz":
                status, body = b"200 OK", b"ok\n"
            case b"/readyz" if self._ready():
                status, body = b"200 OK", b"ok\n"
            case b"/readyz":
                status, body = b"503 Service Unavailable", b"no\n"
            case _:
                status, body = b"404 Not Found", b"no\n"
        return _response(status, body, words[0] == b"HEAD")


def _response(status: bytes, body: bytes, headless: bool) -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + (b"" if headless else body)
