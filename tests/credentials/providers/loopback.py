"""Servers on loopback that answer what a test says, and a search for secrets in everything that an exception can show."""

from __future__ import annotations

import asyncio
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from egressd.credentials.providers.base import For, Minted, Provider, SourceFailed
from egressd.policy.credential import SecretRef

SANDBOX = For(sandbox="s-1", labels={"task": "t-1"})

type PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
type Respond = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]
"""What is done with a request, by its first line and its body."""


def run[T](work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(bounded())


def kept(folder: Path, name: str, text: str) -> SecretRef:
    """A secret in a file of mode 0600."""
    path = folder / name
    path.touch(0o600)
    path.write_text(text)
    return SecretRef(file=str(path))


def private_pem(key: PrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def public_pem(key: PrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


class Server:
    """Where it listens, and the first lines and the whole heads of the requests that it had."""

    def __init__(self) -> None:
        self.url = ""
        self.lines: list[str] = []
        self.heads: list[str] = []


@asynccontextmanager
async def serving(
    respond: Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[Server]:
    served = Server()
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = [line.partition(":") for line in head.split("\r\n")[1:]]
            length = next((int(value) for name, _, value in fields if name.lower() == "content-length"), 0)
            body = await reader.readexactly(length)
            served.lines.append(head.partition("\r\n")[0])
            served.heads.append(head)
            await respond(served.lines[-1], body, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=context, limit=1 << 20)
    served.url = f"http{'s' if context else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def response(status: int, body: bytes | str = b"", *fields: str) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(content)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


async def failure(provider: Provider) -> SourceFailed:
    """How a mint fails; the provider is closed."""
    try:
        with pytest.raises(SourceFailed) as caught:
            await provider.mint(SANDBOX)
    finally:
        await provider.close()
    return caught.value


async def minted(provider: Provider) -> Minted:
    """What a mint gives; the provider is closed."""
    try:
        return await provider.mint(SANDBOX)
    finally:
        await provider.close()


def shown(error: BaseException) -> str:
    """All that any logger shows of an exception: texts, reprs, and those of what it came from, suppressed or not."""
    texts = ["".join(traceback.format_exception(error))]
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is not None:
            texts += [str(current), repr(current), repr(current.args), repr(vars(current))]
            waiting += [current.__cause__, current.__context__]
    return "\n".join(texts)


def assert_secret_free(text: str, secrets: Iterable[str]) -> None:
    for secret in secrets:
        for line in secret.splitlines():
            assert len(line) < 8 or line.startswith("-----") or line not in text, "a secret is shown"
