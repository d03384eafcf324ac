"""A token of Microsoft Entra ID for an application, by azure-identity: by a client secret, or by a token of another issuer.

A federated token is read from its file each time, for whoever issues it writes it anew. Entra takes no token back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from azure.core.pipeline.transport import AsyncHttpTransport
from azure.core.rest import HttpRequest
from azure.identity.aio import ClientAssertionCredential, ClientSecretCredential
from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, SourceFailed, checked, read_secret
from egressd.credentials.providers.endpoint import LIFE_MOST, Answer, deadline
from egressd.credentials.providers.library import Line, Lines, hush
from egressd.policy.credential import AzureSource

_ERRORS: Final = {
    50034: "the tenant does not know the account",
    53003: "a conditional access policy forbids it",
    70011: "the scope is not valid",
    70021: "no federated identity of the application fits the token",
    90002: "there is no such tenant",
    90023: "the request is not valid",
    500011: "the tenant does not know what the scope names",
    700016: "the tenant does not know the application",
    700024: "the federated token is not valid now: compare the clocks",
    700027: "the federated token's signature is wrong",
    700211: "no federated identity of the application fits the token's issuer",
    700212: "no federated identity of the application fits the token's audience",
    700213: "no federated identity of the application fits the token's subject",
    7000112: "the application is disabled",
    7000215: "the client secret is wrong",
    7000222: "the client secret has expired",
}
"""Codes that are told (AADSTS…), and what they mean: a closed list, because any other number could be an echo."""

hush("azure")
hush("msal")


class _Azure:
    def __init__(self, source: AzureSource, ca_bundle: str | None) -> None:
        self._source = source
        self._lines = Lines(ca_bundle)

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- a token of Entra's has no place for it
        source = self._source
        if (source.client_secret is None) == (source.federated_token is None):
            raise SourceFailed("either `client_secret` or `federated_token` is given")
        if not source.authority.startswith("https://"):
            raise SourceFailed("azure-identity asks an `authority` over https alone")
        line = self._lines.line()
        trouble = ""
        async with deadline():
            try:
                token, end = await self._token(_Transport(line))
            except SourceFailed as error:
                trouble = str(error)
            except Exception as error:  # noqa: BLE001 -- whatever a library raises, its text goes no further
                trouble = _trouble(error, line)
        if trouble:  # raised out here, or its context would hold what the library raised
            raise SourceFailed(trouble)
        return _minted(token, end, line)

    async def close(self) -> None:
        """Nothing is kept."""

    async def _token(self, transport: _Transport) -> tuple[object, object]:
        """A credential is made for each token: one that is kept would give the token that it remembers."""
        source = self._source
        kept: dict[str, Any] = {"authority": source.authority, "transport": transport, "retry_total": 0}
        credential: ClientSecretCredential | ClientAssertionCredential
        if source.client_secret is not None:
            secret = await read_secret(source.client_secret)
            credential = ClientSecretCredential(source.tenant_id, source.client_id, secret, **kept)
        else:
            assert source.federated_token is not None
            assertion = await read_secret(source.federated_token)
            credential = ClientAssertionCredential(
                source.tenant_id, source.client_id, lambda: assertion, **kept
            )
        async with credential:
            given = await credential.get_token(source.scope)
        return given.token, given.expires_on


def provider(name: str, source: AzureSource, ca_bundle: str | None) -> _Azure:  # noqa: ARG001 -- every source has it
    """Return the provider of one application's tokens."""
    return _Azure(source, ca_bundle)


class _Response:
    """An answer as azure-identity wants to read it: nothing but JSON comes from where it asks."""

    def __init__(self, request: HttpRequest, answer: Answer) -> None:
        self.request = request
        self.status_code = answer.status
        self.headers = dict(answer.fields)
        self.content_type = "application/json"
        self.reason = ""
        self._body = answer.body

    async def read(self) -> bytes:
        return self._body

    def text(self, encoding: str | None = None) -> str:
        return self._body.decode(encoding or "utf-8", "replace")


class _Transport(AsyncHttpTransport[HttpRequest, _Response]):
    """The door that azure-identity asks by. What is no success is an end: by itself the library would try again."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def send(self, request: HttpRequest, **_: Any) -> _Response:
        content = request.content
        body = urlencode(content).encode() if isinstance(content, Mapping) else content
        answer = await self._line.ask(request.method, request.url, request.headers, body)
        if answer.status != 200:
            self._line.trouble = f"{answer.refused()}{_said(answer)}"
            raise SourceFailed(self._line.trouble)
        return _Response(request, answer)

    async def open(self) -> None:
        """The door opens itself."""

    async def close(self) -> None:
        """The door closes itself."""

    async def __aexit__(self, *_: object) -> None:
        """The door closes itself."""


def _said(answer: Answer) -> str:
    try:
        codes = answer.document().get("error_codes")
    except SourceFailed:
        return ""
    known = (
        [code for code in codes if isinstance(code, int) and code in _ERRORS]
        if isinstance(codes, list)
        else []
    )
    return "".join(f"; AADSTS{code}, {_ERRORS[code]}" for code in dict.fromkeys(known))


def _trouble(error: Exception, line: Line) -> str:
    """What went wrong, in our words."""
    if line.trouble:
        return line.trouble
    if line.answer is not None:
        return f"{line.answer.origin}: the answer holds no token"
    return f"azure-identity gave up ({type(error).__name__})"


def _minted(token: object, end: object, line: Line) -> Minted:
    told = line.answer
    if told is None:
        raise SourceFailed("azure-identity asked nobody for a token")
    if not isinstance(token, str) or token != token.rstrip("\r\n"):
        raise SourceFailed(f"{told.origin}: the answer holds no token")
    value = checked(token, f"{told.origin}: the token")
    if not isinstance(end, int) or end <= time.time():
        raise SourceFailed(f"{told.origin}: what it gave has expired already")
    return Minted(Token(value=SecretStr(value)), float(min(end, int(told.sent) + LIFE_MOST)))
