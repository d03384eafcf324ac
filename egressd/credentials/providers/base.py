"""What every source of credentials is to the broker, and the one way by which a long-lived secret is read.

A source module `egressd.credentials.providers.KIND` has one public function, `provider(name, source, ca_bundle)`, which returns
a `Provider`: `name` is the credential's, `source` what credentials.yaml says under KIND, `ca_bundle` the PEM file of authorities
that the operator's own servers are verified by (`upstream.ca_bundle`), None for the system's. It opens nothing: the first `mint`
does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final, Protocol, cast

from pydantic import SecretStr

from egressd.credentials.lease import SECRET_LIMIT, Material
from egressd.policy.credential import SecretRef, Source


class SourceFailed(Exception):
    """A source gave no credential. Its text names the trouble and never holds a secret, a path's content or a server's words.

    What a server said is told by its status and, where it is one of the specification's, its error code alone.
    """


@dataclass(frozen=True, slots=True)
class For:
    """Whom a credential is minted for."""

    sandbox: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Minted:
    """What a source gave. `expires` is in Unix seconds, None where it does not say.

    `revoke` takes it back at its source; `renew` makes the same one live longer, without a new one. Both raise SourceFailed.
    `keep` is how many seconds the source need not be asked again where it does not say when the credential ends.
    """

    material: Material
    expires: float | None = None
    revoke: Callable[[], Awaitable[None]] | None = None
    renew: Callable[[], Awaitable[Minted]] | None = None
    keep: float = 300.0


class Provider(Protocol):
    """One credential's source. Safe for several sandboxes at a time."""

    async def mint(self, for_: For) -> Minted:
        """Return a credential for this sandbox; raises SourceFailed. May be cancelled at any await."""

    async def close(self) -> None:
        """Let go of connections and whatever egressd itself logged in with; never raises."""


_MODULES: Final[dict[str, Callable[[], ModuleType]]] = {
    "env": lambda: import_module("egressd.credentials.providers.env"),
    "file": lambda: import_module("egressd.credentials.providers.file"),
    "exec": lambda: import_module("egressd.credentials.providers.exec"),
    "oauth2": lambda: import_module("egressd.credentials.providers.oauth2"),
    "github_app": lambda: import_module("egressd.credentials.providers.github_app"),
    "aws_sts": lambda: import_module("egressd.credentials.providers.aws_sts"),
    "gcp": lambda: import_module("egressd.credentials.providers.gcp"),
    "azure": lambda: import_module("egressd.credentials.providers.azure"),
    "vault": lambda: import_module("egressd.credentials.providers.vault"),
    "kubernetes": lambda: import_module("egressd.credentials.providers.kubernetes"),
}
_EXTRAS: Final = {
    "oauth2": "oauth2",
    "github_app": "github",
    "aws_sts": "aws",
    "gcp": "gcp",
    "azure": "azure",
    "vault": "vault",
}
"""The extra that brings a source's own library."""


def provider_of(name: str, source: Source, ca_bundle: str | None = None) -> Provider:
    """Return the provider of one credential's source; raises SourceFailed where its library is not installed."""
    kind = source.kind
    try:
        module = _MODULES[kind]()
    except ImportError:
        extra = _EXTRAS.get(kind)
        needs = f"egressd[{extra}]" if extra else "a module that is not installed"
        raise SourceFailed(f"the source {kind} needs {needs}") from None
    return cast(Provider, module.provider(name, getattr(source, kind), ca_bundle))


_taken: dict[str, SecretStr] = {}
"""Variables that hold secrets, taken out of the environment so that no process that we start can inherit them."""


def take_variables(names: Iterable[str]) -> None:
    """Move these variables out of this process's environment, where `read_secret` alone finds them.

    What the kernel shows of the environment we were started with (`/proc/PID/environ`) is overwritten too.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in names:
        value = os.environ.get(name)
        if value is None:
            continue
        _taken[name] = SecretStr(value)
        place = libc.getenv(os.fsencode(name))
        if place:
            ctypes.memset(place, 0, len(os.fsencode(value)))
        del os.environ[name]


_pinned: dict[str, tuple[int, int] | None] = {}
"""Device and inode of files that a sandbox could put another one in the place of."""


def pin(paths: Iterable[str]) -> None:
    """Read a secret from nothing else, for as long as this process lives, than the file that lies at each of these paths now.

    Whoever can exchange one (by moving a folder above it, or a link to it) could have their own key sent out in its stead, or
    another secret of ours to the wrong host.
    """
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            _pinned[path] = None
        else:
            _pinned[path] = status.st_dev, status.st_ino


async def read_secret(ref: SecretRef, *, lines: bool = False) -> str:
    """Return the secret that a reference names; raises SourceFailed, which says what is wrong and never shows the value.

    One newline at the end is taken off. A secret is printable text of at most 16 KiB that neither begins nor ends with a space,
    or it would end a header, or stand in it otherwise than it is masked; with `lines` it may have lines, as a PEM key has. A file
    is a regular one, which only its owner and root may write, and which others can read only where it is root's or our own.
    """
    if ref.env is not None:
        kept = _taken.get(ref.env)
        value = kept.get_secret_value() if kept is not None else os.environ.get(ref.env)
        if value is None:
            raise SourceFailed(f"the variable {ref.env} is not set")
        return checked(value, f"the variable {ref.env}", lines=lines)
    assert ref.file is not None
    return await asyncio.to_thread(read_file, ref.file, lines=lines)


def read_file(path: str, *, lines: bool = False) -> str:
    """Return the secret in a file, as `read_secret` does; may block."""
    try:
        # without O_NONBLOCK a FIFO would hold the thread until somebody writes
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise SourceFailed(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        _check_file(path, status)
        if path in _pinned and (status.st_dev, status.st_ino) != _pinned[path]:
            raise SourceFailed(
                f"{path}: another file than at the start, where the sandbox can write; start it anew"
            )
        content = b""
        while len(content) <= SECRET_LIMIT + 2 and (more := os.read(fd, SECRET_LIMIT + 3 - len(content))):
            content += more
    except OSError as error:
        raise SourceFailed(f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:  # its own text would show a byte of the secret
        raise SourceFailed(f"{path}: no UTF-8 text") from None
    return checked(text, path, lines=lines)


def checked(text: str, origin: str, *, lines: bool = False) -> str:
    """Return a secret without the newline at its end; raises SourceFailed, which names `origin` and not the value."""
    text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise SourceFailed(f"{origin}: empty")
    if len(text.encode("utf-8", "surrogatepass")) > SECRET_LIMIT:
        raise SourceFailed(f"{origin}: more than {SECRET_LIMIT // 1024} KiB")
    visible = text.translate(_LINES) if lines else text
    if not visible.isprintable():
        raise SourceFailed(f"{origin}: a control character, or one that nobody sees, is inside")
    if not lines and text != text.strip(" "):
        raise SourceFailed(f"{origin}: a space stands before or behind it")
    return text


_LINES: Final = {ord(character): " " for character in "\r\n\t"}


def _check_file(path: str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise SourceFailed(f"{path}: no regular file")
    trusted = status.st_uid in {0, os.geteuid()}
    if mode & 0o004 and not trusted:
        raise SourceFailed(f"{path}: everybody can read it, and it is neither root's nor our own")
    if mode & 0o002:
        raise SourceFailed(f"{path}: everybody can write it")
