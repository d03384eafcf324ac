"""Clients of many explicit sandboxes at once, each from an address of its own, over plain HTTP in absolute form.

Reads JSON from its input: a list of `{"url": PROXY, "source": ADDRESS}`; prints a JSON list of each one's two statuses, for
an allowed request and for a denied one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from urllib.parse import urlsplit

ALLOWED, DENIED = "http://www.lab-origin.com/echo", "http://pastebin.com/"
AT_ONCE = 40


async def status(proxy: str, source: str, url: str) -> int:
    parts = urlsplit(proxy)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, local_addr=(source, 0))
    basic = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
    writer.write(
        f"GET {url} HTTP/1.1\r\nHost: {urlsplit(url).hostname}\r\nProxy-Authorization: Basic {basic}\r\n"
        "Connection: close\r\n\r\n".encode()
    )
    try:
        line = await reader.readline()
        await reader.read()
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()


async def main() -> None:
    turn = asyncio.Semaphore(AT_ONCE)

    async def both(client: dict[str, str]) -> list[int]:
        async with turn:
            return [await status(client["url"], client["source"], url) for url in (ALLOWED, DENIED)]

    clients = json.loads(sys.stdin.read())
    print(json.dumps(await asyncio.gather(*map(both, clients))))  # noqa: T201 -- the test reads it


asyncio.run(main())
