"""What a server can do to a source that asks it: nothing beyond a bounded failure."""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from egressd.credentials.providers import endpoint
from egressd.credentials.providers.base import SourceFailed
from egressd.credentials.providers.endpoint import Answer, Endpoint
from egressd.lab.pki import Authority
from tests.credentials.providers.loopback import response, run, serving, shown

SECRET = secrets.token_hex(16)
SENT = 1_800_000_000.0


def answer(
    body: object = None, status: int = 200, date: float | None = None, sent: float | None = None
) -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer("auth.example", status, content, time.time() if sent is None else sent, date)


async def say_ok(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(response(200, "{}"))


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, {"error": "invalid_client"}, "answered 401 (invalid_client)"),
        (400, {"error": "invalid_target", "error_description": "s3cret"}, "answered 400 (invalid_target)"),
        (400, {"error": "s3cret"}, "answered 400"),
        (400, {"error": ["invalid_client"]}, "answered 400"),
        (500, b"<html>s3cret", "answered 500"),
        (302, b"", "answered 302, a redirect, and none is followed"),
        (200, {}, "answered 200"),
    ],
)
def test_a_refusal_repeats_its_status_and_a_registered_code_alone(
    status: int, body: object, says: str
) -> None:
    assert str(answer(body, status).refused()) == f"auth.example: {says}"


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        (5, ""),
        (95, "; this host's clock is 95 s behind the server's"),
        (-95, "; this host's clock is 95 s ahead of the server's"),
    ],
)
def test_a_refusal_tells_of_clocks_that_differ(ahead: float, says: str) -> None:
    refused = answer({}, 401, date=SENT + ahead, sent=SENT).refused()
    assert str(refused) == f"auth.example: answered 401{says}"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff{}", b"[" * 50_000, b'{"a":' + b"9" * 9999 + b"}"]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(SourceFailed, match="the answer is no JSON object"):
        answer(body).document()


@pytest.mark.parametrize(
    ("seconds", "life"), [(60, 60), (60.5, 60.5), ("3600", 3600), (1e300, endpoint.LIFE_MOST)]
)
def test_a_life_counts_from_when_we_asked(seconds: object, life: float) -> None:
    asked = answer()
    assert asked.until(seconds) == asked.sent + life


@pytest.mark.parametrize(
    "seconds",
    [
        "",
        "soon",
        "-5",
        "1e3",
        "9" * 40,
        True,
        [],
        {},
        float("nan"),
        float("inf"),
        10**400,
        "\N{FULLWIDTH DIGIT SIX}",
        0,
        -1,
        0.0,
    ],
)
def test_a_life_that_is_none_or_over_is_refused(seconds: object) -> None:
    with pytest.raises(SourceFailed, match=r"lifetime is no number|has expired already"):
        answer().until(seconds)


def test_no_word_of_an_end_is_no_end() -> None:
    assert answer().until(None) is None
    assert answer().at(None) is None


def test_a_moment_is_taken_by_the_servers_clock() -> None:
    sent = time.time()
    behind = answer(date=sent + 7200, sent=sent)  # the server is two hours ahead of us
    moment = format_iso(sent + 7200 + 600)
    assert behind.at(moment) == pytest.approx(sent + 599, abs=1)
    assert answer(sent=sent).at(format_iso(sent + 600)) == pytest.approx(sent + 600, abs=1)


def format_iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


@pytest.mark.parametrize(
    "moment", ["", "tomorrow", "2026-13-01T00:00:00Z", "2099-01-01T00:00:00", 1e12, [], True]
)
def test_a_moment_that_is_none_is_refused(moment: object) -> None:
    with pytest.raises(SourceFailed, match="expiry is no time"):
        answer().at(moment)


def test_a_moment_that_has_passed_is_refused() -> None:
    with pytest.raises(SourceFailed, match="has expired already"):
        answer().at("2020-01-01T00:00:00Z")


@pytest.mark.parametrize(
    "date",
    ["", "soon", "Mon, 99 Foo 2026 00:00:00 GMT", "Mon, 30 Nov 2026 00:00:00", "0 0 0 0 0 +9999999999"],
)
def test_a_date_that_is_none_is_overlooked(date: str) -> None:
    async def scene() -> float | None:
        async def say(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(response(200, "{}", f"Date: {date}"))

        async with serving(say) as server:
            return (await Endpoint(server.url).ask("GET")).date

    assert run(scene()) is None


def test_the_servers_date_is_read() -> None:
    async def scene() -> float | None:
        async def say(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(response(200, "{}", f"Date: {formatdate(SENT, usegmt=True)}"))

        async with serving(say) as server:
            return (await Endpoint(server.url).ask("GET")).date

    assert run(scene()) == SENT


@pytest.mark.parametrize("path", ["..", "a/../b", "a/./b", "a//b", "/..", "a/.."])
def test_a_path_leads_nowhere_else(path: str) -> None:
    with pytest.raises(SourceFailed, match="an empty or a dot segment"):
        run(Endpoint("http://127.0.0.1:9").ask("GET", path))


@pytest.mark.parametrize(
    ("path", "line"),
    [("a b/c?d#e", "/base/a%20b/c%3Fd%23e"), ("v1/secret/data/x", "/base/v1/secret/data/x"), ("", "/base")],
)
def test_a_path_is_quoted(path: str, line: str) -> None:
    async def scene() -> list[str]:
        async with serving(say_ok) as server:
            await Endpoint(f"{server.url}/base/").ask("GET", path)
            return server.lines

    assert run(scene()) == [f"GET {line} HTTP/1.1"]


def test_what_the_environment_says_of_proxies_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def scene() -> int:
        async with serving(say_ok) as server:
            return (await Endpoint(server.url).ask("GET")).status

    assert run(scene()) == 200


def test_a_request_carries_no_cookie_and_asks_for_no_coding() -> None:
    async def scene() -> list[str]:
        async def say(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(response(200, "{}", "Set-Cookie: a=b; Path=/"))

        async with serving(say) as server:
            asked = Endpoint(server.url)
            await asked.ask("GET")
            await asked.ask("GET")
            return server.heads

    for head in run(scene()):
        assert "cookie" not in head.lower()
        assert "accept-encoding: identity" in head.lower()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(("127.0.0.1",))


@pytest.fixture
def bundle(authority: Authority, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    path.write_bytes(authority.root_pem())
    return str(path)


def ask_tls(context: ssl.SSLContext, ca_bundle: str | None) -> Answer:
    async def scene() -> Answer:
        async with serving(say_ok, context) as server:
            return await Endpoint(server.url, ca_bundle).ask(
                "GET", fields={"Authorization": f"Bearer {SECRET}"}
            )

    return run(scene())


def test_a_server_that_the_bundle_vouches_for_is_asked(authority: Authority, bundle: str) -> None:
    assert ask_tls(authority.context(""), bundle).status == 200


@pytest.mark.parametrize("kind", ["expired", "self-signed", "wrong-name"])
def test_a_certificate_that_is_not_right_is_no_server(authority: Authority, bundle: str, kind: str) -> None:
    authority.kinds[""] = kind
    try:
        with pytest.raises(SourceFailed, match="its certificate is not trusted") as caught:
            ask_tls(authority.context(""), bundle)
    finally:
        del authority.kinds[""]
    assert SECRET not in shown(caught.value)


def test_the_system_does_not_vouch_for_it(authority: Authority) -> None:
    with pytest.raises(SourceFailed, match="its certificate is not trusted"):
        ask_tls(authority.context(""), None)


def test_a_bundle_that_is_replaced_is_read_anew(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(Authority().root_pem())

    async def scene() -> int:
        async with serving(say_ok, authority.context("")) as server:
            asked = Endpoint(server.url, str(path))
            with pytest.raises(SourceFailed, match="its certificate is not trusted"):
                await asked.ask("GET")
            path.write_bytes(authority.root_pem() + b"\n")
            return (await asked.ask("GET")).status

    assert run(scene()) == 200


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_bundle_that_vouches_for_nobody_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceFailed, match="no certificates to trust by"):
        run(Endpoint("https://127.0.0.1:9", str(path)).ask("GET"))


def test_keys_of_tls_are_not_written_down(
    authority: Authority, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "keys"
    monkeypatch.setenv("SSLKEYLOGFILE", str(log))
    assert ask_tls(authority.context(""), bundle).status == 200
    assert not log.exists()
