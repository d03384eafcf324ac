"""Google's tokens, from a server that checks what a key signed and who may impersonate whom."""

from __future__ import annotations

import asyncio
import datetime as dt
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
from egressd.credentials.providers.base import Minted, Provider
from egressd.credentials.providers.gcp import IAM_SCOPE, provider
from egressd.policy.credential import GcpSource
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

ACCOUNT = "egressd@example-project.iam.gserviceaccount.com"
AGENT = "agent@example-project.iam.gserviceaccount.com"
AUDIENCE = "https://oauth2.googleapis.com/token"
"""Whatever the token endpoint: google-auth signs for Google's own."""
READ = "https://www.googleapis.com/auth/devstorage.read_only"


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class Google:
    """The token endpoint and the IAM Credentials API: a token is given for an assertion that verifies, and known afterwards."""

    def __init__(self, key: rsa.RSAPrivateKey) -> None:
        self.public = public_pem(key)
        self.url = ""
        self.given: dict[str, str] = {}
        """Each token and its scopes."""
        self.lifetimes: list[str] = []

    async def respond(self, line: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        status, answer = (
            self.token(body) if line == "POST /token HTTP/1.1" else self.impersonate(line, body, writer)
        )
        writer.write(response(status, json.dumps(answer), "Content-Type: application/json"))

    def token(self, body: bytes) -> tuple[int, dict[str, Any]]:
        form = parse_qs(body.decode())
        try:
            claims = jwt.decode(form["assertion"][0], self.public, algorithms=["RS256"], audience=AUDIENCE)
        except (jwt.InvalidTokenError, KeyError):
            return 400, {"error": "invalid_grant", "error_description": form.get("assertion")}
        if form["grant_type"] != ["urn:ietf:params:oauth:grant-type:jwt-bearer"] or claims["iss"] != ACCOUNT:
            return 400, {"error": "invalid_request"}
        return 200, {"access_token": self.new(claims["scope"]), "expires_in": 3599, "token_type": "Bearer"}

    def impersonate(self, line: str, body: bytes, writer: asyncio.StreamWriter) -> tuple[int, dict[str, Any]]:
        said = json.loads(body)
        bearer = self.heads.heads[-1].lower().partition("authorization: bearer ")[2].partition("\r\n")[0]
        allowed = self.given.get(bearer) == IAM_SCOPE
        if line != f"POST /v1/projects/-/serviceAccounts/{AGENT}:generateAccessToken HTTP/1.1" or not allowed:
            return 403, {"error": {"status": "PERMISSION_DENIED", "message": bearer}}
        self.lifetimes.append(said["lifetime"])
        end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=int(said["lifetime"].removesuffix("s")))
        return 200, {
            "accessToken": self.new(" ".join(said["scope"])),
            "expireTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def new(self, scopes: str) -> str:
        token = f"ya29.{secrets.token_hex(30)}"
        self.given[token] = scopes
        return token

    heads: Server


def key_json(key: rsa.RSAPrivateKey, **more: str) -> str:
    said = {
        "type": "service_account",
        "project_id": "example-project",
        "private_key_id": "k1",
        "private_key": private_pem(key),
        "client_email": ACCOUNT,
        "client_id": "1",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
    return json.dumps({**said, **more}, indent=2)


def made(folder: Path, key_text: str | None, url: str, **more: Any) -> Provider:
    ref = kept(folder, "key.json", key_text) if key_text is not None else None
    said = {"key": ref, "scopes": [READ], "token_url": f"{url}/token", "iam_url": url}
    return provider("c", GcpSource.model_validate({**said, **more}), None)


def asked(google: Google, folder: Path, key_text: str | None, **more: Any) -> Minted:
    async def scene() -> Minted:
        async with serving(google.respond) as server:
            google.url, google.heads = server.url, server
            return await minted(made(folder, key_text, server.url, **more))

    return run(scene())


def token_of(given: Minted) -> str:
    assert isinstance(given.material, Token)
    return given.material.value.get_secret_value()


def test_a_key_gets_a_token_of_its_own_account(key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    google = Google(key)
    given = asked(google, tmp_path, key_json(key), scopes=[READ, "openid"])
    assert google.given == {token_of(given): f"{READ} openid"}
    assert given.expires is not None
    assert 3590 < given.expires - time.time() < 3600
    assert_secret_free(repr(given), (token_of(given),))


def test_an_account_is_impersonated_for_the_lifetime_that_was_said(
    key: rsa.RSAPrivateKey, tmp_path: Path
) -> None:
    google = Google(key)
    given = asked(google, tmp_path, key_json(key), impersonate=AGENT, lifetime=600)
    assert google.given[token_of(given)] == READ
    assert list(google.given.values()) == [IAM_SCOPE, READ]
    assert google.lifetimes == ["600s"]
    assert given.expires is not None
    assert 590 < given.expires - time.time() < 602


def test_each_mint_asks_anew(key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    google = Google(key)
    first, second = (asked(google, tmp_path, key_json(key)) for _ in range(2))
    assert token_of(first) != token_of(second)


def test_application_default_credentials_are_those_of_egressd_s_surroundings(
    key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    google = Google(key)

    async def scene() -> Minted:
        async with serving(google.respond) as server:
            google.url, google.heads = server.url, server
            path = tmp_path / "adc.json"
            path.write_text(key_json(key, token_uri=f"{server.url}/token"))
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
            return await minted(made(tmp_path, None, server.url, impersonate=AGENT))

    assert google.given[token_of(run(scene()))] == READ


def test_no_surroundings_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none"))
    assert "no application default credentials" in str(
        run(failure(made(tmp_path, None, "http://127.0.0.1:1")))
    )


def refused(google: Google, folder: Path, key_text: str, **more: Any) -> tuple[Exception, list[str]]:
    async def scene() -> tuple[Exception, list[str]]:
        async with serving(google.respond) as server:
            google.url, google.heads = server.url, server
            return await failure(made(folder, key_text, server.url, **more)), server.lines

    return run(scene())


def test_a_key_that_google_does_not_know_is_told_without_its_assertion(
    key: rsa.RSAPrivateKey, tmp_path: Path
) -> None:
    error, lines = refused(Google(rsa.generate_private_key(65537, 2048)), tmp_path, key_json(key))
    assert "answered 400 (invalid_grant)" in str(error)
    assert len(lines) == 1, "nothing is tried again"
    assert_secret_free(shown(error), (private_pem(key), "eyJ0eXAi", "eyJhbGci"))


def test_an_account_that_may_not_be_impersonated_is_told_without_a_token(
    key: rsa.RSAPrivateKey, tmp_path: Path
) -> None:
    google = Google(key)
    error, _ = refused(
        google, tmp_path, key_json(key), impersonate="other@example-project.iam.gserviceaccount.com"
    )
    assert "answered 403" in str(error)
    assert_secret_free(shown(error), (*google.given, private_pem(key)))


KEYS: list[tuple[str, Any, str]] = [
    ("no JSON", "{", "no service account key in JSON"),
    ("a list", "[]", "no service account key in JSON"),
    ("nested without end", "[" * 9000, "no service account key in JSON"),
    ("a user's credentials", json.dumps({"type": "authorized_user", "refresh_token": "r" * 40}), "no service account key"),
    ("no private key", json.dumps({"type": "service_account", "client_email": "r" * 40}), "can sign"),
    ("no key in the key", json.dumps({"type": "service_account", "client_email": ACCOUNT, "private_key": "r" * 40}), "can sign"),
    ("a number for a key", json.dumps({"type": "service_account", "client_email": ACCOUNT, "private_key": 5}), ""),
    ("nothing", "\n", "empty"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in KEYS], ids=[row[0] for row in KEYS])
def test_keys_that_are_none(text: str, expected: str, key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    error, lines = refused(Google(key), tmp_path, text)
    assert expected in str(error)
    assert lines == []
    assert_secret_free(shown(error), ("r" * 40,))


@pytest.mark.parametrize("address", ["a/b", "a:b/../c", "a?b", "a b", "a\u00e9", "x"])
def test_an_address_that_is_none_is_not_asked_for(
    address: str, key: rsa.RSAPrivateKey, tmp_path: Path
) -> None:
    error, lines = refused(Google(key), tmp_path, key_json(key), impersonate=address)
    assert "no service account's address" in str(error)
    assert lines == []


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1/token", "ftp://a/token", "http://127.0.0.1:1@evil.test/", "file:///etc/x"]
)
def test_a_key_leads_nowhere_without_tls(url: str, key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    error, lines = refused(Google(key), tmp_path, key_json(key, token_uri=url), token_url=None)
    assert "neither https nor on this host" in str(error)
    assert lines == []


def test_the_environment_s_proxy_is_not_asked(
    key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert token_of(asked(Google(key), tmp_path, key_json(key)))
