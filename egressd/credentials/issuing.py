"""Requests that issue further credentials: with one of them the sandbox would hold a key after all. Pure and total.

A credential is lent for what a rule names; a token that its owner's authority hands out for it is good for everything it is good
for, as long as it lives, wherever it is sent from. So such requests are recognised at the places where the field's APIs have
them, and pass only where the credential says `token_requests: true`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from egressd.credentials.slots import Field, fold, fold_parameter
from egressd.policy.paths import decode

ACTIONS: Final = frozenset(
    {"assumerole", "assumerolewithsaml", "assumerolewithwebidentity", "assumeroot", "getsessiontoken"}
    | {"getfederationtoken", "getdelegatedaccesstoken", "getwebidentitytoken", "createaccesskey"}
    | {"createservicespecificcredential", "resetservicespecificcredential", "createloginprofile"}
    | {
        "updateloginprofile",
        "getcredentialsforidentity",
        "getopenidtoken",
        "initiateauth",
        "admininitiateauth",
    }
    | {"getopenidtokenfordeveloperidentity", "getrolecredentials", "getauthorizationtoken", "createtoken"}
    | {"createtokenwithiam", "getclustercredentials", "getclustercredentialswithiam", "createapikey"}
    | {
        "getresourceoauth2token",
        "getresourceapikey",
        "getworkloadaccesstoken",
        "getworkloadaccesstokenforjwt",
    }
)
"""Of AWS (query API `Action=`, JSON `X-Amz-Target`, Smithy RPC path) and those that speak like it, in lower case."""

_ENDS: Final = frozenset(
    {
        "token",
        "tokens",
        "access_token",
        "access_tokens",
        "accesstoken",
        "accesstokens",
        "api_keys",
        "api-keys",
    }
    | {"apikeys", "access_keys", "admin_api_keys", "personal_access_tokens", "deploy_tokens", "deploy_keys"}
    | {"client_secrets", "service_tokens", "refresh_token", "oauth2token", "authorization-token", "id_token"}
)
"""Last segments of paths that are posted to for one: OAuth 2.0, GitHub, GitLab, npm, Kubernetes, OpenAI, CodeArtifact."""

_VERBS: Final = re.compile(
    r":(generateaccesstoken|generateidtoken|signblob|signjwt|exchangetoken|generateapikey)\Z"
)
"""Custom methods of Google's APIs."""

_LOGINS: Final = re.compile(
    r"/auth/(?:[^/]+/)+login(?:/|\Z)|/auth/token/(?:create|renew|roles)|/realtime/sessions\Z"
)
"""Of Vault and OpenBao, and OpenAI's sessions, whose answer holds a key."""

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def issues(method: str, target: str, fields: Iterable[Field]) -> str | None:
    """Return what in a request's head says that it asks for a credential, None when nothing does."""
    path, _, query = target.partition("?")
    found = _action_of(query) if query else None
    if found is not None:
        return found
    keys = {fold_parameter(piece) for piece in re.split("[&;]", query)} if query else set()
    lower = decode(path) if "%" in path or not path.isascii() else path.lower()
    segments = lower.strip("/").split("/")
    if not ACTIONS.isdisjoint(segments):
        return "an action that issues credentials"
    if _VERBS.search(lower) or _LOGINS.search(lower):
        return "a path that issues credentials"
    if segments[-1] in _ENDS and (
        method not in _READING or (segments[-1] == "token" and keys & {"service", "scope"})
    ):
        return "a token endpoint"
    if "session" in keys and method == "GET" and len(segments) <= 2:
        return "a session of S3"
    for name, value in fields:
        if (
            fold(name) == "x-amz-target"
            and value.rpartition(b".")[2].strip().lower().decode("latin-1") in ACTIONS
        ):
            return "an action that issues credentials"
    return None


def body_issues(body: bytes) -> str | None:
    """Return what in a form says that its request asks for a credential, None when nothing does.

    Whatever the request calls its body: servers of such actions do not all look at that.
    """
    return _action_of(body.decode("latin-1"))


def _action_of(form: str) -> str | None:
    for piece in re.split("[&;]", form):
        key = fold_parameter(piece)
        if key == "grant_type":
            return "a token endpoint"
        if key == "action" and decode(piece.partition("=")[2].replace("+", " ")).strip() in ACTIONS:
            return "an action that issues credentials"
    return None
