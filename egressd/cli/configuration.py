"""`egressd config print`: every key of the configuration in force, its value, and where that comes from."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.given import GIVEN

if TYPE_CHECKING:
    from egressd.control.config import Config, Origins

_DEFAULT = "default"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    config = typer.Typer(help="What is configured, and where.", no_args_is_help=True, rich_markup_mode=None)
    config.command("print", help="Print every key of the configuration in force.")(print_config)
    app.add_typer(config, name="config")


def print_config(
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Say where each value comes from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the configuration; exits with 2 where it cannot be used, with every problem."""
    from egressd.control.config import ConfigError, read_config, values

    try:
        config, origins = read_config({"rules": GIVEN.rules}, os.environ, file=GIVEN.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        told = {
            key: {"value": value, "origin": origins.get(key, _DEFAULT)} if show_origin else value
            for key, value in values(config)
        }
        print(json.dumps(told, indent=2))
        return
    for key, value in values(config):
        origin = f"    # {_origin(key, config, origins)}" if show_origin else ""
        print(f"{key}: {json.dumps(value, ensure_ascii=False)}{origin}")


def _origin(key: str, config: Config, origins: Origins) -> str:
    if key in origins:
        return origins[key]
    return _DEFAULT if config.file is not None else f"{_DEFAULT} (there is no file)"
