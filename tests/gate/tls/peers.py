"""Owners that write down what they are told, and pairs of streams over loopback."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from egressd.gate.tls.leaves import Leaves
from egressd.gate.tls.stream import ByteStream, TlsStream, accept_tls, connect_tls

from .authority import client_context, make_authority

AUTHORITY = make_authority()
LEAVES = Leaves(AUTHORITY.issuer)
NAME = "a.test"
DEADLINE = 10.0


class Recorder:
    """An owner that keeps every event; `on` maps an event's name to something to do then."""

    def __init__(self, **on: Callable[[ByteStream], object]) -> None:
        self.events: list[str] = []
        self.data = bytearray()
        self.error: Exception | None = None
        self.largest = 0
        self._on = on
        self._changed = asyncio.Event()

    def _note(self, event: str, stream: ByteStream) -> None:
        if not self.events or self.events[-1] != event or event != "data":
            self.events.append(event)
        self._changed.set()
        if event in self._on:
            self._on[event](stream)

    def on_ready(self, stream: ByteStream) -> None:
        self._note("ready", stream)

    def on_data(self, stream: ByteStream, data: bytes) -> None:
        self.data += data
        self.largest = max(self.largest, len(data))
        self._note("data", stream)

    def on_eof(self, stream: ByteStream) -> None:
        self._note("eof", stream)

    def on_lost(self, stream: ByteStream, exc: Exception | None) -> None:
        self.error = exc
        self._note("lost", stream)

    def on_pause(self, stream: ByteStream) -> None:
        self._note("pause", stream)

    def on_resume(self, stream: ByteStream) -> None:
        self._note("resume", stream)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until an event makes the condition true."""
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def told(self, event: str) -> None:
        await self.until(lambda: event in self.events)


def tcp_pair(buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Return (accepted, connected) over loopback; `buffer` makes the kernel's buffers small."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if buffer is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        connected.connect(listener.getsockname())
        accepted, _ = listener.accept()
        if buffer is not None:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    return accepted, connected


async def tls_pair(
    server_owner: Recorder | None, client_owner: Recorder | None, buffer: int | None = None
) -> tuple[TlsStream, TlsStream]:
    """Return our two sides, talking to each other."""
    loop = asyncio.get_running_loop()
    accepted, connected = tcp_pair(buffer)
    server, client = await asyncio.gather(
        accept_tls(loop, accepted, LEAVES.context_for(NAME), b"", DEADLINE, server_owner),
        connect_tls(loop, connected, client_context(AUTHORITY.root_pem), NAME, DEADLINE),
    )
    if client_owner is not None:
        client.owner = client_owner
    return server, client


def run[T](main: Coroutine[None, None, T]) -> T:
    """Run a test's coroutine; what asyncio would only log is a failure."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await main

    result = asyncio.run(watched())
    assert complaints == []
    return result


async def blocking(function: Callable[[], object]) -> object:
    """Run a blocking peer in a thread, within the deadline."""
    async with asyncio.timeout(DEADLINE):
        return await asyncio.to_thread(function)


class BlockingServer:
    """One TLS server of Python's own in a thread: accepts a handshake on `sock`, then runs `then`."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        then: Callable[[ssl.SSLSocket], object] | None = None,
    ) -> None:
        self.error: Exception | None = None
        self._sock, self._context, self._then = sock, context, then
        self._sock.settimeout(DEADLINE)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._context.wrap_socket(self._sock, server_side=True) as wrapped:
                if self._then is not None:
                    self._then(wrapped)
        except OSError as error:
            self.error = error
        finally:
            self._sock.close()

    def join(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
