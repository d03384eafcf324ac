"""A table that grows while something goes on: rows as they come, and on a terminal one line of progress below them."""

from __future__ import annotations

import os
from typing import Self

from rich.console import Console
from rich.text import Text


class LiveTable:
    """What every such table has: where it is printed, its first row, and the line below; `silent` prints nothing."""

    def __init__(self, header: tuple[str, ...], width: int, *, silent: bool) -> None:
        """`width` is that of the rows where there is no terminal to ask."""
        self._out = Console(highlight=False, quiet=silent)
        if not self._out.is_terminal and "COLUMNS" not in os.environ:
            self._out = Console(highlight=False, quiet=silent, width=width)
        self._status = self._out.status("")
        self._header = header
        self._headed = False

    def __enter__(self) -> Self:
        if self._out.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def say(self, doing: str) -> None:
        """Show what is going on."""
        self._status.update(Text(doing, style="dim"))

    def print_row(self, *cells: Text) -> None:
        """Print a row, before the first one the header."""
        if not self._headed:
            self._headed = True
            self._print(*(Text(word, style="bold") for word in self._header))
        self._print(*cells)

    def _print(self, *cells: Text) -> None:
        """Print cells in columns."""
        raise NotImplementedError
