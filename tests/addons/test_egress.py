"""addons/egress.py in a real mitmdump: what the rules allow works, all else is refused, and whatever fails lets nothing out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from egressd.lab import Lab
from tests.addons.conftest import ROOT, RULES, Proxy, start

pytestmark = pytest.mark.e2e

SCRIPT = ROOT / "addons" / "egress.py"


def nothing_left(lab: Lab) -> bool:
    return lab.requests() == [] and lab.attacker_hits() == [] and lab.metadata_hits() == []


# under rules


def test_what_a_rule_allows_arrives(proxy: Proxy) -> None:
    assert proxy.curl("https://api.lab-origin.com/n").stdout == "1[200]"
    assert proxy.curl("http://www.lab-origin.com/n").stdout == "1[200]"
    assert proxy.curl("https://api.lab-origin.com/upload", "-d", "hello").stdout.endswith("[200]")
    assert [(r.host, r.method, r.path) for r in proxy.lab.requests()] == [
        ("api.lab-origin.com", "GET", "/n"),
        ("www.lab-origin.com", "GET", "/n"),
        ("api.lab-origin.com", "POST", "/upload"),
    ]
    end = proxy.record(event="end", layer="request", path="/upload")
    assert (end["reason"], end["bytes_up"], end["status"]) == ("completed", 5, 200)


def test_keep_alive_is_judged_request_by_request(proxy: Proxy) -> None:
    ran = proxy.curl(
        "http://www.lab-origin.com/n", "http://evil-lab.com/", "http://www.lab-origin.com/n", "--proxytunnel",
        "http://www.lab-origin.com/n", "--next", "-x", f"http://127.0.0.1:{proxy.port}", "http://www.lab-origin.com/n",
    )  # fmt: skip
    assert "evil-lab.com" not in {request.host for request in proxy.lab.requests()}
    assert ran.stdout.count("[200]") + ran.stdout.count("1") >= 3
    ran = proxy.curl(
        "https://api.lab-origin.com/n",
        "https://api.lab-origin.com/n",
        "-X",
        "DELETE",
        "https://api.lab-origin.com/n",
    )
    assert "(reason method_not_allowed)" in ran.stdout


def test_a_large_body_streams_both_ways(proxy: Proxy) -> None:
    assert proxy.sh(
        f"head -c 30000000 /dev/zero | curl -sS -m 60 -x http://127.0.0.1:{proxy.port} -T - -X POST http://www.lab-origin.com/upload"
    ).startswith('{"n": 30000000')
    ran = proxy.curl(
        "-o", "/dev/null", "-w", "%{size_download}", "https://api.lab-origin.com/big?bytes=30000000"
    )
    assert ran.stdout.endswith("30000000"), ran


DENIED = [
    pytest.param(["http://evil-lab.com/"], "not_allowed", 403, id="a name no rule allows"),
    pytest.param(["https://api.lab-origin.com/n", "-X", "DELETE"], "method_not_allowed", 403, id="another method"),
    pytest.param(["http://api.lab-origin.com/n"], "scheme_not_allowed", 403, id="another scheme"),
    pytest.param(["http://169.254.169.254/latest/"], "floor_metadata", 403, id="metadata"),
    pytest.param(["http://2852039166/latest/"], "floor_metadata", 403, id="metadata in decimal"),
    pytest.param(["http://[::ffff:169.254.169.254]/"], "floor_metadata", 403, id="metadata v4-mapped"),
    pytest.param(["http://127.0.0.1/"], "floor_loopback", 403, id="loopback"),
    pytest.param(["http://11.6.6.6/"], "ip_literal", 403, id="a bare address"),
    pytest.param(["https://private.lab-origin.com/"], "special_address", 403, id="a name that leads inside"),
    pytest.param(["https://metadata.lab-origin.com/"], "floor_metadata", 403, id="a name that leads to metadata"),
    pytest.param(["https://loopback.lab-origin.com/"], "floor_loopback", 403, id="a name that leads to loopback"),
    pytest.param(["https://servfail.lab-origin.com/"], "upstream_dns", 502, id="a name without an answer"),
    pytest.param(
        ["https://api.lab-origin.com/n", "-H", "Host: evil-lab.com"], "authority_mismatch", 403, id="another Host in TLS"
    ),
    pytest.param(
        ["http://www.lab-origin.com/n", "-H", "Host: evil-lab.com"], "authority_mismatch", 403, id="another Host to the proxy"
    ),
    pytest.param(
        ["--proxytunnel", "http://www.lab-origin.com/n", "-H", "Host: evil-lab.com"],
        "authority_mismatch",
        403,
        id="another Host in a plain tunnel",
    ),
    pytest.param(["https://api.lab-origin.com/n", "-X", "GET", "-d", "x"], "body_not_allowed", 403, id="GET with a body"),
    pytest.param(
        ["https://api.lab-origin.com/ws", "-H", "Upgrade: tcp", "-H", "Connection: upgrade"],
        "upgrade_not_allowed",
        403,
        id="an upgrade",
    ),
    pytest.param(
        ["https://api.lab-origin.com/ws", "-H", "Upgrade: websocket", "-H", "Connection: upgrade",
         "-H", "Sec-WebSocket-Version: 13", "-H", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="],
        "upgrade_not_allowed",
        403,
        id="a WebSocket, which a rule allows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("curl", "reason", "status"), DENIED)
def test_a_denial_has_egressd_s_own_page_and_nothing_leaves(
    proxy: Proxy, curl: list[str], reason: str, status: int
) -> None:
    ran = proxy.curl("-g", *curl)
    assert ran.stdout.endswith(f"[{status}]"), ran
    assert f"(reason {reason})" in ran.stdout
    assert "attempt: " in ran.stdout
    assert nothing_left(proxy.lab)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        pytest.param("https://evil-lab.com/", "not_allowed", id="a name no rule allows"),
        pytest.param("https://api.lab-origin.com:8443/", "port_not_allowed", id="another port"),
        pytest.param(
            "https://api.anthropic.com/", "scheme_not_allowed", id="a rule whose bytes are not to be opened"
        ),
        pytest.param("https://169.254.169.254/", "floor_metadata", id="metadata"),
    ],
)
def test_a_denied_connect_is_refused_as_one(proxy: Proxy, url: str, reason: str) -> None:
    ran = proxy.curl("-v", url)
    assert ran.stdout == "[000]"
    assert f"(reason {reason})" in ran.stderr
    assert "CONNECT tunnel failed, response 403" in ran.stderr
    assert nothing_left(proxy.lab)


def test_the_server_name_must_be_the_name_of_the_tunnel(proxy: Proxy) -> None:
    ran = proxy.curl("--connect-to", "evil-lab.com:443:api.lab-origin.com:443", "https://evil-lab.com/")
    assert ran.returncode == 35, ran
    assert proxy.records(layer="connection", reason="sni_mismatch")
    assert nothing_left(proxy.lab)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(r"CONNECT api.lab-origin.com:443 HTTP/1.1\r\n\r\nSSH-2.0-x\r\n", "unknown_protocol", id="SSH in a tunnel"),
        pytest.param(r"CONNECT api.lab-origin.com:443 HTTP/1.1\r\n\r\n\x16\x03\x01\xff\xff", "bad_tls", id="a bad TLS record"),
        pytest.param(r"\x16\x03\x01\x02\x00\x01", "unknown_protocol", id="TLS to the proxy"),
        pytest.param(
            r"CONNECT www.lab-origin.com:80 HTTP/1.1\r\n\r\nCONNECT evil-lab.com:80 HTTP/1.1\r\nHost: x\r\n\r\n",
            "bad_request",
            id="a tunnel in a tunnel",
        ),
        pytest.param(
            r"GET http://www.lab-origin.com/ HTTP/1.1\r\nHost: www.lab-origin.com\r\nHost: evil-lab.com\r\n\r\n",
            "duplicate_host",
            id="two Host fields",
        ),
        pytest.param(
            r"POST http://www.lab-origin.com/upload HTTP/1.1\r\nHost: www.lab-origin.com\r\n"
            r"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            None,
            id="two framings",
        ),
    ],
)  # fmt: skip
def test_raw_bytes_lead_nowhere(proxy: Proxy, sent: str, reason: str | None) -> None:
    answer = proxy.sh(f"printf '{sent}' | timeout 10 nc -q 2 127.0.0.1 {proxy.port} | tr -d '\\0'")
    assert reason is None or proxy.records(reason=reason) or f"(reason {reason})" in answer
    assert nothing_left(proxy.lab)


def test_a_long_upload_that_is_refused_is_cut_off(proxy: Proxy) -> None:
    ran = proxy.sh(
        f"head -c 20000000 /dev/zero | timeout 20 curl -sS -m 15 -x http://127.0.0.1:{proxy.port} -T - -X POST "
        "http://evil-lab.com/ -w '[%{http_code}] %{size_upload}' 2>&1"
    )
    assert int(ran.split()[-1]) < 10_000_000, ran
    assert nothing_left(proxy.lab)


@pytest.mark.parametrize("name", ["expired", "self-signed", "wrong-name"])
def test_an_origin_that_cannot_prove_its_name_gets_no_request(proxy: Proxy, name: str) -> None:
    assert proxy.curl(f"https://{name}.lab-origin.com/").stdout == "[502]"
    assert proxy.lab.requests() == []


def test_every_attempt_is_written_down_once(proxy: Proxy) -> None:
    before = len(proxy.records(event="decision"))
    proxy.curl("https://api.lab-origin.com/echo")
    proxy.curl("http://evil-lab.com/one")
    proxy.curl("https://evil-lab.com/two")
    found = [(r["layer"], r["verdict"], r["reason"]) for r in proxy.records(event="decision")[before:]]
    assert found == [
        ("connection", "allow", "rule"),
        ("request", "allow", "rule"),
        ("request", "deny", "not_allowed"),
        ("connection", "deny", "not_allowed"),
        ("connection", "deny", "not_allowed"),
    ]


def test_egressd_s_own_pages_are_there(proxy: Proxy) -> None:
    ran = proxy.curl("http://egressd.internal/whoami", "https://egressd.internal/ca.crt")
    assert "profile: lab" in ran.stdout
    assert "BEGIN CERTIFICATE" in ran.stdout
    assert nothing_left(proxy.lab)


# without rules, or with bad ones


def test_without_rules_and_profile_everything_is_refused(lab: Lab) -> None:
    with start(lab, rules=None) as proxy:
        proxy.wait_for("everything is refused")
        assert "(reason not_allowed)" in proxy.curl("http://www.lab-origin.com/n").stdout
        assert "(reason not_allowed)" in proxy.curl("-v", "https://api.lab-origin.com/n").stderr
        assert "(reason not_allowed)" in proxy.curl("http://evil-lab.com/").stdout
        assert nothing_left(lab)
        assert lab.dns_queries() == []


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        pytest.param("schema: 1\nprofile: lab\nallow:\n  - host: [x]\n", "profiles/lab.yaml:4:5: unknown_key", id="a mistake"),
        pytest.param(RULES.replace("profile: lab", "profile: other"), "name_mismatch", id="another profile"),
    ],
)  # fmt: skip
def test_bad_rules_do_not_start(lab: Lab, rules: str, says: str) -> None:
    with Proxy(lab, rules=rules) as proxy:
        assert proxy.ends() == 1
        assert says in proxy.said


def test_an_unknown_profile_does_not_start(lab: Lab) -> None:
    with Proxy(lab, egress_profile="nobody") as proxy:
        assert proxy.ends() == 1
        assert "there is no profile 'nobody'; there are: lab" in proxy.said


# mitmproxy's own switches


@pytest.mark.parametrize(
    "option",
    [
        "ssl_insecure=true",
        "stream_large_bodies=1m",
        "ignore_hosts=evil",
        "tcp_hosts=evil",
        "map_remote=|www.lab-origin.com|evil-lab.com",
        "modify_headers=/x-a/b",
        "validate_inbound_headers=false",
        "mode=reverse:http://evil-lab.com",
        "mode=upstream:http://evil-lab.com:3128",
        "mode=transparent",
    ],
)
def test_an_option_that_would_open_it_does_not_start(lab: Lab, option: str) -> None:
    with Proxy(lab, "--set", option) as proxy:
        assert proxy.ends() == 1
        assert "egressd does not run with " in proxy.said


def test_a_configuration_file_cannot_open_it_either(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("ssl_insecure: true\n", encoding="utf-8")
    with Proxy(lab, confdir=str(tmp_path)) as proxy:
        assert proxy.ends() == 1
        assert "egressd does not run with ssl_insecure=True" in proxy.said


@pytest.mark.parametrize(
    "option",
    ["egress_profile=lab", "egress_rules=/tmp", "egress_dns=system"],
    ids=lambda option: str(option).split("=")[0],
)
def test_an_option_given_twice_does_not_leave_an_open_proxy(lab: Lab, option: str) -> None:
    with Proxy(lab, "--set", option, "--set", option) as proxy:
        assert proxy.ends() == 1
        assert "the policy could not be loaded" in proxy.said


def test_eager_connections_are_turned_off(lab: Lab) -> None:
    with start(lab, ["--set", "connection_strategy=eager"]) as proxy:
        proxy.sh(
            f"printf 'CONNECT api.lab-origin.com:443 HTTP/1.1\\r\\n\\r\\n' | timeout 5 nc -q 1 127.0.0.1 {proxy.port}"
        )
        assert lab.packets("host", address="11.0.0.20") == []


def test_a_change_while_it_runs_is_undone(lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "from mitmproxy import ctx, exceptions\n\ndef running():\n"
        "    try:\n        ctx.options.update(ssl_insecure=True)\n"
        "    except exceptions.OptionsError as error:\n        print('undone:', error, ctx.options.ssl_insecure)\n"
    )
    with Proxy(lab, "-s", str(other)) as proxy:
        proxy.wait_for("undone: egressd does not run with ssl_insecure=True; it must be False False")
        assert proxy.curl("https://expired.lab-origin.com/").stdout == "[502]"


@pytest.mark.parametrize("change", ["changed", "deleted"])
def test_a_script_that_is_changed_or_deleted_takes_the_proxy_down(
    lab: Lab, tmp_path: Path, change: str
) -> None:
    script = tmp_path / "egress.py"
    shutil.copy(SCRIPT, script)
    with start(lab, script=script) as proxy:
        proxy.wait_for("egressd: profile lab")
        if change == "changed":
            script.write_text("# nothing\n")
        else:
            script.unlink()
        assert proxy.ends() == 1
        assert "the policy was unloaded" in proxy.said


def test_a_broken_script_does_not_start(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "egress.py"
    script.write_text(SCRIPT.read_text().replace("addons = [Egress()]", "addons = [Egres()]"))
    with Proxy(lab, script=script) as proxy:
        assert proxy.ends() == 1


# what fails, denies


FAULTS = [
    "egressd.gate.inspector.addon:decide",
    "egressd.gate.inspector.addon:bind",
    "egressd.gate.inspector.addon:onward_request",
    "egressd.gate.permission:permit_place",
    "egressd.gate.inspector.exchange:Exchange.commit",
    "egressd.gate.dns.upstream:Resolver.resolve",
    "egressd.gate.dialer:OwnAddresses.__call__",
    "egressd.gate.door.arrival:Recogniser.read",
    "egressd.gate.inspector.exchange:Exchange.__init__",
    "egressd.gate.connection:Connection.__init__",
    "egressd.journal.record:Record.decided",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exception_anywhere_in_the_policy_denies(lab: Lab, tmp_path: Path, fault: str) -> None:
    module, name = fault.split(":")
    breaker = tmp_path / "breaker.py"
    breaker.write_text(
        f"import operator, {module} as module\n"
        f"*path, last = {name.split('.')!r}\n"
        "owner = operator.attrgetter('.'.join(path))(module) if path else module\n"
        "def broken(*_, **__):\n    raise ZeroDivisionError('broken on purpose')\n"
        "def running():\n    setattr(owner, last, broken)\n    print('broken now')\n"
    )
    with start(lab, ["-s", str(breaker)]) as proxy:
        proxy.wait_for("broken now")
        for arguments in (["https://api.lab-origin.com/n"], ["http://www.lab-origin.com/n"]):
            ran = proxy.curl(*arguments)
            if fault == "egressd.gate.door.arrival:Recogniser.read" and arguments[0].startswith("http:"):
                continue  # nothing to recognise on a plain proxy connection
            assert ran.stdout.endswith(("[000]", "[403]", "[502]", "[503]")), (ran, proxy.said)
        hosts = {request.host for request in lab.requests()}
        assert hosts <= ({"www.lab-origin.com"} if fault.endswith("Recogniser.read") else set())
        assert "broken on purpose" in proxy.said


def test_a_journal_that_cannot_be_written_denies(lab: Lab) -> None:
    with start(lab, egress_journal="/dev/full") as proxy:
        proxy.wait_for("egressd: profile lab")
        assert "(reason audit_unavailable)" in proxy.curl("http://www.lab-origin.com/n").stdout
        assert "(reason audit_unavailable)" in proxy.curl("https://api.lab-origin.com/n").stdout
        assert nothing_left(lab)


def test_a_journal_that_cannot_be_opened_does_not_start(lab: Lab) -> None:
    with Proxy(lab, egress_journal="/proc/none/journal.jsonl") as proxy:
        assert proxy.ends() == 1
        assert "egress_journal: " in proxy.said


# SOCKS


def test_socks5_is_judged_alike(lab: Lab) -> None:
    with start(lab, ["--mode", "socks5"]) as proxy:
        proxy.wait_for("egressd: profile lab")
        socks = "socks5h"
        assert proxy.curl("https://api.lab-origin.com/n", proxy=socks).stdout == "1[200]"
        assert proxy.curl("http://www.lab-origin.com/n", proxy=socks).stdout == "1[200]"
        lab.forget()
        assert "(reason not_allowed)" in proxy.curl("https://evil-lab.com/", proxy=socks).stdout
        assert "(reason not_allowed)" in proxy.curl("http://evil-lab.com/", proxy=socks).stdout
        ran = proxy.curl("http://www.lab-origin.com/", "-H", "Host: evil-lab.com", proxy=socks)
        assert "(reason authority_mismatch)" in ran.stdout
        local = "socks5"
        assert "(reason ip_literal)" in proxy.curl("http://www.lab-origin.com/", proxy=local).stdout
        assert lab.requests() == []
        assert lab.attacker_hits() == []


def test_the_readme_names_every_option() -> None:
    told = set(re.findall(r"^\| `(egress_\w+)` \|", (SCRIPT.parent / "README.md").read_text(), re.MULTILINE))
    assert told == set(re.findall(r'add_option\(\s*"(egress_\w+)"', SCRIPT.read_text()))
