"""Every way in which a cloud's server can fail its source: a quick SourceFailed that shows no secret."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from egressd.credentials.providers import aws_sts, endpoint, library
from egressd.credentials.providers.base import For, Minted, Provider, SourceFailed
from egressd.lab.pki import Authority
from egressd.policy.credential import SecretRef
from tests.credentials.providers import test_aws_sts, test_azure, test_gcp
from tests.credentials.providers.loopback import (
    Respond,
    assert_secret_free,
    failure,
    kept,
    minted,
    response,
    run,
    serving,
    shown,
)
from tests.credentials.providers.test_failures import ECHO, PATIENCE, SAID, TOKEN, Write, says

SECRET = secrets.token_hex(20)


class Kind(NamedTuple):
    """A source, and a good answer with this token and this life."""

    make: Callable[[Path, str, str], Provider]
    answer: Callable[[Any, Any], bytes]


def make_aws(folder: Path, url: str, _bundle: str) -> Provider:
    ref = kept(folder, "aws", SECRET)
    return aws_sts.provider("c", test_aws_sts.made(folder, url, secret_access_key=ref), None)


def aws_answer(token: Any, life: Any) -> bytes:
    end = test_aws_sts.stamp(life) if isinstance(life, int) else str(life)
    return test_aws_sts.answer_of(end, ("ASIAGIVEN", "s" * 40, str(token)))


KEY = test_gcp.key_json(rsa.generate_private_key(65537, 2048))


def make_gcp(folder: Path, url: str, _bundle: str) -> Provider:
    return test_gcp.made(folder, KEY, url)


def oauth_answer(token: Any, life: Any) -> bytes:
    return json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": life}).encode()


def make_azure(folder: Path, url: str, bundle: str) -> Provider:
    return test_azure.made(url, bundle, client_secret=kept(folder, "azure", SECRET))


KINDS = {
    "aws_sts": Kind(make_aws, aws_answer),
    "gcp": Kind(make_gcp, oauth_answer),
    "azure": Kind(make_azure, oauth_answer),
}
SECRETS = (SECRET, TOKEN, json.loads(KEY)["private_key"], "s" * 40)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(("127.0.0.1",))


class Scene:
    """One source, and the server that it asks; over TLS where its library asks in no other way."""

    def __init__(self, kind: str, authority: Authority, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.context = authority.listening_context() if kind == "azure" else None
        self.bundle = folder / "ca.pem"
        self.bundle.write_bytes(authority.root_pem())
        self.answer = KINDS[kind].answer

    def make(self, url: str) -> Provider:
        return KINDS[self.kind].make(self.folder, url, str(self.bundle))

    def fails(self, respond: Respond) -> Exception:
        async def scene() -> Exception:
            async with serving(respond, self.context) as server:
                return await failure(self.make(server.url))

        return run(scene())


@pytest.fixture
def scene(kind: str, authority: Authority, tmp_path: Path) -> Scene:
    return Scene(kind, authority, tmp_path)


def answering(write: Write) -> Respond:
    async def respond(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        await write(writer)

    return respond


@pytest.mark.parametrize("said", list(SAID))
def test_a_server_that_fails(
    scene: Scene, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, expected = SAID[said]
    scene.fails(answering(says(b"")))  # what a library loads at its first use is not what is timed here
    monkeypatch.setattr(endpoint, "TOTAL", 2 * PATIENCE)
    began = time.monotonic()
    with caplog.at_level(logging.DEBUG):
        error = scene.fails(answering(write))
    assert time.monotonic() - began < 20 * PATIENCE
    told = [*expected.split("|"), "answered 204", "not one of STS"]
    assert any(text in str(error) for text in told), str(error)
    assert_secret_free(shown(error) + caplog.text, SECRETS)


def test_a_server_that_does_not_listen(scene: Scene) -> None:
    error = run(failure(scene.make("https://127.0.0.1:1" if scene.context else "http://127.0.0.1:1")))
    assert "not to be reached" in str(error)
    assert_secret_free(shown(error), SECRETS)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(scene: Scene, status: int) -> None:
    async def both() -> tuple[Exception, list[str]]:
        async with serving(answering(says(response(200, "{}"))), scene.context) as other:
            away = answering(says(response(status, ECHO, f"Location: {other.url}/elsewhere")))
            async with serving(away, scene.context) as server:
                return await failure(scene.make(server.url)), other.lines

    error, elsewhere = run(both())
    assert f"answered {status}, a redirect, and none is followed" in str(error)
    assert elsewhere == []
    assert_secret_free(shown(error), SECRETS)


TOKENS: dict[str, object] = {
    "empty": "",
    "spaces": "  ",
    "two lines": f"{TOKEN}\r\nX: {TOKEN}",
    "too long": TOKEN * 1000,
}


@pytest.mark.parametrize("token", list(TOKENS))
def test_a_token_that_no_request_could_carry(
    scene: Scene, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        error = scene.fails(answering(says(response(200, scene.answer(TOKENS[token], 3600)))))
    assert_secret_free(shown(error) + caplog.text, SECRETS)


@pytest.mark.parametrize("token", [None, 5, [TOKEN], {"a": TOKEN}, True, f"{TOKEN}\n"], ids=range(6))
@pytest.mark.parametrize("kind", ["gcp", "azure"], indirect=True)
def test_a_token_that_is_not_one_word(scene: Scene, token: object) -> None:
    error = scene.fails(answering(says(response(200, scene.answer(token, 3600)))))
    assert "no token" in str(error)
    assert_secret_free(shown(error), SECRETS)


@pytest.mark.parametrize("life", [0, -1, "soon", "", [], {}, "9" * 5000, float("inf")], ids=range(8))
def test_a_life_that_is_none_or_over(scene: Scene, life: object) -> None:
    error = scene.fails(answering(says(response(200, scene.answer(TOKEN, life)))))
    assert_secret_free(shown(error), SECRETS)


@pytest.mark.parametrize("life", [1e300, 10**30, 10**400], ids=["1e300", "10^30", "10^400"])
def test_a_life_without_end_has_one(scene: Scene, life: float) -> None:
    answer = scene.answer(TOKEN, "9999-12-31T23:59:59Z" if scene.kind == "aws_sts" else life)

    async def ask() -> Minted | Exception:
        async with serving(answering(says(response(200, answer))), scene.context) as server:
            try:
                return await minted(scene.make(server.url))
            except SourceFailed as error:
                return error

    given = run(ask())
    if isinstance(given, Minted):
        assert given.expires is not None
        assert given.expires <= time.time() + endpoint.LIFE_MOST
    else:
        assert_secret_free(shown(given), SECRETS)


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"text"', b"{", b"[" * 60_000, b"\x00\xff", b"<a/>", b"{}"]
)
def test_an_answer_that_is_none(scene: Scene, body: bytes) -> None:
    assert_secret_free(shown(scene.fails(answering(says(response(200, body))))), SECRETS)


def test_a_source_recovers_by_itself(scene: Scene) -> None:
    answers = [response(500), response(200, scene.answer(TOKEN, 3600))]

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async def both() -> Minted:
        async with serving(answering(write), scene.context) as server:
            source = scene.make(server.url)
            await failure(source)
            return await minted(source)

    given = run(both())
    assert given.expires is not None
    assert 3500 < given.expires - time.time() <= 3601


def test_who_waits_no_longer_leaves_nothing_behind(scene: Scene) -> None:
    async def leave() -> None:
        asked = asyncio.Event()

        async def write(_writer: asyncio.StreamWriter) -> None:
            asked.set()
            await asyncio.sleep(20)

        async with serving(answering(write), scene.context) as server:
            source = scene.make(server.url)
            task = asyncio.create_task(source.mint(For("s-1", {})))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await source.close()

    run(leave())


def test_threads_are_bounded_and_one_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TOTAL", 0.1)
    monkeypatch.setattr(library, "_places", threading.BoundedSemaphore(2))
    release = threading.Event()

    async def fill() -> list[BaseException | bool]:
        hanging = (library.run(lambda: release.wait(30), repr) for _ in range(3))
        return await asyncio.gather(*hanging, return_exceptions=True)

    try:
        found = [str(error) for error in run(fill())]
    finally:
        release.set()
    assert sorted(found) == [
        "16 threads of sources hang already",
        "no answer within 0.1 s",
        "no answer within 0.1 s",
    ]


def test_what_a_library_raises_is_explained_and_not_shown() -> None:
    async def fail() -> SourceFailed:
        def work() -> None:
            raise ValueError(SECRET)

        with pytest.raises(SourceFailed) as caught:
            await library.run(work, lambda error: f"it is a {type(error).__name__}")
        return caught.value

    error = run(fail())
    assert str(error) == "it is a ValueError"
    assert_secret_free(shown(error), (SECRET,))


def test_env_secrets_do(monkeypatch: pytest.MonkeyPatch, authority: Authority, tmp_path: Path) -> None:
    monkeypatch.setenv("LAB_AZURE_SECRET", SECRET)
    scene = Scene("azure", authority, tmp_path)

    async def ask() -> Minted:
        async with serving(
            answering(says(response(200, scene.answer(TOKEN, 3600)))), scene.context
        ) as server:
            ref = SecretRef(env="LAB_AZURE_SECRET")
            return await minted(test_azure.made(server.url, str(scene.bundle), client_secret=ref))

    assert run(ask()).material.type == "token"
