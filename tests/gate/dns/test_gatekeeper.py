from __future__ import annotations

import struct
from collections.abc import Callable
from ipaddress import IPv4Address

import dns.edns
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate import internal
from egressd.gate.dns import gatekeeper
from egressd.gate.dns.gatekeeper import ALLOWED_TTL, Mode, Plan, plan
from egressd.gate.dns.synthetic import FIRST, SyntheticNames
from egressd.policy.attempt import Decision, DnsQuestion, Name
from egressd.policy.names import parse_name
from egressd.policy.reasons import Reason

ALLOWED = {("api", "allowed", "test"), ("other", "allowed", "test"), ("x", "wild", "test")}
KNOWN = ("api", "allowed", "test")
MODES: tuple[Mode, ...] = ("explain", "nxdomain")


def judge(name: Name) -> Decision:
    own = internal.judge(DnsQuestion(name))
    if own is not None:
        return own
    if name in ALLOWED:
        return Decision("allow", Reason.RULE)
    if name == ("stripe", "test"):
        return Decision("ask", Reason.APPROVAL_REQUIRED)
    return Decision("deny", Reason.NOT_ALLOWED)


def known_names() -> SyntheticNames:
    names = SyntheticNames()
    names.reserve(KNOWN)
    names.confirm(KNOWN)
    return names


def ask(name: str, qtype: str = "A", qclass: str = "IN", *, edns: int = 0) -> bytes:
    return dns.message.make_query(name, qtype, qclass, use_edns=edns, payload=1232, id=7).to_wire()


def judged(
    message: bytes, mode: Mode = "explain", names: SyntheticNames | None = None
) -> tuple[Plan, dns.message.Message]:
    result = plan(message, judge, names or known_names(), mode)
    packed = result.pack(udp=True)
    assert packed is not None
    return result, dns.message.from_wire(packed)


def outcome(reply: dns.message.Message) -> str:
    if reply.answer:
        [rrset] = reply.answer
        return f"{rrset[0].to_text()} ttl {rrset.ttl}"
    rcode = dns.rcode.to_text(reply.rcode())
    return "NODATA" if rcode == "NOERROR" else rcode


EXPLAINED = "198.18.0.2 ttl 1"
OWN = "198.18.0.3 ttl 60"
SYNTHETIC = f"{FIRST} ttl {ALLOWED_TTL}"

# id, name, type, verdict, reason, what the client sees: in explain mode, in nxdomain mode
ROWS = [
    (
        "AAAA of a name that needs an approval",
        "stripe.test",
        "AAAA",
        "ask",
        "approval_required",
        "NODATA",
        "NODATA",
    ),
    (
        "an allowed name leads to its synthetic address",
        "api.allowed.test",
        "A",
        "allow",
        "rule",
        SYNTHETIC,
        SYNTHETIC,
    ),
    (
        "NAME-01 one final dot changes nothing",
        "api.allowed.test.",
        "A",
        "allow",
        "rule",
        SYNTHETIC,
        SYNTHETIC,
    ),
    ("NAME-03 letter case changes nothing", "API.aLLowed.tEST", "A", "allow", "rule", SYNTHETIC, SYNTHETIC),
    ("CMP-24 an allowed name has no IPv6", "api.allowed.test", "AAAA", "allow", "rule", "NODATA", "NODATA"),
    ("DNS-06 TXT of an allowed name", "api.allowed.test", "TXT", "deny", "dns_type", "NODATA", "NODATA"),
    ("DNS-06 NULL of an allowed name", "api.allowed.test", "NULL", "deny", "dns_type", "NODATA", "NODATA"),
    ("DNS-06 MX of an allowed name", "api.allowed.test", "MX", "deny", "dns_type", "NODATA", "NODATA"),
    ("DNS-06 SRV of an allowed name", "api.allowed.test", "SRV", "deny", "dns_type", "NODATA", "NODATA"),
    ("DNS-06 CNAME of an allowed name", "api.allowed.test", "CNAME", "deny", "dns_type", "NODATA", "NODATA"),
    (
        "DNS-06 type 65400 of an allowed name",
        "api.allowed.test",
        "TYPE65400",
        "deny",
        "dns_type",
        "NODATA",
        "NODATA",
    ),
    ("DNS-06 ANY of an allowed name", "api.allowed.test", "ANY", "deny", "dns_type", "NOTIMP", "NOTIMP"),
    ("DNS-06 AXFR of an allowed name", "api.allowed.test", "AXFR", "deny", "dns_type", "REFUSED", "REFUSED"),
    ("DNS-06 IXFR of an allowed name", "api.allowed.test", "IXFR", "deny", "dns_type", "REFUSED", "REFUSED"),
    ("DNS-08 HTTPS of an allowed name", "api.allowed.test", "HTTPS", "deny", "dns_type", "NODATA", "NODATA"),
    ("DNS-08 SVCB of an allowed name", "api.allowed.test", "SVCB", "deny", "dns_type", "NODATA", "NODATA"),
    (
        "PTR of an allowed name is no reverse look-up",
        "api.allowed.test",
        "PTR",
        "deny",
        "dns_type",
        "NODATA",
        "NODATA",
    ),
    (
        "DNS-01 data in labels of a denied domain",
        "4a6f.evil.test",
        "A",
        "deny",
        "not_allowed",
        EXPLAINED,
        "NXDOMAIN",
    ),
    ("DNS-01 the same by TXT", "4a6f.evil.test", "TXT", "deny", "not_allowed", "NODATA", "NXDOMAIN"),
    ("CMP-24 AAAA of a denied name", "evil.test", "AAAA", "deny", "not_allowed", "NODATA", "NXDOMAIN"),
    ("DNS-08 HTTPS of a denied name", "evil.test", "HTTPS", "deny", "not_allowed", "NODATA", "NXDOMAIN"),
    ("DNS-06 ANY of a denied name", "evil.test", "ANY", "deny", "not_allowed", "NOTIMP", "NOTIMP"),
    ("PTR of a denied name", "evil.test", "PTR", "deny", "not_allowed", "NXDOMAIN", "NXDOMAIN"),
    (
        "DNS-04 a name below an allowed one",
        "x.api.allowed.test",
        "A",
        "deny",
        "not_allowed",
        EXPLAINED,
        "NXDOMAIN",
    ),
    ("DNS-07 a reverse name", "4.3.2.1.in-addr.arpa", "PTR", "deny", "floor_name", "NXDOMAIN", "NXDOMAIN"),
    (
        "DNS-07 data below in-addr.arpa",
        "data.in-addr.arpa",
        "A",
        "deny",
        "floor_name",
        "NXDOMAIN",
        "NXDOMAIN",
    ),
    ("DNS-07 data below ip6.arpa", "data.ip6.arpa", "TXT", "deny", "floor_name", "NXDOMAIN", "NXDOMAIN"),
    ("DNS-15 a single label", "test", "A", "deny", "floor_name", "NXDOMAIN", "NXDOMAIN"),
    ("DNS-15 the root", ".", "A", "deny", "bad_host", "NXDOMAIN", "NXDOMAIN"),
    (
        "DNS-33 an allowed name with a search list behind it",
        "api.allowed.test.corp.internal",
        "A",
        "deny",
        "not_allowed",
        EXPLAINED,
        "NXDOMAIN",
    ),
    (
        "META-05 the metadata name",
        "metadata.google.internal",
        "A",
        "deny",
        "floor_metadata",
        "NXDOMAIN",
        "NXDOMAIN",
    ),
    ("META-05 its short form", "metadata", "A", "deny", "floor_metadata", "NXDOMAIN", "NXDOMAIN"),
    ("NAME-26 localhost", "localhost", "A", "deny", "floor_name", "NXDOMAIN", "NXDOMAIN"),
    ("our own name", "egressd.internal", "A", "allow", "internal_page", OWN, OWN),
    ("our own name in capitals", "EGRESSD.Internal.", "A", "allow", "internal_page", OWN, OWN),
    ("our own name has no IPv6", "egressd.internal", "AAAA", "allow", "internal_page", "NODATA", "NODATA"),
    ("our own name has no text", "egressd.internal", "TXT", "deny", "dns_type", "NODATA", "NODATA"),
    ("our own name has no HTTPS", "egressd.internal", "HTTPS", "deny", "dns_type", "NODATA", "NODATA"),
    ("a name below our own", "x.egressd.internal", "A", "deny", "floor_name", "NXDOMAIN", "NXDOMAIN"),
    ("NAME-27 a name that ends in a number", "foo.0x4", "A", "deny", "bad_host", "NXDOMAIN", "NXDOMAIN"),
    ("NAME-27 an address as a name", "1.2.3.4", "A", "deny", "bad_host", "NXDOMAIN", "NXDOMAIN"),
    ("NAME-07 a NUL in a label", r"evil\000.allowed.test", "A", "deny", "bad_host", "NXDOMAIN", "NXDOMAIN"),
    (
        "a dot inside a label is no border of labels",
        r"api\.allowed.test",
        "A",
        "deny",
        "bad_host",
        "NXDOMAIN",
        "NXDOMAIN",
    ),
    (
        "DNS-18 bytes outside ASCII",
        r"\255\254.allowed.test",
        "A",
        "deny",
        "non_ascii_host",
        "NXDOMAIN",
        "NXDOMAIN",
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "qtype", "verdict", "reason", "explain", "nxdomain"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_each_question_has_its_outcome(
    name: str, qtype: str, verdict: str, reason: str, explain: str, nxdomain: str, mode: Mode
) -> None:
    result, reply = judged(ask(name, qtype, edns=0), mode)
    assert (result.decision.verdict, result.decision.reason.value) == (verdict, reason)
    assert outcome(reply) == (explain if mode == "explain" else nxdomain)
    assert result.qtype == qtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("qclass", ["CH", "HS", "ANY", "NONE"])
def test_dns_23_other_classes_are_refused(qclass: str, mode: Mode) -> None:
    result, reply = judged(ask("api.allowed.test", "TXT", qclass), mode)
    assert outcome(reply) == "REFUSED"
    assert result.decision.reason is Reason.DNS_CLASS


def test_dns_21_edns_version_1_is_badvers() -> None:
    result, reply = judged(ask("api.allowed.test", edns=1))
    assert outcome(reply) == "BADVERS"
    assert result.decision.reason is Reason.BAD_DNS


def test_dns_34_nxdomain_says_by_which_reason_to_clients_with_edns() -> None:
    _, reply = judged(ask("evil.test"), "nxdomain")
    [option] = reply.options
    assert isinstance(option, dns.edns.EDEOption)
    assert option.code == dns.edns.EDECode.BLOCKED
    assert option.text == "egressd not_allowed: no rule of this sandbox allows this destination"


def test_an_explaining_answer_says_that_it_is_forged() -> None:
    _, reply = judged(ask("evil.test"))
    [option] = reply.options
    assert isinstance(option, dns.edns.EDEOption)
    assert option.code == dns.edns.EDECode.FORGED_ANSWER


@pytest.mark.parametrize("edns", [-1, 0])
def test_an_opt_record_is_answered_only_where_one_was_sent(edns: int) -> None:
    _, reply = judged(ask("evil.test", edns=edns), "nxdomain")
    assert reply.edns == edns


def test_dns_05_the_clients_spelling_is_echoed_and_recorded_but_not_judged() -> None:
    result, reply = judged(ask("aPi.AlLoWeD.tEsT"))
    assert reply.question[0].name.to_text() == "aPi.AlLoWeD.tEsT."
    assert reply.answer[0].name.to_text() == "aPi.AlLoWeD.tEsT."
    assert (result.name, result.host_raw) == (KNOWN, "aPi.AlLoWeD.tEsT")


def test_a_normal_spelling_is_not_recorded_twice() -> None:
    result, _ = judged(ask("api.allowed.test"))
    assert result.host_raw is None


def test_log_02_bad_label_bytes_are_recorded_escaped() -> None:
    result, _ = judged(ask(r"\027[31m.a\010b"))
    assert (result.name, result.host_raw) == (None, r"\027[31m.a\010b")


def test_a_name_without_an_address_waits_for_one() -> None:
    result = plan(ask("other.allowed.test"), judge, known_names(), "explain")
    assert (result.kind, result.name) == ("reserve", ("other", "allowed", "test"))
    assert result.pack(udp=True) is None, "nothing can be sent before the pair is stored"
    packed = result.with_address(FIRST + 1).pack(udp=True)
    assert packed is not None
    assert outcome(dns.message.from_wire(packed)) == f"{FIRST + 1} ttl {ALLOWED_TTL}"


def test_planning_changes_no_state() -> None:
    names = known_names()
    for name in ("api.allowed.test", "other.allowed.test", "evil.test"):
        plan(ask(name), judge, names, "explain")
    assert list(names.pairs()) == [(KNOWN, FIRST)]
    assert len(names) == 1


def test_a_pending_pair_is_not_answered() -> None:
    names = SyntheticNames()
    names.reserve(KNOWN)
    assert plan(ask("api.allowed.test"), judge, names, "explain").kind == "reserve"


@pytest.mark.parametrize("name", ["localhost", "metadata.google.internal", "x.in-addr.arpa", "intranet"])
def test_the_floor_holds_against_a_judge_that_allows_everything(name: str) -> None:
    result = plan(ask(name), lambda _: Decision("allow", Reason.RULE), SyntheticNames(), "explain")
    assert result.decision.verdict == "deny"
    assert result.answer is not None
    assert result.answer.rcode == dns.rcode.NXDOMAIN


def test_a_message_that_is_no_query_is_dropped_and_still_has_a_reason() -> None:
    result = plan(b"\0\1", judge, SyntheticNames(), "explain")
    assert (result.kind, result.decision.reason, result.pack(udp=True)) == ("drop", Reason.BAD_DNS, None)


def test_a_malformed_message_is_answered_formerr() -> None:
    result = plan(ask("a.test")[:-1], judge, SyntheticNames(), "explain")
    packed = result.pack(udp=True)
    assert packed is not None
    assert packed[3] & 0xF == 1
    assert result.decision.reason is Reason.BAD_DNS


def only_allows(allowed: Name) -> Callable[[Name], Decision]:
    return lambda name: (
        Decision("allow", Reason.RULE) if name == allowed else Decision("deny", Reason.NOT_ALLOWED)
    )


LABEL = st.one_of(
    st.sampled_from([b"api", b"API", b"allowed", b"test", b"a.b", b"api.allowed"]),
    st.binary(min_size=1, max_size=8),
)


@given(st.lists(LABEL, max_size=5), st.integers(0, 65535), st.sampled_from(MODES), st.booleans())
def test_no_name_but_the_allowed_one_ever_gets_an_address_of_its_own(
    labels: list[bytes], qtype: int, mode: Mode, edns: bool
) -> None:
    wire_name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    message = struct.pack("!HHHHHH", 1, 0x100, 1, 0, 0, edns) + wire_name + struct.pack("!HH", qtype, 1)
    message += b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0) if edns else b""
    result = plan(message, only_allows(KNOWN), known_names(), mode)
    if result.decision.allowed:
        assert not any(b"." in label for label in labels)
        assert parse_name(b".".join(labels)) == KNOWN
        assert qtype in (1, 28)
    packed = result.pack(udp=True)
    assert packed is not None
    reply = dns.message.from_wire(packed)
    addresses = {IPv4Address(rdata.address) for rrset in reply.answer for rdata in rrset}
    assert addresses <= ({FIRST} if result.decision.allowed else {gatekeeper.EXPLAIN})


OURS = IPv4Address("172.30.0.2")


@pytest.mark.parametrize(
    ("name", "qtype", "verdict", "explained", "nxdomain"),
    [
        pytest.param("other.allowed.test", "A", "allow", "172.30.0.2 ttl 60", "172.30.0.2 ttl 60", id="an allowed name"),
        pytest.param("api.allowed.test", "A", "allow", "172.30.0.2 ttl 60", "172.30.0.2 ttl 60", id="one with an address"),
        pytest.param("api.allowed.test", "AAAA", "allow", "NODATA", "NODATA", id="a family that we have no address of"),
        pytest.param("api.allowed.test", "HTTPS", "deny", "NODATA", "NODATA", id="DNS-08 HTTPS"),
        pytest.param("egressd.internal", "A", "allow", "172.30.0.2 ttl 60", "172.30.0.2 ttl 60", id="our own page"),
        pytest.param("evil.test", "A", "deny", "172.30.0.2 ttl 1", "NXDOMAIN", id="a denied name"),
        pytest.param("evil.test", "AAAA", "deny", "NODATA", "NXDOMAIN", id="a denied name, the other family"),
        pytest.param("stripe.test", "A", "ask", "172.30.0.2 ttl 60", "172.30.0.2 ttl 60", id="a name that asks"),
        pytest.param("metadata.google.internal", "A", "deny", "NXDOMAIN", "NXDOMAIN", id="META-05 metadata"),
        pytest.param("localhost", "A", "deny", "NXDOMAIN", "NXDOMAIN", id="a single label"),
    ],
)  # fmt: skip
def test_with_answers_self_every_name_leads_to_our_own_address(
    name: str, qtype: str, verdict: str, explained: str, nxdomain: str
) -> None:
    for mode, wanted in zip(MODES, (explained, nxdomain), strict=True):
        result = plan(ask(name, qtype), judge, known_names(), mode, (OURS,))
        packed = result.pack(udp=True)
        assert packed is not None
        assert (result.decision.verdict, outcome(dns.message.from_wire(packed))) == (verdict, wanted)
        assert result.kind == "answer"


@pytest.mark.parametrize("mode", ["explain", "nxdomain"])
def test_a_name_that_needs_an_approval_leads_where_it_can_be_asked_for(mode: Mode) -> None:
    found = plan(ask("stripe.test"), judge, known_names(), mode)
    assert (found.kind, found.decision.verdict, found.decision.reason) == (
        "reserve",
        "ask",
        "approval_required",
    )
