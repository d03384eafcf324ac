from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import struct
import subprocess
from collections import Counter
from ipaddress import IPv4Address
from typing import Any

import dns.message
import dns.rcode
import pytest

from egressd.gate.dns import server as server_module
from egressd.gate.dns.synthetic import FIRST, SyntheticNames
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.settings import Settings
from egressd.policy.attempt import Name
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EntryLimits, Rate
from tests.gate.dns.ground import Ground, framed, policy, query, receive, serving, unframed, until

EXPLAIN = "198.18.0.2"


# what is answered, and in which order things happen


def test_a_new_name_is_answered_only_after_its_pair_and_its_record_are_stored() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            assert await ground.outcome("api.allowed.test") == str(FIRST)
            assert ground.book.log == ["store api.allowed.test", "commit api.allowed.test"]
            assert ground.stored == [(("api", "allowed", "test"), FIRST)]
            [record] = ground.book.records
            assert (record.event, record.layer, record.channel) == ("decision", "dns", "dns-udp")
            assert (record.verdict, record.reason, record.rule, record.place) == (
                "allow",
                "rule",
                "api.allowed.test",
                "p.yaml:1",
            )
            assert (record.host, record.qtype, record.sandbox) == ("api.allowed.test", "A", "s1")
            assert (record.profile, record.labels) == ("p", {"task": "t"})
            assert record.policy == ground.sandbox.policy.digest
            assert record.root_id == record.attempt_id

    asyncio.run(scenario())


def test_a_known_name_is_answered_without_control_and_becomes_the_root_of_later_connections() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            for _ in range(2):
                assert await ground.outcome("api.allowed.test") == str(FIRST)
                [*_, last] = ground.book.records
                assert ground.sandbox.names.root_of(("api", "allowed", "test")) == last.attempt_id
            assert ground.book.log == ["store api.allowed.test", "commit api.allowed.test"]
            assert len(ground.book.records) == 2

    asyncio.run(scenario())


def test_aaaa_of_an_allowed_name_needs_no_address() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            assert await ground.outcome("api.allowed.test", "AAAA") == "NOERROR"
            assert ground.stored == []
            assert ground.book.told() == [("allow", "rule")]

    asyncio.run(scenario())


def test_queries_for_one_new_name_share_one_pair() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def slow(_name: Name, _address: IPv4Address) -> None:
            await release.wait()

        async with serving("api.allowed.test", store=slow) as ground:
            with ground.client() as first, ground.client() as second:
                first.send(query("api.allowed.test"))
                second.send(query("API.allowed.test"))
                await until(lambda: len(ground.stored) > 0)
                await asyncio.sleep(0)
                assert ground.sandbox.names.address_of(("api", "allowed", "test")) is None
                release.set()
                replies = [dns.message.from_wire(await receive(sock)) for sock in (first, second)]
            assert [str(reply.answer[0][0]) for reply in replies] == [str(FIRST)] * 2
            assert len(ground.stored) == 1
            assert len(ground.book.records) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(("mode", "seen"), [("explain", EXPLAIN), ("nxdomain", "NXDOMAIN")])
def test_dns_01_a_denied_name_is_answered_at_once_and_recorded_with_its_name(mode: str, seen: str) -> None:
    async def scenario() -> None:
        async with serving(
            "api.allowed.test", settings=Settings.model_validate({"dns_denied": mode})
        ) as ground:
            assert await ground.outcome("4A6f.evil.test") == seen
            [record] = ground.book.records
            assert (record.verdict, record.reason) == ("deny", "not_allowed")
            assert (record.host, record.host_raw) == ("4a6f.evil.test", "4A6f.evil.test")
            assert ground.stored == []

    asyncio.run(scenario())


def test_a_swapped_policy_counts_from_the_next_query() -> None:
    async def scenario() -> None:
        async with serving("other.test") as ground:
            assert await ground.outcome("api.allowed.test") == EXPLAIN
            ground.sandbox.policy = policy("api.allowed.test")
            assert await ground.outcome("api.allowed.test") == str(FIRST)
            ground.sandbox.policy = policy("other.test")
            assert await ground.outcome("api.allowed.test") == EXPLAIN

    asyncio.run(scenario())


@pytest.mark.parametrize(("hosts", "seen"), [("other.test", EXPLAIN), ("*.allowed.test", str(FIRST))])
def test_a_policy_swapped_while_a_name_is_stored_is_what_its_query_is_judged_by(
    hosts: str, seen: str
) -> None:
    """CFG-13: the record and the answer are of one policy, the one in force when they are given."""

    async def scenario() -> None:
        async def swap(_: Name, __: IPv4Address) -> None:
            ground.sandbox.policy = policy(hosts)

        async with serving("api.allowed.test", store=swap) as ground:
            assert await ground.outcome("api.allowed.test") == seen
            [record] = ground.book.records
            assert record.policy == policy(hosts).digest
            assert record.verdict == ("deny" if seen == EXPLAIN else "allow")
            assert not ground.server._unrecorded

    asyncio.run(scenario())


def test_a_revoked_sandbox_gets_no_name() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            assert await ground.outcome("api.allowed.test") == str(FIRST)
            ground.sandbox.revoked = True
            assert await ground.outcome("api.allowed.test") == EXPLAIN
            assert ground.book.told()[-1] == ("deny", "revoked")

    asyncio.run(scenario())


# what fails is not answered


def explode(*_: object) -> Any:
    raise ZeroDivisionError("the policy broke")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AuditUnavailable("full"), "audit_unavailable"), (RuntimeError("bug"), "internal_error")],
)
def test_a_store_that_fails_is_servfail_and_the_pair_stays_unknown(error: Exception, reason: str) -> None:
    async def scenario() -> None:
        broken = True

        async def store(_name: Name, _address: IPv4Address) -> None:
            if broken:
                raise error

        async with serving("api.allowed.test", store=store) as ground:
            assert await ground.outcome("api.allowed.test") == "SERVFAIL"
            assert ground.book.told() == [("deny", reason)]
            assert ground.sandbox.names.name_of(FIRST) is None
            broken = False
            assert await ground.outcome("api.allowed.test") == str(FIRST)

    asyncio.run(scenario())


def test_a_store_that_hangs_is_servfail_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STORE_TIMEOUT", 0.05)

    async def scenario() -> None:
        async def hang(_name: Name, _address: IPv4Address) -> None:
            await asyncio.Event().wait()

        async with serving("api.allowed.test", store=hang) as ground:
            assert await ground.outcome("api.allowed.test") == "SERVFAIL"
            assert await ground.outcome("evil.test") == EXPLAIN, "others are answered meanwhile"
            assert ground.book.told()[0] == ("deny", "audit_unavailable")

    asyncio.run(scenario())


def test_a_record_that_cannot_be_written_is_servfail() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test", "known.test") as ground:
            assert await ground.outcome("known.test") == str(FIRST)
            ground.book.commit_error = AuditUnavailable("disk full")
            assert await ground.outcome("api.allowed.test") == "SERVFAIL"
            ground.book.put_error = RuntimeError("channel gone")
            assert await ground.outcome("known.test") == "SERVFAIL"
            assert await ground.outcome("evil.test") == "SERVFAIL"
            ground.book.put_error = ground.book.commit_error = None
            assert await ground.outcome("api.allowed.test") == str(FIRST + 1)

    asyncio.run(scenario())


def test_an_exception_while_judging_is_servfail_with_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            with monkeypatch.context() as patched:
                patched.setattr(server_module, "decide", explode)
                assert await ground.outcome("api.allowed.test") == "SERVFAIL"
                assert ground.book.told() == [("deny", "internal_error")]
                assert ground.book.records[0].detail == "ZeroDivisionError"
            assert await ground.outcome("api.allowed.test") == str(FIRST)

    asyncio.run(scenario())


# limits


def test_dns_31_over_the_budget_is_refused_and_folded_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        settings = Settings(dns_queries_per_minute=3)
        async with serving("api.allowed.test", settings=settings) as ground:
            seen = [await ground.outcome(f"{number}.evil.test") for number in range(9)]
            assert seen == [EXPLAIN] * 3 + ["REFUSED"] * 6
            assert ground.book.told()[3:] == [("deny", "dns_budget")]
            assert ground.book.records[3].host == "3.evil.test"
        assert ground.book.records[-1].count == 5
        assert ground.book.total() == 9

    asyncio.run(scenario())


def test_folded_counts_are_written_when_their_window_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.dns.ledger.WINDOW", 0.05)

    async def scenario() -> None:
        async with serving(settings=Settings(dns_queries_per_minute=1)) as ground:
            for number in range(4):
                await ground.outcome(f"{number}.evil.test")
            await until(lambda: ground.book.total() == 4)

    asyncio.run(scenario())


def test_names_past_the_cap_are_dns_budget_and_known_ones_stay() -> None:
    async def scenario() -> None:
        async with serving("*.wild.test", settings=Settings(dns_names=1)) as ground:
            assert await ground.outcome("a.wild.test") == str(FIRST)
            assert await ground.outcome("b.wild.test") == "NXDOMAIN"
            assert ground.book.told()[-1] == ("deny", "dns_budget")
            assert await ground.outcome("a.wild.test") == str(FIRST)

    asyncio.run(scenario())


def test_too_many_queries_waiting_for_control_are_servfail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WAITING", 2)

    async def scenario() -> None:
        release = asyncio.Event()

        async def slow(_name: Name, _address: IPv4Address) -> None:
            await release.wait()

        async with serving("*.wild.test", store=slow) as ground:
            with ground.client() as sock:
                for ident in range(5):
                    sock.send(query(f"{ident}.wild.test", ident=ident))
                early = [dns.message.from_wire(await receive(sock)) for _ in range(3)]
                assert {(reply.id, reply.rcode()) for reply in early} == {(2, 2), (3, 2), (4, 2)}
                release.set()
                late = [dns.message.from_wire(await receive(sock)) for _ in range(2)]
                assert {(reply.id, reply.rcode()) for reply in late} == {(0, 0), (1, 0)}
            assert await ground.outcome("5.wild.test") == str(FIRST + 2)
        assert ground.book.total() == 6

    asyncio.run(scenario())


def test_what_the_kernel_dropped_unread_is_one_lost_record() -> None:
    sent = 2_000

    async def scenario() -> None:
        async with serving(settings=Settings(dns_queries_per_minute=10)) as ground:
            with ground.client() as sock:
                for _ in range(sent):  # without a turn for the server: its buffer must overflow
                    sock.send(query("evil.test"))
            handled = -1
            while handled != ground.book.total():
                handled = ground.book.total()
                await asyncio.sleep(0.05)
        lost = [record for record in ground.book.records if record.event == "lost"]
        assert len(lost) == 1
        assert ground.book.total() == sent

    asyncio.run(scenario())


# hostile messages


def test_dns_18_random_datagrams_each_have_a_record_and_the_next_query_is_served() -> None:
    async def scenario() -> None:
        rng = random.Random(18)
        async with serving("api.allowed.test") as ground:
            with ground.client() as sock:
                for number in range(300):
                    sock.send(rng.randbytes(rng.randrange(100)))
                    if number % 50 == 0:
                        await asyncio.sleep(0)
                await until(lambda: ground.book.total() == 300)
            assert await ground.outcome("api.allowed.test") == str(FIRST)
            assert all(record.verdict == "deny" for record in ground.book.records[:300])

    asyncio.run(scenario())


def test_dns_13_an_answer_sent_to_us_is_recorded_and_not_answered() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            with ground.client() as sock:
                sock.send(dns.message.make_response(dns.message.make_query("a.test", "A")).to_wire())
                sock.send(query("api.allowed.test", ident=77))
                assert dns.message.from_wire(await receive(sock)).id == 77
            assert ground.book.told() == [("deny", "bad_dns"), ("allow", "rule")]

    asyncio.run(scenario())


def test_a_client_that_is_gone_when_the_reply_comes_harms_nobody() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            for _ in range(5):
                with ground.client() as sock:
                    sock.send(query("evil.test"))
            await until(lambda: len(ground.book.records) == 5)
            assert await ground.outcome("api.allowed.test") == str(FIRST)

    asyncio.run(scenario())


class Unsendable(socket.socket):
    """A UDP socket whose sends and first receive fail as after an ICMP error."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failed = False

    def recvmsg(self, *args: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        return super().recvmsg(*args)

    def sendto(self, *_: Any) -> int:
        raise PermissionError(errno.EPERM, "a filter said no")


def test_errors_of_the_socket_are_counted_and_not_fatal() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            bad = Unsendable(socket.AF_INET, socket.SOCK_DGRAM)
            bad.bind(("127.0.0.1", 0))
            ground.server.serve_udp(bad)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(query("evil.test"), bad.getsockname())
                await until(lambda: ground.server.failures == 2)
            assert await ground.outcome("api.allowed.test") == str(FIRST)

    asyncio.run(scenario())


# TCP


def test_dns_20_pipelined_queries_are_each_judged_and_recorded() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground, ground.tcp() as (reader, writer):
            writer.write(
                framed(
                    query("api.allowed.test", ident=1),
                    query("evil.test", ident=2),
                    query("api.allowed.test", "AAAA", ident=3),
                )
            )
            replies = [await unframed(reader) for _ in range(3)]
            seen = {reply.id: str(reply.answer[0][0]) if reply.answer else "" for reply in replies}
            assert seen == {1: str(FIRST), 2: EXPLAIN, 3: ""}
            assert ground.book.told() == [("allow", "rule"), ("deny", "not_allowed"), ("allow", "rule")]
            assert {record.channel for record in ground.book.records} == {"dns-tcp"}
            assert [record.further for record in ground.book.records] == [None, True, True]

    asyncio.run(scenario())


def firsts(ground: Ground) -> int:
    """How many TCP connections left a record: the count that the kernel's is held against."""
    return sum(
        record.count or 1
        for record in ground.book.records
        if record.channel == "dns-tcp" and not record.further
    )


def test_each_connection_has_one_record_that_is_no_further_one_floods_included() -> None:
    async def scenario() -> None:
        async with serving(settings=Settings(dns_queries_per_minute=2)) as ground:
            for _ in range(4):
                async with ground.tcp() as (reader, writer):
                    writer.write(framed(*[query("evil.test")] * 3))
                    for _ in range(3):
                        await unframed(reader)
            await ground.server.close()
            assert ground.book.total() == 12
            assert firsts(ground) == 4

    asyncio.run(scenario())


def test_a_query_may_come_byte_by_byte() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground, ground.tcp() as (reader, writer):
            for byte in framed(query("api.allowed.test")):
                writer.write(bytes([byte]))
                await writer.drain()
            assert str((await unframed(reader)).answer[0][0]) == str(FIRST)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sent", "detail"),
    [
        (b"\xff\xff\0", "a message length that no query has"),
        (b"\0\0", "a message length that no query has"),
        (b"\0\x40\0\1", "no whole message in time"),
        (b"", "a connection without a query"),
        (b"\0", "a connection without a query"),
    ],
    ids=["DNS-19 a length that lies", "a length of 0", "half a message", "nothing", "half a length"],
)
def test_dns_19_a_connection_that_does_not_come_to_a_query_is_closed_and_recorded(
    sent: bytes, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "IDLE", 0.1)

    async def scenario() -> None:
        async with serving("api.allowed.test") as ground, ground.tcp() as (reader, writer):
            writer.write(sent)
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            assert [(record.reason, record.detail) for record in ground.book.records] == [("bad_dns", detail)]
            assert await ground.outcome("api.allowed.test") == str(FIRST)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", [b"", b"\0\x40\0\1"], ids=["clean", "in a message"])
def test_a_client_may_close_after_its_queries(end: bytes) -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground, ground.tcp() as (reader, writer):
            writer.write(framed(query("api.allowed.test")) + end)
            writer.write_eof()
            await unframed(reader)
            assert await reader.read() == b""
            assert ground.book.told()[1:] == ([("deny", "bad_dns")] if end else [])

    asyncio.run(scenario())


RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


def test_a_connection_reset_without_a_query_is_recorded() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            with socket.create_connection(("127.0.0.1", ground.tcp_port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            await until(lambda: len(ground.book.records) == 1)
            assert ground.book.records[0].detail == "a connection without a query"

    asyncio.run(scenario())


def test_a_connection_reset_in_a_message_is_recorded() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            async with ground.tcp() as (reader, writer):
                writer.write(framed(query("evil.test")) + b"\0\x40\0\1")
                await unframed(reader)  # so the server has read all of it
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            await until(lambda: len(ground.book.records) == 2)
            assert ground.book.records[1].detail == "cut off in a message"

    asyncio.run(scenario())


def test_dns_19_connections_over_the_cap_are_closed_at_once_and_udp_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS", 2)

    async def scenario() -> None:
        async with serving("api.allowed.test") as ground:
            async with ground.tcp(), ground.tcp():
                for _ in range(3):
                    async with ground.tcp() as (reader, _writer), asyncio.timeout(2):
                        assert await reader.read() == b""
                assert await ground.outcome("api.allowed.test") == str(FIRST)
                assert ground.book.told()[0] == ("deny", "too_many_connections")
            async with asyncio.timeout(5):
                while True:  # places come back
                    async with ground.tcp() as (reader, writer):
                        writer.write(framed(query("api.allowed.test")))
                        if await reader.read(2):
                            break

    asyncio.run(scenario())


class Narrow(socket.socket):
    """A listener whose connections hold little that is unread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_a_client_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE", 0.2)

    async def scenario() -> None:
        async with serving(settings=Settings(dns_queries_per_minute=9), tcp=Narrow) as ground:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                sock.connect(("127.0.0.1", ground.tcp_port))
                sock.setblocking(False)
                one = framed(query("evil.test"))
                async with asyncio.timeout(20):
                    while True:
                        try:
                            sock.send(one * 200)
                        except BlockingIOError:
                            await asyncio.sleep(0.01)
                        except OSError:  # reset: the server gave up on us
                            break
            await until(lambda: ground.server.failures == 1)
            assert await ground.outcome("api.allowed.test") == "REFUSED", (
                "it still answers, within the budget"
            )

    asyncio.run(scenario())


class NoDescriptors(socket.socket):
    """A listener that has no descriptor left, once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failed = False

    def accept(self) -> Any:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_out_of_descriptors_accepting_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_PAUSE", 0.05)

    async def scenario() -> None:
        async with serving("api.allowed.test", tcp=NoDescriptors) as ground, ground.tcp() as (reader, writer):
            writer.write(framed(query("api.allowed.test")))
            assert (await unframed(reader)).rcode() == 0
            assert ground.server.failures == 1

    asyncio.run(scenario())


def test_dos_10_closing_gives_every_descriptor_back() -> None:
    async def scenario() -> None:
        async def hang(_name: Name, _address: IPv4Address) -> None:
            await asyncio.Event().wait()

        async with serving("api.allowed.test", store=hang) as ground:
            with ground.client() as sock:
                async with ground.tcp() as (_reader, writer), ground.tcp():
                    writer.write(framed(query("api.allowed.test")))
                    sock.send(query("api.allowed.test"))
                    await until(lambda: len(ground.stored) > 0)
                    await ground.server.close()
                    await ground.server.close()

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        asyncio.run(scenario())
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_under_way_at_the_end_is_recorded() -> None:
    """Queries that wait for control, datagrams not read yet, connections that said nothing or were not accepted yet."""

    async def scenario() -> None:
        async def hang(_name: Name, _address: IPv4Address) -> None:
            await asyncio.Event().wait()

        async with serving("api.allowed.test", store=hang) as ground:
            with ground.client() as sock:
                async with ground.tcp() as (_reader, writer), ground.tcp():
                    writer.write(framed(query("api.allowed.test")))
                    sock.send(query("api.allowed.test"))
                    await until(lambda: len(ground.stored) > 0 and ground.server._waiting == 2)
                    with socket.create_connection(("127.0.0.1", ground.tcp_port)):
                        for _ in range(100):
                            sock.send(query("evil.test"))
                        sock.send(query("api.allowed.test"))
                        await ground.server.close()
            told = Counter((record.channel, record.reason, record.further) for record in ground.book.records)
            assert told == {
                ("dns-udp", "shutdown", None): 2,
                ("dns-udp", "not_allowed", None): 100,
                ("dns-tcp", "shutdown", None): 1,
                ("dns-tcp", "bad_dns", None): 2,
            }
            assert firsts(ground) == 3

    asyncio.run(scenario())


# a client that we did not write

DIG = [
    ("an allowed name", ["api.allowed.test"], ["status: NOERROR", "flags: qr rd ra;", f"60\tIN\tA\t{FIRST}"]),
    ("over TCP", ["+tcp", "api.allowed.test"], [f"60\tIN\tA\t{FIRST}"]),
    ("without EDNS", ["+noedns", "api.allowed.test"], [f"60\tIN\tA\t{FIRST}"]),
    ("several EDNS options", ["+subnet=10.0.0.0/8", "+padding=128", "api.allowed.test"], [f"A\t{FIRST}"]),
    ("a denied name", ["evil.test"], [f"1\tIN\tA\t{EXPLAIN}", "EDE: 4", "egressd not_allowed"]),
    ("a reverse look-up", ["-x", "1.2.3.4"], ["status: NXDOMAIN", "EDE: 15"]),
    ("TXT", ["api.allowed.test", "TXT"], ["status: NOERROR", "ANSWER: 0"]),
    ("ANY", ["+notcp", "api.allowed.test", "ANY"], ["status: NOTIMP"]),
    ("AXFR", ["api.allowed.test", "AXFR"], ["Transfer failed"]),
    ("version.bind", ["version.bind", "CH", "TXT"], ["status: REFUSED"]),
    ("EDNS version 1", ["+edns=1", "+noednsnegotiation", "api.allowed.test"], ["status: BADVERS"]),
    ("opcode UPDATE", ["+opcode=UPDATE", "api.allowed.test"], ["status: NOTIMP"]),
    ("a cookie is no quarrel", ["+cookie", "api.allowed.test"], [f"A\t{FIRST}"]),
]


@pytest.mark.parametrize(("arguments", "seen"), [row[1:] for row in DIG], ids=[row[0] for row in DIG])
def test_dig_sees(arguments: list[str], seen: list[str]) -> None:
    async def scenario() -> None:
        names = SyntheticNames()
        names.restore([(("api", "allowed", "test"), FIRST)])
        async with serving("api.allowed.test", names=names) as ground:
            port = ground.tcp_port if "+tcp" in arguments or "AXFR" in arguments else ground.udp_port
            command = ["dig", "@127.0.0.1", "-p", str(port), "+tries=1", "+time=5", *arguments]
            result = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=30
            )
            for text in seen:
                assert text in result.stdout
            assert "MALFORMED" not in result.stdout
            assert len(ground.book.records) == 1

    asyncio.run(scenario())


# `dns.answers: self`


@pytest.mark.parametrize(
    ("bound", "asked", "own", "leads_to"),
    [
        pytest.param("127.0.0.5", "127.0.0.5", (), "127.0.0.5", id="bound to one address"),
        pytest.param("0.0.0.0", "127.0.0.6", (), "127.0.0.6", id="bound to all: where the query was sent to"),
        pytest.param("0.0.0.0", "127.0.0.6", (IPv4Address("192.0.2.7"),), "192.0.2.7", id="where ports are mapped"),
        pytest.param("::1", "::1", (), "::1", id="IPv6"),
        pytest.param("::", "::1", (), "::1", id="IPv6, bound to all"),
    ],
)  # fmt: skip
def test_every_name_leads_to_us_and_the_reply_comes_from_where_it_was_asked(
    bound: str, asked: str, own: tuple[IPv4Address, ...], leads_to: str
) -> None:
    family = socket.AF_INET6 if ":" in asked else socket.AF_INET
    qtype, other = ("AAAA", "A") if ":" in asked else ("A", "AAAA")

    async def scenario() -> None:
        async with serving("api.allowed.test", own=own) as ground:
            udp = socket.socket(family, socket.SOCK_DGRAM)
            if family == socket.AF_INET6:
                udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            udp.bind((bound, 0))
            ground.server.serve_udp(udp)
            with socket.socket(family, socket.SOCK_DGRAM) as client:
                client.setblocking(False)
                client.connect((asked, udp.getsockname()[1]))  # hears nobody else
                told = {}
                for name, kind in (
                    ("api.allowed.test", qtype),
                    ("api.allowed.test", other),
                    ("evil.test", qtype),
                ):
                    client.send(query(name, kind))
                    reply = dns.message.from_wire(await receive(client))
                    told[name, kind] = [(str(rr[0]), rr.ttl) for rr in reply.answer], reply.rcode()
            assert told == {
                ("api.allowed.test", qtype): ([(leads_to, 60)], 0),
                ("api.allowed.test", other): ([], 0),
                ("evil.test", qtype): ([(leads_to, 1)], 0),
            }
            assert ground.stored == []
            root = ground.sandbox.names.root_of(("api", "allowed", "test"))
            assert root in {record.attempt_id for record in ground.book.records}

    asyncio.run(scenario())


def test_over_tcp_every_name_leads_to_us_too() -> None:
    async def scenario() -> None:
        async with serving("api.allowed.test", own=()) as ground, ground.tcp() as (reader, writer):
            writer.write(framed(query("api.allowed.test")))
            reply = await unframed(reader)
            assert str(reply.answer[0][0]) == "127.0.0.1"

    asyncio.run(scenario())


def test_what_is_remembered_of_names_is_bounded() -> None:
    names = SyntheticNames(3)
    for count in range(9):
        names.note((f"n{count}", "test"), f"root{count}")
    assert [names.root_of((f"n{count}", "test")) for count in (0, 5, 6, 8)] == [None, None, "root6", "root8"]


# names under a wildcard


def test_names_that_nobody_wrote_down_are_limited_and_floods_are_folded() -> None:
    async def scenario() -> None:
        async with serving("*.allowed.test", "exact.test") as ground:
            entries = tuple(
                entry.model_copy(update={"limits": EntryLimits(names=Rate(amount=2, seconds=3600))})
                for entry in ground.sandbox.policy.effective.entries
            )
            rules = ground.sandbox.policy.effective.model_copy(update={"entries": entries})
            ground.sandbox.policy = compile_policy(rules)
            for name in ("a", "b", "a"):
                assert (await ground.outcome(f"{name}.allowed.test")).startswith("198.18.1.")
            assert [await ground.outcome(f"{name}.allowed.test") for name in "cde"] == ["REFUSED"] * 3
            assert (await ground.outcome("exact.test")).startswith("198.18.1.")
            over = [r for r in ground.book.records if r.reason == "dns_budget"]
            assert [(r.host, r.detail) for r in over] == [("c.allowed.test", "names of rule allowed.test")]
            assert len(ground.stored) == 3

    asyncio.run(scenario())


# a successor


def test_who_leaves_answers_what_was_asked_and_reads_nothing_more() -> None:
    async def scenario() -> None:
        async with serving("*.allowed.test") as ground:
            asked = asyncio.create_task(ground.outcome("a.allowed.test"))
            await asyncio.sleep(0.01)
            await ground.server.leave()
            assert await asked == str(FIRST)
            before = len(ground.book.records)
            with ground.client() as sock:
                sock.send(query("b.allowed.test"))
                await asyncio.sleep(0.05)
            assert len(ground.book.records) == before  # it waits in the socket, for whoever comes next
            assert [name for name, _ in ground.stored] == [("a", "allowed", "test")]

    asyncio.run(scenario())


def test_who_has_left_gives_no_name_an_address() -> None:
    async def scenario() -> None:
        async with serving("*.allowed.test") as ground:
            assert await ground.outcome("a.allowed.test") == str(FIRST)
            reader, writer = await asyncio.open_connection("127.0.0.1", ground.tcp_port)
            for name in ("a.allowed.test", "b.allowed.test"):
                message = query(name)
                writer.write(len(message).to_bytes(2) + message)
                reply = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
                if name == "a.allowed.test":
                    await ground.server.leave()
            assert dns.rcode.to_text(dns.message.from_wire(reply).rcode()) == "SERVFAIL"
            assert len(ground.stored) == 1
            assert ground.book.records[-1].reason == "shutdown"
            writer.close()

    asyncio.run(scenario())
