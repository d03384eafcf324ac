"""What a sandbox trusts: the system's certificates and egressd's own, in every form that its tools read.

Neither the system's store nor a variable is enough alone (measured client by client), so both are made: files
to lie over the places where a distribution keeps its certificates, and the environment. A variable that
replaces a client's store gets the bundle, one that adds to it the single certificate; with ours alone, hosts
that are not inspected would fail.

Public certificates only. Each content has a directory of its own that never changes afterwards: a sandbox
that was started with it keeps it, whatever is built later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from OpenSSL import crypto

from egressd.gate.tls.upstream import SYSTEM_BUNDLES

JAVA_PASSWORD: Final = "changeit"  # noqa: S105 # Java's own default for stores of public certificates
"""Java wants a password for an integrity check; there is nothing to keep secret."""

_FORMAT: Final = b"egressd trust 2"  # another layout is another content
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
_MAX_BUNDLE: Final = 16 * 1024 * 1024
_KEPT: Final = 30 * 86400.0  # seconds; a sandbox may live as long on an older content

_NSS_FOLDER: Final = ".pki/nssdb"  # below the home: where Chromium and its kin look, and nowhere else
_CERTUTIL_SECONDS: Final = 10.0

_JAVA_STORES: Final = (
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
    "/etc/pki/java/cacerts",
    "/var/lib/ca-certificates/java-cacerts",
)

type Format = Literal["sh", "docker", "json"]


class TrustError(Exception):
    """The trust directory cannot be made; `hint` says what a person can do about it."""

    def __init__(self, path: Path, problem: str, hint: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Trust:
    """A finished directory to show to sandboxes, read-only.

    `certs` replaces the whole of /etc/ssl/certs; `bundle` lies over each of `system_bundle_paths()`,
    `java_default` over each of `java_store_paths()`. `directory` goes where `trust_environment` is told.
    """

    directory: Path
    system_certificates: int
    """How many were found on this host; 0 means that only inspected hosts can be reached."""

    @property
    def certificate(self) -> Path:
        """Ours alone, PEM; two while one authority follows another."""
        return self.directory / "ca.crt"

    @property
    def bundle(self) -> Path:
        """The system's and ours, PEM."""
        return self.directory / "bundle.crt"

    @property
    def certs(self) -> Path:
        """A replacement for /etc/ssl/certs, hash links included."""
        return self.directory / "certs"

    @property
    def java(self) -> Path:
        """A PKCS #12 store with the password JAVA_PASSWORD."""
        return self.directory / "java.p12"

    @property
    def nss(self) -> dict[str, Path]:
        """The files of an NSS database, by their place below a home; none where the host has no certutil.

        The programs that read it must be able to write it, so each sandbox gets a copy.
        """
        return {f"{_NSS_FOLDER}/{path.name}": path for path in sorted((self.directory / "nss").glob("*"))}

    @property
    def java_default(self) -> Path:
        """A PKCS #12 store without one, as Java opens its default store."""
        return self.certs / "java" / "cacerts"


def build_trust(trust: Path, ca_pem: bytes, system_pem: bytes | None = None) -> Trust:
    """Return what sandboxes see under the CA `ca_pem`, built below `trust` unless it is there already.

    While one authority follows another, `ca_pem` holds both certificates, the one that signs first.

    `trust` also gets `ca.crt` and `bundle.crt` for people and containers. `system_pem` stands for the host's
    certificates; by default they are read from the first of `system_bundle_paths()`. Any number of processes
    may build at once. Raises TrustError.
    """
    if system_pem is None:
        system_pem = _read_system()
    ours = _own(trust, ca_pem)
    certutil = shutil.which("certutil")
    kinds = b"nss" if certutil else b""
    digest = hashlib.sha256(b"\0".join((_FORMAT, kinds, ca_pem, system_pem))).hexdigest()[:32]
    directory = trust / f"content-{digest}"
    try:
        _prepare(trust)
        if not (directory / "built").is_file():
            _build(directory, ours, system_pem, certutil)
        for name in ("ca.crt", "bundle.crt"):
            _publish(directory / name, trust / name)
        os.utime(directory)
        _prune(trust, directory)
        count = int((directory / "built").read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a certificate or a file in it is damaged"
        hint = f"is it yours to write to, and has the disk room? Then remove {trust} and start again"
        raise TrustError(trust, f"cannot be built: {reason}", hint) from None
    return Trust(directory, count)


def system_bundle_paths() -> list[Path]:
    """Return the PEM files in which this host keeps all trusted certificates, links resolved, each once."""
    return _existing(map(Path, SYSTEM_BUNDLES))


def java_store_paths() -> list[Path]:
    """Return the default trust stores of this host's Java installations, links resolved, each once."""
    machines = sorted(Path("/usr/lib/jvm").glob("*/lib/security/cacerts"))
    return _existing([*map(Path, _JAVA_STORES), *machines])


def trust_environment(inside: str) -> dict[str, str]:
    """Return the variables by which tools find `Trust.directory` at `inside`, its absolute path in the
    sandbox."""
    single, bundle, certs = f"{inside}/ca.crt", f"{inside}/bundle.crt", f"{inside}/certs"
    java = (
        f"-Djavax.net.ssl.trustStore={inside}/java.p12 -Djavax.net.ssl.trustStoreType=PKCS12 "
        f"-Djavax.net.ssl.trustStorePassword={JAVA_PASSWORD}"
    )
    replacing = (
        "SSL_CERT_FILE",  # OpenSSL, Go, httpx, Ruby, PHP, uv, cargo, pnpm, bun
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",  # also where git is built on GnuTLS
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
        "AWS_CA_BUNDLE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
        "NPM_CONFIG_CAFILE",  # else a `cafile` in an npmrc wins over NODE_EXTRA_CA_CERTS
        "YARN_HTTPS_CA_FILE_PATH",
        "CARGO_HTTP_CAINFO",
        "CODEX_CA_CERTIFICATE",
        "NIX_SSL_CERT_FILE",
        "HTTPLIB2_CA_CERTS",
        "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
        "PERL_LWP_SSL_CA_FILE",
        "HEX_CACERTS_PATH",
        "BUNDLE_SSL_CA_CERT",
    )
    adding = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")
    return {
        **dict.fromkeys(replacing, bundle),
        **dict.fromkeys(adding, single),
        "SSL_CERT_DIR": certs,
        "DENO_TLS_CA_STORE": "system",
        "JAVA_TOOL_OPTIONS": java,
    }


def render_environment(environment: Mapping[str, str], form: Format) -> str:
    """Return the variables as shell exports, as a Docker env file, or as one JSON object; ends with a
    newline.

    Raises ValueError for a value that an env file cannot hold.
    """
    pairs = sorted(environment.items())
    if form == "json":
        return json.dumps(dict(pairs), indent=2) + "\n"
    if form == "sh":
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in pairs)
    for name, value in pairs:
        if "\n" in value or "\r" in value:
            raise ValueError(f"{name}: an env file holds no line breaks")
    return "".join(f"{name}={value}\n" for name, value in pairs)


def _read_system() -> bytes:
    for path in system_bundle_paths():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read(_MAX_BUNDLE)
    return b""


def _own(trust: Path, ca_pem: bytes) -> list[bytes]:
    """Return our certificates alone, whatever else the bytes hold: a key must never come this way."""
    found = list(dict.fromkeys(bytes(block) + b"\n" for block in _PEM.findall(ca_pem)))
    if not 1 <= len(found) <= 2:
        raise TrustError(
            trust, "the authority is not one certificate, or two", "look at it with `egressd ca show`"
        )
    return found


def _existing(paths: Iterable[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        with contextlib.suppress(OSError, RuntimeError):  # a loop of links is the latter before 3.13
            resolved = path.resolve(strict=True)
            if resolved.is_file():
                found[resolved] = None
    return list(found)


def _prepare(trust: Path) -> None:
    """Make the directory, readable to all; one that others can write to would let them choose what is trusted."""
    if not trust.exists():
        with contextlib.suppress(FileExistsError):
            trust.mkdir(parents=True)
            trust.chmod(0o755)
    status = trust.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise TrustError(trust, f"belongs to uid {status.st_uid}", "give another place by --ca-dir")
    if status.st_mode & 0o022:
        raise TrustError(trust, "can be written by others", f"remove {trust} and start again")


def _build(directory: Path, ours: list[bytes], system_pem: bytes, certutil: str | None) -> None:
    """Build the content beside its place and move it there whole; who comes second finds it and discards his
    own."""
    scratch = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.new")
    scratch.mkdir()
    try:
        blocks = list(dict.fromkeys(bytes(block) + b"\n" for block in _PEM.findall(system_pem)))
        blocks = [block for block in blocks if block not in ours]
        bundle = b"".join([*blocks, *ours])
        certificates = _parse([*blocks, *ours], len(ours))
        _write(scratch / "ca.crt", b"".join(ours))
        _write(scratch / "bundle.crt", bundle)
        _write_certs(scratch / "certs", certificates, bundle, ours)
        trusted = [pkcs12.PKCS12Certificate(each, _alias(each)) for _, each in certificates]
        password = serialization.BestAvailableEncryption(JAVA_PASSWORD.encode())
        _write(scratch / "java.p12", pkcs12.serialize_java_truststore(trusted, password))
        plain = serialization.NoEncryption()
        _write(scratch / "certs/java/cacerts", pkcs12.serialize_java_truststore(trusted, plain))
        if certutil is not None:
            _write_nss(scratch / "nss", certutil, [scratch / "certs" / _named(n) for n in range(len(ours))])
        _write(scratch / "built", b"%d\n" % len(blocks))
        scratch.chmod(0o755)
        if directory.exists() and not (directory / "built").is_file():
            # An older build was interrupted in the middle of being removed. One with its mark is another process's, in use.
            shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            _rename(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rename(scratch: Path, directory: Path) -> None:
    try:
        scratch.rename(directory)
    except OSError:
        if not (directory / "built").is_file():  # else another process was first
            raise


def _parse(blocks: list[bytes], ours: int) -> list[tuple[bytes, x509.Certificate]]:
    """Return the certificates that can be read, ours (the last ones) always; the bundle holds the others as they
    are."""
    found: list[tuple[bytes, x509.Certificate]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # roots older than RFC 5280 break it harmlessly
        for block in blocks:
            try:
                certificate = x509.load_pem_x509_certificate(block)
                _subject_hash(certificate)
            except (ValueError, crypto.Error):
                if any(block is own for own in blocks[-ours:]):
                    raise
                continue
            found.append((block, certificate))
    return found


def _write_certs(
    certs: Path, certificates: list[tuple[bytes, x509.Certificate]], bundle: bytes, ours: list[bytes]
) -> None:
    """Write what OpenSSL's rehash would make of /etc/ssl/certs: a file each and a link by subject hash."""
    (certs / "java").mkdir(parents=True)
    seen: Counter[str] = Counter()
    for number, (block, certificate) in enumerate(certificates):
        name = _named(ours.index(block)) if block in ours else f"system-{number:03}.pem"
        _write(certs / name, block)
        subject = _subject_hash(certificate)
        os.symlink(name, certs / f"{subject}.{seen[subject]}")
        seen[subject] += 1
    _write(certs / "ca-certificates.crt", bundle)
    for directory in (certs / "java", certs):
        directory.chmod(0o755)


def _named(number: int) -> str:
    """Return the file of one of ours: of the one that signs, or of the one before it."""
    return "egressd-previous.pem" if number else "egressd.pem"


def _write_nss(folder: Path, certutil: str, certificates: list[Path]) -> None:
    """Make a database that trusts ours for servers, besides what a browser brings along; leave none where that fails."""
    folder.mkdir()
    place = ("-d", f"sql:{folder}")
    added = [("-A", "-n", path.stem, "-t", "C,,", "-i", str(path)) for path in certificates]
    steps = (("-N", "--empty-password"), *added)
    try:
        for action, *rest in steps:
            command = [certutil, action, *place, *rest]
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=_CERTUTIL_SECONDS,
                env={"PATH": os.defpath},
            )
    except (OSError, subprocess.SubprocessError):
        shutil.rmtree(folder)  # a browser then says that it does not know the issuer; all else works
        return
    (folder / "pkcs11.txt").unlink(
        missing_ok=True
    )  # it names this host's folder, and is made anew where it is missing
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path == folder else 0o644)


def _subject_hash(certificate: x509.Certificate) -> str:
    """Return the name under which OpenSSL looks an issuer up in a directory."""
    return f"{crypto.X509.from_cryptography(certificate).subject_name_hash():08x}"


def _alias(certificate: x509.Certificate) -> bytes:
    """Return a name unique within a Java store; Java folds its case."""
    return certificate.fingerprint(hashes.SHA256()).hex().encode()


def _publish(source: Path, target: Path) -> None:
    """Make the target's content the source's, atomically, and only when it differs."""
    content = source.read_bytes()
    with contextlib.suppress(OSError):
        if not target.is_symlink() and target.read_bytes() == content:
            return
    pending = target.with_name(f"{target.name}.{secrets.token_hex(4)}.new")
    try:
        _write(pending, content)
        pending.replace(target)
    finally:
        pending.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), 0o644)  # whatever the umask is


def _prune(trust: Path, current: Path) -> None:
    """Remove contents that nobody was started with for a month, and what a killed builder left an hour
    ago."""
    now = time.time()
    for path in trust.glob("content-*"):
        limit = 3600.0 if path.suffix == ".new" else _KEPT
        with contextlib.suppress(OSError):
            if path != current and now - path.stat().st_mtime > limit:
                (path / "built").unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
