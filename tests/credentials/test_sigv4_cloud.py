"""A service that checks signatures takes what was signed anew, and refuses it when the key is another."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from egressd.credentials.lease import AwsKeys
from egressd.credentials.sigv4 import STREAMING, STREAMING_UNSIGNED, UNSIGNED, Signed, sign
from egressd.credentials.sigv4_chunks import ChunkResigner
from egressd.credentials.slots import Field
from tests.credentials.cloud import BUCKET, REGION, Cloud, cloud
from tests.credentials.test_sigv4_chunks import body_of

BODY = b"six hundred bytes or so " * 25


@pytest.fixture(scope="module")
def aws() -> Iterator[Cloud]:
    with cloud() as running:
        yield running


def call(
    aws: Cloud,
    service: str,
    method: str,
    target: str,
    fields: tuple[Field, ...] = (),
    body: bytes = b"",
    *,
    keys: AwsKeys | None = None,
    region: str = REGION,
) -> tuple[int, bytes]:
    found = sign(
        keys or aws.keys, service, region, method=method, host=aws.host, target=target, fields=fields,
        now=time.time(), body=body,
    )  # fmt: skip
    assert isinstance(found, Signed), found
    if found.seed is not None:
        sent = ChunkResigner(found.seed).feed(body)
        assert isinstance(sent, bytes)
        assert len(sent) == len(body)
        body = sent
    return aws.ask(method, found.target, found.fields, body)


def said(text: str) -> Field:
    return b"x-amz-content-sha256", text.encode()


CHUNKED: tuple[Field, ...] = (
    (b"Content-Encoding", b"aws-chunked"),
    (b"X-Amz-Decoded-Content-Length", str(len(BODY)).encode()),
)
UNSIGNED_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
UPLOADS: list[tuple[str, tuple[Field, ...], bytes]] = [
    ("no word of its body", (), BODY),
    ("a hash", (said(hashlib.sha256(BODY).hexdigest()),), BODY),
    ("an unsigned body", (said(UNSIGNED),), BODY),
    ("signed chunks", (said(STREAMING), *CHUNKED), body_of([BODY[:400], BODY[400:]])),
    ("unsigned chunks", (said(STREAMING_UNSIGNED), *CHUNKED), UNSIGNED_CHUNKS),
    ("a presigned URL's rest", ((b"X-Amz-Date", b"20200101T000000Z"),), BODY),
    (
        "the signature of a dummy",
        (
            (b"Authorization", b"AWS4-HMAC-SHA256 Credential=AKIADUMMY/20200101/us-east-1/s3/aws4_request"),
            (b"X-Amz-Security-Token", b"dummy"),
        ),
        BODY,
    ),
]


@pytest.mark.parametrize(("fields", "body"), [row[1:] for row in UPLOADS], ids=[row[0] for row in UPLOADS])
def test_s3_takes_an_upload_and_gives_it_back(aws: Cloud, fields: tuple[Field, ...], body: bytes) -> None:
    target = f"/{BUCKET}/folder/a%20name%3D%E1%88%B4"
    extra = ((b"Content-Type", b"text/plain"), (b"X-Amz-Meta-Note", b"  two   spaces "))
    status, answer = call(aws, "s3", "PUT", target, (*fields, *extra), body)
    assert status == 200, answer
    assert call(aws, "s3", "GET", target) == (200, BODY)


def test_s3_lists_by_a_query_that_is_not_in_order(aws: Cloud) -> None:
    call(aws, "s3", "PUT", f"/{BUCKET}/listed/one", (), BODY)
    status, answer = call(aws, "s3", "GET", f"/{BUCKET}?prefix=listed%2F&list-type=2&delimiter=%2F")
    assert (status, b"<Key>listed/one</Key>" in answer) == (200, True)


def test_sts_takes_a_signed_form(aws: Cloud) -> None:
    form = b"Action=GetCallerIdentity&Version=2011-06-15"
    kind = ((b"Content-Type", b"application/x-www-form-urlencoded; charset=utf-8"),)
    status, answer = call(aws, "sts", "POST", "/", kind, form)
    assert (status, b"user/egressd" in answer) == (200, True)


@pytest.mark.parametrize(
    ("service", "method", "target"), [("s3", "PUT", f"/{BUCKET}/x"), ("sts", "POST", "/")]
)
def test_a_wrong_secret_is_refused(aws: Cloud, service: str, method: str, target: str) -> None:
    wrong = aws.keys.model_copy(update={"secret_access_key": SecretStr("w" * 40)})
    form = b"Action=GetCallerIdentity&Version=2011-06-15" if service == "sts" else BODY
    kind = ((b"Content-Type", b"application/x-www-form-urlencoded"),) if service == "sts" else ()
    assert call(aws, service, method, target, kind, form)[0] == 200
    status, answer = call(aws, service, method, target, kind, form, keys=wrong)
    assert (status, b"SignatureDoesNotMatch" in answer) == (403, True)


def test_what_is_changed_after_it_was_signed_is_refused(aws: Cloud) -> None:
    found = sign(
        aws.keys, "s3", REGION, method="GET", host=aws.host, target=f"/{BUCKET}/a", fields=(), now=time.time()
    )
    assert isinstance(found, Signed)
    status, answer = aws.ask("GET", f"/{BUCKET}/b", found.fields)
    assert (status, b"SignatureDoesNotMatch" in answer) == (403, True)
