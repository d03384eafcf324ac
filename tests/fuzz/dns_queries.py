"""DNS queries and their judgement, beside dnslib and dnspython."""

from __future__ import annotations

import contextlib
from ipaddress import IPv4Address

import dns.exception
import dns.message
import dnslib

from egressd.gate.dns import message as wire
from egressd.gate.dns.gatekeeper import EXPLAIN, Plan, plan
from egressd.gate.dns.message import Malformed, Query
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.policy.attempt import Decision, Name
from egressd.policy.reasons import Reason
from tests.fuzz.target import JUNK, Target, offsets_of

ALLOWED: Name = ("www", "example", "com")
_ADDRESS = IPv4Address("198.18.1.0")
_NAMES = SyntheticNames(1)
_NAMES.restore([(ALLOWED, _ADDRESS)])


def _judge(name: Name) -> Decision:
    allowed = name == ALLOWED or name[-2:] == ("internal", "test")
    return Decision("allow", Reason.RULE) if allowed else Decision("deny", Reason.NOT_ALLOWED)


def check(data: bytes) -> None:
    """Hold every law of queries."""
    query = wire.read(data)
    if isinstance(query, Query):
        for at in offsets_of(data):
            assert isinstance(wire.read(data[:at]), Malformed), "a query that is not all there"
        for junk in JUNK:
            assert isinstance(wire.read(data + junk), Malformed), "a query with something behind it"
        _agree(data, query)
    else:
        assert query.reply is None or len(query.reply) == 12
    short = wire.brief(data, wire.SERVFAIL)
    assert short is None or len(short) <= max(12, len(data)), "an error is larger than what asked for it"
    for mode in ("explain", "nxdomain"):
        _check_plan(data, query, plan(data, _judge, _NAMES, mode))


def _agree(data: bytes, query: Query) -> None:
    """Both libraries see our question, or none."""
    theirs: dnslib.DNSRecord | None = None
    with contextlib.suppress(Exception):  # what it raises is no closed set
        theirs = dnslib.DNSRecord.parse(data)
    if theirs is not None:
        (question,) = theirs.questions
        assert tuple(question.qname.label) == query.labels, "dnslib reads another name"
        assert (question.qtype, question.qclass) == (query.qtype, query.qclass)
    message: dns.message.Message | None = None
    with contextlib.suppress(dns.exception.DNSException, ValueError):
        message = dns.message.from_wire(data)
    if message is not None:
        (asked,) = message.question
        assert asked.name.labels == (*query.labels, b""), "dnspython reads another name"
        assert (asked.rdtype, asked.rdclass) == (query.qtype, query.qclass)
        assert message.id == query.id


def _check_plan(data: bytes, query: Query | Malformed, made: Plan) -> None:
    reply = made.pack(udp=True)
    if len(data) < 12 or data[2] & 0x80:
        assert (made.kind, reply) == ("drop", None), "a response is answered"
    if reply is None:
        assert made.kind in ("drop", "reserve")
        return
    assert made.kind == "answer"
    assert reply[:2] == data[:2]
    assert reply[2] & 0x80
    if not isinstance(query, Query):
        assert not made.decision.allowed
        return
    assert len(reply) <= query.udp_limit
    assert len(made.pack(udp=False) or b"") <= 0xFFFF
    assert reply[12 : 12 + len(query.question)] == query.question
    _check_answer(query, made, reply)


def _check_answer(query: Query, made: Plan, reply: bytes) -> None:
    answer = made.answer
    assert answer is not None
    if made.decision.allowed:
        assert made.name == tuple(label.decode("ascii").lower() for label in query.labels)
        assert _judge(made.name).allowed
        assert query.qclass == wire.IN
        assert query.qtype in (wire.A, wire.AAAA)
    else:
        assert answer.address in (None, EXPLAIN), "a denied name has an address"
    read = dns.message.from_wire(reply)
    assert read.rcode() == answer.rcode or read.flags & 0x0200
    found = [str(rdata) for rrset in read.answer for rdata in rrset]
    assert found == [str(answer.address)] if answer.address else not found


def query_of(name: str, kind: int = 1, *, edns: bool = False) -> bytes:
    """Return a query with a fixed id."""
    record = dnslib.DNSRecord(dnslib.DNSHeader(id=0x1234, rd=1), q=dnslib.DNSQuestion(name, kind))
    if edns:
        record.add_ar(dnslib.EDNS0(udp_len=1232, opts=[dnslib.EDNSOption(10, b"cookie00")]))
    return bytes(record.pack())


TARGET = Target(
    "dns_queries",
    check,
    lambda data: plan(data, _judge, _NAMES, "explain"),
    seeds=(
        query_of("www.example.com"),
        query_of("WWW.example.COM", edns=True),
        query_of("evil.test", 16),
        query_of("a.internal.test", 28),
        query_of("localhost"),
        query_of("www.example.com").replace(b"\x03www\x07example", b"\x0bwww.example"),
        query_of("1.0.0.127.in-addr.arpa", 12, edns=True),
        query_of("xn--mnchen-3ya.de", 65),
        query_of("metadata.google.internal"),
        query_of("egressd.internal"),
        query_of(".".join(["a" * 60] * 4)),
        query_of("."),
        query_of("www.example.com", 252),
        query_of("www.example.com", 255),
    ),
    words=(
        b"\x03www\x07example\x03com\0",
        b"\xc0\x0c",
        b"\xc0\0",
        b"\0\0\x29",
        b"\0\x01\0\x01",
        b"\0\x1c",
        b"\0\xff",
        b"\x3f",
        b"\x40",
        b"\x03a.b",
        b"\0\0\x29\x04\xd0\0\0\x80\0\0\0",
        b"\0\x0f\0\x02\0\x04",
        b"\0\x01\0\0\0\0\0\0",
    ),
    most=600,
)
