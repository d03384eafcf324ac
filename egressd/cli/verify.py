"""`egressd verify`: tries the boundary from inside a sandbox of this installation, under its own rules, and says what held.

The inside half (egressd.verify) is sent into the sandbox; this half builds the ground, asks for one probe after another, holds
what each found against what the lab saw, and makes the probes that are made from outside.
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # the lab, the rules and the probes are loaded when the verb runs, not for `--help`
    from egressd.cli.verify_ground import Options
    from egressd.control.config import Config

YES, NO, BAD_INPUT, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 3, 130


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("verify", help="Try the boundary from inside a sandbox of this installation.")(verify)


def verify(
    profile: Annotated[
        str, typer.Option(envvar="EGRESSD_PROFILE", help="The profile it lives under; there is no default.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML too.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Try this address of the real network, and no lab; may come again."
        ),
    ] = None,
    wiring: Annotated[
        str,
        typer.Option(help="namespace, attached (to a container that runs), gateway, explicit or sidecar."),
    ] = "namespace",
    env: Annotated[list[str] | None, typer.Option(help="As for run: N or N=V.")] = None,
    bind: Annotated[list[str] | None, typer.Option(help="As for run: PATH[:ro].")] = None,
    socket: Annotated[
        list[str] | None, typer.Option(help="As for run: a host Unix socket to let in.")
    ] = None,
    ca_dir: Annotated[Path | None, typer.Option(help="Where the certificate authority lives.")] = None,
    uid: Annotated[int | None, typer.Option(help="As root: the host uid of the sandbox.")] = None,
    ready_timeout: Annotated[str, typer.Option(help="How long readiness may take, such as 10s.")] = "10s",
    without: Annotated[bool, typer.Option("--without-egressd", hidden=True)] = False,
) -> None:
    """Make every probe: 0 all held, 1 any open, 2 bad input, 3 could not be proved."""
    from egressd.cli.options import seconds
    from egressd.cli.verify_ground import Options
    from egressd.control.config import ConfigError

    # Whoever ends us, everything is taken down in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = Options(
            profile=profile,
            env=tuple(env or ()),
            binds=tuple(os.path.abspath(each) if not each.startswith("/") else each for each in bind or ()),
            sockets=tuple(os.path.abspath(each) for each in socket or ()),
            uid=uid,
            targets=tuple(str(ipaddress.ip_address(each)) for each in target or ()),
            without=without,
            ready_timeout=seconds(ready_timeout),
            wiring=wiring,
        )
        _check(options)
        config = _config(ca_dir)
    except (ValueError, ConfigError) as error:
        raise typer.Exit(_complain(error, BAD_INPUT)) from None
    raise typer.Exit(_carry_out(config, options, as_json=as_json, junit=junit))


def _check(options: Options) -> None:
    """Raise ValueError for what does not go together."""
    from egressd.cli.verify_wirings import WIRINGS

    if options.wiring not in WIRINGS:
        raise ValueError(f"there is no wiring {options.wiring!r}\nhint: one of {', '.join(WIRINGS)}")
    of_run = (
        options.env,
        options.binds,
        options.sockets,
        options.uid is not None,
        options.targets,
        options.without,
    )
    if options.wiring != "namespace" and any(of_run):
        raise ValueError("--env, --bind, --socket, --uid and --target are for the wiring namespace alone")


def _config(ca_dir: Path | None) -> Config:
    from egressd.cli.options import given_config

    return given_config(ca_dir=ca_dir)


def _carry_out(config: Config, options: Options, *, as_json: bool, junit: Path | None) -> int:
    from egressd.cli.verify_inside import BrokeOff
    from egressd.cli.verify_run import Unreadable, Verification
    from egressd.cli.verify_table import VerifyTable, write_junit
    from egressd.lab import LabError

    table = VerifyTable(silent=as_json)
    try:
        if junit is not None:
            junit.touch()  # what cannot be written is better known before than after
        verification = Verification(config, options, table)
        with table:
            document = verification.run()
        if junit is not None:
            write_junit(document, junit)
    except Unreadable as error:
        return _complain(error, BAD_INPUT)
    except (BrokeOff, LabError, OSError) as error:
        return _complain(error, COULD_NOT_RUN)
    except KeyboardInterrupt:
        print("egressd verify: interrupted; everything has been taken down", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        print(json.dumps(document, ensure_ascii=True))
    else:
        table.close_with(document)
    return int(document["status"])


def _complain(error: Exception, status: int) -> int:
    print(f"egressd verify: {error}", file=sys.stderr)
    if os.geteuid() != 0 and "CLONE_NEWUSER" in str(error):
        print("hint: let users make user namespaces, or run it as root", file=sys.stderr)
    return status
