"""Credentials and rules together: every use is covered by the credential's own `for:`, no two meet, none is forgotten.

The binding lives with the secret (law 7): a rule can only use a credential where the credential's `for:` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from egressd.policy.credential import Binding, Credential, CredentialsFile
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import HostPattern, format_pattern
from egressd.policy.requests import DEFAULT_REQUESTS, RequestPattern, parse_request_pattern
from egressd.rulefiles.credential_shape import loses_parameter, takes_parameter, takes_path
from egressd.rulefiles.credentials import Known
from egressd.rulefiles.overlaps import HostIndex, covers, patterns, request_covers, requests_meet
from egressd.rulefiles.problems import Code, Findings, Place, quoted
from egressd.rulefiles.secrets import shows_host, shows_request
from egressd.rulefiles.shape import did_you_mean

_MOST_SHOWN = 4
_OWN_KEYS = "name its `credential`, or accept: {own-keys: the reason}"


@dataclass(frozen=True, slots=True)
class Used:
    """An effective entry that attaches a credential, and where that is written."""

    entry: EffectiveEntry
    path: str
    place: Place


@dataclass(frozen=True, slots=True)
class Bare:
    """An effective entry that attaches none, and where it is written; `expects` names the service that wants one."""

    entry: EffectiveEntry
    path: str
    place: Place
    expects: str | None = None


def check_uses(uses: list[Used], known: CredentialsFile | None, findings: Findings) -> None:
    """Add the problems of every use of a credential in one profile; without a file only its own shape is judged."""
    for used in uses:
        _check_use(used, findings)
        if known is not None and used.entry.credential is not None:
            _check_known(used, used.entry.credential, known, findings)
    if known is None and uses:
        names = ", ".join(sorted({used.entry.credential or "" for used in uses}))
        first = min(uses, key=lambda used: used.place)
        message = f"not checked against their definitions: {names}"
        findings.add(first.path, first.place, Code.CREDENTIAL_UNCHECKED, message, "give --credentials FILE")
    _check_conflicts(uses, findings)
    if known is not None:
        _check_variables(uses, known, findings)


def check_bare(bare: list[Bare], uses: list[Used], known: CredentialsFile | None, findings: Findings) -> None:
    """Add a warning for each entry without a credential where one is expected: there the sandbox's own keys go out."""
    bindings = HostIndex(_bound(known)) if known is not None else None
    taken = HostIndex(used.entry for used in uses)
    for one in bare:
        if one.expects is not None:
            message = (
                f"{one.expects} expects a credential: without one, whoever's key the sandbox has goes out"
            )
            findings.add(one.path, one.place, Code.CREDENTIAL_MISSING, message, _OWN_KEYS)
            continue
        names = dict.fromkeys(_forgotten(one.entry, bindings, taken)) if bindings is not None else {}
        for name in names:
            message = f"{name!r} is for requests of this entry, which names no credential: the sandbox's own keys go out"
            findings.add(one.path, one.place, Code.CREDENTIAL_MISSING, message, _OWN_KEYS)


def check_spread(known: Known, entries: Iterable[EffectiveEntry], findings: Findings) -> None:
    """Add a warning for each credential that no rule uses, or that may go further than its rules ever take it.

    `entries` are those of every profile. What nobody uses can be stolen all the same.
    """
    users: dict[str, list[EffectiveEntry]] = {}
    for entry in entries:
        if entry.credential is not None and entry.effect != "deny":
            users.setdefault(entry.credential, []).append(entry)
    for name, credential in known.model.credentials.items():
        if name in users:
            _check_width(name, credential, users[name], known, findings)
        else:
            place = known.document.key_place("credentials", name)
            message, hint = f"no rule uses {name!r}", "remove it, or name it in a rule"
            findings.add(known.document.path, place, Code.CREDENTIAL_UNUSED, message, hint)


def _check_use(used: Used, findings: Findings) -> None:
    entry = used.entry
    if entry.schemes != ("https",):
        hint = "leave http out; a credential is attached over verified https only"
        message = "`credential` with a scheme other than https"
        findings.add(used.path, used.place, Code.CREDENTIAL_CONSTRAINT, message, hint)
    if not entry.hosts:
        message = "`credential` without hosts: what it is for is said by name"
        hint = "name the hosts that may get it"
        findings.add(used.path, used.place, Code.CREDENTIAL_CONSTRAINT, message, hint)
    if not entry.requests:
        via = f" (nor does {entry.via})" if entry.via else ""
        hint = "name the requests that may carry it"
        message = f"`credential` without `requests`{via}"
        findings.add(used.path, used.place, Code.CREDENTIAL_CONSTRAINT, message, hint)
    if entry.treatment != "inspect":
        which = entry.via or "this one"
        message = f"`credential` needs an inspected connection; {which} is a {entry.treatment}"
        hint = "inspect it, or take the credential out"
        findings.add(used.path, used.place, Code.CREDENTIAL_CONSTRAINT, message, hint)


def _check_known(used: Used, name: str, known: CredentialsFile, findings: Findings) -> None:
    credential = known.credentials.get(name)
    if credential is None:
        names = sorted(known.credentials)
        message = f"there is no credential {name!r}{did_you_mean(name, names)}"
        findings.add(used.path, used.place, Code.UNKNOWN_CREDENTIAL, message, f"known: {', '.join(names)}")
        return
    for host in patterns(used.entry.hosts):
        bindings = [
            binding
            for binding in credential.for_
            if any(covers(wide, host) for wide in patterns(binding.hosts))
        ]
        bound = [request for binding in bindings for request in _parsed(binding.requests)]
        for request in _parsed(used.entry.requests):
            if not any(request_covers(wide, request) for wide in bound):
                message = f"{name!r} is not for {request.text!r} at {format_pattern(host)}"
                hint = "widen the credential's `for:`, or narrow this entry"
                findings.add(used.path, used.place, Code.CREDENTIAL_NOT_COVERED, message, hint)
                return
    _check_slot(used, name, credential, findings)


def _check_slot(used: Used, name: str, credential: Credential, findings: Findings) -> None:
    """Requests that the rule allows and that could never carry the credential."""
    attach, requests = credential.attach, used.entry.requests
    message = hint = ""
    if attach.path is not None and not any(map(takes_path, requests)):
        message = f"{name!r} goes into the path, and no request here has a `*` where it could stand"
        hint = 'like "POST /services/*/send"'
    elif attach.placeholder is not None and attach.placeholder.headers is None:
        if not any(takes_parameter(request, attach.placeholder.query or []) for request in requests):
            message = f"{name!r} goes into the query, and no request here lets its placeholder stand there"
            hint = "leave the query out of a pattern, or end it with `&*`"
    elif attach.query is not None and (
        lost := [text for text in requests if loses_parameter(text, attach.query or "")]
    ):
        message = f"{lost[0]!r} asks for the parameter that {name!r} replaces: what the sandbox sends there is taken out"
        hint = "leave that parameter out of the pattern; egressd adds it"
    if message:
        findings.add(used.path, used.place, Code.ATTACH_MISFIT, message, hint)


def _check_conflicts(uses: list[Used], findings: Findings) -> None:
    """Two credentials for one request: which one went out would hang on the order of a file."""
    index = HostIndex(used.entry for used in uses)
    order = {id(used.entry): position for position, used in enumerate(uses)}
    for position, used in enumerate(uses):
        told: set[str] = set()
        for pattern in patterns(used.entry.hosts):
            for other in index.meeting(pattern):
                earlier = order[id(other)] < position
                if not earlier or other.credential == used.entry.credential or other.id in told:
                    continue
                if requests_meet(used.entry, other):
                    told.add(other.id)
                    message = f"{used.entry.credential!r} here and {other.credential!r} at {other.place} for one request"
                    hint = "let their requests or hosts differ"
                    findings.add(used.path, used.place, Code.CREDENTIAL_CONFLICT, message, hint)


def _check_variables(uses: list[Used], known: CredentialsFile, findings: Findings) -> None:
    """Two placeholders in one variable: the sandbox would hold one of them, and the other's host refuse it."""
    taken: dict[str, Used] = {}
    for used in uses:
        credential = known.credentials.get(used.entry.credential or "")
        placeholder = credential.attach.placeholder if credential is not None else None
        if placeholder is None:
            continue
        first = taken.setdefault(placeholder.variable, used)
        if first.entry.credential != used.entry.credential:
            message = f"{used.entry.credential!r} here and {first.entry.credential!r} at {first.entry.place} set one variable"
            hint = "give their placeholders a `variable` each, or use one of them in a profile"
            findings.add(used.path, used.place, Code.PLACEHOLDER_COLLISION, message, hint)


def _bound(known: CredentialsFile) -> Iterator[EffectiveEntry]:
    """Yield each binding as an entry that takes what the binding does."""
    for name, credential in known.credentials.items():
        for number, binding in enumerate(credential.for_):
            hosts, requests = tuple(binding.hosts), tuple(binding.requests)
            yield EffectiveEntry(
                id=f"{name} {number}",
                place="",
                effect="allow",
                hosts=hosts,
                requests=requests,
                credential=name,
            )


def _forgotten(entry: EffectiveEntry, bindings: HostIndex, taken: HostIndex) -> Iterator[str]:
    """Yield the credentials, some more than once, whose requests the entry takes, naming none by oversight.

    It does if a binding covers what the entry says. Where it only meets the binding, a rule of the same profile that attaches the
    credential to such requests may well be meant to go before it.
    """
    told: set[str] = set()
    sides: dict[int, _Side] = {}
    for host in patterns(entry.hosts):
        attaching: dict[str | None, list[EffectiveEntry]] = {}
        for other in taken.meeting(host):
            attaching.setdefault(other.credential, []).append(other)
        for bound in bindings.meeting(host):
            name = bound.credential or ""
            if name in told:
                continue
            side = sides.get(id(bound)) or sides.setdefault(id(bound), _Side.of(entry, bound))
            if not side.meets(bound):
                continue
            first = any(side.meets(other) for other in attaching.get(name, ()))
            if not first or (side.whole and any(covers(wide, host) for wide in side.hosts)):
                told.add(name)
                yield name


@dataclass(frozen=True, slots=True)
class _Side:
    """An entry without a credential beside one binding: what of it is the same for all of the entry's hosts, worked out once."""

    lane: EffectiveEntry
    """What the entry asks of the binding's hosts."""
    hosts: tuple[HostPattern, ...]
    whole: bool
    """Whether the binding covers one of those requests."""
    met: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: EffectiveEntry, bound: EffectiveEntry) -> _Side:
        """Put the two side by side; of a connection that is not read, every request may be asked."""
        asked = entry.requests or DEFAULT_REQUESTS if entry.treatment == "inspect" else bound.requests
        requests = list(_parsed(asked))
        whole = any(request_covers(wide, one) for wide in _parsed(bound.requests) for one in requests)
        lane = bound.model_copy(update={"requests": tuple(asked)})
        return cls(lane, tuple(patterns(bound.hosts)), whole)

    def meets(self, other: EffectiveEntry) -> bool:
        """Say whether the entry's requests meet those of another, a binding or a rule."""
        if id(other) not in self.met:
            self.met[id(other)] = requests_meet(self.lane, other)
        return self.met[id(other)]


def _check_width(
    name: str, credential: Credential, users: list[EffectiveEntry], known: Known, findings: Findings
) -> None:
    for number, binding in enumerate(credential.for_):
        for position, host in enumerate(patterns(binding.hosts)):
            near = [entry for entry in users if any(_meets(host, other) for other in patterns(entry.hosts))]
            if not near or not any(covers(other, host) for entry in near for other in patterns(entry.hosts)):
                used = dict.fromkeys(text for entry in near for text in entry.hosts)
                what = (
                    f"at {quoted(format_pattern(host))}"
                    if shows_host(format_pattern(host))
                    else "at this host"
                )
                hint = f"narrow it to {_listed(used)}" if used else "take the host out"
                message = f"{name!r} may go further than its rules use it {what}"
                place = known.document.place("credentials", name, "for", number, "hosts", position)
                findings.add(known.document.path, place, Code.CREDENTIAL_WIDE, message, hint)
        _check_requests(name, number, binding, users, known, findings)


def _check_requests(
    name: str,
    number: int,
    binding: Binding,
    users: list[EffectiveEntry],
    known: Known,
    findings: Findings,
) -> None:
    """Add a warning for each request of a binding that is more than any rule uses at one of its hosts, if one does use it."""
    hosts = list(patterns(binding.hosts))
    near = [
        entry
        for entry in users
        if any(_meets(host, other) for host in hosts for other in patterns(entry.hosts))
    ]
    used = dict.fromkeys(text for entry in near for text in entry.requests)
    if not near:
        return  # its hosts are told
    parsed = list(_parsed(used))
    for position, text in enumerate(binding.requests):
        bound = parse_request_pattern(text)
        if isinstance(bound, RequestPattern) and not _used_up(bound, parsed):
            what = quoted(text) if shows_request(text) else "this request"
            message = f"{name!r} may go with {what}, which is more than its rules use"
            place = known.document.place("credentials", name, "for", number, "requests", position)
            shown = [
                request for request in used if any(request_covers(bound, one) for one in _parsed([request]))
            ]
            hint = f"narrow it to {_listed(shown)}" if shown else "take it out"
            findings.add(known.document.path, place, Code.CREDENTIAL_WIDE, message, hint)


def _used_up(bound: RequestPattern, used: list[RequestPattern]) -> bool:
    """Whether every method of a pattern is covered by some pattern that is used."""
    parts = [replace(bound, methods=frozenset({method}), websocket=False) for method in bound.methods or ()]
    if bound.methods is None:
        parts.append(replace(bound, websocket=False))
    if bound.websocket:
        parts.append(replace(bound, methods=frozenset()))
    return all(any(request_covers(one, part) for one in used) for part in parts)


def _meets(one: HostPattern, other: HostPattern) -> bool:
    return covers(one, other) or covers(other, one)


def _listed(texts: Iterable[str]) -> str:
    shown = list(texts)
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(f'"{text}"' for text in shown[:_MOST_SHOWN]) + more


def _parsed(texts: Iterable[str]) -> Iterator[RequestPattern]:
    found = (parse_request_pattern(text) for text in texts)
    return (pattern for pattern in found if isinstance(pattern, RequestPattern))
