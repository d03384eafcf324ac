"""`egressd run`: a command in a sandbox whose only way out is egressd."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from egressd.cli.given import GIVEN

_OWN_FAILURE = 125
"""The exit status for every failure of egressd itself, so that the command's own statuses keep their meaning (as docker run)."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "run",
        context_settings={"allow_interspersed_args": False},
        help="Run a command in a sandbox whose only way out is egressd.",
    )(run)


def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command and its arguments, after --.", metavar="-- CMD")
    ] = None,
    *,
    profile: Annotated[
        str, typer.Option(envvar="EGRESSD_PROFILE", help="The profile it lives under; there is no default.")
    ],
    label: Annotated[
        list[str] | None, typer.Option(help="A label for its records, k=v; may come again.")
    ] = None,
    traceparent: Annotated[str | None, typer.Option(help="W3C trace context of the agent.")] = None,
    journal: Annotated[str | None, typer.Option(help="Where records go: a file, or - for stdout.")] = None,
    ca_dir: Annotated[Path | None, typer.Option(help="Where the certificate authority lives.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="N passes the caller's variable, N=V sets it; may come again.")
    ] = None,
    bind: Annotated[
        list[str] | None, typer.Option(help="PATH[:ro]: a path to see besides the workspace; may come again.")
    ] = None,
    socket: Annotated[
        list[str] | None, typer.Option(help="A host Unix socket to let in, with all that it can do.")
    ] = None,
    credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The credentials that the rules name.")
    ] = None,
    dns_upstream: Annotated[
        str | None,
        typer.Option(help="system, or udp://, tcp://, tls:// or https:// with ADDRESS[:PORT][#NAME]."),
    ] = None,
    ready_timeout: Annotated[str, typer.Option(help="How long readiness may take, such as 10s.")] = "10s",
    uid: Annotated[int | None, typer.Option(help="As root: the host uid of the sandbox.")] = None,
    pid: Annotated[
        int | None,
        typer.Option(help="No command: a process of a container that runs already, made without a network."),
    ] = None,
    netns: Annotated[
        str | None, typer.Option(metavar="PATH", help="The same, by the path of its network namespace.")
    ] = None,
    daemon: Annotated[
        bool | None,
        typer.Option(
            "--daemon/--standalone",
            help="Only with a daemon, or without one even where one runs.",
            show_default="the daemon, where one runs",
        ),
    ] = None,
) -> None:
    """Run the command and exit with its status."""
    from egressd.control.process import WorkerProcess

    first = (
        GIVEN.first or WorkerProcess()
    )  # before the rest of control is loaded: it has as much to load as we
    GIVEN.first = None
    from egressd.cli.options import label_of, seconds
    from egressd.control.config import load_config
    from egressd.control.surroundings import Request

    flags: dict[str, str | Path | None] = {
        "rules": GIVEN.rules,
        "journal": journal,
        "ca_dir": ca_dir,
        "credentials": credentials,
        "dns.upstream": dns_upstream,
    }
    try:
        config = load_config(flags, os.environ, file=GIVEN.config)
        request = Request(
            command=tuple(command or ()),
            profile=profile,
            labels=dict(label_of(text) for text in label or ()),
            traceparent=traceparent,
            env=tuple(env or ()),
            binds=tuple(bind or ()),
            sockets=tuple(socket or ()),
            ready_timeout=seconds(ready_timeout, "--ready-timeout"),
            uid=uid,
            pid=pid,
            netns=netns,
        )
        _demand(request)
        if request.attaches:  # whoever ends us early: what was put into the container is taken out again
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.default_int_handler)
        connection = _connection(config.attach_socket) if daemon is not False else None
        if daemon and connection is None:
            raise ValueError(f"no daemon listens at {config.attach_socket}\nhint: `egressd serve` is one")
        if connection is not None:
            from egressd.control.attachment import Attachment

            first.discard()
            status = asyncio.run(Attachment(request, config, os.environ, connection).run())
        else:
            from egressd.control.session import Session

            status = asyncio.run(Session(request, config, os.environ, first).run())
    except Exception as error:  # noqa: BLE001 -- the top of the call: whatever failed is egressd's own failure
        status = _complain(error)
    finally:
        first.discard()
    raise typer.Exit(status)


def _demand(request: Any) -> None:
    """Raise ValueError where it is neither a command nor a container, or both."""
    if not request.attaches:
        if not request.command:
            raise ValueError("a command is needed, behind --")
        return
    made_by_others = {
        "a command": request.command, "--env": request.env, "--bind": request.binds, "--socket": request.sockets,
        "--uid": request.uid is not None,
    }  # fmt: skip
    given = [what for what, value in made_by_others.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)}: the container runs already, as its maker wanted it")


def _connection(path: Path) -> Any:
    """Return a connection to the daemon, None where there is none; raises ValueError where there is one that lets nobody in."""
    from socket import SOCK_SEQPACKET

    from egressd.control.peers import connect

    try:
        return connect(path, SOCK_SEQPACKET)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}\nhint: `--standalone` runs it without the daemon"
        ) from None


def _complain(error: Exception) -> int:
    while isinstance(
        error, ExceptionGroup
    ):  # what is made side by side fails as a group; the first failure is the cause
        error = error.exceptions[0]
    if GIVEN.verbose:
        traceback.print_exception(error)
    print(f"egressd: {str(error) or type(error).__name__}", file=sys.stderr)
    hint = getattr(error, "hint", None)
    if hint and hint not in str(error):
        print(f"hint: {hint}", file=sys.stderr)
    return _OWN_FAILURE
