"""The rules in force: read with the credentials they name, and what a profile is by them.

A small folder is read beside the loop, in a thread. A large one would hold the interpreter, and so everybody's records, for a
tenth of a second at a time: another process reads it, and what it says is taken over a little at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from egressd.control.archive import Archive, in_force
from egressd.control.config import Config
from egressd.control.paths import default_paths
from egressd.control.surroundings import BadInput
from egressd.gate.policies import stepwise
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectivePolicy, from_lines
from egressd.policy.model import Canary
from egressd.rulefiles.canary import lives_under
from egressd.rulefiles.credentials import read_credentials
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Code, Findings, Problems
from egressd.rulefiles.source import RuleSource
from egressd.rulefiles.yaml import read_bytes

LARGE: Final = 256 * 1024
"""Bytes of rules that another process reads: some 10,000 hosts."""
_READER: Final = "from egressd.control.reader import main; main()"
_PATIENCE: Final = 300.0
"""Seconds for the other process."""


class Rulebook(Protocol):
    """What control asks of the rules, whoever has read them."""

    @property
    def source(self) -> RuleSource:
        """The files."""

    @property
    def digest(self) -> str:
        """Equal digests, equal rules."""

    @property
    def profiles(self) -> list[str]:
        """The names of all profiles, sorted."""

    @property
    def credentials(self) -> CredentialsFile | None:
        """What the credentials file says, None where there is none."""

    @property
    def canaries(self) -> Mapping[str, Canary]:
        """Who lives under another profile than the one it was made for."""

    def effective(self, profile: str) -> EffectivePolicy:
        """Return what binds a sandbox under this profile; KeyError when there is no such profile."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Rules as the other process found them: sound, and their tests hold."""

    source: RuleSource
    digest: str
    policies: dict[str, EffectivePolicy]
    credentials: CredentialsFile | None
    canaries: Mapping[str, Canary] = field(default_factory=dict)

    @property
    def profiles(self) -> list[str]:
        """The names of all profiles, sorted."""
        return sorted(self.policies)

    def effective(self, profile: str) -> EffectivePolicy:
        """Return what binds a sandbox under this profile; KeyError when there is no such profile."""
        return self.policies[profile]


def read_rules(config: Config, environ: Mapping[str, str]) -> Rules:
    """Read rules and credentials together; a credentials file that nobody named need not be there. Raises BadInput."""
    loaded = _loaded(config, _credentials(config, environ))
    if isinstance(loaded, Rules):
        return loaded
    raise BadInput(str(loaded), passing=any(problem.code is Code.UNREADABLE for problem in loaded))


def kept_rules(config: Config, environ: Mapping[str, str], digest: str) -> Rules:
    """Read a copy that was kept, with the credentials of now. Raises BadInput, Unkept."""
    loaded = _loaded(config, _credentials(config, environ), digest)
    if isinstance(loaded, Rules):
        return loaded
    raise BadInput(f"{digest} cannot be used any more\n{loaded}")


def _loaded(config: Config, credentials: Path | None, digest: str | None = None) -> Rules | Problems:
    findings = Findings(str(config.rules))
    if digest is None:
        source = in_force(config.rules, config.state_dir, findings)
    else:
        source = Archive(config.state_dir, config.rules).read(digest)
    known = read_bytes(credentials, str(credentials), findings) if credentials is not None else None
    if findings.count:
        return findings.problems()
    return load_source(source, credentials=known, credentials_name=str(credentials or ""))


async def reread_rules(config: Config, environ: Mapping[str, str]) -> Rulebook:
    """Do the same while others are carried. Raises BadInput, and OSError where no process can be started."""
    if await asyncio.to_thread(_size, config.rules) < LARGE:
        return await asyncio.to_thread(read_rules, config, environ)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _READER, str(config.rules), str(config.state_dir)),
        str(_credentials(config, environ) or ""),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.defpath, "LANG": "C.UTF-8"},
    )
    try:
        async with asyncio.timeout(_PATIENCE):
            said, _ = await process.communicate()
    except TimeoutError:
        raise BadInput(f"reading the rules took longer than {_PATIENCE:.0f} s", passing=True) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode != 0:
        raise BadInput(f"the process that reads the rules ended with {process.returncode}", passing=True)
    return await _take(said, str(config.rules))


async def _take(said: bytes, root: str) -> Taken:
    """Take over what `reader.tell` said."""
    line, _, rest = said.partition(b"\n")
    head = json.loads(line)
    if "problem" in head:
        raise BadInput(head["problem"], passing=head["passing"])
    at, parts = 0, []
    for length in head["lengths"]:
        parts.append(rest[at : at + length])
        at += length
    credentials, names, paths = parts[0], head["profiles"], head["files"]
    policies = {}
    for name, payload in zip(names, parts[1 : 1 + len(names)], strict=True):
        policies[name] = await stepwise(from_lines(payload))
    files = dict(zip(paths, parts[1 + len(names) :], strict=True))
    known = read_credentials(credentials, "", Findings()) if head["credentials"] else None
    model = known.model if known is not None else None
    canaries = {name: Canary.model_validate(said) for name, said in head["canaries"].items()}
    return Taken(RuleSource(files, root), head["digest"], policies, model, canaries)


def keep_copy(config: Config, rules: Rulebook) -> str | None:
    """Keep a copy of rules that come into force; returns what the operator is told where that fails."""
    try:
        archive = Archive(config.state_dir, config.rules)
        archive.keep(rules.source, lambda: map(rules.effective, rules.profiles), time.time())
    except OSError as error:
        return f"no copy of these rules was kept, so nobody can go back to them: {error.strerror or error}"
    return None


def effective(rules: Rulebook, profile: str, labels: Mapping[str, str]) -> EffectivePolicy:
    """Return what binds a sandbox with these labels that was made for a profile; raises BadInput where there is none."""
    if profile not in rules.profiles:
        known = ", ".join(sorted(rules.profiles)) or "none"
        raise BadInput(f"there is no profile {profile!r}\nhint: profiles here: {known}")
    return rules.effective(lives_under(rules.canaries, profile, labels))


def _credentials(config: Config, environ: Mapping[str, str]) -> Path | None:
    wanted = config.credentials != default_paths(environ, os.geteuid()).credentials
    there = wanted or os.path.lexists(config.credentials)
    return config.credentials if there else None


def _size(folder: Path) -> int:
    """How many bytes lie below a folder; what cannot be read has none."""
    total = 0
    for place, _, names in os.walk(folder, followlinks=True):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
