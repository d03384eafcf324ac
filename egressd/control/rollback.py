"""Going back: kept rules put in force in the place of those of now, whatever the folder holds, until somebody changes it."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from egressd.control.archive import Archive, Passed
from egressd.control.roster import Roster
from egressd.control.rulebook import Rulebook
from egressd.policy.credential import CredentialsFile
from egressd.rulefiles.problems import Findings
from egressd.rulefiles.source import (
    GROUPS,
    LISTS,
    ORGANISATION,
    PROFILES,
    SERVICES,
    TESTS,
    RuleSource,
    read_source,
)

_NO_CREDENTIALS = CredentialsFile.model_construct(schema_version=1, credentials={})


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Rules that somebody went back to: their digest, that of those before, and what the operator is told."""

    digest: str
    before: str
    notes: list[str]


async def go_back(
    archive: Archive, roster: Roster, read: Callable[[str], Rulebook], wanted: str | None, by: str
) -> RolledBack:
    """Put the copy that `wanted` names in force, the one before the rules of now where it names none; `by` says who asks.

    Raises Unkept and BadInput and changes nothing, WorkerFailed where a worker does not take it: its successor will, and the
    folder is passed over all the same.
    """
    before = roster.rules.digest
    copy = archive.find(wanted) if wanted is not None else archive.before(before)
    rules = await asyncio.to_thread(read, copy.digest)
    folder = await asyncio.to_thread(lambda: read_source(archive.folder, Findings()).digest)
    notes: list[str] = []
    try:
        notes = await roster.adopt(rules, rules.credentials or _NO_CREDENTIALS)
    finally:
        if roster.rules is rules:
            notes += _pass_over(archive, Passed(folder, copy.digest, by))
    return RolledBack(copy.digest, before, notes)


def _pass_over(archive: Archive, passed: Passed) -> list[str]:
    try:
        archive.pass_over(passed if passed.folder != passed.digest else None)
    except OSError as error:
        return [f"a restart will read the folder again: {error.strerror or error}"]
    return []


def changed(current: RuleSource, wanted: RuleSource) -> list[tuple[str, str]]:
    """Return what differs, file by file: `added`, `changed` or `removed`, and the path below the folder."""
    paths = sorted({*current.files, *wanted.files})
    words = {path: _difference(current.files.get(path), wanted.files.get(path)) for path in paths}
    return [(word, path) for path, word in words.items() if word]


def rewrite(folder: Path, current: RuleSource, wanted: RuleSource) -> None:
    """Make the folder's files those of `wanted`, each whole or not at all; raises OSError, ValueError for what is no rule file.

    What was there is expected to be kept: nobody else should write the folder meanwhile.
    """
    found = changed(current, wanted)
    for _, path in found:
        if not _is_rule_file(path):
            raise ValueError(f"{path!r} is no file of rules")
    for word, path in found:
        if word != "removed":
            _replace(folder / path, wanted.files[path])
    for word, path in found:
        if word == "removed":
            (folder / path).unlink()
    if read_source(folder, Findings()).digest != wanted.digest:
        raise OSError(0, "somebody else has changed it meanwhile")


def _difference(old: bytes | None, new: bytes | None) -> str:
    if old == new:
        return ""
    return "added" if old is None else "removed" if new is None else "changed"


def _is_rule_file(path: str) -> bool:
    below, slash, name = path.partition("/")
    if not slash:
        return path == ORGANISATION
    return (
        below in (PROFILES, GROUPS, SERVICES, LISTS, TESTS) and "/" not in name and name[:1] not in ("", ".")
    )


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with open(descriptor, "wb") as file:
            if path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
