"""A root, an intermediate and TLS peers in memory, made by tests: gate/ may not know control/."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from egressd.gate.tls.leaves import Issuer

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
DAY = datetime.timedelta(days=1)


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
    pathlen: int | None = 0,
    begin: datetime.datetime = NOW - 2 * DAY,
    end: datetime.datetime = NOW + DAY,
) -> x509.Certificate:
    """Return a strict CA certificate, self-signed without an issuer."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    ) | dict.fromkeys(("encipher_only", "decipher_only", "digital_signature"), False)
    signer = issuer[1] if issuer else key
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=pathlen), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


@dataclass(frozen=True)
class Authority:
    """A root and an issuer under it."""

    root: x509.Certificate
    issuer: Issuer

    @property
    def root_pem(self) -> str:
        return pem(self.root).decode()


def make_authority(begin: datetime.datetime = NOW - 2 * DAY, end: datetime.datetime = NOW + DAY) -> Authority:
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = certificate("test root", root_key, pathlen=1, begin=NOW - 400 * DAY, end=NOW + 400 * DAY)
    intermediate = certificate("test worker", key, (root, root_key), begin=begin, end=end)
    return Authority(root, Issuer(intermediate, key, (intermediate,)))


def client_context(trusted: str | None, alpn: Iterable[str] = ("http/1.1",)) -> ssl.SSLContext:
    """Return the strictest client that Python has; it trusts nothing but `trusted`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(list(alpn))
    if trusted is not None:
        context.load_verify_locations(cadata=trusted)
    return context


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Finish a handshake in memory and return (server, client); raises what the failing side raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepted = server.wrap_bio(to_server, to_client, server_side=True)
    connected = client.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(4):
        for side in (connected, accepted):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return accepted, connected
