"""Chunks that are signed anew verify by the published rules, in whatever pieces they come, and keep their length."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.credentials.sigv4 import STREAMING, STREAMING_TRAILER, Seed, Signed, Signer, Unsignable, sign
from egressd.credentials.sigv4_chunks import CHUNK_MOST, ChunkResigner
from tests.credentials.test_sigv4 import S3_EXAMPLE, SESSION

DUMMY = b"0" * 64


def key_of(secret: str, date: str, region: str, service: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


def published(signature: str, *, trailer: bool) -> Seed:
    """The seed of the S3 reference's examples: signatures of requests that sign more fields than we do."""
    secret = S3_EXAMPLE.secret_access_key.get_secret_value()
    signer = Signer(
        key_of(secret, "20130524", "us-east-1", "s3"),
        "20130524T000000Z",
        "20130524/us-east-1/s3/aws4_request",
    )
    return Seed(signer, signature, trailer)


def body_of(chunks: Iterable[bytes], trailer: bytes = b"") -> bytes:
    """A client's body, signed with a dummy."""
    sent = b"".join(b"%x;chunk-signature=%s\r\n%s\r\n" % (len(chunk), DUMMY, chunk) for chunk in chunks)
    return sent + b"0;chunk-signature=%s\r\n" % DUMMY + trailer + b"\r\n"


def trailer_of(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in lines) + b"x-amz-trailer-signature:" + DUMMY + b"\r\n"


def resigned(seed: Seed, pieces: Iterable[bytes]) -> bytes | Unsignable:
    resigner = ChunkResigner(seed)
    out = b""
    for piece in pieces:
        found = resigner.feed(piece)
        if isinstance(found, Unsignable):
            return found
        out += found
    return resigner.finish() or out


def signatures(body: bytes) -> list[str]:
    return [found.decode() for found in re.findall(rb"signature[=:]([0-9a-f]{64})\r\n", body)]


KIB_66 = (b"a" * 65536, b"a" * 1024)


def test_the_published_chunks() -> None:
    seed = published("4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9", trailer=False)
    out = resigned(seed, [body_of(KIB_66)])
    assert isinstance(out, bytes)
    assert len(out) == 66824
    assert signatures(out) == [
        "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ]


def test_the_published_chunks_with_a_trailer() -> None:
    seed = published("106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e", trailer=True)
    out = resigned(seed, [body_of(KIB_66, trailer_of(b"x-amz-checksum-crc32c:sOO8/Q=="))])
    assert isinstance(out, bytes)
    assert len(out) == 66946
    assert signatures(out) == [
        "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
        "d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435",
    ]


def seed_of(*, trailer: bool) -> Seed:
    said = STREAMING_TRAILER if trailer else STREAMING
    found = sign(
        SESSION, "s3", "eu-central-1", method="PUT", host="b.test", target="/k",
        fields=((b"x-amz-content-sha256", said.encode()),), now=1_440_938_160.0,
    )  # fmt: skip
    assert isinstance(found, Signed)
    assert found.seed is not None
    return found.seed


def verified(body: bytes, seed: Seed) -> bytes:
    """The data of a body whose every signature holds, by the text of the S3 reference: an origin of our own."""
    key = key_of(SESSION.secret_access_key.get_secret_value(), "20150830", "eu-central-1", "s3")
    scope = "20150830T123600Z\n20150830/eu-central-1/s3/aws4_request"
    data, last = b"", seed.signature
    while True:
        head, _, body = body.partition(b"\r\n")
        size, _, signature = head.partition(b";chunk-signature=")
        chunk, body = body[: int(size, 16)], body[int(size, 16) :]
        digests = f"{hashlib.sha256().hexdigest()}\n{hashlib.sha256(chunk).hexdigest()}"
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{scope}\n{last}\n{digests}"
        last = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        assert last.encode() == signature
        if not chunk:
            break
        data += chunk
        assert body.startswith(b"\r\n")
        body = body[2:]
    if seed.trailer:
        lines, found, rest = body.partition(b"x-amz-trailer-signature:")
        assert found
        digest = hashlib.sha256(lines.replace(b"\r\n", b"\n")).hexdigest()
        text = f"AWS4-HMAC-SHA256-TRAILER\n{scope}\n{last}\n{digest}"
        assert hmac.new(key, text.encode(), hashlib.sha256).hexdigest().encode() == rest[:64]
        body = rest[66:]
    assert body == b"\r\n"
    return data


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.booleans(), st.data())
def test_every_cut_gives_the_same_and_it_verifies(
    chunks: list[bytes], trailer: bool, data: st.DataObject
) -> None:
    seed = seed_of(trailer=trailer)
    body = body_of(chunks, trailer_of(b"x-amz-checksum-sha256:abc=") if trailer else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    whole = resigned(seed, [body])
    assert isinstance(whole, bytes)
    assert len(whole) == len(body)
    assert verified(whole, seed) == b"".join(chunks)
    assert resigned(seed, pieces) == whole
    assert resigned(seed, (bytes([byte]) for byte in body)) == whole


@given(st.booleans(), st.data())
def test_a_body_that_is_cut_short_never_ends_well(trailer: bool, data: st.DataObject) -> None:
    body = body_of([b"abc", b"d"], trailer_of(b"x-amz-checksum-crc32:AAAAAA==") if trailer else b"")
    end = data.draw(st.integers(0, len(body) - 1))
    assert isinstance(resigned(seed_of(trailer=trailer), [body[:end]]), Unsignable)


@given(st.booleans(), st.lists(st.binary(max_size=60), max_size=6))
def test_the_resigner_is_total(trailer: bool, pieces: list[bytes]) -> None:
    assert isinstance(resigned(seed_of(trailer=trailer), pieces), Unsignable)


@given(st.booleans(), st.data())
def test_one_wrong_byte_in_the_framing_never_makes_another_length(trailer: bool, data: st.DataObject) -> None:
    body = body_of([b"abc"], trailer_of(b"x-amz-checksum-crc32:AAAAAA==") if trailer else b"")
    at = data.draw(st.integers(0, len(body) - 1))
    changed = body[:at] + bytes([data.draw(st.integers(0, 255))]) + body[at + 1 :]
    out = resigned(seed_of(trailer=trailer), [changed])
    assert isinstance(out, Unsignable) or len(out) == len(body)


ONE = b"1;chunk-signature=" + DUMMY + b"\r\na\r\n"
LAST = b"0;chunk-signature=" + DUMMY + b"\r\n"
SUM = b"x-amz-checksum-crc32:AAAAAA=="
REFUSED: list[tuple[str, bool, bytes]] = [
    ("nothing", False, b""),
    ("chunks of HTTP, without a signature", False, b"1\r\na\r\n0\r\n\r\n"),
    ("a signature that is too short", False, b"1;chunk-signature=" + DUMMY[1:] + b"\r\na\r\n"),
    ("one extension more", False, b"1;chunk-signature=" + DUMMY + b";a=b\r\na\r\n"),
    ("another extension before", False, b"1;a=b;chunk-signature=" + DUMMY + b"\r\na\r\n"),
    ("a space in the size", False, b" " + ONE),
    ("a sign before the size", False, b"+" + ONE),
    ("0x before the size", False, b"0x" + ONE),
    ("an underscore in the size", False, b"0_" + ONE),
    ("no size", False, ONE[1:]),
    ("a size without end", False, b"0" * 200),
    ("a line without end", False, b"1;chunk-signature=" + b"a" * 500),
    ("a bare line feed", False, ONE.replace(b"\r\n", b"\n") + LAST),
    ("a chunk larger than what is held back", False, b"%x;chunk-signature=%s\r\n" % (CHUNK_MOST + 1, DUMMY)),
    ("a size of sixteen digits", False, b"f" * 16 + b";chunk-signature=" + DUMMY + b"\r\n"),
    ("more data than the size says", False, b"1;chunk-signature=" + DUMMY + b"\r\nab\r\n" + LAST + b"\r\n"),
    ("something behind the end", False, ONE + LAST + b"\r\nGET / HTTP/1.1\r\n"),
    ("a chunk behind the last", False, LAST + ONE + LAST + b"\r\n"),
    ("a trailer that nobody announced", False, ONE + LAST + trailer_of(SUM) + b"\r\n"),
    ("no trailer where one is announced", True, ONE + LAST + b"\r\n"),
    ("a trailer without a signature", True, ONE + LAST + SUM + b"\r\n\r\n"),
    ("a signature without a trailer", True, ONE + LAST + trailer_of() + b"\r\n"),
    ("a trailer that is no checksum", True, ONE + LAST + trailer_of(b"x-amz-security-token:a") + b"\r\n"),
    ("a trailer that is another field", True, ONE + LAST + trailer_of(SUM, b"authorization:a") + b"\r\n"),
    ("a trailer with a control character", True, ONE + LAST + trailer_of(SUM + b"\0") + b"\r\n"),
    ("a trailer folded over lines", True, ONE + LAST + trailer_of(SUM, b" b") + b"\r\n"),
    ("a trailer without end", True, ONE + LAST + (SUM + b"\r\n") * 500),
    ("a trailer's line without end", True, ONE + LAST + SUM + b"A" * 5000),
    ("something behind the trailer", True, ONE + LAST + trailer_of(SUM) + b"\r\n0"),
    ("two trailers", True, ONE + LAST + trailer_of(SUM) + trailer_of(SUM) + b"\r\n"),
]


@pytest.mark.parametrize(("trailer", "body"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_other_framings_are_refused_whole_and_byte_by_byte(trailer: bool, body: bytes) -> None:
    whole = resigned(seed_of(trailer=trailer), [body])
    assert isinstance(whole, Unsignable)
    assert resigned(seed_of(trailer=trailer), (bytes([byte]) for byte in body)) == whole


def test_nothing_comes_out_after_a_refusal() -> None:
    resigner = ChunkResigner(seed_of(trailer=False))
    refused = resigner.feed(b"x\r\n")
    assert isinstance(refused, Unsignable)
    assert resigner.feed(body_of([b"a"])) is refused
    assert resigner.finish() is refused


def test_the_largest_chunk_passes_and_is_held_back_until_it_is_whole() -> None:
    resigner = ChunkResigner(seed_of(trailer=False))
    body = body_of([b"a" * CHUNK_MOST])
    held = resigner.feed(body[:CHUNK_MOST])
    rest = resigner.feed(body[CHUNK_MOST:])
    assert (held, resigner.finish()) == (b"", None)
    assert isinstance(rest, bytes)
    assert len(rest) == len(body)
