"""What an upstream answers: taken only as an answer to our question, followed only where its aliases lead; beside dnslib."""

from __future__ import annotations

from ipaddress import ip_address

import dns.message
import dns.name
import dns.rdatatype
import dnslib

from egressd.gate.dns.exchange import _checked, _head
from egressd.gate.dns.lines import ReplyError
from egressd.gate.dns.upstream import MAX_ADDRESSES, MAX_HOPS, _floor, _walk
from tests.fuzz.target import JUNK, Target, offsets_of

_NAME = dns.name.from_text("wWw.eXample.com")
_QUERIES = {
    kind: dns.message.make_query(_NAME, kind, use_edns=0, payload=1232, id=0x1234)
    for kind in (dns.rdatatype.A, dns.rdatatype.AAAA)
}


def check(data: bytes) -> None:
    """Hold every law of replies."""
    for kind, query in _QUERIES.items():
        _head(data, query)  # over UDP: what is no reply to us is not seen
        reply = _read(data, query)
        if reply is None:
            continue
        for at in offsets_of(data):
            assert _read(data[:at], query) is None, "a reply that is not all there"
        for junk in JUNK:
            assert _read(data + junk, query) is None, "a reply with something behind it"
        assert data[:2] == b"\x12\x34"
        assert data[2] & 0xFA == 0x80, "no response to a query, or a cut one"
        _check_walk(data, reply, kind)


def _read(data: bytes, query: dns.message.Message) -> dns.message.Message | None:
    try:
        return _checked(data, query)
    except ReplyError:
        return None


def _check_walk(data: bytes, reply: dns.message.Message, kind: dns.rdatatype.RdataType) -> None:
    chain = _walk(reply, _NAME, kind, MAX_HOPS)
    assert len(chain.addresses) <= MAX_ADDRESSES
    assert chain.hops <= MAX_HOPS
    assert chain.ttl >= 0
    _floor(chain.end)
    if not chain.addresses:
        return
    try:
        theirs = dnslib.DNSRecord.parse(data)
    except dnslib.DNSError:
        return
    reached = _reached(theirs)
    held = {
        ip_address(bytes(record.rdata.data))
        for record in theirs.rr
        if record.rtype == kind and record.rclass == 1 and _folded(record.rname) in reached
    }
    assert set(chain.addresses) <= held, "an address that no alias of the asked name leads to"


def _reached(record: dnslib.DNSRecord) -> set[tuple[bytes, ...]]:
    """Every owner that aliases lead to, in any order: more than may be followed, never less."""
    reached = {tuple(label.lower() for label in _NAME.labels[:-1])}
    for _ in range(MAX_HOPS):
        for rr in record.rr:
            if rr.rtype == 5 and _folded(rr.rname) in reached:
                reached.add(_folded(rr.rdata.label))
    return reached


def _folded(label: dnslib.DNSLabel) -> tuple[bytes, ...]:
    return tuple(part.lower() for part in label.label)


def _reply(*lines: str, kind: str = "A") -> bytes:
    record = dnslib.DNSRecord(
        dnslib.DNSHeader(id=0x1234, qr=1, rd=1, ra=1),
        q=dnslib.DNSQuestion("wWw.eXample.com", getattr(dnslib.QTYPE, kind)),
    )
    for line in lines:
        record.add_answer(*dnslib.RR.fromZone(line))
    return bytes(record.pack())


TARGET = Target(
    "dns_replies",
    check,
    lambda data: _read(data, _QUERIES[dns.rdatatype.A]),
    seeds=(
        _reply("www.example.com 60 A 93.184.216.34"),
        _reply(
            "www.example.com 60 CNAME a.example.net",
            "a.example.net 5 A 192.0.2.1",
            "other.example.net 5 A 192.0.2.2",
        ),
        _reply("www.example.com 60 CNAME b.example.net", "b.example.net 60 CNAME www.example.com"),
        _reply("www.example.com 60 AAAA 2001:db8::1", kind="AAAA"),
        _reply("evil.test 60 A 192.0.2.66"),
        _reply(),
        _reply(*[f"www.example.com 60 A 192.0.2.{n}" for n in range(20)]),
        _reply(
            "www.example.com 60 TXT hello",
            "www.example.com 60 HTTPS 1 . alpn=h2",
            "www.example.com 60 MX 1 mail.test",
        ),
    ),
    words=(
        b"\xc0\x0c",
        b"\xc0\xff",
        b"\0\x01\0\x01",
        b"\0\x05\0\x01",
        b"\0\x04",
        b"\0\x1c\0\x01",
        b"\x81\x80",
        b"\x83\x80",
        b"\x03wWw\x07eXample\x03com\0",
        b"\0\0\x29\x04\xd0\0\0\0\0\0\0",
        b"\0\x06",
        b"\xff\xff\xff\xff",
        b"\0\x41",
    ),
    most=900,
    quick=700,
)
