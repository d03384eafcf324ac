"""Nothing of a credential comes back by HTTP/1.1: not in heads, bodies or trailers, whatever their cuts and codings."""

from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest import mock

import pytest

from egressd.gate.inspector import veil as veil_module
from tests.gate.inspector.lab import HOST, entry, run
from tests.gate.inspector.lender import SECRET, Lender, keyed, lease_of
from tests.gate.inspector.scene import Scene

S = SECRET.encode()
STARS = b"*" * len(S)
HEAD = b"HTTP/1.1 200 OK\r\n"


def request(method: str = "GET", version: str = "1.1") -> bytes:
    return f"{method} /echo HTTP/{version}\r\nHost: {HOST}\r\n\r\n".encode()


@asynccontextmanager
async def scene_of(
    *, credential: bool = True, mask: tuple[str, ...] = (), token_requests: bool = False
) -> AsyncIterator[Scene]:
    rule = keyed() if credential else entry(schemes=("https",), ports=(443,))
    scene = Scene(rule, tls=True)
    lender = Lender(lease_of(mask=mask, token_requests=token_requests))
    lender.serve(scene.engine.connection.sandbox, scene.engine.connection.services)
    async with scene:
        yield scene


async def told(scene: Scene, answer: bytes, ask: bytes = request(), cuts: list[int] | None = None) -> bytes:
    """What the client gets of an answer that the origin gives in pieces, and then goes."""
    assert await scene.says(ask) == b""
    places = [0, *sorted(min(place, len(answer)) for place in cuts or []), len(answer)]
    got = b""
    for first, last in itertools.pairwise(places):
        got += await scene.origin_says(answer[first:last])
    before = len(scene.client.written)
    scene.upstreams[-1].end()
    await scene.settle()
    return got + scene.client.written[before:]


def unchunked(text: bytes) -> bytes:
    """Head and whole body of a chunked answer; anything else as it is."""
    head, _, rest = text.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return text
    body = b""
    while size := int(rest.partition(b"\r\n")[0], 16):
        rest = rest.partition(b"\r\n")[2]
        body, rest = body + rest[:size], rest[size + 2 :]
    return head + b"\r\n\r\n" + body + rest.partition(b"\r\n")[2]


def sized(body: bytes, *fields: bytes) -> bytes:
    lines = b"".join(field + b"\r\n" for field in fields)
    return HEAD + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


ECHOED = {
    "a body of a known length": (sized(b"<" + S + b">"), sized(b"<" + STARS + b">")),
    "JSON with the field in base64": (
        sized(b'{"Authorization":"' + base64.b64encode(b"u:" + S) + b'"}'),
        sized(b'{"Authorization":"dTp' + b"*" * 31 + b'=="}'),
    ),
    "chunks that cut it": (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n4\r\nab"
        + S[:2]
        + b"\r\n15\r\n"
        + S[2:]
        + b"\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nab" + STARS + b"\r\n",
    ),
    "trailers": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n.\r\n0\r\nX-Key: " + S + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n.X-Key: " + STARS + b"\r\n\r\n",
    ),
    "header fields and the reason": (
        b"HTTP/1.1 302 to "
        + S
        + b"\r\nLocation: /?k="
        + S
        + b"\r\nSet-Cookie: a="
        + S
        + b"\r\n"
        + S
        + b": x\r\n"
        b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 to "
        + STARS
        + b"\r\nLocation: /?k="
        + STARS
        + b"\r\n"
        + STARS
        + b": x\r\nContent-Length: 0\r\n\r\n",
    ),
    "an error page of the origin": (
        b"HTTP/1.1 431 Too Large\r\nContent-Length: %d\r\n\r\nAuthorization: Bearer %s" % (len(S) + 22, S),
        b"HTTP/1.1 431 Too Large\r\nContent-Length: %d\r\n\r\nAuthorization: Bearer %s"
        % (len(S) + 22, STARS),
    ),
    "an interim response": (
        b"HTTP/1.1 103 Early Hints\r\nLink: </" + S + b">\r\n\r\n" + sized(b"ok"),
        b"HTTP/1.1 103 Early Hints\r\nLink: </" + STARS + b">\r\n\r\n" + sized(b"ok"),
    ),
    "a part of a body, asked for or not": (
        b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-%d/99\r\nContent-Length: %d\r\n\r\n%s"
        % (len(S) - 1, len(S), S),
        b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-%d/99\r\nContent-Length: %d\r\n\r\n%s"
        % (len(S) - 1, len(S), STARS),
    ),
    "a body that is cut off in it": (sized(b"= " + S[:-3]), sized(b"= " + b"*" * (len(S) - 3))),
    "a body that ends in as much of it as may be chance": (sized(b"= " + S[:3]), sized(b"= " + S[:3])),
    "no body": (
        b'HTTP/1.1 204 No\r\nETag: "' + S + b'"\r\n\r\n',
        b'HTTP/1.1 204 No\r\nETag: "' + STARS + b'"\r\n\r\n',
    ),
    "nothing new": (
        b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 9\r\n\r\n',
        b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 9\r\n\r\n',
    ),
}


@pytest.mark.parametrize(("answer", "seen"), ECHOED.values(), ids=ECHOED)
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
def test_what_is_echoed_is_masked(answer: bytes, seen: bytes, bytewise: bool) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            got = await told(scene, answer, cuts=list(range(len(answer))) if bytewise else None)
            assert unchunked(got) == seen
            assert scene.records.ends() == ["completed"]
            (end,) = scene.records.of("end")
            assert (end.detail is not None) == (b"**" in seen)
            assert SECRET not in str(end.as_dict())

    run(test())


GIVEN = {
    "a session": b"Set-Cookie: session=minted; Secure\r\n",
    "two of them": b"set-cookie: a=minted\r\nSet-Cookie2: b=minted\r\n",
    "a token": b"Authorization: Bearer minted\r\nX-Auth_Token: minted\r\n",
    "a token by a name that nobody has listed": b"X-Acme-Access-Token: minted\r\n",
}


@pytest.mark.parametrize("fields", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("where", ["head", "trailers", "interim"])
def test_no_key_is_given_to_the_sandbox_that_the_origin_made_for_the_credential(
    fields: bytes, where: str
) -> None:
    body = b"Transfer-Encoding: chunked\r\n\r\n1\r\n.\r\n0\r\n"
    answer = {
        "head": HEAD + b"X-One: 1\r\n" + fields + body + b"\r\n",
        "trailers": HEAD + b"X-One: 1\r\n" + body + fields + b"\r\n",
        "interim": b"HTTP/1.1 103 Early\r\n" + fields + b"\r\n" + HEAD + b"X-One: 1\r\n" + body + b"\r\n",
    }[where]

    async def test() -> None:
        async with scene_of() as scene:
            got = await told(scene, answer)
            assert b"minted" not in got
            assert b"X-One: 1\r\n" in got
            (end,) = scene.records.of("end")
            if where == "head":
                assert end.detail is not None
                assert end.detail.startswith("taken out of what came back: ")
            assert "minted" not in str(end.as_dict())
        async with scene_of(token_requests=True) as scene:
            assert b"minted" in await told(scene, answer) or where != "head"
        async with scene_of(credential=False) as scene:
            assert b"minted" in await told(scene, answer) or where != "head"

    run(test())


@pytest.mark.parametrize("answer", [answer for answer, _ in ECHOED.values()], ids=ECHOED)
def test_without_a_credential_nothing_is_touched(answer: bytes) -> None:
    async def test() -> None:
        async with scene_of(credential=False) as scene:
            with mock.patch.object(
                veil_module, "Scrubber", side_effect=AssertionError("nobody is to be masked")
            ):
                assert unchunked(await told(scene, answer)) == unchunked(answer)

    run(test())


def test_a_body_until_the_end_of_the_connection_is_masked() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            got = await told(scene, HEAD + b"\r\n<" + S)
            assert unchunked(got) == HEAD + b"transfer-encoding: chunked\r\n\r\n<" + STARS + b"\r\n"
        async with scene_of() as scene:
            got = await told(scene, HEAD + b"\r\n<" + S, request(version="1.0"))
            assert got == HEAD + b"connection: close\r\n\r\n<" + STARS

    run(test())


def test_members_that_the_credential_names_are_masked() -> None:
    async def test() -> None:
        async with scene_of(mask=("access_token",)) as scene:
            got = await told(scene, sized(b'{"access_token": "minted"}'), cuts=[45, 60, 62])
            assert got == sized(b'{"access_token": "******"}')

    run(test())


# codings


def deflated(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(data) + coder.flush()


CODINGS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (b"gzip", gzip.compress),
    "x-gzip": (b"x-gzip", gzip.compress),
    "deflate": (b"deflate", zlib.compress),
    "bare deflate": (b"deflate", deflated),
}


@pytest.mark.parametrize(("name", "code"), CODINGS.values(), ids=CODINGS)
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
def test_a_coded_body_is_undone_and_masked(
    name: bytes, code: Callable[[bytes], bytes], bytewise: bool
) -> None:
    async def test() -> None:
        answer = sized(
            code(b"<" + S + b">" + b"x" * 1000),
            *(b"Content-Encoding: " + name, b'ETag: "a"', b"Content-MD5: x", b"x-amz-checksum-crc32: x"),
            b"Vary: Accept-Encoding",
        )
        async with scene_of() as scene:
            got = unchunked(await told(scene, answer, cuts=list(range(len(answer))) if bytewise else None))
            head = b'ETag: W/"a"\r\nVary: Accept-Encoding\r\ntransfer-encoding: chunked\r\n\r\n'
            assert got == HEAD + head + b"<" + STARS + b">" + b"x" * 1000 + b"\r\n"
            assert scene.records.ends() == ["completed"]

    run(test())


BODILESS = {
    "HEAD": (
        "HEAD",
        HEAD + b'Content-Encoding: gzip\r\nContent-Length: 99\r\nETag: "a"\r\n\r\n',
        HEAD + b'ETag: W/"a"\r\n\r\n',
    ),
    "HEAD of a coding that is not read": (
        "HEAD",
        HEAD + b"Content-Encoding: br\r\nContent-Length: 99\r\n\r\n",
        HEAD + b"Content-Encoding: br\r\nContent-Length: 99\r\n\r\n",
    ),
    "HEAD without a coding": (
        "HEAD",
        HEAD + b"Content-Length: 99\r\n\r\n",
        HEAD + b"Content-Length: 99\r\n\r\n",
    ),
    "304": (
        "GET",
        b'HTTP/1.1 304 No\r\nContent-Encoding: gzip\r\nContent-Length: 99\r\nETag: "a"\r\n\r\n',
        b'HTTP/1.1 304 No\r\nETag: W/"a"\r\n\r\n',
    ),
    "an empty coded body": (
        "GET",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n\r\n",
    ),
}


@pytest.mark.parametrize(("method", "answer", "seen"), BODILESS.values(), ids=BODILESS)
def test_where_no_body_comes_the_head_says_what_it_would_with_one(
    method: str, answer: bytes, seen: bytes
) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            assert unchunked(await told(scene, answer, request(method))) == seen
            assert scene.records.ends() == ["completed"]

    run(test())


UNSCANNABLE = {
    "Brotli": b"Content-Encoding: br\r\n",
    "Zstandard": b"Content-Encoding: zstd\r\n",
    "gzip twice": b"Content-Encoding: gzip, gzip\r\n",
    "gzip in two fields": b"Content-Encoding: gzip\r\nContent-Encoding: gzip\r\n",
    "a part of a coded body": b"Content-Encoding: gzip\r\nContent-Range: bytes 0-5/9\r\n",
    "gRPC's own compression": b"grpc-encoding: gzip\r\n",
    "a difference": b"IM: vcdiff\r\n",
}


@pytest.mark.parametrize("fields", UNSCANNABLE.values(), ids=UNSCANNABLE)
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
def test_what_cannot_be_looked_into_is_not_passed_on(fields: bytes, bytewise: bool) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            answer = HEAD + fields + b"X: " + S + b"\r\nContent-Length: %d\r\n\r\n" % len(S) + S
            got = await told(scene, answer, cuts=list(range(len(answer))) if bytewise else None)
            assert got.startswith(b"HTTP/1.1 502 egressd: denied: the host's answer could hide a credential")
            assert b"x-egressd-reason: unscannable" in got
            assert S not in got
            assert (scene.records.decisions(), scene.records.ends()) == ([("allow", "rule")], ["unscannable"])
            assert scene.upstreams[-1].closed
        async with scene_of(credential=False) as scene:
            assert await told(scene, answer) == answer

    run(test())


def test_a_part_of_a_coded_body_is_known_by_its_status_too() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            got = await told(
                scene,
                b"HTTP/1.1 206 P\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
                request("GET"),
            )
            assert b"reason unscannable" in got

    run(test())


BROKEN = {
    "not coded at all": b"plain",
    "cut short": gzip.compress(b"x" * 100)[:-4],
    "junk behind": gzip.compress(b"x") + b"junk",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_a_coding_that_breaks_ends_the_answer_short(body: bytes) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            got = await told(scene, sized(body, b"Content-Encoding: gzip"))
            assert got.startswith(HEAD)
            assert not got.endswith(b"0\r\n\r\n")
            assert scene.records.ends() == ["upstream_protocol"]
            assert scene.client.closed

    run(test())


@pytest.mark.parametrize("where", ["head", "body", "end", "fields"])
def test_a_masker_that_fails_ends_the_answer_and_passes_nothing(where: str) -> None:
    async def test() -> None:
        async with scene_of() as scene:
            answer = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: " + S + b"\r\n\r\n"
            with mock.patch.object(veil_module.Veil, where, side_effect=RuntimeError("a fault")):
                got = await told(scene, answer)
            assert S not in got
            assert not got.endswith(b"0\r\n\r\n")
            assert scene.records.ends() == ["internal_error"]
            assert scene.client.closed

    run(test())


def test_what_is_held_back_is_lost_when_the_origin_breaks_off() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            got = await told(scene, HEAD + b"Content-Length: 9999\r\n\r\n" + b"x" * 2000 + S[:-1])
            assert re.fullmatch(HEAD + b"Content-Length: 9999\r\n\r\nx+", got)
            assert scene.records.ends() == ["upstream_closed"]

    run(test())


GUESSES = {
    "a length": (b"Content-Length: 5000\r\n", b""),
    "a length and JSON": (b"Content-Length: 5000\r\nContent-Type: application/json\r\n", b""),
    "JSON in chunks": (b"Transfer-Encoding: chunked\r\nContent-Type: application/json; v=1\r\n", b"1388\r\n"),
    "a problem in chunks": (
        b"Transfer-Encoding: chunked\r\nContent-Type: application/problem+json\r\n",
        b"1388\r\n",
    ),
    "HTML in chunks": (b"Transfer-Encoding: chunked\r\nContent-Type: Text/HTML\r\n", b"1388\r\n"),
}


@pytest.mark.parametrize(("fields", "size"), GUESSES.values(), ids=GUESSES)
def test_no_cut_of_what_streams_tells_whether_a_guess_was_right(fields: bytes, size: bytes) -> None:
    """The sandbox has its own guesses said back, cut where a piece ends: all answers look alike."""

    async def cut_at(guess: bytes) -> list[int]:
        async with scene_of() as scene:
            await scene.says(request())
            await scene.origin_says(HEAD + fields + b"\r\n" + size)
            return [
                len(await scene.origin_says(piece))
                for piece in (b"x" * (2000 - len(guess)) + guess, b"y" * 1000, b"z\n" + guess, b"y" * 500)
            ]

    async def test() -> None:
        wrong = await cut_at(b"#" * 8)
        for length in (1, 2, 8, len(S) - 1):
            assert await cut_at(S[:length]) == (wrong if length == 8 else await cut_at(b"#" * length))

    run(test())


def test_an_answer_before_the_end_of_its_request_is_masked_to_its_end() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            ask = f"POST /echo HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 99\r\n\r\nabc".encode()
            got = await told(
                scene, HEAD + b"Transfer-Encoding: chunked\r\n\r\n18\r\n<" + S + b"\r\n0\r\n\r\n", ask
            )
            assert unchunked(got) == HEAD + b"Transfer-Encoding: chunked\r\n\r\n<" + STARS + b"\r\n"

    run(test())


def test_each_answer_on_a_connection_begins_anew() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            for _ in range(3):
                await scene.says(request())
                assert await scene.origin_says(sized(S[:3])) == sized(S[:3])
                await scene.says(request())
                assert await scene.origin_says(sized(S[3:])) == sized(S[3:])
            assert len(scene.upstreams) == 1

    run(test())


def test_what_takes_its_time_to_mask_lets_others_have_their_turn() -> None:
    """A megabyte that looks like the secret everywhere, from a kilobyte: other sandboxes of this worker go on meanwhile."""

    async def test() -> None:
        async with scene_of() as scene:
            size = 4 * 1024 * 1024 // 3 * 3
            coded = gzip.compress(S[:3] * (size // 3), 9)
            await scene.says(request())
            turns: list[int] = []
            scene.upstreams[-1].arrive(sized(coded, b"Content-Encoding: gzip"))
            while len(turns) < 1000 and not scene.records.ends():
                turns.append(len(scene.client.written))
                await asyncio.sleep(0)
            steps = [after - before for before, after in itertools.pairwise(turns)]
            assert max(steps) < 1024 * 1024
            assert len(unchunked(scene.client.written)) > size
            assert scene.records.ends() == ["completed"]

    run(test())


def test_a_bomb_waits_while_the_client_does_not_read() -> None:
    async def test() -> None:
        async with scene_of() as scene:
            size = 64 * 1024 * 1024
            bomb = sized(gzip.compress(bytes(size)), b"Content-Encoding: gzip")
            await scene.says(request())
            most = 0

            def write(data: bytes) -> None:
                nonlocal most
                scene.client.written = scene.client.written[:4096]
                most += len(data)
                scene.client.paused = most > 1024 * 1024

            with mock.patch.object(scene.client, "write", write):
                origin = scene.upstreams[-1]
                for at in range(0, len(bomb), 65536):
                    origin.arrive(bomb[at : at + 65536])
                await scene.settle()
                while most < size:
                    assert most < 8 * 1024 * 1024, "more at once than a few sips stand for"
                    assert scene.client.paused
                    assert not origin.reading
                    size -= most
                    most = 0
                    scene.fill(scene.client, full=False)
                    await scene.settle()
            assert scene.records.ends() == ["completed"]

    run(test())
