"""Signed statements by which a source shows who egressd is: JWTs (RFC 7519), signed with an operator's private key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Literal

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from egressd.credentials.providers.base import SourceFailed

type Algorithm = Literal["RS256", "ES256", "EdDSA"]

RSA_LEAST: Final = 2048
"""Bits (RFC 7518 §3.3)."""


async def signed(
    claims: Mapping[str, object], pem: str, algorithm: Algorithm = "RS256", key_id: str | None = None
) -> str:
    """Return `claims` as a JWT; raises SourceFailed where `pem` holds no such private key. Its text shows nothing of the key."""
    return await asyncio.to_thread(
        _signed, dict(claims), pem, algorithm, key_id
    )  # checking a key takes a while


def _signed(claims: dict[str, object], pem: str, algorithm: Algorithm, key_id: str | None) -> str:
    key = None
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: one that a password protects
        key = load_pem_private_key(pem.encode(), password=None)
    if algorithm == "RS256" and isinstance(key, rsa.RSAPrivateKey):
        if key.key_size < RSA_LEAST:
            raise SourceFailed(f"the private key has fewer than {RSA_LEAST} bits")
    elif not (
        (
            algorithm == "ES256"
            and isinstance(key, ec.EllipticCurvePrivateKey)
            and key.curve.name == "secp256r1"
        )
        or (algorithm == "EdDSA" and isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey))
    ):
        raise SourceFailed(f"the private key is no PEM key for {algorithm} without a password")
    assert key is not None
    return jwt.encode(
        claims, key, algorithm=algorithm, headers={"kid": key_id} if key_id is not None else None
    )
