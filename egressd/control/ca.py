"""The certificate authority of one installation: a root that control keeps, and intermediates for workers.

The root is made once and never changes by itself: sandboxes, images and trust stores hold it. Where it is replaced, what begins
afterwards trusts both for a while, the one before (its certificate alone, its key is gone) and the one that signs. The key is
created with mode 0600 in a directory of mode 0700 and is read by control only; a worker gets an intermediate
that lives at most a day and may sign leaves but no further authority. No key and no PEM of a key is ever part
of a text or a `repr`.

RFC 5280 sections 4.1 and 4.2 as `VERIFY_X509_STRICT` reads them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from egressd.control.ca_files import (
    BACKUP,
    ELSEWHERE,
    CaError,
    pending,
    read_certificate,
    read_file,
    read_key,
    sync,
    write_file,
)
from egressd.control.certificates import (
    BACKDATED,
    key_pem,
    make_root,
    moment_of,
    name_of,
    printable,
    signing_usage,
)

INTERMEDIATE_LIFE: Final = datetime.timedelta(hours=24)

_UNTIL: Final = b"trusted until %d\n"
_UNTIL_LINE: Final = re.compile(rb"trusted until (\d{1,15})\n")
"""The first line of the previous certificate's file; what stands before a PEM block is for people (RFC 7468 section 2)."""


@dataclass(frozen=True, slots=True)
class CaPaths:
    """Where an authority lives: the directory of its key, and the one of what sandboxes may see."""

    ca: Path
    trust: Path

    @classmethod
    def system(cls) -> CaPaths:
        """Return the paths of a system or container installation."""
        return cls(Path("/var/lib/egressd/ca"), Path("/var/lib/egressd/trust"))

    @classmethod
    def rootless(cls, environ: Mapping[str, str]) -> CaPaths:
        """Return the paths under XDG_DATA_HOME, which must be absolute to count (XDG base directory
        specification)."""
        data = Path(environ.get("XDG_DATA_HOME", ""))
        if not data.is_absolute():
            data = Path(environ.get("HOME", "") or "~").expanduser() / ".local/share"
        return cls(data / "egressd/ca", data / "egressd/trust")

    @classmethod
    def at(cls, ca: Path) -> CaPaths:
        """Return the paths for `--ca-dir`; what sandboxes see stands beside it, as the directory itself is
        closed."""
        ca = ca.absolute()
        return cls(ca, ca.with_name(f"{ca.name}-trust"))

    @property
    def key(self) -> Path:
        """The root's private key, mode 0600."""
        return self.ca / "ca.key"

    @property
    def certificate(self) -> Path:
        """The root's certificate."""
        return self.ca / "ca.crt"

    @property
    def previous(self) -> Path:
        """The certificate of the root before, while it is still trusted, and until when that is."""
        return self.ca / "previous.crt"


@dataclass(frozen=True, slots=True)
class Authority:
    """A loaded root. Its key stays in control."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    paths: CaPaths
    previous: x509.Certificate | None = None
    """The root before it, while that is still trusted."""
    until: float = 0.0
    """Seconds since the epoch at which `previous` no longer is."""

    @property
    def pem(self) -> bytes:
        """The public certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def trusted_pem(self) -> bytes:
        """What is to be trusted as PEM: its own certificate, and that of the root before while it still is."""
        previous = [self.previous] if self.previous is not None else []
        return b"".join(
            each.public_bytes(serialization.Encoding.PEM) for each in (self.certificate, *previous)
        )

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the certificate, in lower-case hexadecimal."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True, slots=True)
class Issued:
    """An intermediate for one worker: certificates to send behind a leaf (its own first) and its private key,
    as PEM."""

    chain_pem: bytes
    key_pem: bytes = field(repr=False)
    not_after: float
    """Seconds since the epoch; control issues the next one well before."""


def load_or_create(paths: CaPaths, now: float) -> Authority:
    """Return the authority at `paths`, made there first if there is none; `now` in seconds since the epoch.

    Any number of processes may do this at once: one creates, all return the same. Raises CaError.
    """
    with _locked(paths.ca):
        _finish_interrupted(paths)
        if not paths.key.exists() and not paths.certificate.exists():
            _write_new(paths, now)
        return _load(paths, now)


def load(paths: CaPaths, now: float) -> Authority:
    """Return the authority at `paths`; raises CaError if there is none or it cannot be used."""
    if not paths.ca.is_dir():
        raise CaError(paths.ca, "there is no certificate authority", "it is made by the first `egressd run`")
    with _locked(paths.ca):
        _finish_interrupted(paths)
        return _load(paths, now)


def rotate(paths: CaPaths, now: float, overlap: float = 0.0) -> Authority:
    """Replace the authority by a new one and return that; the old key is gone for good. Raises CaError.

    For `overlap` seconds from `now` the old certificate is trusted beside the new one, by whoever asks what is.
    """
    with _locked(paths.ca):
        _finish_interrupted(paths)
        if overlap > 0:
            _keep_previous(paths, now, overlap)
        else:
            _forget_previous(paths)
        _write_new(paths, now)
        return _load(paths, now)


def finish(paths: CaPaths, now: float) -> Authority:
    """End an overlap now: what is trusted is the authority alone. Raises CaError, also where there is no overlap."""
    authority = load(paths, now)
    with _locked(paths.ca):
        if authority.previous is None:
            raise CaError(paths.previous, "no other authority is trusted", "one is by `egressd ca rotate`")
        _forget_previous(paths)
        return _load(paths, now)


def issue_worker_intermediate(authority: Authority, worker: str, now: float) -> Issued:
    """Return an intermediate for the worker's leaves, valid for a day from `now` (seconds since the
    epoch)."""
    moment = moment_of(now)
    key = ec.generate_private_key(ec.SECP256R1())
    root = authority.certificate
    not_after = min(moment + INTERMEDIATE_LIFE, root.not_valid_after_utc)
    subject_key = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        x509.CertificateBuilder()
        # Two intermediates of one name and different keys would confuse clients that remember chains by name.
        .subject_name(name_of(f"egressd worker {printable(worker, 32)} {secrets.token_hex(4)}"))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(moment - BACKDATED, root.not_valid_before_utc))
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    chain = [certificate] if root.subject == root.issuer else [certificate, root]
    chain_pem = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain)
    return Issued(chain_pem, key_pem(key), certificate.not_valid_after_utc.timestamp())


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, making the directory first with mode 0700."""
    try:
        if not directory.parent.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.parent.chmod(0o755)  # the trust directory is beside it, and sandboxes read that
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CaError(directory, f"cannot be opened: {error.strerror}", ELSEWHERE) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_new(paths: CaPaths, now: float) -> None:
    """Write a new pair; a crash leaves the old pair, none, or a mismatch that the next call completes."""
    _check_directory(paths.ca, 0o022)
    certificate, key = make_root(now)
    try:
        write_file(pending(paths.key), key_pem(key), 0o600)
        write_file(pending(paths.certificate), certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        # The certificate's own pending file is left for last: with it, an interruption between the two can be
        # completed.
        os.replace(pending(paths.key), paths.key)
        os.replace(pending(paths.certificate), paths.certificate)
        sync(paths.ca)
    except OSError as error:
        raise CaError(paths.ca, f"cannot be written: {error.strerror}", ELSEWHERE) from None


def _finish_interrupted(paths: CaPaths) -> None:
    """Complete a creation that was killed between its two renames, or clear away one that got less far."""
    half = pending(paths.certificate)
    if not half.exists():
        return
    if paths.key.exists() and _belongs(half, read_key(paths.key)):
        os.replace(half, paths.certificate)
        sync(paths.ca)
    else:
        for path in (pending(paths.key), half):
            path.unlink(missing_ok=True)


def _belongs(path: Path, key: ec.EllipticCurvePrivateKey) -> bool:
    try:
        return read_certificate(path).public_key() == key.public_key()
    except CaError:
        return False  # half written


def _load(paths: CaPaths, now: float) -> Authority:
    # A mounted secret's directory is sticky and open; nobody else can replace what is in it.
    _check_directory(paths.ca, 0 if paths.ca.stat().st_mode & stat.S_ISVTX else 0o022)
    for path, other in ((paths.key, paths.certificate), (paths.certificate, paths.key)):
        if not path.exists():
            hint = f"restore it, or remove {other} too: a new authority is then made, which nobody trusts yet"
            raise CaError(path, "is missing", hint)
    key = read_key(paths.key)
    certificate = read_certificate(paths.certificate)
    if certificate.public_key() != key.public_key():
        raise CaError(paths.certificate, "does not belong to the key beside it", BACKUP)
    _check_certificate(paths.certificate, certificate, moment_of(now))
    return Authority(certificate, key, paths, *_read_previous(paths, certificate, now))


def _keep_previous(paths: CaPaths, now: float, overlap: float) -> None:
    """Write down that the root that is now there will be trusted for a while; it counts once another is there."""
    before = _load(paths, now)
    if before.previous is not None:
        ends = moment_of(before.until).isoformat()
        hint = "end that first by `egressd ca rotate --finish`, or begin without an overlap (`--overlap 0`)"
        raise CaError(paths.previous, f"one more authority is trusted until {ends}", hint)
    try:
        write_file(pending(paths.previous), _UNTIL % int(now + overlap) + before.pem, 0o644)
        os.replace(pending(paths.previous), paths.previous)
        sync(paths.ca)
    except OSError as error:
        raise CaError(paths.ca, f"cannot be written: {error.strerror}", ELSEWHERE) from None


def _forget_previous(paths: CaPaths) -> None:
    try:
        paths.previous.unlink(missing_ok=True)
    except OSError as error:
        raise CaError(paths.previous, f"cannot be removed: {error.strerror}", ELSEWHERE) from None


def _read_previous(
    paths: CaPaths, current: x509.Certificate, now: float
) -> tuple[x509.Certificate | None, float]:
    """Return the root that is still trusted beside the current one, and until when; a damaged file is nobody's trust."""
    if not paths.previous.exists():
        return None, 0.0
    content, _ = read_file(paths.previous)
    line = _UNTIL_LINE.match(content)
    until = float(line[1]) if line else 0.0
    if until <= now:
        return None, 0.0
    certificate = read_certificate(paths.previous)
    return (certificate, until) if certificate != current else (None, 0.0)  # a rotation that was killed


def _check_directory(directory: Path, forbidden: int) -> None:
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise CaError(directory, f"belongs to uid {status.st_uid}", ELSEWHERE)
    if status.st_mode & forbidden:
        raise CaError(directory, "can be written by others", f"chmod 700 {directory}")


def _check_certificate(path: Path, certificate: x509.Certificate, moment: datetime.datetime) -> None:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        constraints, usage = x509.BasicConstraints(ca=False, path_length=None), None
    roomy = constraints.path_length is None or constraints.path_length >= 1
    if not constraints.ca or not roomy or usage is None or not usage.key_cert_sign:
        hint = "it needs CA:TRUE, pathlen 1 or none, keyCertSign and a subject key identifier"
        raise CaError(path, "is not a certificate that may sign intermediates", hint)
    if moment < certificate.not_valid_before_utc:
        begin = certificate.not_valid_before_utc.isoformat()
        raise CaError(path, f"is valid only from {begin}", "is this machine's clock right?")
    if moment >= certificate.not_valid_after_utc:
        end = certificate.not_valid_after_utc.isoformat()
        raise CaError(path, f"expired at {end}", "make a new one with `egressd ca rotate`")
