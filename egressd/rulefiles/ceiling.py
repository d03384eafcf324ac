"""The organisation's ceiling: the most that any profile may allow. What goes beyond keeps the rules from loading.

It is held at every load, against every allow and ask of every profile, wherever the profile has them from. Its limits are put on
every profile, also on one that says nothing of limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_network

from egressd.policy.effective import EffectiveEntry, EntryLimits
from egressd.policy.model import Ceiling, OrganisationFile, PermittingEntry
from egressd.rulefiles.document import Document
from egressd.rulefiles.entries import Library, Reader, check_limits
from egressd.rulefiles.narrowing import Envelope, Network, is_tighter, lanes, network_within, tightest
from egressd.rulefiles.networks import is_public, read_network
from egressd.rulefiles.problems import Code, Findings
from egressd.rulefiles.written import Written

_NOT_HERE = ("id", "credential", "limits", "expires", "mode", "observe_until", "owner", "ticket")
_CEILING = "ceiling"


@dataclass(frozen=True, slots=True)
class Top:
    """A ceiling that has been read, with its places."""

    model: Ceiling
    document: Document
    envelope: Envelope | None
    networks: tuple[Network, ...]
    limits: EntryLimits

    def line(self, key: str) -> str:
        """Return `file:line` of one of its keys."""
        return f"{self.document.path}:{self.document.key_place(_CEILING, key).line}"


def read_ceiling(
    model: OrganisationFile, document: Document, library: Library, findings: Findings
) -> Top | None:
    """Return the organisation's ceiling, None where it has none; problems are added to `findings`."""
    ceiling = model.ceiling
    if ceiling is None:
        return None
    reader = Reader(document, library, findings, origin="organisation")
    entries: list[EffectiveEntry] = []
    for index, entry in enumerate(ceiling.allow or ()):
        where = (_CEILING, "allow", index)
        for key in _NOT_HERE:
            if getattr(entry, key) is not None:
                message = f"`{key}` means nothing in a ceiling"
                reader.note((*where, key), Code.NOT_TOGETHER, message, "remove it", key=True)
        reader.ids = {}  # nobody names a part of a ceiling, so two may come to the same id
        entries += reader.read("allow", entry, where)
    networks = [
        read_network(text, document.path, document.place(_CEILING, "addresses", index), findings)
        for index, text in enumerate(ceiling.addresses or ())
    ]
    check_limits(ceiling.limits, reader, (_CEILING, "limits"))
    if not ceiling.model_fields_set:
        hint = "an empty one would not say what it means; remove the key"
        reader.note((_CEILING,), Code.EMPTY_LIST, "the ceiling is empty", hint, key=True)
    limits = ceiling.limits.resolved() if ceiling.limits else EntryLimits()
    envelope = Envelope(entries) if ceiling.allow is not None else None
    return Top(ceiling, document, envelope, tuple(filter(None, networks)), limits)


def check_ceiling(top: Top, written: Iterable[Written]) -> None:
    """Add a problem for every rule of a profile that goes beyond the ceiling."""
    for one in written:
        if not isinstance(one.said, PermittingEntry):
            continue
        found = next(filter(None, (excess(top, entry) for entry in one.entries)), None)
        if found is not None:
            what, key = found
            message = f"{what} is beyond the ceiling ({top.line(key)})"
            one.note(None, Code.OVER_CEILING, message, "no profile may allow more than the organisation does")


def bound_limits(top: Top, limits: EntryLimits, reader: Reader) -> EntryLimits:
    """Return a profile's limits with the ceiling's beside them; one that is wider is a problem."""
    bound = tightest(limits, top.limits)
    wide = is_tighter(bound, top.limits)
    if wide is not None:
        message = f"the limit for {wide} is beyond the ceiling ({top.line('limits')})"
        reader.note(
            ("limits", wide), Code.OVER_CEILING, message, "both its amount and its rate are at most that"
        )
    return bound


def excess(top: Top, entry: EffectiveEntry) -> tuple[str, str] | None:
    """Return what goes beyond, and which key of the ceiling says so."""
    model = top.model
    if model.treatments is not None and entry.treatment not in model.treatments:
        return f"`treatment: {entry.treatment}`", "treatments"
    for scheme, port in lanes(entry):
        if model.ports is not None and port not in model.ports:
            return f"port {port}", "ports"
        if model.schemes is not None and scheme != "tcp" and scheme not in model.schemes:
            return scheme, "schemes"
    if model.addresses is not None:
        for text in entry.addresses:
            network = ip_network(text)
            if not is_public(network) and not any(network_within(network, one) for one in top.networks):
                return text, "addresses"
    if top.envelope is not None and (what := top.envelope.excess(entry)) is not None:
        return what, "allow"
    return None
