"""The flags that every verb takes, and where rules are looked for: flag > `EGRESSD_*` > configuration file > default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Given:
    """What was given on the command line before or after the verb; None where nothing was."""

    config: Path | None = None
    rules: Path | None = None
    verbose: bool = False


GIVEN = Given()
"""Filled in by the command line of this process, once, before the verb runs."""


def config_file() -> tuple[Path, bool]:
    """Return the configuration file, and whether somebody named it (then it must be there)."""
    named = GIVEN.config or _environment("EGRESSD_CONFIG")
    return (named, True) if named is not None else (configuration_home() / "egressd.yaml", False)


def configuration_home() -> Path:
    """Return the folder of configuration: /etc/egressd for root, $XDG_CONFIG_HOME/egressd for others."""
    if os.geteuid() == 0:
        return Path("/etc/egressd")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "egressd"


def rules_folder() -> Path:
    """Return the folder of rules; ValueError when the configuration file that should say it cannot be read."""
    named = GIVEN.rules or _environment("EGRESSD_RULES")
    if named is not None:
        return named
    file, must_exist = config_file()
    if must_exist or file.exists():
        said = _said(file)
        if said is not None:
            return said
    return configuration_home() / "rules"


def _said(file: Path) -> Path | None:
    """Return what the configuration file says of `rules`, a path relative to the file's own folder."""
    from egressd.rulefiles.problems import Findings
    from egressd.rulefiles.yaml import load_document, read_bytes

    findings = Findings()
    content = read_bytes(file, str(file), findings)
    document = load_document(content, str(file), findings) if content is not None else None
    if document is None:
        raise ValueError(str(findings.problems()))
    data = document.data
    said = data.get("rules") if isinstance(data, dict) else None
    return file.parent / said if isinstance(said, str) else None


def _environment(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
