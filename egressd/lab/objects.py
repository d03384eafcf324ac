"""An object store as S3 is, for one bucket: it takes only requests whose signature still fits.

The signature covers the method, the path, the query and the headers that the client chose (AWS Signature Version 4), so
that a request which something on the way has touched is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import quote, unquote

from egressd.lab.http1 import Exchange

BUCKET_HOST = "lab-bucket.s3.eu-central-1.amazonaws.com"
ACCESS_KEY, SECRET_KEY = "AKIALABLABLABLABLAB1", "lab-object-store-secret"

_XML = {"Content-Type": "application/xml"}
_ALGORITHM = "AWS4-HMAC-SHA256"


class ObjectStore:
    """The objects of one bucket in memory."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def answer(self, exchange: Exchange) -> None:
        """Answers PUT, GET, HEAD and DELETE of an object."""
        body = await exchange.body()
        problem = _wrong_signature(exchange, body)
        if problem:
            await exchange.reply(403, _error(problem), _XML)
            return
        key, method = exchange.seen.path, exchange.seen.method
        if method == "PUT":
            chunked = "aws-chunked" in (exchange.seen.header("content-encoding") or "")
            content = self._objects[key] = _unchunked(body) if chunked else body
            await exchange.reply(200, b"", {"ETag": _tag(content)})
        elif method in {"GET", "HEAD"} and key in self._objects:
            content = self._objects[key]
            headers = {"ETag": _tag(content), "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
            await exchange.reply(200, content, {**headers, "Content-Type": "application/octet-stream"})
        elif method == "DELETE":
            self._objects.pop(key, None)
            await exchange.reply(204)
        else:
            await exchange.reply(404, _error("NoSuchKey"), _XML)


def _wrong_signature(exchange: Exchange, body: bytes) -> str | None:
    """The error code for a request that is not signed with the one key, or None."""
    authorization = exchange.seen.header("authorization") or ""
    algorithm, _, rest = authorization.partition(" ")
    fields = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    scope = fields.get("Credential", "").split("/")
    if algorithm != _ALGORITHM or len(scope) != 5 or scope[0] != ACCESS_KEY:
        return "InvalidAccessKeyId"
    signed = fields.get("SignedHeaders", "").split(";")
    canonical = "\n".join(
        [
            exchange.seen.method,
            quote(unquote(exchange.seen.path), safe="/-_.~"),
            "&".join(sorted(exchange.seen.target.partition("?")[2].split("&"))),
            *(f"{name}:{_header(exchange, name)}" for name in signed),
            "",
            ";".join(signed),
            exchange.seen.header("x-amz-content-sha256") or hashlib.sha256(body).hexdigest(),
        ]
    )
    moment = exchange.seen.header("x-amz-date") or ""
    hashed = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    text = "\n".join([_ALGORITHM, moment, "/".join(scope[1:]), hashed])
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope[1:]:
        key = hmac.digest(key, part.encode(), "sha256")
    right = hmac.digest(key, text.encode(), "sha256").hex()
    return None if hmac.compare_digest(right, fields.get("Signature", "")) else "SignatureDoesNotMatch"


def _header(exchange: Exchange, name: str) -> str:
    values = [" ".join(value.split()) for key, value in exchange.seen.headers if key == name]
    return ",".join(values)


def _unchunked(body: bytes) -> bytes:
    """The content of an aws-chunked body, without its chunk heads and trailers."""
    content = b""
    while body:
        head, _, body = body.partition(b"\r\n")
        size = int(head.partition(b";")[0] or b"0", 16)
        if size == 0:
            break
        content, body = content + body[:size], body[size + 2 :]
    return content


def _tag(content: bytes) -> str:
    return '"' + hashlib.md5(content, usedforsecurity=False).hexdigest() + '"'


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>the lab says {code}</Message></Error>".encode()
