"""`egressd fmt`: rule files in one layout; comments stay, and what a file says never changes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from egressd.cli.given import rules_folder

OK, NO, BAD_INPUT = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("fmt", help="Lay rule files out evenly; comments stay.")(fmt)


def fmt(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Files or folders; otherwise the rules folder."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; 1 if something would be.")] = False,
) -> None:
    """Rewrite what is not laid out: 0 done or nothing to do, 1 (with --check) something to do, 2 a file was left as it is."""
    from egressd.rulefiles.tidying import Refused, tidy

    try:
        files = list(_files(paths or [rules_folder()]))
    except ValueError as error:
        print(f"egressd fmt: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    status = OK
    for path in files:
        try:
            content = path.read_bytes()
            made = tidy(content, str(path), _schema(path))
            if isinstance(made, bytes) and made != content:
                print(path)
                if check:
                    status = max(status, NO)
                else:
                    _write(path, made)
        except OSError as error:
            made = Refused(error.strerror or type(error).__name__)
        if not isinstance(made, bytes):
            print(
                made if not isinstance(made, Refused) else f"{path}: left as it is: {made.why}",
                file=sys.stderr,
            )
            status = BAD_INPUT
    raise typer.Exit(status)


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted([*path.glob("*.yaml"), *path.glob("*/*.yaml"), *path.glob("lists/*.txt")])
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path}: there is no such file or folder")


def _schema(path: Path) -> str | None:
    """Return the way from a file to the schema of its folder; None where there is none."""
    name = "credentials.schema.json" if path.name.startswith("credentials") else "schema.json"
    near = (name, f"../{name}")
    return next((way for way in near if (path.parent / way).is_file()), None)


def _write(path: Path, content: bytes) -> None:
    """Exchange the file whole, with its permissions, so that no reader sees half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.fchmod(new.fileno(), path.stat().st_mode & 0o7777)
            os.replace(new.name, path)
        except BaseException:
            os.unlink(new.name)
            raise
