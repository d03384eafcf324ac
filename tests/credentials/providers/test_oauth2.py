"""OAuth 2.0 grants at a real authorization server, which checks secrets, assertions, scopes and refresh tokens."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from pydantic import ValidationError

from egressd.credentials.providers import oauth2
from egressd.credentials.providers.base import Minted, SourceFailed
from egressd.credentials.providers.oauth2 import OAuth2
from egressd.policy.credential import OAuth2Source
from tests.credentials.providers.authorization_server import LIFE, Issuer, issuing
from tests.credentials.providers.loopback import (
    SANDBOX,
    PrivateKey,
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

ODD = "p+q/r%s:t =&?é"
"""A secret with all that a form, a URL and HTTP Basic take for their own."""


@pytest.fixture(scope="module")
def server() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


def source(at: Issuer, **said: Any) -> OAuth2:
    return oauth2.provider("c", OAuth2Source.model_validate({"token_url": f"{at.url}/token", **said}), None)


def value(given: Minted) -> str:
    assert given.material.type == "token"
    return given.material.value.get_secret_value()


# client credentials


@pytest.mark.parametrize("secret", [secrets.token_hex(16), ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("way", ["basic", "post"])
def test_a_client_gets_a_token_by_its_secret(server: Issuer, tmp_path: Path, way: str, secret: str) -> None:
    server.client("egressd:1", secret, f"client_secret_{way}")
    ref = kept(tmp_path, "secret", secret)
    asked = source(
        server, client_id="egressd:1", client_secret=ref, authentication=way, scopes=["orders.read"]
    )
    given = run(minted(asked))
    assert server.gave[value(given)].token["scope"] == "orders.read"
    assert given.expires is not None
    assert LIFE - 10 < given.expires - time.time() <= LIFE
    assert given.revoke is None


def test_a_client_without_a_secret_names_itself(server: Issuer) -> None:
    server.client("public", "", "none")
    assert server.is_live(value(run(minted(source(server, client_id="public", authentication="none")))))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"client_id": "stranger"}, "answered 401 (invalid_client)"),
        ({"client_id": "known"}, "answered 401 (invalid_client)"),
        ({"client_id": "right", "scopes": ["admin"]}, "answered 400 (invalid_scope)"),
    ],
    ids=["an unknown client", "a wrong secret", "a scope that there is not"],
)
def test_what_the_server_refuses_is_told_by_its_code(
    server: Issuer, tmp_path: Path, said: dict[str, Any], says: str
) -> None:
    secret = secrets.token_hex(16)
    server.client("known", "another")
    server.client("right", secret)
    error = run(failure(source(server, client_secret=kept(tmp_path, "secret", secret), **said)))
    assert str(error) == f"{server.url.removeprefix('http://')}: {says}"
    assert_secret_free(shown(error), [secret])


def test_a_secret_that_was_replaced_is_read_anew(server: Issuer, tmp_path: Path) -> None:
    client = server.client("rotating", "old")
    asked = source(server, client_id="rotating", client_secret=kept(tmp_path, "secret", "new"))
    assert "invalid_client" in str(run(failure(asked)))
    client.secret = "new"
    run(minted(asked))


def test_a_token_is_given_back_where_the_server_takes_it(server: Issuer, tmp_path: Path) -> None:
    server.client("tidy", "s")
    ref = kept(tmp_path, "secret", "s")
    asked = source(server, client_id="tidy", client_secret=ref, revocation_url=f"{server.url}/revoke")

    async def scene() -> None:
        given = await asked.mint(SANDBOX)
        assert server.is_live(value(given))
        assert given.revoke is not None
        await given.revoke()
        assert not server.is_live(value(given))
        server.clients["tidy"].secret = "other"
        with pytest.raises(SourceFailed, match="invalid_client"):
            await given.revoke()
        await asked.close()

    run(scene())


# refresh tokens


def refreshing(server: Issuer, folder: Path, name: str) -> tuple[OAuth2, str]:
    first = server.first_refresh_token(server.client(name, "s"))
    said = {"client_id": name, "client_secret": kept(folder, "secret", "s")}
    return source(server, grant="refresh_token", refresh_token=kept(folder, "refresh", first), **said), first


def test_a_refresh_token_that_is_replaced_is_kept_in_memory(server: Issuer, tmp_path: Path) -> None:
    asked, first = refreshing(server, tmp_path, "r1")

    async def scene() -> list[str]:
        return [value(await asked.mint(SANDBOX)) for _ in range(3)]

    given = run(scene())
    assert len(set(given)) == 3
    assert (tmp_path / "refresh").read_text() == first
    assert server.thefts == 0
    assert_secret_free(repr(vars(asked)), [first, *server.refresh])


def test_many_sandboxes_at_once_use_no_refresh_token_twice(server: Issuer, tmp_path: Path) -> None:
    asked, _ = refreshing(server, tmp_path, "r2")

    async def scene() -> list[Minted]:
        return await asyncio.gather(*(asked.mint(SANDBOX) for _ in range(6)))

    assert len({value(given) for given in run(scene())}) == 6
    assert server.thefts == 0


def test_a_refresh_token_is_not_lost_when_its_caller_leaves(server: Issuer, tmp_path: Path) -> None:
    asked, _ = refreshing(server, tmp_path, "r3")

    async def scene() -> None:
        for _ in range(3):
            leaving = asyncio.create_task(asked.mint(SANDBOX))
            await asyncio.sleep(0.01)
            leaving.cancel()
        await asked.close()
        await asked.mint(SANDBOX)

    run(scene())
    assert server.thefts == 0


def test_a_refresh_token_that_the_operator_replaces_counts(server: Issuer, tmp_path: Path) -> None:
    asked, _ = refreshing(server, tmp_path, "r4")

    async def scene() -> None:
        await asked.mint(SANDBOX)
        server.refresh.clear()
        with pytest.raises(SourceFailed, match="invalid_grant"):
            await asked.mint(SANDBOX)
        kept(tmp_path, "refresh", server.first_refresh_token(server.clients["r4"]))
        await asked.mint(SANDBOX)
        await asked.mint(SANDBOX)

    run(scene())


def test_a_refresh_token_that_stays_is_used_again(server: Issuer, tmp_path: Path) -> None:
    asked, _ = refreshing(server, tmp_path, "r5")
    server.rotates = False
    try:

        async def scene() -> None:
            for _ in range(2):
                await asked.mint(SANDBOX)

        run(scene())
    finally:
        server.rotates = True


# JWT bearer


KEYS: dict[str, PrivateKey] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
FAMILY = {"RS256": "RSA", "ES256": "EC", "EdDSA": "OKP"}


def asserting(server: Issuer, folder: Path, algorithm: str = "RS256", **said: Any) -> OAuth2:
    key = KEYS[algorithm]
    server.client(f"{FAMILY[algorithm]}-issuer", "", "none", public_pem(key))
    own = {"issuer": f"{FAMILY[algorithm]}-issuer", "algorithm": algorithm}
    ref = kept(folder, "key.pem", private_pem(key))
    return source(server, **{"grant": "jwt_bearer", "key": ref, **own, **said})


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])  # Authlib takes no EdDSA: see test_assertion.py
def test_an_assertion_is_signed_by_each_algorithm(server: Issuer, tmp_path: Path, algorithm: str) -> None:
    given = run(minted(asserting(server, tmp_path, algorithm, scopes=["orders.read"])))
    assert server.gave[value(given)].token["scope"] == "orders.read"


def test_an_assertion_is_for_its_subject_and_audience(server: Issuer, tmp_path: Path) -> None:
    asked = asserting(
        server, tmp_path, subject="agent@example.com", audience="https://issuer.example", key_id="k1"
    )
    assert server.is_live(value(run(minted(asked))))


@pytest.mark.parametrize(
    "said",
    [
        {"subject": "stranger"},
        {"audience": "https://elsewhere.example"},
        {"issuer": "nobody"},
        {"issuer": "EC-issuer"},
    ],
    ids=lambda said: next(iter(said)),
)
def test_an_assertion_that_does_not_fit_is_refused(
    server: Issuer, tmp_path: Path, said: dict[str, str]
) -> None:
    asserting(server, tmp_path, "ES256")
    error = run(failure(asserting(server, tmp_path, **said)))
    assert str(error).endswith("answered 400 (invalid_grant)")
    assert_secret_free(shown(error), [private_pem(KEYS["RS256"])])


@pytest.mark.parametrize(("algorithm", "key"), [("RS256", "ES256"), ("ES256", "RS256"), ("EdDSA", "RS256")])
def test_a_key_of_another_algorithm_signs_nothing(
    server: Issuer, tmp_path: Path, algorithm: str, key: str
) -> None:
    pem = private_pem(KEYS[key])
    error = run(failure(asserting(server, tmp_path, algorithm, key=kept(tmp_path, "other.pem", pem))))
    assert str(error) == f"the private key is no PEM key for {algorithm} without a password"
    assert_secret_free(shown(error), [pem])


# token exchange


def exchanging(server: Issuer, folder: Path, subject: str, **said: Any) -> OAuth2:
    server.client("exchanger", "s")
    return source(
        server,
        **{
            "grant": "token_exchange",
            "client_id": "exchanger",
            "client_secret": kept(folder, "secret", "s"),
            "subject_token": kept(folder, "subject", subject),
            "audience": "https://api.example",
            **said,
        },
    )


def test_a_token_is_exchanged_for_one_of_another_audience(server: Issuer, tmp_path: Path) -> None:
    subject = secrets.token_hex(20)
    server.subjects[subject] = "https://api.example"
    given = run(minted(exchanging(server, tmp_path, subject, resource="https://api.example/orders")))
    form = server.gave[value(given)].form
    assert form["resource"] == "https://api.example/orders"
    assert "scope" not in form


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"audience": "https://elsewhere.example"}, "invalid_target"),
        ({"subject_token_type": "urn:ietf:params:oauth:token-type:saml2"}, "invalid_request"),
    ],
)
def test_an_exchange_that_does_not_fit_is_refused(
    server: Issuer, tmp_path: Path, said: dict[str, str], code: str
) -> None:
    subject = secrets.token_hex(20)
    server.subjects[subject] = "https://api.example"
    error = run(failure(exchanging(server, tmp_path, subject, **said)))
    assert str(error).endswith(f"answered 400 ({code})")
    assert_secret_free(shown(error), [subject])


def test_a_subject_token_that_nobody_knows_is_refused(server: Issuer, tmp_path: Path) -> None:
    assert "invalid_request" in str(run(failure(exchanging(server, tmp_path, secrets.token_hex(20)))))


# what no server is needed for


@pytest.mark.parametrize("kind", ["DPoP", "dpop", "MAC", "pop"])
def test_a_token_that_needs_a_proof_is_refused(tmp_path: Path, kind: str) -> None:
    async def scene() -> SourceFailed:
        async def say(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(response(200, f'{{"access_token": "t", "token_type": "{kind}"}}'))

        async with serving(say) as fake:
            said = {"client_id": "c", "client_secret": kept(tmp_path, "secret", "s")}
            return await failure(
                oauth2.provider("c", OAuth2Source.model_validate({"token_url": fake.url, **said}), None)
            )

    assert "needs a proof" in str(run(scene()))


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ({}, "client_id and client_secret"),
        ({"client_id": "c"}, "client_secret"),
        ({"grant": "refresh_token"}, "refresh_token"),
        ({"grant": "jwt_bearer"}, "key and issuer"),
        ({"grant": "jwt_bearer", "key": {"env": "K"}}, "issuer"),
        ({"grant": "token_exchange"}, "subject_token"),
        (
            {"grant": "token_exchange", "subject_token": {"env": "T"}, "client_secret": {"env": "S"}},
            "client_id",
        ),
    ],
)
def test_a_grant_says_what_it_needs_when_the_file_is_read(said: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValidationError, match=f"needs {missing} too"):
        OAuth2Source.model_validate({"token_url": "https://issuer.example/token", **said})
