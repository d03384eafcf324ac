"""The ledger: which attempts were let out and have not ended; control ends them for a worker that died."""

from __future__ import annotations

import datetime as dt
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from egressd.journal.record import Record, new_id, timestamp
from egressd.policy.reasons import Reason

OPEN_LIMIT = 8192
"""Attempts kept for one sandbox, well above what its budget of connections lets it have open."""

_LASTING = frozenset({"connection", "request"})
_CARRIED = (
    "sandbox",
    "attempt_id",
    "root_id",
    "layer",
    "channel",
    "treatment",
    "profile",
    "policy",
    "labels",
    "traceparent",
    "host",
    "address",
    "port",
    "scheme",
    "sni",
    "method",
)
"""What an `end` repeats of its decision, so that it can be read and filtered without it."""


class Ledger:
    """The open attempts of every sandbox; fed with what was written, in that order.

    Bounded for each sandbox by itself: past `limit` its oldest attempt is forgotten and counted, so that one
    sandbox's flood never costs another its `end` records.
    """

    def __init__(self, limit: int = OPEN_LIMIT) -> None:
        self._limit = limit
        self._open: dict[str, OrderedDict[str, dict[str, Any]]] = {}
        self._forgotten: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many attempts are open."""
        return sum(map(len, self._open.values()))

    @property
    def sandboxes(self) -> frozenset[str]:
        """The sandboxes with open attempts, or with some that were forgotten."""
        return frozenset((*self._open, *self._forgotten))

    def feed(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Note records that were written: an allowed connection or request opens, an `end` closes."""
        for record in records:
            event = record.get("event")
            if event == "end":
                self._close(record)
            elif event == "decision" and record.get("verdict") == "allow" and record.get("layer") in _LASTING:
                self._enter(record)

    def close_all(
        self, sandboxes: Collection[str], reason: Reason, *, now: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the `end` records that the sandboxes' open attempts lack, oldest first, and forget them.

        How many bytes went is not known and left out. What was forgotten for want of room becomes a `lost`
        record. `now` is Unix seconds, the present by default.
        """
        moment = time.time() if now is None else now
        records: list[dict[str, Any]] = []
        for sandbox in sorted(sandboxes):
            for opened in self._open.pop(sandbox, {}).values():
                records.append(_end(opened, reason, moment))
            forgotten = self._forgotten.pop(sandbox, 0)
            if forgotten:
                records.append(_lost(sandbox, forgotten, reason, moment))
        return records

    def _enter(self, record: Mapping[str, Any]) -> None:
        sandbox = record["sandbox"]
        attempts = self._open.setdefault(sandbox, OrderedDict())
        kept = {name: record[name] for name in _CARRIED if name in record}
        attempts[record["attempt_id"]] = kept | {"time": record.get("time")}
        if len(attempts) > self._limit:
            attempts.popitem(last=False)
            self._forgotten[sandbox] = self._forgotten.get(sandbox, 0) + 1

    def _close(self, record: Mapping[str, Any]) -> None:
        attempts = self._open.get(record["sandbox"])
        if attempts is None:
            return
        attempts.pop(record["attempt_id"], None)
        if not attempts and record["sandbox"] not in self._forgotten:
            del self._open[record["sandbox"]]


def _end(opened: dict[str, Any], reason: Reason, now: float) -> dict[str, Any]:
    began = opened.pop("time")
    record = Record(event="end", reason=reason.value, time=timestamp(now), **opened)
    record.duration_ms = _milliseconds_since(began, now)
    return record.as_dict()


def _lost(sandbox: str, count: int, reason: Reason, now: float) -> dict[str, Any]:
    attempt = new_id()
    return Record(
        event="lost",
        sandbox=sandbox,
        attempt_id=attempt,
        root_id=attempt,
        reason=reason.value,
        count=count,
        detail="ends of attempts that were too many to be kept",
        time=timestamp(now),
    ).as_dict()


def _milliseconds_since(began: Any, now: float) -> float | None:
    try:
        then = dt.datetime.fromisoformat(began).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None  # a worker's word; control may have written its own time instead
    return round(max(0.0, now - then) * 1000, 3)
