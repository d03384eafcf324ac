"""Shared listeners: an interface's sandboxes are known at that interface, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any

import pytest

from egressd.gate.messages import ListenerSpec, Serve, Share
from egressd.gate.settings import Settings
from egressd.gate.sharing import Sharing
from tests.gate.door.test_lobby import Book


class Tenant:
    dns = None
    packets: Any = None

    def __init__(self) -> None:
        self.visited: list[str] = []

    async def visit(self, client: socket.socket, entrance: Any) -> None:
        self.visited.append(f"{entrance.way} from {entrance.source}")
        client.close()


def test_an_address_is_worth_nothing_at_another_interface() -> None:
    tenants: dict[str, Any]
    tenants, book = {"sbx-a": Tenant(), "sbx-b": Tenant()}, Book()

    async def play() -> None:
        services: Any = SimpleNamespace(settings=Settings(), recorder=book)
        sharing = Sharing(services, tenants.get, lambda message, descriptors=(): None)
        sharing.enter(Serve(sandbox="sbx-a", listeners=(), source="127.0.0.1", interface="br0"))
        sharing.enter(Serve(sandbox="sbx-b", listeners=(), source="127.0.0.1", interface="br1"))
        for interface in ("br0", "br1", "br2", ""):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                spec = ListenerSpec(kind="transparent", family=4)
                share = Share(share=f"at {interface}", interface=interface, listeners=(spec,))
                sharing.share(share, [listener.dup()])
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                with pytest.raises(ConnectionError) if interface in ("br2", "") else contextlib.nullcontext():
                    assert await reader.read() == b""
                writer.close()
                await sharing.unshare(share.share)
        sharing.leave("sbx-a")
        sharing.enter(Serve(sandbox="sbx-c", listeners=(), source="127.0.0.1", interface="br0"))

    asyncio.run(play())
    assert {name: tenant.visited for name, tenant in tenants.items()} == {
        "sbx-a": ["transparent from 127.0.0.1"],
        "sbx-b": ["transparent from 127.0.0.1"],
    }
    assert [(r.sandbox, r.reason, r.source) for r in book.records] == [
        ("unknown", "unknown_sandbox", str(IPv4Address("127.0.0.1")))
    ] * 2
