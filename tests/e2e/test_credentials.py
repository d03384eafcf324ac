"""Credentials that the sandbox never holds: each way to attach one, in both versions of HTTP, to origins that ask for it."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from egressd.lab.guards import Guard
from egressd.lab.stand import Stand
from tests.e2e.conftest import SHIPPED, build, until
from tests.e2e.keyring import (
    BEARER,
    Holding,
    Inside,
    answers,
    credentials,
    fresh,
    needles,
    profile,
    search,
    set_guards,
    uses,
)
from tests.e2e.test_drills import worker_of

pytestmark = pytest.mark.e2e

VARIABLE = "LAB_BEARER_OF_EGRESSD"
EXEC_CREDENTIAL = (
    '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "%s"}}'
)
HOLDINGS = (
    Holding("header", "{header: x-api-key}", Guard("header", "x-api-key")),
    Holding("bearer", "{bearer: true}", BEARER, source=f"{{env: {VARIABLE}}}"),
    Holding(
        "basic",
        "{basic: x-access-token}",
        Guard("header", "authorization", user="x-access-token"),
        source="{exec: {command: [/bin/cat, /STAND/secrets/basic]}}",
    ),
    Holding("query", "{query: key}", Guard("query", "key"), path="/echo?a=b"),
    Holding("path", "{path: token}", Guard("segment"), path="/bot/{token}/echo"),
    Holding("cookie", "{cookie: sid}", Guard("cookie", "sid"), secret=fresh("sid-lab-", "")),
    Holding(
        "dummy-header",
        "{placeholder: {variable: LAB_DUMMY_HEADER, prefix: sk-lab-, length: 48, headers: [authorization]}}",
        BEARER,
        ask='-H "Authorization: Bearer $LAB_DUMMY_HEADER"',
    ),
    Holding(
        "dummy-query",
        "{placeholder: {variable: LAB_DUMMY_QUERY, prefix: lab_, length: 40, charset: hex, query: [key]}}",
        Guard("query", "key"),
        path="/echo?key=$LAB_DUMMY_QUERY",
    ),
    Holding("strict", "{bearer: true}", BEARER, options=("client_credentials: deny",)),
    Holding("ranged", "{bearer: true}", BEARER, options=("range: true",)),
    Holding("failing", "{bearer: true}", BEARER),
    Holding("socket", "{bearer: true}", BEARER, path="/ws", requests=("WEBSOCKET /ws",)),
)
UNLIKE = {"strict", "ranged", "failing", "socket"}
BY_NAME = {holding.name: holding for holding in HOLDINGS}
WAYS = [holding for holding in HOLDINGS if holding.name not in UNLIKE]
OTHER = """  - id: other
    hosts: [other.lab-origin.com]
    requests: ["GET,POST /**"]
"""


def set_secrets(stand: Stand) -> None:
    """Lays the files that the sources read: with a newline at the end, as an editor leaves it."""
    for holding in HOLDINGS:
        if holding.name not in {"bearer", "basic", "failing"}:
            stand.secret(holding.name, holding.secret + "\n")
    stand.secret("basic", EXEC_CREDENTIAL % BY_NAME["basic"].secret)


def installation(lab: Lab) -> Stand:
    """An installation with a credential for each way, in a lab whose hosts ask for them."""
    lab.set_name("other.lab-origin.com", a=["11.0.0.20"])
    set_guards(lab, HOLDINGS, ("h2", "http/1.1"))
    stand = Stand(lab, profile(HOLDINGS, OTHER), shipped=SHIPPED, credentials=credentials(HOLDINGS))
    set_secrets(stand)
    return stand


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab, as root where we are root."""
    with build(os.geteuid() != 0) as lab:
        yield lab


@pytest.fixture(scope="module")
def vault(lab: Lab) -> Iterator[Stand]:
    """The module's installation."""
    with installation(lab) as stand:
        yield stand


@pytest.fixture(scope="module")
def sandbox(vault: Stand) -> Iterator[Inside]:
    """One sandbox for the module."""
    with Inside(vault, env={VARIABLE: BY_NAME["bearer"].secret}) as inside:
        yield inside


@pytest.fixture(autouse=True)
def _empty_records(lab: Lab) -> None:
    lab.forget()


def curl(sandbox: Inside, arguments: str) -> tuple[str, str]:
    """The status and the body of one request."""
    ran = sandbox.run(f"curl -gsS -m 15 -w '\\n%{{http_code}}' {arguments}")
    assert ran.returncode == 0, ran
    body, _, status = ran.stdout.rpartition("\n")
    return status, body


def call(sandbox: Inside, holding: Holding, more: str = "") -> tuple[str, str]:
    return curl(sandbox, f'{holding.ask} {more} "{holding.url}"')


@pytest.mark.parametrize("version", ["http1.1", "http2"])
@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_a_request_arrives_with_a_key_that_the_sandbox_does_not_hold(
    lab: Lab, vault: Stand, sandbox: Inside, way: Holding, version: str
) -> None:
    before = len(uses(vault, way.name))
    status, body = call(sandbox, way, f"--{version}")
    assert status == "200", body
    (seen,) = lab.requests(host=way.at)
    assert seen.status == 200
    assert seen.tls
    assert search({"answer": body.encode()}, needles([way.secret])) == []
    (record,) = uses(vault, way.name)[before:]
    assert record["lease"]
    assert record["verdict"] == "allow"


OWN_KEYS = {
    "the same field": "-H 'x-api-key: sk-attacker'",
    "twice": "-H 'x-api-key: a' -H 'X-API-Key: sk-attacker'",
    "another field": "-H 'Authorization: Bearer sk-attacker'",
    "the fields of others": "-H 'api-key: sk-attacker' -H 'x-goog-api-key: sk-attacker'",
    "a cookie": "-b 'session=sk-attacker'",
    "user and password": "-u me:sk-attacker",
    "named by Connection": "-H 'Connection: x-api-key' -H 'x-api-key: sk-attacker'",
}


@pytest.mark.parametrize(
    ("own", "version"),
    [
        pytest.param(own, version, id=f"{title}, {version}")
        for title, own in OWN_KEYS.items()
        for version in ("http1.1", "http2")
        if (version, title) != ("http2", "named by Connection")  # HTTP/2 has no such field
    ],
)
def test_the_attackers_own_key_is_stripped(lab: Lab, sandbox: Inside, own: str, version: str) -> None:
    status, body = call(sandbox, BY_NAME["header"], f"--{version} {own}")
    assert status == "200", body
    (seen,) = lab.requests()
    assert [value for name, value in seen.headers if name == "x-api-key"] == [BY_NAME["header"].secret]
    told = str(seen.headers) + seen.target
    assert search({"origin": told.encode()}, needles(["sk-attacker"], ["me"])) == []


def test_a_client_of_the_proxy_gets_it_too(lab: Lab, sandbox: Inside) -> None:
    assert call(sandbox, BY_NAME["header"], "-x http://127.0.0.1:3128")[0] == "200"
    assert [seen.status for seen in lab.requests()] == [200]


def test_a_websocket_opens_with_it(lab: Lab, vault: Stand, sandbox: Inside) -> None:
    upgrade = "--http1.1 -H 'Connection: Upgrade' -H 'Upgrade: websocket' -H 'Sec-WebSocket-Version: 13'"
    key = "-H 'Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==' -H 'Authorization: Bearer sk-attacker'"
    ran = sandbox.run(f"curl -sSi -m 1 {upgrade} {key} {BY_NAME['socket'].url}")
    assert ran.stdout.startswith("HTTP/1.1 101"), ran
    (seen,) = lab.requests()
    assert seen.header("authorization") == f"Bearer {BY_NAME['socket'].secret}"
    assert uses(vault, "socket")


@pytest.mark.parametrize("query", ["key=sk-attacker", "KEY=sk-attacker", "a=b&api_key=sk-attacker&c=d"])
def test_the_attackers_own_key_in_the_query_is_stripped_or_refused(
    lab: Lab, sandbox: Inside, query: str
) -> None:
    status, _ = curl(sandbox, f"'https://query.lab-origin.com/echo?{query}'")
    assert status in {"200", "403"}
    assert "sk-attacker" not in "".join(seen.target for seen in lab.requests())


@pytest.mark.parametrize(
    "own",
    [
        "-H 'Authorization: Bearer sk-attacker'",
        "-H 'x-api-key: sk-attacker'",
        "-b 'a=b'",
        "-G -d api_key=sk-attacker",
    ],
)
def test_where_it_says_deny_the_attackers_own_key_is_refused(
    lab: Lab, vault: Stand, sandbox: Inside, own: str
) -> None:
    status, body = call(sandbox, BY_NAME["strict"], own)
    assert (status, "(reason client_credentials" in body) == ("403", True), body
    assert lab.requests() == []
    assert call(sandbox, BY_NAME["strict"])[0] == "200"


@pytest.mark.parametrize("to", ["https://other.lab-origin.com/echo", "https://evil-lab.com/"])
@pytest.mark.parametrize("name", ["bearer", "dummy-header"])
def test_a_redirect_carries_nothing(lab: Lab, sandbox: Inside, name: str, to: str) -> None:
    way = BY_NAME[name]
    url = f'"https://{way.at}/redirect?to={to}"'
    sandbox.run(f"curl -gsS -m 15 -L --location-trusted {way.ask} {url}")
    told = str([(seen.target, seen.headers) for seen in lab.requests(host="other.lab-origin.com")])
    assert search({"other": told.encode()}, needles([way.secret])) == []
    assert lab.attacker_hits() == []


def test_a_placeholder_that_goes_elsewhere_is_refused_as_a_leak(
    lab: Lab, vault: Stand, sandbox: Inside
) -> None:
    status, body = curl(
        sandbox, '-H "Authorization: Bearer $LAB_DUMMY_HEADER" https://other.lab-origin.com/echo'
    )
    assert status == "403", body
    assert lab.requests() == []
    reasons = {record["reason"] for record in vault.records(event="decision", host="other.lab-origin.com")}
    assert "placeholder_leak" in reasons, reasons


def test_in_clear_nothing_is_attached(lab: Lab, sandbox: Inside) -> None:
    status, _ = curl(sandbox, "http://header.lab-origin.com/echo")
    assert status == "403"
    assert lab.requests() == []


@pytest.mark.parametrize("kind", ["self-signed", "wrong-name"])
def test_an_origin_that_is_not_the_one_gets_nothing(lab: Lab, sandbox: Inside, kind: str) -> None:
    way = BY_NAME["ranged"]
    lab.set_certificate(way.at, kind)
    try:
        status, _ = call(sandbox, way)
        assert status == "502"
        assert lab.requests() == []
    finally:
        lab.set_certificate(way.at, "good")


SHAPES = ("plain", "split", "events", "gzip", "deflate", "json", "base64", "url", "head", "ranges", "br")


@pytest.mark.parametrize("version", ["http1.1", "http2"])
@pytest.mark.parametrize("name", ["header", "basic", "query"])
def test_what_an_origin_says_back_is_masked(sandbox: Inside, name: str, version: str) -> None:
    way = BY_NAME[name]
    said = answers(sandbox, [f"https://{way.at}/mirror?as={shape}" for shape in SHAPES], f"--{version}")
    assert len(said) == len(SHAPES)
    for shape, (status, answer) in zip(SHAPES, said, strict=True):
        assert search({shape: answer.encode("latin-1")}, needles([way.secret])) == []
        assert status == ("502" if shape == "br" else "200"), answer
        assert ("(reason unscannable" in answer) == (shape == "br"), answer


def test_a_range_is_taken_out_unless_the_credential_says_otherwise(lab: Lab, sandbox: Inside) -> None:
    for name, wanted in (("header", "200"), ("ranged", "206")):
        status, body = curl(sandbox, f"--http1.1 -r 0-9 'https://{BY_NAME[name].at}/mirror?as=ranges'")
        assert status == wanted, body
    assert [seen.header("range") for seen in lab.requests()] == [None, "bytes=0-9"]


def test_the_first_event_is_not_held_back(sandbox: Inside) -> None:
    ran = sandbox.run(
        f"curl -sSN -o /dev/null -w '%{{time_starttransfer}} %{{time_total}}' 'https://{BY_NAME['bearer'].at}/sse?events=3&gap=0.5'"
    )
    first, last = map(float, ran.stdout.split())
    assert first < 0.5
    assert last > 0.9


def test_without_its_source_nothing_is_sent_and_it_comes_back_without_a_restart(
    lab: Lab, vault: Stand, sandbox: Inside
) -> None:
    way = BY_NAME["failing"]
    status, body = call(sandbox, way)
    assert (status, "(reason credential_unavailable" in body) == ("502", True), body
    assert lab.requests() == []
    vault.secret("failing", way.secret)
    until(lambda: call(sandbox, way)[0] == "200", 10, "the credential is back")
    assert {seen.status for seen in lab.requests()} == {200}, "never a bare request"


def test_a_new_worker_gets_leases_of_its_own_and_control_reads_a_changed_file(
    lab: Lab, vault: Stand, sandbox: Inside
) -> None:
    for name in ("bearer", "dummy-header", "ranged"):
        assert call(sandbox, BY_NAME[name])[0] == "200"
    changed = dataclasses.replace(BY_NAME["ranged"], secret=fresh())
    vault.secret("ranged", changed.secret)
    set_guards(lab, [changed], ("h2", "http/1.1"))
    os.kill(worker_of(sandbox.process.pid), signal.SIGKILL)
    until(lambda: call_or_none(sandbox, BY_NAME["bearer"]) == "200", 15, "a new worker")
    assert call(sandbox, BY_NAME["dummy-header"])[0] == "200", "its dummy is the same"
    assert call(sandbox, changed)[0] == "200", "the file was read again"


def call_or_none(sandbox: Inside, way: Holding) -> str:
    return sandbox.run(f"curl -gsS -m 10 -o /dev/null -w '%{{http_code}}' {way.ask} '{way.url}'").stdout


@pytest.mark.root
def test_all_of_it_works_rootless_too() -> None:
    with build(True) as lab, installation(lab) as stand:
        with Inside(stand, env={VARIABLE: BY_NAME["bearer"].secret}) as sandbox:
            for way in WAYS:
                for version in ("--http1.1", "--http2"):
                    status, body = call(sandbox, way, version)
                    assert status == "200", (way, body)
                assert search({"answer": body.encode()}, needles([way.secret])) == []
            assert call(sandbox, BY_NAME["failing"])[0] == "502"
        assert {seen.status for seen in lab.requests()} == {200}
        assert search({"said": sandbox.errors().encode()}, needles([way.secret for way in HOLDINGS])) == []
