"""Where the rules that come with egressd are: in the installed package, or in the checkout it runs from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path


@contextlib.contextmanager
def shipped_rules() -> Iterator[Path]:
    """Lends the folder with `services/`, `lists/` and the rest; raises FileNotFoundError when this installation has none."""
    package = files("egressd")
    packaged = package / "shipped_rules"  # put there when the wheel is built; see pyproject.toml
    if packaged.is_dir():
        with as_file(packaged) as folder:
            yield folder
        return
    with as_file(package) as folder:
        checkout = folder.parent / "rules"
    if not (checkout / "services").is_dir():
        raise FileNotFoundError(
            f"the rules that come with egressd are neither in the package nor at {checkout}"
        )
    yield checkout
