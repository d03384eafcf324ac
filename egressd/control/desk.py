"""The desk: where workers' questions come in and answers go out: for leases, each beside a sealed payload, and for approvals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

from egressd.control.lending import Lending
from egressd.control.sandboxes import SandboxState
from egressd.control.voice import say
from egressd.credentials.lease import Lease
from egressd.gate.channel import Channel, ChannelBroken, sealed
from egressd.gate.messages import Ask, Lent, Petition, Petitioned, Plea, Redeem, Redeemed

MOST: Final = 256
"""Questions that are open at a time; further ones are refused at once."""


class Approvals(Protocol):
    """Who puts to people what workers are asked for."""

    async def hear(self, message: Petition | Plea | Redeem, sandbox: SandboxState) -> Petitioned | Redeemed:
        """Answer a worker that carries the sandbox. Total."""


class Desk:
    """Answers every question once: with a lease, or that there is none; with what people say, or that nobody is asked."""

    def __init__(self, lending: Lending | None, approvals: Approvals | None = None) -> None:
        """Without `lending` nobody gets anything; without `approvals` nobody is asked."""
        self._lending = lending
        self._approvals = approvals
        self._open = 0
        self._put = 0

    async def answer(
        self, channel: Channel[Any], message: Ask, carried: Callable[[], SandboxState | None]
    ) -> None:
        """Answer a worker on its channel; `carried` says whether the sandbox is, and still is, one that it carries."""
        lease: Lease | None = None
        sandbox = carried()
        if sandbox is not None and self._lending is not None and self._open < MOST:
            self._open += 1
            try:
                lease = await self._lending.lend(sandbox, message)
            finally:
                self._open -= 1
            if carried() is not sandbox:  # it may have ended while its source was asked
                lease = None
        try:
            _hand_over(channel, message.ticket, lease)
        except OSError as error:  # it waits in vain, and says that it has none
            say(f"a lease could not be handed over: {error.strerror}")

    async def put(
        self,
        channel: Channel[Any],
        message: Petition | Plea | Redeem,
        carried: Callable[[], SandboxState | None],
    ) -> None:
        """Answer a worker that asks for people's approval, or to spend it; `carried` as for `answer`."""
        answer: Petitioned | Redeemed = (
            Redeemed(ticket=message.ticket, ok=False)
            if isinstance(message, Redeem)
            else Petitioned(ticket=message.ticket, state="refused", detail="nobody can be asked now")
        )
        sandbox = carried()
        if sandbox is not None and self._approvals is not None and self._put < MOST:
            self._put += 1
            try:
                answer = await self._approvals.hear(message, sandbox)
            finally:
                self._put -= 1
        if message.ticket:
            with contextlib.suppress(
                ChannelBroken
            ):  # it has died, or waits in vain and says that there is none
                channel.send(answer)

    async def end(self, sandbox_id: str) -> None:
        """Take back everything lent to a sandbox; returns within a few seconds."""
        if self._lending is not None:
            await self._lending.end(sandbox_id)


def _hand_over(channel: Channel[Any], ticket: int, lease: Lease | None) -> None:
    """Send an answer; ChannelBroken: who asked has died meanwhile. Raises OSError where there are no descriptors left."""
    if lease is None:
        with contextlib.suppress(ChannelBroken):
            channel.send(Lent(ticket=ticket, ok=False))
        return
    payload = sealed(lease.model_dump_json().encode())
    try:
        with contextlib.suppress(ChannelBroken):
            channel.send(Lent(ticket=ticket, ok=True), (payload,))
    finally:
        os.close(payload)
