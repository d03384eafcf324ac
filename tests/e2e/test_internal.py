"""egressd.internal from inside: who I am, what I may, what I was refused; for this sandbox alone, and nothing leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from egressd.lab.stand import Stand
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

URL = "http://egressd.internal"


def sh(stand: Stand, text: str, *flags: str) -> str:
    ran = stand.run(["sh", "-c", text], flags=flags)
    assert ran.returncode == 0, ran
    return ran.stdout


def own_records(stand: Stand) -> list[tuple[Any, ...]]:
    return [
        (record["layer"], record["verdict"], record["reason"])
        for record in stand.attempts()
        if record.get("host") == "egressd.internal"
    ]


def test_it_answers_in_clear_and_over_tls_by_the_certificate_that_is_already_trusted(stand: Stand) -> None:
    shown = sh(stand, f"curl -sS {URL}/; curl -sS https://egressd.internal/whoami", "--label", "task=4711")
    assert shown.startswith("egressd is the only way out of this sandbox")
    assert "profile: lab" in shown
    assert 'label "task": "4711"' in shown
    [ready] = stand.records(event="sandbox", detail="ready")
    assert f"sandbox: {ready['sandbox']}" in shown
    records = own_records(stand)
    assert {record[1:] for record in records} == {("allow", "internal_page")}
    assert [layer for layer, *_ in records if layer != "dns"] == ["connection", "request"] * 2
    assert stand.lab.dns_queries() == []
    assert stand.lab.packets_lost() == 0


def test_a_client_that_offers_http_2_alone_gets_it(stand: Stand) -> None:
    shown = sh(
        stand,
        "openssl s_client -alpn h2 -connect egressd.internal:443 </dev/null 2>&1 | grep -E 'ALPN|Verify'",
    )
    assert "ALPN protocol: h2" in shown
    assert "Verify return code: 0" in shown


def test_dns_knows_one_address_for_it_and_nothing_else(stand: Stand) -> None:
    shown = sh(
        stand,
        "dig +noall +answer egressd.internal; dig +short AAAA egressd.internal; dig +short TXT egressd.internal;"
        "dig +noall +comments x.egressd.internal | grep -o NXDOMAIN",
    )
    assert shown.split() == ["egressd.internal.", "60", "IN", "A", "198.18.0.3", "NXDOMAIN"]
    assert own_records(stand)[0] == ("dns", "allow", "internal_page")


def test_a_query_a_connection_and_its_request_are_one_story(stand: Stand) -> None:
    sh(stand, f"curl -4 -sS {URL}/whoami")
    records = [record for record in stand.attempts() if record.get("host") == "egressd.internal"]
    assert [record["layer"] for record in records] == ["dns", "connection", "request"]
    assert len({record["root_id"] for record in records}) == 1
    ends = [record for record in stand.records(event="end") if record.get("host") == "egressd.internal"]
    assert [(end["layer"], end["reason"]) for end in ends] == [
        ("request", "completed"),
        ("connection", "completed"),
    ]
    assert "upstream" not in ends[0]


def test_the_policy_is_the_one_in_force(stand: Stand) -> None:
    told = json.loads(sh(stand, f"curl -sS -H 'Accept: application/json' {URL}/policy"))
    rules = {entry["rule"]: entry for entry in told["entries"]}
    assert rules["pinned"]["treatment"] == "tunnel"
    assert rules["api"]["requests"] == ["GET,HEAD /**", "POST /upload", "POST /echo", "POST /early"]
    assert rules["no-paste"]["effect"] == "deny"
    assert rules["api"]["place"].startswith("profiles/lab.yaml:")
    shown = sh(stand, f"curl -sS {URL}/policy")
    assert "ALLOWED: api.lab-origin.com\n" in shown
    assert str(stand.rules) not in shown
    assert "known sink" not in shown


def test_a_denial_can_be_read_there_afterwards(stand: Stand) -> None:
    shown = sh(
        stand,
        "curl -sS -o /dev/null https://api.lab-origin.com/x -X DELETE; curl -sS -o /dev/null http://11.6.6.6/;"
        f"curl -sS -o /dev/null https://private.lab-origin.com/; curl -sS {URL}/denials",
    )
    assert "DELETE https://api.lab-origin.com/x\n  reason: method_not_allowed: " in shown
    assert "GET http://(a bare address)/\n  reason: ip_literal: " in shown
    assert "GET https://private.lab-origin.com/\n  reason: special_address: " in shown
    assert "hint: Use the host's name." in shown
    assert "11.6.6.6" not in shown
    assert "10.20." not in shown
    denied = {record["attempt_id"] for record in stand.attempts() if record["verdict"] == "deny"}
    assert {line.split()[1] for line in shown.splitlines() if line.startswith("  attempt: ")} <= denied | {
        record["attempt_id"] for record in stand.records(event="end")
    }


def test_the_certificate_is_the_authority_s_public_one(stand: Stand) -> None:
    shown = sh(stand, f"curl -sS {URL}/ca.crt")
    assert shown == (stand.directory / "ca" / "ca.crt").read_text(encoding="utf-8")
    assert "PRIVATE" not in shown


@pytest.mark.parametrize(
    ("curl", "status", "reason"),
    [
        pytest.param(f"-X POST {URL}/", 405, "method_not_allowed", id="POST"),
        pytest.param(f"-d x {URL}/policy", 405, "method_not_allowed", id="a body"),
        pytest.param(f"{URL}/etc/passwd", 404, "path_not_allowed", id="no such page"),
        pytest.param(
            f"-H 'Host: api.lab-origin.com' {URL}/", 403, "authority_mismatch", id="an allowed Host"
        ),
        pytest.param(
            "-H 'Host: evil-lab.com' http://198.18.0.3/", 403, "authority_mismatch", id="a denied Host"
        ),
        pytest.param("http://198.18.0.3/", 403, "authority_mismatch", id="the address as Host"),
        pytest.param(f"{URL}:8080/", 403, "port_not_allowed", id="another port"),
        pytest.param("https://egressd.internal:8443/", 403, "port_not_allowed", id="another port over TLS"),
        pytest.param(
            "--connect-to api.lab-origin.com:80:198.18.0.3:80 http://api.lab-origin.com/",
            403,
            "authority_mismatch",
            id="an allowed name at its address",
        ),
        pytest.param(
            f"--connect-to egressd.internal:80:www.lab-origin.com:80 {URL}/whoami",
            403,
            "authority_mismatch",
            id="its name at an allowed address",
        ),
    ],
)
def test_what_is_not_answered_is_refused_like_anything_else(
    stand: Stand, curl: str, status: int, reason: str
) -> None:
    shown = sh(stand, f"curl -sS -m 20 -w '%{{http_code}}' {curl}")
    assert shown.endswith(str(status)), shown
    assert f"(reason {reason})" in shown
    assert stand.lab.requests() == []


def test_other_ports_and_other_talk_are_refused(stand: Stand) -> None:
    sh(stand, "echo SSH-2.0-x | timeout 5 nc -w 3 egressd.internal 22 || true")
    assert own_records(stand)[-1] == ("connection", "deny", "port_not_allowed")


def test_the_explicit_proxy_leads_there_too(stand: Stand) -> None:
    shown = sh(
        stand,
        f"curl -sS -x http://127.0.0.1:3128 {URL}/whoami; curl -sS -p -x http://127.0.0.1:3128 {URL}/whoami;"
        "curl -sS -x http://127.0.0.1:3128 https://egressd.internal/whoami;"
        "curl -sS -x http://127.0.0.1:3128 http://egressd.internal:8080/whoami",
    )
    assert shown.count("profile: lab") == 3
    assert "(reason port_not_allowed)" in shown


def test_each_sandbox_is_told_of_itself_alone(stand: Stand) -> None:
    wait = "timeout 60 sh -c 'until [ -e done ]; do sleep 0.1; done'"
    first = stand.start(
        ["sh", "-c", f"curl -sS -o /dev/null https://first.evil-lab.com/; touch ready; {wait}"]
    )
    try:
        until((stand.workspace / "ready").exists, 30, "the first sandbox's denial")
        second = sh(
            stand, f"curl -sS -o /dev/null https://second.evil-lab.com/; curl -sS {URL}/denials {URL}/whoami"
        )
    finally:
        (stand.workspace / "done").touch()
        first.communicate(timeout=30)
    assert "second.evil-lab.com" in second
    assert "first.evil-lab.com" not in second
    assert {record["sandbox"] for record in stand.records(host="first.evil-lab.com")}.isdisjoint(
        second.split()
    )
