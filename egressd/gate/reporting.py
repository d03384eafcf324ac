"""The recorder over the channel: records travel in batches, and an allow waits until control has written its batch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from egressd.gate.channel import MESSAGE_LIMIT, Channel, ChannelBroken
from egressd.gate.messages import Records, ToWorker
from egressd.gate.recorder import AuditUnavailable
from egressd.journal.record import Record, new_id
from egressd.policy.reasons import Reason

_BATCH_BYTES = MESSAGE_LIMIT - 1024
_RECORD_BYTES = 16 * 1024
_WAITING = 100_000
"""Most records not yet acknowledged; past it a flood is being written faster than the journal takes it, and allows are denied."""


class ChannelRecorder:
    """Implements `Recorder`; one loop turn's records make one message, but for a refused request's, which goes at once."""

    def __init__(self, timeout: float = 5.0) -> None:
        """Nothing can be recorded before `attach`; a commit that is not acknowledged within `timeout` seconds has failed."""
        self._channel: Channel[Any] | None = None
        self._timeout = timeout
        self._pending: list[tuple[dict[str, Any], asyncio.Future[None] | None]] = []
        self._flushing = False
        self._batch = 0
        self._waiting: dict[int, tuple[int, list[asyncio.Future[None]]]] = {}
        self._outstanding = 0

    def attach(self, channel: Channel[ToWorker]) -> None:
        """Send by this channel from now on."""
        self._channel = channel

    def put(self, record: Record) -> None:
        """See `Recorder.put`."""
        self._add(record, None)
        if record.layer == "request" and record.event == "decision":
            # Its answer goes out next. Were this process killed between the two, nobody else would know of the request:
            # the kernel counts connections and datagrams, and not what is inside of TLS.
            self.flush()
            if self._channel is not None:
                self._channel.press()

    async def commit(self, record: Record) -> None:
        """See `Recorder.commit`."""
        if self._outstanding >= _WAITING:
            raise AuditUnavailable("too many records wait for the journal")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._add(record, written)
        try:
            async with asyncio.timeout(self._timeout):
                await written
        except TimeoutError:
            raise AuditUnavailable("the journal did not answer in time") from None

    def written(self, batch: int, *, ok: bool) -> None:
        """Control's answer for a batch."""
        count, futures = self._waiting.pop(batch, (0, []))
        self._outstanding -= count
        for future in futures:
            if future.done():
                continue
            if ok:
                future.set_result(None)
            else:
                future.set_exception(AuditUnavailable("the journal could not be written"))

    def _add(self, record: Record, written: asyncio.Future[None] | None) -> None:
        self._pending.append((record.as_dict(), written))
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._turn_ends)

    def _turn_ends(self) -> None:
        self._flushing = False  # first: whatever becomes of this turn's records, the next turn's are sent
        self.flush()

    def flush(self) -> None:
        """Send what is waiting now; what must be read before another message is flushed before it."""
        pending, self._pending = self._pending, []
        batch: list[dict[str, Any]] = []
        futures: list[asyncio.Future[None]] = []
        size = 0
        for fields, written in pending:
            try:
                fields, length = _fitting(fields)
            except (
                TypeError,
                ValueError,
            ):  # no record at all: it alone is not written, and nothing goes by it
                if written is not None and not written.done():
                    written.set_exception(AuditUnavailable("the record cannot be written"))
                fields, length = _fitting(_unfit(fields))
                written = None
            if batch and size + length > _BATCH_BYTES:
                self._send(batch, futures)
                batch, futures, size = [], [], 0
            batch.append(fields)
            size += length
            if written is not None:
                futures.append(written)
        if batch:
            self._send(batch, futures)

    def _send(self, records: list[dict[str, Any]], futures: list[asyncio.Future[None]]) -> None:
        self._batch += 1
        self._waiting[self._batch] = (len(records), futures)
        self._outstanding += len(records)
        try:
            if self._channel is None:
                raise ChannelBroken("no channel")
            self._channel.send(Records(batch=self._batch, records=tuple(records)))
        except ChannelBroken:
            self.written(self._batch, ok=False)


def _unfit(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a record in the place of one that is no JSON."""
    attempt = new_id()
    return Record(
        event="lost",
        sandbox=str(fields["sandbox"]),
        attempt_id=attempt,
        root_id=attempt,
        reason=Reason.INTERNAL_ERROR.value,
        count=1,
        detail="records that were not fit to be written",
    ).as_dict()


def _fitting(fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return a record that fits and its length; raises TypeError or ValueError for what is no JSON."""
    length = len(json.dumps(fields)) + 1
    if length > _RECORD_BYTES:  # fields are clipped one by one; only many labels can come here
        fields = {name: value for name, value in fields.items() if name != "labels"}
        length = len(json.dumps(fields)) + 1
    return fields, length
