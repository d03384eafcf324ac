"""Masking on real sockets, by the clock: streams are not held back, slow origins and readers neither lose nor add a byte."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from egressd.gate.inspector import credential
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.upstream import Opened
from tests.gate.inspector.lab import Lab, laboratory, run, wait_until
from tests.gate.inspector.lender import SECRET, lease_of
from tests.gate.inspector.origin import Asked, PathOrigin

S = SECRET.encode()
STARS = b"*" * len(S)

type Page = Callable[[Asked], Awaitable[bool]]


class OnePage(PathOrigin):
    """Every path is this page."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._page = page

    def page(self, asked: Asked) -> Page:
        del asked
        return self._page


@contextlib.asynccontextmanager
async def masked(page: Page) -> AsyncIterator[Lab]:
    """The lab, which speaks in the clear, as if its requests had been lent a credential; only their answers are looked at."""

    async def lend(exchange: Exchange, *_: object, **__: object) -> None:
        exchange.lease = lease_of()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(credential, "lend", lend)
        patch.setattr(
            "egressd.gate.inspector.outgoing.seal",
            lambda _, request, *__: credential.Sealed(request.data.path, request.headers.fields),
        )
        patch.setattr(Opened, "verified", True)
        async with laboratory(OnePage(page)) as lab:
            yield lab


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "gzip"])
def test_every_event_of_a_stream_passes_at_once(coded: bool) -> None:
    """Each is sent only when the one before has arrived: one that was held back would be missed."""
    coder = zlib.compressobj(wbits=31)
    arrived = asyncio.Event()
    sent = 0.0

    def write(data: bytes) -> bytes:
        return chunk(coder.compress(data) + coder.flush(zlib.Z_SYNC_FLUSH) if coded else data)

    async def page(asked: Asked) -> bool:
        nonlocal sent
        field = b"Content-Encoding: gzip\r\n" if coded else b""
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + field)
        await asked.say(b"Transfer-Encoding: chunked\r\n\r\n")
        for number in range(20):
            sent = time.perf_counter()
            await asked.say(write(b'data: {"n": %d, "key": "%s"}\n\n' % (number, S)))
            await arrived.wait()
            arrived.clear()
        await asked.say((chunk(coder.flush()) if coded else b"") + b"0\r\n\r\n")
        return True

    async def test() -> None:
        nonlocal coder
        firsts: list[float] = []
        async with masked(page) as lab:
            while not firsts or (
                min(firsts) >= 0.05 and len(firsts) < 5
            ):  # a busy machine may be late, but not always
                coder = zlib.compressobj(wbits=31)
                client = await lab.dial()
                client.send(b"GET /sse HTTP/1.1\r\nHost: origin.test.example\r\n\r\n")
                await client.head()
                for number in range(20):
                    async with asyncio.timeout(5):
                        size = int(await client.reader.readuntil(b"\r\n"), 16)
                        event = await client.reader.readexactly(size)
                        await client.reader.readexactly(2)
                    if number == 0:
                        firsts.append(time.perf_counter() - sent)
                    assert event == b'data: {"n": %d, "key": "%s"}\n\n' % (number, STARS)
                    arrived.set()
        assert min(firsts) < 0.05

    run(test())


def test_an_origin_that_says_a_byte_at_a_time_is_masked_all_the_same() -> None:
    async def page(asked: Asked) -> bool:
        await asked.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(S) + 2))
        for byte in b"<" + S + b">":
            await asked.say(byte.to_bytes())
            await asyncio.sleep(0)
        return True

    async def test() -> None:
        async with masked(page) as lab:
            client = await lab.dial()
            for _ in range(2):
                assert (await client.ask("GET /")).body == b"<" + STARS + b">"

    run(test())


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_long_body_arrives_whole_at_a_reader_that_stops_and_goes(coding: str) -> None:
    block = bytes(range(256)) * 256 + S + b"\n"
    plain = block * 128
    want = plain.replace(S, STARS)
    body = gzip.compress(plain, 1) if coding == "gzip" else plain

    async def page(asked: Asked) -> bool:
        field = b"Content-Encoding: gzip\r\n" if coding == "gzip" else b""
        await asked.say(b"HTTP/1.1 200 OK\r\n" + field + b"Content-Length: %d\r\n\r\n" % len(body))
        await asked.say(body)
        return True

    async def test() -> None:
        async with masked(page) as lab:
            client = await lab.dial()
            client.send(b"GET / HTTP/1.1\r\nHost: origin.test.example\r\n\r\n")
            if coding == "gzip":
                await wait_until(lambda: lab.engines[0]._conduit.client.paused)
                assert lab.engines[0]._conduit.client.waiting < 8 * 1024 * 1024
            answer = await client.answer()
            assert hashlib.sha256(answer.body).digest() == hashlib.sha256(want).digest()
            assert (await client.ask("GET /")).body == want
            assert lab.records.ends() == ["completed", "completed"]
            if coding == "gzip":
                assert lab.records.of("end")[0].bytes_down < len(body) + 200  # type: ignore[operator]  # of an end it is a number

    run(test())


def test_an_origin_that_ends_while_its_coded_answer_waits_loses_nothing() -> None:
    plain = bytes(24 * 1024 * 1024) + S

    async def page(asked: Asked) -> bool:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n"
        await asked.say(head + gzip.compress(plain))
        return False

    async def test() -> None:
        async with masked(page) as lab:
            client = await lab.dial()
            client.send(b"GET / HTTP/1.1\r\nHost: origin.test.example\r\n\r\n")
            await wait_until(lambda: lab.engines[0]._conduit.client.paused)
            assert (await client.answer()).body == plain.replace(S, STARS)
            assert lab.records.ends() == ["completed"]

    run(test())
