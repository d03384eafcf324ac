"""`egressd credentials`: what credentials.yaml refers to, tried; never a value."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.given import credentials_file

if TYPE_CHECKING:  # these take longer to load than `--help` should
    from egressd.credentials.trial import Tried
    from egressd.policy.credential import CredentialsFile

FAILED, BAD_INPUT = 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb with its own verb."""
    credentials = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    credentials.command("check", help="Ask each source for a credential, and say until when it would last.")(
        check
    )
    credentials.callback()(lambda: None)
    app.add_typer(credentials, name="credentials", help="The credentials that rules attach.")


def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; otherwise all of the file.")
    ] = None,
    credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file; otherwise the configuration's.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="A label of the sandbox to ask for, k=v; may come again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a credential on stdout.")] = False,
) -> None:
    """Try the sources side by side and print a line for each: 0 all gave one, 1 one did not, 2 bad input."""
    from egressd.cli.options import label_of
    from egressd.control.secrecy import close_process

    close_process()
    file, ca_bundle = _read(credentials)
    wanted = dict.fromkeys(names or file.credentials)
    unknown = [name for name in wanted if name not in file.credentials]
    if unknown:
        known = ", ".join(file.credentials)
        raise _bad(f"there is no credential {', '.join(unknown)}\nhint: credentials here: {known}")
    try:
        labels = dict(label_of(text) for text in label or ())
    except ValueError as error:
        raise _bad(str(error)) from None
    tried = asyncio.run(_try(file, list(wanted), labels, ca_bundle))
    for one in tried:
        print(json.dumps(_as_json(one), ensure_ascii=True) if as_json else _line(one, tried))
        if one.left is not None:
            print(
                f"egressd: {one.name}: what it gave could not be given back: {one.left}",
                file=sys.stderr,
            )
    if any(one.trouble is not None for one in tried):
        raise typer.Exit(FAILED)


async def _try(
    file: CredentialsFile, names: list[str], labels: dict[str, str], ca_bundle: str | None
) -> list[Tried]:
    from egressd.credentials.trial import try_source

    return await asyncio.gather(
        *(try_source(name, file.credentials[name], labels, ca_bundle) for name in names)
    )


def _read(given: Path | None) -> tuple[CredentialsFile, str | None]:
    """Return the file, and the authorities that its servers are verified by."""
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError
    from egressd.rulefiles.credentials import load_credentials
    from egressd.rulefiles.problems import Problems

    try:
        config = given_config()
        path = credentials_file(given)
    except (ConfigError, ValueError) as error:
        raise _bad(str(error)) from None
    if path is None:
        raise _bad(f"there is no {config.credentials}\nhint: name one with --credentials")
    loaded = load_credentials(path)
    if isinstance(loaded, Problems):
        raise _bad(str(loaded))
    return loaded, config.upstream.ca_bundle


def _line(one: Tried, among: list[Tried]) -> str:
    widths = max(len(each.name) for each in among), max(len(each.kind) for each in among)
    told = f"failed: {one.trouble}" if one.trouble is not None else f"ok, {_lasts(one.expires)}"
    return f"{one.name:<{widths[0]}}  {one.kind:<{widths[1]}}  {told}"


def _lasts(expires: float | None) -> str:
    if expires is None:
        return "until its source changes"
    left = max(0, round(expires - time.time()))
    unit = f"{left // 60} min" if left >= 120 else f"{left} s"
    return f"until {_moment(expires)} ({unit})"


def _moment(expires: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires))


def _as_json(one: Tried) -> dict[str, object]:
    return {
        "credential": one.name,
        "source": one.kind,
        "ok": one.trouble is None,
        "expires": _moment(one.expires) if one.expires is not None else None,
        "trouble": one.trouble,
    }


def _bad(text: str) -> typer.Exit:
    print(text, file=sys.stderr)
    return typer.Exit(BAD_INPUT)
