"""The certificate authority of one installation: a root that control keeps, and intermediates for workers.

The root is made once and never changes by itself: sandboxes, images and trust stores hold it. Its key is
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
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATED: Final = datetime.timedelta(days=2)
"""A guest's clock may be slow; certificates are valid from this long ago."""

INTERMEDIATE_LIFE: Final = datetime.timedelta(hours=24)
ROOT_LIFE: Final = datetime.timedelta(days=3652)

_MAX_FILE: Final = 64 * 1024
_BACKUP: Final = "restore both files from one backup"
_ELSEWHERE: Final = "run as the user that owns it, or give another place by --ca-dir"


class CaError(Exception):
    """The authority cannot be used; `hint` says what a person can do about it."""

    def __init__(self, path: Path, problem: str, hint: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
        self.hint = hint


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


@dataclass(frozen=True, slots=True)
class Authority:
    """A loaded root. Its key stays in control."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    paths: CaPaths

    @property
    def pem(self) -> bytes:
        """The public certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

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


def rotate(paths: CaPaths, now: float) -> Authority:
    """Replace the authority by a new one and return that; the old key is gone for good. Raises CaError.

    Sandboxes that run keep trusting the old root and fail closed at the next leaf.
    """
    with _locked(paths.ca):
        _write_new(paths, now)
        return _load(paths, now)


def issue_worker_intermediate(authority: Authority, worker: str, now: float) -> Issued:
    """Return an intermediate for the worker's leaves, valid for a day from `now` (seconds since the
    epoch)."""
    moment = _moment(now)
    key = ec.generate_private_key(ec.SECP256R1())
    root = authority.certificate
    not_after = min(moment + INTERMEDIATE_LIFE, root.not_valid_after_utc)
    subject_key = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        x509.CertificateBuilder()
        # Two intermediates of one name and different keys would confuse clients that remember chains by name.
        .subject_name(_name(f"egressd worker {_printable(worker, 32)} {secrets.token_hex(4)}"))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(moment - BACKDATED, root.not_valid_before_utc))
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signing_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    chain = [certificate] if root.subject == root.issuer else [certificate, root]
    chain_pem = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain)
    return Issued(chain_pem, _key_pem(key), certificate.not_valid_after_utc.timestamp())


def _make_root(now: float) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    moment = _moment(now)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"egressd {_printable(socket.gethostname(), 40)} root {secrets.token_hex(4)}")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - BACKDATED)
        .not_valid_after(moment + ROOT_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(_signing_usage(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


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
        raise CaError(directory, f"cannot be opened: {error.strerror}", _ELSEWHERE) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_new(paths: CaPaths, now: float) -> None:
    """Write a new pair; a crash leaves the old pair, none, or a mismatch that the next call completes."""
    _check_directory(paths.ca, 0o022)
    certificate, key = _make_root(now)
    try:
        _write(_pending(paths.key), _key_pem(key), 0o600)
        _write(_pending(paths.certificate), certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        # The certificate's own pending file is left for last: with it, an interruption between the two can be
        # completed.
        os.replace(_pending(paths.key), paths.key)
        os.replace(_pending(paths.certificate), paths.certificate)
        _sync(paths.ca)
    except OSError as error:
        raise CaError(paths.ca, f"cannot be written: {error.strerror}", _ELSEWHERE) from None


def _finish_interrupted(paths: CaPaths) -> None:
    """Complete a creation that was killed between its two renames, or clear away one that got less far."""
    pending = _pending(paths.certificate)
    if not pending.exists():
        return
    if paths.key.exists() and _belongs(pending, _read_key(paths.key)):
        os.replace(pending, paths.certificate)
        _sync(paths.ca)
    else:
        for path in (_pending(paths.key), pending):
            path.unlink(missing_ok=True)


def _belongs(path: Path, key: ec.EllipticCurvePrivateKey) -> bool:
    try:
        return _read_certificate(path).public_key() == key.public_key()
    except CaError:
        return False  # half written


def _load(paths: CaPaths, now: float) -> Authority:
    # A mounted secret's directory is sticky and open; nobody else can replace what is in it.
    _check_directory(paths.ca, 0 if paths.ca.stat().st_mode & stat.S_ISVTX else 0o022)
    for path, other in ((paths.key, paths.certificate), (paths.certificate, paths.key)):
        if not path.exists():
            hint = f"restore it, or remove {other} too: a new authority is then made, which nobody trusts yet"
            raise CaError(path, "is missing", hint)
    key = _read_key(paths.key)
    certificate = _read_certificate(paths.certificate)
    if certificate.public_key() != key.public_key():
        raise CaError(paths.certificate, "does not belong to the key beside it", _BACKUP)
    _check_certificate(paths.certificate, certificate, _moment(now))
    return Authority(certificate, key, paths)


def _check_directory(directory: Path, forbidden: int) -> None:
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise CaError(directory, f"belongs to uid {status.st_uid}", _ELSEWHERE)
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


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    content, status = _read(path)
    if status.st_uid not in (os.geteuid(), 0):
        raise CaError(path, f"belongs to uid {status.st_uid}", "a key must be its reader's own, or root's")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        hint = f"chmod 600 {path}; if others were here, make a new one with `egressd ca rotate`"
        raise CaError(path, f"can be read by others (mode {mode:04o})", hint)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CaError(path, "is not an unencrypted EC private key in PEM", _BACKUP)
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    content, _ = _read(path)
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise CaError(path, "is not a certificate in PEM", _BACKUP) from None


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    """Return content and status of the same regular file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE:
                raise CaError(path, "is not a small regular file", _BACKUP)
            return file.read(_MAX_FILE), status
    except OSError as error:
        raise CaError(path, f"cannot be read: {error.strerror}", _ELSEWHERE) from None


def _pending(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file that had its mode from the first moment, whatever the umask."""
    path.unlink(missing_ok=True)  # left by an interrupted creation; the lock is ours
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "egressd"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _printable(text: str, limit: int) -> str:
    """Return what a common name can safely show: ub-common-name is 64 characters (RFC 5280 appendix A)."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in text)[:limit] or "host"


def _moment(now: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)


def _signing_usage() -> x509.KeyUsage:
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
