"""AWS Signature Version 4 in header fields: a request signed anew with a credential's keys, region and service. Pure and total.

The theory. A sandbox's SDK signs with keys of its own, dummies or an attacker's; nothing of that signature survives. Every slot
that holds a part of one is cleared first: `Authorization`, `X-Amz-Date`, `X-Amz-Security-Token`, the query keys of a presigned
URL of version 4 and 2, the session and region fields of its relatives. Then the request is signed as it will be sent.

Signed are `host`, `content-type`, `content-md5` and every field whose name begins with `x-amz-`: what AWS demands (the host, and
all that is its own) and what says how a body is to be read. Nothing else is: the way to the origin is verified TLS, and a field
that an intermediary may still touch (User-Agent, Accept-Encoding, Content-Length, Expect) would break the signature for nothing.
A field stays on the wire as it was sent; only in the signature are the spaces at its ends left out and those inside made one.

What is signed of the body:

* S3 and its relatives: `x-amz-content-sha256` says it. A hash, UNSIGNED-PAYLOAD and STREAMING-UNSIGNED-PAYLOAD-TRAILER are kept
  (the origin holds the body against them); the signed chunks of STREAMING-AWS4-HMAC-SHA256-PAYLOAD and …-PAYLOAD-TRAILER are
  signed anew (`sigv4_chunks`); a request that says nothing goes as UNSIGNED-PAYLOAD.
* Every other service: the body's own SHA-256, whatever the client says of it, because a body must be seen: in it stands which
  action is asked for.

Not signed at all is what would go round the rules: a form that is posted to S3 (it carries a signature of its own), a copy
within S3 (a field of it names an object that no rule has judged), and a form for STS or IAM in a coding that hides its action.

Source: AWS, "Signature Version 4 signing process" and the Amazon S3 API reference, "Authenticating requests".
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from egressd.credentials.lease import AwsKeys
from egressd.credentials.slots import AWS_QUERY, Field, clear, fold

ALGORITHM: Final = "AWS4-HMAC-SHA256"
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
STREAMING_UNSIGNED: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
STREAMING: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
STREAMING_TRAILER: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"

S3: Final = frozenset({"s3", "s3-outposts", "s3-object-lambda", "s3express"})
"""Services that encode a path once and leave its dots and slashes alone, and that need `x-amz-content-sha256`."""

_STREAMS: Final = S3 | {"vpc-lattice-svcs"}
"""Services whose bodies name no action, so that they need not be read."""

_FORMS: Final = frozenset({"sts", "iam", "redshift"})
"""Services that issue keys to a form in a body, which may not come in a coding that hides it."""

_SLOTS: Final = frozenset(
    {"x-amz-s3session-token", "x-amz-region-set", "x-amz-expires", "x-amz-sso-bearer-token"}
)
_SOURCES: Final = frozenset({"x-amz-copy-source", "x-amz-rename-source"})
"""Fields that name an object to be read besides the target's: rules judge the target alone."""
_CONTENT_HASH: Final = "x-amz-content-sha256"
_OTHERS: Final = frozenset({b"content-type", b"content-md5"})

_HASH: Final = re.compile(r"[0-9a-f]{64}")
_TARGET: Final = re.compile(r"/[!-\"$-~]*")
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,300}")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_SCOPE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY_ID: Final = re.compile(r"[A-Za-z0-9._~+=@:$-]{1,256}")
_WORD: Final = re.compile(r"[!-~]{1,16384}")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LATEST: Final = 253402300799  # the last second of the year 9999, the longest that the form has


@dataclass(frozen=True, slots=True)
class Unsignable:
    """Why a request cannot be signed, in fixed words: nothing that was sent stands in it."""

    detail: str


class Payload(Enum):
    """What a signature needs of a request's body."""

    KEPT = auto()
    """Nothing: it passes as it comes."""
    WHOLE = auto()
    """All of it, before the first byte goes."""
    CHUNKS = auto()
    """Each signed chunk, which is signed anew by `sigv4_chunks.ChunkResigner`."""


@dataclass(frozen=True, slots=True)
class Signer:
    """The key of one day, region and service, and the time and scope that are signed with it."""

    key: bytes
    stamp: str
    scope: str

    def sign(self, *lines: str) -> str:
        """Return the signature of a string to sign, its lines being joined, in hexadecimal digits."""
        return hmac.new(self.key, "\n".join(lines).encode(), hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        """Tell nothing of it: the key signs for a day."""
        return "Signer(…)"


@dataclass(frozen=True, slots=True)
class Seed:
    """What the signatures of chunks go on from: the request's own, and whether a signed trailer follows the last of them."""

    signer: Signer
    signature: str
    trailer: bool


@dataclass(frozen=True, slots=True)
class Signed:
    """A signed request: its target without the keys of a presigned URL, its fields with the signature. `seed` is given where
    the body's chunks are to be signed anew."""

    target: str
    fields: tuple[Field, ...]
    seed: Seed | None = None

    def __repr__(self) -> str:
        """Tell nothing of it: a session token is among the fields."""
        return "Signed(…)"


def payload_of(service: str, method: str, fields: Iterable[Field]) -> Payload | Unsignable:
    """Return what the signature of a request will need of its body."""
    given = tuple(fields)
    kind = _values(given, "content-type").lower()
    if service not in _STREAMS:
        coding = _values(given, "content-encoding").strip().lower()
        if service in _FORMS and (coding not in (b"", b"identity") or not _plain(kind)):
            return Unsignable("the coding of its body hides which action it asks for")
        return Payload.WHOLE
    if method == "POST" and b"multipart/form-data" in kind:
        return Unsignable("a form that is posted to S3 carries a signature of its own")
    if any(fold(name) in _SOURCES for name, _ in given):
        return Unsignable("a copy within S3 reads what no rule has judged")
    said = _said(given)
    if isinstance(said, Unsignable):
        return said
    return Payload.CHUNKS if said in (STREAMING, STREAMING_TRAILER) else Payload.KEPT


def sign(
    keys: AwsKeys,
    service: str,
    region: str,
    *,
    method: str,
    host: str,
    target: str,
    fields: Iterable[Field],
    now: float,
    body: bytes = b"",
) -> Signed | Unsignable:
    """Return a request signed with these keys, without whatever was in it of another signature.

    `host` is the authority and `target` the origin-form as they are sent; `now` is in Unix seconds; `body` is looked at where
    `payload_of` says WHOLE. Signed are host, content-type, content-md5 and every x-amz-* field, no other.
    """
    wrong = _unfit(keys, service, region, method, host, target, now)
    if wrong is not None:
        return Unsignable(wrong)
    cleared = clear(target, fields, headers=_SLOTS, parameters=AWS_QUERY)
    payload = payload_of(service, method, cleared.fields)
    if isinstance(payload, Unsignable):
        return payload
    said = hashlib.sha256(body).hexdigest() if payload is Payload.WHOLE else _said(cleared.fields)
    if isinstance(said, Unsignable):
        return said
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    sent = [*_kept(cleared.fields), (b"X-Amz-Date", stamp.encode())]
    if service in _STREAMS:
        sent.append((b"X-Amz-Content-Sha256", said.encode()))
    if keys.session_token is not None:
        sent.append((b"X-Amz-Security-Token", keys.session_token.get_secret_value().encode()))
    canonical = _canonical_fields(host, sent)
    if isinstance(canonical, Unsignable):
        return canonical
    names, lines = canonical
    path, _, query = cleared.target.partition("?")
    head = f"{method}\n{canonical_path(path, service)}\n{canonical_query(query)}\n".encode()
    request = head + b"".join(lines) + b"\n" + names + b"\n" + said.encode()
    signer = _signer(keys, stamp, region, service)
    signature = signer.sign(ALGORITHM, stamp, signer.scope, hashlib.sha256(request).hexdigest())
    credential = f"{ALGORITHM} Credential={keys.access_key_id}/{signer.scope}".encode()
    value = b"%s, SignedHeaders=%s, Signature=%s" % (credential, names, signature.encode())
    seed = Seed(signer, signature, said == STREAMING_TRAILER) if payload is Payload.CHUNKS else None
    return Signed(cleared.target, (*sent, (b"Authorization", value)), seed)


def canonical_path(path: str, service: str) -> str:
    """Return a path, sent in ASCII, as it is signed.

    S3 decodes what is sent to a key and encodes that once. Every other service takes out empty segments and dot segments, and
    encodes what is left, escapes and all.
    """
    if service in S3:
        return quote(unquote_to_bytes(path), safe="/")
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    joined = "/".join(kept)
    return quote(f"/{joined}/" if kept and path.endswith("/") else f"/{joined}", safe="/")


def canonical_query(query: str) -> str:
    """Return a query, sent in ASCII, as it is signed: names and values decoded, encoded and in order, a lone name being empty."""
    pairs = (piece.partition("=") for piece in query.split("&") if piece)
    return "&".join(
        f"{name}={value}"
        for name, value in sorted((_encoded(name), _encoded(value)) for name, _, value in pairs)
    )


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text.replace("+", " ")), safe="")


def _unfit(
    keys: AwsKeys, service: str, region: str, method: str, host: str, target: str, now: float
) -> str | None:
    """Say what of all that is to be signed has no form in a signature; a secret is never told."""
    token = keys.session_token.get_secret_value() if keys.session_token is not None else "none"
    if not (_KEY_ID.fullmatch(keys.access_key_id) and _WORD.fullmatch(token)):
        return "the keys are not such as AWS gives"
    if not _WORD.fullmatch(keys.secret_access_key.get_secret_value()):
        return "the keys are not such as AWS gives"
    if not (_SCOPE.fullmatch(service) and _SCOPE.fullmatch(region)):
        return "the service or region is not such as AWS has"
    if not (_TOKEN.fullmatch(method) and _HOST.fullmatch(host)):
        return "the method or host has no form in a signature"
    if not _TARGET.fullmatch(target):
        return "the target is not a path in ASCII"
    return None if 0 <= now <= _LATEST else "the time has no form in a signature"


def _plain(kind: bytes) -> bool:
    """Say whether a body of this type is read byte for byte as it stands."""
    if b"multipart" in kind:
        return False
    _, found, charset = kind.partition(b"charset")
    return not found or charset.strip(b"= \t\"';") in (b"utf-8", b"us-ascii", b"iso-8859-1")


def _values(fields: Iterable[Field], folded: str) -> bytes:
    """Return all that a field says, joined by commas."""
    return b",".join(value for name, value in fields if fold(name) == folded)


def _said(fields: tuple[Field, ...]) -> str | Unsignable:
    """Return what a request says of its body, UNSIGNED where it says nothing."""
    found = [value for name, value in fields if fold(name) == _CONTENT_HASH]
    if not found:
        return UNSIGNED
    said = found[0].strip().decode("latin-1")
    if len(found) == 1 and (
        said in (UNSIGNED, STREAMING_UNSIGNED, STREAMING, STREAMING_TRAILER) or _HASH.fullmatch(said)
    ):
        return said
    return Unsignable("what it says of its body is no hash, and none of the ways that can be signed anew")


def _kept(fields: Iterable[Field]) -> list[Field]:
    return [(name, value) for name, value in fields if fold(name) != _CONTENT_HASH]


def _canonical_fields(host: str, fields: Iterable[Field]) -> tuple[bytes, list[bytes]] | Unsignable:
    """Return the names of the signed fields, and their lines in order: values of one name follow each other by commas."""
    values: dict[bytes, list[bytes]] = {b"host": [host.encode()]}
    for name, value in fields:
        lower = name.lower()
        if lower in _OTHERS or lower.startswith(b"x-amz-"):
            if not _NAME.fullmatch(lower) or _CONTROL.search(value):
                return Unsignable("a field that is to be signed is no header field")
            values.setdefault(lower, []).append(b" ".join(value.split()))
    names = sorted(values)
    return b";".join(names), [b"%s:%s\n" % (name, b",".join(values[name])) for name in names]


def _signer(keys: AwsKeys, stamp: str, region: str, service: str) -> Signer:
    key = f"AWS4{keys.secret_access_key.get_secret_value()}".encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return Signer(key, stamp, f"{stamp[:8]}/{region}/{service}/aws4_request")
