"""Entra's tokens, over TLS from a server that checks the secret, or the assertion of another issuer."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from egressd.credentials.lease import Token
from egressd.credentials.providers.azure import provider
from egressd.credentials.providers.base import Minted, Provider
from egressd.lab.pki import Authority
from egressd.policy.credential import AzureSource, SecretRef
from tests.credentials.providers.loopback import (
    Server,
    assert_secret_free,
    failure,
    kept,
    minted,
    private_pem,
    public_pem,
    response,
    run,
    serving,
    shown,
)

TENANT = "11111111-2222-3333-4444-555555555555"
CLIENT = "66666666-7777-8888-9999-000000000000"
SCOPE = "https://storage.azure.com/.default"
SECRET = secrets.token_urlsafe(30)
AUDIENCE = "api://AzureADTokenExchange"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(("127.0.0.1",))


@pytest.fixture(scope="module")
def issuer() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class Entra:
    """A tenant with one application, which has a secret and trusts one issuer."""

    def __init__(self, issuer: rsa.RSAPrivateKey) -> None:
        self.public = public_pem(issuer)
        self.given: list[str] = []
        self.life: Any = 3599

    async def respond(self, line: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        status, answer = self.token(
            line, {name: values[0] for name, values in parse_qs(body.decode()).items()}
        )
        writer.write(response(status, json.dumps(answer), "Content-Type: application/json"))

    def token(self, line: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if line != f"POST /{TENANT}/oauth2/v2.0/token HTTP/1.1":
            return self.refuse(400, "invalid_request", 90002, form)
        if (
            form["grant_type"] != "client_credentials"
            or form["client_id"] != CLIENT
            or form["scope"] != SCOPE
        ):
            return self.refuse(400, "invalid_request", 90023, form)
        if "client_secret" in form:
            if form["client_secret"] != SECRET:
                return self.refuse(401, "invalid_client", 7000215, form)
        else:
            if form["client_assertion_type"] != "urn:ietf:params:oauth:client-assertion-type:jwt-bearer":
                return self.refuse(400, "invalid_request", 90023, form)
            try:
                jwt.decode(form["client_assertion"], self.public, algorithms=["RS256"], audience=AUDIENCE)
            except jwt.InvalidTokenError:
                return self.refuse(401, "invalid_client", 700027, form)
        self.given.append(f"eyJ0{secrets.token_hex(30)}")
        return 200, {"token_type": "Bearer", "expires_in": self.life, "access_token": self.given[-1]}

    def refuse(self, status: int, error: str, code: int, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        words = f"AADSTS{code}: {form}"
        return status, {"error": error, "error_description": words, "error_codes": [code, 123456789]}


def assertion(issuer: rsa.RSAPrivateKey, seconds: int = 600) -> str:
    claims = {"iss": "https://k8s.test", "sub": "system:serviceaccount:a:b", "aud": AUDIENCE}
    return jwt.encode({**claims, "exp": int(time.time()) + seconds}, private_pem(issuer), algorithm="RS256")


def made(url: str, ca_bundle: str | None, **more: Any) -> Provider:
    said = {"tenant_id": TENANT, "client_id": CLIENT, "scope": SCOPE, "authority": url}
    return provider("c", AzureSource.model_validate({**said, **more}), ca_bundle)


@pytest.fixture
def bundle(authority: Authority, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    path.write_bytes(authority.root_pem())
    return str(path)


def asked(entra: Entra, authority: Authority, bundle: str, **more: Any) -> Minted:
    async def scene() -> Minted:
        async with serving(entra.respond, authority.listening_context()) as server:
            return await minted(made(server.url, bundle, **more))

    return run(scene())


def refused(entra: Entra, authority: Authority, bundle: str | None, **more: Any) -> tuple[Exception, Server]:
    async def scene() -> tuple[Exception, Server]:
        async with serving(entra.respond, authority.listening_context()) as server:
            return await failure(made(server.url, bundle, **more)), server

    return run(scene())


def token_of(given: Minted) -> str:
    assert isinstance(given.material, Token)
    return given.material.value.get_secret_value()


def test_a_client_secret_gets_a_token(
    issuer: rsa.RSAPrivateKey, authority: Authority, bundle: str, tmp_path: Path
) -> None:
    entra = Entra(issuer)
    given = asked(entra, authority, bundle, client_secret=kept(tmp_path, "secret", SECRET))
    assert entra.given == [token_of(given)]
    assert given.expires is not None
    assert 3590 < given.expires - time.time() < 3600
    assert_secret_free(repr(given), (token_of(given),))


def test_a_federated_token_gets_one_and_is_read_anew(
    issuer: rsa.RSAPrivateKey, authority: Authority, bundle: str, tmp_path: Path
) -> None:
    entra = Entra(issuer)

    async def scene() -> tuple[Exception, Minted]:
        async with serving(entra.respond, authority.listening_context()) as server:
            ref = kept(tmp_path, "federated", assertion(issuer, -60))
            source = made(server.url, bundle, federated_token=ref)
            old = await failure(source)
            kept(tmp_path, "federated", assertion(issuer) + "\n")
            return old, await minted(source)

    error, given = run(scene())
    assert "AADSTS700027, the federated token's signature is wrong" in str(error)
    assert entra.given == [token_of(given)]


def test_each_mint_asks_anew(
    issuer: rsa.RSAPrivateKey, authority: Authority, bundle: str, tmp_path: Path
) -> None:
    entra = Entra(issuer)
    ref = kept(tmp_path, "secret", SECRET)

    async def scene() -> tuple[Minted, Minted]:
        async with serving(entra.respond, authority.listening_context()) as server:
            source = made(server.url, bundle, client_secret=ref)
            return await minted(source), await minted(source)

    first, second = run(scene())
    assert token_of(first) != token_of(second)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "a wrong secret",
        {"client_secret": "wrong"},
        r"401 (invalid_client); AADSTS7000215, the client secret is wrong",
    ),
    (
        "another tenant",
        {"tenant_id": "contoso.test"},
        "400 (invalid_request); AADSTS90002, there is no such tenant",
    ),
    ("another scope", {"scope": "api://x/.default"}, "AADSTS90023"),
]


@pytest.mark.parametrize(("more", "expected"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refusals_are_told_by_their_codes_alone(
    more: dict[str, Any],
    expected: str,
    issuer: rsa.RSAPrivateKey,
    authority: Authority,
    bundle: str,
    tmp_path: Path,
) -> None:
    wrong = secrets.token_hex(20)
    ref = kept(tmp_path, "secret", wrong if "client_secret" in more else SECRET)
    error, server = refused(Entra(issuer), authority, bundle, **{**more, "client_secret": ref})
    assert expected in str(error)
    assert "123456789" not in str(error)
    assert len(server.lines) == 1, "nothing is tried again"
    assert_secret_free(shown(error), (SECRET, wrong))


@pytest.mark.parametrize(
    "said", [{}, {"client_secret": SecretRef(env="X"), "federated_token": SecretRef(env="X")}]
)
def test_there_is_one_way_to_log_in(said: dict[str, Any]) -> None:
    assert "either" in str(run(failure(made("https://127.0.0.1:1", None, **said))))


def test_an_authority_without_tls_is_not_asked(tmp_path: Path) -> None:
    ref = kept(tmp_path, "secret", SECRET)
    assert "over https alone" in str(run(failure(made("http://127.0.0.1:1", None, client_secret=ref))))


def test_a_server_that_is_not_trusted_gets_no_secret(
    issuer: rsa.RSAPrivateKey, authority: Authority, tmp_path: Path
) -> None:
    error, server = refused(Entra(issuer), authority, None, client_secret=kept(tmp_path, "secret", SECRET))
    assert "certificate is not trusted" in str(error)
    assert server.lines == []
    assert_secret_free(shown(error), (SECRET,))


def test_the_environment_leads_nowhere_else(
    issuer: rsa.RSAPrivateKey,
    authority: Authority,
    bundle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "AZURE_AUTHORITY_HOST", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert token_of(asked(Entra(issuer), authority, bundle, client_secret=kept(tmp_path, "secret", SECRET)))
