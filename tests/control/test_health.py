"""The health port: two paths, fixed words, whatever is sent."""

from __future__ import annotations

import asyncio
import socket

import pytest

from egressd.control import health
from egressd.control.estate import StateError
from egressd.control.health import Health


def free() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def asked(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("line", "ready", "status", "body"),
    [
        (b"GET /healthz HTTP/1.1", False, b"200", b"ok\n"),
        (b"GET /readyz HTTP/1.1", True, b"200", b"ok\n"),
        (b"GET /readyz?verbose HTTP/1.1", True, b"200", b"ok\n"),
        (b"GET /readyz HTTP/1.1", False, b"503", b"no\n"),
        (b"HEAD /healthz HTTP/1.1", True, b"200", b""),
        (b"POST /healthz HTTP/1.1", True, b"405", b"no\n"),
        (b"GET /v1/sandboxes HTTP/1.1", True, b"404", b"no\n"),
        (b"GET http://egressd/healthz HTTP/1.1", True, b"404", b"no\n"),
        (b"\xff", True, b"405", b"no\n"),
        (b"", True, b"405", b"no\n"),
    ],
)
def test_two_paths_are_answered_and_nothing_is_told(
    line: bytes, ready: bool, status: bytes, body: bytes
) -> None:
    async def scene() -> None:
        port, served = free(), Health(lambda: ready)
        await served.start(f"127.0.0.1:{port}")
        answer = await asked(port, line + b"\r\nHost: x\r\n\r\n")
        assert answer.split(b" ")[1] == status
        assert answer.partition(b"\r\n\r\n")[2] == body
        await served.stop()

    asyncio.run(scene())


def test_who_is_silent_or_says_too_much_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        port, served = free(), Health(lambda: True)
        await served.start(f"127.0.0.1:{port}")
        assert await asked(port, b"GET /healthz") == b""
        assert await asked(port, b"a" * 100_000) == b""
        assert b"200" in await asked(port, b"GET /healthz HTTP/1.1\r\n\r\n")
        await served.stop()

    monkeypatch.setattr(health, "_SECONDS", 0.2)
    asyncio.run(scene())


def test_a_port_that_another_has_is_told_with_a_way_out() -> None:
    async def scene() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            with pytest.raises(StateError) as caught:
                await Health(lambda: True).start(f"127.0.0.1:{sock.getsockname()[1]}")
            assert "serve.health" in caught.value.hint

    asyncio.run(scene())
