"""One accepted connection from its first byte to its end: learn the destination, judge, then hand on or refuse.

Every visit leaves exactly one `decision` record (layer connection), and an `end` record if it was allowed. It is denied
until the policy says otherwise; an exception anywhere ends it as `internal_error`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import traceback

from egressd.gate.connection import Services
from egressd.gate.door.entering import enter
from egressd.gate.door.entrance import TRANSPARENT, Entrance
from egressd.gate.door.passage import Passage
from egressd.gate.door.splice import reset_on_close
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.sandbox import Sandbox
from egressd.policy.reasons import Reason


class Visit:
    """The life of one accepted socket; `run` owns it."""

    def __init__(
        self, sock: socket.socket, sandbox: Sandbox, services: Services, entrance: Entrance = TRANSPARENT
    ) -> None:
        """Nothing is known of the connection but how it came in, and it is denied."""
        self._passage = Passage(
            sock, sandbox, services, entrance, on_written=lambda: self.rejudge(time.time())
        )
        self._cut: Reason | None = None
        self._task: asyncio.Task[None] | None = None

    def cut(self, reason: Reason) -> None:
        """End the visit at once, whatever it is doing."""
        self._cut = self._cut or reason
        if self._task is not None:
            self._task.cancel()

    def retire(self) -> None:
        """Go on: a connection is one thing, and who inspects its requests retires for itself."""

    def rejudge(self, now: float) -> None:
        """Cut what the rules no longer let pass."""
        if not self._passage.may_live(now):
            self.cut(Reason.POLICY_CHANGED)

    async def run(self) -> None:
        """Carry the connection to its end; never raises but for a cancellation that is not a cut."""
        passage = self._passage
        sandbox = passage.connection.sandbox
        self._task = asyncio.current_task()
        sandbox.live.add(self)
        over = sandbox.budget.connection(time.monotonic())
        try:
            if sandbox.revoked:
                passage.deny(Reason.REVOKED)
            elif over is not None:
                passage.deny(over.reason, over.limit)
            else:
                await enter(passage)
        except asyncio.CancelledError:
            passage.ended = self._cut or Reason.SHUTDOWN
            if self._cut is None:
                raise
        except AuditUnavailable:
            passage.ended = Reason.AUDIT_UNAVAILABLE
            passage.deny(Reason.AUDIT_UNAVAILABLE)
        except Exception:  # noqa: BLE001 -- law 1: denied, recorded, and the operator is told
            passage.ended = Reason.INTERNAL_ERROR
            traceback.print_exc(limit=8, file=sys.stderr)
        finally:
            self._close(admitted=over is None)

    def _close(self, *, admitted: bool) -> None:
        passage = self._passage
        sandbox = passage.connection.sandbox
        sandbox.live.discard(self)
        if admitted:
            sandbox.budget.release()
        sandbox.budget.leave(passage.connection.attempt_id)
        if not passage.recorded:
            passage.deny(passage.ended if passage.ended is not Reason.COMPLETED else Reason.INTERNAL_ERROR)
        if passage.allowed:
            passage.end()
        if not passage.handed_on:
            if not passage.said:
                reset_on_close(passage.sock)
            passage.sock.close()
