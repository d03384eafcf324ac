"""IP rows: how addresses are spelled, and the ranges that are not the Internet.

Where the sandbox itself connects to the address, or resolves a name first, the wiring has a part in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab, topology
from tests.bypass.arena import RULES, Arena, Outcome, Row, arena
from tests.bypass.script import each, refusals, refused, tries

pytestmark = pytest.mark.e2e

RANGES = """  - id: home-range
    addresses: [11.0.0.0/24]
    ports: [2222]
    schemes: [http]
  - id: shared-range
    hosts: [ranged.wild-lab.com, outside.wild-lab.com, floor.wild-lab.com]
    addresses: [100.64.0.0/10]
deny:
"""
PRIVATE = (topology.PRIVATE, *topology.SPECIALS)
HOME = "home, home6 = ('11.0.0.2', '[2600:11::2]') if nameserver() == RESOLVER else ('11.0.0.3', '[2600:11::3]')\n"
"""Where the proxy runs that is asked: egressd's machine, or the place without egressd."""
REBOUND = "DESIGN: the name has its synthetic address all the same, what it resolves to is judged when it is dialled"
TUNNELLED = "say(line(proxy(b'CONNECT ' + it.encode() + b' HTTP/1.1\\r\\n\\r\\n' + get(host=it))))"


def url(address: str) -> str:
    return f"http://[{address}]/n" if ":" in address else f"http://{address}/n"


def judged_anew(outcome: Outcome) -> None:
    """The upstream's answer is in the record, and no packet went there."""
    ends = [record for record in outcome.records if record["event"] == "end" and record["layer"] == "request"]
    assert {record["verdict"] for record in ends} == {"deny"}
    assert not any("upstream" in record for record in ends)


def only_the_public_one(outcome: Outcome) -> None:
    """No packet left for any other address of the name."""
    dialled = {flow.address for flow in outcome.lab.packets("host", protocol="tcp")}
    assert dialled <= {topology.API, topology.API_V6}


def resolves(
    title: str, names: dict[str, dict[str, object]], reason: str, wins: str | None, **more: object
) -> Row:
    """A row about allowed names whose addresses may not be dialled."""
    return Row(
        str(more.pop("id", "IP-12")),
        tries("tls(it, 443, get(host=it), it)", *names),
        title=title,
        zone={name: {"ttl": 0, **entry} for name, entry in names.items()},
        wins=wins,
        sees=each(refused(reason), len(names)),
        records=(
            ("dns", "allow", "rule"),
            ("connection", "allow", "rule"),
            ("request", "allow", "rule"),
            ("request", "end", reason),
        ),
        asks=tuple(names),
        also=judged_anew,
        note=REBOUND,
        **more,  # type: ignore[arg-type]  # fields of Row
    )


def named(prefix: str, *addresses: str) -> dict[str, dict[str, object]]:
    """One name below the wildcard for each address."""
    return {
        f"{prefix}-{number}.wild-lab.com": {"aaaa" if ":" in address else "a": [address]}
        for number, address in enumerate(addresses)
    }


FLOOR = (("connection", "deny", "floor_metadata"), ("request", "deny", "floor_metadata"))
_ROWS = [
    Row(
        "IP-01",
        tries("absolute(it)", "http://2852039166/", "http://2852039166./")
        + "for it in ('2852039166:80', '2130706433:2222'):\n    "
        + TUNNELLED,
        title="decimal",
        wins=r"access_token.*\n.*access_token[^\n]*\n.*owned",
        sees=refused("floor_metadata") + ".*" + refused("bad_host") + ".*floor_metadata.*floor_loopback",
        records=(*FLOOR, ("connection", "deny", "floor_loopback"), ("connection", "deny", "bad_host")),
        shows={"host": "169.254.169.254", "host_raw": "2852039166, 2852039166"},
        decisions=7,
    ),
    Row(
        "IP-02",
        tries(
            "absolute(it)",
            "http://0xa9.0xfe.0251.254/",
            "http://0251.0376.0251.0376/",
            "http://0xa9fea9fe/",
            "http://025177524776/",
        ),
        title="octal and hexadecimal",
        wins=each("access_token", 4),
        sees=each(refused("floor_metadata"), 4),
        records=FLOOR,
        decisions=8,
    ),
    Row(
        "IP-02",
        "for it in ('0177.0.0.1:2222', '0x7f000001:2222', '0x7F.1:2222'):\n    " + TUNNELLED,
        title="loopback in octal and hexadecimal",
        wins=each("owned", 3),
        sees=each("floor_loopback", 3),
        records=(("connection", "deny", "floor_loopback"), ("request", "deny", "floor_loopback")),
        decisions=6,
    ),
    Row(
        "IP-03",
        tries("absolute(it)", "http://169.16689662/", "http://169.254.43518/"),
        title="short forms",
        wins=each("access_token", 2),
        sees=each(refused("floor_metadata"), 2),
        records=FLOOR,
        decisions=4,
    ),
    Row(
        "IP-03",
        "for it in ('127.1:2222', '0:2222', '0x0:2222', '127.0.1:2222'):\n    " + TUNNELLED,
        title="loopback in short forms",
        wins=each("owned", 4),
        sees=r"floor_loopback.*\n.*floor_unspecified.*\n.*floor_unspecified.*\n.*floor_loopback",
        records=(("connection", "deny", "floor_loopback"), ("connection", "deny", "floor_unspecified")),
        decisions=8,
    ),
    Row(
        "IP-04",
        "for it in ('0.0.0.0:2222', '[::]:2222', '[::0.0.0.0]:2222'):\n    " + TUNNELLED,
        title="unspecified",
        wins=each("owned", 3),
        sees=each("floor_unspecified", 3),
        records=(("connection", "deny", "floor_unspecified"), ("request", "deny", "floor_unspecified")),
        decisions=6,
    ),
    resolves(
        "names that resolve to nowhere",
        named("nowhere", "0.0.0.0", "::", "0.0.0.7"),
        "floor_unspecified",
        None,
        id="IP-04",
        moot="the client's own machine would be reached, which is the sandbox",
    ),
    Row(
        "IP-05",
        tries("absolute(it)", "http://[::ffff:169.254.169.254]/", "http://[::ffff:a9fe:a9fe]/")
        + tries("tcp(it, 80, get(host='[' + it + ']'))", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe"),
        title="mapped",
        wins=each("access_token", 4),
        sees=each(refused("floor_metadata"), 4),
        records=FLOOR,
        decisions=8,
    ),
    resolves(
        "names that resolve to mapped addresses",
        named("mapped", "::ffff:169.254.169.254"),
        "floor_metadata",
        "access_token",
        id="IP-05",
    ),
    Row(
        "IP-06",
        tries("absolute(it)", *(f"http://[{address}]/" for address in topology.METADATAS_INSIDE_IPV6))
        + tries("tcp(it, 80, get(host='[' + it + ']'))", *topology.METADATAS_INSIDE_IPV6),
        title="translated and tunnelled",
        wins=each("access_token", 6),
        sees=each(refused("floor_metadata"), 6),
        records=FLOOR,
        decisions=12,
    ),
    Row(
        "IP-06",
        tries(
            "absolute(it)",
            "http://[2001:0:a9fe:a9fe::1]/",
            "http://[2001:0:1:2:3:4:5601:5601]/",
            "http://[::a9fe:a9fe]/",
            "http://[::ffff:0:a9fe:a9fe]/",
            "http://[2600:11::5efe:a9fe:a9fe]/",
            "http://[64:ff9b:1:a9fe:a9:fe00::]/",
        ),
        title="Teredo, ISATAP, compatible, translated",
        moot="nobody in the lab unwraps them",
        sees=each(refused("floor_metadata"), 6),
        records=FLOOR,
        decisions=12,
    ),
    resolves(
        "names that resolve to translated and tunnelled addresses",
        named("inside", *topology.METADATAS_INSIDE_IPV6),
        "floor_metadata",
        each("access_token", 3),
        id="IP-06",
    ),
    Row(
        "IP-08",
        tries("absolute(it)", "http://100.64.0.10/n") + tries("tcp(it, 80, get(host=it))", "100.64.0.10"),
        title="shared address space",
        wins=each("200 OK", 2),
        sees=each(refused("ip_literal"), 2),
        records=(("connection", "deny", "ip_literal"), ("request", "deny", "ip_literal")),
        decisions=4,
    ),
    Row(
        "IP-08",
        "for it in ('100.100.100.200:80',):\n    " + TUNNELLED,
        title="metadata in shared address space",
        wins="access_token",
        sees="floor_metadata",
        records=FLOOR,
        decisions=2,
    ),
    resolves(
        "a name in shared address space",
        named("shared", "100.64.0.10"),
        "special_address",
        "200 OK",
        id="IP-08",
    ),
    Row(
        "IP-09",
        tries("absolute(it)", *map(url, PRIVATE)) + tries("tcp(it, 80, get(host='x'))", *PRIVATE),
        title="special ranges as they are",
        wins=each("200 OK", 2 * len(PRIVATE)),
        sees=each(refused("ip_literal"), 2 * len(PRIVATE)),
        records=(("connection", "deny", "ip_literal"), ("request", "deny", "ip_literal")),
    ),
    Row(
        "IP-09",
        tries("absolute(it)", *(f"http://{it}/" for it in ("224.0.0.1", "255.255.255.255", "239.1.2.3"))),
        title="multicast and broadcast",
        moot="TCP goes to one host: the kernel refuses",
        sees=each(refused("floor_multicast"), 3),
        records=(("connection", "deny", "floor_multicast"),),
        decisions=6,
    ),
    Row(
        "IP-09",
        tries("absolute(it)", *(f"http://{it}/" for it in ("198.18.1.200", "198.19.255.1", "198.18.0.2")))
        + tries("tcp(it, 80, get(host='api.lab-origin.com'))", "198.18.1.200", "198.19.255.1"),
        title="egressd's own range",
        moot="nobody else has it",
        sees=each(refused("floor_own_address"), 3)[:-2] + r".*",
        records=(("connection", "deny", "floor_own_address"), ("connection", "deny", "synthetic_unmapped")),
        decisions=8,
    ),
    resolves(
        "names in special ranges",
        named("special", *PRIVATE),
        "special_address",
        each("200 OK", len(PRIVATE)),
        id="IP-09",
    ),
    resolves(
        "names at multicast, broadcast and ours",
        named("group", "224.0.0.1", "255.255.255.255", "ff02::1"),
        "floor_multicast",
        None,
        id="IP-09",
        moot="TCP goes to one host: the kernel refuses",
    ),
    resolves(
        "names that resolve to synthetic addresses",
        named("synthetic", "198.18.1.0", "198.19.0.1", "2001:2::fe"),
        "floor_own_address",
        None,
        id="IP-09",
        moot="nobody else has them",
    ),
    Row(
        "IP-10",
        tries(
            "absolute(it)", *map(url, ("3fff::1", "3ffe::1", "5f00::1", "4000::1", "fc00::1", "2001:10::1"))
        ),
        title="IPv6 that is not the Internet",
        moot="nobody has these; those that somebody in the lab has are tried with the IPv4 ones",
        sees=each(refused("ip_literal"), 6),
        records=(("connection", "deny", "ip_literal"),),
        decisions=12,
    ),
    Row(
        "IP-10",
        tries("absolute(it)", *map(url, ("fe80::1", "ff02::1", "febf::1"))),
        title="IPv6 link-local and multicast",
        moot="the kernel needs to know the link",
        sees=refused("floor_link_local")
        + ".*"
        + refused("floor_multicast")
        + ".*"
        + refused("floor_link_local"),
        records=(("connection", "deny", "floor_link_local"), ("connection", "deny", "floor_multicast")),
        decisions=6,
    ),
    Row(
        "IP-11",
        "for it in ('[::1%25lo]:2222', '[::1%lo]:2222', '[::1%0]:2222', '[::1%]:2222'):\n    " + TUNNELLED,
        title="zone ids",
        wins=each("owned", 4),
        sees=each(refused("bad_host"), 4),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "[::1%25lo]:2222"},
        decisions=4,
    ),
    Row(
        "IP-11",
        tries(
            "tls('api.lab-origin.com', 443, get(host=it), 'api.lab-origin.com')",
            "[::1%25lo]",
            "[fe80::1%eth0]",
        ),
        title="zone ids in Host",
        wins=each("200 OK", 2),
        sees=each(refused("bad_host"), 2),
        records=(("request", "deny", "bad_host"),),
        shows={"host_raw": "[fe80::1%eth0]"},
    ),
    resolves(
        "a name that leads into a private network", named("rb", topology.PRIVATE), "special_address", "200 OK"
    ),
    resolves(
        "a name that spells an address",
        {
            "169-254-169-254.wild-lab.com": {"a": [topology.METADATA]},
            "imds.wild-lab.com": {"aaaa": [topology.METADATA_V6]},
        },
        "floor_metadata",
        each("Connection refused|wrong|SSL|access_token", 2),
    ),
    resolves(
        "a name that leads to loopback",
        named("home", "127.0.0.1", "::1", "127.9.9.9"),
        "floor_loopback",
        None,
        moot="the client's own machine would be reached, which is the sandbox",
    ),
    resolves(
        "an alias that leads into a private network",
        {
            "alias-in.wild-lab.com": {"cname": "intern.wild-lab.com"},
            "intern.wild-lab.com": {"a": [topology.PRIVATE]},
        },
        "special_address",
        each("200 OK", 2),
    ),
    Row(
        "IP-12",
        tries("tls(it, 443, get(host=it), it, seconds=9)", "mixed.wild-lab.com"),
        title="a name with one address that will do and others that must not be dialled",
        zone={
            "mixed.wild-lab.com": {
                "a": [topology.PRIVATE, topology.API, topology.METADATA, "127.0.0.1"],
                "aaaa": ["fd00::1", topology.METADATA_V6],
                "ttl": 0,
            }
        },
        moot="the answer is good for who takes the right address",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        shows={"upstream": topology.API},
        reaches=("mixed.wild-lab.com",),
        also=only_the_public_one,
        note="no packet goes to the others, not even to see who answers first",
    ),
    Row(
        "IP-15",
        tries(
            "connect(it + ':443', get(), 'api.lab-origin.com')",
            topology.ATTACKER,
            f"[{topology.ATTACKER_V6}]",
        )
        + tries("tls(it, 443, get(), 'api.lab-origin.com')", topology.ATTACKER, topology.ATTACKER_V6),
        title="a bare address with an allowed SNI and Host",
        wins=each("owned", 4),
        sees=each(refused("ip_literal"), 4),
        records=(("connection", "deny", "ip_literal"), ("request", "deny", "ip_literal")),
        shows={"host": topology.ATTACKER, "sni": "api.lab-origin.com"},
        decisions=8,
    ),
    Row(
        "IP-15",
        tries("tcp(it, 80, get(host='www.lab-origin.com'))", topology.ATTACKER)
        + tries("absolute(it, 'www.lab-origin.com')", f"http://{topology.ATTACKER}/"),
        title="a bare address with an allowed Host in clear",
        wins=each("owned", 2),
        sees=refused("ip_literal") + r".*\n" + refused("authority_mismatch|ip_literal"),
        records=(("connection", "deny", "ip_literal"),),
        decisions=4,
    ),
    Row(
        "IP-16",
        HOME
        + "it = home + ':2222'\n"
        + "say(line(tcp(home, 2222, get(host=it))))\n"
        + "say(line(absolute('http://' + it + '/')))",
        title="the machine's own address, where a rule allows the range",
        wins=each("owned", 2),
        sees=each(refused("floor_own_address"), 2),
        records=(("connection", "allow", "rule"), ("request", "end", "floor_own_address")),
        rule="home-range",
        also=judged_anew,
        note="DESIGN: which addresses are the machine's is asked of the kernel when it comes to dialling",
    ),
    Row(
        "IP-16",
        HOME + "for it in (home + ':443', home6 + ':2222', home6 + ':443'):\n    " + TUNNELLED,
        title="the machine's own address, where no rule does",
        wins="owned",
        sees="port_not_allowed.*ip_literal.*ip_literal",
        records=(("connection", "deny", "port_not_allowed"), ("connection", "deny", "ip_literal")),
        decisions=6,
    ),
    Row(
        "IP-16",
        HOME
        + "it = 'own-host.wild-lab.com' if home == '11.0.0.2' else 'own-open.wild-lab.com'\n"
        + "say(line(tcp(it, 443, read=5) if home != '11.0.0.2' else tls(it, 443, get(host=it), it)))",
        title="a name of the machine's own address",
        zone={
            "own-host.wild-lab.com": {"a": ["11.0.0.2"], "aaaa": ["2600:11::2"], "ttl": 0},
            "own-open.wild-lab.com": {"a": ["11.0.0.3"], "ttl": 0},
        },
        wins="owned",
        sees=refused("floor_own_address"),
        records=(("request", "allow", "rule"), ("request", "end", "floor_own_address")),
        asks=("own-host.wild-lab.com",),
        also=judged_anew,
    ),
    Row(
        "IP-17",
        tries(
            "tls(it, 443, get(host=it), it)",
            "floor.wild-lab.com",
            "outside.wild-lab.com",
            "ranged.wild-lab.com",
        ),
        title="a range that a rule names holds metadata",
        zone={
            "floor.wild-lab.com": {"a": [topology.METADATA_ALIBABA], "ttl": 0},
            "outside.wild-lab.com": {"a": [topology.PRIVATE, topology.API], "ttl": 0},
            "ranged.wild-lab.com": {"a": ["100.64.0.10"], "ttl": 0},
        },
        wins=r"\n.*200 OK.*\n.*200 OK",
        sees=refused("floor_metadata") + ".*" + refused("address_outside_rule") + ".*200 OK",
        records=(("request", "end", "floor_metadata"), ("request", "end", "address_outside_rule")),
        rule="shared-range",
        reaches=("ranged.wild-lab.com",),
        asks=("floor.wild-lab.com", "outside.wild-lab.com"),
    ),
]


ROWS = [dataclasses.replace(row, wired="tcp(it" in row.code) for row in _ROWS]


@pytest.fixture(scope="module")
def ranged(shared_lab: Lab) -> Iterator[Arena]:
    """An arena whose rules also allow ranges of addresses."""
    with arena(shared_lab, rules=RULES.replace("deny:\n", RANGES, 1)) as made:
        yield made


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_is_dialled_is_what_was_classified(ranged: Arena, row: Row) -> None:
    ranged.holds(row)


def test_a_name_that_changes_between_the_look_and_the_dial(ranged: Arena) -> None:
    """IP-13: public for who asks first, loopback and private for who asks next. The address that was judged is dialled."""
    code = tries("tls(it, 443, get(host=it), it)", "swap.wild-lab.com")
    row = Row(
        "IP-13", code, sees="200 OK", records=(("request", "allow", "rule"),), reaches=("swap.wild-lab.com",)
    )
    entry = {"a": [topology.API], "behaviour": "rebind", "then": [topology.PRIVATE, "::1"], "ttl": 0}
    row = dataclasses.replace(
        row,
        zone={"swap.wild-lab.com": entry},
        moot="that the zone does change is seen by the second sandbox",
        also=dialled_once,
    )
    ranged.holds(row)
    # the zone has changed by now: who asks anew is led inside, and goes nowhere
    ranged.lab.forget()
    mark = len(ranged.stand.records())
    said = ranged.b.run(code)
    assert "reason special_address" in said or "reason floor_loopback" in said, said
    assert ranged.new_records(mark, [("request", "allow", "rule")])
    ranged.nothing_reached(asks=["swap.wild-lab.com"])
    assert [flow for flow in ranged.lab.packets("host") if flow.address == topology.PRIVATE] == []


def dialled_once(outcome: Outcome) -> None:
    queries = [query.type for query in outcome.lab.dns_queries("swap.wild-lab.com")]
    assert sorted(queries) == ["A", "AAAA"]
    assert {request.address for request in outcome.lab.requests(host="swap.wild-lab.com")} == {topology.API}
    assert topology.API in {record.get("upstream") for record in outcome.records}


@pytest.mark.parametrize(
    ("addresses", "code"),
    [
        pytest.param('["169.254.0.0/16"]', "floor_network", id="IP-17 link-local"),
        pytest.param('["169.254.169.254/32"]', "floor_network", id="IP-17 metadata"),
        pytest.param('["127.0.0.0/8"]', "floor_network", id="IP-17 loopback"),
        pytest.param('["168.63.129.16/32"]', "floor_network", id="IP-17 WireServer"),
        pytest.param('["fd00:ec2::254/128"]', "floor_network", id="IP-17 metadata over IPv6"),
        pytest.param('["0.0.0.0/0"]', "bad_network", id="IP-17 everything"),
        pytest.param('["::/0"]', "bad_network", id="IP-17 everything over IPv6"),
        pytest.param('["010.0.0.0/8"]', "bad_network", id="IP-18 leading zeros"),
        pytest.param('["10.0.0.1/8"]', "bad_network", id="IP-18 host bits"),
        pytest.param('["::ffff:10.0.0.0/104"]', "bad_network", id="IP-18 mapped"),
        pytest.param('["10.0/16"]', "bad_network", id="IP-18 short"),
        pytest.param('["0x0a.0.0.0/8"]', "bad_network", id="IP-18 hexadecimal"),
        pytest.param('["10.0.0.0/255.0.0.0"]', "bad_network", id="IP-18 a mask"),
        pytest.param('["fe80::%eth0/64"]', "bad_network", id="IP-18 a zone"),
    ],
)
def test_a_network_that_no_rule_may_name_is_refused_where_it_stands(
    tmp_path: Path, addresses: str, code: str
) -> None:
    entry = f"{{id: net, addresses: {addresses}, ports: [443]}}"
    assert set(refusals(tmp_path, "hosts: [first.example.org]", entry)) == {f"6 {code}"}
