"""The kernel's table of connections (conntrack): where it is full, packets are dropped before anybody judges them.

The kernel counts that for the network namespace as a whole and does not say whose packets they were. A sandbox of the
namespace wiring has a table of its own; those behind a gateway, sidecars and what egressd dials share the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from egressd.journal.record import NOBODY, Record, new_id
from egressd.policy.reasons import Reason

STATISTICS: Final = Path("/proc/net/stat/nf_conntrack")
"""A line of names, then one of hexadecimal numbers for each processor (net/netfilter/nf_conntrack_standalone.c)."""


def dropped(text: str) -> int:
    """Return how many packets were dropped because no entry could be made; 0 for what is no such table."""
    names, *lines = [line.split() for line in text.splitlines()] or [[]]
    if "drop" not in names:
        return 0
    column = names.index("drop")
    try:
        return sum(int(line[column], 16) for line in lines)
    except (ValueError, IndexError):
        return 0


class FlowTable:
    """Looks whether the table of this namespace was full since the last look."""

    def __init__(self, read: Callable[[], str] | None = None) -> None:
        """What was dropped before is nobody's."""
        self._read = read or STATISTICS.read_text
        self._seen = self._now()

    def look(self) -> Record | None:
        """Return a record of what was dropped since the last look, None where nothing was. Never raises."""
        now = self._now()
        lost, self._seen = now - self._seen, now
        if lost <= 0:  # fewer: a processor was taken away, or the module was loaded anew
            return None
        attempt = new_id()
        return Record(
            event="lost",
            sandbox=NOBODY,
            attempt_id=attempt,
            root_id=attempt,
            layer="packet",
            reason=Reason.CONNTRACK_FULL.value,
            count=lost,
            detail="packets that the kernel dropped for want of room in its table of connections",
        )

    def _now(self) -> int:
        try:
            return dropped(self._read())
        except (OSError, ValueError):  # no conntrack here
            return 0
