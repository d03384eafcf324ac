"""Installation tokens of a GitHub that checks who asks, for what, and when; a fake, for the real one installs nowhere."""

from __future__ import annotations

import datetime as dt
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from egressd.credentials.providers import github_app
from egressd.credentials.providers.base import SourceFailed
from egressd.credentials.providers.github_app import GitHubApp
from egressd.policy.credential import GitHubAppSource
from tests.credentials.providers.loopback import (
    SANDBOX,
    assert_secret_free,
    failure,
    kept,
    minted,
    private_pem,
    public_pem,
    run,
    shown,
)

APP, INSTALLATION = 4711, 815


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class GitHub:
    """One app's installation: what it holds, what it gave, what was given back. Each request is checked as GitHub does."""

    def __init__(self, key: rsa.RSAPrivateKey, life: float = 3600) -> None:
        self._key = public_pem(key)
        self.life = life
        self.url = ""
        self.holds = {"tools", "Widgets", "secrets"}
        self.may = {"contents": "write", "issues": "write", "metadata": "read"}
        self.asked: list[dict[str, Any]] = []
        self.live: set[str] = set()
        self.claims: list[dict[str, Any]] = []
        self.says: dict[str, Any] = {}
        """What its answer says otherwise than it should."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[GitHub]:
        app = web.Application()
        app.router.add_post("/api/v3/app/installations/{id}/access_tokens", self.give)
        app.router.add_delete("/api/v3/installation/token", self.take_back)
        async with TestServer(app) as server:
            self.url = f"{str(server.make_url('/')).rstrip('/')}/api/v3"
            yield self

    def _check(self, request: web.Request) -> str:
        assert request.headers["X-GitHub-Api-Version"] == "2022-11-28"
        assert request.headers["Accept"] == "application/vnd.github+json"
        assert request.headers["User-Agent"], "GitHub answers 403 without"
        scheme, _, token = request.headers["Authorization"].partition(" ")
        assert scheme == "Bearer"
        return token

    async def give(self, request: web.Request) -> web.Response:
        try:
            claims = jwt.decode(
                self._check(request), self._key, ["RS256"], options={"require": ["iat", "exp", "iss"]}
            )
        except jwt.PyJWTError:
            return web.json_response({"message": "A JSON web token could not be decoded"}, status=401)
        if claims["iss"] != str(APP) or claims["exp"] - time.time() > 600:
            return web.json_response(
                {"message": "'Expiration time' claim ('exp') is too far in the future"}, status=401
            )
        self.claims.append(claims)
        if request.match_info["id"] != str(INSTALLATION):
            return web.json_response({"message": "Not Found"}, status=404)
        asked = await request.json()
        self.asked.append(asked)
        known = {name.lower() for name in self.holds}
        ranks = {"read": 1, "write": 2}
        if not {name.lower() for name in asked["repositories"]} <= known or any(
            ranks[level] > ranks.get(self.may.get(name, ""), 0)
            for name, level in asked["permissions"].items()
        ):
            return web.json_response({"message": "not granted to this installation"}, status=422)
        token = f"ghs_{secrets.token_hex(18)}"
        self.live.add(token)
        end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.life)
        given = [
            name for name in self.holds if name.lower() in {one.lower() for one in asked["repositories"]}
        ]
        full = {"description": "d" * 6000, "owner": {"login": "acme"}}
        answer = {
            "token": token,
            "expires_at": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "permissions": {**asked["permissions"], "metadata": "read"},
            "repository_selection": "selected",
            "repositories": [{"name": name, "full_name": f"acme/{name}", **full} for name in given],
        }
        return web.json_response(answer | self.says, status=201)

    async def take_back(self, request: web.Request) -> web.Response:
        token = self._check(request)
        if token not in self.live:
            return web.json_response({"message": "Bad credentials"}, status=401)
        self.live.discard(token)
        return web.Response(status=204)


def app(github: GitHub, folder: Path, pem: str, **said: Any) -> GitHubApp:
    source = {
        "app_id": APP,
        "installation_id": INSTALLATION,
        "private_key": kept(folder, "app.pem", pem),
        "api": github.url,
        "repositories": ["tools", "widgets"],
        "permissions": {"contents": "read"},
    }
    return github_app.provider("c", GitHubAppSource.model_validate(source | said), None)


def test_a_token_is_for_the_named_repositories_and_permissions(
    key: rsa.RSAPrivateKey, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with GitHub(key).serving() as github:
            given = await minted(app(github, tmp_path, private_pem(key)))
            assert given.material.type == "token"
            assert given.material.value.get_secret_value() in github.live
            assert given.expires is not None
            assert 3590 < given.expires - time.time() < 3601
            assert github.asked == [
                {"repositories": ["tools", "widgets"], "permissions": {"contents": "read"}}
            ]
            claims = github.claims[0]
            assert claims["iat"] <= time.time() - 59, "clocks differ: GitHub takes none from the future"

    run(scene())


def test_a_token_that_is_given_back_is_dead_at_github(key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    async def scene() -> None:
        async with GitHub(key).serving() as github:
            source = app(github, tmp_path, private_pem(key))
            first, second = await source.mint(SANDBOX), await source.mint(SANDBOX)
            assert len(github.live) == 2
            assert first.revoke is not None
            await first.revoke()
            assert second.material.type == "token"
            assert github.live == {second.material.value.get_secret_value()}
            with pytest.raises(SourceFailed, match="answered 401"):
                await first.revoke()
            await source.close()

    run(scene())


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"repository_selection": "all"}, "all repositories"),
        ({"repositories": [{"name": "tools"}, {"name": "secrets"}]}, "another repository"),
        ({"repositories": ["tools"]}, "another repository"),
        ({"repositories": {"tools": 1}}, "another repository"),
        ({"permissions": {"contents": "write"}}, "another permission"),
        ({"permissions": {"contents": "read", "administration": "read"}}, "another permission"),
        ({"permissions": {"contents": "read", "metadata": "write"}}, "another permission"),
        ({"permissions": {"contents": "admin"}}, "another permission"),
        ({"permissions": {"contents": ["read"]}}, "another permission"),
        ({"permissions": ["contents"]}, "another permission"),
        ({"expires_at": "2001-01-01T00:00:00Z"}, "has expired already"),
        ({"expires_at": "never"}, "the answer's expiry is no time"),
    ],
)
def test_a_token_for_more_than_was_asked_is_given_back_and_not_used(
    key: rsa.RSAPrivateKey, tmp_path: Path, says: dict[str, Any], why: str
) -> None:
    async def scene() -> None:
        async with GitHub(key).serving() as github:
            github.says = says
            assert why in str(await failure(app(github, tmp_path, private_pem(key))))
            assert not github.live

    run(scene())


def test_many_repositories_make_a_long_answer(key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    names = [f"repository-{number}" for number in range(40)]

    async def scene() -> None:
        async with GitHub(key).serving() as github:
            github.holds = set(names)
            await minted(app(github, tmp_path, private_pem(key), repositories=names))

    run(scene())


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"app_id": 1}, 401),
        ({"installation_id": 1}, 404),
        ({"repositories": ["elsewhere"]}, 422),
        ({"permissions": {"administration": "write"}}, 422),
    ],
)
def test_what_github_refuses_is_told_by_its_status(
    key: rsa.RSAPrivateKey, tmp_path: Path, said: dict[str, Any], status: int
) -> None:
    async def scene() -> None:
        async with GitHub(key).serving() as github:
            error = await failure(app(github, tmp_path, private_pem(key), **said))
            assert str(error).endswith(f": answered {status}")
            assert_secret_free(shown(error), [private_pem(key)])

    run(scene())


def test_another_apps_key_is_not_enough(key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    other = private_pem(rsa.generate_private_key(65537, 2048))

    async def scene() -> None:
        async with GitHub(key).serving() as github:
            assert "answered 401" in str(await failure(app(github, tmp_path, other)))

    run(scene())


def encrypted(key: rsa.RSAPrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")).decode()


BAD_KEYS: dict[str, Callable[[rsa.RSAPrivateKey], str]] = {
    "no PEM": lambda _: "s3cret-s3cret",
    "half a PEM": lambda key: private_pem(key)[:400],
    "the public half": public_pem,
    "another kind": lambda _: private_pem(ec.generate_private_key(ec.SECP256R1())),
    "behind a password": encrypted,
    "too short": lambda _: private_pem(rsa.generate_private_key(65537, 1024)),
}


@pytest.mark.parametrize("bad", list(BAD_KEYS))
def test_a_key_that_cannot_sign_is_told_and_not_shown(
    key: rsa.RSAPrivateKey, tmp_path: Path, bad: str
) -> None:
    async def scene() -> None:
        async with GitHub(key).serving() as github:
            pem = BAD_KEYS[bad](key)
            error = await failure(app(github, tmp_path, pem))
            assert "the private key" in str(error)
            assert github.asked == []
            assert_secret_free(shown(error), [pem])

    run(scene())
