"""How a worker asks control for people's approval: one ticket a question. Whatever goes wrong is no approval.

Control judges every question by its own copy of the rules, and control alone gives grants; what a worker decides is only
whether it is worth asking. A sandbox's questions are few at a time and few a minute: past that nobody is asked.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from pydantic import ValidationError

from egressd.gate.buckets import TokenBucket
from egressd.gate.channel import ChannelBroken
from egressd.gate.messages import Petition, Petitioned, Plea, Redeem, Redeemed
from egressd.policy.attempt import ConnectionAttempt, RequestAttempt
from egressd.policy.grants import WEBSOCKET
from egressd.policy.names import format_host

TIMEOUT: Final = 3.0
"""Seconds that control may take to answer."""
MOST_OPEN: Final = 32
"""Questions of one sandbox that are open at a time, and requests of it that are held."""
MET: Final = (60, 60.0)
"""Refused requests of a sandbox that are put to people, and in how many seconds: most repeat what waits already."""
PLEAS: Final = (6, 60.0)
"""Requests for access that a sandbox may make itself, and in how many seconds."""
_MOST_SANDBOXES: Final = 100_000

type _Question = Petition | Plea | Redeem


class Asking:
    """The questions of a worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing can be asked before `attach`."""
        self._clock = clock
        self._send: Callable[[_Question], None] | None = None
        self._open: dict[int, asyncio.Future[Petitioned | Redeemed]] = {}
        self._busy: Counter[str] = Counter()
        self._buckets: dict[tuple[str, bool], TokenBucket] = {}
        self._moved: dict[str, asyncio.Event] = {}
        self._tickets = itertools.count(1)

    def attach(self, send: Callable[[_Question], None]) -> None:
        """Ask by this from now on."""
        self._send = send

    def heard(self, message: Petitioned | Redeemed) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        answer = self._open.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def petition(
        self, sandbox: str, attempt: RequestAttempt | ConnectionAttempt, *, opaque: bool
    ) -> Petitioned | None:
        """Put what a sandbox was refused to people; None where that cannot be done now. Never raises."""
        if not self._may(sandbox, pleads=False):
            return None
        answer = await self._ask(
            sandbox, lambda ticket: Petition.model_validate(_fields(ticket, sandbox, attempt, opaque))
        )
        return answer if isinstance(answer, Petitioned) else None

    def mention(self, sandbox: str, attempt: ConnectionAttempt) -> None:
        """Put a connection that nobody will read to people; whoever made it cannot be told what comes of it."""
        if self._send is None or not self._may(sandbox, pleads=False):
            return
        try:
            self._send(Petition.model_validate(_fields(0, sandbox, attempt, opaque=True)))
        except (ChannelBroken, ValidationError) as error:
            _complain(error)

    async def plead(self, sandbox: str, request: str, why: str) -> Petitioned | None:
        """Put a sandbox's own request to people, in its own words; None where that cannot be done now. Never raises."""
        answer = await self._ask(
            sandbox, lambda ticket: Plea(ticket=ticket, sandbox=sandbox, request=request, why=why)
        )
        return answer if isinstance(answer, Petitioned) else None

    def wait_to_plead(self, sandbox: str) -> float:
        """Return the seconds until a sandbox may ask again; 0 counts as having asked."""
        if self._may(sandbox, pleads=True):
            return 0.0
        return self._buckets[sandbox, True].wait(self._clock())

    async def redeem(self, sandbox: str, grant: str, attempt: str) -> bool:
        """Whether a request, by its attempt id, is the one that a grant for one request is for. Never raises."""
        answer = await self._ask(
            sandbox, lambda ticket: Redeem(ticket=ticket, sandbox=sandbox, grant=grant, attempt=attempt)
        )
        return isinstance(answer, Redeemed) and answer.ok

    # holding

    def moved(self, sandbox: str) -> None:
        """How a sandbox's requests stand has changed: whoever is held looks again."""
        if (event := self._moved.pop(sandbox, None)) is not None:
            event.set()

    async def hold(self, sandbox: str, settled: Callable[[], bool], seconds: float) -> None:
        """Return once it is settled, or after so many seconds."""
        if self._busy[sandbox] >= MOST_OPEN:
            return
        self._busy[sandbox] += 1
        try:
            async with asyncio.timeout(seconds):
                while not settled():
                    await self._moved.setdefault(sandbox, asyncio.Event()).wait()
        except TimeoutError:
            return
        finally:
            self._let_go(sandbox)

    def forget(self, sandbox: str) -> None:
        """A sandbox has gone."""
        for pleads in (True, False):
            self._buckets.pop((sandbox, pleads), None)
        self.moved(sandbox)

    # what is asked

    async def _ask(self, sandbox: str, make: Callable[[int], _Question]) -> Petitioned | Redeemed | None:
        if self._send is None or self._busy[sandbox] >= MOST_OPEN:
            return None
        ticket = next(self._tickets)
        answer: asyncio.Future[Petitioned | Redeemed] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answer
        self._busy[sandbox] += 1
        try:
            async with asyncio.timeout(TIMEOUT):
                self._send(make(ticket))
                return await answer
        except TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001 -- law 1: what cannot be asked is not approved
            _complain(error)
            return None
        finally:
            self._open.pop(ticket, None)
            self._let_go(sandbox)

    def _let_go(self, sandbox: str) -> None:
        self._busy[sandbox] -= 1
        if self._busy[sandbox] <= 0:
            del self._busy[sandbox]

    def _may(self, sandbox: str, *, pleads: bool) -> bool:
        bucket = self._buckets.get((sandbox, pleads))
        if bucket is None:
            if len(self._buckets) >= _MOST_SANDBOXES:
                return False
            bucket = self._buckets[sandbox, pleads] = TokenBucket(*(PLEAS if pleads else MET))
        return bucket.take(self._clock())


def hint_of(answer: Petitioned | None) -> str:
    """Return what whoever was refused is told to do next, in printable ASCII."""
    if answer is None:
        return (
            "It could not be put to a person now. Ask at http://egressd.internal/access, or try again later."
        )
    if answer.state == "approved":
        return "A person has approved it by now: send the same request again."
    if answer.state == "denied":
        return "A person has refused this. Do not ask again: use what http://egressd.internal/policy allows."
    if answer.state == "refused":
        return f"It cannot be put to a person: {answer.detail}."
    return (
        f"It was put to a person as {answer.approval}. See http://egressd.internal/access for what comes of it and for how to "
        "say why you need it; once it is approved, send the same request again."
    )


def _fields(
    ticket: int, sandbox: str, attempt: RequestAttempt | ConnectionAttempt, opaque: bool
) -> dict[str, object]:
    fields: dict[str, object] = {
        "ticket": ticket,
        "sandbox": sandbox,
        "scheme": attempt.scheme,
        "host": format_host(attempt.host),
        "port": attempt.port,
        "opaque": opaque,
    }
    if isinstance(attempt, RequestAttempt) and not opaque:
        fields["method"] = WEBSOCKET if attempt.upgrade is not None else attempt.method
        fields["path"] = attempt.target.partition("?")[0]
    return fields


def _complain(error: Exception) -> None:
    kind = type(error).__name__
    print(f"egressd: worker: people could not be asked: {kind}", file=sys.stderr)  # noqa: T201 -- stderr is talk
