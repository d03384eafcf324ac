"""Signed statements, as a reader without a library of JWTs verifies them."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from egressd.credentials.providers.assertion import Algorithm, signed
from egressd.credentials.providers.base import SourceFailed
from tests.credentials.providers.loopback import PrivateKey, private_pem, run, shown

CLAIMS = {"iss": "egressd", "aud": "https://issuer.example", "exp": 1_900_000_000}


def part(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def verify(key: PrivateKey, signature: bytes, content: bytes) -> None:
    """Raises InvalidSignature."""
    if isinstance(key, rsa.RSAPrivateKey):
        key.public_key().verify(signature, content, PKCS1v15(), SHA256())
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        pair = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])  # RFC 7518 §3.4
        key.public_key().verify(encode_dss_signature(*pair), content, ec.ECDSA(SHA256()))
    else:
        key.public_key().verify(signature, content)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("RS256", rsa.generate_private_key(65537, 2048)),
        ("ES256", ec.generate_private_key(ec.SECP256R1())),
        ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    ],
    ids=["RS256", "ES256", "EdDSA"],
)
def test_a_statement_says_its_claims_and_is_signed(algorithm: Algorithm, key: PrivateKey) -> None:
    head, claims, signature = run(signed(CLAIMS, private_pem(key), algorithm, "k1")).split(".")
    assert json.loads(part(head)) == {"alg": algorithm, "typ": "JWT", "kid": "k1"}
    assert json.loads(part(claims)) == CLAIMS
    verify(key, part(signature), f"{head}.{claims}".encode())


def test_a_key_on_another_curve_signs_nothing() -> None:
    pem = private_pem(ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(SourceFailed, match="no PEM key for ES256") as caught:
        run(signed(CLAIMS, pem, "ES256"))
    assert pem.splitlines()[1] not in shown(caught.value)


@pytest.mark.parametrize(
    "pem", ["", "x", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----", "\ud800"]
)
def test_what_is_no_key_signs_nothing(pem: str) -> None:
    with pytest.raises(SourceFailed, match="no PEM key for RS256"):
        run(signed(CLAIMS, pem))
