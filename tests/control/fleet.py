"""A supervisor with real workers on this machine's loopback, and sandboxes that are a proxy port and a resolver each.

What can be asked without any network is `egressd.internal`, which a worker answers by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from egressd.control.ca import CaPaths, load_or_create
from egressd.control.sandboxes import SandboxListener, SandboxState, new_sandbox_id
from egressd.control.supervisor import Supervisor
from egressd.gate.settings import Settings
from egressd.journal.writer import Journal
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate

PATIENCE = 60.0
POLICY = EffectivePolicy(
    profile="p",
    entries=(
        EffectiveEntry(
            id="api",
            place="p.yaml:1",
            effect="allow",
            hosts=("api.example.com", "*.wild.example.com"),
            limits=EntryLimits(requests=Rate(amount=160, seconds=86_400)),
        ),
    ),
)


class Box:
    """A sandbox: its state, and where its proxy and its resolver are."""

    def __init__(self, policy: EffectivePolicy = POLICY) -> None:
        self.proxy = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.dns.bind(("127.0.0.1", 0))
        self.port: int = self.proxy.getsockname()[1]
        self.resolver: int = self.dns.getsockname()[1]
        listeners = (SandboxListener("explicit", 4, self.proxy), SandboxListener("dns-udp", 4, self.dns))
        self.state = SandboxState(new_sandbox_id(), policy, listeners)
        self.id = self.state.id

    async def get(self, target: str = "/", *, seconds: float = 10.0) -> tuple[int, str]:
        """Ask egressd.internal by a connection of its own: status and body."""
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            with contextlib.closing(writer):
                writer.write(
                    f"GET http://egressd.internal{target} HTTP/1.1\r\nHost: egressd.internal\r\n\r\n".encode()
                )
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # egressd's own answers close
                return int(head.split()[1]), body.decode()

    async def name(self, name: str, *, seconds: float = 10.0) -> str:
        """Look a name up: its address, or the reply's code."""
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        query = secrets.token_bytes(2) + b"\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(("127.0.0.1", self.resolver))
            async with asyncio.timeout(seconds):
                while True:
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        await loop.sock_sendall(sock, query)
                        async with asyncio.timeout(1):
                            reply = await loop.sock_recv(sock, 4096)
                            if int.from_bytes(reply[6:8]):
                                return socket.inet_ntoa(reply[-4:])
                            return f"rcode {reply[3] & 15}"


class Fleet:
    """The supervisor, its journal, and the sandboxes it carries."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.journal = path / "journal.jsonl"
        authority = load_or_create(CaPaths.at(path / "ca"), time.time())
        self.said: list[str] = []
        settings = options.pop("settings", Settings())
        self.supervisor = Supervisor(
            settings, authority, Journal(self.journal), failed=self.said.append, **options
        )

    async def box(self, policy: EffectivePolicy = POLICY) -> Box:
        box = Box(policy)
        await self.supervisor.add(box.state)
        return box

    def records(self, **wanted: object) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


@contextlib.asynccontextmanager
async def fleet(path: Path, **options: Any) -> AsyncIterator[Fleet]:
    """A fleet that has started, and is gone afterwards."""
    made = Fleet(path, **options)
    try:
        await made.supervisor.start()
        yield made
    finally:
        await made.supervisor.stop()


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition; fails when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not hold within {seconds:g} s"
        await asyncio.sleep(0.02)


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
