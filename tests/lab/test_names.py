"""The lab's DNS: each behaviour as it looks on the wire."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.lab import Lab
from egressd.lab.names import BEHAVIOURS, ZONE, Name, Zone, entry_from


def ask(
    zone: Zone, name: str, kind: str = "A", transport: str = "udp", payload: int = 1232
) -> dns.message.Message:
    query = dns.message.make_query(name, kind, use_edns=0 if payload else -1, payload=payload)
    reply = zone.answer(query.to_wire(), transport, "11.0.0.2:5353")
    assert reply.wire is not None
    return dns.message.from_wire(reply.wire)


def values(message: dns.message.Message) -> list[str]:
    return [record.to_text() for rrset in message.answer for record in rrset]


@pytest.fixture
def zone() -> Zone:
    return Zone(ZONE)


def test_a_plain_name_has_its_addresses(zone: Zone) -> None:
    assert values(ask(zone, "pypi.org")) == ["11.0.0.11"]
    assert values(ask(zone, "pypi.org", "AAAA")) == []
    assert values(ask(zone, "api.lab-origin.com", "AAAA")) == ["2600:11::20"]


def test_the_spelling_of_the_question_is_kept_and_logged(zone: Zone) -> None:
    answer = ask(zone, "PyPi.oRg")
    assert answer.question[0].name.to_text() == "PyPi.oRg."
    (seen,) = zone.seen
    assert (seen.name, seen.spelling, seen.type, seen.transport) == ("pypi.org", "PyPi.oRg", "A", "udp")


def test_an_unknown_name_does_not_exist(zone: Zone) -> None:
    assert ask(zone, "nowhere.example").rcode() == dns.rcode.NXDOMAIN


def test_a_wildcard_covers_any_depth_but_not_its_apex(zone: Zone) -> None:
    assert values(ask(zone, "a.b.wild.lab-origin.com")) == ["11.0.0.20"]
    assert ask(zone, "wild.lab-origin.com").rcode() == dns.rcode.NXDOMAIN


def test_rebinding_shows_a_public_address_once(zone: Zone) -> None:
    assert values(ask(zone, "rebind.lab-origin.com")) == ["11.0.0.20"]
    assert values(ask(zone, "rebind.lab-origin.com")) == ["127.0.0.1"]
    zone.set_name("rebind.lab-origin.com", ZONE["rebind.lab-origin.com"])
    assert values(ask(zone, "rebind.lab-origin.com")) == ["11.0.0.20"]


def test_a_cname_is_followed_out_of_its_zone(zone: Zone) -> None:
    assert values(ask(zone, "cname-out.lab-origin.com")) == ["www.evil-lab.com.", "11.6.6.6"]


def test_a_cname_loop_ends(zone: Zone) -> None:
    assert values(ask(zone, "cname-loop.lab-origin.com")) == ["cname-loop.lab-origin.com."]


def test_foreign_records_come_along(zone: Zone) -> None:
    answer = ask(zone, "foreign.lab-origin.com")
    owners = [rrset.name.to_text() for rrset in answer.answer]
    assert owners == ["foreign.lab-origin.com.", "pypi.org.", "github.com."]
    assert [rrset.name.to_text() for rrset in answer.additional] == ["pypi.org.", "github.com."]


def test_sixty_addresses_need_tcp_without_edns(zone: Zone) -> None:
    small = ask(zone, "huge.lab-origin.com", payload=0)
    assert small.flags & dns.flags.TC
    assert values(small) == []
    assert len(values(ask(zone, "huge.lab-origin.com", transport="tcp", payload=0))) == 60


def test_truncation_by_udp_alone(zone: Zone) -> None:
    reply = zone.answer(dns.message.make_query("truncated.lab-origin.com", "A").to_wire(), "udp", "x")
    assert reply.wire is not None
    assert reply.wire[2] & 0x02
    assert values(ask(zone, "truncated.lab-origin.com", transport="tcp")) == ["11.0.0.20"]


@pytest.mark.parametrize(
    ("name", "rcode"),
    [("servfail", dns.rcode.SERVFAIL), ("dns-refused", dns.rcode.REFUSED), ("empty", dns.rcode.NOERROR)],
)
def test_a_refusal_has_its_code_and_no_record(zone: Zone, name: str, rcode: dns.rcode.Rcode) -> None:
    answer = ask(zone, f"{name}.lab-origin.com")
    assert (answer.rcode(), values(answer)) == (rcode, [])


def test_the_wrong_id_the_silence_and_the_wait(zone: Zone) -> None:
    query = dns.message.make_query("wrong-id.lab-origin.com", "A")
    wrong = zone.answer(query.to_wire(), "udp", "x").wire
    assert wrong is not None
    assert int.from_bytes(wrong[:2]) != query.id
    silent = dns.message.make_query("silent.lab-origin.com", "A").to_wire()
    assert zone.answer(silent, "udp", "x").wire is None
    slow = dns.message.make_query("slow.lab-origin.com", "A").to_wire()
    assert zone.answer(slow, "udp", "x").wait == 3.0


@given(st.binary(max_size=200), st.sampled_from(["udp", "tcp"]))
def test_any_bytes_get_an_answer_or_none(wire: bytes, transport: str) -> None:
    reply = Zone(ZONE).answer(wire, transport, "11.0.0.2:1").wire
    assert reply is None or (reply[:2] == wire[:2] and reply[2] & 0x80)


@given(st.sampled_from(sorted(ZONE)), st.sampled_from(["A", "AAAA", "TXT", "MX", "HTTPS", "CNAME", "ANY"]))
def test_every_name_answers_every_type(name: str, kind: str) -> None:
    wire = dns.message.make_query(name.replace("*", "x"), kind).to_wire()
    Zone(ZONE).answer(wire, "udp", "11.0.0.2:1")


def test_an_entry_comes_from_json_values() -> None:
    assert entry_from({"a": ["11.0.0.20"], "ttl": 5}) == Name(a=("11.0.0.20",), ttl=5)
    assert {entry.behaviour for entry in ZONE.values()} <= set(BEHAVIOURS)


@pytest.mark.e2e
def test_a_real_resolver_client_sees_what_was_set(lab: Lab) -> None:
    lab.set_name("new.lab-origin.com", a=["11.0.0.20", "11.0.0.251"])
    lines = lab.host_exec(["dig", "+short", "new.lab-origin.com"]).stdout.split()
    assert sorted(lines) == ["11.0.0.20", "11.0.0.251"]
    assert sorted(lab.host_exec(["dig", "+tcp", "+short", "new.lab-origin.com"]).stdout.split()) == sorted(
        lines
    )
    assert [query.transport for query in lab.dns_queries("new.lab-origin.com")] == ["udp", "tcp"]
    assert lab.host_exec(["dig", "+tries=1", "+timeout=1", "silent.lab-origin.com"]).returncode == 9
