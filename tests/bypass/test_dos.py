"""DOS rows: work and memory that a sandbox asks for and never pays: bounded, told, and others are served meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from egressd.lab.stand import Stand
from tests.bypass import arena as ground
from tests.bypass.arena import Arena, Row, arena
from tests.bypass.processes import inside_of, memory, open_files, worker_of
from tests.bypass.test_log import counted
from tests.e2e.conftest import build, until

pytestmark = pytest.mark.e2e

RULES = ground.RULES.replace('"POST /echo"]', '"POST /echo", "WEBSOCKET /ws"]').replace(
    "  - id: wild\n",
    "  - id: two\n    hosts: [h2.lab-origin.com]\n    requests: ['GET /**', 'POST /upload']\n"
    "  - id: lag\n    hosts: ['*.lag-lab.com']\n"
    "  - id: raw\n    hosts: [deb.debian.org]\n    treatment: relay\n    ports: [22]\n"
    "  - id: drip\n    hosts: [drip.lab-origin.com]\n    limits: {download: 20kB/day}\n"
    "  - id: wild\n",
)
_HASTY = "limits: {head_timeout: 1.5, first_bytes_timeout: 1.5, idle_timeout: 4.0}\n"
"""Deadlines that a test can wait for; the shipped ones are ten times as long."""


@pytest.fixture(scope="module")
def hasty() -> Iterator[Arena]:
    """An arena whose deadlines are short."""
    with build(os.geteuid() != 0) as lab:
        lab.set_name("*.wild-lab.com", a=["11.0.0.20"])
        lab.set_name("*.lag-lab.com", a=["11.0.0.20"], wait=2.0)
        lab.set_name("drip.lab-origin.com", a=["11.0.0.20"])
        with arena(lab, rules=RULES, more=_HASTY) as made:
            yield made


MANY = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
    "address = socket.gethostbyname('api.lab-origin.com')\n"
    "def opened(count, data=b'', port=443, host=address):\n"
    " socks = [socket.create_connection((host, port), 5) for _ in range(count)]\n"
    " for sock in socks: sock.sendall(data)\n"
    " return socks\n"
    "def ended(socks, seconds):\n"
    " end, left = time.monotonic() + seconds, set(socks)\n"
    " while left and time.monotonic() < end:\n"
    "  for sock in select.select(list(left), [], [], 0.2)[0]:\n"
    "   try:\n    over = not sock.recv(65536)\n   except OSError:\n    over = True\n"
    "   if over: left.discard(sock)\n"
    " return len(socks) - len(left)\n"
)


def probe(stand: Arena, who: str = "b") -> list[float]:
    """Seconds of each of some ordinary requests."""
    code = (
        "times = []\nfor _ in range(12):\n began = time.monotonic()\n"
        " said = tls('api.lab-origin.com', 443, get(), 'api.lab-origin.com')\n"
        " times.append(round(time.monotonic() - began, 3) if b'200 OK' in said else 99.0)\nsay(times)"
    )
    return sorted(eval(getattr(stand, who).run(code, 60)))


def test_what_never_says_what_it_wants_is_ended_in_time(hasty: Arena) -> None:
    """DOS-01: silent, half a hello, half a head, a byte at a time, in the proxy and behind it; B is served meanwhile."""
    stand = hasty.stand
    code = MANY + (
        "began = time.monotonic()\n"
        "silent, half = opened(60), opened(60, hello()[:100])\n"
        "heads, proxied = opened(60, b'GET / HTTP/1.1\\r\\nHost: api', 80, socket.gethostbyname('www.lab-origin.com')),"
        " opened(60, b'CONNECT api.lab', 3128, '127.0.0.1')\n"
        "drops = opened(20, b'GET / HTTP/1.1\\r\\n', 80, socket.gethostbyname('www.lab-origin.com'))\n"
        "def dripping():\n"
        " while time.monotonic() - began < 4:\n"
        "  for sock in drops:\n   try:\n    sock.send(b'x')\n   except OSError:\n    pass\n"
        "  time.sleep(0.3)\n"
        "threading.Thread(target=dripping, daemon=True).start()\n"
        "say(ended(silent + half + heads + proxied + drops, 8), round(time.monotonic() - began, 1))"
    )
    mark = len(stand.records())
    said: list[str] = []
    attack = threading.Thread(target=lambda: said.append(hasty.a.run(code, 30)))
    attack.start()
    time.sleep(0.5)
    assert probe(hasty)[-1] < 5
    attack.join()
    count, seconds = said[0].split()
    assert int(count) == 260, "some are still waited for"
    assert float(seconds) < 8
    records = stand.records()[mark:]
    until(lambda: counted(stand.records()[mark:], reason="head_timeout") >= 260, 5, "a record of each")
    assert {r["reason"] for r in records if r.get("verdict") == "deny"} <= {
        "head_timeout",
        "unknown_protocol",
    }
    hasty.life_goes_on()


def test_more_connections_than_a_sandbox_may_have_are_refused_and_counted(hasty: Arena) -> None:
    """DOS-01: 700 at once where 512 may be; when they are closed there is room again."""
    stand = hasty.stand
    code = MANY + (
        "socks = []\n"
        "for _ in range(700):\n"
        " sock = socket.socket(); sock.setblocking(False); sock.connect_ex((address, 443)); socks.append(sock)\n"
        "time.sleep(1.0)\n"
        "for sock in socks: sock.close()\nsay('closed')"
    )
    mark = len(stand.records())
    assert hasty.a.run(code, 30) == "closed\n"
    until(lambda: counted(stand.records()[mark:], reason="too_many_connections") > 0, 5, "refusals")
    until(
        lambda: counted(stand.records()[mark:], layer="connection", event="decision") == 700,
        5,
        "one for each",
    )
    hasty.life_goes_on()


def test_an_answer_that_takes_its_time_is_waited_for(hasty: Arena) -> None:
    """DOS-01: a long poll and a stream of events outlive the deadline of heads by far."""
    code = (
        "say(shown(tls('api.lab-origin.com', 443, get('/slow?seconds=2'), 'api.lab-origin.com', seconds=9))[-40:])\n"
        "say(shown(tls('api.lab-origin.com', 443, get('/sse?events=5&gap=0.5'), 'api.lab-origin.com', "
        "seconds=9)).count('data:'))"
    )
    assert re.search(r"at last.*\n5\n$", hasty.a.run(code, 30), re.S)


_HEADS = (("request", "deny", "head_too_large"),)
HEADS = [
    Row(
        "DOS-02",
        "said = tls('api.lab-origin.com', 443, b'GET / HTTP/1.1\\r\\nHost: api.lab-origin.com\\r\\nX: ' + b'x' * "
        "24_000_000, 'api.lab-origin.com')\n"
        "say(shown(said)[:200])",
        sees=r"431|BrokenPipe|ConnectionReset|EOF occurred",
        records=_HEADS,
        moot="the memory at stake is egressd's",
        title="24 MB of one header",
    ),
    Row(
        "DOS-02",
        "head = b''.join(b'X-%d: x\\r\\n' % n for n in range(50_000))\n"
        "say(shown(tls('api.lab-origin.com', 443, get(head=head), 'api.lab-origin.com'))[:200])",
        sees=r"431|BrokenPipe|ConnectionReset|EOF occurred",
        records=_HEADS,
        moot="the memory at stake is egressd's",
        title="50,000 headers",
    ),
    Row(
        "DOS-02",
        "say(shown(proxy(b'CONNECT api.lab-origin.com:443 HTTP/1.1\\r\\n' + b'X: y\\r\\n' * 1_000_000))[:200])",
        sees=r"431|BrokenPipe|ConnectionReset",
        records=(("connection", "deny", "head_too_large"),),
        moot="the memory at stake is egressd's",
        title="a CONNECT without end",
    ),
    Row(
        "DOS-01",
        "head = b'Transfer-Encoding: chunked\\r\\n'\n"
        "say(shown(tls('api.lab-origin.com', 443, get('/upload', method='POST', head=head) + b'5;' + b'x' * 5_000_000, "
        "'api.lab-origin.com'))[:200])",
        sees=r"400|BrokenPipe|ConnectionReset|EOF occurred",
        records=(("request", "end", "bad_framing"),),
        reaches=("api.lab-origin.com",),
        moot="the memory at stake is egressd's",
        title="the head of a chunk without end",
    ),
]  # fmt: skip

_FRAMES = (
    "from inside_frames import *\nseen = http2({0}, seconds=4)\nsay(seen[-2][0], seen[-2][3][4:8], seen[-1])"
)
_CALM = r"^7 b'\\x00\\x00\\x00\\x0b' \('end', 'closed'\)\n$"
_FLOOD = (("request", "deny", "flood"),)
FLOODS = [
    Row(
        "DOS-06",
        _FRAMES.format(frames),
        sees=_CALM,
        records=records,
        reaches=("h2.lab-origin.com",),
        moot="the work at stake is egressd's",
        title=title,
    )
    for title, frames, records in (
        (
            "rapid reset",
            "(frame(1, 5, 2 * n + 1, asking()) + frame(3, 0, 2 * n + 1, b'\\0\\0\\0\\x08') for n in range(5000))",
            _FLOOD,
        ),
        (
            "a head in continuations without end",
            "[frame(1, 1, 1, asking())] + [frame(9, 0, 1, fields(('x', 'y' * 100)))] * 5000",
            _HEADS,
        ),
        ("settings", "[frame(4)] * 10000", _FLOOD),
        ("pings", "[frame(6, 0, 0, b'12345678')] * 10000", _FLOOD),
        ("windows opened by one", "[frame(8, 0, 0, b'\\0\\0\\0\\1')] * 10000", _FLOOD),
        ("priorities", "[frame(2, 0, 1, b'\\0\\0\\0\\1\\1')] * 10000", _FLOOD),
        (
            "empty data",
            "[frame(1, 4, 1, asking('/upload', method='POST'))] + [frame(0, 0, 1)] * 10000",
            _FLOOD,
        ),
    )
]

_SOCKET = (
    "from inside_frames import *\nsock, first = websocket(); sock.settimeout(4)\nsay(shown(first))\n"
    "try:\n {0}\nexcept OSError as error:\n say(type(error).__name__)\n"
    "try:\n say(split_close(sock))\nexcept OSError as error:\n say(type(error).__name__)"
).replace("split_close(sock)", "shown(receive(sock))[:60]")
SOCKETS = [
    Row(
        "DOS-07",
        _SOCKET.format(code),
        sees=sees,
        records=(("request", "allow", "rule"),),
        reaches=("api.lab-origin.com",),
        moot="the memory at stake is egressd's",
        title=title,
        seconds=25,
    )
    for title, code, sees in (
        ("a frame that claims a gigabyte", "sock.sendall(message(2, b'x' * 1_000_000, length=1 << 30))", "101"),
        ("a frame longer than any", "sock.sendall(message(2, b'x', length=(1 << 63) + 5))", "101"),
        ("100,000 fragments without an end", "sock.sendall(message(1, b'x', final=False) + message(0, b'x', final=False) "
        "* 100_000)", "101"),
        ("compression that was not agreed", "sock.sendall(message(2, b'x' * 100, reserved=4))", "101"),
        ("frames without masks", "sock.sendall(message(1, b'x', masked=False) * 1000)", "101"),
    )
]  # fmt: skip


@pytest.mark.parametrize("row", [*HEADS, *FLOODS, *SOCKETS], ids=str)
def test_what_asks_for_memory_or_work_is_bounded(hasty: Arena, row: Row) -> None:
    worker = worker_of(hasty.a.process.pid)
    before = memory(worker)
    hasty.holds(row)
    assert worker_of(hasty.a.process.pid) == worker, "the worker died of it"
    assert memory(worker) - before < 20_000_000, "it keeps what it was sent"
    assert memory(worker, "VmHWM") < 200_000_000


def test_bodies_pass_through_without_being_kept(hasty: Arena) -> None:
    """DOS-03: four up and four down at once, 30 MB each, in less than one of them (400 MB each: tests/e2e/test_drills.py)."""
    worker = worker_of(hasty.a.process.pid)
    before = memory(worker)
    size = 30_000_000
    code = (
        "tasks = [subprocess.Popen(['sh', '-c', text], stdout=-1, text=True) for text in 4 * [\n"
        f" \"curl -sS -o /dev/null -w '%{{size_download}}' 'https://api.lab-origin.com/big?bytes={size}'\",\n"
        f" \"head -c {size} /dev/zero | curl -sS -o /dev/null -w '%{{size_upload}}' -T - -X POST "
        f'https://api.lab-origin.com/upload"]]\n'
        "say([int(task.communicate()[0]) for task in tasks])"
    )
    sizes = eval(hasty.a.run(code, 90))
    assert len(sizes) == 8
    assert min(sizes) >= size
    assert memory(worker, "VmHWM") - before < size
    assert memory(worker, "VmHWM") < 200_000_000
    hasty.life_goes_on()


def test_nothing_is_ever_unpacked(hasty: Arena) -> None:
    """DOS-04: bodies pass as they are, so a bomb stays as small as it is; nested and broken ones too."""
    worker = worker_of(hasty.a.process.pid)
    before = memory(worker)
    code = (
        "import gzip, zlib\n"
        "bomb = gzip.compress(bytes(1_000_000))\n"
        "nested = gzip.compress(gzip.compress(bytes(3_000_000)))\n"
        "def fetched(encoding, body):\n"
        " raw = b'HTTP/1.1 200 OK\\r\\nContent-Encoding: %s\\r\\nContent-Length: %d\\r\\n\\r\\n' % (encoding, len(body)) "
        "+ body\n"
        " said = tls('api.lab-origin.com', 443, get('/raw?hex=' + raw.hex()), 'api.lab-origin.com')\n"
        " return said.split(b'\\r\\n\\r\\n', 1)[-1].removesuffix(b'<EOF>') == body\n"
        "say(fetched(b'gzip', bomb), fetched(b'gzip, gzip', nested), fetched(b'deflate', b'\\0' * 500), fetched(b'zstd', "
        "b'\\x28\\xb5\\x2f\\xfd' * 9))\n"
        "head = b'Content-Encoding: gzip\\r\\nContent-Length: %d\\r\\n' % len(bomb * 400)\n"
        "said = tls('api.lab-origin.com', 443, get('/echo', method='POST', head=head, body=bomb * 400), 'api.lab-origin.com')\n"
        "say(b'\"n\": %d' % len(bomb * 400) in said)"
    )
    assert hasty.a.run(code, 30) == "True True True True\nTrue\n"
    assert memory(worker) - before < 20_000_000
    hasty.life_goes_on()


def test_certificates_are_not_made_without_bound(hasty: Arena) -> None:
    """DOS-08: 150 names under a wildcard, 100 denied ones: of those only some are explained, the others get an alert."""
    worker = worker_of(hasty.a.process.pid)
    code = (
        "say(sum(b'200 OK' in tls(f'n{n}.wild-lab.com', 443, get('/n', f'n{n}.wild-lab.com'), f'n{n}.wild-lab.com') for n "
        "in range(150)))\n"
        "said = [tls(f'n{n}.evil-lab.com', 443, get('/', f'n{n}.evil-lab.com'), f'n{n}.evil-lab.com') for n in range(100)]\n"
        "say(sum(b'reason not_allowed' in each for each in said), sum(b'ACCESS_DENIED' in each.upper() or b'access "
        "denied' in each for each in said))"
    )
    hasty.a.run("say(shown(tls('n.wild-lab.com', 443, get('/n', 'n.wild-lab.com'), 'n.wild-lab.com')))")
    before = memory(worker)
    served, explained = hasty.a.run(code, 100).splitlines()
    assert served == "150"
    told, alerted = map(int, explained.split())
    assert told + alerted == 100
    assert told <= 45, "30 a minute"
    assert memory(worker) - before < 60_000_000
    hasty.life_goes_on()


def test_slow_names_and_bodies_hold_nobody_up(hasty: Arena) -> None:
    """DOS-09: 80 requests whose names take two seconds, and downloads beside them; B and A itself are answered meanwhile."""
    usual = probe(hasty)
    code = (
        MANY
        + (
            "def ask(n):\n"
            " host = f's{n}.lag-lab.com'\n"
            " answers.append(tls(found[n], 443, get('/n', host), host, seconds=40))\n"
            "answers = []\nfound = [socket.gethostbyname(f's{n}.lag-lab.com') for n in range(80)]\n"
            "tasks = [threading.Thread(target=ask, args=(n,)) for n in range(80)]\n"
            "loads = [subprocess.Popen(['curl', '-sS', '-o', '/dev/null', 'https://api.lab-origin.com/big?bytes=20000000']) "
            "for _ in range(2)]\n"
            "for task in tasks: task.start()\n"
            "time.sleep(0.3)\nsaid = tls('api.lab-origin.com', 443, get(), 'api.lab-origin.com', seconds=20)\n"
            "say(b'200 OK' in said)\n"
            "for task in tasks: task.join()\n"
            "for load in loads: load.wait()\n"
            "late = b'the host did not answer'\n"  # where the machine has too much to do, beyond the deadline of names
            "say({shown(each)[:60] for each in answers if b'200 OK' not in each and late not in each})"
        )
    )
    said: list[str] = []
    attack = threading.Thread(target=lambda: said.append(hasty.a.run(code, 90)))
    attack.start()
    time.sleep(0.8)
    busy = probe(hasty)
    attack.join()
    own, served = said[0].splitlines()
    assert own == "True", (
        "its own other requests wait for the slow names: one after the other they take minutes"
    )
    assert served == "set()"
    assert busy[6] < max(2.0, 8 * usual[6]), (usual, busy)
    hasty.life_goes_on()


@pytest.mark.skipif(os.geteuid() != 0, reason="looking at a worker's descriptors needs root")
def test_no_descriptor_stays_with_a_connection_that_is_over(hasty: Arena) -> None:
    """DOS-10: tunnels and relays left half open, reset, forgotten; and half an end is no end for who still has to speak."""
    worker = worker_of(hasty.a.process.pid)
    time.sleep(0.5)
    base = open_files(worker)
    code = MANY + (
        "tunnel = socket.gethostbyname('api.anthropic.com'); relay = socket.gethostbyname('deb.debian.org')\n"
        "first, second, third = opened(80, hello('api.anthropic.com'), 443, tunnel), opened(80, b'', 22, relay), "
        "opened(80, hello('api.anthropic.com'), 443, tunnel)\n"
        "time.sleep(0.5)\n"
        "for sock in first: sock.shutdown(socket.SHUT_WR)\n"
        "for sock in second: sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); sock.close()\n"
        "half = socket.create_connection((relay, 22), 5); half.shutdown(socket.SHUT_WR); say(shown(receive(half)))\n"
        "say(ended(third, 9))\n"
        "time.sleep(0.2)"
    )
    assert re.fullmatch(
        r"SSH-2.0-lab [^\n]*\n<EOF>\n80\n|SSH-2.0-lab [^\n]*\r\n<EOF>\n80\n", hasty.a.run(code, 40)
    )
    until(lambda: open_files(worker) <= base + 2, 10, "the descriptors come back")
    hasty.life_goes_on()


def flows_of(control: int) -> int:
    """How many flows the kernel keeps of a sandbox (net.netfilter.nf_conntrack_count in its namespace)."""
    enter = [
        "nsenter",
        "-t",
        str(inside_of(control)),
        "-n",
        "cat",
        "/proc/sys/net/netfilter/nf_conntrack_count",
    ]
    return int(subprocess.run(enter, check=True, capture_output=True, text=True).stdout)


def test_a_scan_of_many_ports_fills_nothing_that_others_need(hasty: Arena) -> None:
    """DOS-11: 2,000 ports by TCP, 2,000 by UDP; every one accounted for, B connects during it and A after it."""
    stand: Stand = hasty.stand
    mark = len(stand.records())
    code = (
        "sent = 0\nsock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for port in range(1, 2001):\n"
        " socket.create_connection(('11.6.6.6', port), 5).close()\n"
        " try:\n  sock.sendto(b'x', ('11.6.6.6', port))\n except PermissionError:\n  sent += 1\n"
        "say(sent)"
    )
    hasty.lab.forget()
    said: list[str] = []
    attack = threading.Thread(target=lambda: said.append(hasty.a.run(code, 60)))
    attack.start()
    assert probe(hasty)[-1] < 5
    attack.join()
    assert said == ["1999\n"], "all but 53, which is ours"

    def accounted() -> bool:
        records = [
            r
            for r in stand.records()[mark:]
            if r["event"] == "decision" and r.get("address") in ("11.6.6.6", None)
        ]
        return counted(records, layer="packet") == 1999 and counted(records, layer="connection") == 1999

    until(accounted, 60, "every attempt is accounted for")
    if os.geteuid() == 0:  # each has a table of its own: what one fills is not another's
        own, others = (flows_of(each.process.pid) for each in (hasty.a, hasty.b))
        assert own > 1000
        assert others < own / 2
    hasty.nothing_reached(("api.lab-origin.com",))
    hasty.life_goes_on()


def test_an_answer_without_end_meets_its_budget_or_its_rules_end(hasty: Arena) -> None:
    """DOS-12: DESIGN.md has budgets of bytes, none of time: a trickle ends when its bytes are used up, or when its rule goes."""
    stand = hasty.stand
    code = (
        "host = 'drip.lab-origin.com'\nbegan = time.monotonic()\n"
        "said = tls(host, 443, get('/sse?events=100000&gap=0.001', host), host, seconds=9, read=1 << 30)\n"
        "say(said.count(b'data:'), round(time.monotonic() - began))"
    )
    count, seconds = map(int, hasty.a.run(code, 30).split())
    assert 500 < count < 2200
    assert seconds < 20
    over = {"event": "end", "layer": "request", "reason": "rate_limited", "host": "drip.lab-origin.com"}
    until(lambda: stand.records(**over), 5, "the end")
    (end,) = stand.records(**over)
    assert 19_000 <= end["bytes_down"] <= 22_000
    hasty.life_goes_on()
