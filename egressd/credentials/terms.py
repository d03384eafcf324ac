"""On which terms a credential that was minted is lent: whether it can be attached at all, and when its successor is due."""

from __future__ import annotations

import random
from typing import Final

from egressd.credentials.lease import AwsKeys, Lease, Token
from egressd.credentials.providers.base import Minted, SourceFailed, checked
from egressd.policy.credential import Credential

LEAST_LEFT: Final = 12.0
"""Seconds that a lease must have when it is given: 10 for the worker, and the way to it."""
_LAST: Final = 253_402_300_799.0
"""The end of the year 9999, the last that a record can name."""


def check(minted: Minted, said: Credential, now: float) -> None:
    """Raise SourceFailed where what was minted cannot be attached as the definition says, or not for long enough.

    `now` is in Unix seconds.
    """
    if minted.expires is not None and not minted.expires < _LAST:
        raise SourceFailed("what the source gave ends at no time that there is")
    if minted.expires is not None and minted.expires - now < LEAST_LEFT:
        raise SourceFailed(f"what the source gave has less than {LEAST_LEFT:.0f} s left")
    material = minted.material
    if isinstance(material, AwsKeys) != (said.attach.sigv4 is not None):
        raise SourceFailed("keys of AWS are attached by sigv4, and nothing else is")
    if isinstance(material, Token):
        texts = [material.value.get_secret_value()]
    else:
        texts = [material.access_key_id, material.secret_access_key.get_secret_value()]
        if material.session_token is not None:
            texts.append(material.session_token.get_secret_value())
    for text in texts:
        if checked(text, "what the source gave") != text:
            raise SourceFailed("what the source gave: a newline stands behind it")


def lease_of(
    lease_id: str, name: str, sandbox: str, said: Credential, minted: Minted, placeholder: str | None
) -> Lease:
    """Return the lease of what was minted for a sandbox, with all that the definition says of attaching it."""
    return Lease(
        id=lease_id,
        credential=name,
        sandbox=sandbox,
        material=minted.material,
        attach=said.attach,
        expires=minted.expires,
        client_credentials=said.client_credentials,
        slots=tuple(said.slots or ()),
        range=said.range,
        mask=tuple(said.mask or ()),
        token_requests=said.token_requests,
        placeholder=placeholder,
    )


def refresh_at(expires: float | None, now: float) -> float:
    """Return from when on a successor is minted, in Unix seconds; infinite where nobody knows when it ends.

    That is with a fifth of its life left, a minute at least and half of it at most, and earlier by up to a tenth, so that what
    was minted together is not renewed together.
    """
    if expires is None:
        return float("inf")
    life = expires - now
    left = min(max(life / 5, 60.0), life / 2)
    return expires - left - random.random() * life / 10  # noqa: S311 -- spread, no secret
