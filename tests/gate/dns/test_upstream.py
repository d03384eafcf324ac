from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import pytest

from egressd.gate.dns import upstream
from egressd.gate.dns.servers import parse_upstream
from egressd.gate.dns.upstream import ResolveFailed, Resolver
from egressd.policy.attempt import Address, Name
from egressd.policy.reasons import Reason
from tests.gate.dns.authority import Authority, Handler, Transport, answer, authority, silent, zone

API: Name = ("api", "allowed", "test")
ONE = IPv4Address("11.0.0.1")


async def resolved(resolver: Resolver, name: Name = API) -> tuple[Address, ...] | ResolveFailed:
    try:
        return await resolver.resolve(name)
    finally:
        await resolver.close()


def ask(
    handler: Handler, name: Name = API, *, ipv6: bool = False, timeout: float = 5.0
) -> tuple[tuple[Address, ...] | ResolveFailed, Authority]:
    """Resolve one name at a server that answers as `handler` says."""

    async def scenario() -> tuple[tuple[Address, ...] | ResolveFailed, Authority]:
        async with authority(handler) as server:
            resolver = Resolver(server.udp, timeout, ipv6=lambda: ipv6)
            return await resolved(resolver, name), server

    return asyncio.run(scenario())


# the configured upstream


@pytest.mark.parametrize("text", [None, "", "search corp.internal\n"])
def test_a_system_without_nameservers_fails_each_look_up_with_the_reason(
    text: str | None, tmp_path: Path
) -> None:
    conf = tmp_path / "resolv.conf"
    if text is not None:
        conf.write_text(text)
    found = asyncio.run(resolved(Resolver("system", 1, resolv_conf=conf)))
    assert found == ResolveFailed(Reason.UPSTREAM_DNS, "no nameserver is configured")


# what is asked


def test_dns_21_the_query_carries_nothing_but_name_and_type() -> None:
    _, server = ask(zone(api__allowed__test_A="11.0.0.1"))
    [query] = server.queries
    assert (query.edns, query.payload, query.options, query.ednsflags) == (0, 1232, (), 0)
    assert query.flags == dns.flags.RD
    assert (len(query.answer), len(query.authority)) == (0, 0)


def test_ids_ports_and_spellings_are_fresh_for_each_query() -> None:
    async def scenario() -> Authority:
        async with authority(zone(api__allowed__test_A="11.0.0.1")) as server:
            for _ in range(12):
                await resolved(Resolver(server.udp, 5, ipv6=lambda: False))
            return server

    server = asyncio.run(scenario())
    assert len({query.id for query in server.queries}) > 8
    assert len(set(server.ports)) > 8
    assert len({name for _, name, _ in server.asked}) > 8
    assert {name for name, _ in server.names} == {"api.allowed.test"}


def test_neither_search_list_nor_hosts_file_nor_getaddrinfo_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the host's resolver was asked")

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, forbidden)
    monkeypatch.setenv("LOCALDOMAIN", "corp.internal")
    found, server = ask(zone(), ("localhost", "test"))
    assert found == ResolveFailed(Reason.UPSTREAM_DNS, "NXDOMAIN")
    assert server.names == [("localhost.test", "A")]


def test_aaaa_is_asked_only_where_there_is_an_ipv6_route() -> None:
    handler = zone(api__allowed__test_A="11.0.0.1 11.0.0.2", api__allowed__test_AAAA="2600::1")
    found, server = ask(handler, ipv6=False)
    assert found == (ONE, IPv4Address("11.0.0.2"))
    assert server.names == [("api.allowed.test", "A")]
    found, server = ask(handler, ipv6=True)
    assert found == (ONE, IPv4Address("11.0.0.2"), IPv6Address("2600::1"))
    assert server.names == [("api.allowed.test", "A"), ("api.allowed.test", "AAAA")]


def test_the_route_test_sends_nothing_and_answers() -> None:
    assert upstream.has_ipv6_route() in (True, False)


# what is believed


def test_dns_09_a_chain_inside_the_reply_is_flattened() -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        return [
            answer(
                query,
                "x.cdn-other.test. 60 IN A 11.0.0.2",
                "api.allowed.test. 60 IN CNAME x.cdn-other.test.",
            )
        ]

    found, server = ask(handle)
    assert found == (IPv4Address("11.0.0.2"),)
    assert len(server.asked) == 1


def test_a_chain_that_leaves_the_reply_is_followed_by_asking() -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        if query.question[0].name == dns.name.from_text("api.allowed.test"):
            return [answer(query, "api.allowed.test. 60 IN CNAME x.cdn-other.test.")]
        return [answer(query, "x.cdn-other.test. 60 IN A 11.0.0.2")]

    found, server = ask(handle)
    assert found == (IPv4Address("11.0.0.2"),)
    assert server.names == [("api.allowed.test", "A"), ("x.cdn-other.test", "A")]


def test_an_alias_whose_end_has_no_address_is_not_asked_again() -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        soa = ["cdn-other.test. 60 IN SOA . . 1 1 1 1 60"]
        return [answer(query, "api.allowed.test. 60 IN CNAME x.cdn-other.test.", authority=soa)]

    found, server = ask(handle)
    assert found == ResolveFailed(Reason.UPSTREAM_DNS, "the name has no address")
    assert len(server.asked) == 1


@pytest.mark.parametrize("inside", [True, False], ids=["inside one reply", "over many replies"])
@pytest.mark.parametrize(("aliases", "good"), [(8, True), (9, False)])
def test_eight_aliases_are_followed_and_no_more(aliases: int, good: bool, inside: bool) -> None:
    chain = ["api.allowed.test.", *(f"c{number}.test." for number in range(1, aliases + 1))]
    lines = [f"{at} 60 IN CNAME {to}" for at, to in itertools.pairwise(chain)]
    lines.append(f"{chain[-1]} 60 IN A 11.0.0.1")

    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        name = query.question[0].name.to_text().lower()
        return [answer(query, *(line for line in lines if inside or line.split()[0] == name))]

    found, _ = ask(handle)
    assert found == ((ONE,) if good else ResolveFailed(Reason.UPSTREAM_DNS, "more than 8 aliases"))


@pytest.mark.parametrize("inside", [True, False], ids=["inside one reply", "over many replies"])
def test_a_loop_of_aliases_ends(inside: bool) -> None:
    lines = ["api.allowed.test. 60 IN CNAME b.test.", "b.test. 60 IN CNAME api.allowed.test."]

    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        name = query.question[0].name.to_text().lower()
        return [answer(query, *(line for line in lines if inside or line.split()[0] == name))]

    found, server = ask(handle)
    assert found == ResolveFailed(Reason.UPSTREAM_DNS, "more than 8 aliases")
    assert len(server.asked) <= 9


@pytest.mark.parametrize(
    ("target", "reason"),
    [("metadata.google.internal.", Reason.FLOOR_METADATA), ("localhost.", Reason.FLOOR_NAME)],
)
@pytest.mark.parametrize("told", [False, True], ids=["the reply ends there", "the reply goes on"])
def test_an_alias_below_the_floor_is_never_followed(target: str, reason: Reason, told: bool) -> None:
    more = [f"{target} 60 IN A 11.0.0.1"] if told else []
    found, server = ask(lambda query, _: [answer(query, f"api.allowed.test. 60 IN CNAME {target}", *more)])
    assert isinstance(found, ResolveFailed)
    assert found.reason is reason
    assert server.names == [("api.allowed.test", "A")]


def test_dns_10_records_of_other_owners_do_not_exist() -> None:
    async def scenario() -> None:
        def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
            reply = dns.message.from_wire(answer(query, "bank.allowed.test. 60 IN A 11.6.6.6"))
            if query.question[0].name == dns.name.from_text("api.allowed.test"):
                reply = dns.message.from_wire(
                    answer(query, "api.allowed.test. 60 IN A 11.0.0.1", "bank.allowed.test. 60 IN A 11.6.6.6")
                )
                reply.additional = dns.message.from_wire(
                    answer(query, "bank.allowed.test. 60 IN A 11.6.6.6")
                ).answer
            elif query.question[0].name == dns.name.from_text("bank.allowed.test"):
                reply = dns.message.from_wire(answer(query, "bank.allowed.test. 60 IN A 11.0.0.7"))
            return [reply.to_wire()]

        async with authority(handle) as server:
            resolver = Resolver(server.udp, 5, ipv6=lambda: False)
            assert await resolver.resolve(API) == (ONE,)
            assert await resolver.resolve(("bank", "allowed", "test")) == (IPv4Address("11.0.0.7"),)
            found = await resolver.resolve(("other", "allowed", "test"))
            assert found == ResolveFailed(Reason.UPSTREAM_DNS, "the name has no address")

    asyncio.run(scenario())


def wrong_id(query: dns.message.Message, good: bytes) -> bytes:
    return bytes([good[0] ^ 1]) + good[1:]


def wrong_question(query: dns.message.Message, good: bytes) -> bytes:
    other = dns.message.make_query("bank.allowed.test", "A", id=query.id, use_edns=0)
    return answer(other, "bank.allowed.test. 60 IN A 11.6.6.6")


def wrong_type(query: dns.message.Message, good: bytes) -> bytes:
    other = dns.message.make_query(query.question[0].name, "MX", id=query.id, use_edns=0)
    return answer(other, "api.allowed.test. 60 IN A 11.6.6.6")


def a_query(query: dns.message.Message, good: bytes) -> bytes:
    return query.to_wire()


def junk(query: dns.message.Message, good: bytes) -> bytes:
    return good[:2] + os.urandom(30)


FORGERIES: list[Callable[[dns.message.Message, bytes], bytes]] = [
    wrong_id,
    wrong_question,
    wrong_type,
    a_query,
    junk,
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_dns_11_a_forged_reply_is_not_seen_and_the_good_one_counts(
    forge: Callable[[dns.message.Message, bytes], bytes],
) -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        good = answer(query, "api.allowed.test. 60 IN A 11.0.0.1")
        return [forge(query, answer(query, "api.allowed.test. 60 IN A 11.6.6.6")), good]

    found, server = ask(handle)
    assert found == (ONE,)
    assert [transport for transport, _, _ in server.asked] == ["udp"]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_dns_11_forged_replies_alone_end_in_a_timeout(
    forge: Callable[[dns.message.Message, bytes], bytes],
) -> None:
    found, _ = ask(
        lambda query, _: [forge(query, answer(query, "api.allowed.test. 60 IN A 11.6.6.6"))], timeout=0.3
    )
    assert isinstance(found, ResolveFailed)
    assert found.detail.endswith("in time")


def test_dns_11_a_reply_from_another_port_is_not_seen() -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        return []

    async def scenario() -> tuple[Address, ...] | ResolveFailed:
        async with authority(handle) as server:
            resolver = Resolver(server.udp, 0.4, ipv6=lambda: False)
            task = asyncio.create_task(resolver.resolve(API))
            while not server.ports:  # noqa: ASYNC110 plain state
                await asyncio.sleep(0.005)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                forged = answer(server.queries[0], "api.allowed.test. 60 IN A 11.6.6.6")
                stranger.sendto(forged, ("127.0.0.1", server.ports[0]))
            return await task

    found = asyncio.run(scenario())
    assert isinstance(found, ResolveFailed)


def test_a_server_that_does_not_repeat_our_spelling_is_asked_over_tcp() -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        good = answer(query, "api.allowed.test. 60 IN A 11.0.0.1")
        end = 12 + len("api.allowed.test") + 2
        spelled = bytes(byte ^ 0x20 if chr(byte).isalpha() else byte for byte in good[12:end])
        return [good[:12] + spelled + good[end:]]

    found, server = ask(handle)
    assert found == (ONE,)
    assert [transport for transport, _, _ in server.asked] == ["udp", "tcp"]


def test_dns_35_a_truncated_reply_is_asked_again_over_tcp() -> None:
    def handle(query: dns.message.Message, transport: Transport) -> Iterable[bytes]:
        reply = answer(query, *(f"api.allowed.test. 60 IN A 11.0.0.{number}" for number in range(1, 61)))
        if transport == "tcp":
            return [reply]
        return [reply[:2] + bytes([reply[2] | 2]) + reply[3:200]]  # cut in the middle of a record

    found, server = ask(handle)
    assert found == tuple(IPv4Address(f"11.0.0.{number}") for number in range(1, 17))
    assert [transport for transport, _, _ in server.asked] == ["udp", "tcp"]


def test_dns_35_a_reply_cut_down_to_its_header_is_asked_again_over_tcp() -> None:
    def handle(query: dns.message.Message, transport: Transport) -> Iterable[bytes]:
        if transport == "tcp":
            return [answer(query, "api.allowed.test. 60 IN A 11.0.0.1")]
        return [query.to_wire()[:2] + b"\x86\0" + bytes(8)]

    found, server = ask(handle)
    assert found == (ONE,)
    assert [transport for transport, _, _ in server.asked] == ["udp", "tcp"]


def test_tcp_can_be_the_only_transport() -> None:
    async def scenario() -> None:
        async with authority(zone(api__allowed__test_A="11.0.0.1")) as server:
            found = await resolved(Resolver(f"tcp://127.0.0.1:{server.port}", 5, ipv6=lambda: False))
            assert found == (ONE,)
            assert [transport for transport, _, _ in server.asked] == ["tcp"]

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["tcp", "udp"])
def test_a_malformed_reply_to_our_question_is_named(text: str) -> None:
    def handle(query: dns.message.Message, _: Transport) -> Iterable[bytes]:
        reply = answer(query, "api.allowed.test. 60 IN A 11.0.0.1")
        return [reply[:-20]]

    async def scenario() -> tuple[Address, ...] | ResolveFailed:
        async with authority(handle) as server:
            return await resolved(Resolver(f"{text}://127.0.0.1:{server.port}", 2, ipv6=lambda: False))

    found = asyncio.run(scenario())
    assert isinstance(found, ResolveFailed)
    assert "malformed reply" in found.detail


# failures


@pytest.mark.parametrize(
    ("rcode", "detail", "queries"),
    [
        ("NXDOMAIN", "NXDOMAIN", 1),
        ("SERVFAIL", "SERVFAIL", 2),
        ("REFUSED", "REFUSED", 2),
        ("NOTIMP", "NOTIMP", 2),
    ],
)
def test_dns_28_an_upstream_error_is_told_and_there_is_no_second_path(
    rcode: str, detail: str, queries: int
) -> None:
    found, server = ask(lambda query, _: [answer(query, rcode=rcode)])
    assert isinstance(found, ResolveFailed)
    assert found.reason is Reason.UPSTREAM_DNS
    assert found.detail.endswith(detail)
    assert len(server.asked) == queries


def test_dns_28_silence_ends_in_time() -> None:
    found, server = ask(silent, timeout=0.5)
    assert isinstance(found, ResolveFailed)
    assert found.detail.endswith("in time")
    assert len(server.asked) == 2


def test_dns_28_a_dead_server_is_known_at_once() -> None:
    async def scenario() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        async with asyncio.timeout(2):
            found = await resolved(Resolver(f"udp://127.0.0.1:{port}", 30, ipv6=lambda: False))
        assert found == ResolveFailed(Reason.UPSTREAM_DNS, f"udp://127.0.0.1:{port}: Connection refused")

    asyncio.run(scenario())


def test_the_second_server_is_asked_when_the_first_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            authority(lambda query, _: [answer(query, rcode="SERVFAIL")]) as bad,
            authority(zone(api__allowed__test_A="11.0.0.1")) as good,
        ):
            resolver = Resolver(bad.udp, 5, ipv6=lambda: False)
            resolver._servers = (*parse_upstream(bad.udp), *parse_upstream(good.udp))
            assert await resolved(resolver) == (ONE,)
            assert (len(bad.asked), len(good.asked)) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("broken", ["A", "AAAA"])
def test_one_familys_addresses_do_not_wait_long_for_the_other(broken: str) -> None:
    good = zone(api__allowed__test_A="11.0.0.1", api__allowed__test_AAAA="2600::1")

    def handle(query: dns.message.Message, transport: Transport) -> Iterable[bytes]:
        return [] if dns.rdatatype.to_text(query.question[0].rdtype) == broken else good(query, transport)

    async def scenario() -> None:
        async with authority(handle) as server, asyncio.timeout(5):
            found = await resolved(Resolver(server.udp, 30, ipv6=lambda: True))
            assert found == ((IPv6Address("2600::1"),) if broken == "A" else (ONE,))

    asyncio.run(scenario())


def test_a_handler_of_dnspython_that_raises_anything_is_a_failed_look_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr(upstream, "exchange", broken)
    found, _ = ask(silent)
    assert found == ResolveFailed(Reason.UPSTREAM_DNS, "the look-up failed: RecursionError")


# the cache


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("ttl", "kept"), [(0, 5), (1, 5), (60, 60), (300, 300), (2**31 - 1, 300)])
def test_dns_30_answers_are_believed_between_5_and_300_seconds(ttl: int, kept: int) -> None:
    async def scenario() -> None:
        clock = Clock()
        handler: Handler = lambda query, _: [answer(query, f"api.allowed.test. {ttl} IN A 11.0.0.1")]  # noqa: E731 short
        async with authority(handler) as server:
            resolver = Resolver(server.udp, 5, ipv6=lambda: False, monotonic=clock)
            for clock.now, asked in ((0, 1), (kept - 0.1, 1), (kept + 0.1, 2)):
                assert await resolver.resolve(API) == (ONE,)
                assert len(server.asked) == asked

    asyncio.run(scenario())


def test_failures_are_not_remembered() -> None:
    async def scenario() -> None:
        async with authority(lambda query, _: [answer(query, rcode="NXDOMAIN")]) as server:
            resolver = Resolver(server.udp, 5, ipv6=lambda: False)
            for asked in (1, 2):
                assert isinstance(await resolver.resolve(API), ResolveFailed)
                assert len(server.asked) == asked

    asyncio.run(scenario())


def test_the_cache_is_bounded_and_forgets_what_was_used_least_of_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "CACHED", 2)

    async def scenario() -> None:
        async with authority(
            zone(a__test_A="11.0.0.1", b__test_A="11.0.0.2", c__test_A="11.0.0.3")
        ) as server:
            resolver = Resolver(server.udp, 5, ipv6=lambda: False)
            for label in "abaca":
                await resolver.resolve((label, "test"))
            assert server.names == [("a.test", "A"), ("b.test", "A"), ("c.test", "A")]
            await resolver.resolve(("b", "test"))
            assert len(server.asked) == 4

    asyncio.run(scenario())


def test_look_ups_of_one_name_at_one_time_are_one() -> None:
    async def scenario() -> None:
        async with authority(zone(api__allowed__test_A="11.0.0.1")) as server:
            resolver = Resolver(server.udp, 5, ipv6=lambda: False)
            assert await asyncio.gather(*(resolver.resolve(API) for _ in range(20))) == [(ONE,)] * 20
            assert len(server.asked) == 1

    asyncio.run(scenario())


def test_who_gives_up_does_not_take_the_answer_from_the_others() -> None:
    async def scenario() -> None:
        async with authority(zone(api__allowed__test_A="11.0.0.1")) as server:
            resolver = Resolver(server.udp, 5, ipv6=lambda: False)
            first = asyncio.create_task(resolver.resolve(API))
            second = asyncio.create_task(resolver.resolve(API))
            await asyncio.sleep(0)
            first.cancel()
            assert await second == (ONE,)
            await asyncio.gather(first, return_exceptions=True)
            assert first.cancelled()

    asyncio.run(scenario())


# the empty root


def test_warmed_the_resolver_needs_no_file_any_more(tmp_path: Path) -> None:
    """As in the worker: everything imported and read, then no import, no opening of a file, no other resolver."""
    program = """
import asyncio, sys
from ipaddress import IPv4Address
from pathlib import Path
from egressd.gate.dialer import Dialer
from egressd.gate.dns import upstream
from egressd.policy.reasons import Reason
from tests.gate.dns.authority import authority, answer
from tests.gate.dns.encrypted import encrypted, serve
upstream.warm()
KINDS = ["A 11.0.0.1", "RRSIG A 8 2 60 20300101000000 20200101000000 1 test. AAAA", "TXT x", "HTTPS 1 .", "TYPE65400 \\# 1 00"]
FORBIDDEN = ("open", "import", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "os.listdir")
def reply(query):
    return [answer(query, *(f"api.allowed.test. 60 IN {kind}" for kind in KINDS))]
def forbidden(event, args):
    if event in FORBIDDEN:
        raise AssertionError((event, args[:1]))
async def scenario(folders):
    for folder in folders:
        folder.mkdir()
    async with (
        authority(lambda query, _: reply(query)) as server,
        serve(encrypted("tls", reply), folders[0], kind="tls") as dot,
        serve(encrypted("https", reply), folders[1], kind="https") as doh,
    ):
        asked = [upstream.Resolver(f"{kind}://127.0.0.1:{server.port}", 5, ipv6=lambda: True) for kind in ("udp", "tcp")]
        asked += [dot.resolver("tls", ipv6=True), doh.resolver("https", ipv6=True)]
        asked += [upstream.Resolver(dot.url("tls"), 5, ca_file=doh.ca_file)]
        # the servers' own certificates are for the name's first hello to make: they are of another process
        dot.pki.context("dns.example", ("dot",)), doh.pki.context("dns.example", ("h2",))
        dialer = Dialer(asked[0], 5, own=lambda _: False)
        sys.addaudithook(forbidden)
        for resolver in asked:
            print(await resolver.resolve(("api", "allowed", "test")))
        dialed = await dialer.dial(IPv4Address("127.0.0.1"), server.port, lambda _: None)
        dialed.sock.close()
        print(await dialer.dial(("api", "allowed", "test"), 1, lambda _: Reason.SPECIAL_ADDRESS))
        for resolver in asked:
            await resolver.close()
asyncio.run(scenario([Path(sys.argv[1]) / kind for kind in ("dot", "doh")]))
"""
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = result.stdout.splitlines()
    assert lines[:4] == ["(IPv4Address('11.0.0.1'),)"] * 4, result.stderr
    assert "certificate is refused" in lines[4]
    assert "11.0.0.1 special_address" in lines[5]
