"""`egressd wire`: put the packet rules of a wiring in place, look whether they are, or take them away."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

NO, BAD_INPUT, COULD_NOT_RUN = 1, 2, 3

Undo = Annotated[bool, typer.Option("--undo", help="Take the rules away; those of others stay.")]
Check = Annotated[bool, typer.Option("--check", help="Change nothing: 0 if the rules are in place, else 1.")]


def register(app: typer.Typer) -> None:
    """Add the verb with its own verbs."""
    wire = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    wire.command("sidecar", help="In a network namespace that egressd shares with its sandbox.")(sidecar)
    wire.command("gateway", help="On an interface or bridge of this host with sandboxes behind it.")(gateway)
    app.add_typer(wire, name="wire", help="Packet rules that lead everything to egressd.")


def sidecar(
    uid: Annotated[
        int, typer.Option(metavar="UID", help="egressd's uid here: nobody else may have it.")
    ] = 1337,
    undo: Undo = False,
    check: Check = False,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND…",
            help="Then become that uid, without capabilities, and run this with egressd's sockets (LISTEN_FDS).",
        ),
    ] = None,
) -> None:
    """Lead this network namespace's traffic to egressd, refuse the rest, and see that it is so."""
    from egressd.wiring import sidecar as wiring

    _one_of(undo, check, bool(command))
    with _complaining():
        if undo:
            wiring.undo(uid)
        elif check:
            _judge(wiring.check(uid))
        else:
            wiring.wire(uid)
            if command:
                wiring.become(uid, command)


def gateway(
    interface: Annotated[
        str, typer.Option(metavar="IF", help="The interface or bridge; every host behind it is a sandbox.")
    ],
    undo: Undo = False,
    check: Check = False,
) -> None:
    """Lead what comes in by this interface to egressd, refuse the rest, and see that it is so.

    The daemon binds the sources that are let in at all.
    """
    from egressd.wiring.gateway import Gateway

    _one_of(undo, check)
    with _complaining():
        there = Gateway(interface)
        if undo:
            there.undo()
        elif check:
            _judge(there.check())
        else:
            for note in there.wire():
                print(f"egressd: {note}", file=sys.stderr)


def _one_of(*wanted: bool) -> None:
    if sum(wanted) > 1:
        print("egressd: one of --undo, --check and a command", file=sys.stderr)
        raise typer.Exit(BAD_INPUT)


def _judge(problems: list[str]) -> None:
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(NO)


@contextlib.contextmanager
def _complaining() -> Iterator[None]:
    """Turn what went wrong into words and an exit status."""
    from egressd.wiring.errors import WiringError

    try:
        yield
    except ValueError as error:
        print(f"egressd: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except WiringError as error:
        print(f"egressd: {error}", file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN) from None
