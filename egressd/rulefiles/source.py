"""The bytes of a rules folder, read once: what is judged is what was hashed, and nothing is looked at twice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from egressd.rulefiles.problems import Code, Findings, Place, quoted
from egressd.rulefiles.yaml import read_bytes

ORGANISATION = "organisation.yaml"
PROFILES = "profiles"
GROUPS = "groups"
SERVICES = "services"
LISTS = "lists"
TESTS = "tests"

MOST_FILES = 10_000
MOST_TOTAL = 64 * 1024 * 1024

_ENDINGS = {PROFILES: ".yaml", GROUPS: ".yaml", SERVICES: ".yaml", LISTS: ".txt", TESTS: ".yaml"}
_LOOKALIKES = frozenset({".yml", ".yaml", ".json", ".txt"})
"""Endings of files that somebody may believe to be read; one of them in the wrong place is an error, not silence."""


@dataclass(frozen=True, slots=True)
class RuleSource:
    """A rules folder as bytes: `files` by path below it, `root` the folder as people see it (for messages only)."""

    files: dict[str, bytes]
    root: str = ""

    @property
    def digest(self) -> str:
        """The first 16 hex digits of a SHA-256 over every path and content: equal digests, equal rules."""
        total = hashlib.sha256()
        for path in sorted(self.files):
            content = self.files[path]
            name = path.encode("utf-8", "surrogateescape")  # a file's name need not be text
            total.update(b"%d:%d:" % (len(name), len(content)))
            total.update(name)
            total.update(content)
        return total.hexdigest()[:16]

    def below(self, folder: str) -> list[str]:
        """Return the paths of the files in one of the folders, sorted."""
        return sorted(path for path in self.files if path.startswith(f"{folder}/"))


def read_source(directory: Path, findings: Findings) -> RuleSource:
    """Read organisation.yaml and the folders of rules; what cannot be read is a problem, never an absence."""
    files: dict[str, bytes] = {}
    if not directory.is_dir():
        findings.add("", Place(), Code.UNREADABLE, "there is no such folder")
        return RuleSource(files, str(directory))
    paths = [ORGANISATION] if (directory / ORGANISATION).exists() else []
    for folder, ending in _ENDINGS.items():
        paths += _listed(directory, folder, ending, findings)
    total = 0
    for path in paths[:MOST_FILES]:
        content = read_bytes(directory / path, path, findings)
        if content is None:
            continue
        total += len(content)
        if total > MOST_TOTAL:
            findings.add(path, Place(), Code.TOO_LARGE, f"the folder holds more than {MOST_TOTAL >> 20} MiB")
            break
        files[path] = content
    if len(paths) > MOST_FILES:
        findings.add("", Place(), Code.TOO_LARGE, f"the folder holds more than {MOST_FILES} files")
    return RuleSource(files, str(directory))


def _listed(directory: Path, folder: str, ending: str, findings: Findings) -> list[str]:
    """Return the rule files of one folder. A folder that is not there holds none: whoever names a file of it fails."""
    place = directory / folder
    if not place.exists():
        return []
    try:
        names = sorted(entry.name for entry in place.iterdir())
    except OSError as error:
        findings.add(folder, Place(), Code.UNREADABLE, error.strerror or type(error).__name__)
        return []
    found = []
    for name in names:
        path = f"{folder}/{name}"
        if name.startswith("."):
            continue  # editors' and Kubernetes' own files (..data)
        if name.endswith(ending):
            found.append(path)
        elif Path(name).suffix.lower() in _LOOKALIKES:
            stem = Path(name).stem
            findings.add(
                path,
                Place(),
                Code.UNEXPECTED_FILE,
                "nothing reads this file",
                f"rename it to {quoted(stem + ending)}",
            )
        elif (place / name).is_dir():
            findings.add(
                path,
                Place(),
                Code.UNEXPECTED_FILE,
                "nothing reads a folder here",
                f"move its files to {folder}/",
            )
    return found
