"""The lab's own certificate authority: a root that only the lab's clients trust, and a leaf for any name.

Leaves are made when a name is first asked for by SNI, so that tests can use any name. Kinds other than
`good` are the certificates a verifying client must refuse.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import weakref
from collections.abc import MutableMapping

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KINDS = ("good", "expired", "not-yet-valid", "self-signed", "wrong-name")
_DAY = datetime.timedelta(days=1)


class Authority:
    """A root key and the server contexts it vouches for.

    `kinds` says which names get a bad certificate, `protocols` which agree to others than were listened with (ALPN);
    `sni` which name each live connection asked for.
    """

    def __init__(self, addresses: tuple[str, ...] = ()) -> None:
        self.kinds: dict[str, str] = {}
        self.protocols: dict[str, tuple[str, ...]] = {}
        self.sni: MutableMapping[ssl.SSLObject, str] = weakref.WeakKeyDictionary()
        self._addresses = addresses
        self._root_key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "egressd lab root")])
        self._root = self._make_root()
        self._contexts: dict[tuple[str, str, tuple[str, ...]], ssl.SSLContext] = {}

    def root_pem(self) -> bytes:
        """The root certificate, for the clients."""
        return self._root.public_bytes(serialization.Encoding.PEM)

    def context(self, name: str, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
        """The server context for a name, cached; the empty name stands for a client without SNI."""
        kind = self.kinds.get(name, "good")
        made = self._contexts.get((name, kind, alpn))
        if made is None:
            made = self._contexts[name, kind, alpn] = self._make_context(name, kind, alpn)
        return made

    def listening_context(self, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
        """The context to listen with: it answers each hello with its name's own context."""
        context = self._make_context("", self.kinds.get("", "good"), alpn)

        def by_name(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            # An exception here would end the handshake with an alert, and its traceback would be lost.
            asked = (name or "").lower()
            tls.context = self.context(asked, self.protocols.get(asked, alpn))
            if name is not None:
                self.sni[tls] = name.lower()

        context.sni_callback = by_name
        return context

    def issue(self, name: str, kind: str = "good") -> bytes:
        """A leaf and its key, PEM."""
        key = self._leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._leaf(name, kind).public_bytes(serialization.Encoding.PEM) + key

    def _make_root(self) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        public = self._root_key.public_key()
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(self._root_name)
            .issuer_name(self._root_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + 30 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._root_key, hashes.SHA256())
        )

    def _make_context(self, name: str, kind: str, alpn: tuple[str, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        pem = self.issue(name, kind)
        descriptor = os.memfd_create(
            "leaf", os.MFD_CLOEXEC
        )  # the ssl module reads certificates from files only
        try:
            os.write(descriptor, pem)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context

    def _leaf(self, name: str, kind: str) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        begin, end = now - _DAY, now + 20 * _DAY
        if kind == "expired":
            begin, end = now - 20 * _DAY, now - _DAY
        elif kind == "not-yet-valid":
            begin, end = now + _DAY, now + 20 * _DAY
        covered = "another-name.lab-origin.com" if kind == "wrong-name" else name
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, (covered or "lab-origin.com")[:64])])
        own = kind == "self-signed"
        issuer_key = self._leaf_key if own else self._root_key
        public = self._leaf_key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if own else self._root_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(self._names(covered), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(True, False, False, False, False, False, False, False, False), critical=True
            )
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
            )
            .sign(issuer_key, hashes.SHA256())
        )

    def _names(self, name: str) -> x509.SubjectAlternativeName:
        if name:
            return x509.SubjectAlternativeName([x509.DNSName(name)])
        by_address = [x509.IPAddress(ipaddress.ip_address(address)) for address in self._addresses]
        return x509.SubjectAlternativeName([x509.DNSName("lab-origin.com"), *by_address])
