"""TLS rows: server names, hellos in pieces, certificates on either side, and protocols that are not what their port says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab, topology
from tests.bypass.arena import RULES as COMMON
from tests.bypass.arena import Arena, Row

pytestmark = pytest.mark.e2e

API = "api.lab-origin.com"
PINNED = "api.anthropic.com"
RULES = COMMON.replace(
    "deny:\n",
    """  - id: elsewhere
    hosts: [covered.lab-covered.com]
    addresses: [11.0.0.0/24, 11.6.6.6/32]
  - id: mutual
    hosts: [mutual.lab-covered.com]
    ports: [9443]
  - id: mutual-tunnel
    hosts: [mutual-tunnel.lab-covered.com]
    ports: [9443]
    treatment: tunnel
deny:
""",
)
_ALERT = "UNRECOGNIZED_NAME"


def prepare(lab: Lab) -> None:
    """Names that only these rows need."""
    for name in ("covered", "mutual", "mutual-tunnel"):
        lab.set_name(f"{name}.lab-covered.com", a=[topology.API])


def tls(code: str) -> str:
    """Code with the tools for hellos in scope."""
    return f"from inside_tls import *\n{code}"


def connect(host: str, port: int = 443) -> str:
    """Code of a CONNECT to be sent first."""
    return f"b'CONNECT {host}:{port} HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n'"


def mismatch(title: str, code: str, **shows: object) -> Row:
    """A hello that names another host than its destination."""
    return Row(
        "TLS-01",
        tls(code),
        title=title,
        wins="200 OK",
        sees=_ALERT,
        records=(("connection", "deny", "sni_mismatch"),),
        shows=shows,
    )


NAMES = [
    mismatch(
        "hello for another name in a tunnel for an allowed one",
        f"say(shown(tls('', 0, get(), 'www.evil-lab.com', via={connect(API)})))",
        host=API,
        sni="www.evil-lab.com",
    ),
    mismatch(
        "hello for an allowed name in a tunnel for another one",
        f"say(shown(tls('', 0, get(), '{API}', via={connect('www.evil-lab.com')})))",
        host="www.evil-lab.com",
        sni=API,
    ),
    mismatch(
        "hello for another name at the address of an allowed one",
        f"say(shown(tls('{API}', 443, get(), 'www.evil-lab.com')))",
        host=API,
        sni="www.evil-lab.com",
        channel="transparent",
    ),
    mismatch(
        "hello for an allowed name at the address of a pinned one",
        f"say(shown(tls('{PINNED}', 443, get(), '{API}')))",
        host=PINNED,
        sni=API,
    ),
    Row(
        "TLS-02",
        f"say(shown(tls('{API}', 443, get(host='www.evil-lab.com'), '{API}')))",
        title="domain fronting to a name of the attacker",
        wins="200 OK",
        sees=r"403 egressd: denied: the request names another host than its connection",
        records=(("connection", "allow", "rule"), ("request", "deny", "authority_mismatch")),
        shows={"layer": "request", "host_raw": "www.evil-lab.com", "sni": API},
    ),
    Row(
        "TLS-02",
        f"say(shown(tls('', 0, get('/simple/', host='pypi.org'), '{API}', via={connect(API)})))",
        title="domain fronting to a name that is allowed too",
        wins="200 OK",
        sees="403 egressd: .*authority_mismatch",
        records=(("request", "deny", "authority_mismatch"),),
        shows={"layer": "request", "host_raw": "pypi.org"},
    ),
    Row(
        "TLS-03",
        f"say(shown(tls('{topology.API}', 443, get(), None)))",
        title="no server name, to an address",
        wins="200 OK",
        sees="ALERT_ACCESS_DENIED",
        records=(("connection", "deny", "ip_literal"),),
        shows={"address": topology.API},
        note="DESIGN.md: a literal address is refused as such, with or without a server name",
    ),
    Row(
        "TLS-03",
        "say(shown(tls('www.evil-lab.com', 443, get(), None)))",
        title="no server name, to where denied names lead",
        wins="owned",
        sees=_ALERT,
        records=(("connection", "deny", "no_sni"),),
    ),
    Row(
        "TLS-04",
        f"say(shown(tls('', 0, get('/headers'), None, via={connect(API)})))",
        title="no server name in an inspected tunnel: the tunnel's name counts",
        wins="200 OK",
        sees=rf'200 OK.*"sni": "{API}"',
        records=(("connection", "allow", "rule"), ("request", "allow", "rule")),
        reaches=(API,),
    ),
    Row(
        "TLS-04",
        f"say(shown(tls('', 0, get(host='{PINNED}'), None, via={connect(PINNED)})))",
        title="no server name in a pinned tunnel: the tunnel's name counts",
        wins="200 OK",
        sees="200 OK",
        records=(("connection", "allow", "rule"), ("connection", "end", "completed")),
        rule="pinned",
        reaches=(PINNED,),
        note="DESIGN.md: a missing server name passes where CONNECT proves the name, and the dial goes there",
    ),
    Row(
        "TLS-05",
        f"say(shown(tls('11.6.6.6', 443, get('/headers'), '{API}')))",
        title="allowed server name to an address of the sandbox's choice",
        wins="owned",
        sees="403 egressd: denied: connections to bare addresses",
        records=(("connection", "deny", "ip_literal"), ("request", "deny", "ip_literal")),
        shows={"address": "11.6.6.6", "sni": API},
        note="DESIGN.md: a literal address is refused unless a rule's `addresses` cover it",
    ),
    Row(
        "TLS-05",
        "say(shown(tcp('11.6.6.6', 80, get('/', 'www.lab-origin.com'))))",
        title="allowed Host to an address of the sandbox's choice",
        wins="owned",
        sees="403 egressd: denied: connections to bare addresses",
        records=(("connection", "deny", "ip_literal"), ("request", "deny", "ip_literal")),
        shows={"layer": "request", "host_raw": "www.lab-origin.com"},
    ),
    Row(
        "TLS-05",
        "say(shown(tls('11.6.6.6', 443, get('/headers', 'covered.lab-covered.com'), 'covered.lab-covered.com')))",
        title="an address that the rule covers: our own look-up is dialled, not the sandbox's address",
        wins="owned",
        sees='200 OK.*"host": "covered.lab-covered.com"',
        records=(("request", "allow", "rule"), ("request", "end", "completed")),
        rule="elsewhere",
        shows={"event": "end", "layer": "request", "address": "11.6.6.6", "upstream": topology.API},
        reaches=("covered.lab-covered.com",),
    ),
    Row(
        "TLS-06",
        f"say(shown(tls('{PINNED}', 443, get('/headers', 'tenant-of-the-attacker.example'), '{PINNED}')))",
        title="fronting inside a tunnel is out of sight: told as a tunnel, with its bytes",
        wins="200 OK",
        sees='"host": "tenant-of-the-attacker.example"',
        records=(("connection", "allow", "rule"), ("connection", "end", "completed")),
        rule="pinned",
        shows={"event": "end", "layer": "connection", "bytes_up": re.compile(r"^[1-9]\d+$"), "sni": PINNED},
        reaches=("tenant-of-the-attacker.example",),
        asks=(PINNED,),
        note="a limit: tunnels are asked for host by host and carry no credential (tests/bypass/test_credentials.py)",
    ),
]

_OUTER = """
import subprocess
hello = b''
context = context_for(old=ssl.TLSVersion.TLSv1_2)
outgoing = ssl.MemoryBIO()
try:
    context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname='{sni}').do_handshake()
except ssl.SSLWantReadError:
    hidden = b'\\0' + b'\\0\\1\\0\\1' + b'\\7' + vector(os.urandom(32)) + vector(os.urandom(160))
    hello = with_extension(outgoing.read(), ECH, hidden)
said = answer('{to}', hello)
say(raw_alert(said))
message = handshake_of(said)
at = message.find(b'\\x0b', 4 + int.from_bytes(message[1:4], 'big'))
chain = message[at + 10:] if at > 0 else b''
shown_by = ['openssl', 'x509', '-inform', 'DER', '-noout', '-ext', 'subjectAltName']
say('leaf', subprocess.run(shown_by, input=chain, capture_output=True).stdout)
"""

_SSL_2 = "802e0100020015000000100100800200800300800400800500800600400700c0"
HELLOS = [
    Row(
        "TLS-07",
        f"say(dns('{API}', 65), dns('{API}', 64))",
        title="no HTTPS or SVCB record brings the keys of a hidden hello",
        moot="the lab's zones have none either; what is asked for is that egressd never makes or passes one",
        sees="NOERROR NOERROR",
        records=(("dns", "deny", "dns_type"),),
        shows={"qtype": "HTTPS"},
    ),
    Row(
        "TLS-07",
        tls(_OUTER.format(sni=API, to=API)),
        title="a hidden hello to an inspected host is ignored: the outer name is served, and told",
        wins=f"ServerHello.*DNS:{API}",
        sees=f"ServerHello.*DNS:{API}",
        records=(("connection", "allow", "rule"),),
        shows={"event": "decision", "sni": API, "detail": "ech"},
    ),
    Row(
        "TLS-07",
        tls(_OUTER.format(sni="cloudflare-ech.evil-lab.com", to=API)),
        title="a hidden hello whose outer name is another one",
        wins="ServerHello",
        sees="alert unrecognized_name",
        records=(("connection", "deny", "sni_mismatch"),),
        shows={"detail": "ech"},
    ),
    Row(
        "TLS-07",
        tls(_OUTER.format(sni=PINNED, to=PINNED)),
        title="a hidden hello in a tunnel goes to the judged host, and is told",
        wins="ServerHello",
        sees="ServerHello",
        records=(("connection", "allow", "rule"), ("connection", "end", "completed")),
        shows={"event": "decision", "treatment": "tunnel", "detail": "ech"},
        reaches=(PINNED,),
        note="DESIGN.md knows no denial of it: the dial goes to the outer name's own address all the same",
    ),
    Row(
        "TLS-09",
        tls(
            "more = ['http/1.1', *('x' * 200 + str(n) for n in range(9))]\n"
            "cut = lambda flight: [flight[:1400], flight[1400:]]\n"
            f"say(shown(tls_by('{API}', 443, get(), '{API}', cut, alpn=more, pause=0.3)))"
        ),
        title="a hello larger than a segment, in two",
        wins="200 OK",
        sees="200 OK",
        records=(("connection", "allow", "rule"), ("request", "allow", "rule")),
        reaches=(API,),
    ),
    Row(
        "TLS-10",
        tls(
            f"say(shown(tls_by('{API}', 443, get(), '{API}', lambda flight: [recorded(handshake_of(flight), 1)])))"
        ),
        title="a hello in records of one byte",
        wins="200 OK",
        sees="200 OK",
        records=(("connection", "allow", "rule"),),
        reaches=(API,),
    ),
    Row(
        "TLS-10",
        tls(f"say(raw_alert(answer('{API}', recorded(handshake_of(crafted('www.evil-lab.com')), 1))))"),
        title="another name in records of one byte",
        wins="ServerHello",
        sees="alert unrecognized_name",
        records=(("connection", "deny", "sni_mismatch"),),
        shows={"sni": "www.evil-lab.com"},
    ),
    Row(
        "TLS-10",
        tls(f"say(raw_alert(answer('{PINNED}', recorded(handshake_of(crafted('www.evil-lab.com')), 50))))"),
        title="another name in records of 50 bytes, to a pinned host",
        wins="ServerHello",
        sees="alert unrecognized_name",
        records=(("connection", "deny", "sni_mismatch"),),
        shows={"sni": "www.evil-lab.com"},
    ),
    Row(
        "TLS-12",
        tls(
            f"sock = socket.create_connection(('{PINNED}', 443), 3)\n"
            "sock.settimeout(2)\n"
            "session = os.urandom(32)\n"
            f"sock.sendall(crafted('{PINNED}', share=False, session=session))\n"
            "retry = handshake_of(sock.recv(4096))\n"
            "say('retry' if b'\\xcf\\x21\\xad\\x74\\xe5\\x9a' in retry else retry)\n"
            "sock.sendall(crafted('www.evil-lab.com', session=session))\n"
            "say(raw_alert(receive(sock, 1)))"
        ),
        title="the second hello of a tunnel names another host",
        moot="it reaches the host that the first hello named, here as there; what it must not reach is another one",
        sees="retry",
        records=(("connection", "allow", "rule"), ("connection", "end", "completed")),
        shows={"event": "end", "sni": PINNED, "upstream": topology.ANTHROPIC},
        asks=(PINNED,),
    ),
    Row(
        "TLS-22",
        tls(f"say(raw_alert(answer('{API}', bytes.fromhex('{_SSL_2}') + bytes(16))))"),
        title="a hello of SSL 2",
        moot="the lab's origins speak no SSL 2",
        sees="EOF|Error",
        records=(("connection", "deny", "bad_tls"),),
    ),
    Row(
        "TLS-22",
        tls(
            "old = context_for(old=ssl.TLSVersion.TLSv1)\n"
            f"say(shown(tls_by('{API}', 443, get(), '{API}', lambda flight: [flight], context=old)))"
        ),
        title="TLS 1.0",
        moot="the lab's origins speak no TLS 1.0",
        sees="PROTOCOL_VERSION|Error|EOF",
        records=(("connection", "allow", "rule"), ("connection", "end", "bad_tls")),
        note="the name was allowed; the handshake was not made, and nothing was dialled",
    ),
    Row(
        "TLS-22",
        tls(f"say(raw_alert(answer('{API}', b'\\x16\\x03\\x01\\xff\\xff\\x01' + b'a' * 2000)))"),
        title="a record longer than records are",
        moot="the origin refuses it too; what counts is that egressd neither hangs nor breaks",
        sees="EOF|Error|b''|alert",
        records=(("connection", "deny", "bad_tls"),),
    ),
    Row(
        "TLS-22",
        tls(f"say(raw_alert(answer('{API}', crafted('a' * 60000))))"),
        title="a server name of 60,000 bytes",
        moot="the origin refuses it too; what counts is that egressd neither hangs nor breaks",
        sees="alert unrecognized_name|EOF|Error",
        records=(("connection", "deny", "bad_host"),),
    ),
]


def distrusted(name: str) -> Row:
    """A server that cannot prove to be who was asked for."""
    host = f"{name}.lab-origin.com"
    return Row(
        "TLS-13",
        f"say(shown(tls('{host}', 443, get('/n?data=1', host='{host}'), '{host}')))",
        title=f"upstream certificate: {name}",
        wins="200 OK",
        sees="502 egressd: upstream error: .*upstream_tls",
        records=(("request", "allow", "rule"), ("request", "end", "upstream_tls")),
        shows={"event": "end", "layer": "request", "bytes_up": 0, "detail": re.compile("^certificate: ")},
        asks=(host,),
    )


PROTOCOLS = [
    *(distrusted(name) for name in ("expired", "self-signed", "wrong-name", "not-yet-valid")),
    Row(
        "TLS-14",
        tls(
            "def pinning():\n"
            "    try:\n"
            f"        with socket.create_connection(('{API}', 443), 3) as raw:\n"
            f"            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(raw, server_hostname='{API}')\n"
            "    except OSError as error:\n"
            "        return getattr(error, 'reason', error)\n"
            "say(pinning(), pinning(), pinning())\n"
            f"issuer = run('openssl', 'x509', '-noout', '-issuer', text=leaf('{API}', name='{API}'))\n"
            "say('still inspected' if 'egressd' in issuer and 'lab root' not in issuer else issuer)"
        ),
        title="a client that trusts nobody, three times, opens no tunnel",
        moot="where nobody inspects there is nothing to be let out of",
        sees="CERTIFICATE_VERIFY_FAILED CERTIFICATE_VERIFY_FAILED CERTIFICATE_VERIFY_FAILED.*still inspected",
        records=(("connection", "allow", "rule"), ("connection", "end", "client_rejected_ca")),
        shows={"event": "end", "reason": "client_rejected_ca", "sni": API},
    ),
    Row(
        "TLS-18",
        tls(
            f"say(shown(tls('{API}', 443, b'\\0\\1\\2 raw\\r\\n\\r\\n', '{API}', alpn=['acme-tls/1', 'foo'])))"
        ),
        title="an odd protocol in the hello, then bytes that are no HTTP",
        wins="X-Why",
        sees="no application protocol",
        records=(("connection", "deny", "unknown_protocol"),),
        shows={"event": "decision", "sni": API},
    ),
    Row(
        "TLS-18",
        tls(
            f"say(shown(tls('{API}', 443, b'\\0\\1\\2 raw\\r\\n\\r\\n', '{API}', alpn=['foo', 'http/1.1'])))"
        ),
        title="HTTP in the hello, then bytes that are no HTTP",
        wins="X-Why",
        sees="400 egressd: denied",
        records=(("connection", "allow", "rule"), ("request", "deny", "bad_request")),
        note="the bytes never become a connection upstream: it is the request that is refused, as `bad_request`",
    ),
    Row(
        "TLS-18",
        tls(f"say(shown(tls('{API}', 443, b'EHLO x\\r\\nMAIL FROM:<a@b>\\r\\n\\r\\n', '{API}')))"),
        title="no protocol in the hello, then another one than HTTP",
        wins="X-Why",
        sees="400 egressd: denied",
        records=(("connection", "allow", "rule"), ("request", "deny", "bad_request")),
    ),
    Row(
        "TLS-19",
        f"say(shown(tls('{API}', 80, get(), '{API}')))",
        title="TLS on port 80",
        moot="the lab's origins speak plain HTTP there",
        sees="403 egressd: denied: this port of the host is not allowed",
        records=(("connection", "deny", "port_not_allowed"), ("request", "deny", "port_not_allowed")),
    ),
    Row(
        "TLS-19",
        f"say(shown(proxy({connect('www.evil-lab.com')} + get(host='www.evil-lab.com'))))",
        title="plain HTTP in a tunnel to 443 of a denied host",
        wins="owned",
        sees="403 egressd: denied: no rule",
        records=(("connection", "deny", "not_allowed"), ("request", "deny", "not_allowed")),
    ),
    Row(
        "TLS-19",
        f"say(shown(proxy({connect(API)} + get())))",
        title="plain HTTP in a tunnel to 443 of an allowed host",
        moot="the lab's origins speak TLS there",
        sees="403 egressd: denied: this scheme is not allowed",
        records=(("connection", "deny", "scheme_not_allowed"), ("request", "deny", "scheme_not_allowed")),
    ),
    Row(
        "TLS-19",
        tls(f"say(shown(tls('{API}', 443, crafted('www.evil-lab.com') + b'\\r\\n\\r\\n', '{API}')))"),
        title="TLS inside TLS",
        wins="X-Why",
        sees="400 egressd: denied",
        records=(("connection", "allow", "rule"), ("request", "deny", "bad_request")),
    ),
    Row(
        "TLS-20",
        tls(
            f"say(run('openssl', 'x509', '-noout', '-ext', 'subjectAltName', text=leaf('{API}', name='{API}')))"
        ),
        title="the leaf holds the judged name and no other",
        moot="it is egressd's leaf that is looked at",
        sees=rf"Subject Alternative Name: (critical)?\s+DNS:{API}\s*\[0\]",
        records=(("connection", "allow", "rule"),),
    ),
    Row(
        "TLS-20",
        tls(
            f"dates = run('openssl', 'x509', '-noout', '-dates', '-dateopt', 'iso_8601', text=leaf('{API}', name='{API}'))\n"
            "import datetime\n"
            "begin, end = (datetime.datetime.fromisoformat(found) for found in re.findall(r'=(.*)Z', dates))\n"
            "say('valid for', end - begin <= datetime.timedelta(days=397), begin <= datetime.datetime.utcnow() <= end)"
        ),
        title="the leaf lives less than 398 days, from before now",
        moot="it is egressd's leaf that is looked at",
        sees="valid for True True",
        records=(("connection", "allow", "rule"),),
    ),
    *(
        Row(
            "TLS-20",
            tls(f"say(raw_alert(answer('{API}', crafted({name!r}))))"),
            title=title,
            wins="ServerHello" if isinstance(name, str) and name.isascii() else None,
            moot="OpenSSL at the origin refuses it as well",
            sees="alert unrecognized_name",
            records=(("connection", "deny", reason),),
        )
        for title, name, reason in (
            ("a wildcard for a server name", "*.lab-origin.com", "bad_host"),
            ("a server name with a space", "api.lab-origin.com evil", "bad_host"),
            ("a server name with a NUL", b"api.lab-origin.com\0.evil-lab.com", "bad_host"),
            ("a server name that is an address", "11.0.0.20", "bad_host"),
            ("a server name outside ASCII", "\xe4pi.lab-origin.com", "non_ascii_host"),
        )
    ),
    Row(
        "TLS-21",
        f"say(shown(tls('', 0, get(host='{PINNED}'), '{PINNED}', via={connect(PINNED, 8443)})))",
        title="a tunnel to another port of a pinned host",
        wins="200 OK",
        sees="403 egressd: denied: this port of the host is not allowed",
        records=(("connection", "deny", "port_not_allowed"),),
        shows={"layer": "connection", "port": 8443},
    ),
    Row(
        "TLS-21",
        f"say(shown(tls('{PINNED}', 8443, get(host='{PINNED}'), '{PINNED}')))",
        title="another port of a pinned host",
        wins="200 OK",
        sees="403 egressd: denied: this port of the host is not allowed",
        records=(("connection", "deny", "port_not_allowed"),),
    ),
]

_QUIC = "bytes.fromhex('c300000001088394c8f03e5157080000449e') + b'q' * 1182"
_ALT = "485454502f312e3120323030204f4b0d0a416c742d5376633a2068333d223a343433220d0a436f6e6e656374696f6e3a20636c6f73650d0a0d0a6f6b"
QUIC = [
    Row(
        "TLS-16",
        f"began = time.monotonic()\nsay(shown(udp('{to}', 443, {_QUIC}, 3)), time.monotonic() - began < 1)",
        title=title,
        wins="owned",
        sees="Error.* True",
        records=(("packet", "deny", "protocol_not_allowed"),),
        shows={"protocol": "udp", "port": 443},
    )
    for title, to in (
        ("QUIC to the attacker", "11.6.6.6"),
        ("QUIC to the attacker by IPv6", "2600:6:6::6"),
        ("QUIC to a name", "www.evil-lab.com"),
    )
] + [
    Row(
        "TLS-16",
        f"say(shown(udp('{API}', 443, {_QUIC}, 1)))",
        title="QUIC to an allowed name",
        moot="the lab's origins speak no QUIC",
        sees="Error",
        records=(("packet", "deny", "protocol_not_allowed"),),
    ),
    Row(
        "TLS-16",
        f"said = shown(tls('{API}', 443, get('/raw?hex={_ALT}'), '{API}'))\n"
        "say(said, 'invited' if 'h3' in said else 'not invited')",
        title="an origin's invitation to QUIC is taken out",
        wins="200 OK.* invited",
        sees="200 OK.*not invited",
        records=(("request", "allow", "rule"),),
        reaches=(API,),
    ),
]


@pytest.mark.parametrize("row", [*NAMES, *HELLOS, *PROTOCOLS], ids=str)
def test_no_hello_leads_elsewhere(once: Arena, row: Row) -> None:
    once.holds(row)


@pytest.mark.parametrize("row", QUIC, ids=str)
def test_quic_stays_inside(explaining: Arena, row: Row) -> None:
    explaining.holds(row)


@pytest.fixture(scope="module")
def mutual(once: Arena) -> Iterator[None]:
    """A server that wants a client's certificate, and that certificate where attacks find it."""
    made = once.stand.workspace / "client.pem"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=client -days 2"
    subprocess.run(
        [*request.split(), "-keyout", made, "-out", f"{made}.crt"], check=True, capture_output=True
    )
    with made.open("a") as file:
        file.write(Path(f"{made}.crt").read_text())
    made.chmod(0o644)
    server = once.stand.directory / "mutual.pem"
    server.write_text(once.lab.issue("mutual.lab-covered.com"))
    tunnel = once.stand.directory / "tunnel.pem"
    tunnel.write_text(once.lab.issue("mutual-tunnel.lab-covered.com"))
    program = f"""
import socket, ssl, threading
def made(pem):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations({f"{made}.crt"!r})
    return context
first, second = made({str(server)!r}), made({str(tunnel)!r})
first.sni_callback = lambda sock, name, _: setattr(sock, 'context', second if 'tunnel' in (name or '') else first)
listener = socket.create_server(({topology.API!r}, 9443))
print('ready', flush=True)
def serve(raw):
    sock = first.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
    try:
        sock.do_handshake()
        sock.recv(65536)
        sock.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 6\\r\\nConnection: close\\r\\n\\r\\nmutual')
    except OSError:
        sock.shutdown(socket.SHUT_WR)
        sock.recv(65536)  # or the reset that a close would be could outrun the alert
    sock.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
    process = once.lab.popen("world", ["/usr/bin/python3", "-c", program])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    process.kill()
    process.communicate()


def mutual_row(name: str, client: bool, **more: object) -> Row:
    """A request to the server that wants a certificate."""
    context = f"context_for(client={'client.pem' if client else None!r})"
    code = f"say(shown(tls_by('{name}', 9443, get(host='{name}:9443'), '{name}', lambda flight: [flight], context={context})))"
    return Row("TLS-15", tls(code), asks=(name,), **more)  # type: ignore[arg-type]  # the rest as Row has it


@pytest.mark.parametrize(
    "row",
    [
        mutual_row(
            "mutual.lab-covered.com",
            True,
            title="an inspected server that wants the client's certificate",
            wins="200 OK.*mutual",
            sees="502 egressd: upstream error: the host asks for a client certificate",
            records=(("request", "allow", "rule"), ("request", "end", "upstream_wants_client_certificate")),
        ),
        mutual_row(
            "mutual-tunnel.lab-covered.com",
            True,
            title="by a tunnel the client's own certificate works",
            wins="200 OK.*mutual",
            sees="200 OK.*mutual",
            rule="mutual-tunnel",
            records=(("connection", "allow", "rule"),),
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("mutual")
def test_a_client_certificate_is_asked_for(once: Arena, row: Row) -> None:
    once.holds(row)
