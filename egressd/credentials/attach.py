"""How a lease goes into a request. Pure: a request in, the same request with the credential out, or why not.

Two steps, because a decision is written down between them. `prepare` takes out what the sandbox brought itself and what would
hide an answer, and finds the place where the credential belongs; its result holds no secret. `attach` puts the secret in, when
the bytes are about to be written, and its result goes nowhere but there.

Whatever is not exactly as it must be is refused: a request never leaves without the credential, with two, or with a placeholder.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote

from egressd.credentials import issuing, placeholders, sigv4
from egressd.credentials.lease import AwsKeys, Lease, Token
from egressd.credentials.slots import AWS_QUERY, QUERY, Cleared, Field, clear, fold, fold_parameter
from egressd.policy.credential import Attach
from egressd.policy.reasons import Reason

WHOLE_MOST: Final = 1024 * 1024
"""Most bytes of a body that are kept to be signed."""

_LINE: Final = re.compile(r"[!-~]([ -~]*[!-~])?")
_WORD: Final = re.compile(r"[!-~]+")
_COOKIE: Final = re.compile(r"[!#-+\--:<-\[\]-~]+")
"""RFC 6265 §4.1.1, cookie-octet."""
_SAFE: Final = ":@!$&'()*+,=~"
"""What stands in a segment of a path as it is (RFC 3986 §3.3), without `;`, which some origins cut at."""

_PARTS: Final = frozenset({"range", "if-range", "x-amz-range", "x-ms-range", "x-goog-range"})
"""A part of a body hides from the mask; some storage services have a field of their own for it."""

_IN_BODY: Final = frozenset(
    {"sec-websocket-extensions", "grpc-accept-encoding", "connect-accept-encoding", "a-im", "accept-charset"}
)
"""Offers of other codings, message by message, of a difference (RFC 3229) or of characters, which the mask does not read: an
answer that takes one is refused, where it says so."""

_CODINGS: Final = ("gzip", "identity")
"""What is decoded to be masked."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request does not go; the detail is in fixed words and holds nothing that was sent."""

    reason: Reason
    detail: str


class Body(Enum):
    """What becomes of a request's body on its way."""

    PASSES = auto()
    WHOLE = auto()
    """It is kept until it is whole, at most `WHOLE_MOST`, and signed."""
    CHUNKS = auto()
    """Its signed chunks are signed anew, one by one."""


_BODIES: Final = {
    sigv4.Payload.KEPT: Body.PASSES,
    sigv4.Payload.WHOLE: Body.WHOLE,
    sigv4.Payload.CHUNKS: Body.CHUNKS,
}


class Prepared(NamedTuple):
    """A request without any key of its sandbox; `taken` names the slots that held one. There is no secret in it."""

    target: str
    fields: tuple[Field, ...]
    body: Body
    taken: tuple[str, ...] = ()


class Attached(NamedTuple):
    """A request with its credential. `judged` is the target by which the rules are to judge it: without a parameter that was
    added to its query, and else as it goes."""

    target: str
    fields: tuple[Field, ...]
    judged: str
    seed: sigv4.Seed | None = None
    """What the body's chunks are signed from."""

    def __repr__(self) -> str:
        """Tell nothing of it."""
        return "Attached(…)"


def prepare(
    lease: Lease, method: str, target: str, fields: tuple[Field, ...], *, has_body: bool = False
) -> Prepared | Refused:
    """Return a request that was allowed, ready for the credential: hop-by-hop fields are gone from it already."""
    if not lease.token_requests and (found := issuing.issues(method, target, fields)) is not None:
        return Refused(Reason.TOKEN_REQUEST, found)
    kept = _keep(lease, target, fields)
    if isinstance(kept, Refused):
        return kept
    cleared = _clear(lease, kept.target, kept.fields)
    if cleared.found and lease.client_credentials == "deny":
        return Refused(Reason.CLIENT_CREDENTIALS, f"sent in {', '.join(cleared.found)}"[:200])
    target, fields = kept.put_back(cleared.target, _narrowed(cleared.fields, lease))
    name = lease.attach.path
    if name is not None and _place(name, target) is None:
        return Refused(Reason.CREDENTIAL_SLOT_MISSING, f"{{{name}}} stands not exactly once in the path")
    body = _body_of(lease, method, fields) if has_body else Body.PASSES
    return body if isinstance(body, Refused) else Prepared(target, fields, body, cleared.found)


def _keep(lease: Lease, target: str, fields: tuple[Field, ...]) -> placeholders.Kept | Refused:
    """Take the placeholder, where the credential goes by one, out of the way of what clears its slots."""
    way = lease.attach.placeholder
    if way is None:
        return placeholders.Kept(target, fields, (), ())
    if lease.placeholder is None:
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the sandbox has no placeholder")
    kept = placeholders.keep(way, lease.placeholder, target, fields)
    if isinstance(kept, str):
        return Refused(Reason.PLACEHOLDER_LEAK, kept)
    if not kept.own_fields and not kept.own_query:
        return Refused(Reason.CREDENTIAL_SLOT_MISSING, "the placeholder stands in none of its slots")
    return kept


def attach(
    lease: Lease,
    host: str,
    method: str,
    target: str,
    fields: tuple[Field, ...],
    now: float,
    payload: bytes = b"",
) -> Attached | Refused:
    """Return a prepared request with the credential in it, at `now` (Unix seconds); `host` is its authority as it is sent.

    `payload` is the body where it was to be kept whole, empty where there is none.
    """
    if lease.expires is not None and now >= lease.expires:
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the lease has expired")
    way, material = lease.attach, lease.material
    if way.sigv4 is not None:
        if not isinstance(material, AwsKeys):
            return Refused(Reason.CREDENTIAL_UNAVAILABLE, "a signature needs AWS keys")
        if not lease.token_requests and (found := issuing.body_issues(payload)) is not None:
            return Refused(Reason.TOKEN_REQUEST, found)
        signed = sigv4.sign(
            material,
            way.sigv4.service,
            way.sigv4.region,
            method=method,
            host=host,
            target=target,
            fields=fields,
            now=now,
            body=payload,
        )
        if isinstance(signed, sigv4.Unsignable):
            return Refused(Reason.UNSIGNABLE, signed.detail)
        return Attached(signed.target, signed.fields, signed.target, signed.seed)
    if not isinstance(material, Token):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "AWS keys are for signatures alone")
    secret = material.value.get_secret_value()
    if not _fits(way, secret):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the secret does not fit into its slot")
    if way.placeholder is not None:
        replaced = placeholders.replace(way.placeholder, lease.placeholder or "", secret, target, fields)
        if isinstance(replaced, str):
            return Refused(Reason.CREDENTIAL_SLOT_MISSING, replaced)
        return Attached(*replaced, judged=replaced[0])
    if way.query is not None:
        return _in_query(way.query, secret, target, fields)
    if way.path is not None:
        return _in_path(way.path, secret, target, fields)
    field = _field(way, secret)
    return field if isinstance(field, Refused) else _with_field(field, target, fields)


def _fits(way: Attach, secret: str) -> bool:
    """Whether the secret stays one value where it goes: nothing of it ends a field, a pair or a word."""
    if way.cookie is not None:
        return _COOKIE.fullmatch(secret) is not None
    if way.placeholder is not None and any(
        fold(name.encode()) == "cookie" for name in way.placeholder.headers or ()
    ):
        return _COOKIE.fullmatch(secret) is not None
    one_word = way.bearer is not None or way.placeholder is not None
    return (_WORD if one_word else _LINE).fullmatch(secret) is not None


def _clear(lease: Lease, target: str, fields: tuple[Field, ...]) -> Cleared:
    way, headers = lease.attach, lease.slots
    query: tuple[str, ...] = ()
    if way.header is not None:
        headers = (*headers, way.header)
    elif way.query is not None:
        query = (way.query,)
    elif way.placeholder is not None:
        headers = (*headers, *(way.placeholder.headers or ()))
        query = tuple(way.placeholder.query or ())
    own, parameters = _slots(headers, query, aws=way.sigv4 is not None)
    return clear(target, fields, headers=own, parameters=parameters)


@lru_cache(maxsize=256)
def _slots(
    headers: tuple[str, ...], query: tuple[str, ...], *, aws: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the slots of a credential that are not known everywhere, folded, and all those of the query."""
    parameters = (
        AWS_QUERY if aws else QUERY | AWS_QUERY | {fold_parameter(quote(name, safe="")) for name in query}
    )
    return frozenset(fold(name.encode()) for name in headers), parameters


def _narrowed(fields: tuple[Field, ...], lease: Lease) -> tuple[Field, ...]:
    """Return the fields with nothing in them that would hide an answer from the mask."""
    left: list[Field] = []
    codings: list[bytes] = []
    for name, value in fields:
        folded = fold(name)
        if folded == "accept-encoding":
            codings.append(value)
        elif folded not in _IN_BODY and (lease.range or folded not in _PARTS):
            left.append((name, value))
    return (*left, (b"Accept-Encoding", _coding(b",".join(codings))))


def _coding(accepted: bytes) -> bytes:
    """Return the one coding to ask for: gzip where the client takes it, else none."""
    for piece in accepted.decode("latin-1").lower().split(","):
        name, _, weight = piece.partition(";")
        if name.strip() == _CODINGS[0] and not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight):
            return b"gzip"
    return b"identity"


def _body_of(lease: Lease, method: str, fields: tuple[Field, ...]) -> Body | Refused:
    if lease.attach.sigv4 is None:
        return Body.PASSES
    payload = sigv4.payload_of(lease.attach.sigv4.service, method, fields)
    if isinstance(payload, sigv4.Unsignable):
        return Refused(Reason.UNSIGNABLE, payload.detail)
    if payload is sigv4.Payload.WHOLE and any(
        fold(name) == "content-length" and (not value.isdigit() or int(value[:18]) > WHOLE_MOST)
        for name, value in fields
    ):
        return Refused(Reason.UNSIGNABLE, f"a body of more than {WHOLE_MOST} bytes")
    return _BODIES[payload]


def _field(way: Attach, secret: str) -> Field | Refused:
    if way.header is not None:
        return way.header.encode("ascii"), secret.encode()
    if way.bearer is not None:
        return b"Authorization", b"Bearer " + secret.encode()
    if way.basic is not None:
        if ":" in way.basic:
            return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the user's name holds a colon")
        return b"Authorization", b"Basic " + base64.b64encode(f"{way.basic}:{secret}".encode())
    if way.cookie is not None:
        return b"Cookie", f"{way.cookie}={secret}".encode()
    return Refused(Reason.CREDENTIAL_UNAVAILABLE, "no such way to attach")


def _with_field(field: Field, target: str, fields: tuple[Field, ...]) -> Attached | Refused:
    slot = fold(field[0])
    if any(fold(name) == slot for name, _ in fields):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "its slot is not clear")
    return Attached(target, (*fields, field), target)


def _in_query(name: str, secret: str, target: str, fields: tuple[Field, ...]) -> Attached | Refused:
    path, _, query = target.partition("?")
    key = quote(name, safe="")
    if clear(f"?{query}", (), parameters=frozenset({fold_parameter(key)})).target != (
        f"?{query}" if query else "?"
    ):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "its slot is not clear")
    joint = "" if not query or query.endswith("&") else "&"
    added = f"{path}?{query}{joint}{key}={quote(secret, safe='')}"
    return Attached(added, fields, target)


def _place(name: str, target: str) -> tuple[int, int] | None:
    """Return where `{NAME}` stands in the path, None unless it stands in the target exactly once, and in the path."""
    inner = "|".join({re.escape(name), re.escape(quote(name, safe=""))})
    found = list(re.finditer(rf"(?:\{{|%7[Bb])(?:{inner})(?:\}}|%7[Dd])", target))
    if len(found) != 1 or "?" in target[: found[0].start()]:
        return None
    return found[0].span()


def _in_path(name: str, secret: str, target: str, fields: tuple[Field, ...]) -> Attached | Refused:
    place = _place(name, target)
    if place is None:
        return Refused(Reason.CREDENTIAL_SLOT_MISSING, f"{{{name}}} stands not exactly once in the path")
    if secret in (".", ".."):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the secret is no segment of a path")
    filled = target[: place[0]] + quote(secret, safe=_SAFE) + target[place[1] :]
    return Attached(filled, fields, filled)
