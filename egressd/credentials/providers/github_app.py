"""Installation tokens of a GitHub App: for named repositories and permissions only, deleted at GitHub when given back."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.assertion import signed
from egressd.credentials.providers.base import For, Minted, SourceFailed, read_secret
from egressd.credentials.providers.endpoint import ANSWER_MOST, Endpoint, deadline
from egressd.credentials.providers.minting import Minting
from egressd.policy.credential import GitHubAppSource

REPOSITORY_MOST: Final = 16 * 1024
"""Bytes that an answer may be longer for each repository: GitHub describes each in full."""

_STATEMENT_AGE, _STATEMENT_LIFE = 60, 540
"""Seconds: GitHub advises to date a JWT a minute back, for clocks differ, and takes none that lives longer than ten."""
_RANKS: Final = {"read": 1, "write": 2}


def provider(_name: str, source: GitHubAppSource, ca_bundle: str | None) -> GitHubApp:
    """Return the provider of one credential."""
    return GitHubApp(source, ca_bundle)


class GitHubApp:
    """One installation of one app, at github.com or at a GitHub Enterprise server."""

    def __init__(self, source: GitHubAppSource, ca_bundle: str | None = None) -> None:
        self._source = source
        self._endpoint = Endpoint(source.api, ca_bundle)
        self._minting = Minting()

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- an installation is the same for everybody
        """Return an installation token; raises SourceFailed, also where GitHub gave more than was asked for."""
        return await self._minting.run(self._mint())

    async def close(self) -> None:
        """Wait for what is on its way."""
        await self._minting.close()

    async def _mint(self) -> Minted:
        source = self._source
        async with deadline():
            now = int(time.time())
            claims = {"iat": now - _STATEMENT_AGE, "exp": now + _STATEMENT_LIFE, "iss": str(source.app_id)}
            statement = await signed(claims, await read_secret(source.private_key, lines=True))
            answer = await self._endpoint.ask(
                "POST",
                f"app/installations/{source.installation_id}/access_tokens",
                fields=_fields(statement),
                document={"repositories": source.repositories, "permissions": source.permissions},
                most=ANSWER_MOST + REPOSITORY_MOST * len(source.repositories),
            )
            if answer.status != 201:
                raise answer.refused()
            document = answer.document()
            value = answer.secret(document.get("token"))
        try:
            expires = answer.at(document.get("expires_at"))
            if wider := self._wider(document):
                raise SourceFailed(f"{answer.origin}: the token is for more than was asked for: {wider}")
        except SourceFailed:
            with suppress(SourceFailed):
                await self._revoke(value)
            raise
        return Minted(Token(value=SecretStr(value)), expires, lambda: self._revoke(value))

    def _wider(self, document: dict[str, Any]) -> str | None:
        """Say, in our words, what the token may do beyond what was asked for."""
        source = self._source
        if document.get("repository_selection", "selected") != "selected":
            return "all repositories"
        asked = {name.lower() for name in source.repositories}
        listed = document.get("repositories", [])
        if not isinstance(listed, list) or any(_name(entry) not in asked for entry in listed):
            return "another repository"
        granted = document.get("permissions", {})
        if not isinstance(granted, dict):
            return "another permission"
        for permission, level in granted.items():
            if permission == "metadata" and level == "read":  # which every installation has
                continue
            rank = _RANKS.get(level, 3) if isinstance(level, str) else 3
            if rank > _RANKS.get(source.permissions.get(permission, ""), 0):
                return "another permission"
        return None

    async def _revoke(self, value: str) -> None:
        async with deadline():
            answer = await self._endpoint.ask("DELETE", "installation/token", fields=_fields(value))
            if answer.status != 204:
                raise answer.refused()


def _fields(bearer: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {bearer}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }


def _name(entry: object) -> str | None:
    name = entry.get("name") if isinstance(entry, dict) else None
    return name.lower() if isinstance(name, str) else None
