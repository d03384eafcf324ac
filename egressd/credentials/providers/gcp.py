"""An access token of a Google service account, by google-auth: of its own, or of one that it may impersonate.

A key's own token lives for as long as Google says, an hour; `lifetime` is what an impersonated one is asked to live. Google takes
neither back. Without `key` the account is that of egressd's own surroundings (application default credentials).
"""

from __future__ import annotations

import datetime as dt
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import google.auth
from google.auth import impersonated_credentials
from google.auth.credentials import Credentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, MalformedError, TransportError
from google.auth.transport import Request, Response
from google.oauth2 import service_account
from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, SourceFailed, checked, read_secret
from egressd.credentials.providers.endpoint import LIFE_MOST
from egressd.credentials.providers.library import Line, Lines, hush, run
from egressd.policy.credential import GcpSource

IAM_SCOPE: Final = "https://www.googleapis.com/auth/iam"
"""What an account needs to impersonate another."""

_ACCOUNT: Final = re.compile(r"[A-Za-z0-9.@_:+-]{3,254}")
_METADATA: Final = frozenset({"http://metadata.google.internal/", "http://169.254.169.254"})
"""Of a machine at Google, which is asked without TLS where application default credentials are to be found."""

hush("google")


class _Gcp:
    def __init__(self, source: GcpSource, ca_bundle: str | None) -> None:
        self._source = source
        self._lines = Lines(ca_bundle)

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- a token of Google's has no place for it
        source = self._source
        if source.impersonate is not None and not _ACCOUNT.fullmatch(source.impersonate):
            raise SourceFailed("`impersonate` is no service account's address")
        key = await read_secret(source.key, lines=True) if source.key is not None else None
        line = self._lines.line(_METADATA if key is None else frozenset())
        work: Callable[[], tuple[object, object]] = lambda: self._token(line, key)  # noqa: E731 -- it is given to a thread
        token, expiry = await run(work, lambda error: _trouble(error, line))
        return _minted(token, expiry, line, impersonated=source.impersonate is not None)

    async def close(self) -> None:
        """Nothing is kept."""

    def _token(self, line: Line, key: str | None) -> tuple[object, object]:
        """In a thread."""
        source, request = self._source, _Request(line)
        scopes = source.scopes if source.impersonate is None else [IAM_SCOPE]
        credentials: Credentials
        if key is not None:
            info = _info(key, source.token_url)
            credentials = service_account.Credentials.from_service_account_info(info, scopes=scopes)
        else:
            credentials, _ = google.auth.default(scopes=scopes, request=request)
        if source.impersonate is not None:
            url = source.iam_url
            path = f"/v1/projects/-/serviceAccounts/{source.impersonate}:generateAccessToken"
            credentials = impersonated_credentials.Credentials(
                credentials,
                source.impersonate,
                source.scopes,
                lifetime=source.lifetime,
                iam_endpoint_override=None if url is None else url.rstrip("/") + path,
            )
        credentials.refresh(request)
        return credentials.token, credentials.expiry


def provider(name: str, source: GcpSource, ca_bundle: str | None) -> _Gcp:  # noqa: ARG001 -- every source has it
    """Return the provider of one service account's tokens."""
    return _Gcp(source, ca_bundle)


class _Answer(Response):
    """An answer as google-auth wants to read it."""

    def __init__(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self._status, self._headers, self._data = status, headers, data

    @property
    def status(self) -> int:
        return self._status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    @property
    def data(self) -> bytes:
        return self._data


class _Request(Request):
    """The door that google-auth asks by. What is no success is an end: by itself the library would try again for long."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ARG002 -- the door has its own
        **_: Any,
    ) -> _Answer:
        trouble = ""
        try:
            answer = self._line.ask_blocking(method, url, headers or {}, body)
            if answer.status == 200:
                return _Answer(answer.status, answer.fields, answer.body)
            trouble = self._line.trouble = str(answer.refused())
        except SourceFailed as error:
            trouble = str(error)
        raise TransportError(trouble)


def _info(key: str, token_url: str | None) -> dict[str, Any]:
    try:
        info = json.loads(key)
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict) or info.get("type") != "service_account":
        raise SourceFailed("`key` is no service account key in JSON")
    return info if token_url is None else {**info, "token_uri": token_url}


def _trouble(error: Exception, line: Line) -> str:
    """What went wrong, in our words."""
    if isinstance(error, DefaultCredentialsError) and not isinstance(error, MalformedError):
        return "no application default credentials in egressd's surroundings"
    if line.trouble:
        return line.trouble
    if line.answer is not None:
        return f"{line.answer.origin}: the answer holds no token"
    if isinstance(error, GoogleAuthError | ValueError | KeyError | TypeError):
        return "`key` is no service account key that can sign"
    return f"google-auth gave up ({type(error).__name__})"


def _minted(token: object, expiry: object, line: Line, *, impersonated: bool) -> Minted:
    told = line.answer
    if told is None:
        raise SourceFailed("google-auth asked nobody for a token")
    if not isinstance(token, str) or token != token.rstrip("\r\n"):
        raise SourceFailed(f"{told.origin}: the answer holds no token")
    value = checked(token, f"{told.origin}: the token")
    if not isinstance(expiry, dt.datetime):
        raise SourceFailed(f"{told.origin}: the answer does not say when the token ends")
    end = expiry.replace(tzinfo=expiry.tzinfo or dt.UTC)  # google-auth's times are UTC, and do not say so
    until = told.at(end.isoformat()) if impersonated else end.timestamp()
    if until is None or until <= time.time():
        raise SourceFailed(f"{told.origin}: what it gave has expired already")
    return Minted(Token(value=SecretStr(value)), min(until, told.sent + LIFE_MOST))
