"""HTTP/2, gRPC and WebSocket through `egressd run`: real clients, real bytes, and memory that stays flat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab.lab import Lab
from egressd.lab.stand import Stand
from tests.clients.cache import Cache
from tests.e2e.conftest import SHIPPED, until
from tests.e2e.test_drills import line_of, peak_of, running, worker_of

pytestmark = pytest.mark.e2e

RULES = """schema: 1
profile: lab
owner: e2e
allow:
  - id: h2
    hosts: [h2.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /echo", "POST /early", "POST /slowly", "POST /stalled"]
  - id: grpc
    hosts: [grpc.lab-origin.com]
    requests:
      ["POST /lab.Echo/Say", "POST /lab.Echo/Many", "POST /lab.Echo/Collect", "POST /lab.Echo/Chat", "POST /lab.Echo/Fail"]
  - id: old
    hosts: [api.lab-origin.com]
    requests: ["GET /**", "POST /lab.Echo/Say", "WEBSOCKET /ws"]
  - id: broken
    hosts: [refused.lab-origin.com]
    requests: ["ANY /**"]
deny:
  - id: no-paste
    hosts: [pastebin.com]
    because: known sink
"""


@pytest.fixture
def spoken(shared_lab: Lab) -> Iterator[Stand]:
    """An installation whose rules name origins of every protocol."""
    shared_lab.forget()
    with Stand(shared_lab, RULES, shipped=SHIPPED) as stand:
        yield stand


def sh(stand: Stand, script: str, **options: object) -> str:
    ran = stand.run(["sh", "-c", script], **options)  # type: ignore[arg-type]  # as `run` has them
    assert ran.returncode == 0, ran
    return ran.stdout


# HTTP/2


@pytest.mark.parametrize(
    ("host", "flag", "version"),
    [
        pytest.param("h2", "--http2", "2", id="where both speak it"),
        pytest.param("h2", "--http1.1", "1.1", id="not where the client does not"),
        pytest.param("api", "--http2", "1.1", id="not where the origin does not"),
    ],
)
def test_http2_is_spoken_on_both_sides_or_on_none(spoken: Stand, host: str, flag: str, version: str) -> None:
    said = sh(spoken, f"curl -sS {flag} -w '\\n%{{http_version}}' https://{host}.lab-origin.com/echo")
    answer, _, used = said.rpartition("\n")
    assert used == version
    assert json.loads(answer).get("http", 1) == int(float(version))
    assert [(r["layer"], r["verdict"]) for r in spoken.attempts() if r["layer"] != "dns"] == [
        ("connection", "allow"),
        ("request", "allow"),
    ]


def test_many_streams_share_one_connection_on_both_sides(spoken: Stand) -> None:
    urls = " ".join(f"https://h2.lab-origin.com/slow?seconds=0.3\\&n={number}" for number in range(50))
    said = sh(spoken, f"curl -sS --http2 --parallel --parallel-max 50 {urls}")
    assert said.count("at last") == 50
    seen = spoken.lab.requests(path="/slow")
    assert len(seen) == 50
    assert len({request.peer for request in seen}) == 1
    requests = [r for r in spoken.attempts() if r["layer"] == "request"]
    assert len(requests) == 50
    assert len([r for r in spoken.attempts() if r["layer"] == "connection"]) == 1
    ends = {r["attempt_id"]: r["reason"] for r in spoken.records(event="end", layer="request")}
    assert {ends[r["attempt_id"]] for r in requests} == {"completed"}


def test_a_denied_stream_is_told_and_the_others_go_on(spoken: Stand) -> None:
    base = "https://h2.lab-origin.com"
    said = sh(
        spoken,
        f"curl -sS --http2 -w '%{{http_code}} %{{http_version}} %{{num_connects}}\\n' {base}/n "
        f"--next -sS --http2 -X DELETE -w '%{{http_code}} %{{num_connects}}\\n' {base}/n "
        f"--next -sS --http2 -w '%{{http_code}} %{{num_connects}}\\n' {base}/n",
    )
    lines = said.splitlines()
    assert lines[0] == "1200 2 1"
    assert "egressd: denied" in said
    assert "403 0" in lines
    assert lines[-1] == "2200 0", "the connection should have gone on"
    assert [r.method for r in spoken.lab.requests()] == ["GET", "GET"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("curl -sS --http2 $H/103", "final", id="early hints"),
        pytest.param("curl -sS --http2 $H/trailers", "hello", id="trailers"),
        pytest.param("curl -sSI --http2 -o /dev/null -w '%{http_code}' $H/n", "200", id="HEAD"),
        pytest.param(
            "curl -sS --http2 $H/sse?events=3\\&gap=0.01", "data: 0\n\ndata: 1\n\ndata: 2\n\n", id="events"
        ),
        pytest.param(
            "curl -sS --http2 $H/drain", "the last of this connection\n", id="an origin that drains"
        ),
        pytest.param(
            "head -c 3000000 /dev/zero | curl -sS --http2 -T - -X POST -o /dev/null -w '%{http_code}' $H/early",
            "413",
            id="an answer before the end of the upload",
        ),
        pytest.param(
            "curl -sS --http2 -H 'Expect: 100-continue' -d abc $H/echo | cut -c-16",
            '{"method": "POST\n',
            id="Expect",
        ),
        pytest.param(
            "curl -sS --http2 $H/drain $H/n",
            "the last of this connection\n1",
            id="a new connection after a farewell",
        ),
    ],
)
def test_what_http2_can_say_arrives(spoken: Stand, script: str, expected: str) -> None:
    assert sh(spoken, f"H=https://h2.lab-origin.com; {script}") == expected


def test_events_arrive_when_they_are_sent(spoken: Stand) -> None:
    script = "curl -sSN --http2 'https://h2.lab-origin.com/sse?events=1000&gap=0.1'"
    with running(spoken, script) as process:
        assert [line_of(process), line_of(process), line_of(process)] == ["data: 0", "", "data: 1"]


def test_a_reload_ends_the_streams_it_no_longer_allows_and_no_other(spoken: Stand) -> None:
    events = "https://h2.lab-origin.com/sse?events=600&gap=0.1"
    script = (
        f"curl -sSN --http2 --parallel --parallel-immediate '{events}&cut=1' '{events}' 2>/dev/null | "
        "while read line; do :; done; echo ended"
    )
    text = spoken.profile.read_text()
    with running(spoken, script) as process:
        until(lambda: len(spoken.lab.requests(path="/sse")) == 2, what="both streams")
        deny = (
            'deny:\n  - id: no-events\n    hosts: [h2.lab-origin.com]\n    requests: ["GET /sse?cut=1&*"]\n'
        )
        spoken.profile.write_text(text.replace("deny:\n", deny))
        until(lambda: spoken.records(event="end", layer="request"), what="the end of one")
        (end,) = spoken.records(event="end", layer="request")
        assert end["reason"] == "policy_changed"
        assert end["query"].endswith("cut=<1>")
        until(
            lambda: any(seen.aborted for seen in spoken.lab.requests(path="/sse")), what="the reset upstream"
        )
        assert sum(seen.aborted for seen in spoken.lab.requests(path="/sse")) == 1
        process.terminate()


# clients that offer HTTP/2 alone

ONLY_H2 = r"""
import socket, ssl, sys
def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
def text(value):
    return bytes((len(value),)) + value
def literal(name, value):
    return b"\x00" + text(name) + text(value)
host, method, path, kind = sys.argv[1:5]
context = ssl.create_default_context()
context.set_alpn_protocols(["h2"])
sock = context.wrap_socket(socket.create_connection((host, 443), timeout=10), server_hostname=host)
print(sock.selected_alpn_protocol())
head = b"".join(
    literal(*pair)
    for pair in (
        (b":method", method.encode()), (b":scheme", b"https"), (b":authority", host.encode()), (b":path", path.encode()),
        (b"content-type", kind.encode()),
    )
)
sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 5, 1, head))
heard, ended = b"", False
while not ended:
    more = sock.recv(65536)
    if not more:
        break
    heard += more
    while len(heard) >= 9 and len(heard) >= 9 + int.from_bytes(heard[:3], "big"):
        size, what, flags = 9 + int.from_bytes(heard[:3], "big"), heard[3], heard[4]
        if heard[5:9] == b"\0\0\0\1":
            print(what, heard[9:size])
            ended = ended or bool(flags & 1) or what == 3
        heard = heard[size:]
"""


@pytest.mark.parametrize(
    ("host", "kind", "says"),
    [
        pytest.param(
            "pastebin.com", "text/plain", "reason denied_by_organisation", id="a name that is denied"
        ),
        pytest.param(
            "nowhere.lab-origin.com", "text/plain", "reason not_allowed", id="a name no rule allows"
        ),
        pytest.param(
            "api.lab-origin.com", "text/plain", "reason upstream_no_http2", id="an origin without HTTP/2"
        ),
        pytest.param(
            "refused.lab-origin.com", "text/plain", "reason upstream_unreachable", id="an origin that refuses"
        ),
        pytest.param("pastebin.com", "application/grpc", "grpc-status", id="a call to a name that is denied"),
        pytest.param(
            "api.lab-origin.com", "application/grpc", "grpc-status", id="a call to an origin without HTTP/2"
        ),
    ],
)
def test_a_client_that_offers_http2_alone_is_told_in_it(
    spoken: Stand, host: str, kind: str, says: str
) -> None:
    (spoken.workspace / "only_h2.py").write_text(ONLY_H2)
    said = sh(spoken, f"/usr/bin/python3 only_h2.py {host} GET /n {kind}")
    assert said.startswith("h2\n")
    assert says in said
    assert spoken.lab.requests() == []


# gRPC, by grpcio

CALLS = r"""
import sys, grpc
host, method, kind = sys.argv[1:4]
credentials = grpc.ssl_channel_credentials(open(sys.argv[4], "rb").read())
same = lambda data: data
with grpc.secure_channel(host + ":443", credentials) as channel:
    path = "/lab.Echo/" + method
    try:
        if kind == "unary":
            print(channel.unary_unary(path, same, same)(b"hello", timeout=10))
        elif kind == "server":
            print(list(channel.unary_stream(path, same, same)(b"hello", timeout=10)))
        elif kind == "client":
            print(channel.stream_unary(path, same, same)(iter([b"a", b"b", b"x" * 100000]), timeout=10)[:4])
        else:
            heard, sent = [], []
            def asked():
                for number in range(5):
                    sent.append(number)
                    yield b"m%d" % number
                    while len(heard) <= number:
                        pass
            for answer in channel.stream_stream(path, same, same)(asked(), timeout=20):
                heard.append(answer)
                assert len(sent) == len(heard), (sent, heard)
            print(heard)
    except grpc.RpcError as error:
        print(error.code().name, "|", error.details())
"""

CALLED = [
    pytest.param("grpc", "Say", "unary", "b'hello'", id="unary"),
    pytest.param(
        "grpc",
        "Many",
        "server",
        "[b'hello0', b'hello1', b'hello2', b'hello3', b'hello4']",
        id="server streaming",
    ),
    pytest.param("grpc", "Collect", "client", "b'abxx'", id="client streaming"),
    pytest.param("grpc", "Chat", "chat", "[b'm0', b'm1', b'm2', b'm3', b'm4']", id="both, by turns"),
    pytest.param("grpc", "Fail", "unary", "NOT_FOUND | no such thing", id="a status of the origin's own"),
    pytest.param(
        "grpc",
        "Other",
        "unary",
        "PERMISSION_DENIED | egressd: denied: this path of the host",
        id="a denied call",
    ),
    pytest.param(
        "nowhere",
        "Say",
        "unary",
        "PERMISSION_DENIED | egressd: denied: no rule of this sandbox",
        id="a denied name",
    ),
    pytest.param(
        "refused", "Say", "unary", "UNAVAILABLE | egressd: upstream error", id="an origin that refuses"
    ),
    pytest.param(
        "api",
        "Say",
        "unary",
        "UNAVAILABLE | egressd: upstream error: the host does not speak",
        id="no HTTP/2",
    ),
]


def python_with(stand: Stand, module: str) -> tuple[str, list[str]]:
    """The Python of the clients' folder and the flags that show it to a sandbox; skips where it lacks the module."""
    cache = Cache()
    if lacks := cache.lacks(f"python:{module}"):
        pytest.skip(lacks)
    return str(cache.root / "python/bin/python"), [
        word for path in cache.binds for word in ("--bind", f"{path}:ro")
    ]


@pytest.mark.parametrize(("host", "method", "kind", "says"), CALLED)
def test_grpc_calls(spoken: Stand, host: str, method: str, kind: str, says: str) -> None:
    python, flags = python_with(spoken, "grpc")
    (spoken.workspace / "calls.py").write_text(CALLS)
    said = sh(spoken, f"{python} calls.py {host}.lab-origin.com {method} {kind} $SSL_CERT_FILE", flags=flags)
    assert said.startswith(says), said
    if "egressd" in says:
        assert spoken.lab.requests(host="grpc.lab-origin.com") == []


# WebSocket, by the websockets library

TALK = r"""
import sys, ssl
from websockets.sync.client import connect
try:
    with connect(sys.argv[1], open_timeout=10) as talk:
        for number in range(20):
            talk.send("hello %d" % number)
            assert talk.recv(timeout=10) == "hello %d" % number
        talk.ping().wait(10)
        print("talked", flush=True)
        if len(sys.argv) > 2:
            try:
                talk.recv()
            except Exception as error:
                print(type(error).__name__, error, flush=True)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        pytest.param("wss://api.lab-origin.com/ws", "talked\n", id="CMP-16 allowed"),
        pytest.param("wss://api.lab-origin.com/other", "InvalidStatus", id="another path"),
        pytest.param("wss://h2.lab-origin.com/ws", "InvalidStatus", id="no rule for a WebSocket"),
        pytest.param("wss://pastebin.com/ws", "InvalidStatus", id="a denied name"),
    ],
)
def test_websockets(spoken: Stand, url: str, says: str) -> None:
    python, flags = python_with(spoken, "websockets")
    (spoken.workspace / "talk.py").write_text(TALK)
    said = sh(spoken, f"{python} talk.py {url}", flags=flags)
    assert said.startswith(says)
    if says == "talked\n":
        (end,) = spoken.records(event="end", layer="request")
        assert (end["reason"], end["status"]) == ("completed", 101)
        assert end["bytes_up"] > 300
    else:
        assert "403" in said
        assert spoken.lab.requests() == []


def test_a_websocket_that_rules_no_longer_allow_is_told_and_ended(spoken: Stand) -> None:
    python, flags = python_with(spoken, "websockets")
    (spoken.workspace / "talk.py").write_text(TALK)
    with running(spoken, f"exec {python} talk.py wss://api.lab-origin.com/ws wait", *flags) as process:
        assert line_of(process) == "talked"
        spoken.profile.write_text(spoken.profile.read_text().replace('"WEBSOCKET /ws"', '"GET /ws"'))
        assert "1008" in (said := line_of(process))
        assert "policy_changed" in said
        until(
            lambda: spoken.records(event="end", layer="request", reason="policy_changed"), what="the record"
        )


# memory

SIZE = 400_000_000


def inner_worker(stand: Stand, control: int) -> int:
    until(
        lambda: [r for r in stand.records(event="sandbox") if r.get("detail") == "ready"], 20, "the sandbox"
    )
    worker = worker_of(control)
    return int(Path(f"/proc/{worker}/task/{worker}/children").read_text().split()[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            f"curl -sS --http2 -o /dev/null -w '%{{size_download}}\\n' $H/big?bytes={SIZE}", id="down"
        ),
        pytest.param(
            f"head -c {SIZE} /dev/zero | curl -sS --http2 -T - -X POST -o /dev/null -w '%{{size_upload}}\\n' $H/echo",
            id="up",
        ),
        pytest.param(
            f"curl -sS --http2 --limit-rate 100M -o /dev/null -w '%{{size_download}}\\n' $H/big?bytes={SIZE}",
            id="down to a slow reader",
        ),
        pytest.param(
            f"head -c {SIZE} /dev/zero | "
            "curl -sS --http2 -T - -X POST -o /dev/null -w '%{size_upload}\\n' $H/slowly?rate=100000000",
            id="up to a slow origin",
        ),
    ],
)
def test_four_hundred_megabytes_in_flat_memory(spoken: Stand, script: str) -> None:
    with running(spoken, f"H=https://h2.lab-origin.com; read go; {script}; read end") as process:
        assert process.stdin is not None
        inner = inner_worker(spoken, process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert line_of(process, 240) == str(SIZE)
        peak = peak_of(inner)
        assert peak < 150, f"peak RSS {peak} MiB"


def test_a_reader_that_stalls_holds_little_and_stops_nobody(spoken: Stand) -> None:
    script = (
        "read go; curl -sS --http2 https://h2.lab-origin.com/big?bytes=4000000000 | sleep 60 & "
        "sleep 1; curl -sS --http2 https://h2.lab-origin.com/n; echo; read end"
    )
    with running(spoken, script) as process:
        assert process.stdin is not None
        inner = inner_worker(spoken, process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert line_of(process) == "1"
        assert peak_of(inner) < 150
        sent = [seen.sent for seen in spoken.lab.requests(path="/big")]
        assert sent[0] < 40_000_000, "a stalled reader was sent more than buffers hold"
