"""A secret in a file, read anew when it has changed: within a second in control, within half a minute in a worker."""

from __future__ import annotations

from typing import Final

from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, Provider, read_secret
from egressd.policy.credential import AbsolutePath, SecretRef

LOOK: Final = 1.0
"""Seconds between two looks. The whole file is read, which costs no more than to find out whether it changed."""


class _File:
    def __init__(self, path: AbsolutePath) -> None:
        self._ref = SecretRef(file=path)

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- a long-lived secret is everybody's
        return Minted(Token(value=SecretStr(await read_secret(self._ref))), keep=LOOK)

    async def close(self) -> None:
        """Nothing is open."""


def provider(_name: str, source: AbsolutePath, _ca_bundle: str | None) -> Provider:
    """Return the source that reads the file `source`."""
    return _File(source)
