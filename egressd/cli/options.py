"""What flags mean: the configuration in force for this call, labels, and durations as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from egressd.cli.given import GIVEN
from egressd.control.config import Config, load_config

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(ms|s|m|h)?\Z", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def given_config(
    *, journal: str | None = None, ca_dir: Path | None = None, dns_upstream: str | None = None
) -> Config:
    """Return the configuration with the flags of this call on top; raises ConfigError."""
    flags = {"rules": GIVEN.rules, "journal": journal, "ca_dir": ca_dir, "dns.upstream": dns_upstream}
    return load_config(flags, os.environ, file=GIVEN.config)


def label_of(text: str) -> tuple[str, str]:
    """Return key and value of a `--label`; raises ValueError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--label {text!r}: k=v is wanted")
    return name, value


def seconds(text: str, flag: str = "") -> float:
    """Return the seconds that `10s`, `500ms`, `2m`, `1h` or a bare number stand for; raises ValueError, naming the `flag`."""
    match = _DURATION.match(text)
    value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if value <= 0:
        raise ValueError(f"{flag} {text!r} is no duration such as 10s, 500ms or 2m".lstrip())
    return value
