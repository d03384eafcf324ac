"""A secret in a variable of egressd's own environment, as it was when egressd started."""

from __future__ import annotations

import math

from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, Provider, read_secret
from egressd.policy.credential import SecretRef, Variable


class _Env:
    def __init__(self, variable: Variable) -> None:
        self._ref = SecretRef(env=variable)

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- a long-lived secret is everybody's
        return Minted(Token(value=SecretStr(await read_secret(self._ref))), keep=math.inf)

    async def close(self) -> None:
        """Nothing is open."""


def provider(_name: str, source: Variable, _ca_bundle: str | None) -> Provider:
    """Return the source that reads the variable `source`."""
    return _Env(source)
