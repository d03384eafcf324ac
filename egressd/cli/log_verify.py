"""`egressd log verify`: is the journal as it was written, and if not, where; `egressd log key`: the key to ask that with."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import typer

from egressd.cli.rows import printable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from egressd.journal.chain import Link
    from egressd.journal.verification import Outcome

_STDIN = "-"
_LINE_LIMIT = 1 << 20
_FIRST = 64 * 1024


class _Unusable(Exception):
    """There is nothing to verify, or nothing to verify it by; says why."""


class _Opened(NamedTuple):
    name: str
    file: BinaryIO


def register(app: typer.Typer) -> None:
    """Add the verbs below `log`."""
    app.command("verify", help="Say where a line was changed, removed, moved or put in, or the end cut off.")(
        verify
    )
    app.command("key", help="Print the public key that heads are signed with.")(show_key)


def verify(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="All files of one journal; - is standard input. Default: the configured one and its rotated files.",
        ),
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--key", metavar="PEM", help="Public key of heads; default: the one in state_dir."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as one JSON object.")] = False,
) -> None:
    """Walk every line; exits 0 if all are as they were written, 1 if not."""
    from egressd.journal.heads import KeyUnusable

    try:
        with ExitStack() as stack:
            outcome = _walked(stack, files or [], keys)
    except (_Unusable, KeyUnusable) as error:
        print(f"egressd: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:
        print(f"egressd: {error.filename or 'journal'}: {error.strerror or error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(_told(outcome)))
    else:
        _print(outcome)
    if not outcome.is_sound:
        raise typer.Exit(1)


def show_key() -> None:
    """Print the public key as PEM; exits 2 where there is none yet."""
    from egressd.journal.heads import public_key_path

    path = public_key_path(_state())
    try:
        print(path.read_text(encoding="ascii"), end="")
    except (OSError, UnicodeDecodeError) as error:
        print(f"egressd: {path}: {getattr(error, 'strerror', None) or 'is no PEM'}", file=sys.stderr)
        print("hint: `egressd run` and `egressd serve` make it", file=sys.stderr)
        raise typer.Exit(2) from None


def _walked(stack: ExitStack, files: list[str], keys: list[Path] | None) -> Outcome:
    from egressd.journal.chain import BEGINNING
    from egressd.journal.verification import Verification

    stream = files == [_STDIN]
    if stream:
        opened, tip = [_Opened(_STDIN, sys.stdin.buffer)], BEGINNING
    else:
        path = Path(files[-1]) if files else _configured()
        tip = _tip(path)  # first: what is written from now on stands behind it
        opened = _open_all(stack, [Path(name) for name in files] or [path])
    walk = Verification(_keys(keys), restarts=stream)
    for name, file in opened:
        for number, line in enumerate(_lines(file), 1):
            walk.feed(line, f"{name}:{number}")
    return walk.end(tip)


def _open_all(stack: ExitStack, paths: list[Path]) -> list[_Opened]:
    """Return the files in the order of their lines; one alone comes with those that were rotated out of it."""
    from egressd.journal.rotation import rotated_files

    current = [_open(stack, path) for path in paths]
    if len(paths) == 1:
        seen = os.fstat(current[0].file.fileno()).st_ino
        for path in rotated_files(paths[0]):
            each = _open(stack, path)
            if os.fstat(each.file.fileno()).st_ino != seen:  # it was rotated just now
                current.append(each)
    return sorted(current, key=lambda each: _first_of(each.file))


def _open(stack: ExitStack, path: Path) -> _Opened:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _Unusable(f"{path}: there is no such file") from None
    file = stack.enter_context(os.fdopen(descriptor, "rb", 1 << 20))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise _Unusable(f"{path}: is no regular file\nhint: a stream is verified by `egressd log verify -`")
    return _Opened(str(path), file)


def _first_of(file: BinaryIO) -> tuple[bool, int]:
    """Return the number of the first record, for an order; a file without one comes last."""
    from egressd.journal.chain import seq_of

    head = os.pread(file.fileno(), _FIRST, 0)
    number = next(filter(None, map(seq_of, head.split(b"\n"))), 0)
    return not number, number


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(_LINE_LIMIT):
        yield line.removesuffix(b"\n")


def _keys(paths: list[Path] | None) -> dict[str, Ed25519PublicKey]:
    from egressd.journal.heads import key_id, public_key_path, read_public_key

    if not paths:
        own = public_key_path(_state())
        paths = [own] if own.is_file() else []
    return {key_id(key): key for key in map(read_public_key, paths)}


def _tip(path: Path) -> Link:
    from egressd.journal.chain import BEGINNING
    from egressd.journal.tip import parse, tip_path

    try:
        return parse(tip_path(_state(), path).read_bytes())
    except OSError:  # another machine's journal, or none of ours
        return BEGINNING


def _state() -> Path:
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        return given_config().state_dir
    except ConfigError as error:
        raise _Unusable(str(error)) from None


def _configured() -> Path:
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        journal = given_config().journal
    except ConfigError as error:
        raise _Unusable(str(error)) from None
    if isinstance(journal, Path):
        return journal
    raise _Unusable("the configured journal is standard output\nhint: pipe it to `egressd log verify -`")


def _print(outcome: Outcome) -> None:
    for found in outcome.findings:
        print(f"{printable(found.place)}: {found.kind}: {found.words}")
    if outcome.more:
        print(f"and {outcome.more} more")
    for note in outcome.notes:
        print(f"note: {printable(note)}")
    signed = (
        f"signed to line {outcome.signed_to}, {printable(outcome.signed_at)}"
        if outcome.signed_to
        else "not signed"
    )
    span = f", {outcome.first.seq} to {outcome.last.seq}" if outcome.last.seq else ""
    told = "as they were written" if outcome.is_sound else f"{len(outcome.findings) + outcome.more} findings"
    print(f"{outcome.lines} lines{span}, {signed}: {told}")


def _told(outcome: Outcome) -> dict[str, object]:
    return {
        "sound": outcome.is_sound,
        "lines": outcome.lines,
        "first": outcome.first.seq,
        "last": outcome.last.seq,
        "last_sha256": outcome.last.digest,
        "signed_to": outcome.signed_to,
        "signed_at": outcome.signed_at,
        "findings": [found._asdict() for found in outcome.findings],
        "more": outcome.more,
        "notes": outcome.notes,
    }
