"""What a sandbox was refused lately, kept in its worker for the sandbox itself to read.

It is filled on the way to the journal, by a recorder that belongs to one sandbox alone, so nothing of another can get in.
What is kept is what the sandbox sent itself and the words it was told: no address, no detail, no rule's text (law 10).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address

from egressd.gate.recorder import Recorder
from egressd.journal.record import Record
from egressd.policy.reasons import Reason

KEPT = 100
"""Different refusals of one sandbox; the one longest not repeated goes first."""

PROBE = "egressd-probe-"
"""How names begin that control looks up from inside to prove a start: no refusals that the sandbox met."""

_LONGEST = 300
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_DENYING = frozenset({"deny", "ask"})
_CUT = frozenset({Reason.POLICY_CHANGED.value})
"""Ends without a verdict that are refusals all the same: what was open may no longer be."""


@dataclass(frozen=True, slots=True)
class Denial:
    """One refusal, and how often it was repeated; `time` (RFC 3339, UTC) and `attempt_id` are those of the latest."""

    time: str
    layer: str
    what: str
    reason: Reason
    attempt_id: str
    rule: str | None = None
    place: str | None = None
    count: int = 1


class Denials:
    """The last `KEPT` different refusals of one sandbox."""

    def __init__(self) -> None:
        self._by_kind: OrderedDict[tuple[str, str, Reason], Denial] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_kind)

    def note(self, record: Record) -> None:
        """Keep the record if it tells of a refusal; total."""
        if record.event == "decision":
            refused = record.verdict in _DENYING
        else:
            refused = record.event == "end" and (record.verdict in _DENYING or record.reason in _CUT)
        if record.layer == "dns" and (record.host or "").startswith(PROBE):
            return
        if not refused or record.reason is None or record.reason not in Reason:
            return
        denial = Denial(
            time=record.time,
            layer=record.layer or "",
            what=_what(record),
            reason=Reason(record.reason),
            attempt_id=record.attempt_id,
            rule=record.rule,
            place=record.place,
            count=record.count or 1,
        )
        kind = denial.layer, denial.what, denial.reason
        before = self._by_kind.pop(kind, None)
        self._by_kind[kind] = denial if before is None else replace(denial, count=before.count + denial.count)
        if len(self._by_kind) > KEPT:
            self._by_kind.popitem(last=False)

    def latest(self) -> Iterator[Denial]:
        """Yield them, the latest first."""
        return reversed(self._by_kind.values())


class Remembering:
    """The recorder of one sandbox: hands records on, and keeps the refusals among them in `denials`."""

    def __init__(self, recorder: Recorder, denials: Denials) -> None:
        self._recorder = recorder
        self._denials = denials

    def put(self, record: Record) -> None:
        """See `Recorder.put`."""
        self._denials.note(record)
        self._recorder.put(record)

    async def commit(self, record: Record) -> None:
        """See `Recorder.commit`."""
        self._denials.note(record)
        await self._recorder.commit(record)


def _what(record: Record) -> str:
    """Return in one line what was tried, in printable ASCII."""
    host = _host(record)
    if record.layer == "dns":
        text = " ".join(filter(None, ("DNS", record.qtype, host)))
    elif record.layer == "packet":
        port = f" to port {record.port}" if record.port is not None else ""
        text = f"{record.protocol or 'unknown'} packet{port}"
    elif record.layer == "request":
        query = f"?{record.query}" if record.query else ""
        text = f"{record.method or 'a request'} {record.scheme}://{_with_port(host, record)}{record.path or ''}{query}"
    else:
        text = f"connection to {host or 'nowhere'}" + (f" port {record.port}" if record.port else "")
    text = _UNPRINTABLE.sub("?", text[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _with_port(host: str, record: Record) -> str:
    usual = {"https": 443, "http": 80}.get(record.scheme or "")
    # What was sent in place of a host stands as it is, with whatever port it has of its own.
    known = record.host is not None and record.port not in (None, usual)
    return f"{host}:{record.port}" if known else host


def _host(record: Record) -> str:
    """The name; a bare address is only called one, as on the pages that refuse it."""
    host = record.host or record.host_raw or ""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return host
    return "(a bare address)"
