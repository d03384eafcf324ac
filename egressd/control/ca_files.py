"""The files of an authority: keys and certificates, read with care and written with their mode from the first moment."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

BACKUP: Final = "restore both files from one backup"
ELSEWHERE: Final = "run as the user that owns it, or give another place by --ca-dir"
_MAX_FILE: Final = 64 * 1024


class CaError(Exception):
    """The authority cannot be used; `hint` says what a person can do about it."""

    def __init__(self, path: Path, problem: str, hint: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
        self.hint = hint


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file that nobody else may read; raises CaError, without any of its bytes."""
    content, status = read_file(path)
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
        raise CaError(path, "is not an unencrypted EC private key in PEM", BACKUP)
    return key


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate of a file; raises CaError."""
    content, _ = read_file(path)
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise CaError(path, "is not a certificate in PEM", BACKUP) from None


def read_file(path: Path) -> tuple[bytes, os.stat_result]:
    """Return content and status of the same regular file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE:
                raise CaError(path, "is not a small regular file", BACKUP)
            return file.read(_MAX_FILE), status
    except OSError as error:
        raise CaError(path, f"cannot be read: {error.strerror}", ELSEWHERE) from None


def pending(path: Path) -> Path:
    """Return where a file is written before it takes its place."""
    return path.with_name(f"{path.name}.new")


def write_file(path: Path, content: bytes, mode: int) -> None:
    """Write a new file that had its mode from the first moment, whatever the umask."""
    path.unlink(missing_ok=True)  # left by an interrupted creation; the lock is ours
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Have the kernel write down what was renamed in a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
