"""Signatures are those of AWS: its published examples, its own library over made-up requests, and every client artefact gone."""

from __future__ import annotations

import datetime
from hashlib import sha256
from typing import Any
from unittest import mock
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from egressd.credentials.lease import AwsKeys
from egressd.credentials.sigv4 import (
    STREAMING,
    STREAMING_TRAILER,
    STREAMING_UNSIGNED,
    UNSIGNED,
    Payload,
    Signed,
    Unsignable,
    canonical_path,
    canonical_query,
    payload_of,
    sign,
)
from egressd.credentials.slots import Field

EXAMPLE = AwsKeys(
    access_key_id="AKIDEXAMPLE", secret_access_key=SecretStr("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
)
S3_EXAMPLE = AwsKeys(
    access_key_id="AKIAIOSFODNN7EXAMPLE",
    secret_access_key=SecretStr("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
)
SESSION = AwsKeys(
    access_key_id="ASIAEXAMPLE",
    secret_access_key=SecretStr("s3cr3t-of-the-lease/+"),
    session_token=SecretStr("FwoGZXIvYXdzEXAMPLE/token+of=lease=="),
)
NOW = 1_440_938_160.0  # 2015-08-30T12:36:00Z
S3_NOW = 1_369_353_600.0  # 2013-05-24T00:00:00Z
EMPTY = sha256(b"").hexdigest()


def signed(
    keys: AwsKeys = EXAMPLE,
    service: str = "s3",
    region: str = "us-east-1",
    method: str = "GET",
    host: str = "example.amazonaws.com",
    target: str = "/",
    fields: tuple[Field, ...] = (),
    now: float = NOW,
    body: bytes = b"",
) -> Signed:
    found = sign(
        keys, service, region, method=method, host=host, target=target, fields=fields, now=now, body=body
    )
    assert isinstance(found, Signed), found
    return found


def values(found: Signed, name: bytes) -> list[bytes]:
    return [value for key, value in found.fields if key.lower() == name]


def signature(found: Signed) -> str:
    (value,) = values(found, b"authorization")
    return value.rpartition(b"Signature=")[2].decode()


def names(found: Signed) -> str:
    (value,) = values(found, b"authorization")
    return value.partition(b"SignedHeaders=")[2].partition(b",")[0].decode()


# Published by AWS: the Signature Version 4 test suite, and the examples of the general and of the S3 reference.
VANILLA = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
PUBLISHED: list[tuple[str, dict[str, Any], str]] = [
    ("get-vanilla", {"service": "service"}, VANILLA),
    (
        "post-vanilla",
        {"service": "service", "method": "POST"},
        "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
    ),
    ("get-slash is get-vanilla", {"service": "service", "target": "//"}, VANILLA),
    ("get-relative is get-vanilla", {"service": "service", "target": "/example/.."}, VANILLA),
    (
        "get-vanilla-query-order-key-case",
        {"service": "service", "target": "/?Param2=value2&Param1=value1"},
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
    ),
    (
        "the general reference's ListUsers",
        {
            "service": "iam",
            "host": "iam.amazonaws.com",
            "target": "/?Action=ListUsers&Version=2010-05-08",
            "fields": ((b"Content-Type", b"application/x-www-form-urlencoded; charset=utf-8"),),
        },
        "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
    ),
    *(
        (
            f"the S3 reference's {name}",
            {
                "keys": S3_EXAMPLE,
                "host": "examplebucket.s3.amazonaws.com",
                "target": target,
                "now": S3_NOW,
                "fields": ((b"x-amz-content-sha256", EMPTY.encode()),),
            },
            expected,
        )
        for name, target, expected in (
            (
                "GET Bucket Lifecycle",
                "/?lifecycle",
                "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
            ),
            (
                "GET Bucket (List Objects)",
                "/?max-keys=2&prefix=J",
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        )
    ),
]


@pytest.mark.parametrize(
    ("given_", "expected"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_published_examples(given_: dict[str, Any], expected: str) -> None:
    assert signature(signed(**given_)) == expected


# What clients can make up: text that means the same on both sides, so that a difference is one of the signer.
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
# A slash of a key is one of the path to every client of S3: it is never sent encoded.
SEGMENTS = st.lists(st.text(max_size=8).map(lambda text: quote(text.encode("utf-8", "replace"))), max_size=5)
RAW_PATH = st.text("abZ09-._~!$&'()*+,=:@%/", max_size=30).map(lambda text: f"/{text}")
PAIRS = st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=5)
NAMES = st.sampled_from(
    [b"X-Amz-Meta-A", b"x-amz-acl", b"X-AMZ-Meta-a_b", b"content-type", b"Content-MD5", b"x-amz-Target"]
)
FIELDS = st.lists(st.tuples(NAMES, PRINTABLE.map(str.encode)), max_size=6)


def botocore_signature(
    auth: type[botocore.auth.SigV4Auth],
    service: str,
    method: str,
    target: str,
    fields: list[Field],
    body: bytes,
) -> str:
    request = AWSRequest(method=method, url=f"https://example.amazonaws.com{target}", data=body)
    for name, value in fields:
        request.headers.add_header(name.decode(), value.decode("latin-1"))
    request.context["timestamp"] = "20150830T123600Z"
    moment = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    with mock.patch("botocore.auth.get_current_datetime", return_value=moment):
        keys = Credentials(
            SESSION.access_key_id,
            SESSION.secret_access_key.get_secret_value(),
            SESSION.session_token.get_secret_value() if SESSION.session_token else None,
        )
        auth(keys, service, "eu-central-1").add_auth(request)
    found = request.headers["Authorization"]
    assert isinstance(found, str)
    return found.rpartition("Signature=")[2]


@given(SEGMENTS, PAIRS, FIELDS, st.binary(max_size=50), st.sampled_from(["GET", "PUT", "POST", "DELETE"]))
@settings(max_examples=300, deadline=None)
def test_s3_signs_as_botocore_does(
    segments: list[str], pairs: list[tuple[str, str]], fields: list[Field], body: bytes, method: str
) -> None:
    target = "/" + "/".join(segments) + query_of(pairs)
    said = (b"X-Amz-Content-SHA256", sha256(body).hexdigest().encode())
    ours = signed(SESSION, "s3", "eu-central-1", method, target=target, fields=(*fields, said))
    assert signature(ours) == botocore_signature(
        botocore.auth.S3SigV4Auth, "s3", method, ours.target, [*fields, said], body
    )


@given(RAW_PATH, PAIRS, FIELDS, st.binary(max_size=50), st.sampled_from(["GET", "PUT", "POST", "DELETE"]))
@settings(max_examples=300, deadline=None)
def test_other_services_sign_as_botocore_does(
    path: str, pairs: list[tuple[str, str]], fields: list[Field], body: bytes, method: str
) -> None:
    target = path + query_of(pairs)
    ours = signed(SESSION, "dynamodb", "eu-central-1", method, target=target, fields=tuple(fields), body=body)
    assert signature(ours) == botocore_signature(
        botocore.auth.SigV4Auth, "dynamodb", method, target, fields, body
    )


def query_of(pairs: list[tuple[str, str]]) -> str:
    clean = [pair for pair in pairs if any(pair)]
    encoded = [[quote(text.encode("utf-8", "replace"), safe="") for text in pair] for pair in clean]
    return "?" + "&".join("=".join(pair) for pair in encoded) if encoded else ""


OWN_ARTEFACTS: tuple[Field, ...] = (
    (b"Authorization", b"AWS4-HMAC-SHA256 Credential=AKIAATTACKER/20150830/us-east-1/sts/aws4_request"),
    (b"authorization", b"AWS AKIAATTACKER:c2ln"),
    (b"X-Amz-Date", b"20200101T000000Z"),
    (b"x_amz_date", b"20200101T000000Z"),
    (b"X-Amz-Security-Token", b"ATTACKER"),
    (b"X-AMZ-SECURITY-TOKEN", b"ATTACKER"),
    (b"x-amz-s3session-token", b"ATTACKER"),
    (b"X-Amz-Region-Set", b"*ATTACKER"),
    (b"x-amz-sso_bearer_token", b"ATTACKER"),
    (b"X-Amz-Signature", b"ATTACKER"),
    (b"X-Amz-Credential", b"ATTACKER"),
)
PRESIGNED = (
    "/key?versionId=7&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=ATTACKER%2F20150830&X-Amz-Date=20150830T123600Z"
    "&X-Amz-Expires=60&X-Amz-SignedHeaders=host&x-amz-signature=ATTACKER&X%2DAmz%2DSecurity-Token=ATTACKER"
    "&AWSAccessKeyId=ATTACKER&Signature=ATTACKER&partNumber=1"
)


@pytest.mark.parametrize("service", ["s3", "sts"])
@pytest.mark.parametrize("artefact", OWN_ARTEFACTS, ids=lambda field: field[0].decode())
def test_nothing_of_the_client_s_signature_survives(service: str, artefact: Field) -> None:
    plain = signed(SESSION, service, target="/key?versionId=7&partNumber=1")
    found = signed(SESSION, service, target=PRESIGNED, fields=(artefact,))
    assert (found.target, found.fields) == (plain.target, plain.fields)
    assert b"ATTACKER" not in b"".join(value for _, value in found.fields)


def test_only_the_host_content_type_content_md5_and_x_amz_fields_are_signed() -> None:
    fields = (
        (b"Content-Type", b"text/plain"),
        (b"Content-MD5", b"1B2M2Y8AsgTpgAmY7PhCfg=="),
        (b"X-Amz-Meta-b", b"1"),
        *(
            (name, b"1")
            for name in (b"User-Agent", b"Content-Length", b"Range", b"Accept", b"Date", b"X-Amzn-Trace-Id")
        ),
    )
    found = signed(SESSION, fields=fields)
    assert names(found) == (
        "content-md5;content-type;host;x-amz-content-sha256;x-amz-date;x-amz-meta-b;x-amz-security-token"
    )
    assert set(fields) <= set(found.fields)


def test_region_and_service_are_the_credential_s() -> None:
    client = (
        b"Authorization",
        b"AWS4-HMAC-SHA256 Credential=A/20150830/eu-west-1/iam/aws4_request, Signature=0",
    )
    (value,) = values(signed(SESSION, "s3", "us-east-2", fields=(client,)), b"authorization")
    assert b"Credential=ASIAEXAMPLE/20150830/us-east-2/s3/aws4_request," in value


PAYLOADS: list[tuple[str, str, str, tuple[Field, ...], Payload, str]] = [
    ("s3 without a word is unsigned", "s3", "PUT", (), Payload.KEPT, UNSIGNED),
    ("s3 keeps a hash", "s3", "PUT", ((b"x-amz-content-sha256", EMPTY.encode()),), Payload.KEPT, EMPTY),
    (
        "s3 keeps unsigned",
        "s3",
        "PUT",
        ((b"X-Amz-Content-Sha256", UNSIGNED.encode()),),
        Payload.KEPT,
        UNSIGNED,
    ),
    (
        "s3 keeps an unsigned trailer",
        "s3",
        "PUT",
        ((b"X-Amz-Content-Sha256", STREAMING_UNSIGNED.encode()),),
        Payload.KEPT,
        STREAMING_UNSIGNED,
    ),
    (
        "s3 signs chunks anew",
        "s3",
        "PUT",
        ((b"X-Amz-Content-Sha256", STREAMING.encode()),),
        Payload.CHUNKS,
        STREAMING,
    ),
    (
        "s3 signs a trailer anew",
        "s3express",
        "PUT",
        ((b"X-Amz-Content-Sha256", STREAMING_TRAILER.encode()),),
        Payload.CHUNKS,
        STREAMING_TRAILER,
    ),
    ("a lattice is told that nothing is signed", "vpc-lattice-svcs", "POST", (), Payload.KEPT, UNSIGNED),
]


@pytest.mark.parametrize("row", PAYLOADS, ids=[row[0] for row in PAYLOADS])
def test_what_s3_says_of_its_body_goes_once_and_is_signed(
    row: tuple[str, str, str, tuple[Field, ...], Payload, str],
) -> None:
    _, service, method, fields, payload, said = row
    found = signed(SESSION, service, method=method, fields=fields, body=b"not looked at")
    assert payload_of(service, method, fields) is payload
    assert values(found, b"x-amz-content-sha256") == [said.encode()]
    assert (found.seed is not None) == (payload is Payload.CHUNKS)
    assert found.seed is None or (found.seed.signature == signature(found))
    assert found.seed is None or found.seed.trailer == (said == STREAMING_TRAILER)


@pytest.mark.parametrize("said", [UNSIGNED, STREAMING, EMPTY, "x", STREAMING_UNSIGNED])
def test_other_services_sign_the_body_itself_whatever_is_said_of_it(said: str) -> None:
    fields = ((b"X-Amz-Content-Sha256", said.encode()),)
    assert payload_of("sts", "POST", fields) is Payload.WHOLE
    found = signed(SESSION, "sts", method="POST", fields=fields, body=b"Action=GetCallerIdentity")
    assert found.fields == signed(SESSION, "sts", method="POST", body=b"Action=GetCallerIdentity").fields
    assert signature(found) != signature(signed(SESSION, "sts", method="POST", body=b"Action=AssumeRole"))


UNSIGNABLE: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"{said[:40]!r} is no way to sign", {"fields": ((b"x-amz-content-sha256", said),)})
        for said in (
            b"",
            b"e3b0",
            EMPTY.upper().encode(),
            b"STREAMING-AWS4-HMAC-SHA256-EVENTS",
            b"STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD",
            b"STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD-TRAILER",
            UNSIGNED.encode() + b"\xa0",
            UNSIGNED.encode() + b", " + STREAMING.encode(),
        )
    ),
    ("it says two things of its body", {"fields": ((b"x-amz-content-sha256", UNSIGNED.encode()),) * 2}),
    (
        "it says another thing in another spelling",
        {
            "fields": (
                (b"x-amz-content-sha256", UNSIGNED.encode()),
                (b"x_amz_content_sha256", STREAMING.encode()),
            )
        },
    ),
    (
        "a browser's form to s3 carries its own signature",
        {"method": "POST", "fields": ((b"content-type", b"Multipart/Form-Data; boundary=x"),)},
    ),
    ("a copy of what no rule has judged", {"fields": ((b"X-Amz-Copy-Source", b"/other/key"),)}),
    ("such a copy in another spelling", {"fields": ((b"x_amz_copy-source", b"/other/key"),)}),
    (
        "a name for what no rule has judged",
        {"service": "s3express", "fields": ((b"x-amz-rename-source", b"k"),)},
    ),
    ("a coded form hides its action", {"service": "sts", "fields": ((b"Content-Encoding", b"gzip"),)}),
    (
        "a form in another charset hides its action",
        {
            "service": "iam",
            "fields": ((b"Content-Type", b"application/x-www-form-urlencoded; charset=utf-16"),),
        },
    ),
    (
        "a form in parts hides its action",
        {"service": "sts", "fields": ((b"Content-Type", b"multipart/form-data; boundary=x"),)},
    ),
    ("the whole of a proxy's target", {"target": "http://example.amazonaws.com/"}),
    ("no path", {"target": "*"}),
    ("an empty target", {"target": ""}),
    ("a line in the target", {"target": "/a\nb"}),
    ("a fragment", {"target": "/a#b"}),
    ("a letter outside ASCII", {"target": "/\u212a"}),
    ("a lone surrogate", {"target": "/\udc80"}),
    ("a line in the method", {"method": "GET\n/"}),
    ("a line in the host", {"host": "a\nx-amz-b:c"}),
    ("no host", {"host": ""}),
    ("a service with a slash", {"service": "s3/x"}),
    ("a region with a slash", {"region": "us/x"}),
    ("a line in a signed field", {"fields": ((b"x-amz-meta-a", b"1\nx-amz-meta-b:2"),)}),
    ("a NUL in a signed field", {"fields": ((b"x-amz-meta-a", b"1\0"),)}),
    ("a signed field with a colon in its name", {"fields": ((b"x-amz-meta:a", b"1"),)}),
    ("a signed field with a semicolon in its name", {"fields": ((b"x-amz-meta;host", b"1"),)}),
    ("a key id that ends the header", {"keys": EXAMPLE.model_copy(update={"access_key_id": "AK\r\nX: y"})}),
    ("no key id", {"keys": EXAMPLE.model_copy(update={"access_key_id": ""})}),
    ("a key id with a slash", {"keys": EXAMPLE.model_copy(update={"access_key_id": "AK/2015"})}),
    ("an empty secret", {"keys": EXAMPLE.model_copy(update={"secret_access_key": SecretStr("")})}),
    (
        "a session token of two lines",
        {"keys": EXAMPLE.model_copy(update={"session_token": SecretStr("a\nb")})},
    ),
    ("a time before all", {"now": -1.0}),
    ("a time that is none", {"now": float("nan")}),
    ("a time without end", {"now": float("inf")}),
]


@pytest.mark.parametrize("request_", [row[1] for row in UNSIGNABLE], ids=[row[0] for row in UNSIGNABLE])
def test_what_cannot_be_signed_is_refused(request_: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "keys": EXAMPLE, "service": "s3", "region": "us-east-1", "method": "GET", "host": "h.test", "target": "/",
        "fields": (), "now": NOW,
    }  # fmt: skip
    found = sign(**{**base, **request_})
    assert isinstance(found, Unsignable)
    assert EXAMPLE.secret_access_key.get_secret_value() not in repr(found)


@given(
    st.text(max_size=20),
    st.text(max_size=30),
    st.text(max_size=10),
    st.lists(st.tuples(st.binary(max_size=10), st.binary(max_size=20)), max_size=4),
    st.sampled_from(["s3", "sts", "", "\udc80"]),
    st.floats(),
)
def test_signing_is_total(
    host: str, target: str, method: str, fields: list[Field], service: str, now: float
) -> None:
    found = sign(
        SESSION,
        service,
        "r",
        method=method,
        host=host,
        target=f"/{target}",
        fields=fields,
        now=now,
        body=b"x",
    )
    assert isinstance(found, Signed | Unsignable)


PATHS = [
    ("s3", "/a b".replace(" ", "%20"), "/a%20b"),
    ("s3", "/a!b(c)*'", "/a%21b%28c%29%2A%27"),
    ("s3", "/a%2fb%7e%41", "/a/b~A"),
    ("s3", "/a//b/./../c/", "/a//b/./../c/"),
    ("s3", "/a+b%zz", "/a%2Bb%25zz"),
    ("s3", "/%e1%88%b4", "/%E1%88%B4"),
    ("bedrock", "/model/a.b-v1:0/invoke", "/model/a.b-v1%3A0/invoke"),
    ("bedrock", "/model/a.b-v1%3A0/invoke", "/model/a.b-v1%253A0/invoke"),
    ("sts", "/a//b/./../c/", "/a/c/"),
    ("sts", "/..", "/"),
    ("sts", "/", "/"),
]


@pytest.mark.parametrize(("service", "path", "canonical"), PATHS)
def test_paths_in_signatures(service: str, path: str, canonical: str) -> None:
    assert canonical_path(path, service) == canonical


QUERIES = [
    ("", ""),
    ("uploads", "uploads="),
    ("b=1&a=2", "a=2&b=1"),
    ("a=2&a=1&A=3", "A=3&a=1&a=2"),
    ("a-b=1&a=1&a%2Db=0", "a=1&a-b=0&a-b=1"),
    ("prefix=a/b&x=a+b&y=a%2bb", "prefix=a%2Fb&x=a%20b&y=a%2Bb"),
    ("a=b=c&&d", "a=b%3Dc&d="),
    ("a=%7e%zz", "a=~%25zz"),
    ("a;b=1", "a%3Bb=1"),
]


@pytest.mark.parametrize(("query", "canonical"), QUERIES)
def test_queries_in_signatures(query: str, canonical: str) -> None:
    assert canonical_query(query) == canonical


def test_no_repr_shows_a_key_or_a_token() -> None:
    fields = ((b"X-Amz-Content-Sha256", STREAMING.encode()),)
    found = signed(SESSION, method="PUT", fields=fields)
    shown = f"{found!r} {found.seed!r} {found}"
    assert found.seed is not None
    assert not any(secret in shown for secret in ("s3cr3t", "FwoGZ", repr(found.seed.signer.key)[2:-1]))
