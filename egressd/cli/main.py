"""`egressd VERB`: finds the verb, loads its file and nothing else, and turns what went wrong into an exit status.

A verb is a module of this folder with `register(app)`. Exit statuses: 0 yes, 1 no, 2 bad input, 3 could not run; `run` gives
its command's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from egressd.cli.given import GIVEN

COULD_NOT_RUN = 3


def _run(app: typer.Typer) -> None:
    from egressd.cli import run

    run.register(app)


def _check(app: typer.Typer) -> None:
    from egressd.cli import check

    check.register(app)


def _explain(app: typer.Typer) -> None:
    from egressd.cli import explain

    explain.register(app)


def _effective(app: typer.Typer) -> None:
    from egressd.cli import effective

    effective.register(app)


def _test(app: typer.Typer) -> None:
    from egressd.cli import test

    test.register(app)


def _fmt(app: typer.Typer) -> None:
    from egressd.cli import fmt

    fmt.register(app)


def _doctor(app: typer.Typer) -> None:
    from egressd.cli import doctor

    doctor.register(app)


def _diff(app: typer.Typer) -> None:
    from egressd.cli import diff

    diff.register(app)


def _replay(app: typer.Typer) -> None:
    from egressd.cli import replay

    replay.register(app)


def _suggest(app: typer.Typer) -> None:
    from egressd.cli import suggest

    suggest.register(app)


def _import(app: typer.Typer) -> None:
    from egressd.cli import imported

    imported.register(app)


def _log(app: typer.Typer) -> None:
    from egressd.cli import log

    log.register(app)


def _review(app: typer.Typer) -> None:
    from egressd.cli import review

    review.register(app)


def _rollback(app: typer.Typer) -> None:
    from egressd.cli import rollback

    rollback.register(app)


def _report(app: typer.Typer) -> None:
    from egressd.cli import report

    report.register(app)


def _top(app: typer.Typer) -> None:
    from egressd.cli import top

    top.register(app)


def _ca(app: typer.Typer) -> None:
    from egressd.cli import ca

    ca.register(app)


def _credentials(app: typer.Typer) -> None:
    from egressd.cli import credentials

    credentials.register(app)


def _demo(app: typer.Typer) -> None:
    from egressd.cli import demo

    demo.register(app)


def _verify(app: typer.Typer) -> None:
    from egressd.cli import verify

    verify.register(app)


def _wire(app: typer.Typer) -> None:
    from egressd.cli import wire

    wire.register(app)


def _serve(app: typer.Typer) -> None:
    from egressd.cli import serve

    serve.register(app)


def _sandbox(app: typer.Typer) -> None:
    from egressd.cli import sandbox

    sandbox.register(app)


def _approvals(app: typer.Typer) -> None:
    from egressd.cli import approvals

    approvals.register(app)


def _kill(app: typer.Typer) -> None:
    from egressd.cli import kill

    kill.register(app)


def _config(app: typer.Typer) -> None:
    from egressd.cli import configuration

    configuration.register(app)


def _services(app: typer.Typer) -> None:
    from egressd.cli import services

    services.register(app)


VERBS: dict[str, Callable[[typer.Typer], None]] = {
    "run": _run,
    "serve": _serve,
    "sandbox": _sandbox,
    "approvals": _approvals,
    "kill": _kill,
    "check": _check,
    "fmt": _fmt,
    "test": _test,
    "explain": _explain,
    "effective": _effective,
    "diff": _diff,
    "replay": _replay,
    "suggest": _suggest,
    "import": _import,
    "services": _services,
    "doctor": _doctor,
    "log": _log,
    "report": _report,
    "review": _review,
    "rollback": _rollback,
    "top": _top,
    "config": _config,
    "ca": _ca,
    "credentials": _credentials,
    "demo": _demo,
    "verify": _verify,
    "wire": _wire,
}
"""Every verb, in the order in which the help names them."""


class Verbs(TyperGroup):
    """Loads a verb when it is asked for. Every verb also takes the flags that stand before it."""

    def list_commands(self, _ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer hands in its own Context
        """Return the verbs."""
        return list(VERBS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]  # the same
        """Return the verb's command, or None when there is none of this name."""
        if cmd_name not in VERBS:
            return None
        verb = typer.Typer(rich_markup_mode=None)
        VERBS[cmd_name](verb)
        command = typer.main.get_group(verb).get_command(ctx, cmd_name)
        if command is not None:
            _add_common(command)
        return command


def _keep(name: str) -> Callable[[Path | bool | None], None]:
    """Return what notes a flag; one that was not given leaves what stood before the verb."""

    def keep(value: Path | bool | None) -> None:
        if value:
            setattr(GIVEN, name, value)

    return keep


def _flags(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Configuration file.", callback=_keep("config"), expose_value=False
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Folder of the rules.", callback=_keep("rules"), expose_value=False
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", help="Say more on stderr.", callback=_keep("verbose"), expose_value=False)
    ] = False,
) -> None:
    """The flags that every verb takes; each notes itself."""


def _add_common(command: Any) -> None:  # the command's type is private to typer
    """Let the common flags stand behind the verb too, where people put them."""
    template = typer.Typer(rich_markup_mode=None)
    template.command()(_flags)
    taken = {spelling for param in command.params for spelling in param.opts}
    for param in typer.main.get_command(template).params:
        if param.name in ("config", "rules", "verbose") and taken.isdisjoint(param.opts):
            command.params.append(param)
    for child in getattr(command, "commands", {}).values():
        _add_common(child)


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(help="The only route out of a sandbox.")(_flags)


def main() -> None:
    """Run the command line and exit with its status; what nobody foresaw is status 3 with one line on stderr."""
    status: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        status = end.code
    except BrokenPipeError:
        _unread(sys.stdout)
        status = COULD_NOT_RUN
    except Exception as error:  # the top of the call: one line for people, the trace with -v
        if GIVEN.verbose:
            raise
        print(f"egressd: {type(error).__name__}: {error}", file=sys.stderr)
        status = COULD_NOT_RUN
    if GIVEN.first is not None:
        GIVEN.first.discard()  # there was nothing to run
    if not isinstance(status, int) and status is not None:
        sys.exit(status)  # words, which the interpreter prints
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            _unread(stream)
            status = status or COULD_NOT_RUN
    os._exit(
        status or 0
    )  # to take a thousand modules apart first would take longer than much of what was done


def _unread(stream: TextIO) -> None:
    """Whoever read our output has gone; nothing more can be said there, not even by the interpreter's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
