"""The worker's end of the journal: what an attempt must do before its first byte leaves."""

from __future__ import annotations

from typing import Protocol

from egressd.journal.record import Record


class AuditUnavailable(Exception):
    """The record could not be made durable; whatever it would have allowed is denied (`audit_unavailable`)."""


class Recorder(Protocol):
    """Where records go. Control writes them; the worker only hands them over."""

    def put(self, record: Record) -> None:
        """Hand over a record that lets nothing out (a denial, an end); never blocks, never raises."""

    async def commit(self, record: Record) -> None:
        """Hand over a record and return once it is written; raises AuditUnavailable when it could not be."""
