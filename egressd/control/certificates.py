"""The certificates of an authority, made in memory: roots, their names, and what a signing certificate says of itself.

RFC 5280 sections 4.1 and 4.2 as `VERIFY_X509_STRICT` reads them.
"""

from __future__ import annotations

import datetime
import secrets
import socket
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BACKDATED: Final = datetime.timedelta(days=2)
"""A guest's clock may be slow; certificates are valid from this long ago."""
ROOT_LIFE: Final = datetime.timedelta(days=3652)


def make_root(now: float) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a fresh root and its key; `now` in seconds since the epoch."""
    moment = moment_of(now)
    key = ec.generate_private_key(ec.SECP256R1())
    name = name_of(f"egressd {printable(socket.gethostname(), 40)} root {secrets.token_hex(4)}")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - BACKDATED)
        .not_valid_after(moment + ROOT_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(signing_usage(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as PEM, as it is."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def name_of(common_name: str) -> x509.Name:
    """Return the distinguished name of one of ours."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "egressd"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def printable(text: str, limit: int) -> str:
    """Return what a common name can safely show: ub-common-name is 64 characters (RFC 5280 appendix A)."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in text)[:limit] or "host"


def moment_of(now: float) -> datetime.datetime:
    """Return seconds since the epoch as certificates hold them."""
    return datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)


def signing_usage() -> x509.KeyUsage:
    """Return what the key of an authority is for."""
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
