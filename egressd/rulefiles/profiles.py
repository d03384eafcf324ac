"""One profile, with the organisation's denials in front, as an effective policy; and what is judged of it as a whole."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import Effect, EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.model import (
    MOST_OBSERVE_DAYS,
    AllowEntry,
    DenyEntry,
    OrganisationFile,
    PermittingEntry,
    ProfileFile,
)
from egressd.rulefiles.bindings import Bare, Used, check_bare, check_uses
from egressd.rulefiles.document import Document
from egressd.rulefiles.entries import EXFIL_SINKS, AnyEntry, Library, Reader, check_limits, reaches_private
from egressd.rulefiles.overlaps import HostIndex, patterns
from egressd.rulefiles.problems import Code, Findings

_DAY = 86400
_TARGET = 2048
"""The longest request target of public_web, in bytes."""
_NAME = 253

_EFFECTS: tuple[Effect, ...] = ("deny", "allow", "ask")


@dataclass(frozen=True, slots=True)
class Written:
    """An entry as the file has it, with what it came to."""

    effect: Effect
    index: int
    said: AnyEntry
    entries: list[EffectiveEntry]


def read_organisation(
    model: OrganisationFile, document: Document, library: Library, today: dt.date, findings: Findings
) -> list[EffectiveEntry]:
    """Return the denials that bind every profile."""
    reader = Reader(document, library, findings, origin="organisation")
    written = list(_written(reader, model))
    _check_expiry(written, reader, today)
    return [made for one in written for made in one.entries]


def read_profile(
    model: ProfileFile,
    document: Document,
    library: Library,
    organisation: Iterable[EffectiveEntry],
    credentials: CredentialsFile | None,
    today: dt.date,
    findings: Findings,
) -> EffectivePolicy:
    """Return the effective policy of a profile; what is wrong with it is added to `findings`."""
    above = list(organisation)
    reader = Reader(document, library, findings)
    reader.ids = {entry.id: 0 for entry in above}
    written = list(_written(reader, model))
    check_limits(model.limits, reader, ("limits",))
    _check_mode(model, reader, today)
    _check_public_web(model, written, reader)
    _check_denied_requests(written, above, reader)
    _check_expiry(written, reader, today)
    uses = list(_uses(written, document))
    check_uses(uses, credentials, findings)
    if model.accept is None or model.accept.own_keys is None:
        check_bare(list(_bare(written, reader)), uses, credentials, findings)
    sinks = list(_sinks(written, reader))
    return EffectivePolicy(
        profile=model.profile,
        owner=model.owner,
        mode=model.mode,
        observe_until=model.observe_until,
        entries=(*above, *sinks, *(made for one in written for made in one.entries)),
        limits=model.limits.resolved() if model.limits else EntryLimits(),
    )


def _written(reader: Reader, model: ProfileFile | OrganisationFile) -> Iterator[Written]:
    """Yield the entries in the order in which the file has them."""
    found: list[tuple[Effect, int, AnyEntry]] = []
    for effect in _EFFECTS:
        said: list[AnyEntry] = list(getattr(model, effect, ()))
        found += [(effect, index, entry) for index, entry in enumerate(said)]
    found.sort(key=lambda one: reader.document.place(one[0], one[1]))
    for effect, index, entry in found:
        yield Written(effect, index, entry, reader.read(effect, entry, (effect, index)))


def _check_mode(model: ProfileFile, reader: Reader, today: dt.date) -> None:
    if model.mode == "enforce":
        if model.observe_until is not None:
            hint = "remove it, or write `mode: observe`"
            reader.note(
                ("observe_until",), Code.OBSERVE, "`observe_until` without `mode: observe`", hint, key=True
            )
        return
    last = today + dt.timedelta(days=MOST_OBSERVE_DAYS)
    if model.observe_until is None:
        reader.note(
            ("mode",),
            Code.OBSERVE,
            "`mode: observe` needs an end",
            f"add `observe_until: {last}` or an earlier day",
        )
    elif model.observe_until > last:
        message = f"observing until {model.observe_until} is more than {MOST_OBSERVE_DAYS} days ahead"
        reader.note(("observe_until",), Code.OBSERVE, message, f"{last} is the latest day; renew it then")
    elif model.observe_until < today:
        message = f"observing ended on {model.observe_until}; the profile is enforced"
        reader.note(("observe_until",), Code.EXPIRED, message, "write `mode: enforce`")


def _check_public_web(model: ProfileFile, written: list[Written], reader: Reader) -> None:
    for one in written:
        if not isinstance(one.said, AllowEntry) or one.said.public_web is None:
            continue
        where = (one.effect, one.index)
        limits = one.said.limits.resolved() if one.said.limits else EntryLimits()
        missing = [key for key in ("requests", "new_hosts", "upload") if getattr(limits, key) is None]
        if missing:
            hint = "limits: {requests: 600/hour, new_hosts: 60/hour, upload: 5MB/day}"
            message = f"`public_web` needs limits for {', '.join(missing)}"
            reader.note((*where, "public_web"), Code.PUBLIC_WEB_LIMITS, message, hint, key=True)
        else:
            reader.note((*where, "public_web"), Code.COVERT_CAPACITY, _capacity(limits), key=True)
        mixed = next((other for other in written if _is_private(other)), None)
        if mixed is not None and (model.accept is None or model.accept.mixed_public is None):
            line = reader.document.place(mixed.effect, mixed.index).line
            message = f"`public_web` beside the credential or private range of line {line}"
            hint = "move one of them to another profile, or accept: {mixed-public: the reason}"
            reader.note((*where, "public_web"), Code.MIXED_PUBLIC, message, hint, key=True)


def _is_private(written: Written) -> bool:
    if isinstance(written.said, DenyEntry):
        return False
    return written.said.credential is not None or any(reaches_private(entry) for entry in written.entries)


def _capacity(limits: EntryLimits) -> str:
    """Say what can still leave a sandbox in the URLs of GET requests and in host names, at the most."""
    targets = min(_a_day(limits.requests) * _TARGET, _a_day(limits.upload))
    names = _a_day(limits.new_hosts) * _NAME
    return f"up to {targets:,} bytes a day can leave in URLs and {names:,} in host names"


def _a_day(rate: Rate | None) -> int:
    # A bucket begins full, so a day sees its amount and a day's refill.
    return rate.amount * _DAY // rate.seconds + (rate.amount if rate.seconds < _DAY else 0) if rate else 0


def _sinks(written: list[Written], reader: Reader) -> Iterator[EffectiveEntry]:
    """Yield the denial of the exfil-sinks service that comes with every public_web."""
    for one in written:
        if not isinstance(one.said, AllowEntry) or one.said.public_web is None:
            continue
        if EXFIL_SINKS not in reader.library.service_names:
            message = f"`public_web` needs services/{EXFIL_SINKS}.yaml, which it always denies"
            reader.note((one.effect, one.index, "public_web"), Code.UNKNOWN_SERVICE, message, key=True)
            return
        entry = DenyEntry.model_validate({"id": "public-web-exfil-sinks", "service": EXFIL_SINKS})
        yield from reader.read("deny", entry, (one.effect, one.index))
        return


def _check_denied_requests(written: list[Written], above: list[EffectiveEntry], reader: Reader) -> None:
    """A connection that is not read cannot carry some requests and not others: a deny of some would deny all."""
    opaque = [
        entry
        for one in written
        for entry in one.entries
        if one.effect != "deny" and entry.treatment != "inspect"
    ]
    index = HostIndex(opaque)
    for one in written:
        if not isinstance(one.said, DenyEntry):
            continue
        met = next((other for made in one.entries for other in _met(made, index)), None)
        if met is not None:
            message = f"these requests cannot be seen: {met.id!r} ({met.place}) is a {met.treatment}"
            where = (one.effect, one.index, "requests" if one.said.requests else "service")
            reader.note(where, Code.NOT_INSPECTED, message, "deny the host, or inspect it there", key=True)
    theirs = {other.place: made for made in above for other in _met(made, index)}
    for one in written:
        made = next((theirs[entry.place] for entry in one.entries if entry.place in theirs), None)
        if made is not None:
            message = f"the requests that {made.id!r} ({made.place}) denies cannot be seen in a {one.entries[0].treatment}"
            where = (
                one.effect,
                one.index,
                "treatment" if getattr(one.said, "treatment", None) else "service",
            )
            reader.note(where, Code.NOT_INSPECTED, message, "inspect it", key=True)


def _met(deny: EffectiveEntry, index: HostIndex) -> Iterator[EffectiveEntry]:
    if not deny.requests:
        return
    for pattern in patterns(deny.hosts):
        for other in index.meeting(pattern):
            if not deny.ports or set(deny.ports) & set(other.ports):
                yield other


def _check_expiry(written: list[Written], reader: Reader, today: dt.date) -> None:
    for one in written:
        if one.said.expires is not None and one.said.expires < today:
            message = f"expired on {one.said.expires}: the rule is as if it were not there"
            reader.note(
                (one.effect, one.index, "expires"), Code.EXPIRED, message, "renew it or remove the entry"
            )


def _uses(written: list[Written], document: Document) -> Iterator[Used]:
    for one in written:
        if not isinstance(one.said, PermittingEntry) or one.said.credential is None:
            continue
        place = document.place(one.effect, one.index, "credential")
        for entry in one.entries:
            if entry.credential is not None:  # a service keeps it from some of its hosts
                yield Used(entry, document.path, place)


def _bare(written: list[Written], reader: Reader) -> Iterator[Bare]:
    for one in written:
        if not isinstance(one.said, PermittingEntry) or one.said.credential is not None:
            continue
        service = reader.library.services.get(one.said.service or "")
        expects = service.model.service if service is not None and service.model.expects else None
        place = reader.document.place(one.effect, one.index)
        for entry in one.entries:
            yield Bare(entry, reader.document.path, place, expects)
