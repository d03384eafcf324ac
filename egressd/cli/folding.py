"""Folding: the decision on an attempt and its end, which stand far apart in a journal, as one record."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from egressd.journal.reader import Line, Wanted

_WAITING_LIMIT = 20_000
"""Records behind an attempt that has not ended after which it is shown as it is."""
_LASTING = ("connection", "request")
_OF_THE_END = ("status", "upstream", "bytes_up", "bytes_down", "duration_ms", "alpn")
ENDED = "ended"
"""The field that has the end's reason in a folded record; no record of a journal has it."""


def folded(lines: Iterable[Line], wanted: Wanted) -> Iterator[Mapping[str, Any]]:
    """Yield the wanted records in order, each end within its decision; an end whose decision is not there stands alone.

    `lines` are those of the wanted records and all ends; an end is wanted with its decision, or by itself.
    """
    queue: deque[dict[str, Any]] = deque()
    waiting: dict[str, dict[str, Any]] = {}
    refused: OrderedDict[str, None] = (
        OrderedDict()
    )  # what is refused is over; some of it has an end all the same
    for line in lines:
        fields = line.fields
        attempt = fields.get("attempt_id")
        is_end = fields.get("event") == "end"
        if is_end and isinstance(attempt, str) and (begun := waiting.pop(attempt, None)) is not None:
            begun.update({name: fields[name] for name in _OF_THE_END if name in fields})
            begun[ENDED] = fields.get("reason")
        elif is_end and isinstance(attempt, str) and attempt in refused:
            del refused[attempt]
        elif wanted.wants(fields):
            record = {name: value for name, value in fields.items() if name != ENDED}
            queue.append(record)
            if isinstance(attempt, str) and _will_end(fields):
                waiting[attempt] = record
            elif isinstance(attempt, str) and fields.get("event") == "decision":
                refused[attempt] = None
                if len(refused) > _WAITING_LIMIT:
                    refused.popitem(last=False)
        while queue and (len(queue) > _WAITING_LIMIT or not _is_waiting(queue[0], waiting)):
            waiting.pop(str(queue[0].get("attempt_id")), None)
            yield queue.popleft()
    yield from queue


def _will_end(fields: Mapping[str, Any]) -> bool:
    return (
        fields.get("event") == "decision"
        and fields.get("verdict") == "allow"
        and fields.get("layer") in _LASTING
    )


def _is_waiting(record: Mapping[str, Any], waiting: Mapping[str, Mapping[str, Any]]) -> bool:
    return waiting.get(str(record.get("attempt_id"))) is record
