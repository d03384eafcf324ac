"""Secrets of HashiCorp Vault or OpenBao by hvac: a field of a kv secret, or of a dynamic one, whose lease is renewed and revoked.

For every secret egressd logs in anew and, once it is given back, logs out: a token that is revoked takes its leases with it. That
much Vault's `default` policy permits to everybody, so no power over others' leases is needed. A token of the operator's own is
neither renewed nor revoked; there the lease itself is, which the token's policy must permit (`sys/leases/revoke`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import hvac.adapters
from hvac.api.auth_methods import JWT, AppRole
from hvac.api.auth_methods import Token as TokenMethod
from hvac.api.system_backend import Lease as Leases
from pydantic import SecretStr

from egressd.credentials.lease import AwsKeys, Material, Token
from egressd.credentials.providers.base import For, Minted, SourceFailed, read_secret
from egressd.credentials.providers.endpoint import Answer, Endpoint, deadline
from egressd.credentials.providers.minting import Minting
from egressd.policy.credential import VaultSource

LOG_OUT: Final = 2.0
"""Seconds for a log-out that nobody waits for; it may come on top of a mint that has failed."""


def provider(_name: str, source: VaultSource, ca_bundle: str | None) -> Vault:
    """Return the provider of one credential."""
    return Vault(source, ca_bundle)


class _Adapter(hvac.adapters.Adapter):  # type: ignore[misc]  # hvac ships no types
    """hvac's seam for another transport: its methods return what this returns, an awaitable answer of our bounded door.

    hvac's own would follow redirects, read without a bound and block, and its errors hold what the server said.
    """

    def __init__(self, endpoint: Endpoint, namespace: str | None, token: str | None = None) -> None:
        # Not super's: it would make a session of requests, which nothing uses.
        self._endpoint = endpoint
        self.namespace = namespace
        self.token = token

    def request(
        self, method: str, url: str, *, json: Mapping[str, object] | None = None, **_unused: object
    ) -> Awaitable[Answer]:
        """Return the answer to come; raises SourceFailed for any status but success."""
        return self._ask(method.upper(), url, json)

    def login(self, url: str, use_token: bool = True, **kwargs: Any) -> Awaitable[Answer]:  # noqa: ARG002 -- hvac's
        """Return the answer to a login; which token is used from then on is not the adapter's business."""
        return self.request("post", url, **kwargs)

    def get_login_token(self, response: object) -> str:
        """hvac asks for it where it reads answers itself, which it never does here."""
        raise NotImplementedError

    async def _ask(self, method: str, url: str, json: Mapping[str, object] | None) -> Answer:
        fields = {"X-Vault-Request": "true"}
        if self.token is not None:
            fields["X-Vault-Token"] = self.token
        if self.namespace is not None:
            fields["X-Vault-Namespace"] = self.namespace
        answer = await self._endpoint.ask(method, url, fields=fields, document=json)
        if answer.status not in {200, 204}:
            raise answer.refused()
        return answer


@dataclass(slots=True, eq=False)
class _Login:
    """A token that reads with Vault. `expires` is None where it never does."""

    adapter: _Adapter = field(repr=False)
    expires: float | None
    ours: bool
    """We logged in for it, so it is renewed and revoked by us."""
    renewable: bool = False

    async def renew(self) -> None:
        """Make it live longer; raises SourceFailed."""
        if self.ours and self.renewable:
            answer = await TokenMethod(self.adapter).renew_self()
            self.expires = _token_end(answer, _member(answer.document(), "auth"))

    async def leave(self) -> None:
        """Revoke it, with all its leases; raises SourceFailed."""
        await TokenMethod(self.adapter).revoke_self()


class Vault:
    """One path of one server, read by one identity."""

    def __init__(self, source: VaultSource, ca_bundle: str | None = None) -> None:
        self._source = source
        self._endpoint = Endpoint(source.address, source.ca or ca_bundle)
        self._minting = Minting()
        self._logins: set[_Login] = set()

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- the path says what it is for
        """Return the secret, read anew; raises SourceFailed."""
        return await self._minting.run(self._mint())

    async def close(self) -> None:
        """Log out wherever egressd has logged in, which ends the leases that hang on it; never raises."""
        await self._minting.close()
        await asyncio.gather(*(self._log_out(login) for login in tuple(self._logins)))

    async def _mint(self) -> Minted:
        async with deadline():
            login = await self._log_in()
            minted = None
            try:
                answer = await login.adapter.get(f"/v1/{self._source.path.strip('/')}")
                minted = await self._read(answer, login)
            finally:
                if minted is None or minted.revoke is None:
                    await self._log_out(login)
            return minted

    async def _log_in(self) -> _Login:
        auth, namespace = self._source.auth, self._source.namespace
        if auth.token is not None:
            adapter = _Adapter(self._endpoint, namespace, await read_secret(auth.token))
            answer = await TokenMethod(adapter).lookup_self()
            # 0: it never expires
            ttl = _member(answer.document(), "data").get("ttl") or None
            return _Login(adapter, answer.until(ttl), ours=False)
        adapter = _Adapter(self._endpoint, namespace)
        if auth.approle is not None:
            role = auth.approle
            secret = await read_secret(role.secret_id)
            answer = await AppRole(adapter).login(
                role.role_id, secret, use_token=False, mount_point=role.mount
            )
        else:
            assert auth.jwt is not None
            jwt = await read_secret(auth.jwt.jwt)
            answer = await JWT(adapter).jwt_login(auth.jwt.role, jwt, use_token=False, path=auth.jwt.mount)
        given = _member(answer.document(), "auth")
        adapter.token = answer.secret(given.get("client_token"))
        batch = given.get("token_type") == "batch"  # it can be neither renewed nor revoked
        login = _Login(adapter, None, ours=not batch, renewable=given.get("renewable") is True)
        if login.ours:
            self._logins.add(login)
        try:
            login.expires = _token_end(answer, given)
        except SourceFailed:
            await self._log_out(login)
            raise
        return login

    async def _log_out(self, login: _Login) -> None:
        """Best effort: what we logged in with expires by itself too."""
        if login in self._logins:
            self._logins.discard(login)
            with suppress(SourceFailed):
                async with deadline(LOG_OUT):
                    await login.leave()

    async def _read(self, answer: Answer, login: _Login) -> Minted:
        lease = answer.document().get("lease_id")
        if not isinstance(lease, str) or not lease:
            return self._unleased(answer)
        try:
            return self._leased(
                answer, login, lease, self._material(answer, _member(answer.document(), "data"))
            )
        except SourceFailed:
            if not login.ours:  # else it goes with its login
                with suppress(SourceFailed):
                    await Leases(login.adapter).revoke_lease(lease)
            raise

    def _unleased(self, answer: Answer) -> Minted:
        document = answer.document()
        data = _member(document, "data")
        metadata = data.get("metadata")
        if isinstance(metadata, dict) and isinstance(data.get("data"), dict):  # kv v2
            expires = answer.at(metadata.get("deletion_time") or None)
            return Minted(self._material(answer, data["data"]), expires)
        # Of what has no lease, an identity token and a static role's password say their time in `ttl`.
        life = document.get("lease_duration") or None
        if life is None and isinstance(data.get("ttl"), int):
            life = data["ttl"]
        return Minted(self._material(answer, data), answer.until(life))

    def _leased(
        self, answer: Answer, login: _Login, lease: str, material: Material, life: float | None = None
    ) -> Minted:
        """Return what was leased or renewed; `life`, in seconds, is what it had at first, None at first."""
        document = answer.document()
        end = answer.until(document.get("lease_duration"))
        # A lease dies with the token that it was given to.
        expires = min((moment for moment in (end, login.expires) if moment is not None), default=None)
        if life is None and expires is not None:
            life = expires - answer.sent

        async def revoke() -> None:
            async with deadline():
                if not login.ours:
                    await Leases(login.adapter).revoke_lease(lease)
                elif login in self._logins:
                    await login.leave()
                    self._logins.discard(login)

        async def renew() -> Minted:
            async with deadline():
                await login.renew()
                answer = await Leases(login.adapter).renew_lease(lease)
            renewed = self._leased(answer, login, lease, material, life)
            if life is not None and renewed.expires is not None and renewed.expires - time.time() < life / 2:
                raise SourceFailed(f"{answer.origin}: the lease is near the end of its longest life")
            return renewed

        renewable = document.get("renewable") is True
        return Minted(material, expires, revoke, renew if renewable else None)

    def _material(self, answer: Answer, data: Mapping[str, Any]) -> Material:
        name = self._source.field
        if name not in data and {"access_key", "secret_key"} <= data.keys():  # the AWS engine's
            session = data.get("session_token") or data.get("security_token")
            return AwsKeys(
                access_key_id=answer.secret(data["access_key"]),
                secret_access_key=SecretStr(answer.secret(data["secret_key"])),
                session_token=SecretStr(answer.secret(session)) if session else None,
            )
        if name not in data:
            raise SourceFailed(f"{answer.origin}: the secret has no field {name}")
        return Token(value=SecretStr(answer.secret(data[name])))


def _token_end(answer: Answer, auth: Mapping[str, Any]) -> float | None:
    """When a token ends; a lease of 0 s never does."""
    return answer.until(auth.get("lease_duration") or None)


def _member(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    if not isinstance(value, dict):
        raise SourceFailed(f"the answer has no `{name}`")
    return value
