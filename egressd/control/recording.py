"""What workers and control record: into the journal, and into what must be known of it later.

Control alone writes the journal. A batch is acknowledged once it is there, or said not to be; what waited for it may not go on
then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from egressd.control.reconciliation import Found, Kind
from egressd.control.sandboxes import SandboxState
from egressd.control.voice import say
from egressd.journal.alerts import Alerts
from egressd.journal.ledger import Ledger
from egressd.journal.record import Event, Record, new_id
from egressd.journal.writer import BadRecord, Journal
from egressd.policy.reasons import Reason

_COMPLAIN_AGAIN = 10.0


class Recording:
    """The journal, the ends that are owed, and what the records of each sandbox account for."""

    def __init__(self, journal: Journal) -> None:
        """Nothing is written yet."""
        self._journal = journal
        self._ledgers: dict[str, Ledger] = {}
        self._found = Found()
        self._complained = 0.0
        self._alerts = Alerts()

    @property
    def may_block(self) -> bool:
        """Whether a write can take long: a pipe's reader may be slow, a disk that is waited for always is."""
        return self._journal.may_block

    def begin(self, sandbox_id: str) -> None:
        """Count the records of this sandbox from now on."""
        self._found.begin(sandbox_id)

    def recorded(self, sandbox_id: str) -> Mapping[Kind, int]:
        """Return what the records of a sandbox account for, once nothing more is written of it; later nothing is known of it."""
        return self._found.end(sandbox_id)

    def append(self, records: Sequence[dict[str, Any]], allowed: Collection[str], worker: str) -> bool:
        """Write a worker's batch; returns whether it is in the journal. Raises BadRecord for what no sound worker sends."""
        try:
            self._journal.append(records, allowed_sandboxes=allowed)
        except BadRecord:
            raise
        except Exception as error:  # noqa: BLE001 -- law 1: whatever fails, the batch is not in the journal
            return self._taken(records, error, worker)
        return self._taken(records, None, worker)

    async def commit(self, records: Sequence[dict[str, Any]], allowed: Collection[str], worker: str) -> bool:
        """Do as `append` does without holding the loop up."""
        try:
            await self._journal.commit(records, allowed_sandboxes=allowed)
        except asyncio.CancelledError:
            self._found.feed(records)  # the journal counts them as lost itself
            raise
        except BadRecord:
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            return self._taken(records, error, worker)
        return self._taken(records, None, worker)

    def _taken(self, records: Sequence[dict[str, Any]], error: Exception | None, worker: str) -> bool:
        try:
            self._found.feed(records)  # what the journal could not take it counts as lost itself
            if error is None:
                self._ledgers.setdefault(worker, Ledger()).feed(records)
                self.write(self._alerts.feed(records, time.time()))
        except Exception as failure:  # noqa: BLE001 -- what cannot be ended later may not begin
            error = failure
        if error is not None:
            self._complain(error)
        return error is None

    def _complain(self, error: Exception) -> None:
        """Say once in a while that the journal fails; everything that would be allowed is denied meanwhile."""
        if time.monotonic() - self._complained > _COMPLAIN_AGAIN:
            self._complained = time.monotonic()
            say(f"the journal cannot be written, so nothing is let out: {error}")

    # control's own records

    def end_all(self, sandbox_ids: set[str], reason: Reason) -> None:
        """Write the ends that these sandboxes' flows still owe, whichever worker had them."""
        for ledger in self._ledgers.values():
            self.write(ledger.close_all(sandbox_ids, reason))

    def end_worker(self, worker: str, reason: Reason) -> None:
        """Write the ends that a worker owes that is gone; nothing more comes of it."""
        ledger = self._ledgers.pop(worker, None)
        if ledger is not None:
            self.write(ledger.close_all(ledger.sandboxes, reason))

    def note(self, event: Event, sandbox: SandboxState, detail: str) -> None:
        """Write what happened to a sandbox."""
        attempt_id = new_id()
        record = Record(
            event=event,
            sandbox=sandbox.id,
            attempt_id=attempt_id,
            root_id=attempt_id,
            profile=sandbox.profile,
            policy=sandbox.policy.digest(),
            labels=sandbox.labels or None,
            traceparent=sandbox.traceparent,
            source=sandbox.source,
            detail=detail,
        )
        self.write([record.as_dict()])

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Write control's own records; a journal that cannot take them is complained of, never fatal."""
        if records:
            self.keep(records)

    def keep(self, records: Sequence[dict[str, Any]]) -> bool:
        """Write control's own records; returns whether they are in the journal, for what may not happen where they are not."""
        try:
            self._journal.append(records)
        except Exception as error:  # noqa: BLE001 -- whoever wrote them decides by what comes back
            self._complain(error)
            return False
        return True
