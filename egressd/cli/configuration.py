"""`egressd config print`: every key of the configuration in force, its value, and where that comes from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from egressd.control.config import ConfigError, read_config

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


def values(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield each key by its dotted name, with what holds: given or by default, None where there is none."""
    from egressd.control.config import keys

    settings = config.settings()
    for key in keys().values():
        section, _, name = key.partition(".")
        value: Any
        if key == "ca_dir":
            value = config.ca.ca
        elif section == "limits":
            value = getattr(settings, name)
        else:
            value = config
            for step in key.split("."):
                value = getattr(value, step)
        yield key, str(value) if isinstance(value, Path) else value


def _origin(key: str, config: Config, origins: Origins) -> str:
    if key in origins:
        return origins[key]
    return _DEFAULT if config.file is not None else f"{_DEFAULT} (there is no file)"
