"""From recorded denials the narrowest rules that would allow them: for a person to read, never to be put in force unread.

What a sandbox tried is not what it should be allowed to do, and a journal holds what hostile programs sent. So hosts for denials
only are never proposed, nor what the organisation denies or has no room for, nor a whole host; every text is checked before it is
written; and what is not proposed is said with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from egressd.policy.attempt import ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason
from egressd.rulefiles.claims import judge
from egressd.rulefiles.fitting import Fit, fits
from egressd.rulefiles.load import Rules
from egressd.rulefiles.overlaps import patterns
from egressd.rulefiles.recorded import Recorded, Unplayable, read_recorded
from egressd.rulefiles.requestline import Asked
from egressd.rulefiles.templates import Templates
from egressd.rulefiles.tenancy import names_owner, shares_paths

MOST_SITES = 2_000
MOST_SANDBOXES = 1_000

_WANTED = frozenset(
    {
        *(Reason.NOT_ALLOWED, Reason.OBSERVED, Reason.PORT_NOT_ALLOWED, Reason.SCHEME_NOT_ALLOWED),
        *(Reason.METHOD_NOT_ALLOWED, Reason.PATH_NOT_ALLOWED, Reason.UPGRADE_NOT_ALLOWED),
    }
)
_ACCESS = ("read", "call", "write")


@dataclass(slots=True)
class Evidence:
    """What speaks for a rule: how many attempts, by which sandboxes, from when to when, and one to look at."""

    times: int = 0
    sandboxes: set[str] = field(default_factory=set)
    first: str = ""
    last: str = ""
    example: str = ""

    def add(self, fields: Mapping[str, Any], times: int) -> None:
        """Take one record."""
        self.times += times
        if len(self.sandboxes) < MOST_SANDBOXES:
            self.sandboxes.add(str(fields.get("sandbox"))[:64])
        moment = str(fields.get("time", ""))[:10]
        if moment:
            self.first, self.last = min(self.first or moment, moment), max(self.last, moment)
        self.example = self.example or str(fields.get("attempt_id", ""))[:28]

    def join(self, other: Evidence) -> None:
        """Take what speaks for another rule too."""
        self.times += other.times
        self.sandboxes |= other.sandboxes
        self.first = min(filter(None, (self.first, other.first)), default="")
        self.last = max(self.last, other.last)
        self.example = self.example or other.example


@dataclass(slots=True)
class _Site:
    """All that was asked of one host on one port."""

    evidence: dict[str, Evidence] = field(default_factory=dict)
    methods: dict[str, Templates] = field(default_factory=dict)
    unread: int = 0


type _Place = tuple[str, str, int]
"""Host, scheme, port."""


@dataclass(slots=True)
class Proposal:
    """One rule: a host with requests, or a service with values; `samples` are requests that were made and it allows."""

    host: str
    scheme: str
    port: int
    evidence: Evidence
    requests: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    service: str | None = None
    values: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Wishes:
    """Collects denied and would-be-denied attempts under one profile, in bounded memory."""

    rules: Rules
    profile: str
    now: float
    sites: dict[_Place, _Site] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    taken: int = 0

    def take(self, fields: Mapping[str, Any]) -> None:
        """Take one decision record. Total."""
        found = read_recorded(fields)
        if isinstance(found, Unplayable) or found.profile != self.profile:
            return
        wanted = found.verdict == "deny" or found.would_deny
        if not wanted or isinstance(found.attempt, DnsQuestion):
            return  # look-ups follow from connections
        if found.reason == Reason.QUERY_NOT_ALLOWED:
            self.left_out["a query that the rules do not allow, whose values are not recorded"] += found.times
        elif found.reason in _WANTED:
            self._keep(found, fields)

    def _keep(self, found: Recorded, fields: Mapping[str, Any]) -> None:
        attempt = found.attempt
        assert isinstance(attempt, RequestAttempt | ConnectionAttempt)
        why = self._refused(attempt)
        if why is not None:
            self.left_out[why] += found.times
            return
        place = (format_host(attempt.host), attempt.scheme, attempt.port)
        if place not in self.sites and len(self.sites) >= MOST_SITES:
            self.left_out[f"hosts beyond the first {MOST_SITES}"] += found.times
            return
        site = self.sites.setdefault(place, _Site())
        if isinstance(attempt, ConnectionAttempt):
            site.unread += found.times
            return
        self.taken += found.times
        method = "WEBSOCKET" if attempt.upgrade else attempt.method
        site.methods.setdefault(method, Templates()).add(attempt.target, found.times)
        site.evidence.setdefault(method, Evidence()).add(fields, found.times)

    def _refused(self, attempt: RequestAttempt | ConnectionAttempt) -> str | None:
        """Return why an attempt is not proposed whatever speaks for it."""
        if not isinstance(attempt.host, tuple):
            return "bare addresses, which are better asked for by name"
        for service in self.rules.library.services.values():
            for part in service.model.entries if service.model.access == "deny" else ():
                hosts = part.hosts or self.rules.library.lists.get(part.hosts_from or "", ())
                if any(pattern.matches(attempt.host) for pattern in patterns(hosts)):
                    return f"hosts of {service.model.service}, which is for denials"
        decision = judge(self.rules.compiled(self.profile), Asked("", attempt), self.now)
        if decision.reason in (Reason.DENIED_BY_RULE, Reason.DENIED_BY_ORGANISATION):
            return "denied on purpose by these rules"
        if decision.allowed and not decision.would_deny:
            return "allowed by these rules already"
        return None


def propose(wishes: Wishes, least: int) -> list[Proposal]:
    """Return the rules, the best founded first; patterns that were met less than `least` times are left out."""
    by_service: dict[str, Proposal] = {}
    found: list[Proposal] = []
    for (host, scheme, port), site in sorted(wishes.sites.items()):
        made = Proposal(host, scheme, port, Evidence())
        for method, templates in sorted(site.methods.items()):
            for path, times, sample in templates.patterns():
                if times < least:
                    wishes.left_out[f"requests made less than {least} times"] += times
                    continue
                if shares_paths(host) and not names_owner(host, path):
                    wishes.left_out["paths of everybody on a host that many share"] += times
                    continue
                fit = _fit(wishes.rules, host, scheme, port, method, sample)
                target = _serviced(by_service, fit, host, scheme, port) if fit is not None else made
                if fit is None:
                    target.requests.append(f"{method} {path}")
                target.samples.append(_sample(method, scheme, host, port, sample))
                target.evidence.join(_part(site.evidence[method], times))
            if templates.lost:
                wishes.left_out["paths too many or too odd for a narrow pattern"] += templates.lost
        if made.requests:
            found.append(made)
        if not site.methods and site.unread:
            wishes.left_out["connections, of which no request is known"] += site.unread
    return sorted(
        [*by_service.values(), *found], key=lambda one: (-one.evidence.times, one.service or one.host)
    )


def _part(evidence: Evidence, times: int) -> Evidence:
    return Evidence(times, set(evidence.sandboxes), evidence.first, evidence.last, evidence.example)


def _fit(rules: Rules, host: str, scheme: str, port: int, method: str, sample: str) -> Fit | None:
    upgrade = "websocket" if method == "WEBSOCKET" else None
    attempt = RequestAttempt(
        tuple(host.split(".")),
        port,
        "https" if scheme == "https" else "http",
        "GET" if upgrade else method,
        sample,
        upgrade=upgrade,
    )
    found = sorted(
        fits(rules.library, attempt),
        key=lambda fit: (_ACCESS.index(rules.library.services[fit.service].model.access), len(fit.entries)),
    )
    return found[0] if found else None


def _serviced(by_service: dict[str, Proposal], fit: Fit, host: str, scheme: str, port: int) -> Proposal:
    made = by_service.setdefault(fit.service, Proposal(host, scheme, port, Evidence(), service=fit.service))
    for name, value in fit.values:
        values = made.values.setdefault(name, [])
        if value not in values:
            values.append(value)
    return made


def _sample(method: str, scheme: str, host: str, port: int, path: str) -> str:
    usual = {"https": 443, "http": 80}[scheme] == port
    return f"{method} {scheme}://{host}{'' if usual else f':{port}'}{path}"
