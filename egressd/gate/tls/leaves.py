"""Mint leaf certificates for judged names and keep a TLS server context for each.

A leaf names exactly one judged host, never a text of the client's or of the upstream certificate, or a client
could be talked into reusing its connection for a denied name. The key of the leaves is made here at start and
signs nothing; the issuer is the worker's own intermediate, which control renews within the day.

The CA/Browser rules that clients check (SAN, EKU, lifetime below 398 days) and the RFC 5280 clauses that
`VERIFY_X509_STRICT` checks (SKI, AKI, critical keyUsage) are kept by every certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import cryptography.hazmat.backends.openssl.backend  # noqa: F401 # loaded at first use, when the worker's root is empty
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HTTP1: Final = "http/1.1"
HTTP2: Final = "h2"
"""The application protocols that a client may be told (RFC 7301)."""

EXPLAIN_PER_MINUTE: Final = 30
"""Leaves that one sandbox may cause to be minted in a minute, only to explain denials."""

BACKDATED: Final = datetime.timedelta(days=2)
"""A guest's clock may be slow; a leaf is valid from this long ago (or from its issuer's beginning)."""

_SANDBOXES: Final = 1024  # rate buckets kept; a full bucket carries no memory and goes first
_SWEEP_EVERY: Final = 4096  # handshakes between two sweeps of OpenSSL's session caches


class IssuerExpiredError(Exception):
    """The worker's intermediate has ended: no handshake can succeed until control sends the next one."""


@dataclass(frozen=True, slots=True)
class Issuer:
    """The worker's intermediate: certificate, key, and the chain that clients are sent after the leaf."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    chain: tuple[x509.Certificate, ...]

    @classmethod
    def from_pem(cls, chain_pem: bytes, key_pem: bytes) -> Issuer:
        """Return the issuer whose certificate comes first in `chain_pem`.

        Raises ValueError, without any of the bytes in its text, if they are no such pair.
        """
        try:
            chain = tuple(x509.load_pem_x509_certificates(chain_pem))
            key = serialization.load_pem_private_key(key_pem, password=None)
        except (ValueError, TypeError):
            raise ValueError("the issuer's certificate or key is not readable PEM") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != chain[0].public_key():
            raise ValueError("the issuer's key is not the EC key of its certificate")
        return cls(chain[0], key, chain)


class Leaves:
    """Server contexts by host and protocol, two bounded caches: one for allowed names, a small one for explained denials.

    A memfd carries the PEM, as `ssl` reads certificates from files only; where there is no /proc to name it by, a file
    does (`settle`). `clock` gives seconds since the epoch. Not safe for threads: one worker, one loop.
    """

    def __init__(
        self,
        issuer: Issuer,
        capacity: int = 2000,
        explain_capacity: int = 64,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._issuer = issuer
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._key_pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._scratch: tuple[Path, int] | None = None
        self._clock = clock
        self._allowed = _Contexts(capacity)
        self._explained = _Contexts(explain_capacity)
        self._rates = _Rates()

    def __repr__(self) -> str:
        return f"Leaves({len(self._allowed)} allowed, {len(self._explained)} explained)"

    def beside(self, issuer: Issuer) -> Leaves:
        """Return leaves of another issuer, in caches of their own, that pass by the same file."""
        leaves = Leaves(issuer, clock=self._clock)
        leaves._scratch = self._scratch
        return leaves

    def settle(self, path: Path) -> None:
        """Make a file by which every leaf passes from now on, where only this process can open it.

        Afterwards no file is made or removed any more: what is confined needs neither. Raises OSError.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._scratch = path, os.open(path, flags, 0o600)

    def context_for(self, host: str, alpn: str = HTTP1) -> ssl.SSLContext:
        """Return the context for a judged host, a name in normal form or an IP address, in which `alpn` alone is agreed to.

        A client that offers other protocols only goes on without an agreement. Raises IssuerExpiredError, or ValueError for a
        host that no certificate can name.
        """
        key = host, alpn
        return self._allowed.get(key) or self._allowed.put(key, self._mint(*key))

    def explain_context_for(
        self, sandbox_id: str, host: str, now: float, alpn: str = HTTP1
    ) -> ssl.SSLContext | None:
        """Return a context in which to say why `host` is denied, or None above the sandbox's minting rate.

        `now` is in seconds of any clock that never goes back. None means: answer with a TLS alert. Raises as
        `context_for`.
        """
        key = host, alpn
        if (context := self._explained.get(key)) is not None:
            return context
        if not self._rates.take(sandbox_id, now):
            return None
        return self._explained.put(key, self._mint(*key))

    def replace_issuer(self, issuer: Issuer) -> None:
        """Sign with another intermediate from now on; streams that are open go on, new ones get new
        leaves."""
        self._issuer = issuer
        self._allowed.clear()
        self._explained.clear()

    def _mint(self, host: str, alpn: str) -> ssl.SSLContext:
        leaf = self._sign(host)
        chain = b"".join(c.public_bytes(serialization.Encoding.PEM) for c in (leaf, *self._issuer.chain))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 1
        context.set_alpn_protocols([alpn])
        with self._file(chain + self._key_pem) as name:
            context.load_cert_chain(name)
        return context

    def _sign(self, host: str) -> x509.Certificate:
        issuer = self._issuer.certificate
        now = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        if now >= issuer.not_valid_after_utc:
            raise IssuerExpiredError(
                f"the intermediate ended at {issuer.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
            )
        authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(host))
            .issuer_name(issuer.subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - BACKDATED, issuer.not_valid_before_utc))
            .not_valid_after(issuer.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(authority, critical=False)
        )
        return builder.sign(self._issuer.key, hashes.SHA256())

    @contextlib.contextmanager
    def _file(self, content: bytes) -> Iterator[str]:
        """Give the content a file name for as long as the block runs; nobody else can open it."""
        if self._scratch is not None:
            path, descriptor = self._scratch
            try:
                if os.pwrite(descriptor, content, 0) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                yield str(path)
            finally:
                os.ftruncate(descriptor, 0)
            return
        with open(os.memfd_create("egressd-leaf", os.MFD_CLOEXEC), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"


type _Key = tuple[str, str]


class _Contexts:
    """Contexts by host and protocol, least recently used first."""

    __slots__ = ("_capacity", "_kept", "_uses")

    def __init__(self, capacity: int) -> None:
        self._kept: OrderedDict[_Key, ssl.SSLContext] = OrderedDict()
        self._capacity = capacity
        self._uses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: _Key) -> ssl.SSLContext | None:
        context = self._kept.get(key)
        if context is not None:
            self._kept.move_to_end(key)
            self._count_use()
        return context

    def put(self, key: _Key, context: ssl.SSLContext) -> ssl.SSLContext:
        self._kept[key] = context
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return context

    def clear(self) -> None:
        self._kept.clear()

    def _count_use(self) -> None:
        """Now and then drop the contexts in which OpenSSL stores sessions.

        A TLS 1.2 client that declines tickets has each session kept, up to 20,480 of them in each context,
        and `ssl` cannot turn that off; tickets keep nothing here.
        """
        self._uses += 1
        if self._uses < _SWEEP_EVERY:
            return
        self._uses = 0
        for key in [key for key, held in self._kept.items() if held.session_stats()["number"]]:
            del self._kept[key]


class _Rates:
    """One token bucket a sandbox."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when that was

    def take(self, sandbox: str, now: float) -> bool:
        tokens, then = self._buckets.pop(sandbox, (float(EXPLAIN_PER_MINUTE), now))
        tokens = min(EXPLAIN_PER_MINUTE, tokens + max(0.0, now - then) * EXPLAIN_PER_MINUTE / 60)
        granted = tokens >= 1
        self._buckets[sandbox] = (tokens - granted, max(now, then))
        if len(self._buckets) > _SANDBOXES:
            self._buckets.popitem(last=False)
        return granted


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    # The caller judged the name; a wildcard or an empty name here would be the caller's mistake and a leaf
    # for too much.
    if not host or "*" in host or not host.isascii():
        raise ValueError("no certificate is minted for this host")
    return x509.DNSName(host)


def _subject(host: str) -> x509.Name:
    """Return the subject; a common name ends at 64 characters (RFC 5280 ub-common-name) and clients ignore
    it."""
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "egressd")]
    if 0 < len(host) <= 64:
        attributes.append(x509.NameAttribute(NameOID.COMMON_NAME, host))
    return x509.Name(attributes)


def _key_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
