"""Entries of a profile or of the organisation file → effective entries: every reference resolved, every default filled in.

A deny that names no port or scheme binds all of them: `deny: {hosts: [x]}` that left port 8443 open would be a hole. An allow
that names none binds https on 443. `requests` stays empty where the file gives none; what that means is compiled in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Literal

from egressd.policy.effective import Effect, EffectiveEntry, EntryLimits, Scheme, Treatment
from egressd.policy.model import AllowEntry, AskEntry, DenyEntry, Limits, PermittingEntry
from egressd.policy.values import slug
from egressd.rulefiles.bodies import check_json, conditions
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.hosts import read_pattern, shared_suffix
from egressd.rulefiles.networks import is_public, read_network
from egressd.rulefiles.problems import Code, Findings, quoted
from egressd.rulefiles.services import Service, check_request, expand
from egressd.rulefiles.shape import did_you_mean

type AnyEntry = AllowEntry | AskEntry | DenyEntry
type Origin = Literal["profile", "organisation"]

EXFIL_SINKS = "exfil-sinks"

_SELECTORS = ("hosts", "hosts_from", "service", "public_web")
_PORTS: dict[Scheme, int] = {"https": 443, "http": 80}
_NOT_WITH: dict[str, tuple[str, ...]] = {
    "service": ("schemes", "ports", "treatment", "requests", "json", "addresses"),
    "public_web": ("schemes", "ports", "treatment", "requests", "json", "credential", "addresses"),
}
_WHY_NOT = {
    "service": "the service itself says this; write the hosts out to differ from it",
    "public_web": "public_web is https on 443, inspected, GET and HEAD, without credentials",
}


@dataclass(frozen=True, slots=True)
class Library:
    """What entries may refer to: the services that are sound, all that exist by name, the lists by path, the groups."""

    services: dict[str, Service]
    service_names: frozenset[str]
    lists: dict[str, tuple[str, ...]]
    group_names: frozenset[str] = frozenset()


@dataclass(slots=True)
class Reader:
    """Reads the entries of one file; `ids` has every id so far and where it stands, as a message says it."""

    document: Document
    library: Library
    findings: Findings
    origin: Origin = "profile"
    ids: dict[str, str] = field(default_factory=dict)

    def read(self, effect: Effect, entry: AnyEntry, where: tuple[Step, ...]) -> list[EffectiveEntry]:
        """Return what the entry at `where` comes to, in order; empty after adding its problems. Total."""
        before = self.findings.count
        self._check_selector(entry, where)
        if self.findings.count != before:
            return []
        self._check_keys(entry, where)
        common = self._common(effect, entry, where)
        made = [common.model_copy(update=part) for part in self._destinations(entry, where)]
        return made if self.findings.count == before else []

    def note(
        self, steps: tuple[Step, ...], code: Code, message: str, hint: str = "", *, key: bool = False
    ) -> None:
        """Add a problem at a value, or with `key` at its key."""
        place = self.document.key_place(*steps) if key else self.document.place(*steps)
        self.findings.add(self.document.path, place, code, message, hint)

    def _check_selector(self, entry: AnyEntry, where: tuple[Step, ...]) -> None:
        named = [key for key in _SELECTORS if getattr(entry, key, None) is not None]
        if len(named) > 1:
            message = f"{' and '.join(f'`{key}`' for key in named)} in one entry"
            self.note((*where, named[1]), Code.ENTRY_SELECTOR, message, "make an entry of each", key=True)
        elif not named and entry.addresses is None:
            message = "the entry names no destination"
            hint = "exactly one of: hosts, hosts_from, service, public_web, or addresses alone"
            self.note(where, Code.ENTRY_SELECTOR, message, hint)

    def _check_keys(self, entry: AnyEntry, where: tuple[Step, ...]) -> None:
        for selector, excluded in _NOT_WITH.items():
            for key in excluded:
                given = getattr(entry, "json_" if key == "json" else key, None)
                if getattr(entry, selector, None) is not None and given is not None:
                    message = f"`{key}` beside `{selector}`"
                    self.note((*where, key), Code.NOT_TOGETHER, message, _WHY_NOT[selector], key=True)
        if entry.with_ is not None and entry.service is None:
            self.note(
                (*where, "with"),
                Code.NOT_TOGETHER,
                "`with` without `service`",
                "it fills in a service's parameters",
                key=True,
            )
        for key in ("hosts", "schemes", "ports", "addresses", "requests", "approvers"):
            self._check_repeats(getattr(entry, key, None), (*where, key))
        for position, text in enumerate(getattr(entry, "requests", None) or ()):
            check_request(
                text, self.document.path, self.document, (*where, "requests", position), self.findings
            )
        if isinstance(entry, DenyEntry):
            if entry.addresses is not None and (entry.hosts or entry.hosts_from):
                hint = "deny the hosts, or the addresses in an entry of their own"
                self.note(
                    (*where, "addresses"),
                    Code.NOT_TOGETHER,
                    "`addresses` beside `hosts` in a deny",
                    hint,
                    key=True,
                )
        else:
            self._check_treatment(entry, where)
            if (
                entry.json_ is not None
                and entry.service is None
                and (entry.treatment or "inspect") == "inspect"
            ):
                check_json(entry.json_, entry.requests, self.document, where, self.findings)
            check_limits(entry.limits, self, (*where, "limits"))

    def _check_repeats(self, values: Iterable[str | int] | None, steps: tuple[Step, ...]) -> None:
        first: dict[str | int, int] = {}
        for index, value in enumerate(values or ()):
            if value in first:
                self.note(
                    (*steps, index),
                    Code.DUPLICATE_ITEM,
                    f"{quoted(value)} stands here a second time",
                    "remove it",
                )
            first.setdefault(value, index)

    def _check_treatment(self, entry: PermittingEntry, where: tuple[Step, ...]) -> None:
        treatment = entry.treatment or "inspect"
        for key in ("requests", "json", "credential") if treatment != "inspect" else ():
            if getattr(entry, "json_" if key == "json" else key) is not None:
                message = f"`{key}` needs an inspected connection; this one is a {treatment}"
                hint = f"remove `{key}`, or `treatment: {treatment}`"
                self.note((*where, key), Code.NOT_INSPECTED, message, hint, key=True)
        if treatment == "relay" and entry.schemes is not None:
            self.note(
                (*where, "schemes"),
                Code.NOT_TOGETHER,
                "`schemes` with `relay`",
                "a relay is raw TCP: name the ports",
                key=True,
            )
        if treatment == "tunnel" and entry.schemes is not None and "http" in entry.schemes:
            message = "a tunnel is judged by its TLS hello; http has none"
            self.note((*where, "schemes"), Code.NOT_TOGETHER, message, "inspect http", key=True)
        literal = entry.addresses is not None and entry.hosts is None and entry.hosts_from is None
        if entry.ports is None and (treatment == "relay" or literal):
            what = "`relay`" if treatment == "relay" else "`addresses` alone"
            self.note(where, Code.PORTS_REQUIRED, f"{what} needs `ports`", "like `ports: [5432]`")

    def _common(self, effect: Effect, entry: AnyEntry, where: tuple[Step, ...]) -> EffectiveEntry:
        permits = not isinstance(entry, DenyEntry)
        line = self.document.place(*where).line
        return EffectiveEntry(
            id=self._id(effect, entry, where),
            place=f"{self.document.path}:{line}",
            effect=effect,
            origin=self.origin,
            credential=entry.credential if isinstance(entry, PermittingEntry) else None,
            limits=entry.limits.resolved()
            if isinstance(entry, PermittingEntry) and entry.limits
            else EntryLimits(),
            expires=entry.expires,
            mode=getattr(entry, "mode", None) or "enforce",
            observe_until=getattr(entry, "observe_until", None),
            because=entry.because,
            approvers=tuple(entry.approvers or ()) if isinstance(entry, AskEntry) else (),
            ports=(443,) if permits else (),
        )

    def _id(self, effect: Effect, entry: AnyEntry, where: tuple[Step, ...]) -> str:
        chosen = entry.id or self._derived(effect, entry)
        line = self.document.place(*where).line
        if chosen in self.ids:
            message = f"the id {chosen!r} is taken ({self.ids[chosen]})"
            at = (*where, "id") if entry.id else where
            number = next(n for n in range(2, len(self.ids) + 3) if f"{chosen}-{n}" not in self.ids)
            self.note(
                at,
                Code.DUPLICATE_ID,
                message,
                f"records and tests name rules by id; give this one its own, like `id: {chosen}-{number}`",
            )
        self.ids.setdefault(chosen, f"line {line}")
        return chosen

    def _derived(self, effect: Effect, entry: AnyEntry) -> str:
        named = [
            *(entry.hosts or ()),
            entry.hosts_from,
            entry.service,
            *(entry.addresses or ()),
            "public-web",
        ]
        first = next(name for name in named if name is not None)
        stem = slug(first.removeprefix("lists/").removesuffix(".txt"))
        parts = [
            *(["org"] if self.origin == "organisation" else []),
            *([effect] if effect != "allow" else []),
            stem,
        ]
        return slug("-".join(part for part in parts if part))

    def _destinations(self, entry: AnyEntry, where: tuple[Step, ...]) -> Iterator[dict[str, object]]:
        """Yield the fields that say where an entry leads; a service yields once for each of its groups."""
        if entry.service is not None:
            yield from self._service(entry, where)
            return
        permits = isinstance(entry, PermittingEntry)
        treatment: Treatment = (
            (entry.treatment or "inspect") if isinstance(entry, PermittingEntry) else "inspect"
        )
        requests = getattr(entry, "requests", None)
        reach = _reach(entry.schemes, entry.ports, treatment, permits=permits)
        yield {
            **reach,
            "hosts": self._hosts(entry, where),
            "addresses": self._addresses(entry.addresses, where),
            "public_web": getattr(entry, "public_web", None) is not None,
            "requests": tuple(requests or ()),
            "body": conditions(getattr(entry, "json_", None)),
            "via": entry.hosts_from,
        }

    def _service(self, entry: AnyEntry, where: tuple[Step, ...]) -> Iterator[dict[str, object]]:
        name = entry.service or ""
        service = self.library.services.get(name)
        if service is None:
            if (
                name not in self.library.service_names
            ):  # one that is there and wrong has been reported in its own file
                message = (
                    f"there is no service {name!r}{did_you_mean(name, sorted(self.library.service_names))}"
                )
                self.note(
                    (*where, "service"), Code.UNKNOWN_SERVICE, message, f"services/{name}.yaml would be it"
                )
            return
        permits = isinstance(entry, PermittingEntry)
        if permits and service.model.access == "deny":
            message = f"{name} is for denials: what it names is never to be reached"
            self.note((*where, "service"), Code.NOT_TOGETHER, message, "name it under `deny`")
            return
        for reach in expand(service, entry.with_ or {}, (self.document, where), self.findings):
            part = reach.entry
            treatment = part.treatment or "inspect"
            hosts = reach.hosts or self.library.lists.get(part.hosts_from or "", ())
            if permits:
                self._warn_shared(hosts, (*where, "service"))
            yield {
                **_reach(part.schemes, part.ports, treatment, permits=permits),
                "hosts": hosts,
                "requests": reach.requests,
                "body": conditions(part.json_) if permits else (),
                "because": entry.because or part.because,
                **({"credential": None} if part.credential == "never" else {}),
                "via": reach.via,
            }

    def _hosts(self, entry: AnyEntry, where: tuple[Step, ...]) -> tuple[str, ...]:
        permits = isinstance(entry, PermittingEntry)
        if entry.hosts_from is not None:
            listed = self._list(entry.hosts_from, where)
            if permits:
                self._warn_shared(listed, (*where, "hosts_from"))
            return listed
        hosts = entry.hosts or ()
        for index, raw in enumerate(hosts):
            place = self.document.place(*where, "hosts", index)
            if (
                read_pattern(raw, self.document.path, place, self.findings, permits=permits) is not None
                and permits
            ):
                self._warn_shared((raw,), (*where, "hosts", index))
        return tuple(hosts)

    def _list(self, path: str, where: tuple[Step, ...]) -> tuple[str, ...]:
        if path in self.library.lists:
            return self.library.lists[path]
        message = f"there is no list {quoted(path)}{did_you_mean(path, sorted(self.library.lists))}"
        self.note(
            (*where, "hosts_from"),
            Code.UNKNOWN_LIST,
            message,
            "lists are files in lists/, like lists/docs.txt",
        )
        return ()

    def _warn_shared(self, hosts: Iterable[str], steps: tuple[Step, ...]) -> None:
        for host in hosts:
            if (suffix := shared_suffix(host)) is not None:
                message = f"{quoted(host)} covers names that anybody can get at {suffix}"
                self.note(steps, Code.SHARED_SUFFIX, message, "name the hosts that are needed")

    def _addresses(self, addresses: list[str] | None, where: tuple[Step, ...]) -> tuple[str, ...]:
        for index, raw in enumerate(addresses or ()):
            place = self.document.place(*where, "addresses", index)
            read_network(raw, self.document.path, place, self.findings)
        return tuple(addresses or ())


def check_limits(limits: Limits | None, reader: Reader, steps: tuple[Step, ...]) -> None:
    """Add a problem for limits that limit nothing."""
    if limits is not None and limits.resolved() == EntryLimits():
        reader.note(
            steps,
            Code.EMPTY_LIST,
            "the limits are empty",
            "name one, like `requests: 600/minute`, or remove the key",
            key=True,
        )


def reaches_private(entry: EffectiveEntry) -> bool:
    """Return whether the entry permits a range that is not public."""
    return any(not is_public(ip_network(text)) for text in entry.addresses)


def _reach(
    schemes: list[Scheme] | None, ports: list[int] | None, treatment: Treatment, *, permits: bool
) -> dict[str, object]:
    chosen: list[Scheme] = schemes or (["https"] if permits else ["https", "http"])
    default = [_PORTS[scheme] for scheme in chosen] if permits else []
    return {"schemes": tuple(chosen), "ports": tuple(ports or default), "treatment": treatment}
