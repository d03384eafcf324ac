"""NET rows that need somebody at the other end: other sandboxes, services of the host, whoever comes from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab
from tests.bypass.arena import Arena

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def server(lab: Lab, place: str, listening: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a place that greets whoever connects to the socket `listening` makes, and says how many did."""
    code = (
        "import socket, os\n"
        f"sock = {listening}\nsock.listen()\nprint('ready', flush=True)\n"
        "while True:\n peer, _ = sock.accept()\n print('visited', flush=True)\n peer.sendall(b'host speaking'); peer.close()\n"
    )
    process = lab.popen(place, ["/usr/bin/python3", "-c", code])  # type: ignore[arg-type] # a place is a word
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=5)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def visits(process: subprocess.Popen[str]) -> str:
    """What the server said of its visitors, once it is ended."""
    process.kill()
    return process.communicate(timeout=10)[0]


def test_one_sandbox_does_not_reach_another(explaining: Arena) -> None:
    """NET-16: B listens on every address it has; A finds only itself."""
    listens = (
        "server = socket.create_server(('0.0.0.0', 7171)); server.settimeout({wait}); say('up')\n"
        "try:\n peer, _ = server.accept(); peer.sendall(b'B speaking'); say('visited')\nexcept TimeoutError:\n "
        "say('nobody came')"
    )
    attack = (
        "for host in ('198.18.0.254', '127.0.0.1', '11.0.0.2', 'sandbox', '11.0.0.3'):\n"
        " say(host, shown(tcp(host, 7171, b'', seconds=0.3)))"
    )
    heard: list[str] = []
    for attacker, victim, wait in (
        (explaining.open, explaining.open, 1.5),
        (explaining.a, explaining.b, 1.5),
    ):
        if attacker is victim:  # without egressd both share one network
            said = attacker.run(
                f"import threading\ndef serve():\n {listens.format(wait=wait).replace(chr(10), chr(10) + ' ')}\n"
                f"threading.Thread(target=serve).start(); time.sleep(0.2)\nsay(shown(tcp('11.0.0.3', 7171, b'', seconds=1)))"
            )
            assert "B speaking" in said
            continue
        serving = threading.Thread(
            target=lambda v=victim, w=wait: heard.append(v.run(listens.format(wait=w)))
        )
        serving.start()
        time.sleep(0.3)
        said = attacker.run(attack)
        serving.join()
        assert "speaking" not in said
        assert heard == ["up\nnobody came\n"]
    assert len({r["sandbox"] for r in explaining.stand.records(address="198.18.0.254", port=7171)}) == 1
    explaining.life_goes_on()


def test_nothing_comes_in(explaining: Arena) -> None:
    """NET-20: what a sandbox listens on is reached from nowhere else, and no listener of ours stands in the host's network."""
    listens = (
        "import threading\nserver = socket.create_server(('0.0.0.0', 7272)); server.settimeout(1.5)\n"
        "try:\n peer, _ = server.accept(); peer.sendall(b'reverse shell'); say('visited')\nexcept TimeoutError:\n "
        "say('nobody came')"
    )
    comes = (
        "import socket, sys\n"
        "for host, port in {targets}:\n"
        " try:\n  print(socket.create_connection((host, port), 0.4).recv(20))\n except OSError as error:\n  "
        "print(type(error).__name__)\n"
    )
    targets = [("198.18.0.254", 7272), ("127.0.0.1", 7272), ("11.0.0.2", 7272)]
    targets += [("127.0.0.1", port) for port in (15001, 15053, 3128, 1080, 15021, 15090)]
    heard: list[str] = []
    for driver, place, wanted in (
        (explaining.open, "world", [("11.0.0.3", 7272)]),
        (explaining.a, "host", targets),
        (explaining.a, "world", [("11.0.0.2", port) for port in (7272, 15001, 15053, 3128)]),
    ):
        serving = threading.Thread(target=lambda d=driver: heard.append(d.run(listens)))
        serving.start()
        time.sleep(0.3)
        ran = explaining.lab.run(place, ["/usr/bin/python3", "-c", comes.format(targets=wanted)])  # type: ignore[arg-type]
        serving.join()
        assert ("reverse shell" in ran.stdout) == (driver is explaining.open), ran
    assert heard == ["visited\n", "nobody came\n", "nobody came\n"]
    explaining.life_goes_on()


def test_abstract_sockets_of_the_host_do_not_exist_inside(explaining: Arena) -> None:
    """NET-21."""
    name = "\\0containerd-shim/egressd-test"
    listening = f"socket.socket(socket.AF_UNIX); sock.bind('{name}')"
    attack = (
        f"sock = socket.socket(socket.AF_UNIX)\ntry:\n sock.connect('{name}'); say(shown(sock.recv(20)))\nexcept OSError "
        f"as error:\n say(error)\n"
        "say([line.split()[-1] for line in open('/proc/net/unix') if '@' in line])"
    )
    with server(explaining.lab, "open", listening):
        assert "host speaking" in explaining.open.run(attack)
    with server(explaining.lab, "host", listening) as process:
        assert explaining.a.run(attack).endswith("Connection refused\n[]\n")
        assert visits(process) == ""


def test_sockets_on_the_hosts_disk_cannot_be_connected_to(explaining: Arena) -> None:
    """NET-22: wherever they lie and whichever network namespace their service lives in."""
    lab, stand = explaining.lab, explaining.stand
    places = {
        "host": ["/run/egressd-test.sock", "/tmp/egressd-test.sock", f"{lab.home}/agent.sock"],
        "world": ["/var/tmp/egressd-test.sock"],
    }
    if os.geteuid() == 0 and not lab.rootless:
        places["host"].append("/opt/egressd-test.sock")
        places["world"].append("/opt/egressd-other.sock")
    made = [path for paths in places.values() for path in paths]
    attack = (
        f"for path in {made}:\n sock = socket.socket(socket.AF_UNIX)\n"
        " try:\n  sock.connect(path); say(path, shown(sock.recv(20)))\n except OSError as error:\n  say(path, "
        "type(error).__name__)\n"
        "say([name for name in ('SSH_AUTH_SOCK', 'DOCKER_HOST', 'DBUS_SESSION_BUS_ADDRESS', 'GPG_AGENT_INFO') if name in "
        "os.environ])\n"
        f"say(os.path.exists({str(stand.directory / 'control.sock')!r}))"
    )
    with contextlib.ExitStack() as stack:
        for place, paths in places.items():
            for path in paths:
                listening = f"socket.socket(socket.AF_UNIX); sock.bind('{path}'); os.chmod('{path}', 0o777)"
                stack.callback(Path(path).unlink, missing_ok=True)
                stack.enter_context(server(lab, place, listening))
        assert explaining.open.run(attack).count("host speaking") == len(made), "the attack itself works"
        with explaining.another() as driver:
            said = driver.run(attack)
    assert "host speaking" not in said, said
    assert said.endswith("[]\nFalse\n"), said


def test_services_on_the_hosts_loopback_and_other_addresses_are_not_reached(explaining: Arena) -> None:
    """NET-28, NET-29: neither 127.0.0.1 of the host, nor its address, nor a name that leads to it."""
    lab = explaining.lab
    lab.set_name("gateway.lab-origin.com", a=["11.0.0.2"])
    lab.set_name("itself.lab-origin.com", a=["127.0.0.1"])
    attack = (
        "for host in ('127.0.0.1', '127.8.8.8', '::1', '198.18.0.254', '11.0.0.2', '2600:11::2', '0.0.0.0', '::'):\n"
        " say(host, shown(tcp(host, 7373, get('/', 'x'), seconds=2.5)))\n"
        "for host in ('127.0.0.1', 'localhost', '11.0.0.2', '[::1]'):\n"
        " say(host, shown(proxy(b'GET http://%s:7373/ HTTP/1.1\\r\\nHost: %s:7373\\r\\n\\r\\n' % ((host.encode(),) * 2))))\n"
        "for name in ('gateway.lab-origin.com', 'itself.lab-origin.com'):\n say(shown(tls(name, 443, get('/', name), name)))\n"
        "for port in (67, 123, 5353):\n say(shown(udp('11.0.0.2', port)))\n"
        "for port in (22, 111, 2375, 6443, 8080, 10250, 15021, 15090):\n say(shown(tcp('11.0.0.2', port, get('/', 'x'), "
        "seconds=2.5)))"
    )
    everywhere = "socket.create_server(('::', 7373), family=socket.AF_INET6, dualstack_ipv6=True)"
    with server(lab, "open", everywhere):
        shared = attack.partition("for name in")[0]
        for elsewhere in ("'198.18.0.254', ", "'11.0.0.2', ", "'2600:11::2', "):
            shared = shared.replace(elsewhere, "")
        assert explaining.open.run(shared).count("host speaking") == 8, "in a network that is shared it works"
    mark = len(explaining.stand.records())
    lab.forget()
    with server(lab, "host", everywhere) as process:
        said = explaining.a.run(attack, 60)
        assert "host speaking" not in said
        assert visits(process) == ""
    explaining.nothing_reached(asks=("gateway.lab-origin.com", "itself.lab-origin.com"))
    reasons = {r["reason"] for r in explaining.stand.records()[mark:]}
    assert {"floor_own_address", "floor_loopback", "ip_literal", "protocol_not_allowed"} <= reasons, reasons
    explaining.life_goes_on()
