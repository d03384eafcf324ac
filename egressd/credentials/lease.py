"""A lease: a credential as one sandbox may use it now, with all that a worker needs to attach it."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from egressd.credentials.scrub import Mask
from egressd.policy.credential import Attach

SECRET_LIMIT = 16 * 1024
"""Longest secret in characters."""


def series_of(lease_id: str) -> str:
    """Return the series of a lease; one that has none is its own."""
    return lease_id.partition(".")[0]


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Token(_Kept):
    """A secret that is one text: a key, a token, a password."""

    type: Literal["token"] = "token"
    value: SecretStr = Field(max_length=SECRET_LIMIT)

    @field_serializer("value", when_used="json")
    def _value(self, value: SecretStr) -> str:
        return value.get_secret_value()


class AwsKeys(_Kept):
    """What AWS requests are signed with."""

    type: Literal["aws"] = "aws"
    access_key_id: str
    secret_access_key: SecretStr
    session_token: SecretStr | None = None

    @field_serializer("secret_access_key", "session_token", when_used="json")
    def _value(self, value: SecretStr | None) -> str | None:
        return value.get_secret_value() if value is not None else None


type Material = Token | AwsKeys


class Lease(_Kept):
    """What a worker keeps in memory and nowhere else. `expires` is in Unix seconds; None: it does not say.

    Its JSON (`model_dump_json`) holds the secret, for the way from control to worker; its repr never does.

    What is before the point in `id` is its series: all that was lent by one definition, which ends as one.
    """

    id: str
    credential: str
    sandbox: str
    material: Material = Field(discriminator="type")
    attach: Attach
    expires: float | None = None
    client_credentials: Literal["strip", "deny"] = "strip"
    slots: tuple[str, ...] = ()
    range: bool = False
    mask: tuple[str, ...] = ()
    token_requests: bool = False
    placeholder: str | None = None
    """The sandbox's own dummy, where `attach` is by placeholder."""

    @property
    def series(self) -> str:
        """Which definition it was lent by, as long as that has not changed."""
        return series_of(self.id)

    def secrets(self) -> tuple[str, ...]:
        """Every text that may not come back to the sandbox."""
        material = self.material
        if isinstance(material, Token):
            return (material.value.get_secret_value(),)
        found = [material.secret_access_key.get_secret_value()]
        if material.session_token is not None:
            found.append(material.session_token.get_secret_value())
        return tuple(found)

    @cached_property
    def masking(self) -> Mask:
        """What is masked in whatever answers a request that carries it; made once, and gone with the lease."""
        return Mask(self.secrets(), self.mask)
