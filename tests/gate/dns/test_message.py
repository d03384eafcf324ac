"""Wire form: our reader and writer against dnslib and dnspython as independent readers, and against hostile bytes."""

from __future__ import annotations

import random
import struct
import time
from ipaddress import IPv4Address

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import pytest
from dnslib import DNSRecord
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.dns import message as wire
from egressd.gate.dns.message import Answer, Malformed, Query
from egressd.policy.reasons import Reason

HEADER = struct.Struct("!HHHHHH")
NAME = b"\x03aPi\x07aLLowed\x04tEsT\x00"
OPT = b"\x00" + struct.pack("!HHIH", 41, 1232, 0, 0)


def ask(
    name: bytes = NAME,
    qtype: int = 1,
    qclass: int = 1,
    flags: int = 0x0100,
    counts: tuple[int, int, int, int] = (1, 0, 0, 0),
    tail: bytes = b"",
) -> bytes:
    return HEADER.pack(0xBEEF, flags, *counts) + name + struct.pack("!HH", qtype, qclass) + tail


def opt(payload: int = 1232, version: int = 0, flags: int = 0, options: bytes = b"") -> bytes:
    return b"\x00" + struct.pack("!HHBBHH", 41, payload, 0, version, flags, len(options)) + options


def with_opt(record: bytes = OPT) -> bytes:
    return ask(counts=(1, 0, 0, 1), tail=record)


def query(message: bytes) -> Query:
    found = wire.read(message)
    assert isinstance(found, Query), found
    return found


def test_a_plain_question_is_read_as_sent() -> None:
    found = query(ask())
    assert found == Query(0xBEEF, 0x0100, NAME + b"\0\1\0\1", (b"aPi", b"aLLowed", b"tEsT"), 1, 1)
    assert found.udp_limit == 512


@pytest.mark.parametrize(
    ("payload", "limit"), [(0, 512), (511, 512), (512, 512), (1000, 1000), (1232, 1232), (65535, 1232)]
)
def test_the_clients_udp_size_holds_between_512_and_1232(payload: int, limit: int) -> None:
    assert query(with_opt(opt(payload))).udp_limit == limit


def test_dns_21_edns_options_are_read_over_and_kept_nowhere() -> None:
    subnet = struct.pack("!HH", 8, 8) + b"\0\1\x18\0\1\2\3\4"
    junk = struct.pack("!HH", 65001, 1024) + bytes(1024)
    found = query(with_opt(opt(options=subnet + junk)))
    assert found == query(with_opt())


def loop_to(offset: int) -> bytes:
    return struct.pack("!H", 0xC000 | offset)


LONG = b"".join(b"\x3c" + b"a" * 60 for _ in range(17)) + b"\x00"
MALFORMED = {
    "DNS-16 a pointer to itself": ask(name=loop_to(12)),
    "DNS-16 a pointer into the header": ask(name=loop_to(0)),
    "DNS-16 a pointer forward": ask(name=loop_to(20)),
    "DNS-16 a label and then a pointer to it": ask(name=b"\x01a" + loop_to(12)),
    "DNS-16 a chain of 1,000 pointers": HEADER.pack(1, 0x100, 1, 0, 0, 0)
    + b"".join(loop_to(12 + 2 * number) for number in range(1, 1001))
    + b"\x00\0\1\0\1",
    "DNS-17 a name of 17 labels of 60 bytes": ask(name=LONG),
    "a name one byte too long": ask(
        name=b"\x3f" + b"a" * 63 + (b"\x3f" + b"a" * 63) * 2 + b"\x3e" + b"a" * 62 + b"\0"
    ),
    "a label of the kind 0x40": ask(name=b"\x41a\x00"),
    "a label of the kind 0x80": ask(name=b"\x81a\x00"),
    "two questions": ask(counts=(2, 0, 0, 0), tail=NAME + b"\0\1\0\1"),
    "no question": HEADER.pack(1, 0x100, 0, 0, 0, 0),
    "a record in the answer section": ask(counts=(1, 1, 0, 0), tail=b"\0" + struct.pack("!HHIH", 1, 1, 0, 0)),
    "a record in the authority section": ask(
        counts=(1, 0, 1, 0), tail=b"\0" + struct.pack("!HHIH", 6, 1, 0, 0)
    ),
    "an additional record that is not OPT": ask(
        counts=(1, 0, 0, 1), tail=b"\0" + struct.pack("!HHIH", 1, 1, 0, 0)
    ),
    "DNS-21 two OPT records": ask(counts=(1, 0, 0, 2), tail=OPT + OPT),
    "an OPT record with a name": with_opt(b"\x01a" + OPT),
    "an OPT record whose name is a pointer": with_opt(loop_to(29) + OPT[1:]),
    "an OPT record announced and missing": ask(counts=(1, 0, 0, 1)),
    "an EDNS option longer than its record": with_opt(opt(options=struct.pack("!HH", 10, 9) + bytes(8))),
    "half an EDNS option": with_opt(opt(options=b"\0\x0a\0")),
    "an OPT record longer than the message": with_opt(OPT[:-1] + b"\x05"),
    "bytes behind the question": ask(tail=b"x"),
    "bytes behind the OPT record": with_opt(OPT + b"x"),
    "OPT asked for": ask(qtype=41),
    "a query that says it is truncated": ask(flags=0x0300),
    "a query with a result code": ask(flags=0x0103),
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_not_one_strict_question_gets_formerr(message: bytes) -> None:
    found = wire.read(message)
    assert isinstance(found, Malformed)
    assert found.reason is Reason.BAD_DNS
    assert found.reply is not None
    reply = DNSRecord.parse(found.reply)
    assert (reply.header.rcode, reply.header.qr, reply.header.id) == (
        1,
        1,
        struct.unpack("!H", message[:2])[0],
    )


@pytest.mark.parametrize("message", [b"", b"\0", bytes(11), ask(flags=0x8100), ask(flags=0x8183)])
def test_dns_13_answers_and_scraps_are_dropped_without_a_reply(message: bytes) -> None:
    found = wire.read(message)
    assert isinstance(found, Malformed)
    assert found.reply is None
    assert wire.brief(message, wire.SERVFAIL) is None


@pytest.mark.parametrize("opcode", [1, 2, 3, 4, 5, 6, 15])
def test_dns_13_other_opcodes_get_notimp(opcode: int) -> None:
    found = wire.read(ask(flags=opcode << 11))
    assert isinstance(found, Malformed)
    assert found.reason is Reason.DNS_OPCODE
    assert found.reply is not None
    reply = DNSRecord.parse(found.reply)
    assert (reply.header.rcode, reply.header.opcode) == (4, opcode)


def test_dns_18_no_proper_prefix_of_a_query_is_a_query() -> None:
    message = with_opt(opt(options=struct.pack("!HH", 10, 8) + bytes(8)))
    for length in range(len(message)):
        assert isinstance(wire.read(message[:length]), Malformed), length
    assert isinstance(wire.read(message), Query)


@given(st.binary(max_size=600))
def test_dns_18_any_bytes_have_an_outcome(message: bytes) -> None:
    found = wire.read(message)
    if isinstance(found, Query):
        assert message[12 : 12 + len(found.question)] == found.question
    brief = wire.brief(message, wire.SERVFAIL)
    assert brief is None or brief[:2] == message[:2]


@given(st.data())
def test_dns_18_a_mutated_query_has_an_outcome_and_what_is_read_can_be_answered(data: st.DataObject) -> None:
    message = bytearray(with_opt())
    for _ in range(data.draw(st.integers(0, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    found = wire.read(bytes(message))
    if isinstance(found, Query):
        reply = wire.pack(
            found, Answer(wire.NXDOMAIN, ttl=1, negative=True, error=(15, "x" * 200)), found.udp_limit
        )
        assert len(reply) <= found.udp_limit
        dns.message.from_wire(reply)


def test_dns_18_ten_thousand_random_datagrams_cost_little() -> None:
    rng = random.Random(18)
    messages = [rng.randbytes(rng.randrange(200)) for _ in range(10_000)]
    began = time.process_time()
    for message in messages:
        wire.read(message)
    assert time.process_time() - began < 5


def test_the_largest_message_is_read_in_linear_time() -> None:
    began = time.process_time()
    for byte in (0x00, 0x01, 0x3F, 0xC0):
        wire.read(HEADER.pack(1, 0, 1, 0, 0, 1) + bytes([byte]) * 65_000)
        wire.read(with_opt(opt(options=bytes(65_000))))
    assert time.process_time() - began < 1


# replies

LABELS = st.lists(st.binary(min_size=1, max_size=63), max_size=4)


@given(LABELS, st.integers(0, 65535), st.booleans(), st.booleans())
def test_a_reply_echoes_question_id_and_rd_whatever_the_name(
    labels: list[bytes], ident: int, edns: bool, recursion: bool
) -> None:
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    message = HEADER.pack(ident, 0x0100 if recursion else 0, 1, 0, 0, edns) + name + b"\0\1\0\1" + OPT * edns
    found = query(message)
    answer = Answer(wire.NXDOMAIN, ttl=1, negative=True, error=(wire.BLOCKED, "because"))
    packed = wire.pack(found, answer, found.udp_limit)
    assert packed[12 : 12 + len(name) + 4] == message[12 : 12 + len(name) + 4]
    reply = dns.message.from_wire(packed)
    assert reply.id == ident
    assert bool(reply.flags & dns.flags.RD) == recursion
    assert reply.flags & dns.flags.RA
    assert not reply.flags & dns.flags.AA
    assert reply.edns == (0 if edns else -1)


def test_an_address_answer_keeps_the_spelling_and_points_to_the_question() -> None:
    packed = wire.pack(query(ask()), Answer(address=IPv4Address("198.18.1.7"), ttl=60), 512)
    assert packed.endswith(b"\xc0\x0c\0\1\0\1" + struct.pack("!IH", 60, 4) + bytes([198, 18, 1, 7]))
    assert str(DNSRecord.parse(packed).rr[0].rname) == "aPi.aLLowed.tEsT."


def test_a_negative_answer_carries_an_soa_whose_ttl_bounds_it() -> None:
    reply = dns.message.from_wire(wire.pack(query(ask()), Answer(ttl=60, negative=True), 512))
    [rrset] = reply.authority
    assert (rrset.ttl, rrset[0].minimum) == (60, 60)


def test_the_extended_error_goes_only_to_clients_that_speak_edns() -> None:
    answer = Answer(wire.NXDOMAIN, error=(wire.BLOCKED, "egressd not_allowed: …"))
    plain = dns.message.from_wire(wire.pack(query(ask()), answer, 512))
    assert plain.edns == -1
    full = dns.message.from_wire(wire.pack(query(with_opt()), answer, 1232))
    [option] = full.options
    assert isinstance(option, dns.edns.EDEOption)
    assert (option.code, option.text) == (15, "egressd not_allowed: ?")


def test_badvers_spans_header_and_opt() -> None:
    reply = dns.message.from_wire(wire.pack(query(with_opt(opt(version=1))), Answer(wire.BADVERS), 1232))
    assert reply.rcode() == dns.rcode.BADVERS
    assert reply.edns == 0


@pytest.mark.parametrize("flag", [0, 0x8000])
def test_the_do_bit_is_copied(flag: int) -> None:
    reply = dns.message.from_wire(wire.pack(query(with_opt(opt(flags=flag))), Answer(), 1232))
    assert reply.ednsflags == flag


def test_dns_35_what_does_not_fit_is_left_out_and_tc_set() -> None:
    answer = Answer(address=IPv4Address("198.18.1.7"), ttl=60, error=(15, "x" * 100))
    packed = wire.pack(query(with_opt()), answer, 60)
    reply = dns.message.from_wire(packed)
    assert reply.flags & dns.flags.TC
    assert (len(reply.answer), len(reply.question), reply.edns) == (0, 1, 0)
    assert len(packed) <= 60


def test_the_largest_reply_fits_the_smallest_client() -> None:
    longest = (b"\x3f" + b"a" * 63) * 3 + b"\x3d" + b"a" * 61 + b"\0"
    found = query(ask(name=longest, counts=(1, 0, 0, 1), tail=opt(512)))
    for answer in (
        Answer(wire.NXDOMAIN, ttl=1, negative=True, error=(15, "x" * 500)),
        Answer(address=IPv4Address("198.18.1.7"), ttl=60, error=(4, "x" * 500)),
    ):
        packed = wire.pack(found, answer, 512)
        assert not dns.message.from_wire(packed).flags & dns.flags.TC


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ((), "."),
        ((b"aPi", b"Test"), "aPi.Test"),
        ((b"a.b", b"test"), r"a\.b.test"),
        ((b"a\\b",), r"a\\b"),
        ((b"\x1b[31m", b'a\nb"'), r'\027[31m.a\010b"'),
        ((b"\xff\xfe \x7f",), r"\255\254\032\127"),
    ],
)
def test_log_02_names_are_spelled_reversibly_and_in_ascii(labels: tuple[bytes, ...], text: str) -> None:
    assert wire.spell(labels) == text


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4))
def test_log_02_no_two_names_share_a_spelling(labels: list[bytes]) -> None:
    text = wire.spell(tuple(labels))
    assert text.isascii()
    assert text.isprintable()
    assert dns.name.from_text(text + ".").labels[:-1] == tuple(labels)


@pytest.mark.parametrize(
    ("qtype", "name"), [(1, "A"), (28, "AAAA"), (65, "HTTPS"), (255, "ANY"), (65400, "TYPE65400")]
)
def test_types_have_names(qtype: int, name: str) -> None:
    assert wire.type_name(qtype) == name
