"""Kept copies of the rules that were in force, and which folder is passed over since somebody went back.

Each copy is one file of the state directory, 0600, named for when it was adopted, its digest and the folder that it came from.
What is read back is what was hashed: a copy whose files do not come to its digest is no copy. Going back does not touch the
folder. It notes the digest that the folder has now, and as long as it has that one, the copy is read in its place, after a
restart too; the first change of the folder ends that.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from egressd.policy.effective import EffectivePolicy
from egressd.rulefiles.problems import Code, Findings, Place
from egressd.rulefiles.source import MOST_FILES, MOST_TOTAL, RuleSource, read_source

MOST_KEPT: Final = 20
"""Copies of one folder."""
_MOST_OF_ALL: Final = 100
_MOST_BYTES: Final = 128 * 1024 * 1024
"""Of all copies together, as they lie on the disk; the newest of a folder is kept in any case."""
_MOST_HEAD: Final = 4 * 1024 * 1024
_LEAST_DIGITS: Final = 4
_NAME: Final = re.compile(r"(\d{15})-([0-9a-f]{16})-([0-9a-f]{16})\.rules\Z", re.ASCII)
_FORMAT: Final = 1


class Unkept(Exception):
    """There is no such copy, or it cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy: its digest, when it was last adopted (Unix seconds), and the digest of each profile's policy."""

    digest: str
    adopted: float
    policies: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Passed:
    """What is passed over: while the folder's digest is `folder`, the copy `digest` is in force. `by` says who went back."""

    folder: str
    digest: str
    by: str = ""


class Archive:
    """The copies of one rules folder, in a state directory."""

    def __init__(self, state_dir: Path, folder: Path) -> None:
        """Nothing is read or made yet."""
        self.folder = folder
        self._place = state_dir / "rules"
        self._mark = hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:16]

    def keep(
        self, source: RuleSource, effective: Callable[[], Iterable[EffectivePolicy]], now: float
    ) -> None:
        """Keep a copy of rules that were adopted, as the newest, with what is in force by them; raises OSError.

        Where the folder is no longer what somebody went back from, that is over.
        """
        digest = source.digest
        passed = self.passed()
        if passed is not None:
            if read_source(self.folder, Findings()).digest == passed.folder:
                return  # a copy is in force, which is not newer than what was gone back from
            self.pass_over(None)
        names = self._names()
        if not names or _digest(names[0]) != digest:
            self._store(source, effective, now)

    def save(
        self, source: RuleSource, effective: Callable[[], Iterable[EffectivePolicy]], now: float
    ) -> None:
        """Keep a copy of rules that are about to be overwritten, unless there is one; raises OSError."""
        if source.digest not in map(_digest, self._names()):
            self._store(source, effective, now)

    def _store(
        self, source: RuleSource, effective: Callable[[], Iterable[EffectivePolicy]], now: float
    ) -> None:
        digest = source.digest
        policies = {policy.profile: policy.digest() for policy in effective()}
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._place / f".{os.getpid()}-{digest}.new"
        path = self._place / f"{int(now * 1000):015d}-{digest}-{self._mark}.rules"
        descriptor = os.open(
            fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            with open(descriptor, "wb") as file:
                _write(file, source, policies, now)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        self._prune(path.name)

    def kept(self) -> list[Kept]:
        """Return the copies, the newest first; one whose head cannot be read has no policies."""
        found = []
        for name in self._names():
            head: dict[str, Any] = {}
            with contextlib.suppress(Unkept), self._opened(name) as file:
                head = _head(file)
            policies = head.get("policies")
            said = {str(k): str(v) for k, v in policies.items()} if isinstance(policies, dict) else {}
            found.append(Kept(_digest(name), int(name[:15]) / 1000, said))
        return found

    def find(self, wanted: str) -> Kept:
        """Return the copy with this digest, or with a policy that has it; the first digits of it do. Raises Unkept."""
        copies = self.kept()
        found = [one for one in copies if _is(one, wanted)] if len(wanted) >= _LEAST_DIGITS else []
        if not found:
            raise Unkept(f"no copy that was kept has the digest {wanted[:64]}")
        if len({one.digest for one in found if one.digest.startswith(wanted)}) > 1:
            raise Unkept(f"several copies begin with {wanted}: {', '.join(one.digest for one in found)}")
        return next((one for one in found if one.digest.startswith(wanted)), found[0])

    def before(self, digest: str) -> Kept:
        """Return the copy that was in force before the rules with this digest; raises Unkept."""
        copies = self.kept()
        at = next((index for index, one in enumerate(copies) if one.digest == digest), -1)
        earlier = [one for one in copies[at + 1 :] if one.digest != digest]
        if not earlier:
            raise Unkept("no earlier rules are kept")
        return earlier[0]

    def read(self, digest: str) -> RuleSource:
        """Return the files of a copy; raises Unkept."""
        name = next((name for name in self._names() if _digest(name) == digest), None)
        if name is None:
            raise Unkept(f"there is no copy of {digest}")
        with self._opened(name) as file:
            source = RuleSource(_files(file, _head(file)), str(self.folder))
        if source.digest != digest:
            raise Unkept(f"the copy of {digest} is damaged")
        return source

    # going back

    def passed(self) -> Passed | None:
        """Return what is passed over, None where nothing is or nobody can tell."""
        try:
            descriptor = os.open(self._note, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                said = json.loads(file.read(4096))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return None
        parts = [said.get(key) for key in ("folder", "digest", "by")] if isinstance(said, dict) else []
        texts = [part for part in parts if isinstance(part, str)]
        return Passed(*texts) if len(texts) == 3 else None

    def pass_over(self, passed: Passed | None) -> None:
        """Note what is passed over from now on, or that nothing is; raises OSError."""
        if passed is None:
            self._note.unlink(missing_ok=True)
            return
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._note.with_suffix(".new")
        descriptor = os.open(
            fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"folder": passed.folder, "digest": passed.digest, "by": passed.by}, file)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(self._note)

    @property
    def _note(self) -> Path:
        return self._place / f"{self._mark}.back"

    # files

    def _names(self) -> list[str]:
        """The names of this folder's copies, the newest first."""
        return [name for name in self._every() if name.endswith(f"-{self._mark}.rules")]

    def _every(self) -> list[str]:
        try:
            return sorted(filter(_NAME.match, os.listdir(self._place)), reverse=True)
        except OSError:
            return []

    def _prune(self, newest: str) -> None:
        """Remove what is older than the most that are kept, and other copies of what was just kept."""
        total = 0
        mine: set[str] = set()
        for number, name in enumerate(self._every()):
            with contextlib.suppress(OSError):
                total += (self._place / name).stat().st_size
                ours = name.endswith(f"-{self._mark}.rules")
                again = ours and _digest(name) in mine
                if ours:
                    mine.add(_digest(name))
                over = number >= _MOST_OF_ALL or total > _MOST_BYTES or len(mine) > MOST_KEPT
                if name != newest and (again or (over and not (ours and len(mine) <= 1))):
                    (self._place / name).unlink()

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        try:
            descriptor = os.open(
                self._place / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            with open(descriptor, "rb") as raw, gzip.open(raw) as file:
                yield file  # type: ignore[misc]  # a GzipFile reads as any binary file does
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            said = getattr(error, "strerror", None) or type(error).__name__
            raise Unkept(f"a copy cannot be read: {said}") from None


def in_force(folder: Path, state_dir: Path, findings: Findings) -> RuleSource:
    """Return the rules of a folder, or the copy that somebody went back to while the folder is still what it was then."""
    source = read_source(folder, findings)
    archive = Archive(state_dir, folder)
    passed = archive.passed()
    if passed is None or findings.count or source.digest != passed.folder:
        return source
    try:
        return archive.read(passed.digest)
    except Unkept as error:
        hint = f"change a file of the folder, which has {passed.folder}, and it is read again"
        findings.add("", Place(), Code.UNREADABLE, f"the rules that were gone back to: {error}", hint)
        return source


def _is(one: Kept, wanted: str) -> bool:
    return one.digest.startswith(wanted) or any(said.startswith(wanted) for said in one.policies.values())


def _digest(name: str) -> str:
    return name[16:32]


def _write(file: BinaryIO, source: RuleSource, policies: Mapping[str, str], now: float) -> None:
    paths = list(source.files)
    head = {
        "format": _FORMAT,
        "digest": source.digest,
        "adopted": now,
        "policies": policies,
        "files": [path.encode("utf-8", "surrogateescape").hex() for path in paths],
        "lengths": [len(source.files[path]) for path in paths],
    }
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
        packed.write(json.dumps(head).encode() + b"\n")
        for path in paths:
            packed.write(source.files[path])


def _head(file: BinaryIO) -> dict[str, Any]:
    line = file.readline(_MOST_HEAD)
    head = json.loads(line)
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise ValueError("no head")
    return head


def _files(file: BinaryIO, head: Mapping[str, Any]) -> dict[str, bytes]:
    names, lengths = head.get("files"), head.get("lengths")
    if not isinstance(names, list) or not isinstance(lengths, list) or len(names) != len(lengths):
        raise ValueError("no files")
    whole = all(isinstance(name, str) for name in names) and all(
        type(length) is int and length >= 0 for length in lengths
    )
    if not whole or len(names) > MOST_FILES or sum(lengths) > MOST_TOTAL:
        raise ValueError("too much")
    paths = [bytes.fromhex(name).decode("utf-8", "surrogateescape") for name in names]
    return {path: file.read(length) for path, length in zip(paths, lengths, strict=True)}
