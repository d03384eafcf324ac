"""Secrets of a real OpenBao: every way to log in, kinds of secrets, and that what is given back is gone, as the server says."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from egressd.credentials.lease import AwsKeys
from egressd.credentials.providers import vault
from egressd.credentials.providers.base import Minted, SourceFailed
from egressd.credentials.providers.vault import Vault
from egressd.policy.credential import VaultSource
from tests.credentials.providers.loopback import (
    SANDBOX,
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
from tests.credentials.providers.openbao import TEAM, Bao, openbao

DYNAMIC = {"path": "rabbitmq/creds/agent", "field": "password"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bao]:
    with openbao(tmp_path_factory.mktemp("openbao")) as bao:
        yield bao


@pytest.fixture
def bao(server: Bao) -> Iterator[Bao]:
    """Leaves no lease to the next test, and has a short life for them."""
    server.ask("rabbitmq/config/lease", {"ttl": 120, "max_ttl": 600})
    yield server
    server.ask("sys/leases/revoke-prefix/rabbitmq", {})
    server.settle("users", 0)


def source(bao: Bao, auth: dict[str, Any], **said: Any) -> Vault:
    model = VaultSource.model_validate({"address": bao.url, "ca": str(bao.ca), "auth": auth, **said})
    return vault.provider("c", model, None)


def by_role(bao: Bao, folder: Path, namespace: str = "", **settings: Any) -> dict[str, Any]:
    role, secret = bao.approle(f"agent-{secrets.token_hex(4)}", namespace, **settings)
    return {"approle": {"role_id": role, "secret_id": kept(folder, "secret_id", secret)}}


def value(given: Minted) -> str:
    assert given.material.type == "token"
    return given.material.value.get_secret_value()


def left(given: Minted) -> float:
    assert given.expires is not None
    return given.expires - time.time()


# kv


def test_a_field_of_a_kv_secret_is_read_anew_each_time_and_nothing_stays_logged_in(
    bao: Bao, tmp_path: Path
) -> None:
    before = bao.accessors()

    async def scene() -> None:
        bao.ask("secret/data/forge", {"data": {"token": "first-value", "value": "other"}})
        auth = by_role(bao, tmp_path)
        asked = source(bao, auth, path="secret/data/forge", field="token")
        given = await asked.mint(SANDBOX)
        assert (value(given), given.expires, given.revoke, given.renew) == ("first-value", None, None, None)
        bao.ask("secret/data/forge", {"data": {"token": "second-value"}})
        assert value(await asked.mint(SANDBOX)) == "second-value"
        with pytest.raises(SourceFailed, match="answered 403"):
            await source(bao, auth, path="secret/metadata/forge").mint(SANDBOX)
        assert bao.accessors() == before
        await asked.close()

    run(scene())


def test_a_kv_secret_that_will_be_deleted_ends_then(bao: Bao, tmp_path: Path) -> None:
    bao.ask("secret/metadata/brief", {"delete_version_after": "300s"})
    bao.ask("secret/data/brief", {"data": {"value": "v"}})
    assert 280 < left(run(minted(source(bao, by_role(bao, tmp_path), path="secret/data/brief")))) < 301


def test_a_kv_secret_of_the_first_version_is_read(bao: Bao, tmp_path: Path) -> None:
    bao.ask("kv1/forge", {"value": "old-style", "ttl": "10m"})
    given = run(minted(source(bao, by_role(bao, tmp_path), path="/kv1/forge")))
    assert value(given) == "old-style"
    assert 500 < left(given) <= 600


def test_a_token_of_an_identity_ends_when_it_says(bao: Bao, tmp_path: Path) -> None:
    bao.ask("identity/oidc/role/agent", {"key": "default", "ttl": "5m"})
    bao.ask("identity/oidc/key/default", {"allowed_client_ids": "*"})
    given = run(minted(source(bao, by_role(bao, tmp_path), path="identity/oidc/token/agent", field="token")))
    claims = jwt.decode(value(given), options={"verify_signature": False})
    assert left(given) == pytest.approx(claims["exp"] - time.time(), abs=3)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"other": "v"}, "has no field value"),
        ({"value": 5}, "holds no credential"),
        ({"value": {"a": "b"}}, "holds no credential"),
        ({"value": ""}, "empty"),
        ({"value": "v\r\nX-Evil: 1"}, "control character"),
        ({"access_key": "AKIA", "other": "v"}, "has no field value"),
    ],
)
def test_a_field_that_is_no_secret_is_told(bao: Bao, tmp_path: Path, data: dict[str, Any], says: str) -> None:
    bao.ask("secret/data/odd", {"data": data})
    assert says in str(run(failure(source(bao, by_role(bao, tmp_path), path="secret/data/odd"))))


def test_keys_of_aws_are_taken_together(bao: Bao, tmp_path: Path) -> None:
    keys = {"access_key": "AKIAEXAMPLE", "secret_key": "k" * 40, "security_token": "t" * 80}
    bao.ask("secret/data/aws", {"data": keys})
    given = run(minted(source(bao, by_role(bao, tmp_path), path="secret/data/aws"))).material
    assert isinstance(given, AwsKeys)
    assert given.secret_access_key.get_secret_value() == "k" * 40
    assert given.session_token is not None
    assert given.session_token.get_secret_value() == "t" * 80


# ways to log in


def test_a_role_without_power_is_told_by_a_status(bao: Bao, tmp_path: Path) -> None:
    auth = by_role(bao, tmp_path, token_policies="default")
    error = run(failure(source(bao, auth, path="secret/data/forge")))
    assert str(error).endswith(": answered 403")


def test_a_secret_id_that_is_wrong_is_told_by_a_status(bao: Bao, tmp_path: Path) -> None:
    auth = by_role(bao, tmp_path)
    wrong = secrets.token_hex(16)
    kept(tmp_path, "secret_id", wrong)
    error = run(failure(source(bao, auth, path="secret/data/forge")))
    assert str(error).endswith(": answered 400")
    assert_secret_free(shown(error), [wrong])


@pytest.fixture
def federation(bao: Bao) -> ec.EllipticCurvePrivateKey:
    """A key whose JWTs the server takes, where they are for it and not too old."""
    key = ec.generate_private_key(ec.SECP256R1())
    bao.ask("auth/jwt/config", {"jwt_validation_pubkeys": [public_pem(key)], "jwt_supported_algs": ["ES256"]})
    role = {
        "role_type": "jwt",
        "user_claim": "sub",
        "bound_audiences": ["openbao"],
        "token_policies": "agent",
    }
    bao.ask("auth/jwt/role/agent", role)
    return key


@pytest.mark.parametrize(
    ("claims", "status"),
    [({}, None), ({"aud": "elsewhere"}, 400), ({"exp": 1_600_000_000, "iat": 1_500_000_000}, 400)],
    ids=["that fits", "for another audience", "that is old"],
)
def test_a_jwt_logs_in(
    bao: Bao,
    tmp_path: Path,
    federation: ec.EllipticCurvePrivateKey,
    claims: dict[str, Any],
    status: int | None,
) -> None:
    bao.ask("secret/data/forge", {"data": {"value": "v"}})
    now = int(time.time())
    said = {"sub": "egressd", "aud": "openbao", "iat": now, "exp": now + 60} | claims
    token = jwt.encode(said, private_pem(federation), "ES256")
    auth = {"jwt": {"role": "agent", "jwt": kept(tmp_path, "jwt", token)}}
    asked = source(bao, auth, path="secret/data/forge")
    if status is None:
        assert value(run(minted(asked))) == "v"
    else:
        error = run(failure(asked))
        assert str(error).endswith(f": answered {status}")
        assert_secret_free(shown(error), [token])


def test_a_namespace_is_asked_and_no_other(bao: Bao, tmp_path: Path) -> None:
    bao.ask("secret/data/forge", {"data": {"value": "of the root"}})
    bao.ask("secret/data/forge", {"data": {"value": "of the team"}}, namespace=TEAM)
    auth = by_role(bao, tmp_path, TEAM)
    assert value(run(minted(source(bao, auth, path="secret/data/forge", namespace=TEAM)))) == "of the team"
    error = run(failure(source(bao, auth, path="secret/data/forge")))
    assert str(error).endswith(": answered 400")


def test_a_server_that_nobody_vouches_for_is_told_nothing(bao: Bao, tmp_path: Path) -> None:
    model = {"address": bao.url, "auth": by_role(bao, tmp_path), "path": "secret/data/forge"}
    asked = vault.provider("c", VaultSource.model_validate(model), None)
    assert "its certificate is not trusted" in str(run(failure(asked)))


def test_the_environments_token_and_address_are_not_heard(
    bao: Bao, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VAULT_TOKEN", "BAO_TOKEN"):
        monkeypatch.setenv(name, bao.root)
    monkeypatch.setenv("VAULT_ADDR", "http://127.0.0.1:1")
    auth = by_role(bao, tmp_path, token_policies="default")
    assert "answered 403" in str(run(failure(source(bao, auth, path="secret/data/forge"))))


# dynamic secrets


def test_a_dynamic_secret_lives_until_it_is_given_back(bao: Bao, tmp_path: Path) -> None:
    before = bao.accessors()

    async def scene() -> None:
        asked = source(bao, by_role(bao, tmp_path), **DYNAMIC)
        given = await asked.mint(SANDBOX)
        assert list(bao.queue.users.values()) == [value(given)]
        assert len(bao.leases()) == 1
        assert 110 < left(given) <= 120
        assert given.revoke is not None
        await given.revoke()
        await asyncio.to_thread(bao.settle, "users", 0)
        await asyncio.to_thread(bao.settle, "leases", [])
        await given.revoke()  # a second time is nothing
        await asked.close()

    run(scene())
    bao.settle("accessors", before)


def test_each_sandbox_has_its_own_and_one_that_ends_ends_no_other(bao: Bao, tmp_path: Path) -> None:
    async def scene() -> None:
        asked = source(bao, by_role(bao, tmp_path), **DYNAMIC)
        first, second = await asyncio.gather(asked.mint(SANDBOX), asked.mint(SANDBOX))
        assert value(first) != value(second)
        assert first.revoke is not None
        await first.revoke()
        await asyncio.to_thread(bao.settle, "users", 1)
        assert list(bao.queue.users.values()) == [value(second)]
        await asked.close()
        await asyncio.to_thread(bao.settle, "users", 0)

    run(scene())


def test_a_lease_is_renewed_and_its_login_with_it(bao: Bao, tmp_path: Path) -> None:
    async def scene() -> None:
        before = bao.accessors()
        asked = source(bao, by_role(bao, tmp_path, token_ttl="90s"), **DYNAMIC)
        first = await asked.mint(SANDBOX)
        assert 80 < left(first) <= 90
        login = next(iter(bao.accessors() - before))
        ends = bao.lease_end(), bao.token_end(login)
        await asyncio.sleep(1.2)
        assert first.renew is not None
        second = await first.renew()
        assert value(second) == value(first)
        assert left(second) > left(first) + 1
        assert bao.lease_end() > ends[0]
        assert bao.token_end(login) > ends[1]
        assert list(bao.queue.users.values()) == [value(first)]
        assert second.revoke is not None
        await second.revoke()
        await asyncio.to_thread(bao.settle, "users", 0)
        await asked.close()

    run(scene())


def test_a_lease_at_the_end_of_its_longest_life_is_not_renewed(bao: Bao, tmp_path: Path) -> None:
    bao.ask("rabbitmq/config/lease", {"ttl": 4, "max_ttl": 4})

    async def scene() -> None:
        asked = source(bao, by_role(bao, tmp_path), **DYNAMIC)
        given = await asked.mint(SANDBOX)
        await asyncio.sleep(2.2)
        assert given.renew is not None
        with pytest.raises(SourceFailed, match="near the end of its longest life"):
            await given.renew()
        assert list(bao.queue.users.values()) == [value(given)], "what is not renewed still lives"
        await asked.close()

    run(scene())


def test_a_lease_ends_no_later_than_the_login_that_it_hangs_on(bao: Bao, tmp_path: Path) -> None:
    auth = by_role(bao, tmp_path, token_ttl="30s", token_max_ttl="30s")
    assert 20 < left(run(minted(source(bao, auth, **DYNAMIC)))) <= 30


def test_a_dynamic_secret_without_the_field_is_given_back(bao: Bao, tmp_path: Path) -> None:
    before = bao.accessors()
    asked = source(bao, by_role(bao, tmp_path), path="rabbitmq/creds/agent", field="none")
    assert "has no field none" in str(run(failure(asked)))
    bao.settle("users", 0)
    bao.settle("accessors", before)


def test_a_mint_that_nobody_waits_for_is_given_back(bao: Bao, tmp_path: Path) -> None:
    before = bao.accessors()

    async def scene() -> None:
        asked = source(bao, by_role(bao, tmp_path), **DYNAMIC)
        for pause in (0, 0.005, 0.02, 0.05):
            leaving = asyncio.create_task(asked.mint(SANDBOX))
            await asyncio.sleep(pause)
            leaving.cancel()
        await asked.close()

    run(scene())
    bao.settle("users", 0)
    bao.settle("accessors", before)


def test_a_login_of_the_batch_kind_gives_its_lease_back_by_name(bao: Bao, tmp_path: Path) -> None:
    async def scene() -> None:
        policies = {"token_policies": "agent,revoking", "token_type": "batch"}
        asked = source(bao, by_role(bao, tmp_path, **policies), **DYNAMIC)
        given = await asked.mint(SANDBOX)
        assert given.revoke is not None
        await given.revoke()
        await asyncio.to_thread(bao.settle, "users", 0)
        await asked.close()

    run(scene())


# a token of the operator's


def operators(bao: Bao, folder: Path, *policies: str, **said: Any) -> dict[str, Any]:
    token = bao.ask("auth/token/create", {"policies": policies, "ttl": "60s", **said})["auth"]["client_token"]
    return {"token": kept(folder, "token", token)}


def test_a_token_of_the_operators_stays_and_its_leases_go(bao: Bao, tmp_path: Path) -> None:
    auth = operators(bao, tmp_path, "agent", "revoking")
    before = bao.accessors()

    async def scene() -> None:
        asked = source(bao, auth, **DYNAMIC)
        first, second = await asked.mint(SANDBOX), await asked.mint(SANDBOX)
        assert 50 < left(first) <= 60, "a lease dies with its token"
        assert first.revoke is not None
        await first.revoke()
        await asyncio.to_thread(bao.settle, "users", 1)
        assert list(bao.queue.users.values()) == [value(second)]
        await asked.close()

    run(scene())
    assert bao.accessors() == before


def test_a_token_without_the_power_to_revoke_says_so(bao: Bao, tmp_path: Path) -> None:
    async def scene() -> None:
        asked = source(bao, operators(bao, tmp_path, "agent"), **DYNAMIC)
        given = await asked.mint(SANDBOX)
        assert given.revoke is not None
        with pytest.raises(SourceFailed, match="answered 403"):
            await given.revoke()

    run(scene())


def test_a_dynamic_secret_that_fails_under_the_operators_token_is_given_back(
    bao: Bao, tmp_path: Path
) -> None:
    auth = operators(bao, tmp_path, "agent", "revoking")
    run(failure(source(bao, auth, path="rabbitmq/creds/agent", field="none")))
    bao.settle("users", 0)


def test_a_token_that_nobody_knows_is_told_by_a_status(bao: Bao, tmp_path: Path) -> None:
    token = f"s.{secrets.token_hex(16)}"
    error = run(failure(source(bao, {"token": kept(tmp_path, "token", token)}, path="secret/data/forge")))
    assert str(error).endswith(": answered 403")
    assert_secret_free(shown(error), [token])


# what a server of that name might answer


LOGIN = {"client_token": "t" * 20, "lease_duration": 60, "renewable": True, "token_type": "service"}


@pytest.mark.parametrize(
    ("login", "secret"),
    [
        ({"auth": None}, {}),
        ({"auth": []}, {}),
        ({"auth": {**LOGIN, "client_token": None}}, {}),
        ({"auth": {**LOGIN, "client_token": "a\r\nb"}}, {}),
        ({"auth": {**LOGIN, "lease_duration": "soon"}}, {}),
        ({"auth": LOGIN}, {}),
        ({"auth": LOGIN}, {"data": []}),
        ({"auth": LOGIN}, {"data": {"data": {"value": "v"}, "metadata": {"deletion_time": 5}}}),
        ({"auth": LOGIN}, {"data": {"value": "v"}, "lease_duration": -1}),
        ({"auth": LOGIN}, {"data": {"value": "v", "ttl": 0}}),
        ({"auth": LOGIN}, {"data": {"value": "v"}, "lease_id": "l", "lease_duration": 0}),
    ],
    ids=str,
)
def test_an_answer_of_another_shape_is_a_failure_and_logs_out(
    tmp_path: Path, login: dict[str, Any], secret: dict[str, Any]
) -> None:
    async def scene() -> list[str]:
        async def say(line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(response(200, json.dumps(login if "/login" in line else secret)))

        async with serving(say) as fake:
            role = {"role_id": "r", "secret_id": kept(tmp_path, "secret_id", "s" * 20)}
            model = {"address": fake.url, "auth": {"approle": role}, "path": "db/creds/x"}
            await failure(vault.provider("c", VaultSource.model_validate(model), None))
            return fake.lines

    lines = run(scene())
    entered = isinstance(login["auth"], dict) and login["auth"]["client_token"] == LOGIN["client_token"]
    assert any("revoke-self" in line for line in lines) == entered
