"""Access tokens of an OAuth 2.0 server: client credentials and refresh token (RFC 6749 §4.4, §6), JWT bearer (RFC 7523 §2.1),
token exchange (RFC 8693); revoked by RFC 7009 where the operator names that endpoint."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from typing import Final
from urllib.parse import quote

from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.assertion import signed
from egressd.credentials.providers.base import For, Minted, SourceFailed, read_secret
from egressd.credentials.providers.endpoint import Answer, Endpoint, deadline
from egressd.credentials.providers.minting import Minting
from egressd.policy.credential import OAuth2Source, SecretRef

ASSERTION_LIFE: Final = 300
"""Seconds that a signed assertion is good for; it is used at once."""

_GRANTS: Final = {
    "client_credentials": "client_credentials",
    "refresh_token": "refresh_token",
    "jwt_bearer": "urn:ietf:params:oauth:grant-type:jwt-bearer",
    "token_exchange": "urn:ietf:params:oauth:grant-type:token-exchange",
}
_PROVEN: Final = frozenset({"dpop", "pop", "mac"})
"""Types of tokens that are worth nothing without a proof in every request, which `attach` does not make (RFC 6749 §7.1)."""


def provider(_name: str, source: OAuth2Source, ca_bundle: str | None) -> OAuth2:
    """Return the provider of one credential."""
    return OAuth2(source, ca_bundle)


class OAuth2:
    """A client of one token endpoint."""

    def __init__(self, source: OAuth2Source, ca_bundle: str | None = None) -> None:
        self._source = source
        self._endpoint = Endpoint(source.token_url, ca_bundle)
        self._revocation = Endpoint(source.revocation_url, ca_bundle) if source.revocation_url else None
        self._minting = Minting()
        self._turn = asyncio.Lock()
        self._rotated: tuple[SecretStr, SecretStr] | None = None
        """The refresh token as the operator's file has it, and the one that the server has replaced it by since."""

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- a client is the same for everybody
        """Return an access token; raises SourceFailed."""
        return await self._minting.run(self._mint())

    async def close(self) -> None:
        """Wait for what is on its way."""
        await self._minting.close()

    async def _mint(self) -> Minted:
        async with deadline():
            if self._source.grant == "refresh_token":
                async with self._turn:  # two uses of one refresh token look like a theft (RFC 9700 §4.14)
                    return await self._refresh()
            return self._minted(await self._ask(await self._parameters()))

    async def _refresh(self) -> Minted:
        kept = await _needed(self._source.refresh_token, "refresh_token")
        if self._rotated is not None and self._rotated[0].get_secret_value() == kept:
            current = self._rotated[1].get_secret_value()
        else:  # the first one, or the operator has put a new one there
            current = kept
        answer = await self._ask({"refresh_token": current})
        if answer.document().get("refresh_token") is not None:
            fresh = answer.secret(answer.document()["refresh_token"])
            self._rotated = (SecretStr(kept), SecretStr(fresh))
        return self._minted(answer)

    async def _parameters(self) -> dict[str, str]:
        source = self._source
        if source.grant == "jwt_bearer":
            return {"assertion": await self._assertion()}
        if source.grant == "token_exchange":
            subject = await _needed(source.subject_token, "subject_token")
            return {
                "subject_token": subject,
                "subject_token_type": source.subject_token_type,
                **({"audience": source.audience} if source.audience is not None else {}),
            }
        return {"audience": source.audience} if source.audience is not None else {}

    async def _assertion(self) -> str:
        source = self._source
        issuer = source.issuer or source.client_id
        if issuer is None:
            raise SourceFailed("jwt_bearer needs `issuer` or `client_id`")
        now = int(time.time())
        claims = {
            "iss": issuer,
            "sub": source.subject or issuer,
            "aud": source.audience or source.token_url,
            "iat": now,
            "exp": now + ASSERTION_LIFE,
            "jti": str(uuid.uuid4()),
        }
        pem = await _needed(source.key, "key", lines=True)
        return await signed(claims, pem, source.algorithm, source.key_id)

    async def _ask(self, parameters: dict[str, str]) -> Answer:
        source = self._source
        form = {"grant_type": _GRANTS[source.grant], **parameters}
        if source.scopes is not None:
            form["scope"] = " ".join(source.scopes)
        if source.resource is not None:
            form["resource"] = source.resource
        answer = await self._authenticated(self._endpoint, form)
        if answer.status != 200:
            raise answer.refused()
        return answer

    async def _authenticated(self, endpoint: Endpoint, form: dict[str, str]) -> Answer:
        """Ask with the client's authentication (RFC 6749 §2.3.1)."""
        source = self._source
        fields: dict[str, str] = {}
        if source.authentication != "none" and source.client_secret is not None:
            secret = await read_secret(source.client_secret)
            if source.client_id is None:
                raise SourceFailed("client_secret needs `client_id`")
            if source.authentication == "basic":
                pair = f"{quote(source.client_id, safe='')}:{quote(secret, safe='')}"  # a space is %20, which all read
                fields["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            else:
                form |= {"client_id": source.client_id, "client_secret": secret}
        elif source.client_id is not None:
            form["client_id"] = source.client_id
        return await endpoint.ask("POST", fields=fields, form=form)

    def _minted(self, answer: Answer) -> Minted:
        document = answer.document()
        kind = document.get("token_type")
        if isinstance(kind, str) and kind.lower() in _PROVEN:
            raise SourceFailed(f"{answer.origin}: its token needs a proof in every request")
        value = answer.secret(document.get("access_token"))
        expires = answer.until(document.get("expires_in"))

        async def revoke() -> None:
            assert self._revocation is not None
            async with deadline():
                form = {"token": value, "token_type_hint": "access_token"}
                gone = await self._authenticated(self._revocation, form)
                if gone.status != 200:
                    raise gone.refused()

        return Minted(
            Token(value=SecretStr(value)), expires, revoke if self._revocation is not None else None
        )


async def _needed(ref: SecretRef | None, key: str, *, lines: bool = False) -> str:
    if ref is None:
        raise SourceFailed(f"this grant needs `{key}`")
    return await read_secret(ref, lines=lines)
