"""DNS over TLS: ids, lengths and answers in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path

import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.dns.dot import DotLine
from egressd.gate.dns.lines import GIVEN_UP, LineLost
from egressd.gate.dns.servers import parse_upstream
from egressd.gate.dns.upstream import ResolveFailed
from egressd.policy.attempt import Name
from tests.gate.dns.encrypted import (
    API,
    Found,
    Server,
    dot,
    framed,
    good,
    read_query,
    resolve,
    run,
    serve,
)

ONE = (IPv4Address("11.0.0.1"),)
[SERVER] = parse_upstream("tls://11.0.0.53#dns.example")


def numbered(number: int) -> Name:
    return (f"n{number}", "allowed", "test")


# over loopback


@pytest.mark.parametrize("alpn", [("dot",), (), ("h2", "dot"), ("h2",)])
def test_a_server_may_know_no_alpn(alpn: tuple[str, ...], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(dot(lambda query, _: [good(query)]), tmp_path, alpn=alpn) as server:
            assert await resolve(server.resolver("tls")) == [ONE]

    run(scenario())


def test_questions_are_pipelined_and_answers_come_in_any_order(tmp_path: Path) -> None:
    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queries = [await read_query(server, reader) for _ in range(8)]  # all before the first answer
        for query in reversed(queries):
            writer.write(framed(good(query)))
        await reader.read()

    async def scenario() -> None:
        async with serve(session, tmp_path) as server:
            resolver = server.resolver("tls")
            found = await asyncio.gather(*(resolver.resolve(numbered(number)) for number in range(8)))
            assert found == [ONE] * 8
            assert len({query.id for query in server.queries}) == 8
            assert server.connections == 1
            await resolver.close()

    run(scenario())


def one_answer(server_sends: object, tmp_path: Path) -> tuple[Found, Server]:
    """Resolve a name at a server that answers each query by what `server_sends(query)` returns."""

    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            query = await read_query(server, reader)
            writer.write(server_sends(query))  # type: ignore[operator] # a function of the test's

    async def scenario() -> tuple[Found, Server]:
        async with serve(session, tmp_path) as server, asyncio.timeout(5):
            return (await resolve(server.resolver("tls", 30)))[0], server

    return run(scenario())


def test_dns_11_an_answer_by_another_id_ends_the_line(tmp_path: Path) -> None:
    def sends(query: dns.message.Message) -> bytes:
        reply = good(query)
        return framed(bytes([reply[0] ^ 1]) + reply[1:], reply)

    found, server = one_answer(sends, tmp_path)
    assert isinstance(found, ResolveFailed)
    assert found.detail.endswith("the server answers what was not asked")
    assert server.connections == 2


def test_an_answer_that_comes_twice_ends_the_line_but_counts(tmp_path: Path) -> None:
    found, _ = one_answer(lambda query: framed(good(query), good(query)), tmp_path)
    assert found == ONE


def test_an_answer_before_any_question_ends_the_line(tmp_path: Path) -> None:
    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # for the name that will be asked, with every id: only one that waits for it may take it
        query = dns.message.make_query("api.allowed.test", "A", id=0)
        writer.write(b"".join(framed(number.to_bytes(2) + good(query)[2:]) for number in range(64)))
        await reader.read()

    async def scenario() -> None:
        async with serve(session, tmp_path) as server, asyncio.timeout(5):
            [found] = await resolve(server.resolver("tls", 30))
            assert isinstance(found, ResolveFailed)
            assert server.connections == 2

    run(scenario())


def test_a_length_without_a_message_ends_the_line(tmp_path: Path) -> None:
    found, _ = one_answer(lambda _: b"\0\x0b" + bytes(11), tmp_path)
    assert isinstance(found, ResolveFailed)
    assert found.detail.endswith("the server sends what is no DNS message")


def test_the_largest_message_is_read(tmp_path: Path) -> None:
    def sends(query: dns.message.Message) -> bytes:
        reply = dns.message.from_wire(good(query))
        name = reply.question[0].name
        reply.additional.append(dns.rrset.from_text(name, 1, "IN", "TXT", *[f'"{"x" * 255}"'] * 250))
        return framed(reply.to_wire())

    found, _ = one_answer(sends, tmp_path)
    assert found == ONE


def test_no_query_is_early_data(tmp_path: Path) -> None:
    """Nothing is said before the server has proved who it is: the first flight holds no question."""
    flights: list[bytes] = []

    async def session(_: Server, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        flights.append(await reader.read(65_536))
        await asyncio.sleep(0.1)

    async def scenario() -> None:
        async with serve(session, tmp_path, clear=True) as server:
            await resolve(server.resolver("tls", 0.4))

    run(scenario())
    assert flights[0][0] == 22
    assert len(flights[0]) == 5 + int.from_bytes(flights[0][3:5])  # a ClientHello and nothing behind it
    assert 42 not in extensions(flights[0])  # early_data (RFC 8446 §4.2.10)


def extensions(hello: bytes) -> list[int]:
    """The extension numbers of a ClientHello in one record (RFC 8446 §4.1.2)."""
    at = 5 + 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2])
    at += 1 + hello[at] + 2
    found = []
    while at < len(hello):
        found.append(int.from_bytes(hello[at : at + 2]))
        at += 4 + int.from_bytes(hello[at + 2 : at + 4])
    return found


# by hand


class Wire:
    """The line's side of a stream, in memory."""

    alpn = b"dot"

    def __init__(self) -> None:
        self.closed = False
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@contextmanager
def hand_held() -> Iterator[tuple[DotLine, Wire, asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()

    async def make() -> DotLine:
        return DotLine(wire, SERVER)  # type: ignore[arg-type] # all of a stream that a line uses

    wire = Wire()
    try:
        line = loop.run_until_complete(make())
        yield line, wire, loop
        line.fail("the test is over")
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


@given(st.binary(max_size=400), st.integers(1, 40))
def test_any_bytes_in_any_pieces_only_end_the_line(data: bytes, piece: int) -> None:
    with hand_held() as (line, wire, _):
        for at in range(0, len(data), piece):
            line.on_data(line._stream, data[at : at + piece])
        if len(data) >= 2 and len(data) >= 2 + int.from_bytes(data[:2]):
            assert wire.closed  # a whole message, and nothing was asked


@given(st.integers(1, 300), st.permutations(range(5)))
def test_answers_mean_the_same_in_any_pieces_and_any_order(piece: int, order: list[int]) -> None:
    async def scenario(line: DotLine, wire: Wire) -> None:
        asked = [asyncio.ensure_future(line.ask(bytes([0, 0, number]) + bytes(20))) for number in range(5)]
        await asyncio.sleep(0)
        questions = [data[2:] for data in wire.written]
        stream = framed(*(questions[number] for number in order))
        for at in range(0, len(stream), piece):
            line.on_data(line._stream, stream[at : at + piece])
        answers = await asyncio.gather(*asked)
        assert [answer.wire for answer in answers] == [
            bytes([0, 0, number]) + bytes(20) for number in range(5)
        ]

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


async def give_up(line: DotLine, wire: Wire, *, silent: bool = False) -> bytes:
    """Ask and give up, while another question is answered or none is; returns the message that was sent."""
    task = asyncio.ensure_future(line.ask(bytes(23)))
    other = asyncio.ensure_future(asyncio.sleep(0) if silent else line.ask(bytes(23)))
    await asyncio.sleep(0)
    if not silent:
        line.on_data(line._stream, framed(wire.written[-1][2:]))
    task.cancel()
    await asyncio.gather(task, other, return_exceptions=True)
    return wire.written[-1 if silent else -2][2:]


def test_the_id_of_a_question_that_was_given_up_stays_taken_until_it_is_answered() -> None:
    async def scenario(line: DotLine, wire: Wire) -> None:
        late = await give_up(line, wire)
        task = asyncio.ensure_future(line.ask(bytes(23)))
        await asyncio.sleep(0)
        line.on_data(line._stream, framed(late))
        await asyncio.sleep(0)
        assert not task.done()
        line.on_data(line._stream, framed(wire.written[-1][2:]))
        assert (await task).wire == bytes(23)
        line.on_data(line._stream, framed(late))  # and is not taken twice
        assert wire.closed

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


def test_a_line_with_many_questions_given_up_makes_room_for_another_line() -> None:
    async def scenario(line: DotLine, wire: Wire) -> None:
        for _ in range(GIVEN_UP):
            assert line.is_open()
            await give_up(line, wire)
        assert not line.is_open()
        await asyncio.sleep(0.01)
        assert wire.closed
        with pytest.raises(LineLost):
            await line.ask(bytes(23))

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


def test_a_line_that_says_nothing_at_all_is_not_asked_again() -> None:
    async def scenario(line: DotLine, wire: Wire) -> None:
        await give_up(line, wire, silent=True)
        assert not line.is_open()

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


def test_a_server_that_sends_and_does_not_answer_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_query(server, reader)
            for _ in range(100):  # TLS records with nothing but the beginning of a message
                writer.write(b"\xff\xff" + bytes(65_533))
                await writer.drain()

        async with serve(session, tmp_path) as server, asyncio.timeout(5):
            [found] = await resolve(server.resolver("tls", 30), API)
            assert isinstance(found, ResolveFailed)

    run(scenario())
