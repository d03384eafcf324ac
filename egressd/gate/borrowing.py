"""How a worker asks control for a lease: one ticket a question, its answer beside a sealed payload."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from pydantic import ValidationError

from egressd.credentials.lease import Lease
from egressd.gate.channel import unsealed
from egressd.gate.leases import Asked
from egressd.gate.messages import Ask, Lent


class Borrowing:
    """The questions of a worker that are open. How long one may wait for its answer is the caller's."""

    def __init__(self) -> None:
        """Nothing can be asked before `attach`."""
        self._send: Callable[[Ask], None] | None = None
        self._open: dict[int, asyncio.Future[Lease | None]] = {}
        self._tickets = itertools.count(1)

    def attach(self, send: Callable[[Ask], None]) -> None:
        """Ask by this from now on."""
        self._send = send

    async def ask(self, asked: Asked) -> Lease | None:
        """Return the lease that control gives for a request, None where it gives none; raises ChannelBroken, ValidationError."""
        if self._send is None:
            return None
        ticket = next(self._tickets)
        answer = self._open[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._send(
                Ask.model_validate(
                    {
                        "ticket": ticket,
                        "sandbox": asked.sandbox,
                        "credential": asked.credential,
                        "method": asked.method,
                        "scheme": asked.scheme,
                        "host": asked.host,
                        "port": asked.port,
                        "target": asked.target,
                        "upgrade": asked.upgrade,
                    }
                )
            )
            lease: Lease | None = await answer
            return lease
        finally:
            self._open.pop(ticket, None)

    def lent(self, message: Lent, descriptors: list[int]) -> None:
        """Hear an answer; the descriptors are taken over. Raises ValueError where there is not exactly the one it speaks of."""
        if len(descriptors) != int(message.ok):
            raise ValueError("lent")
        lease: Lease | None = None
        if message.ok:
            try:
                lease = Lease.model_validate_json(unsealed(descriptors.pop()))
            except ValidationError:  # its text could hold a part of it
                raise ValueError("lent") from None
        answer = self._open.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(lease)
