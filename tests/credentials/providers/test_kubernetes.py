"""Tokens by TokenRequest from an API server that signs, checks and limits them. No real one installs here: this one is a fake."""

from __future__ import annotations

import datetime as dt
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from egressd.credentials.providers import kubernetes
from egressd.credentials.providers.kubernetes import Kubernetes
from egressd.lab.pki import Authority
from egressd.policy.credential import KubernetesSource
from tests.credentials.providers.loopback import (
    assert_secret_free,
    failure,
    kept,
    minted,
    public_pem,
    run,
    shown,
)


class ApiServer:
    """An API server with one caller that it knows; it signs what it gives, with the account and the audiences inside."""

    def __init__(self, least: int = 600, most: int = 3600) -> None:
        self.caller = secrets.token_hex(16)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.url, self.port = "", 0
        self.skew = dt.timedelta()
        """How far its clock is ahead."""
        self._least, self._most = least, most

    @asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
        app = web.Application()
        app.router.add_post("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", self.give)
        scheme = "https" if context is not None else "http"
        server = TestServer(app, scheme=scheme)
        await server.start_server(ssl=context)
        try:
            self.url, self.port = str(server.make_url("")).rstrip("/"), server.port or 0
            yield self
        finally:
            await server.close()

    async def give(self, request: web.Request) -> web.Response:
        now = dt.datetime.now(dt.UTC) + self.skew
        date = {"Date": now.strftime("%a, %d %b %Y %H:%M:%S GMT")}
        if request.headers.get("Authorization") != f"Bearer {self.caller}":
            return web.json_response({"kind": "Status", "reason": "Unauthorized"}, status=401, headers=date)
        place = request.match_info
        if (place["namespace"], place["name"]) != ("agents", "reader"):
            return web.json_response({"kind": "Status", "reason": "Forbidden"}, status=403, headers=date)
        asked = await request.json()
        assert asked["kind"] == "TokenRequest"
        assert asked["apiVersion"] == "authentication.k8s.io/v1"
        spec = asked["spec"]
        if spec["expirationSeconds"] < self._least:
            return web.json_response({"kind": "Status", "reason": "Invalid"}, status=422, headers=date)
        end = now + dt.timedelta(seconds=min(spec["expirationSeconds"], self._most))
        claims = {
            "sub": "system:serviceaccount:agents:reader",
            "exp": end,
            "aud": spec.get("audiences", ["default"]),
        }
        status = {
            "token": jwt.encode(claims, self.key, "ES256"),
            "expirationTimestamp": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return web.json_response({**asked, "status": status}, status=201, headers=date)

    def claims(self, token: str, audience: str) -> dict[str, Any]:
        return dict(jwt.decode(token, public_pem(self.key), ["ES256"], audience=audience, leeway=86400))


def account(server: ApiServer, folder: Path, **said: Any) -> Kubernetes:
    source = {
        "namespace": "agents",
        "service_account": "reader",
        "server": server.url,
        "token": kept(folder, "caller", server.caller),
    }
    return kubernetes.provider("c", KubernetesSource.model_validate(source | said), None)


def test_a_token_is_for_the_audiences_and_no_longer_than_asked(tmp_path: Path) -> None:
    async def scene() -> None:
        async with ApiServer().serving() as server:
            given = await minted(
                account(server, tmp_path, audiences=["registry.example", "other"], duration=900)
            )
            assert given.material.type == "token"
            claims = server.claims(given.material.value.get_secret_value(), "registry.example")
            assert claims["aud"] == ["registry.example", "other"]
            assert given.expires is not None
            assert 890 < given.expires - time.time() <= 901
            assert given.revoke is None

    run(scene())


def test_without_audiences_the_server_chooses_them(tmp_path: Path) -> None:
    async def scene() -> None:
        async with ApiServer().serving() as server:
            given = await minted(account(server, tmp_path))
            assert given.material.type == "token"
            assert server.claims(given.material.value.get_secret_value(), "default")

    run(scene())


def test_what_the_server_shortens_is_short(tmp_path: Path) -> None:
    async def scene() -> None:
        async with ApiServer(most=60).serving() as server:
            given = await minted(account(server, tmp_path, duration=3600))
            assert given.expires is not None
            assert 50 < given.expires - time.time() <= 61

    run(scene())


@pytest.mark.parametrize("hours", [-3, 3], ids=["behind", "ahead"])
def test_a_servers_clock_that_differs_changes_no_lifetime(tmp_path: Path, hours: int) -> None:
    async def scene() -> None:
        async with ApiServer().serving() as server:
            server.skew = dt.timedelta(hours=hours)
            given = await minted(account(server, tmp_path))
            assert given.expires is not None
            assert 590 < given.expires - time.time() <= 601

    run(scene())


@pytest.mark.parametrize(
    ("said", "status"),
    [({"service_account": "admin"}, 403), ({"namespace": "kube-system"}, 403)],
)
def test_what_the_server_refuses_is_told_by_its_status(
    tmp_path: Path, said: dict[str, Any], status: int
) -> None:
    async def scene() -> None:
        async with ApiServer().serving() as server:
            error = await failure(account(server, tmp_path, **said))
            assert str(error).endswith(f": answered {status}")
            assert_secret_free(shown(error), [server.caller])

    run(scene())


@pytest.mark.parametrize("name", ["..", "."])
def test_a_name_leads_to_no_other_resource(tmp_path: Path, name: str) -> None:
    async def scene() -> None:
        async with ApiServer().serving() as server:
            assert "dot segment" in str(await failure(account(server, tmp_path, service_account=name)))

    run(scene())


def test_a_token_that_kubernetes_has_rotated_is_read_anew(tmp_path: Path) -> None:
    async def scene() -> None:
        async with ApiServer().serving() as server:
            source = account(server, tmp_path)
            await minted(source)
            server.caller = secrets.token_hex(16)
            assert "answered 401" in str(await failure(source))
            kept(tmp_path, "caller", server.caller)
            await minted(source)

    run(scene())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Authority, Path]:
    """A pod's own files and variables, without the port."""
    authority = Authority(("127.0.0.1",))
    own = tmp_path / "serviceaccount"
    own.mkdir()
    (own / "ca.crt").write_bytes(authority.root_pem())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    return authority, own


def test_in_a_cluster_its_own_server_token_and_authority_are_used(
    cluster: tuple[Authority, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, own = cluster

    async def scene() -> None:
        async with ApiServer().serving(authority.context("")) as server:
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
            kept(own, "token", f"{server.caller}\n")
            source = KubernetesSource(namespace="agents", service_account="reader")
            given = await minted(Kubernetes(source, own=str(own)))
            assert given.material.type == "token"
            assert server.claims(given.material.value.get_secret_value(), "default")

    run(scene())


def test_in_a_cluster_no_other_authority_vouches_for_it(
    cluster: tuple[Authority, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own = cluster

    async def scene() -> None:
        async with ApiServer().serving(Authority(("127.0.0.1",)).context("")) as server:
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
            kept(own, "token", server.caller)
            source = KubernetesSource(namespace="agents", service_account="reader")
            assert "its certificate is not trusted" in str(await failure(Kubernetes(source, own=str(own))))

    run(scene())


def test_outside_a_cluster_a_server_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    source = KubernetesSource(namespace="agents", service_account="reader")
    assert "`server` is needed" in str(run(failure(Kubernetes(source))))


def test_the_clusters_own_token_is_for_no_other_server() -> None:
    with pytest.raises(ValidationError, match="is not for other servers"):
        KubernetesSource(namespace="agents", service_account="reader", server="https://elsewhere.example")


def test_a_cluster_of_ipv6_is_asked_by_a_bracketed_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    own = tmp_path
    (own / "ca.crt").write_bytes(Authority().root_pem())
    kept(own, "token", secrets.token_hex(16))
    source = KubernetesSource(namespace="agents", service_account="reader")
    error = run(failure(Kubernetes(source, own=str(own))))
    assert str(error) == "[::1]:1: not to be reached"
