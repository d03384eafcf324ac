"""How the worker trusts the servers it dials: one context, its sessions, and what went wrong in closed
words."""

from __future__ import annotations

import math
import os
import ssl
import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch, NixOS
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ca-certificates/extracted/tls-ca-bundle.pem",  # Arch
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/cert.pem",  # Alpine
)
"""Where distributions keep all trusted certificates in one PEM file, the usual one first."""

READING_LEAKS: Final = sys.version_info < (3, 12, 8) or (3, 13) <= sys.version_info < (3, 13, 1)
"""Whether this Python loses some 6 KB for good each time that the session of a connection is read (CPython issue 116810)."""
READ_EVERY: Final = 60.0
"""Seconds between two readings for one place where reading leaks."""

type UpstreamKind = Literal["certificate", "handshake", "timeout", "closed", "client_cert_wanted", "broken"]


class UpstreamTlsError(ConnectionError):
    """TLS with a server failed; no byte of a request was sent unless the kind is `client_cert_wanted` or
    `broken`.

    `certificate`: not trusted for the judged name, `detail` says why. `client_cert_wanted`: the server asked
    for one and refused to go on without; in TLS 1.3 this comes after the handshake, by `on_lost`. `broken`:
    an alert or a bad record later on. `detail` is OpenSSL's wording and holds nothing that the server chose.
    """

    def __init__(self, kind: UpstreamKind, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind: UpstreamKind = kind
        self.detail = detail


def upstream_context(ca_file: str | None, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    """Return a context that verifies chain and name, TLS 1.2 or later; to be kept, as it costs milliseconds.

    `ca_file` replaces the system's certificates. Without it OpenSSL's own places count, SSL_CERT_FILE and
    SSL_CERT_DIR of egressd's environment included: that is how an operator points every tool at a corporate
    root. All certificates are read now, as later the worker has no file system. Raises OSError or
    ssl.SSLError when none can be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # An intermediate that an operator put into the file is meant as an anchor. Strictness is asked of our own
    # certificates only: internal authorities that all other clients accept leave out what RFC 5280 wants.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    context.set_alpn_protocols(list(alpn))
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    else:
        _load_system(context)
    if not context.cert_store_stats()["x509_ca"]:
        raise FileNotFoundError(
            "no trusted certificates: install ca-certificates, or name a file as upstream_ca or by SSL_CERT_FILE"
        )
    return context


def _load_system(context: ssl.SSLContext) -> None:
    """Load the default file; if the system has only a directory, which OpenSSL reads on demand, read it
    now."""
    context.load_default_certs()
    paths = ssl.get_default_verify_paths()
    found = bool(context.cert_store_stats()["x509_ca"])
    if found and paths.openssl_capath_env not in os.environ:
        return
    listed = os.environ.get(paths.openssl_capath_env) or paths.openssl_capath
    directories = [directory for directory in map(Path, listed.split(os.pathsep)) if directory.is_dir()]
    files = [file for directory in directories for file in sorted(directory.iterdir())]
    for file in files if found else (*files, *map(Path, SYSTEM_BUNDLES)):
        try:
            context.load_verify_locations(file)
        except (
            OSError
        ):  # ssl.SSLError too: not a certificate, or not readable; the caller counts what was found
            continue


@dataclass(frozen=True, slots=True)
class _Kept:
    session: ssl.SSLSession
    context: ssl.SSLContext
    verified: float


class SessionCache:
    """Upstream TLS sessions by (verified name, address, port), so that a later connection costs less.

    A resumed session does not show the certificate again. So a session is used for the very name it was
    verified for, in the context that verified it, and for at most `max_age` seconds after the certificate was
    last seen, however often it was resumed meanwhile. Bounded; the oldest goes first.
    """

    def __init__(self, capacity: int = 1000, max_age: float = 3600.0) -> None:
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._read: OrderedDict[Hashable, float] = OrderedDict()
        self._capacity = capacity
        self._max_age = max_age

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, context: ssl.SSLContext, now: float) -> ssl.SSLSession | None:
        """Return a session for `key`, or None; `now` in seconds of a monotonic clock."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.context is not context or now - kept.verified >= self._max_age:
            del self._kept[key]
            return None
        return kept.session

    def due(self, key: Hashable, now: float) -> bool:
        """Say whether a connection's session is worth reading, to be `put`; asked once for each, as a yes is remembered."""
        if not READING_LEAKS:
            return True
        if now - self._read.get(key, -math.inf) < READ_EVERY:
            return False
        self._read.pop(key, None)
        self._read[key] = now
        if len(self._read) > self._capacity:
            self._read.popitem(last=False)
        return True

    def put(
        self,
        key: Hashable,
        context: ssl.SSLContext,
        session: ssl.SSLSession | None,
        resumed: bool,
        now: float,
    ) -> None:
        """Keep what `TlsStream.session` gives at the end of a connection; None is ignored.

        `resumed` is the stream's: such a session inherits the time at which the certificate was verified.
        """
        if session is None:
            return
        before = self._kept.pop(key, None)
        if resumed and before is None:
            return
        verified = before.verified if resumed and before is not None else now
        self._kept[key] = _Kept(session, context, verified)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def forget(self, key: Hashable) -> None:
        """Drop the session for `key`, if any."""
        self._kept.pop(key, None)
