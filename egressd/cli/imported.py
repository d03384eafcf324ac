"""`egressd import --from FORM FILE`: somebody else's allowlist as a profile of ours, and what of it cannot be one."""

from __future__ import annotations

import datetime as dt
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from egressd.rulefiles.foreign.allowlist import Section

OK, NO, BAD_INPUT = 0, 1, 2
_MOST_BYTES = 16 * 1024 * 1024

type Form = Literal["srt", "codex", "smokescreen", "squid"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("import", help="Write another program's allowlist as a profile.")(imported)


def imported(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The other program's settings.")],
    form: Annotated[Form, typer.Option("--from", help="Which program's.")],
    profile: Annotated[
        str | None,
        typer.Option(
            help="Of several lists in FILE the one with this name; otherwise what the profile is called."
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write every list to DIR/profiles/NAME.yaml, none that is there already."
        ),
    ] = None,
) -> None:
    """Print the profile: 0 all is carried over, 1 something is not (each line on stderr), 2 bad input."""
    from egressd.rulefiles.foreign.rendering import render

    sections = _read(file, form)
    names = [section.name for section in sections]
    if len(set(names)) < len(names):
        raise _bad(f"{file}: two lists would have one name: {', '.join(names)}")
    if into is None and len(sections) > 1:
        sections = [section for section in sections if section.name == profile]
        if not sections:
            raise _bad(
                f"{file}: has several lists; --profile is one of {', '.join(names)}, or --into DIR for all"
            )
    elif profile is not None:
        sections[0].name = _fit(profile)
    today = dt.datetime.fromtimestamp(time.time(), dt.UTC).date()
    texts = {section.name: render(section, form, file.name, today) for section in sections}
    if into is None:
        print(next(iter(texts.values())), end="")
    else:
        _write(into, texts)
    for section in sections:
        for note in sorted(section.notes, key=lambda note: note.line):
            more = " (LETS THROUGH MORE)" if note.wider else ""
            print(
                f"{file}:{note.line}: {section.name}: not carried over: {note.text}: {note.why}{more}",
                file=sys.stderr,
            )
    raise typer.Exit(NO if any(section.notes for section in sections) else OK)


def _read(file: Path, form: Form) -> list[Section]:
    from egressd.rulefiles.foreign import codex, smokescreen, squid, srt
    from egressd.rulefiles.foreign.allowlist import NotReadable

    text = _text(file)
    if text is None:
        raise _bad(f"{file}: cannot be read as text")

    def beside(name: str) -> str | None:
        """A file that a squid.conf names: where it says, or beside it."""
        return _text(Path(name)) if Path(name).exists() else _text(file.parent / Path(name).name)

    try:
        if form == "squid":
            return squid.read(text, beside)
        read = {"srt": srt.read, "codex": codex.read, "smokescreen": smokescreen.read}[form]
        return read(text)
    except NotReadable as error:
        raise _bad(f"{file}: {error}") from None


def _text(file: Path) -> str | None:
    try:
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        return content.decode("utf-8") if len(content) <= _MOST_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


def _fit(profile: str) -> str:
    from egressd.policy.values import slug

    if slug(profile) != profile or not profile:
        raise _bad(f"--profile {profile!r}: small letters, digits and single hyphens")
    return profile


def _write(into: Path, texts: dict[str, str]) -> None:
    folder = into / "profiles"
    there = [name for name in texts if (folder / f"{name}.yaml").exists()]
    if there:
        raise _bad(f"{folder}: is there already: {', '.join(f'{name}.yaml' for name in there)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
            print(folder / f"{name}.yaml")
    except OSError as error:
        raise _bad(f"{folder}: {error.strerror}") from None


def _bad(message: str) -> typer.Exit:
    print(f"egressd import: {message}", file=sys.stderr)
    return typer.Exit(BAD_INPUT)
