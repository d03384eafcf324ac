"""A rules folder → `Rules`, or every problem in it. The order of things is law 9: parse, validate, run the rules' own tests.

Everything is judged from bytes that were read once. Nothing is resolved and nothing is dialled.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.model import (
    Canary,
    GroupFile,
    OrganisationFile,
    ProfileFile,
    ServiceFile,
    Test,
    TestsFile,
)
from egressd.rulefiles.bindings import check_spread
from egressd.rulefiles.canary import read_canaries
from egressd.rulefiles.ceiling import Top, read_ceiling
from egressd.rulefiles.claims import Claims, check_claims
from egressd.rulefiles.composition import Composed, Group, compose, read_group
from egressd.rulefiles.credentials import Known, read_credentials
from egressd.rulefiles.document import Document
from egressd.rulefiles.entries import Library
from egressd.rulefiles.hosts import read_list
from egressd.rulefiles.problems import Code, Findings, Place, Problem, Problems
from egressd.rulefiles.profiles import check_group, read_organisation, read_profile
from egressd.rulefiles.services import Service, check_service
from egressd.rulefiles.shape import did_you_mean
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
from egressd.rulefiles.yaml import parse_model, read_bytes


@dataclass(frozen=True, slots=True)
class Rules:
    """A rules folder that is sound and whose tests hold; immutable, to be swapped whole.

    `known` is the credentials file that it was judged with, None where it was judged without. `claims` are the tests of its
    files, `groups` the groups by themselves, which only tests look at.
    """

    source: RuleSource
    policies: dict[str, CompiledPolicy]
    warnings: tuple[Problem, ...] = ()
    tests: int = 0
    known: Known | None = None
    library: Library = field(default_factory=lambda: Library({}, frozenset(), {}))
    claims: tuple[Claims, ...] = ()
    groups: dict[str, CompiledPolicy] = field(default_factory=dict)
    top: Top | None = None
    canaries: dict[str, Canary] = field(default_factory=dict)

    @property
    def credentials(self) -> CredentialsFile | None:
        """What the credentials file says."""
        return self.known.model if self.known is not None else None

    @property
    def digest(self) -> str:
        """The digest of the files: equal digests, equal rules."""
        return self.source.digest

    @property
    def root(self) -> str:
        """The folder as it was given; places in entries are paths below it."""
        return self.source.root

    @property
    def profiles(self) -> list[str]:
        """The names of all profiles, sorted."""
        return sorted(self.policies)

    def effective(self, profile: str) -> EffectivePolicy:
        """Return what binds a sandbox under this profile; KeyError when there is no such profile."""
        return self.policies[profile].effective

    def compiled(self, profile: str) -> CompiledPolicy:
        """Return the same, ready to judge."""
        return self.policies[profile]


def load_rules(
    directory: Path, *, now: float | None = None, credentials: Path | None = None, tested: bool = True
) -> Rules | Problems:
    """Return the rules in `directory`, or all their problems; `now` (Unix seconds) judges expiry and untimed tests.

    `tested` as in `load_source`.
    """
    findings = Findings(str(directory))
    source = read_source(directory, findings)
    known: bytes | None = None
    if credentials is not None:
        known = read_bytes(credentials, str(credentials), findings)
    if findings.count:
        return findings.problems()
    name = str(credentials or "")
    return load_source(source, now=now, credentials=known, credentials_name=name, tested=tested)


def load_source(
    source: RuleSource,
    *,
    now: float | None = None,
    credentials: bytes | None = None,
    credentials_name: str = "credentials.yaml",
    tested: bool = True,
) -> Rules | Problems:
    """Return the rules in bytes that were read before, or all their problems. Total; reads nothing.

    Without `tested` their tests are left to the caller: such rules are for looking at, never for being in force.
    """
    moment = time.time() if now is None else now
    folder = _Folder(source, Findings(source.root), dt.datetime.fromtimestamp(moment, dt.UTC).date())
    if credentials is not None:
        folder.read_known(credentials, credentials_name)
    folder.read()
    folder.settle()
    if folder.findings.count:
        return folder.findings.problems()
    policies = {profile: compile_policy(effective) for profile, effective in folder.profiles.items()}
    groups = {name: compile_policy(effective) for name, effective in folder.alone.items()}
    for claims in folder.claims if tested else ():
        check_claims(claims, groups if claims.group else policies, moment, folder.findings)
    failed = folder.findings.problems()
    if len(failed):
        return failed
    warnings = tuple(sorted(folder.findings.warnings))
    tests = sum(len(claims.tests) for claims in folder.claims)
    return Rules(
        source,
        policies,
        warnings,
        tests,
        folder.known,
        folder.shared,
        tuple(folder.claims),
        groups,
        folder.top,
        folder.canaries,
    )


def load_services(directory: Path) -> Library | Problems:
    """Return the services and lists of a rules folder, or their problems; what else lies in the folder is not judged."""
    findings = Findings(str(directory))
    library = _Folder(read_source(directory, findings), findings, dt.date.min).library()
    return findings.problems() if findings.count else library


@dataclass(slots=True)
class _Folder:
    """A folder being read; each step adds its problems and goes on."""

    source: RuleSource
    findings: Findings
    today: dt.date
    known: Known | None = None
    beside: Findings = field(default_factory=Findings)
    above: list[EffectiveEntry] = field(default_factory=list)
    top: Top | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    alone: dict[str, EffectivePolicy] = field(default_factory=dict)
    composed: dict[str, Composed | None] = field(default_factory=dict)
    profiles: dict[str, EffectivePolicy] = field(default_factory=dict)
    claims: list[Claims] = field(default_factory=list)
    canaries: dict[str, Canary] = field(default_factory=dict)
    shared: Library = field(default_factory=lambda: Library({}, frozenset(), {}))

    def read_known(self, content: bytes, name: str) -> None:
        """Read the credentials file, which lies outside the folder and is shown by its own name."""
        self.known = read_credentials(content, name, self.beside)

    def read(self) -> None:
        """Read lists, services, the organisation file, groups and profiles, in the order of what they refer to."""
        library = self.shared = self.library()
        if ORGANISATION not in self.source.files:
            hint = "a folder without one would lose its denials unnoticed; `schema: 1` alone denies nothing"
            message = "the organisation file is missing"
            self.findings.add(ORGANISATION, Place(), Code.MISSING_FILE, message, hint)
        else:
            self._organisation(library)
        self._groups(library)
        paths = self.source.below(PROFILES)
        if not paths:
            hint = "a profile is a file in profiles/, like profiles/locked-down.yaml"
            self.findings.add(PROFILES, Place(), Code.MISSING_FILE, "there is no profile", hint)
        read = {path: self._model(path, ProfileFile, "profile") for path in paths}
        files = {loaded[0].profile: loaded for loaded in read.values() if loaded is not None}
        for name, (model, document) in files.items():
            composed = self._composed(name, files, library)
            if composed is None:
                continue
            self.profiles[name] = read_profile(composed, self.above, self.top, self._definitions, self.today)
            self._keep_tests(model.tests, document, name)
        self.canaries = read_canaries(files, self.findings)
        for path in self.source.below(TESTS):
            loaded = parse_model(self.source.files[path], path, TestsFile, self.findings)
            if loaded is not None:
                self._keep_tests(loaded[0].tests, loaded[1], loaded[0].under)

    def _composed(
        self, name: str, files: Mapping[str, tuple[ProfileFile, Document]], library: Library
    ) -> Composed | None:
        """Return a profile put together, what it extends first; None after a problem with what it extends."""
        chain: list[str] = []  # from the profile up to the first one that is done, or extends nothing
        at: str | None = name
        while at is not None and at not in self.composed:
            chain.append(at)
            model, document = files[at]
            above = model.extends
            place = document.place("extends")
            if above in chain:
                message = f"{' extends '.join([*chain[chain.index(above) :], above])}"
                self.findings.add(
                    document.path, place, Code.EXTENDS_CYCLE, message, "one of them stands alone"
                )
                self.composed |= dict.fromkeys(chain)
                return None
            if above is not None and above not in files:
                if f"{PROFILES}/{above}.yaml" not in self.source.files:
                    message = f"there is no profile {above!r}{did_you_mean(above, sorted(files))}"
                    hint = f"{PROFILES}/{above}.yaml would be it"
                    self.findings.add(document.path, place, Code.UNKNOWN_PROFILE, message, hint)
                self.composed |= dict.fromkeys(chain)
                return None
            at = above
        for one in reversed(chain):
            self.composed[one] = self._one(*files[one], library)
        return self.composed[name]

    def _one(self, model: ProfileFile, document: Document, library: Library) -> Composed | None:
        base = self.composed[model.extends] if model.extends is not None else None
        if model.extends is not None and (base is None or not base.sound):
            return None  # what extends a profile with mistakes would only repeat them
        return compose(model, document, library, self.above, self.groups, base, self.findings)

    def _groups(self, library: Library) -> None:
        for path in self.source.below(GROUPS):
            loaded = self._model(path, GroupFile, "group")
            if loaded is None:
                continue
            model, document = loaded
            group = read_group(model, document, library, self.above, self.findings)
            check_group(group, self.today)
            self.groups[model.group] = group
            entries = (*self.above, *(made for one in group.written for made in one.entries))
            self.alone[model.group] = EffectivePolicy(profile=model.group, entries=entries)
            if model.tests:
                self.claims.append(Claims(model.tests, document, model.group, group=True))

    def _names(self, folder: str) -> frozenset[str]:
        return frozenset(Path(path).stem for path in self.source.below(folder))

    def library(self) -> Library:
        """Read what entries may refer to: lists and services."""
        lists = {
            path: read_list(self.source.files[path], path, self.findings) for path in self.source.below(LISTS)
        }
        return Library(self._services(lists), self._names(SERVICES), lists, self._names(GROUPS))

    @property
    def _definitions(self) -> CredentialsFile | None:
        return self.known.model if self.known is not None else None

    def settle(self) -> None:
        """Judge the credentials file by all that the profiles use of it, and add what was found in it."""
        if self.known is not None and not self.findings.count:
            entries = [entry for effective in self.profiles.values() for entry in effective.entries]
            check_spread(self.known, entries, self.beside)
        self.findings.errors += self.beside.errors
        self.findings.warnings += self.beside.warnings
        self.findings.left_out += self.beside.left_out

    def _services(self, lists: dict[str, tuple[str, ...]]) -> dict[str, Service]:
        services: dict[str, Service] = {}
        for path in self.source.below(SERVICES):
            loaded = self._model(path, ServiceFile, "service")
            if loaded is None:
                continue
            before = self.findings.count
            service = Service(*loaded)
            check_service(service, lists, self.findings)
            if self.findings.count == before:
                services[service.model.service] = service
        return services

    def _organisation(self, library: Library) -> None:
        loaded = parse_model(self.source.files[ORGANISATION], ORGANISATION, OrganisationFile, self.findings)
        if loaded is None:
            return
        model, document = loaded
        self._keep_tests(model.tests, document, None)
        self.above = read_organisation(model, document, library, self.today, self.findings)
        self.top = read_ceiling(model, document, library, self.findings)

    def _keep_tests(self, tests: Sequence[Test], document: Document, profile: str | None) -> None:
        if tests:
            self.claims.append(Claims(tests, document, profile))

    def _model[M: BaseModel](self, path: str, model: type[M], naming: str) -> tuple[M, Document] | None:
        """Read a file that is named for what it defines, so that a reader of one knows the other."""
        loaded = parse_model(self.source.files[path], path, model, self.findings)
        if loaded is None:
            return None
        name, stem = getattr(loaded[0], naming), Path(path).stem
        if name != stem:
            place = loaded[1].place(naming)
            message = f"the file is named {stem!r} and says {naming}: {name}"
            self.findings.add(
                path, place, Code.NAME_MISMATCH, message, f"rename one: {name}.yaml or {naming}: {stem}"
            )
            return None
        return loaded
