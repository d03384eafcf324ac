"""The kernel's own counts held against the records: what was sent and is in no record becomes a counted `lost` record (law 8).

A process can die with what it accepted; the packet rules cannot forget. So what a killed worker took with it, what stood in
a backlog that nobody accepted from any more, and what NFLOG could not deliver are all found here, when the sandbox has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from egressd.journal.record import Layer, Record, new_id
from egressd.policy.reasons import Reason
from egressd.wiring.drops import Dropped
from egressd.wiring.ruleset import Counted

Kind = Literal["connections", "dns_connections", "dns_datagrams", "packets"]


@dataclass(frozen=True, slots=True)
class _Loss:
    """How one kind of loss is written down."""

    layer: Layer
    channel: str | None
    detail: str


_LOSSES: Final[dict[Kind, _Loss]] = {
    "connections": _Loss("connection", None, "connections that were opened and never judged"),
    "dns_connections": _Loss("dns", "dns-tcp", "connections to the resolver that left no record"),
    "dns_datagrams": _Loss("dns", "dns-udp", "queries that were sent and never judged"),
    "packets": _Loss("packet", "nflog", "packets that the firewall refused and NFLOG did not deliver"),
}


class Found:
    """What the records of each sandbox account for, by the kinds that the kernel counts."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[Kind]] = {}

    def begin(self, sandbox: str) -> None:
        """Count for this sandbox from now on; records of others are ignored."""
        self._found[sandbox] = Counter()

    def feed(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Count records of a worker, once they were admitted."""
        for record in records:
            found = self._found.get(record["sandbox"])
            kind = _kind(record)
            if found is not None and kind is not None:
                found[kind] += record.get("count") or 1

    def end(self, sandbox: str) -> Mapping[Kind, int]:
        """Return what was counted and forget the sandbox."""
        return self._found.pop(sandbox, Counter())


def _kind(record: Mapping[str, Any]) -> Kind | None:
    layer = record.get("layer")
    if record.get("event") not in {"decision", "lost"}:
        return None
    if layer == "connection":
        return "connections"
    if layer == "packet":
        return "packets"
    if layer == "dns":
        if record.get("channel") == "dns-udp":
            return "dns_datagrams"
        # Only the first record of a connection stands for it: how many queries came over one the kernel does not know.
        return None if record.get("further") else "dns_connections"
    return None


def losses(
    sandbox: str, counted: Counted | Dropped, found: Mapping[Kind, int], reason: Reason
) -> list[Record]:
    """Return a `lost` record for each kind of which the kernel counted more than the records account for.

    Of what it only dropped, all is missing.

    `reason` is why attempts may be missing; packets are refused whatever became of their records.
    """
    records = []
    for kind, loss in _LOSSES.items():
        accounted = 0 if isinstance(counted, Dropped) else found.get(kind, 0)
        missing = getattr(counted, kind, 0) - accounted
        if missing <= 0:
            continue
        attempt_id = new_id()
        why = Reason.PROTOCOL_NOT_ALLOWED if kind == "packets" else reason
        records.append(
            Record(
                event="lost",
                sandbox=sandbox,
                attempt_id=attempt_id,
                root_id=attempt_id,
                layer=loss.layer,
                channel=loss.channel,
                count=missing,
                reason=why.value,
                detail=loss.detail,
            )
        )
    return records
