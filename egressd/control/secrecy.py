"""What a sandbox must not meet of egressd's secrets: the files and variables they lie in, the programs that print them, and this
process itself."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from egressd.credentials.providers.exec import PATH
from egressd.policy.credential import CredentialsFile, SecretRef, Source
from egressd.wiring.kernel import forbid_inspection
from egressd.wiring.launch import shown, writable, writable_trees
from egressd.wiring.mounts import within
from egressd.wiring.spec import SandboxSpec

_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4
"""asm-generic/mman.h."""
_SWAPS: Final = Path("/proc/swaps")


def secret_files(file: CredentialsFile) -> tuple[str, ...]:
    """Return every file that a secret is read from, as it is written, sorted."""
    return tuple(sorted({ref.file for ref in _references(file) if ref.file is not None}))


def secret_variables(file: CredentialsFile) -> frozenset[str]:
    """Return every variable that a secret is read from."""
    return frozenset(ref.env for ref in _references(file) if ref.env is not None)


def _references(node: object) -> Iterator[SecretRef | Source]:
    """Yield what names a secret's place, wherever it stands in the file."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, SecretRef | Source):
            yield one
        if isinstance(one, BaseModel):
            waiting += [getattr(one, name) for name in type(one).model_fields]
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one


def exposed_programs(file: CredentialsFile, spec: SandboxSpec) -> list[str]:
    """Return a sentence for each `exec` source that the sandbox could make print, or do, what it likes."""
    found = []
    for name, credential in file.credentials.items():
        source = credential.source.exec
        if source is None:
            continue
        program = shutil.which(source.command[0], path=PATH) or source.command[0]
        for word in (program, *source.command[1:]):
            if word.startswith("/") and writable(spec, word):
                found.append(f"credential {name}: the sandbox can write {word} or a folder above it")
                break
    return found


def replaceable(files: Iterable[str], spec: SandboxSpec) -> list[str]:
    """Return those of `files` in whose place the sandbox could put others, or links, however they are masked."""
    trees = [os.path.realpath(tree) for tree in writable_trees(spec)]
    return [path for path in files if any(within(place, tree) for place in _ways(path) for tree in trees)]


def _ways(path: str) -> Iterator[str]:
    """Yield where the links lie by which a path leads to a file, and where the file does, with no link above any of them."""
    place, links = "/", 0
    waiting = path.split("/")[::-1]
    while waiting:
        part = waiting.pop()
        place = os.path.dirname(place) if part == ".." else os.path.join(place, "" if part == "." else part)
        if part and os.path.islink(place) and links < _MOST_LINKS:
            yield place
            links += 1
            target = os.path.join(os.path.dirname(place), os.readlink(place))
            place, waiting = "/", waiting + target.split("/")[::-1]
    yield place


_MOST_LINKS: Final = 40
"""MAXSYMLINKS, include/linux/namei.h."""


def leaks(env: Mapping[str, str], environ: Mapping[str, str], variables: Iterable[str]) -> list[str]:
    """Return the names in `env` whose value holds that of one of `variables` in `environ`."""
    secrets = [value for name in variables if len(value := environ.get(name, "").strip()) >= _LEAST]
    return sorted(name for name, value in env.items() if any(secret in value for secret in secrets))


_LEAST: Final = 6
"""Shorter values are no secrets, and stand in others by chance."""


def unmasked(files: Iterable[str], spec: SandboxSpec) -> list[str]:
    """Return those of `files` that a sandbox made as `spec` says can see."""
    return [path for path in files if shown(spec, path)]


def close_process() -> None:
    """Leave no core and be closed to ptrace and /proc of the same uid. Raises OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    forbid_inspection()


def keep_from_swap() -> str | None:
    """Keep this process's memory out of swap; returns why that is not so, None where it is or where there is no swap."""
    if not _has_swap():
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (ValueError, OSError):  # a limit on what is locked would fail an allocation some day
            return "memory cannot be locked (RLIMIT_MEMLOCK), so secrets may reach the swap space"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0:
        return f"memory cannot be locked ({os.strerror(ctypes.get_errno())}), so secrets may reach the swap space"
    return None


def _has_swap() -> bool:
    """Whether there is any; where that cannot be read, there may be."""
    try:
        return len(_SWAPS.read_text(encoding="ascii", errors="replace").splitlines()) > 1
    except OSError:
        return True
