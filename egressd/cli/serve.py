"""`egressd serve`: the daemon that carries many sandboxes, until it is told to end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from egressd.cli.given import GIVEN

_BAD_INPUT = 2
_COULD_NOT_RUN = 3


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("serve", help="Carry many sandboxes: the daemon behind `egressd sandbox` and `egressd run`.")(
        serve
    )


def serve(
    journal: Annotated[str | None, typer.Option(help="Where records go: a file, or - for stdout.")] = None,
    ca_dir: Annotated[Path | None, typer.Option(help="Where the certificate authority lives.")] = None,
    credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The credentials that the rules name.")
    ] = None,
    dns_upstream: Annotated[
        str | None,
        typer.Option(help="system, or udp://, tcp://, tls:// or https:// with ADDRESS[:PORT][#NAME]."),
    ] = None,
) -> None:
    """Serve; exits with 0 after a drain, 2 for rules or a configuration that cannot be used, 3 where it could not run."""
    from egressd.control.config import ConfigError, load_config
    from egressd.control.daemon import Daemon
    from egressd.control.notify import Notifier
    from egressd.control.surroundings import BadInput

    flags: dict[str, str | Path | None] = {
        "rules": GIVEN.rules,
        "journal": journal,
        "ca_dir": ca_dir,
        "credentials": credentials,
        "dns.upstream": dns_upstream,
    }
    notifier = Notifier(os.environ)

    async def run() -> int:
        return await Daemon(load_config(flags, os.environ, file=GIVEN.config), os.environ, notifier).run()

    try:
        status = asyncio.run(run())
    except (BadInput, ConfigError) as error:
        _complain(error)
        status = _BAD_INPUT
    except Exception as error:  # the top of the call: whatever it was, nothing is served
        if GIVEN.verbose:
            raise
        _complain(error)
        status = _COULD_NOT_RUN
    raise typer.Exit(status)


def _complain(error: Exception) -> None:
    print(f"egressd: {str(error) or type(error).__name__}", file=sys.stderr)
    hint = getattr(error, "hint", None)
    if hint and hint not in str(error):
        print(f"hint: {hint}", file=sys.stderr)
