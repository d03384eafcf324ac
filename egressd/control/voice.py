"""What control says to its operator: on standard error, a line at a time, never a secret."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Tell the operator."""
    print(f"egressd: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- stderr is talk
