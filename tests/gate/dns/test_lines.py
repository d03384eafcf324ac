"""What holds for both encrypted transports: who is asked, on how many connections, and when there is no answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from ipaddress import IPv4Address
from pathlib import Path

import dns.message
import dns.rdatatype
import pytest

from egressd.gate.dns import lines
from egressd.gate.dns.exchange import exchange
from egressd.gate.dns.lines import ReplyError
from egressd.gate.dns.servers import parse_upstream
from egressd.gate.dns.upstream import ResolveFailed, Resolver
from egressd.policy.attempt import Name
from egressd.policy.reasons import Reason
from tests.gate.dns.encrypted import (
    API,
    NAME,
    Found,
    Kind,
    Server,
    encrypted,
    good,
    resolve,
    run,
    serve,
)

ONE = (IPv4Address("11.0.0.1"),)
both = pytest.mark.parametrize("kind", ["tls", "https"])


def numbered(number: int) -> Name:
    return (f"n{number}", "allowed", "test")


def plain(query: dns.message.Message) -> Iterable[bytes]:
    return [good(query)]


def detail_of(found: Found) -> str:
    assert isinstance(found, ResolveFailed)
    assert found.reason is Reason.UPSTREAM_DNS
    return found.detail


# who is asked


@both
def test_a_server_that_proves_its_name_is_asked(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            assert await resolve(server.resolver(kind, ipv6=True)) == [ONE]
            assert sorted(dns.rdatatype.to_text(query.question[0].rdtype) for query in server.queries) == [
                "A",
                "AAAA",
            ]
            assert server.connections == 1

    run(scenario())


@both
def test_without_a_name_the_certificate_must_hold_the_address(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            assert await resolve(Resolver(server.url(kind, None), 5, ca_file=server.ca_file)) == [ONE]
        async with serve(encrypted(kind, plain), tmp_path, kind=kind, kinds={"": "wrong-name"}) as server:
            [found] = await resolve(Resolver(server.url(kind, None), 5, ca_file=server.ca_file))
            assert "certificate is refused: IP address mismatch" in detail_of(found)
            assert server.queries == []

    run(scenario())


@both
@pytest.mark.parametrize(
    ("certificate", "says"),
    [
        ("expired", "certificate has expired"),
        ("not-yet-valid", "certificate is not yet valid"),
        ("self-signed", "self-signed certificate"),
        ("wrong-name", "Hostname mismatch"),
    ],
)
def test_dns_28_another_certificate_is_asked_nothing(
    kind: Kind, certificate: str, says: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        session = encrypted(kind, plain)
        async with serve(session, tmp_path, kind=kind, kinds={NAME: certificate}) as server:
            [found] = await resolve(server.resolver(kind))
            assert says in detail_of(found)
            assert detail_of(found).startswith(f"{kind}://127.0.0.1:{server.port}")
            assert server.queries == []

    run(scenario())


@both
def test_another_authority_vouches_for_nobody(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = tmp_path / "other"
        other.mkdir()
        async with (
            serve(encrypted(kind, plain), tmp_path, kind=kind) as server,
            serve(encrypted(kind, plain), other, kind=kind) as stranger,
        ):
            [found] = await resolve(Resolver(server.url(kind), 5, ca_file=stranger.ca_file))
            assert "certificate is refused" in detail_of(found)
            assert server.queries == []

    run(scenario())


@both
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2"])
def test_tls_1_2_is_the_least(kind: Kind, version: str, tmp_path: Path) -> None:
    def limit(context: ssl.SSLContext) -> None:
        context.sni_callback = None  # the contexts behind it are not limited
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion[version]

    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind, context=limit) as server:
            [found] = await resolve(Resolver(server.url(kind, None), 5, ca_file=server.ca_file))
            if version == "TLSv1_2":
                assert found == ONE
            else:
                assert "TLS failed" in detail_of(found)
                assert server.queries == []

    run(scenario())


@both
def test_dns_28_a_server_in_clear_learns_nothing(kind: Kind, tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def session(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(4096))
        query = dns.message.make_query("api.allowed.test", "A", id=0)
        message = good(query)
        writer.write(len(message).to_bytes(2) + message)

    async def scenario() -> None:
        async with serve(session, tmp_path, kind=kind, clear=True) as server:
            [found] = await resolve(server.resolver(kind))
            assert "TLS failed" in detail_of(found)
            assert len(seen) == 2
            assert all(data[:1] == b"\x16" and b"allowed" not in data for data in seen)

    run(scenario())


@both
def test_dns_28_a_closed_port_is_no_reason_to_ask_elsewhere(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            pass
        [found] = await resolve(server.resolver(kind, 30))
        assert detail_of(found).endswith("Connection refused")

    run(scenario())


@both
def test_an_encrypted_server_is_never_asked_without_its_lines(kind: Kind) -> None:
    [server] = parse_upstream(f"{kind}://127.0.0.1:1")
    with pytest.raises(ReplyError):
        run(exchange(server, dns.name.from_text("a.test"), dns.rdatatype.A))


def test_a_socket_that_was_given_the_servers_own_port_is_not_the_server() -> None:
    async def scenario() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        [server] = parse_upstream(f"tcp://127.0.0.1:{port}")
        made = lines.open_socket(server, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lines, "open_socket", lambda *_: made)
            with pytest.raises(ConnectionRefusedError):
                await lines.connect(server)
        assert made.fileno() == -1

    run(scenario())


# how it is asked


@both
def test_queries_have_one_size_and_say_nothing_but_name_and_type(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            await resolve(server.resolver(kind), API, ("a-much-longer-name", *API))
            assert {len(wire) for wire in server.wires} == {128}
            [query, _] = server.queries
            assert [option.otype for option in query.options] == [12]  # padding (RFC 7830)
            assert query.flags == dns.flags.RD
            assert (query.edns, len(query.answer), len(query.authority)) == (0, 0, 0)

    run(scenario())


@both
def test_one_connection_carries_many_questions(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind, ipv6=True)
            found = await asyncio.gather(*(resolver.resolve(numbered(number)) for number in range(100)))
            assert found == [ONE] * 100
            assert await resolve(resolver, *(numbered(number) for number in range(200, 210))) == [ONE] * 10
            assert server.connections == 1
            assert len(server.queries) == 220

    run(scenario())


@both
def test_questions_under_way_are_bounded_and_all_are_answered(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "ASKED", 4)
    under_way: list[int] = []

    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind)
            asked = resolver._lines[resolver._servers[0]]
            before = asked._get

            async def counted() -> tuple[lines.Line, bool]:
                line, used = await before()
                under_way.append(len(line._waiting))
                return line, used

            monkeypatch.setattr(asked, "_get", counted)
            found = await asyncio.gather(*(resolver.resolve(numbered(number)) for number in range(40)))
            assert found == [ONE] * 40
            await resolver.close()

    run(scenario())
    assert 1 <= max(under_way) < 4


# when a line ends


@both
def test_an_idle_line_is_closed_and_the_next_question_opens_another(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "IDLE", 0.05)

    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind)
            assert await resolver.resolve(numbered(1)) == ONE
            await server.until(lambda: server.ended == 1)
            assert await resolve(resolver, numbered(2)) == [ONE]
            assert server.connections == 2

    run(scenario())


@both
def test_a_line_that_the_server_closed_meanwhile_is_replaced(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, plain), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind)
            for number in range(3):
                assert await resolver.resolve(numbered(number)) == ONE
                server.writers[-1].close()
                await server.until(lambda: server.ended == server.connections)
            await resolver.close()
            assert server.connections == 3

    run(scenario())


@both
def test_a_used_line_that_dies_with_the_question_costs_one_more_connection_and_no_round(
    kind: Kind, tmp_path: Path
) -> None:
    async def scenario() -> None:
        def reply(query: dns.message.Message) -> Iterable[bytes]:
            if len(server.queries) == 2:
                server.writers[0].transport.abort()
                return []
            return [good(query)]

        async with serve(encrypted(kind, reply), tmp_path, kind=kind) as server:
            assert await resolve(server.resolver(kind), numbered(1), numbered(2)) == [ONE, ONE]
            assert server.connections == 2
            assert len(server.queries) == 3

    run(scenario())


@both
def test_a_server_that_never_answers_but_hangs_up_is_not_asked_for_ever(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        def reply(_: dns.message.Message) -> Iterable[bytes]:
            server.writers[-1].transport.abort()
            return []

        async with serve(encrypted(kind, reply), tmp_path, kind=kind) as server:
            [found] = await resolve(server.resolver(kind))
            assert "the connection was lost" in detail_of(found) or "closed" in detail_of(found)
            assert server.connections == 2

    run(scenario())


@both
@pytest.mark.parametrize("goodbye", ["orderly", "a FIN alone"])
def test_a_server_that_closes_its_side_is_not_waited_for(kind: Kind, goodbye: str, tmp_path: Path) -> None:
    async def session(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if goodbye == "orderly":
            writer.close()
        else:
            writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
            await reader.read()

    async def scenario() -> None:
        async with serve(session, tmp_path, kind=kind) as server, asyncio.timeout(5):
            [found] = await resolve(server.resolver(kind, 30))
            assert "closed" in detail_of(found) or "lost" in detail_of(found)
            assert server.connections == 2

    run(scenario())


@both
def test_silence_ends_in_time_and_the_line_with_it(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        def reply(query: dns.message.Message) -> Iterable[bytes]:
            return [] if query.question[0].name.labels[0].lower() == b"n1" else [good(query)]

        async with serve(encrypted(kind, reply), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind, 0.5)
            found = await resolver.resolve(numbered(1))
            assert detail_of(found).endswith("in time")
            assert len(server.queries) == 2  # once in each round
            assert server.connections == 2  # the second time on a new line: the first may have been dead
            assert await resolve(resolver, numbered(2)) == [ONE]
            assert server.connections == 3

    run(scenario())


@both
def test_an_answer_that_is_late_takes_no_line_from_the_others(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egressd.gate.dns.upstream.LATE_FAMILY", 0.05)

    async def scenario() -> None:
        def reply(query: dns.message.Message) -> Iterable[bytes]:
            return [good(query)] if query.question[0].rdtype == dns.rdatatype.A else []

        async with serve(encrypted(kind, reply), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind, ipv6=True)
            found = await resolve(resolver, *(numbered(number) for number in range(5)))
            assert found == [ONE] * 5
            assert server.connections == 1

    run(scenario())


@both
def test_a_handshake_that_hangs_ends_in_time(kind: Kind, tmp_path: Path) -> None:
    async def session(_: Server, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario() -> None:
        async with serve(session, tmp_path, kind=kind, clear=True) as server, asyncio.timeout(5):
            [found] = await resolve(server.resolver(kind, 0.3))
            assert detail_of(found).endswith("in time")
            assert server.connections == 1  # the second round waits for the same one

    run(scenario())


@both
@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 70_000], ids=len)
def test_junk_ends_the_line(kind: Kind, junk: bytes, tmp_path: Path) -> None:
    async def session(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(junk)
        await reader.read()

    async def scenario() -> None:
        async with serve(session, tmp_path, kind=kind) as server, asyncio.timeout(5):
            [found] = await resolve(server.resolver(kind, 1))
            assert isinstance(found, ResolveFailed)
            await server.until(lambda: server.ended == server.connections)

    run(scenario())


@both
def test_an_answer_that_drips_is_not_waited_for_longer_than_silence(kind: Kind, tmp_path: Path) -> None:
    async def session(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dripping = bytes([0, 200]) + bytes(198) if kind == "tls" else b"\0\0\xff\xee\0\0\0\0\0" + bytes(255)
        for byte in dripping:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with serve(session, tmp_path, kind=kind) as server, asyncio.timeout(5):
            [found] = await resolve(server.resolver(kind, 0.5))
            assert detail_of(found).endswith("in time")
            assert server.connections == 2

    run(scenario())


@both
def test_closing_the_resolver_closes_its_lines(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(encrypted(kind, lambda _: []), tmp_path, kind=kind) as server:
            resolver = server.resolver(kind)
            task = asyncio.create_task(resolver.resolve(API))
            await server.until(lambda: server.queries)
            await resolver.close()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.until(lambda: server.ended == 1)

    run(scenario())


@both
def test_dns_28_rcodes_count_as_over_udp(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> None:
        def reply(query: dns.message.Message) -> Iterable[bytes]:
            label = query.question[0].name.labels[0].lower()
            response = dns.message.make_response(query)
            response.set_rcode(dns.rcode.NXDOMAIN if label == b"n1" else dns.rcode.SERVFAIL)
            return [response.to_wire()]

        async with serve(encrypted(kind, reply), tmp_path, kind=kind) as server:
            found = await resolve(server.resolver(kind), numbered(1), numbered(2))
            assert found[0] == ResolveFailed(Reason.UPSTREAM_DNS, "NXDOMAIN")
            assert detail_of(found[1]).endswith("SERVFAIL")
            assert server.connections == 1
            assert len(server.queries) == 3

    run(scenario())


def another_question(query: dns.message.Message) -> bytes:
    return good(dns.message.make_query("bank.allowed.test", "A", id=query.id))


def another_type(query: dns.message.Message) -> bytes:
    return good(dns.message.make_query(query.question[0].name, "MX", id=query.id))


def no_question(query: dns.message.Message) -> bytes:
    return query.to_wire()[:2] + b"\x80\0" + bytes(8)


def a_query(query: dns.message.Message) -> bytes:
    return query.to_wire()


def truncated(query: dns.message.Message) -> bytes:
    wire = good(query)
    return wire[:2] + bytes([wire[2] | 2]) + wire[3:]


def cut(query: dns.message.Message) -> bytes:
    return good(query)[:-20]


def with_a_tail(query: dns.message.Message) -> bytes:
    return good(query) + b"tail"


@both
@pytest.mark.parametrize(
    "forge",
    [another_question, another_type, no_question, a_query, truncated, cut, with_a_tail],
    ids=lambda forge: forge.__name__,
)
def test_dns_11_a_reply_to_anything_but_the_question_is_no_answer(
    kind: Kind, forge: object, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serve(
            encrypted(kind, lambda query: [forge(query)] if callable(forge) else []), tmp_path, kind=kind
        ) as server:
            [found] = await resolve(server.resolver(kind, 2))
            assert "a reply to another question" in detail_of(found) or "malformed" in detail_of(found)

    run(scenario())
