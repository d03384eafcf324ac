"""The explicit wiring with real clients: an internal network without a route, proxies, and names that lead to egressd itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from tests.e2e.conftest import RULES, SHIPPED, build, until
from tests.e2e.explicit import ADDRESSES, OWN, Network, network, reasons

pytestmark = [pytest.mark.e2e, pytest.mark.root]

API = "https://api.lab-origin.com/n"
SHARED = {
    "shared": {"addresses": [OWN], "http": 3128, "socks": 1080, "dns": 53, "direct": {"443": 443, "80": 80}},
    "sandboxes": {"a": {}, "b": {"source": ADDRESSES["b"]}},
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with build(rootless=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def net(lab: Lab) -> Iterator[Network]:
    with Stand(lab, RULES, shipped=SHIPPED) as stand:
        stand.directory.chmod(0o777)
        with network(lab, stand, SHARED) as made:
            yield made


def test_there_is_no_way_but_egressd(net: Network) -> None:
    for script in (
        "curl -sS -m 5 http://11.0.0.20/n",
        "ping -c1 -W1 11.0.0.20",
        "curl -sS -m 5 http://[2600:11::20]/n",
    ):
        assert net.sandboxes["a"].run(script).returncode != 0
    assert net.lab.requests() == []


@pytest.mark.parametrize(
    "option",
    [
        pytest.param("--proxy {http}", id="CONNECT"),
        pytest.param("--proxytunnel --proxy {http}", id="CONNECT, asked for"),
        pytest.param("--proxy-anyauth --proxy {http}", id="CONNECT, after a challenge"),
        pytest.param("--socks5-hostname {login}@{own}:1080", id="SOCKS5 by name"),
        pytest.param("--proxy {socks5h}", id="SOCKS5 by URL"),
    ],
)
def test_curl_by_its_proxy(net: Network, option: str) -> None:
    made = net.made["a"]
    words = option.format(
        http=net.url("a"), socks5h=net.url("a", scheme="socks5h", port=1080),
        login=f"{made['id']}:{made['token']}", own=OWN,
    )  # fmt: skip
    done = net.sandboxes["a"].run(f"curl -sS -m 20 {words} {API}")
    assert done.stdout.isdigit(), done.stderr
    denied = net.sandboxes["a"].run(f"curl -sS -m 20 {words} https://evil-lab.com/")
    assert "(reason not_allowed)" in denied.stdout, denied.stderr
    assert net.lab.attacker_hits() == []


def test_socks_by_an_address_that_a_name_led_to(net: Network) -> None:
    made = net.made["b"]
    words = f"--socks5 {made['id']}:{made['token']}@{OWN}:1080"  # curl asks for the name itself
    assert net.sandboxes["b"].run(f"curl -sS -m 20 {words} {API}").stdout.isdigit()
    told = net.sandboxes["b"].run(f"curl -sS -m 20 {words} https://evil-lab.com/").stdout
    assert "(reason not_allowed)" in told
    assert net.sandboxes["b"].run(f"curl -sSk -m 20 {words} https://11.6.6.6/").returncode != 0
    until(lambda: "ip_literal" in reasons(net.stand.records(event="decision", channel="socks")))
    assert net.lab.attacker_hits() == []


def test_plain_http_in_absolute_form(net: Network) -> None:
    done = net.sandboxes["a"].run(f"curl -sS -m 20 --proxy {net.url('a')} http://www.lab-origin.com/headers")
    assert "www.lab-origin.com" in done.stdout, done.stderr
    assert "proxy-authorization" not in done.stdout.lower()
    [seen] = net.lab.requests(host="www.lab-origin.com", path="/headers")
    assert not [name for name, _ in seen.headers if name.lower().startswith("proxy-")]


@pytest.mark.parametrize(
    ("script", "expects", "denied"),
    [
        pytest.param(
            "curl -sS -m 20 https://api.lab-origin.com/n", "", "curl -fsS -m 20 https://evil-lab.com/", id="curl"
        ),
        pytest.param(
            "rm -rf tools; git clone -q https://github.com/acme/tools tools && ls tools", "",
            "git clone -q https://github.com/other/private private", id="git",
        ),
        pytest.param(
            "python3 -m venv --without-pip v 2>/dev/null; "
            "python3 -m pip download -q --no-deps --no-binary :none: -d . lab-greeting && ls", "lab_greeting",
            "python3 -m pip download -q --no-deps -d . evil-package", id="pip",
        ),
        pytest.param(
            "npm view lab-hello --registry https://registry.npmjs.org/open/ 2>&1 || true", "",
            "npm view lab-hello --registry https://evil-lab.com/", id="npm",
        ),
    ],
)  # fmt: skip
def test_tools_by_the_environment(net: Network, script: str, expects: str, denied: str) -> None:
    inner, before = net.sandboxes["a"], len(net.stand.records())
    allowed = inner.run(f"mkdir -p t && cd t && {script}", env=net.environment("a"))
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    assert expects in allowed.stdout
    allows = [
        r for r in net.stand.records()[before:] if r.get("verdict") == "allow" and r["event"] == "decision"
    ]
    assert {r["channel"] for r in allows if r["layer"] == "connection"} == {"connect"}
    assert inner.run(f"cd t && {denied}", env=net.environment("a")).returncode != 0
    assert net.lab.attacker_hits() == []


# names that lead to egressd itself


def test_a_client_that_knows_no_proxy_gets_there_by_name(net: Network) -> None:
    inner = net.sandboxes["b"]  # its source was named, so that it needs no token to begin with
    assert inner.run(f"curl -sS -m 20 {API}").stdout.isdigit()
    assert "www.lab-origin.com" in inner.run("curl -sS -m 20 http://www.lab-origin.com/headers").stdout
    assert inner.run("getent ahosts api.lab-origin.com").stdout.split()[0] == OWN
    told = inner.run("curl -sS -m 20 https://evil-lab.com/; curl -sS -m 20 http://evil-lab.com/").stdout
    assert told.count("(reason not_allowed)") == 2
    assert "sandbox: " in inner.run("curl -sS -m 20 http://egressd.internal/whoami").stdout
    direct = net.stand.records(event="decision", layer="connection", channel="direct")
    assert {record["source"] for record in direct} == {ADDRESSES["b"]}
    assert {record["sandbox"] for record in direct} == {net.made["b"]["id"]}
    queries = {record["attempt_id"] for record in net.stand.records(event="decision", layer="dns")}
    assert {record["root_id"] for record in direct} <= queries


def test_node_knows_no_proxy_either(net: Network) -> None:
    script = f"node -e \"fetch('{API}').then(r => r.text()).then(t => console.log('got', t))\""
    assert "got " in net.sandboxes["b"].run(script).stdout


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(f"curl -sSk -m 9 https://{OWN}/", "no_sni", id="TLS-03 no server name"),
        pytest.param(f"curl -sS -m 9 -H 'Host: evil-lab.com' http://{OWN}/", "not_allowed", id="a denied Host"),
        pytest.param(f"curl -sS -m 9 -H 'Host: 169.254.169.254' http://{OWN}/", "floor_metadata", id="HTTP-03 metadata"),
        pytest.param(f"curl -sS -m 9 http://{OWN}/", "ip_literal", id="our own address as the host"),
        pytest.param(
            f"curl -sS -m 9 -H 'Host: evil-lab.com' {API}", "authority_mismatch", id="DOMAIN-FRONTING: another Host"
        ),
        pytest.param(
            "curl -sS -m 9 --resolve pastebin.com:443:" + OWN + " https://pastebin.com/", "denied_by_organisation",
            id="a name that was never asked for",
        ),
    ],
)  # fmt: skip
def test_at_our_own_address_every_name_must_agree(net: Network, script: str, reason: str) -> None:
    before = len(net.stand.records())
    net.sandboxes["b"].run(script + " || true")

    def told() -> bool:
        new = net.stand.records()[before:]
        return reason in reasons([record for record in new if record.get("verdict") == "deny"])

    until(told, what=f"a record with {reason}")
    assert net.lab.metadata_hits() == []


# whose it is


def test_cred_16_a_token_is_worth_nothing_from_elsewhere(net: Network) -> None:
    a, b = net.sandboxes["a"], net.sandboxes["b"]
    assert a.run(f"curl -sS -m 20 --proxy {net.url('a')} {API}").stdout.isdigit()
    before = len(net.stand.records())
    for inner, of in ((b, "a"), (a, "b")):
        for words in (f"--proxy {net.url(of)}", f"--proxy {net.url(of, scheme='socks5h', port=1080)}"):
            assert inner.run(f"curl -sS -m 20 {words} {API}").returncode != 0
    wanted = {(net.made[name]["id"], ADDRESSES[name]) for name in ADDRESSES}

    def told() -> bool:
        mismatches = net.stand.records(reason="token_source_mismatch")
        return {(r["sandbox"], r["source"]) for r in mismatches} == wanted

    until(told)
    assert not [r for r in net.stand.records()[before:] if r.get("verdict") == "allow"]


def test_log_08_what_a_client_says_of_itself_names_nobody(net: Network) -> None:
    before = len(net.stand.records())
    url = net.url("b").replace(net.made["b"]["token"], "x")
    done = net.sandboxes["a"].run(f"curl -sS -m 20 -v --proxy {url} {API} 2>&1; true")
    assert "403" in done.stdout
    assert "407" not in done.stdout
    until(lambda: net.stand.records(reason="bad_proxy_token"))
    assert {r["sandbox"] for r in net.stand.records(reason="bad_proxy_token")} == {net.made["a"]["id"]}
    assert not [r for r in net.stand.records()[before:] if r["sandbox"] == net.made["b"]["id"]]


FILLING = f"""
import socket, sys, time
held = []
for port in (3128, 1080):
    for _ in range(300):
        held.append(socket.create_connection(("{OWN}", port), 30))
sys.stdout.write("held")
sys.stdout.flush()
asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end = time.monotonic() + 3
while time.monotonic() < end:
    asker.sendto(b"\\0" * 40, ("{OWN}", 53))
"""


def test_dos_01_a_neighbour_that_fills_the_lobby_and_floods_the_resolver_stops_nobody(net: Network) -> None:
    (net.stand.workspace / "fill.py").write_text(FILLING)
    b = net.sandboxes["b"]
    flood = net.lab.popen("host", b.argv(f"exec python3 {net.stand.workspace}/fill.py"), cwd="/")
    assert flood.stdout is not None
    assert flood.stdout.read(4) == "held"
    for _ in range(3):
        assert net.sandboxes["a"].run(f"curl -sS -m 9 --proxy {net.url('a')} {API}").stdout.isdigit()
    flood.wait(60)
    assert "too_many_connections" in reasons(net.stand.records(event="decision", verdict="deny"))
    assert net.sandboxes["b"].run(f"curl -sS -m 20 {API}").returncode in (
        0,
        6,
    )  # 6: its own queries are spent


def test_no_token_is_written_anywhere(net: Network) -> None:
    for name in ADDRESSES:
        token = net.made[name]["token"]
        for path in net.stand.directory.rglob("*"):
            if path.is_file():
                assert token not in path.read_text(errors="replace"), path


def test_a_worker_that_dies_forgets_no_source(net: Network) -> None:
    a, b = net.sandboxes["a"], net.sandboxes["b"]
    assert a.run(f"curl -sS -m 20 --proxy {net.url('a')} {API}").stdout.isdigit()
    net.ask("kill")
    assert b.run(f"curl -sS -m 20 --proxy {net.url('a')} {API}").returncode != 0
    assert a.run(f"curl -sS -m 20 --proxy {net.url('a')} {API}").stdout.isdigit()
    assert b.run(f"curl -sS -m 20 {API}").stdout.isdigit()


KEPT = """
import http.client, sys, time
from base64 import b64encode
from urllib.parse import urlsplit
proxy, until, opened, asked = urlsplit(sys.argv[1]), time.monotonic() + 9, 0, 0
said = b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
while time.monotonic() < until:
    line = http.client.HTTPSConnection(proxy.hostname, proxy.port, timeout=20)
    line.set_tunnel("api.lab-origin.com", 443, {"Proxy-Authorization": f"Basic {said}"})
    opened += 1
    closes = False
    while not closes and time.monotonic() < until:
        line.request("GET", "/n")
        answer = line.getresponse()
        assert answer.status == 200, answer.status
        answer.read()
        asked += 1
        closes = answer.will_close
        time.sleep(0.01)
    line.close()
print("asked", asked > 50, "opened", opened)
"""


def test_workers_are_replaced_while_clients_go_on_and_no_request_fails(net: Network) -> None:
    a, b = net.sandboxes["a"], net.sandboxes["b"]
    (net.stand.workspace / "kept.py").write_text(KEPT)
    fresh = f"i=0; while [ $i -lt 40 ]; do curl -fsS -m 20 {API} >/dev/null || echo failed; i=$((i+1)); done; echo over"
    h2 = f"curl -fsS --http2 -m 60 --rate 20/s --proxy {net.url('a')} '{API}?[1-120]' -o /dev/null && echo over"
    clients = [
        net.lab.popen("host", one.argv(script), env=one.environment(), cwd="/", stdin=subprocess.DEVNULL)
        for one, script in (
            (a, f"python3 {net.stand.workspace}/kept.py {net.url('a')}"),
            (b, fresh),
            (a, h2),
        )
    ]
    for _ in range(2):
        time.sleep(1)  # the clients are in the middle of their work
        net.ask("roll")
    said = [client.communicate(timeout=90)[0] for client in clients]
    assert said == ["asked True opened 3\n", "over\n", "over\n"]


def test_who_is_revoked_is_a_stranger_and_its_neighbour_is_not(net: Network) -> None:
    net.ask("revoke a")
    a, b = net.sandboxes["a"], net.sandboxes["b"]
    before = len(net.stand.records())
    assert a.run(f"curl -sS -m 20 --proxy {net.url('a')} {API}").returncode != 0
    assert a.run(f"curl -sS -m 9 {API}").returncode != 0
    assert b.run(f"curl -sS -m 20 {API}").stdout.isdigit()

    def mine() -> set[tuple[str, str]]:
        new = [r for r in net.stand.records()[before:] if r.get("source") == ADDRESSES["a"]]
        return {(r["sandbox"], r["verdict"]) for r in new}

    until(mine)
    assert mine() == {("unknown", "deny")}
