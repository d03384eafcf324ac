"""The places of a request where APIs look for a key, and a request without any of the sandbox's own. Pure and total.

A destination that egressd authenticates for is reached with that credential alone: with a key of its own in any other slot the
sandbox could use the same API under somebody else's account. So every slot that an API is known to read is cleared, whatever
spelling it is sent in. Where a name is no slot here but is one at a certain API, its credential says so (`slots:`).

Bodies are not looked at: a key in a form field or in JSON is out of reach of what streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from egressd.policy.paths import decode

type Field = tuple[bytes, bytes]

HEADERS: Final = frozenset(
    {
        "authorization",
        "cookie",
        "cookie2",
        "authentication",
        "x-authorization",
        "x-auth",
        "authorization-token",
        "token",
        "jwt",
        "x-jwt",
        "bearer",
        "secret",
        "x-secret",
    }
    | {
        "api-key",
        "apikey",
        "x-api-key",
        "x-apikey",
        "x-goog-api-key",
        "x-goog-iam-authorization-token",
        "x-token",
    }
    | {"private-token", "job-token", "deploy-token", "x-gitlab-token", "x-github-token", "x-jwt-assertion"}
    | {
        "x-vault-token",
        "x-consul-token",
        "x-nomad-token",
        "x-figma-token",
        "circle-token",
        "x-buildkite-token",
    }
    | {
        "x-subject-token",
        "x-id-token",
        "x-session-token",
        "x-user-token",
        "x-honeycomb-team",
        "x-jfrog-art-api",
    }
    | {
        "x-amz-security-token",
        "x-amz-signature",
        "x-amz-credential",
        "x-amz-algorithm",
        "x-amz-signedheaders",
    }
    | {"x-amz-date", "x-rapidapi-key", "x-mashape-key", "x-functions-key", "x-auth-email", "fastly-key"}
    | {
        "x-postmark-server-token",
        "x-postmark-account-token",
        "cf-access-client-id",
        "cf-access-client-secret",
    }
    | {"cf-access-token", "x-parse-master-key", "x-parse-session-token", "x-serverless-authorization"}
)
"""Header fields that hold a key or a part of one, by their folded names."""

_ENDINGS: Final = (
    *("-api-key", "-apikey", "-api-token", "-auth-token", "-access-token", "-auth-key", "-access-key"),
    *("-app-key", "-appkey", "-application-key", "-client-secret", "-api-secret", "-password"),
    *("-subscription-key", "-authorization", "-admin-key", "-secret-key", "-session-token", "-bearer-token"),
)
"""What names of such fields end in, or are, at APIs that nobody has listed."""

QUERY: Final = frozenset(
    {
        "key",
        "api_key",
        "apikey",
        "api_token",
        "apitoken",
        "api_secret",
        "x_api_key",
        "x_goog_api_key",
        "hapikey",
    }
    | {"access_token", "accesstoken", "access_key", "accesskey", "token", "auth", "auth_token", "auth_key"}
    | {
        "authorization",
        "bearer",
        "bearer_token",
        "jwt",
        "id_token",
        "session_token",
        "private_token",
        "job_token",
    }
    | {
        "subscription_key",
        "ocp_apim_subscription_key",
        "app_key",
        "appkey",
        "application_key",
        "client_secret",
    }
    | {"secret", "secret_key", "password", "passwd", "pwd", "oauth_token", "oauth_signature"}
    | {"oauth_consumer_key", "sig", "signature", "googleaccessid", "jsessionid", "phpsessid"}
    | {
        f"x_goog_{part}"
        for part in ("algorithm", "credential", "date", "expires", "signedheaders", "signature")
    }
)
"""Query parameters that hold a key, a signature or a session, by their folded names."""

_IN_PATH: Final = frozenset({"jsessionid", "phpsessid"})
"""Parameters of a path's segments that are sessions (Jakarta Servlet §7.1.3): as good as a cookie."""

AWS_QUERY: Final = frozenset(
    {
        "awsaccesskeyid",
        "signature",
        "x_amz_security_token",
        "x_amz_algorithm",
        "x_amz_credential",
        "x_amz_date",
    }
    | {"x_amz_expires", "x_amz_signedheaders", "x_amz_signature", "x_amz_content_sha256"}
)
"""Those of a presigned URL (AWS Signature Version 4, query string; and version 2)."""

_PROTOCOLS: Final = ("openai-insecure-api-key.", "base64url.bearer.authorization.k8s.io.")
"""Subprotocols of WebSockets that are a key: browsers can send none in a header field."""

_PROTOCOL_MARKS: Final = frozenset(
    {"bearer", "access_token", "access-token", "authorization", "token", "jwt"}
)
"""Subprotocols behind which a key stands as the next one."""

_NO_LETTER = re.compile(rb"[^a-z0-9]")


@lru_cache(maxsize=4096)
def fold(name: bytes) -> str:
    """Return a field's name as the most lenient gateway sees it: without case, every odd character a hyphen."""
    return _NO_LETTER.sub(b"-", name.lower()).decode("ascii")


def fold_parameter(piece: str) -> str:
    """Return the key of a query parameter as the most lenient origin reads it: decoded, without case, `-` being `_`."""
    key = decode(piece.partition("=")[0].replace("+", " ")).partition("\0")[0]
    return re.sub(r"[. -]", "_", key.strip().partition("[")[0])


class Cleared(NamedTuple):
    """A target and fields without a key of the sandbox's; `found` names the slots that held one."""

    target: str
    fields: tuple[Field, ...]
    found: tuple[str, ...]


def clear(
    target: str,
    fields: Iterable[Field],
    *,
    headers: frozenset[str] = frozenset(),
    parameters: frozenset[str] = QUERY | AWS_QUERY,
) -> Cleared:
    """Return a request without what stands in its slots, in the order and spelling of what stays.

    `headers` are slots besides the known ones, folded; `parameters` are all slots of the query, folded. A slot that is sent
    empty is cleared, but not found.
    """
    left: list[Field] = []
    found: list[str] = []
    for name, value in fields:
        folded = fold(name)
        if is_slot(folded) or folded in headers:
            if value.strip():
                found.append(folded)
        elif folded == "sec-websocket-protocol":
            kept = _protocols(value)
            if kept != value:
                found.append(folded)
            if kept:
                left.append((name, kept))
        else:
            left.append((name, value))
    target, sessions = _clear_path(target)
    target, taken = _clear_query(target, parameters)
    return Cleared(target, tuple(left), tuple(dict.fromkeys((*found, *sessions, *taken))))


@lru_cache(maxsize=4096)
def is_slot(folded: str) -> bool:
    """Say whether a field of this folded name is known to hold a key."""
    return folded in HEADERS or f"-{folded}".endswith(_ENDINGS)


def _clear_path(target: str) -> tuple[str, list[str]]:
    path, mark, query = target.partition("?")
    if ";" not in path:
        return target, []
    found: list[str] = []
    segments: list[str] = []
    for segment in path.split("/"):
        parts = segment.split(";")
        keys = [fold_parameter(part) for part in parts[1:]]
        found += [f"path {key}" for key in keys if key in _IN_PATH]
        kept = [part for part, key in zip(parts[1:], keys, strict=True) if key not in _IN_PATH]
        segments.append(";".join([parts[0], *kept]))
    return ("/".join(segments) + mark + query, found) if found else (target, [])


def _clear_query(target: str, parameters: frozenset[str]) -> tuple[str, list[str]]:
    path, _, query = target.partition("?")
    if not query:
        return target, []
    found: list[str] = []
    pieces: list[str] = []
    changed = False
    parameters = _compact(parameters)
    for piece in query.split("&"):
        parts = piece.split(";")  # which some origins take for a separator
        keys = [fold_parameter(part) for part in parts]
        kept = [part for part, key in zip(parts, keys, strict=True) if key.replace("_", "") not in parameters]
        if len(kept) < len(parts):
            changed = True
            found += [
                f"query {key}"
                for part, key in zip(parts, keys, strict=True)
                if _is_given(part, key, parameters)
            ]
        if kept:
            pieces.append(";".join(kept))
    if not changed:
        return target, []
    return (f"{path}?{'&'.join(pieces)}" if pieces else path), found


def _is_given(part: str, key: str, parameters: frozenset[str]) -> bool:
    return key.replace("_", "") in parameters and bool(part.partition("=")[2])


@lru_cache(maxsize=256)
def _compact(parameters: frozenset[str]) -> frozenset[str]:
    """Return keys without what parts their words: `authToken` is `auth_token` to whoever names it so."""
    return frozenset(key.replace("_", "") for key in parameters)


def _protocols(value: bytes) -> bytes:
    """Return a list of subprotocols without those that are a key, or say that the next one is."""
    kept: list[bytes] = []
    after_mark = False
    for piece in value.split(b","):
        lower = piece.strip().decode("latin-1").lower()
        if after_mark or lower.startswith(_PROTOCOLS):
            after_mark = False
        elif lower in _PROTOCOL_MARKS:
            after_mark = True
        else:
            kept.append(piece)
    return value if len(kept) == value.count(b",") + 1 else b",".join(kept).strip()
