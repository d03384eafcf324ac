"""Each source of credentials, from what it dials to the origin that lets its token in; and leases that end with the sandbox."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from egressd.lab import Lab
from egressd.lab.guards import Guard
from egressd.lab.issuers import ENTRA, GOOGLE, KUBERNETES, OAUTH
from egressd.lab.stand import HERE, Stand
from tests.e2e.conftest import SHIPPED, build, until
from tests.e2e.keyring import (
    BEARER,
    Holding,
    Inside,
    credentials,
    needles,
    profile,
    search,
    set_guards,
    uses,
)
from tests.e2e.peers import VAULT_HOST, Bao

pytestmark = pytest.mark.e2e

SECRETS = f"{HERE}/secrets"
CA = "/LAB/ca.pem"


def issued(name: str, source: str) -> Holding:
    guard = Guard("header", "authorization", "Bearer ", issuer=name)
    return Holding(name, "{bearer: true}", guard, source=source, host=f"for-{name}.lab-origin.com")


SOURCES = (
    issued(
        "oauth",
        f"{{oauth2: {{token_url: 'https://{OAUTH}/token', client_id: me, client_secret: {{file: {SECRETS}/oauth}},"
        " scopes: [read]}}",
    ),
    issued(
        "google",
        f"{{gcp: {{key: {{file: {SECRETS}/google}}, scopes: [lab], token_url: 'https://{GOOGLE}/token'}}}}",
    ),
    issued(
        "entra",
        f"{{azure: {{tenant_id: lab-tenant, client_id: me, client_secret: {{file: {SECRETS}/entra}},"
        f" scope: 'api://lab/.default', authority: 'https://{ENTRA}'}}}}",
    ),
    issued(
        "kubernetes",
        f"{{kubernetes: {{namespace: lab, service_account: agent, server: 'https://{KUBERNETES}',"
        f" token: {{file: {SECRETS}/kubernetes}}, ca: {CA}}}}}",
    ),
    issued(
        "queue",
        f"{{vault: {{address: 'https://{VAULT_HOST}', auth: {{token: {{file: {SECRETS}/bao}}}}, ca: {CA},"
        " path: rabbitmq/creds/agent, field: password}}",
    ),
)
STORED = Holding(
    "stored",
    "{bearer: true}",
    BEARER,
    source=f"{{vault: {{address: 'https://{VAULT_HOST}', auth: {{token: {{file: {SECRETS}/bao}}}}, ca: {CA},"
    " path: secret/data/agent, field: key}}",
)
ALL = (*SOURCES, STORED)
BY_NAME = {holding.name: holding for holding in ALL}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab, as root where we are root."""
    with build(os.geteuid() != 0) as lab:
        yield lab


@pytest.fixture(autouse=True)
def _empty_records(lab: Lab) -> None:
    lab.forget()


@pytest.fixture(scope="module")
def bao(lab: Lab) -> Bao:
    bao = Bao(lab)
    bao.set("secret/data/agent", {"data": {"key": STORED.secret, "other": "not this one"}})
    return bao


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """What each issuer must be shown, as it knows it; the service account's key beside it."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return {
        "oauth": "me:s3cr3t+/",
        "entra": "me:s3cr3t",
        "kubernetes": "eyTok",
        "google": public,
        "key": private,
    }


@pytest.fixture(scope="module")
def stand(lab: Lab, bao: Bao, shown: dict[str, str]) -> Iterator[Stand]:
    for issuer in ("oauth", "entra", "kubernetes", "google"):
        lab.expect(issuer, shown[issuer])
    set_guards(lab, ALL)
    account = {
        "type": "service_account",
        "client_email": "agent@lab.iam.gserviceaccount.com",
        "private_key": shown["key"],
        "private_key_id": "1",
        "token_uri": f"https://{GOOGLE}/token",
    }
    text = credentials(ALL).replace(CA, lab.ca_file)
    with Stand(lab, profile(ALL), shipped=SHIPPED, credentials=text) as stand:
        stand.secret("oauth", shown["oauth"].partition(":")[2])
        stand.secret("entra", shown["entra"].partition(":")[2])
        stand.secret("kubernetes", shown["kubernetes"])
        stand.secret("google", json.dumps(account))
        stand.secret("bao", bao.token)
        yield stand


@pytest.fixture(scope="module")
def sandbox(stand: Stand) -> Iterator[Inside]:
    with Inside(stand) as inside:
        yield inside


def call(sandbox: Inside, name: str) -> tuple[str, str]:
    ran = sandbox.run(f"curl -sS -m 20 -w '\\n%{{http_code}}' {BY_NAME[name].url}")
    body, _, status = ran.stdout.rpartition("\n")
    return status, body or ran.stderr


@pytest.mark.parametrize("name", list(BY_NAME))
def test_what_a_source_mints_opens_the_origin(
    lab: Lab, stand: Stand, sandbox: Inside, bao: Bao, name: str
) -> None:
    status, body = call(sandbox, name)
    assert status == "200", (body, sandbox.errors())
    assert call(sandbox, name)[0] == "200"
    assert {seen.status for seen in lab.requests(host=BY_NAME[name].at)} == {200}
    records = uses(stand, name)
    assert len({record["lease"] for record in records}) == 1, "one lease for both"
    if name != "stored":
        assert all(record["lease_expires"] for record in records)
    secrets = [*lab.issued(), STORED.secret, bao.token]
    places = {
        "answer": body.encode(),
        "journal": stand.journal.read_bytes(),
        "said": sandbox.errors().encode(),
    }
    assert search(places, needles(secrets)) == []


@pytest.mark.parametrize("name", ["oauth", "google", "entra", "kubernetes"])
def test_an_issuer_that_fails_is_a_refusal_until_it_is_back(
    lab: Lab, stand: Stand, shown: dict[str, str], name: str
) -> None:
    lab.expect(name, "")
    with Inside(stand) as inside:
        status, body = call(inside, name)
        assert (status, "(reason credential_unavailable" in body) == ("502", True), body
        assert lab.requests(host=BY_NAME[name].at) == []
        lab.expect(name, shown[name])
        until(lambda: call(inside, name)[0] == "200", 15, "it is back")
        assert {seen.status for seen in lab.requests(host=BY_NAME[name].at)} == {200}
        told = inside.errors() + body
        assert search({"told": told.encode()}, needles(shown.values())) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_lease_ends_also_when_egressd_is_told_to_end(stand: Stand, bao: Bao, number: int) -> None:
    before = set(bao.leases())
    inside = Inside(stand)
    try:
        assert call(inside, "queue")[0] == "200"
        assert set(bao.leases()) - before
        inside.process.send_signal(number)
        inside.process.wait(20)
        assert set(bao.leases()) == before, "before it ended, not some time later"
    finally:
        inside.close()


def test_leases_are_the_sandboxs_own_and_end_with_it(lab: Lab, stand: Stand, bao: Bao) -> None:
    before, issued_before = set(bao.leases()), len(lab.issued())
    with Inside(stand) as one, Inside(stand) as two:
        assert (call(one, "queue")[0], call(two, "queue")[0]) == ("200", "200")
        passwords = lab.issued()[issued_before:]
        assert len(passwords) == 2, "each has its own"
        assert len(set(bao.leases()) - before) == 2
    assert set(bao.leases()) <= before, "they are revoked"
    for password in passwords:
        argv = [
            "curl",
            "-sS",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "-H",
            f"Authorization: Bearer {password}",
        ]
        assert lab.open_exec([*argv, BY_NAME["queue"].url]).stdout == "401", "its user is gone"
