"""The flags that every verb takes, and the rules and credentials that they lead to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from egressd.control.process import WorkerProcess


@dataclass(slots=True)
class Given:
    """What was given on the command line before or after the verb; None where nothing was."""

    config: Path | None = None
    rules: Path | None = None
    verbose: bool = False
    first: WorkerProcess | None = None
    """A worker that was started early; whoever takes it over leaves None."""


GIVEN = Given()
"""Filled in by the command line of this process, once, before the verb runs."""


def rules_folder() -> Path:
    """Return the folder of rules; ValueError, with every problem, when the configuration that should say it is no good."""
    if GIVEN.rules is not None:
        return GIVEN.rules
    # Only here: whoever names the folder need not wait for what the configuration imports.
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        return given_config().rules
    except ConfigError as error:
        raise ValueError(str(error)) from None


def credentials_file(given: Path | None) -> Path | None:
    """Return the credentials file to judge rules with: the one given, else the configuration's, else the default one.

    None when the default one is not there and nobody names another. ValueError as in `rules_folder`.
    """
    if given is not None:
        return given
    from egressd.control.paths import config_folder

    folder = config_folder(os.environ, os.geteuid())
    default = folder / "credentials.yaml"
    named = (
        GIVEN.config is not None or os.environ.get("EGRESSD_CONFIG") or os.environ.get("EGRESSD_CREDENTIALS")
    )
    found = default
    if named or os.path.exists(folder / "egressd.yaml"):
        from egressd.cli.options import given_config
        from egressd.control.config import ConfigError

        try:
            found = given_config().credentials
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return found if found != default or os.path.exists(default) else None
