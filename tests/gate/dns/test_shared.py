"""The shared resolver: a message is its source's sandbox's, or nobody's."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import dns.message
import dns.rcode

from egressd.gate.dns.server import DnsServer
from egressd.gate.dns.shared import SharedResolver, carry_shared
from egressd.gate.strangers import Strangers
from egressd.journal.record import NOBODY
from egressd.policy.attempt import Address
from tests.gate.dns.ground import Book, framed, query, receive, serving, unframed

MINE, ANOTHER = "127.0.0.31", "127.0.0.32"


def test_each_source_is_answered_by_its_own_sandbox_and_nobody_s_is_refused() -> None:
    async def scenario() -> None:
        book = Book()
        async with serving("api.allowed.test", own=()) as ground:
            strangers = Strangers(book)

            def find(source: Address) -> DnsServer | None:
                return ground.server if source == ip_address(MINE) else None

            shared = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            shared.bind(("0.0.0.0", 0))
            port = shared.getsockname()[1]
            resolver = SharedResolver(shared, find, strangers)
            told = {}
            for source in (MINE, ANOTHER):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                    client.setblocking(False)
                    client.bind((source, 0))
                    client.connect(("127.0.0.40", port))
                    client.send(query("api.allowed.test"))
                    reply = dns.message.from_wire(await receive(client))
                    told[source] = (
                        str(reply.answer[0][0]) if reply.answer else dns.rcode.to_text(reply.rcode())
                    )
            assert told == {MINE: "127.0.0.40", ANOTHER: "REFUSED"}
            resolver.close()
            strangers.flush()
            assert [(r.sandbox, r.reason, r.source) for r in book.records] == [
                (NOBODY, "unknown_sandbox", ANOTHER)
            ]
            assert ground.book.told() == [("allow", "rule")]

    asyncio.run(scenario())


def test_connections_too() -> None:
    async def scenario() -> None:
        book = Book()
        async with serving("api.allowed.test", own=()) as ground:
            strangers = Strangers(book)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for source, served in ((MINE, True), (ANOTHER, False)):
                    reader, writer = await asyncio.open_connection(
                        *listener.getsockname(), local_addr=(source, 0)
                    )
                    sock, _ = listener.accept()
                    carry_shared(
                        sock,
                        lambda found: ground.server if found == ip_address(MINE) else None,
                        strangers,
                    )
                    writer.write(framed(query("api.allowed.test")))
                    if served:
                        assert str((await unframed(reader)).answer[0][0]) == "127.0.0.1"
                    else:
                        assert await reader.read() == b""
                    writer.close()
            strangers.flush()
            assert [(r.channel, r.source) for r in book.records] == [("dns-tcp", ANOTHER)]

    asyncio.run(scenario())
