"""The catalogue of services as a whole: what a reviewer would object to in one, though it loads.

Findings are no problems: the files work. Two kinds can be taken knowingly, with the reason, under the service's `accept:`.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from publicsuffixlist import PublicSuffixList

from egressd.policy.model import ServiceEntry
from egressd.policy.requests import DEFAULT_REQUESTS, RequestPattern, parse_request_pattern
from egressd.rulefiles.document import Step
from egressd.rulefiles.entries import Library
from egressd.rulefiles.hosts import shared_suffix
from egressd.rulefiles.lookalikes import near_pairs
from egressd.rulefiles.problems import printable
from egressd.rulefiles.services import Service, sampled
from egressd.rulefiles.tenancy import names_owner, shares_paths

OLDEST_REVIEW = dt.timedelta(days=365)

_NOBODY = frozenset(
    {"-", "?", "n/a", "nobody", "none", "somebody", "tbd", "todo", "unknown", "unowned", "xxx"}
)
_READS = frozenset({"GET", "HEAD"})
_CALLS = _READS | {"POST"}


class Finding(StrEnum):
    """Every kind of objection."""

    NO_OWNER = "no_owner"
    NO_SOURCE = "no_source"
    NO_RISKS = "no_risks"
    STALE_REVIEW = "stale_review"
    FUTURE_REVIEW = "future_review"
    SHARED_HOST = "shared_host"
    WIDE_METHODS = "wide_methods"
    LOOKALIKE = "lookalike"
    NEEDLESS = "needless"


WHY: dict[Finding, str] = {
    Finding.NO_OWNER: "nobody would notice that the service has changed",
    Finding.NO_SOURCE: "nobody could check the hosts again",
    Finding.NO_RISKS: "whoever uses the service should know what a sandbox can still do with it",
    Finding.STALE_REVIEW: "hosts of services come and go; a name that was given up is somebody else's tomorrow",
    Finding.FUTURE_REVIEW: "a review that has not been made hides when the last one was",
    Finding.SHARED_HOST: "anybody can get a place on the host, so allowing it allows them",
    Finding.WIDE_METHODS: "whoever names a service that reads does not expect it to carry data out",
    Finding.LOOKALIKE: "a mistyped host is registered by whoever waits for the mistake",
    Finding.NEEDLESS: "an exception that excepts nothing will one day except something",
}
"""Each kind, and why it matters."""


@dataclass(frozen=True, slots=True, order=True)
class Objection:
    """One finding at its place, with the way out."""

    path: str
    line: int
    column: int
    kind: Finding
    service: str
    message: str
    hint: str

    def __str__(self) -> str:
        """Return `path:line:column: kind: message` and the hint on a line of its own."""
        return f"{self.path}:{self.line}:{self.column}: {self.kind}: {self.message}\n    hint: {self.hint}"


def lint(
    library: Library, today: dt.date, *, root: str = "", known: Iterable[str] = ()
) -> tuple[Objection, ...]:
    """Return all objections in order of place; `known` are hosts of services elsewhere that are what they seem."""
    nearby = _lookalikes(library, known)
    found = [
        objection
        for service in library.services.values()
        for objection in _Reviewer(service, library, root).review(today, nearby[service.model.service])
    ]
    return tuple(sorted(found))


def hosts_of(library: Library) -> set[str]:
    """Return every host that a service names, other than those for denials only."""
    return {
        host
        for service in library.services.values()
        if service.model.access != "deny"
        for entry in service.model.entries
        for host in hosts_named(entry, library)
    }


def hosts_named(entry: ServiceEntry, library: Library) -> tuple[str, ...]:
    """Return the hosts of one entry as they are written, from its list if it names one."""
    return tuple(entry.hosts or ()) or library.lists.get(entry.hosts_from or "", ())


@dataclass(slots=True)
class _Reviewer:
    service: Service
    library: Library
    root: str

    def review(self, today: dt.date, nearby: dict[str, str]) -> Iterator[Objection]:
        """Yield the objections to one service; `nearby` has the domains of it that another one is spelled like."""
        yield from self._head(today)
        if self.service.model.access == "deny":
            return
        shared, alike = False, False
        for index, entry in enumerate(self.service.model.entries):
            yield from self._methods(index, entry)
            for objection in self._tenants(index, entry):
                shared = True
                if not self._accepts("shared_host"):
                    yield objection
            for objection in self._names(index, entry, nearby):
                alike = True
                if not self._accepts("lookalike"):
                    yield objection
        yield from self._needless("shared_host", "shared-host", shared)
        yield from self._needless("lookalike", "lookalike", alike)

    def _head(self, today: dt.date) -> Iterator[Objection]:
        model = self.service.model
        if _is_nobody(model.owner):
            yield self._object(
                Finding.NO_OWNER, ("owner",), f"{model.owner!r} is nobody", "name a team that is asked"
            )
        if all(_is_nobody(source) for source in model.sources):
            yield self._object(
                Finding.NO_SOURCE, ("sources",), "no source is named", "say where the hosts come from"
            )
        if model.risks is None and model.access != "deny":
            yield self._object(
                Finding.NO_RISKS,
                ("service",),
                "no risk is noted",
                "add `risks:`, what a sandbox can still do with it",
            )
        if model.reviewed > today:
            message = f"reviewed on {model.reviewed}, which is not yet"
            yield self._object(Finding.FUTURE_REVIEW, ("reviewed",), message, "write the day of the review")
        elif today - model.reviewed > OLDEST_REVIEW:
            message = f"last reviewed on {model.reviewed}, {(today - model.reviewed).days} days ago"
            hint = "compare the hosts with the sources, then write the day"
            yield self._object(Finding.STALE_REVIEW, ("reviewed",), message, hint)

    def _methods(self, index: int, entry: ServiceEntry) -> Iterator[Objection]:
        access = self.service.model.access
        usual = _CALLS if access == "call" or entry.reads is not None else _READS
        wide = False
        for position, pattern in self._patterns(entry):
            beyond = _beyond(pattern, _READS)
            wide = wide or bool(beyond)
            if access == "write" or not _beyond(pattern, usual, websocket=access == "call"):
                continue
            at: tuple[Step, ...] = ("entries", index, "requests", position)
            message = f"{', '.join(sorted(beyond))} in a service of `access: {access}`"
            hint = "make it a service of its own with `access: write`"
            if beyond == {"POST"}:
                hint += ", or say under `reads` why it changes nothing"
            yield self._object(Finding.WIDE_METHODS, at, message, hint)
        if entry.treatment in ("tunnel", "relay") and access != "write":
            at = ("entries", index, "treatment")
            message = f"a {entry.treatment} carries everything, whatever `access` says"
            yield self._object(Finding.WIDE_METHODS, at, message, "inspect it, or write `access: write`")
        if entry.reads is not None and (access != "read" or not wide):
            yield self._object(
                Finding.NEEDLESS, ("entries", index, "reads"), "`reads` explains nothing here", "remove it"
            )

    def _tenants(self, index: int, entry: ServiceEntry) -> Iterator[Objection]:
        """Yield hosts where anybody has a place and that the entry does not narrow; one for each list."""
        for host in hosts_named(entry, self.library):
            at = self._at_host(index, entry, host)
            suffix = shared_suffix(sampled(host, self.service.model.parameters or {}))
            if suffix is not None:
                message = f"{host} covers names that anybody can get at {suffix}"
                yield self._object(Finding.SHARED_HOST, at, message, _narrow("name the hosts"))
            elif shares_paths(host) and not self._names_owners(host, entry):
                message = f"{host} is many owners' and no path says whose"
                hint = _narrow("name owners in `requests`, by a parameter")
                yield self._object(Finding.SHARED_HOST, at, message, hint)

    def _names_owners(self, host: str, entry: ServiceEntry) -> bool:
        if entry.treatment in ("tunnel", "relay"):
            return False
        paths = [text.partition(" ")[2].partition("?")[0] for text in entry.requests or DEFAULT_REQUESTS]
        return all(names_owner(host, path) for path in paths)

    def _names(self, index: int, entry: ServiceEntry, nearby: dict[str, str]) -> Iterator[Objection]:
        for host in hosts_named(entry, self.library):
            other = nearby.get(_domain(host))
            if other is not None:
                message = f"{host} is spelled like {other}"
                hint = "correct it, or accept: {lookalike: the reason}"
                yield self._object(Finding.LOOKALIKE, self._at_host(index, entry, host), message, hint)

    def _patterns(self, entry: ServiceEntry) -> Iterator[tuple[int, RequestPattern]]:
        for position, text in enumerate(entry.requests or ()):
            pattern = parse_request_pattern(sampled(text, self.service.model.parameters or {}))
            if isinstance(pattern, RequestPattern):
                yield position, pattern

    def _at_host(self, index: int, entry: ServiceEntry, host: str) -> tuple[Step, ...]:
        if entry.hosts is None:
            return ("entries", index, "hosts_from")
        return ("entries", index, "hosts", entry.hosts.index(host))

    def _accepts(self, key: str) -> bool:
        return getattr(self.service.model.accept, key, None) is not None

    def _needless(self, key: str, alias: str, found: bool) -> Iterator[Objection]:
        if self._accepts(key) and not found:
            message = f"`accept: {alias}` accepts nothing that is there"
            yield self._object(Finding.NEEDLESS, ("accept", alias), message, "remove it")

    def _object(self, kind: Finding, steps: tuple[Step, ...], message: str, hint: str) -> Objection:
        place = self.service.document.place(*steps)
        path = "/".join(part for part in (self.root, self.service.document.path) if part)
        name = self.service.model.service
        return Objection(
            printable(path), place.line, place.column, kind, name, printable(message), printable(hint)
        )


def _beyond(pattern: RequestPattern, usual: frozenset[str], *, websocket: bool = False) -> set[str]:
    """Return the methods of a pattern that are not among the usual ones."""
    beyond = {"ANY"} if pattern.methods is None else set(pattern.methods - usual)
    return beyond | ({"WEBSOCKET"} if pattern.websocket and not websocket else set())


def _narrow(hint: str) -> str:
    return f"{hint}, or accept: {{shared-host: the reason}}"


def _is_nobody(text: str) -> bool:
    return text.strip().strip(".!<>()[]").casefold() in _NOBODY or not text.strip()


def _lookalikes(library: Library, known: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return for each service its domains that are near another one that is better known: elsewhere, or by more services."""
    elsewhere = {_domain(host) for host in known}
    users: dict[str, set[str]] = defaultdict(set)
    for service in library.services.values():
        for entry in service.model.entries if service.model.access != "deny" else ():
            for host in hosts_named(entry, library):
                users[_domain(host)].add(service.model.service)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    standing = {domain: (domain in elsewhere, len(users[domain])) for domain in users.keys() | elsewhere}
    for one, other in near_pairs(standing):
        for suspect, model in ((one, other), (other, one)):
            if suspect not in elsewhere and standing[suspect] <= standing[model]:
                for service_name in users[suspect]:
                    found[service_name][suspect] = model
    return found


def _domain(host: str) -> str:
    """Return what of a host is registered with a registry, the host itself where nothing is."""
    name = host.removeprefix("*.")
    return _suffixes().privatesuffix(name) or name


@functools.cache
def _suffixes() -> PublicSuffixList:
    return PublicSuffixList(only_icann=True)
