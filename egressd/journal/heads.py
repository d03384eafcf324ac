"""Heads: now and then control signs the last line, so that who has the public key can tell a journal that was made anew.

A head is a record of its own, the next line of the chain. Signed (Ed25519, RFC 8032) is CONTEXT and the head's own line up to
`,"signature":"`: its number, its time and, by `prev`, every line before it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from egressd.journal.chain import Line, Link, chained, digest

CONTEXT: Final = b"egressd journal head 1\n"
ROOM: Final = len(',"signature":""') + 88

_MARK: Final = b',"signature":"'
_KEY, _PUBLIC = "journal.key", "journal.pub"
_MOST_BYTES: Final = 4096


class KeyUnusable(Exception):
    """The key of the heads can be neither read nor made; the text is for an operator."""


def public_key_path(state: Path) -> Path:
    """Return where control puts the public key."""
    return state / _PUBLIC


class Signer:
    """The private key of one state directory."""

    def __init__(self, state: Path) -> None:
        """Read the key, or make it (0600) and put its public half beside it; raises KeyUnusable."""
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._key = _read_key(state / _KEY) or _make_key(state / _KEY)
            public = self._key.public_key()
            self.id = key_id(public)
            pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            if not (state / _PUBLIC).is_file() or (state / _PUBLIC).read_bytes() != pem:
                _put(state / _PUBLIC, pem, 0o644)
        except OSError as error:
            raise KeyUnusable(f"{state / _KEY}: {error.strerror or error}") from None

    def head(self, text: bytes, before: Link) -> Line:
        """Return the line of a head, signed; `text` is its record's line, not numbered yet."""
        unsigned = chained(text, before)
        signed = unsigned.text[:-2]
        signature = base64.b64encode(self._key.sign(CONTEXT + signed))
        line = b'%b%b%b"}' % (signed, _MARK, signature)
        return Line(line + b"\n", Link(unsigned.link.seq, digest(line)))


def key_id(key: Ed25519PublicKey) -> str:
    """Return what a head calls the key that it is signed with: 16 hex digits of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Return a public key from a PEM file; raises KeyUnusable."""
    try:
        with path.open("rb") as file:
            key = load_pem_public_key(file.read(_MOST_BYTES))
    except OSError as error:
        raise KeyUnusable(f"{path}: {error.strerror or error}") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyUnusable(f"{path}: is no Ed25519 public key in PEM")
    return key


def is_signed(line: bytes, key: Ed25519PublicKey) -> bool:
    """Say whether a head's line, without its newline, is signed with the key; total."""
    signed, mark, rest = line.rpartition(_MARK)
    if not mark or not rest.endswith(b'"}'):
        return False
    try:
        signature = base64.b64decode(rest[:-2], validate=True)
        if base64.b64encode(signature) != rest[:-2]:  # one spelling each, or a line could change unseen
            return False
        key.verify(signature, CONTEXT + signed)
    except (binascii.Error, InvalidSignature):
        return False
    return True


def _read_key(path: Path) -> Ed25519PrivateKey | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        content = file.read(_MOST_BYTES)
    if mode & 0o077:
        raise KeyUnusable(f"{path}: others may read it; mode 0600 is wanted")
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyUnusable(f"{path}: is no Ed25519 private key in PEM")
    return key


def _make_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _put(path, pem, 0o600, only_new=True)
    return _read_key(path) or key  # where two begin at once, one key wins


def _put(path: Path, content: bytes, mode: int, *, only_new: bool = False) -> None:
    """Write a file so that it is whole or not there; with `only_new`, one that is there stays."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        if only_new:
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        else:
            os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
