"""One profile, put together, with the organisation's denials in front; and what is judged of it as a whole."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.model import (
    AllowEntry,
    DenyEntry,
    OrganisationFile,
    PermittingEntry,
    ProfileFile,
)
from egressd.rulefiles.bindings import Bare, Used, check_bare, check_uses
from egressd.rulefiles.ceiling import Top, bound_limits, check_ceiling
from egressd.rulefiles.composition import Composed, Group
from egressd.rulefiles.document import Document
from egressd.rulefiles.entries import EXFIL_SINKS, Library, Reader, reaches_private
from egressd.rulefiles.observing import check_profile, check_rules
from egressd.rulefiles.overlaps import HostIndex, patterns
from egressd.rulefiles.problems import Code, Findings
from egressd.rulefiles.written import Written, written

_DAY = 86400
_TARGET = 2048
"""The longest request target of public_web, in bytes."""
_NAME = 253


def read_organisation(
    model: OrganisationFile, document: Document, library: Library, today: dt.date, findings: Findings
) -> list[EffectiveEntry]:
    """Return the denials that bind every profile."""
    reader = Reader(document, library, findings, origin="organisation")
    denials = list(written(reader, model))
    check_rules(denials, None, today)
    _check_expiry(denials, today)
    return [made for one in denials for made in one.entries]


def check_group(group: Group, today: dt.date) -> None:
    """Add what is wrong with a group by itself, whoever names it."""
    check_rules(group.written, None, today)
    _check_expiry(group.written, today)


def read_profile(
    composed: Composed,
    organisation: Iterable[EffectiveEntry],
    top: Top | None,
    credentials: CredentialsFile | None,
    today: dt.date,
) -> EffectivePolicy:
    """Return the effective policy of a profile that has been put together; what is wrong with it is noted."""
    above = list(organisation)
    model, reader, entries = composed.model, composed.reader, composed.written
    check_profile(model, top, reader, today)
    check_rules(entries, top, today)
    _check_public_web(model, entries)
    _check_denied_requests(entries, above)
    _check_expiry(entries, today)
    uses = list(_uses(entries))
    check_uses(uses, credentials, reader.findings)
    if model.accept is None or model.accept.own_keys is None:
        check_bare(list(_bare(entries)), uses, credentials, reader.findings)
    limits = composed.limits
    if top is not None:
        check_ceiling(top, entries)
        limits = bound_limits(top, limits, reader)
    sinks = list(_sinks(entries))
    return EffectivePolicy(
        profile=model.profile,
        owner=model.owner,
        mode=model.mode,
        observe_until=model.observe_until,
        entries=(*above, *sinks, *(made for one in entries for made in one.entries)),
        limits=limits,
    )


def _check_public_web(model: ProfileFile, entries: Sequence[Written]) -> None:
    for one in entries:
        if not isinstance(one.said, AllowEntry) or one.said.public_web is None:
            continue
        limits = one.said.limits.resolved() if one.said.limits else EntryLimits()
        missing = [key for key in ("requests", "new_hosts", "upload") if getattr(limits, key) is None]
        if missing:
            hint = "limits: {requests: 600/hour, new_hosts: 60/hour, upload: 5MB/day}"
            message = f"`public_web` needs limits for {', '.join(missing)}"
            one.note("public_web", Code.PUBLIC_WEB_LIMITS, message, hint, key=True)
        else:
            one.note("public_web", Code.COVERT_CAPACITY, _capacity(limits), key=True)
        mixed = next((other for other in entries if _is_private(other)), None)
        if mixed is not None and (model.accept is None or model.accept.mixed_public is None):
            line = f"line {mixed.line}" if mixed.reader is one.reader else _place(mixed)
            message = f"`public_web` beside the credential or private range of {line}"
            hint = "move one of them to another profile, or accept: {mixed-public: the reason}"
            one.note("public_web", Code.MIXED_PUBLIC, message, hint, key=True)


def _place(one: Written) -> str:
    return f"{one.reader.document.path}:{one.line}"


def _is_private(one: Written) -> bool:
    if isinstance(one.said, DenyEntry):
        return False
    return one.said.credential is not None or any(reaches_private(entry) for entry in one.entries)


def _capacity(limits: EntryLimits) -> str:
    """Say what can still leave a sandbox in the URLs of GET requests and in host names, at the most."""
    targets = min(_a_day(limits.requests) * _TARGET, _a_day(limits.upload))
    names = _a_day(limits.new_hosts) * _NAME
    return f"up to {targets:,} bytes a day can leave in URLs and {names:,} in host names"


def _a_day(rate: Rate | None) -> int:
    # A bucket begins full, so a day sees its amount and a day's refill.
    return rate.amount * _DAY // rate.seconds + (rate.amount if rate.seconds < _DAY else 0) if rate else 0


def _sinks(entries: Sequence[Written]) -> Iterator[EffectiveEntry]:
    """Yield the denial of the exfil-sinks service that comes with every public_web."""
    for one in entries:
        if not isinstance(one.said, AllowEntry) or one.said.public_web is None:
            continue
        if EXFIL_SINKS not in one.reader.library.service_names:
            message = f"`public_web` needs services/{EXFIL_SINKS}.yaml, which it always denies"
            one.note("public_web", Code.UNKNOWN_SERVICE, message, key=True)
            return
        entry = DenyEntry.model_validate({"id": "public-web-exfil-sinks", "service": EXFIL_SINKS})
        taken = {made.id: _place(other) for other in entries for made in other.entries}
        reader = replace(one.reader, ids=taken)
        yield from reader.read("deny", entry, one.where)
        return


def _check_denied_requests(entries: Sequence[Written], above: list[EffectiveEntry]) -> None:
    """A connection that is not read cannot carry some requests and not others: a deny of some would deny all."""
    opaque = [
        entry
        for one in entries
        for entry in one.entries
        if one.effect != "deny" and entry.treatment != "inspect"
    ]
    index = HostIndex(opaque)
    for one in entries:
        if not isinstance(one.said, DenyEntry):
            continue
        met = next((other for made in one.entries for other in _met(made, index)), None)
        if met is not None:
            message = f"these requests cannot be seen: {met.id!r} ({met.place}) is a {met.treatment}"
            step = "requests" if one.said.requests else "service"
            one.note(step, Code.NOT_INSPECTED, message, "deny the host, or inspect it there", key=True)
    theirs = {other.place: made for made in above for other in _met(made, index)}
    for one in entries:
        made = next((theirs[entry.place] for entry in one.entries if entry.place in theirs), None)
        if made is not None:
            message = f"the requests that {made.id!r} ({made.place}) denies cannot be seen in a {one.entries[0].treatment}"
            step = "treatment" if getattr(one.said, "treatment", None) else "service"
            one.note(step, Code.NOT_INSPECTED, message, "inspect it", key=True)


def _met(deny: EffectiveEntry, index: HostIndex) -> Iterator[EffectiveEntry]:
    if not deny.requests:
        return
    for pattern in patterns(deny.hosts):
        for other in index.meeting(pattern):
            if not deny.ports or set(deny.ports) & set(other.ports):
                yield other


def _check_expiry(entries: Iterable[Written], today: dt.date) -> None:
    for one in entries:
        if one.said.expires is not None and one.said.expires < today:
            message = f"expired on {one.said.expires}: the rule is as if it were not there"
            one.note("expires", Code.EXPIRED, message, "renew it or remove the entry")


def _uses(entries: Iterable[Written]) -> Iterator[Used]:
    for one in entries:
        if not isinstance(one.said, PermittingEntry) or one.said.credential is None:
            continue
        document = one.reader.document
        place = document.place(*one.where, "credential")
        for entry in one.entries:
            if entry.credential is not None:  # a service keeps it from some of its hosts
                yield Used(entry, document.path, place)


def _bare(entries: Iterable[Written]) -> Iterator[Bare]:
    for one in entries:
        if not isinstance(one.said, PermittingEntry) or one.said.credential is not None:
            continue
        service = one.reader.library.services.get(one.said.service or "")
        expects = service.model.service if service is not None and service.model.expects else None
        document = one.reader.document
        place = document.place(*one.where)
        for entry in one.entries:
            yield Bare(entry, document.path, place, expects)
