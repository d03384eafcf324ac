"""A proxy as companies have one, for the tests alone: `corporate_proxy.py ADDRESS PORT [USER:PASSWORD]`.

Takes CONNECT and nothing else; says each target on a line of its output, with `?` before it where the credentials were missing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, _ = head.split("\r\n")[0].split(" ")
        known = not secret or f"Basic {base64.b64encode(secret.encode()).decode()}" in head
        say(("" if known else "?") + f"{method} {target}")
        if not known:
            writer.write(b"HTTP/1.1 407 Who are you\r\nProxy-Authenticate: Basic realm=x\r\n\r\n")
            return
        host, _, port = target.rpartition(":")
        try:
            far = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            writer.write(b"HTTP/1.1 502 Not reached\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))
        far[1].close()
    finally:
        writer.close()


async def main(address: str, port: str, secret: str = "") -> None:
    server = await asyncio.start_server(lambda r, w: serve(r, w, secret), address, int(port))
    say("listening")
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
