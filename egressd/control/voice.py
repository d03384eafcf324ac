"""What control says to its operator: on standard error, a line at a time, never a secret."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Tell the operator; what nobody hears any more is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(f"egressd: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- stderr is talk
