"""Every way in which a server can fail a source, for every source: a quick SourceFailed that shows no secret."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egressd.credentials.lease import SECRET_LIMIT
from egressd.credentials.providers import endpoint, github_app, kubernetes, oauth2, vault
from egressd.credentials.providers.base import Provider, SourceFailed
from egressd.credentials.providers.endpoint import Answer
from egressd.policy.credential import GitHubAppSource, KubernetesSource, OAuth2Source, SecretRef, VaultSource
from tests.credentials.providers.loopback import (
    Respond,
    assert_secret_free,
    failure,
    kept,
    minted,
    private_pem,
    response,
    run,
    serving,
    shown,
)

PATIENCE = 0.4
TOKEN = secrets.token_hex(20)
IDENTITY = secrets.token_hex(20)

type Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Kind(NamedTuple):
    """A source, the status by which its server says yes, and where in its answer token and lifetime stand."""

    make: Callable[[str, SecretRef], Provider]
    yes: int
    body: Callable[[object, object], dict[str, Any]]
    moments: bool
    """A lifetime is told as a moment, not in seconds."""


def make_oauth2(url: str, secret: SecretRef) -> Provider:
    said = {"token_url": url, "client_id": "egressd", "client_secret": secret}
    source = OAuth2Source.model_validate({**said, "grant": "token_exchange", "subject_token": secret})
    return oauth2.provider("c", source, None)


def make_github(url: str, secret: SecretRef) -> Provider:
    source = GitHubAppSource(
        app_id=7,
        installation_id=8,
        private_key=secret,
        api=url,
        repositories=["a"],
        permissions={"contents": "read"},
    )
    return github_app.provider("c", source, None)


def make_kubernetes(url: str, secret: SecretRef) -> Provider:
    source = KubernetesSource(namespace="agents", service_account="reader", server=url, token=secret)
    return kubernetes.provider("c", source, None)


def make_vault(url: str, secret: SecretRef) -> Provider:
    source = VaultSource.model_validate(
        {"address": url, "auth": {"approle": {"role_id": "r", "secret_id": secret}}, "path": "db/creds/x"}
    )
    return vault.provider("c", source, None)


KINDS = {
    "oauth2": Kind(
        make_oauth2,
        200,
        lambda token, life: {"access_token": token, "token_type": "Bearer", "expires_in": life},
        False,
    ),
    "github_app": Kind(make_github, 201, lambda token, life: {"token": token, "expires_at": life}, True),
    "kubernetes": Kind(
        make_kubernetes,
        201,
        lambda token, life: {"status": {"token": token, "expirationTimestamp": life}},
        True,
    ),
    "vault": Kind(
        make_vault,
        200,
        lambda token, life: {
            "lease_id": "l",
            "renewable": True,
            "lease_duration": life,
            "data": {"value": token},
        },
        False,
    ),
}


@pytest.fixture(scope="module")
def pem() -> str:
    return private_pem(rsa.generate_private_key(65537, 2048))


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def secret(tmp_path: Path, kind: Kind, pem: str) -> SecretRef:
    return kept(tmp_path, "secret", pem if kind is KINDS["github_app"] else IDENTITY)


def in_an_hour(kind: Kind, hours: int = 1) -> object:
    if not kind.moments:
        return 3600 * hours
    return (dt.datetime.now(dt.UTC) + dt.timedelta(hours=hours)).isoformat()


def answering(kind: Kind, write: Write) -> Respond:
    """A server that lets everybody in (Vault's log-in) and then does as `write` does."""

    async def respond(line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        if "/auth/" in line:
            auth = {
                "client_token": IDENTITY,
                "lease_duration": 600,
                "renewable": True,
                "token_type": "service",
            }
            writer.write(response(200, json.dumps({"auth": auth})))
        else:
            await write(writer)

    return respond


def says(content: bytes) -> Write:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(content)

    return write


async def nothing(_writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(20)


async def a_byte_now_and_then(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(400):
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.05)


async def a_body_without_end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(4000):
        writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        await writer.drain()


ECHO = json.dumps({"error": TOKEN, "error_description": TOKEN, "message": TOKEN, "errors": [TOKEN]})

SAID: dict[str, tuple[Write, str]] = {
    "401, with the secret for an error": (says(response(401, ECHO)), "answered 401"),
    "403 in HTML": (says(response(403, f"<html>{TOKEN}")), "answered 403"),
    "404": (says(response(404, "{}")), "answered 404"),
    "429": (says(response(429, ECHO, "Retry-After: 3600")), "answered 429"),
    "500": (says(response(500, ECHO)), "answered 500"),
    "503 without a body": (says(response(503)), "answered 503"),
    "no content": (says(response(204)), "answered 204|no JSON object"),
    "a status of its own": (says(response(999, ECHO)), "answered 999"),
    "nothing, ever": (nothing, "no answer within"),
    "a byte now and then": (a_byte_now_and_then, "no answer within"),
    "a closed connection": (says(b""), "closed the connection"),
    "half a head": (says(b"HTTP/1.1 200 OK\r\nContent-Le"), "closed the connection"),
    "half a body": (
        says(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"a'),
        "no HTTP|closed the connection",
    ),
    "no HTTP": (says(b"SSH-2.0-" + TOKEN.encode() + b"\r\n\r\n"), "no HTTP"),
    "a header of 1 MiB": (says(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2**20), "no HTTP"),
    "ten thousand headers": (says(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 10_000 + b"\r\n"), "no HTTP"),
    "a body of 1 MiB": (says(response(200, b" " * 2**20)), "longer than"),
    "a body without end": (a_body_without_end, "longer than"),
    "a packed body": (says(response(200, b"\x1f\x8b", "Content-Encoding: gzip")), "packed"),
}


@pytest.mark.parametrize("said", list(SAID))
def test_a_server_that_fails(
    kind: Kind,
    said: str,
    secret: SecretRef,
    pem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(endpoint, "TOTAL", PATIENCE)
    write, expected = SAID[said]

    async def scene() -> Exception:
        async with serving(answering(kind, write)) as server:
            return await failure(kind.make(server.url, secret))

    began = time.monotonic()
    with caplog.at_level(logging.DEBUG):
        error = run(scene())
    assert time.monotonic() - began < 15 * PATIENCE
    assert any(text in str(error) for text in expected.split("|")), str(error)
    assert_secret_free(shown(error) + caplog.text, (TOKEN, IDENTITY, pem))


def test_a_server_that_does_not_listen(kind: Kind, secret: SecretRef, pem: str) -> None:
    error = run(failure(kind.make("http://127.0.0.1:1", secret)))
    assert "not to be reached" in str(error)
    assert_secret_free(shown(error), (IDENTITY, pem))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(kind: Kind, status: int, secret: SecretRef) -> None:
    async def scene() -> tuple[Exception, list[str]]:
        async with serving(answering(kind, says(response(kind.yes, "{}")))) as other:
            away = says(response(status, ECHO, f"Location: {other.url}/elsewhere"))
            async with serving(answering(kind, away)) as server:
                return await failure(kind.make(server.url, secret)), other.lines

    error, elsewhere = run(scene())
    assert f"answered {status}, a redirect, and none is followed" in str(error)
    assert elsewhere == []
    assert_secret_free(shown(error), (TOKEN, IDENTITY))


BAD_TOKENS: dict[str, object] = {
    "empty": "",
    "only spaces": "   ",
    "missing": None,
    "a number": 5,
    "a list": [TOKEN],
    "with CR LF inside": f"{TOKEN}\r\nX-Evil: 1",
    "with a newline behind it": f"{TOKEN}\n",
    "with NUL": f"{TOKEN}\0",
    "with what nobody sees": f"{TOKEN}\u200b",
    "with half a surrogate pair": f"{TOKEN}\ud800",
    "too long": TOKEN * (SECRET_LIMIT // len(TOKEN) + 1),
}


@pytest.mark.parametrize("token", list(BAD_TOKENS))
def test_a_token_that_no_request_could_carry(kind: Kind, token: str, secret: SecretRef) -> None:
    body = json.dumps(kind.body(BAD_TOKENS[token], in_an_hour(kind)))

    async def scene() -> Exception:
        async with serving(answering(kind, says(response(kind.yes, body)))) as server:
            return await failure(kind.make(server.url, secret))

    assert_secret_free(shown(run(scene())), (TOKEN, IDENTITY))


@pytest.mark.parametrize("life", [0, -1, "soon", "", [], {}, True, float("nan"), "2001-01-01T00:00:00Z"])
def test_a_life_that_is_none_or_over(kind: Kind, life: object, secret: SecretRef) -> None:
    body = json.dumps(kind.body(TOKEN, life))

    async def scene() -> Exception:
        async with serving(answering(kind, says(response(kind.yes, body)))) as server:
            return await failure(kind.make(server.url, secret))

    error = run(scene())
    assert any(
        text in str(error) for text in ("lifetime is no number", "expiry is no time", "has expired already")
    )
    assert_secret_free(shown(error), (TOKEN, IDENTITY))


@pytest.mark.parametrize(
    "body", ["", "null", "[]", '"text"', "{", "[" * 60_000, '{"access_token": NaN', "\x00\xff"]
)
def test_an_answer_that_is_no_object(kind: Kind, body: str, secret: SecretRef) -> None:
    async def scene() -> Exception:
        async with serving(answering(kind, says(response(kind.yes, body)))) as server:
            return await failure(kind.make(server.url, secret))

    assert "no JSON object" in str(run(scene()))


def test_a_good_answer_is_taken_and_shows_no_secret(kind: Kind, secret: SecretRef) -> None:
    async def scene() -> None:
        body = json.dumps(kind.body(TOKEN, in_an_hour(kind)))
        async with serving(answering(kind, says(response(kind.yes, body)))) as server:
            got = await minted(kind.make(server.url, secret))
        assert got.material.type == "token"
        assert got.material.value.get_secret_value() == TOKEN
        assert got.expires is not None
        assert 500 < got.expires - time.time() < 3601
        assert_secret_free(repr(got), (TOKEN, IDENTITY))

    run(scene())


def test_no_word_of_an_end_is_no_end(kind: Kind, secret: SecretRef) -> None:
    async def scene() -> float | None:
        body = json.dumps(kind.body(TOKEN, None))
        async with serving(answering(kind, says(response(kind.yes, body)))) as server:
            return (await minted(kind.make(server.url, secret))).expires

    expires = run(scene())
    if kind is KINDS["vault"]:  # there the log-in's own end counts
        assert expires is not None
        assert 590 < expires - time.time() <= 600
    else:
        assert expires is None


@pytest.mark.parametrize("content", [None, "", "two\nlines\x07"])
def test_a_secret_of_the_operators_that_cannot_be_read(
    kind: Kind, tmp_path: Path, content: str | None
) -> None:
    ref = SecretRef(file=str(tmp_path / "none")) if content is None else kept(tmp_path, "bad", content)

    async def scene() -> tuple[Exception, list[str]]:
        async with serving(answering(kind, says(response(500)))) as server:
            return await failure(kind.make(server.url, ref)), server.lines

    error, lines = run(scene())
    assert "/" in str(error)
    assert lines == []
    assert "two" not in shown(error)


def test_a_source_recovers_by_itself(kind: Kind, secret: SecretRef) -> None:
    async def scene() -> None:
        states = [response(500), response(kind.yes, json.dumps(kind.body(TOKEN, in_an_hour(kind))))]

        async def write(writer: asyncio.StreamWriter) -> None:
            writer.write(states[0])

        async with serving(answering(kind, write)) as server:
            source = kind.make(server.url, secret)
            await failure(source)
            del states[0]
            await minted(source)

    run(scene())


def test_many_sandboxes_at_once_get_each_their_own(kind: Kind, secret: SecretRef) -> None:
    async def scene() -> None:
        body = json.dumps(kind.body(TOKEN, in_an_hour(kind)))
        async with serving(answering(kind, says(response(kind.yes, body)))) as server:
            source = kind.make(server.url, secret)
            await asyncio.gather(*(minted(source) for _ in range(8)))
            asked = [line for line in server.lines if "/auth/" not in line]
            assert len(asked) == 8

    run(scene())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("2099-01-01T00:00:00Z"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
NAMES = (
    *(
        "access_token",
        "token_type",
        "expires_in",
        "refresh_token",
        "error",
        "token",
        "expires_at",
        "repositories",
    ),
    *(
        "repository_selection",
        "permissions",
        "status",
        "expirationTimestamp",
        "lease_id",
        "lease_duration",
        "renewable",
    ),
    *(
        "data",
        "metadata",
        "deletion_time",
        "value",
        "ttl",
        "auth",
        "client_token",
        "access_key",
        "secret_key",
        "name",
    ),
)
LAYER = st.dictionaries(st.sampled_from(NAMES), JSON | st.text(min_size=1, max_size=8), max_size=6)
DOCUMENT = st.dictionaries(
    st.sampled_from(NAMES),
    JSON | LAYER | st.lists(LAYER, max_size=2) | st.fixed_dictionaries({"data": LAYER}),
    max_size=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=DOCUMENT, login=st.just(None) | DOCUMENT)
def test_whatever_a_server_answers_a_mint_gives_or_fails(
    kind: Kind, secret: SecretRef, document: dict[str, Any], login: dict[str, Any] | None
) -> None:
    good = {"auth": {"client_token": IDENTITY, "lease_duration": 600}}

    async def ask(self: object, method: str, path: str = "", **_: object) -> Answer:
        said = (login or good) if "/auth/" in path else document
        return Answer("server.example", kind.yes, json.dumps(said).encode(), time.time(), None)

    async def sign(*_: object) -> str:
        return "a.b.c"

    async def scene() -> None:
        patched = (
            mock.patch.object(endpoint.Endpoint, "ask", ask),
            mock.patch.object(github_app, "signed", sign),
        )
        with contextlib.suppress(SourceFailed), patched[0], patched[1]:
            got = await minted(kind.make("https://server.example", secret))
            assert got.expires is None or got.expires > time.time()

    run(scene())
