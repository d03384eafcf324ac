"""`egressd ca`: the certificate authority that sandboxes trust, its public side only; a key never leaves."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:  # cryptography takes longer to load than most verbs run
    from egressd.control.ca import Authority, CaPaths

BAD_INPUT, COULD_NOT_RUN = 2, 3

type CaDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the authority lives; default: the configured place.")
]


def register(app: typer.Typer) -> None:
    """Add the verb with its own verbs."""
    ca = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    ca.command("show", help="Say which authority this is.")(show)
    ca.command("export", help="Print its certificate as PEM.")(export)
    ca.command("env", help="Print the variables by which tools find it.")(env)
    ca.command("rotate", help="Replace it; what begins meanwhile trusts both, the old one and the new.")(
        rotate
    )
    app.add_typer(ca, name="ca", help="The certificate authority that sandboxes trust.")


def show(ca_dir: CaDir = None) -> None:
    """Print subject, fingerprint, validity and places: 0, or 3 where there is none that can be used."""
    from egressd.control.ca import load

    with _complaining():
        _print(load(_paths(ca_dir), time.time()))


def export(
    ca_dir: CaDir = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead.")] = None,
) -> None:
    """Print the certificate, two while one authority follows another, making the authority first where there is none."""
    with _complaining():
        authority = _made(_paths(ca_dir))
        if out is None:
            sys.stdout.write(authority.trusted_pem.decode("ascii"))
        else:
            _write(out, authority.trusted_pem)


def env(
    ca_dir: CaDir = None,
    form: Annotated[
        Literal["sh", "docker", "json"],
        typer.Option("--format", help="sh: exports; docker: an env file; json: one object."),
    ] = "sh",
    at: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the sandbox sees the directory; default: where it is here."),
    ] = None,
) -> None:
    """Print the variables, making authority and trust directory first where there are none."""
    from egressd.control.trust import build_trust, render_environment, trust_environment

    if at is not None and not at.startswith("/"):
        _complain(f"--at {at!r}: no absolute path", "")
        raise typer.Exit(BAD_INPUT)
    with _complaining():
        paths = _paths(ca_dir)
        trust = build_trust(paths.trust, _made(paths).trusted_pem)
        try:
            text = render_environment(trust_environment(at or str(trust.directory)), form)
        except ValueError as error:
            _complain(str(error), "")
            raise typer.Exit(BAD_INPUT) from None
        sys.stdout.write(text)
        where = at or "the same path"
        print(f"hint: mount {trust.directory} read-only at {where} wherever they are used", file=sys.stderr)


def rotate(
    ca_dir: CaDir = None,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long both are trusted; 0: the old one ends here and now.")
    ] = "24h",
    finish: Annotated[
        bool, typer.Option("--finish", help="Replace nothing: end the overlap of the last rotation now.")
    ] = False,
) -> None:
    """Replace the authority and say which one it is now; the old key is gone for good."""
    from egressd.cli.options import seconds
    from egressd.control import ca
    from egressd.control.trust import build_trust

    try:
        lasting = 0.0 if overlap == "0" else seconds(overlap)
    except ValueError as error:
        _complain(f"--overlap: {error}", "")
        raise typer.Exit(BAD_INPUT) from None
    with _complaining():
        paths, now = _paths(ca_dir), time.time()
        authority = ca.finish(paths, now) if finish else ca.rotate(paths, now, lasting)
        build_trust(paths.trust, authority.trusted_pem)
        _print(authority)
        if finish:
            told = "what trusts only the old authority must now trust this one"
        elif authority.previous is None:
            told = "what trusts the old authority must now trust this one; restart sandboxes"
        else:
            told = (
                "this one signs for what begins from now on; sandboxes that run keep the old one, and images and "
                f"hosts must trust both files of {paths.trust} until `egressd ca rotate --finish`, or the end of the overlap"
            )
        print(f"egressd: {told}", file=sys.stderr)


def _print(authority: Authority) -> None:
    from egressd.cli.rows import printable

    certificate, paths = authority.certificate, authority.paths
    digits = authority.fingerprint.upper()
    fingerprint = ":".join(digits[n : n + 2] for n in range(0, len(digits), 2))
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    for name, value in (
        ("subject", printable(certificate.subject.rfc4514_string())),
        ("sha-256", fingerprint),
        ("valid", f"{since:%Y-%m-%d} to {until:%Y-%m-%d}"),
        *_overlapping(authority),
        ("certificate", str(paths.certificate)),
        ("key", f"{paths.key} (mode 0600, read by control only)"),
        ("trust", str(paths.trust)),
    ):
        print(f"{name:<12} {value}")


def _overlapping(authority: Authority) -> list[tuple[str, str]]:
    """Say which one is trusted besides, and until when."""
    from cryptography.hazmat.primitives import hashes

    if authority.previous is None:
        return []
    digits = authority.previous.fingerprint(hashes.SHA256()).hex().upper()
    fingerprint = ":".join(digits[n : n + 2] for n in range(0, len(digits), 2))
    until = datetime.datetime.fromtimestamp(authority.until, datetime.UTC)
    return [("also trusted", fingerprint), ("until", f"{until:%Y-%m-%d %H:%M} UTC")]


def _paths(ca_dir: Path | None) -> CaPaths:
    from egressd.cli.options import given_config

    return given_config(ca_dir=ca_dir).ca


def _made(paths: CaPaths) -> Authority:
    from egressd.control.ca import load_or_create

    fresh = not paths.certificate.exists()
    authority = load_or_create(paths, time.time())
    if fresh:
        print(f"egressd: made a new authority in {paths.ca}", file=sys.stderr)
    return authority


def _write(out: Path, pem: bytes) -> None:
    """Put the certificate at `out` whole; a link there is replaced, never followed."""
    pending = out.with_name(f".{out.name}.{secrets.token_hex(4)}.new")
    try:
        with open(os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            file.write(pem)
        pending.replace(out)
    finally:
        pending.unlink(missing_ok=True)


@contextlib.contextmanager
def _complaining() -> Iterator[None]:
    """Turn what went wrong into words and an exit status."""
    from egressd.control.ca_files import CaError
    from egressd.control.config import ConfigError
    from egressd.control.trust import TrustError

    try:
        yield
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except (CaError, TrustError) as error:
        _complain(str(error), error.hint)
        raise typer.Exit(COULD_NOT_RUN) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        _complain(f"{error.filename or 'output'}: {error.strerror or error}", "")
        raise typer.Exit(COULD_NOT_RUN) from None


def _complain(problem: str, hint: str) -> None:
    print(f"egressd: {problem}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
