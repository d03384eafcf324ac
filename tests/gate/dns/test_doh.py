"""DNS over HTTPS: what is a request, what is an answer, and what HTTP/2 may do to both."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path

import dns.message
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamEnded
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.dns.doh import DohLine, authority_of
from egressd.gate.dns.lines import Answer, LineLost, ReplyError
from egressd.gate.dns.servers import parse_upstream
from egressd.gate.dns.upstream import ResolveFailed, Resolver
from egressd.policy.attempt import Name
from tests.gate.dns.authority import answer
from tests.gate.dns.encrypted import (
    Found,
    Http2,
    Respond,
    Response,
    Server,
    Session,
    doh,
    good,
    resolve,
    run,
    serve,
)

ONE = (IPv4Address("11.0.0.1"),)
[SERVER] = parse_upstream("https://11.0.0.53#dns.example")


def numbered(number: int) -> Name:
    return (f"n{number}", "allowed", "test")


def ask(
    session: Session, tmp_path: Path, *, timeout: float = 20, names: int = 1
) -> tuple[list[Found], Server]:
    """Resolve names at a server; a failure must come long before the time is over."""

    async def scenario() -> tuple[list[Found], Server]:
        async with serve(session, tmp_path, kind="https") as server, asyncio.timeout(min(timeout, 5)):
            found = await resolve(server.resolver("https", timeout), *map(numbered, range(names)))
            return found, server

    return run(scenario())


def refusal(respond: Respond, tmp_path: Path) -> tuple[str, Server]:
    [found], server = ask(doh(respond), tmp_path)
    assert isinstance(found, ResolveFailed)
    return found.detail.partition("#dns.example: ")[2], server


# the request


def test_a_question_is_one_post_that_says_nothing_of_who_asks(tmp_path: Path) -> None:
    [found], server = ask(doh(lambda query: Response(good(query))), tmp_path)
    assert found == ONE
    assert server.heads == [
        [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", f"dns.example:{server.port}"),
            (":path", "/dns-query"),
            ("accept", "application/dns-message"),
            ("accept-encoding", "identity"),
            ("content-type", "application/dns-message"),
            ("content-length", "128"),
        ]
    ]
    assert [query.id for query in server.queries] == [0]  # RFC 8484 §4.1


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("https://11.0.0.53", "11.0.0.53"),
        ("https://11.0.0.53:8443", "11.0.0.53:8443"),
        ("https://[2001:db8::53]", "[2001:db8::53]"),
        ("https://11.0.0.53:443#dns.example", "dns.example"),
        ("https://11.0.0.53:8443#dns.example", "dns.example:8443"),
    ],
)
def test_the_authority_is_the_proven_name_or_the_address(url: str, authority: str) -> None:
    assert authority_of(parse_upstream(url)[0]) == authority


def test_the_path_is_the_configured_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(doh(lambda query: Response(good(query))), tmp_path, kind="https") as server:
            url = f"https://127.0.0.1:{server.port}/tenant/7f3a%2F#dns.example"
            await resolve(Resolver(url, 5, ca_file=server.ca_file, ipv6=lambda: False))
            assert dict(server.heads[0])[":path"] == "/tenant/7f3a%2F"

    run(scenario())


@pytest.mark.parametrize("alpn", [(), ("http/1.1",), ("dot",)])
def test_a_server_that_does_not_agree_to_http_2_is_asked_nothing(
    alpn: tuple[str, ...], tmp_path: Path
) -> None:
    async def scenario() -> None:
        session = doh(lambda query: Response(good(query)))
        async with serve(session, tmp_path, kind="https", alpn=alpn) as server:
            [found] = await resolve(server.resolver("https"))
            assert isinstance(found, ResolveFailed)
            assert found.detail.endswith("the server does not agree to speak h2")
            assert server.heads == []

    run(scenario())


# the answer


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"content-type": None}, "an answer that is no application/dns-message"),
        ({"content-type": "text/html"}, "an answer that is no application/dns-message"),
        ({"content-type": "application/dns-json"}, "an answer that is no application/dns-message"),
        (
            {"content-type": "application/dns-message, text/html"},
            "an answer that is no application/dns-message",
        ),
        ({"content-encoding": "gzip"}, "a compressed answer"),
        ({"content-encoding": "identity, br"}, "a compressed answer"),
    ],
)
def test_a_head_that_is_none_of_a_dns_message_is_no_answer(
    headers: dict[str, str | None], says: str, tmp_path: Path
) -> None:
    detail, server = refusal(lambda query: Response(good(query), headers=headers), tmp_path)
    assert detail == says
    assert server.connections == 1  # the question failed, not the line


def test_a_content_type_given_twice_is_no_answer(tmp_path: Path) -> None:
    detail, _ = refusal(
        lambda query: Response(good(query), more=[("content-type", "application/dns-message")]), tmp_path
    )
    assert detail == "an answer that is no application/dns-message"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "Application/DNS-Message"},
        {"content-type": "application/dns-message; charset=binary"},
        {"content-encoding": "identity"},
        {"content-length": None},
        {"server": "x", "alt-svc": 'h3=":443"', "cache-control": "max-age=60"},
    ],
)
def test_other_heads_make_no_difference(headers: dict[str, str | None], tmp_path: Path) -> None:
    [found], _ = ask(doh(lambda query: Response(good(query), headers=headers)), tmp_path)
    assert found == ONE


@pytest.mark.parametrize("status", ["201", "204", "301", "302", "307", "400", "404", "429", "500", "503"])
def test_nothing_but_a_200_is_an_answer_and_no_redirect_is_followed(status: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = tmp_path / "other"
        other.mkdir()
        async with serve(doh(lambda query: Response(good(query))), other, kind="https") as target:

            def respond(query: dns.message.Message) -> Response:
                return Response(good(query), status, {"location": target.url("https", None) + "/dns-query"})

            async with serve(doh(respond), tmp_path, kind="https") as server:
                [found] = await resolve(server.resolver("https"))
                assert isinstance(found, ResolveFailed)
                assert found.detail.endswith(f": HTTP status {status}")
                assert target.connections == 0
                assert {dict(head)[":path"] for head in server.heads} == {"/dns-query"}

    run(scenario())


@pytest.mark.parametrize("status", ["", "2", "0200", "abc", "2\u0660\u0660"])
def test_a_status_that_is_none_is_not_quoted(status: str, tmp_path: Path) -> None:
    detail, _ = refusal(lambda query: Response(good(query), status), tmp_path)
    assert detail == "no HTTP status" or detail.startswith("the server breaks the protocol")


@pytest.mark.parametrize("size", [65_536, 100_000])
@pytest.mark.parametrize("told", [True, False], ids=["with a length", "without"])
def test_an_answer_that_is_too_large_is_dropped_as_it_comes(size: int, told: bool, tmp_path: Path) -> None:
    headers: dict[str, str | None] = {} if told else {"content-length": None}
    detail, _ = refusal(lambda query: Response(good(query).ljust(size, b"\0"), headers=headers), tmp_path)
    assert detail == "an answer that is too large"


def test_the_largest_message_is_read(tmp_path: Path) -> None:
    def respond(query: dns.message.Message) -> Response:
        reply = dns.message.from_wire(good(query))
        name = reply.question[0].name
        reply.additional.append(dns.rrset.from_text(name, 1, "IN", "TXT", *[f'"{"x" * 255}"'] * 250))
        return Response(reply.to_wire())

    found, server = ask(doh(respond), tmp_path, names=5)
    assert found == [ONE] * 5
    assert server.connections == 1


@pytest.mark.parametrize("body", [b"", b"\0" * 11, b"<html>", b"\xff" * 300], ids=len)
def test_a_body_that_is_no_message_is_no_answer(body: bytes, tmp_path: Path) -> None:
    detail, _ = refusal(lambda _: Response(body), tmp_path)
    assert detail == "a reply to another question"


def test_dns_11_an_answer_with_an_id_is_no_answer(tmp_path: Path) -> None:
    detail, _ = refusal(lambda query: Response(b"\x12\x34" + good(query)[2:]), tmp_path)
    assert detail == "a reply to another question"


@pytest.mark.parametrize(
    ("age", "kept"),
    [("0", 200), ("150", 50), ("199", 5), ("5000", 5), ("-1", 200), ("1e3", 200), ("9" * 30, 200)],
)
def test_an_age_shortens_what_is_believed(age: str, kept: int, tmp_path: Path) -> None:
    now = 0.0

    async def scenario() -> None:
        nonlocal now

        def respond(query: dns.message.Message) -> Response:
            name = query.question[0].name.to_text()
            return Response(answer(query, f"{name} 200 IN A 11.0.0.1"), headers={"age": age})

        async with serve(doh(respond), tmp_path, kind="https") as server:
            resolver = Resolver(
                server.url("https"), 5, ca_file=server.ca_file, ipv6=lambda: False, monotonic=lambda: now
            )
            for at, asked in ((0.0, 1), (kept - 0.1, 1), (kept + 0.1, 2)):
                now = at
                assert await resolver.resolve(numbered(1)) == ONE
                assert len(server.queries) == asked
            await resolver.close()

    run(scenario())


# HTTP/2


def http2(
    respond: Callable[[Http2, int, dns.message.Message], Awaitable[None]],
    settings: dict[int, int] | None = None,
) -> Session:
    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Http2(server, reader, writer, settings)
        async for stream, query in connection.requests():
            await respond(connection, stream, query)

    return session


def test_interim_responses_and_trailers_make_no_difference(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        connection.h2.send_headers(stream, [(":status", "103"), ("link", "</x>")])
        connection.h2.send_headers(stream, Response(good(query)).head())
        connection.h2.send_data(stream, good(query), pad_length=200)
        connection.h2.send_headers(stream, [("x-sum", "1")], end_stream=True)
        connection.flush()

    [found], _ = ask(http2(respond), tmp_path)
    assert found == ONE


def test_a_stream_that_is_refused_is_asked_again(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        if len(connection.server.queries) in (1, 3):
            connection.h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            connection.flush()
        else:
            await connection.send(stream, Response(good(query)))

    found, server = ask(http2(respond), tmp_path, names=3)
    assert found == [ONE] * 3
    assert (server.connections, len(server.queries)) == (1, 5)


def test_questions_beyond_what_the_server_takes_at_a_time_wait(tmp_path: Path) -> None:
    async def scenario(line: DohLine, wire: Wire) -> None:
        wire.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})
        line.on_data(line._stream, wire.h2.data_to_send())
        asked = [asyncio.ensure_future(line.ask(bytes(20))) for _ in range(3)]
        await asyncio.sleep(0)
        assert wire.asked == []
        wire.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
        line.on_data(line._stream, wire.h2.data_to_send())
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(wire.asked) == 2
        asked[0].cancel()  # which makes room
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(wire.asked) == 3
        line.fail("lost")
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError, LineLost, LineLost]

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


def test_a_line_that_ends_lets_those_go_that_wait_for_room(tmp_path: Path) -> None:
    async def scenario(line: DohLine, wire: Wire) -> None:
        wire.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})
        line.on_data(line._stream, wire.h2.data_to_send())
        asked = asyncio.ensure_future(line.ask(bytes(20)))
        await asyncio.sleep(0)
        line.fail("gone")
        with pytest.raises(LineLost):
            await asked

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


def test_a_stream_that_is_reset_fails_its_question_alone(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        if query.question[0].name.labels[0].lower() == b"n0":
            connection.h2.reset_stream(stream, ErrorCodes.INTERNAL_ERROR)
            connection.flush()
        else:
            await connection.send(stream, Response(good(query)))

    found, server = ask(http2(respond), tmp_path, names=2)
    assert isinstance(found[0], ResolveFailed)
    assert found[0].detail.endswith("the server reset the stream with error 2")
    assert found[1] == ONE
    assert server.connections == 1


def test_a_server_that_goes_away_after_an_answer_is_asked_on_a_new_line(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        await connection.send(stream, Response(good(query)))
        connection.h2.close_connection()
        connection.flush()

    found, server = ask(http2(respond), tmp_path, names=3)
    assert found == [ONE] * 3
    assert server.connections == 3


def test_a_used_line_that_goes_away_before_the_answer_costs_no_round(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        if len(connection.server.queries) == 2:
            connection.h2.close_connection(last_stream_id=0)
            connection.flush()
        else:
            await connection.send(stream, Response(good(query)))

    found, server = ask(http2(respond), tmp_path, names=2)
    assert found == [ONE] * 2
    assert (server.connections, len(server.queries)) == (2, 3)


def test_the_servers_bound_of_streams_is_kept(tmp_path: Path) -> None:
    most = 0

    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        nonlocal most
        most = max(most, connection.h2.open_inbound_streams)
        await asyncio.sleep(0.01)
        await connection.send(stream, Response(good(query)))

    async def scenario() -> None:
        session = http2(respond, {SettingCodes.MAX_CONCURRENT_STREAMS: 2})
        async with serve(session, tmp_path, kind="https") as server:
            resolver = server.resolver("https")
            assert await resolver.resolve(numbered(99)) == ONE
            found = await asyncio.gather(*(resolver.resolve(numbered(number)) for number in range(10)))
            assert found == [ONE] * 10
            assert server.connections <= 10
            await resolver.close()

    run(scenario())
    assert most <= 2


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(b"\0\0\x08\x06\0\0\0\0\0" + bytes(8), id="pings"),
        pytest.param(b"\0\0\0\x04\0\0\0\0\0", id="settings"),
        pytest.param(b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01", id="windows"),
        pytest.param(b"\0\0\0\xee\0\0\0\0\0", id="frames of no known type"),
        pytest.param(b"\0\0\0\0\0\0\0\0\x01", id="empty data"),
        pytest.param(b"\0\0\x05\x02\0\0\0\0\x01\0\0\0\0\0", id="priorities"),
    ],
)
def test_a_server_that_sends_and_does_not_answer_is_left(frames: bytes, tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, _: dns.message.Message) -> None:
        connection.h2.send_headers(stream, [(":status", "200"), ("content-type", "application/dns-message")])
        connection.flush()
        for _round in range(200):
            connection.writer.write(frames * 1000)
            await connection.writer.drain()

    [found], server = ask(http2(respond), tmp_path)
    assert isinstance(found, ResolveFailed)
    assert server.connections == 2


def test_a_server_that_makes_us_talk_and_does_not_read_is_left() -> None:
    with hand_held() as (line, wire, _):
        line.on_pause(line._stream)
        assert wire.closed


@pytest.mark.parametrize(
    "block", [b"\x82" * 20_000, b"\x00\x01x\x7f\xff\xff\x03" + b"y" * 16_000], ids=["indexed", "long"]
)
def test_a_head_that_is_too_large_ends_the_line(block: bytes, tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, _: dns.message.Message) -> None:
        first, rest = block[:16_000], block[16_000:]
        frame = len(first).to_bytes(3) + b"\x01\0" + stream.to_bytes(4) + first
        connection.writer.write(frame)
        while True:
            connection.writer.write(len(rest).to_bytes(3) + b"\x09\0" + stream.to_bytes(4) + rest)
            await connection.writer.drain()

    [found], _ = ask(http2(respond), tmp_path)
    assert isinstance(found, ResolveFailed)


def test_a_pushed_answer_is_none(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        block = connection.h2.encoder.encode(
            [(":method", "GET"), (":scheme", "https"), (":authority", "x"), (":path", "/")]
        )
        payload = (2).to_bytes(4) + block
        connection.writer.write(len(payload).to_bytes(3) + b"\x05\x04" + stream.to_bytes(4) + payload)

    [found], _ = ask(http2(respond), tmp_path)
    assert isinstance(found, ResolveFailed)
    assert "breaks the protocol" in found.detail


def test_a_server_that_gives_no_room_for_questions_is_left(tmp_path: Path) -> None:
    async def respond(connection: Http2, stream: int, query: dns.message.Message) -> None:
        await connection.send(stream, Response(good(query)))

    found, _ = ask(http2(respond, {SettingCodes.INITIAL_WINDOW_SIZE: 0}), tmp_path, names=2, timeout=1)
    assert all(each == ONE or isinstance(each, ResolveFailed) for each in found)
    assert isinstance(found[1], ResolveFailed)


# by hand


class Wire:
    """The line's side of a stream, in memory, with a server's HTTP/2 at its other end."""

    alpn = b"h2"

    def __init__(self) -> None:
        self.closed = False
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.asked: list[int] = []

    def write(self, data: bytes) -> None:
        if not self.closed:
            for event in self.h2.receive_data(data):
                if isinstance(event, StreamEnded):
                    self.asked.append(event.stream_id)
                assert not isinstance(event, RequestReceived) or re.fullmatch(
                    rb"POST", dict(event.headers)[b":method"]
                )

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@contextmanager
def hand_held() -> Iterator[tuple[DohLine, Wire, asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()

    async def make() -> DohLine:
        return DohLine(wire, SERVER)  # type: ignore[arg-type] # all of a stream that a line uses

    wire = Wire()
    try:
        line = loop.run_until_complete(make())
        yield line, wire, loop
        line.fail("the test is over")
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


FRAME = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload
    ),
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]),
    st.binary(max_size=40),
)


@given(st.binary(max_size=200) | st.lists(FRAME, max_size=8).map(b"".join), st.integers(1, 60))
def test_any_bytes_in_any_pieces_only_answer_or_end_the_line(data: bytes, piece: int) -> None:
    async def scenario(line: DohLine, wire: Wire) -> None:
        asked = [asyncio.ensure_future(line.ask(bytes(30))) for _ in range(2)]
        await asyncio.sleep(0)
        line.on_data(line._stream, wire.h2.data_to_send())
        for at in range(0, len(data), piece):
            line.on_data(line._stream, data[at : at + piece])
        await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(end, Answer | ReplyError | asyncio.CancelledError) for end in ends)

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


@given(st.permutations(range(4)), st.integers(1, 300))
def test_answers_mean_the_same_in_any_pieces_and_any_order(order: list[int], piece: int) -> None:
    async def scenario(line: DohLine, wire: Wire) -> None:
        asked = [asyncio.ensure_future(line.ask(bytes(20))) for _ in range(4)]
        await asyncio.sleep(0)
        for number in order:
            body = bytes([number]) * 50
            head = [(b":status", b"200"), (b"content-type", b"application/dns-message")]
            wire.h2.send_headers(wire.asked[number], head)
            wire.h2.send_data(wire.asked[number], body, end_stream=True)
        stream = wire.h2.data_to_send()
        for at in range(0, len(stream), piece):
            line.on_data(line._stream, stream[at : at + piece])
        answers = await asyncio.gather(*asked)
        assert answers == [Answer(bytes([number]) * 50) for number in range(4)]

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))


def test_a_question_that_is_given_up_resets_its_stream() -> None:
    async def scenario(line: DohLine, wire: Wire) -> None:
        task = asyncio.ensure_future(line.ask(bytes(20)))
        await asyncio.sleep(0)
        [stream] = wire.asked
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert wire.h2.open_inbound_streams == 0
        assert stream not in line._responses

    with hand_held() as (line, wire, loop):
        loop.run_until_complete(scenario(line, wire))
