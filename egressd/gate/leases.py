"""The leases of a worker: in memory only, asked of control when there is none that is fit, never served near their end.

A lease is kept by sandbox and credential and given only to a request that the worker's own rules have just allowed with that
credential; control judges every asking by its own copy of them. Whatever goes wrong, a late answer, a garbled one, an
exception, is no lease: then nothing is sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from egressd.credentials.lease import Lease, series_of

TIMEOUT: Final = 5.0
"""Seconds that control may take to answer."""

LEAST_LEFT: Final = 10.0
"""Seconds that a lease must still have when a request gets it: time to dial, shake hands and send a head."""

KEEP: Final = 30.0
"""Seconds after which control is asked again, so that a changed secret or a revocation is not missed for longer."""

PAUSE: Final = 1.0
"""Seconds in which control is not asked again for what it has just not answered."""

MOST: Final = 4096
"""Leases kept, and withdrawn ones remembered; the oldest go."""

_FORGOTTEN: Final = object()

type Key = tuple[str, str]
type Ask = Callable[[Asked], Awaitable[Lease | None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that a credential is asked for, as it was judged; `host` is its name in normal form."""

    sandbox: str
    credential: str
    method: str
    scheme: str
    host: str
    port: int
    target: str
    upgrade: str | None = None

    @property
    def key(self) -> Key:
        """What a lease is kept by."""
        return self.sandbox, self.credential


@dataclass(slots=True)
class _Kept:
    lease: Lease
    until: float


class Leases:
    """What was lent to this worker."""

    def __init__(
        self, ask: Ask, *, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` puts one request to control; `wall` tells Unix seconds, `clock` seconds that only go forward."""
        self._ask = ask
        self._wall, self._clock = wall, clock
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._flights: dict[Key, asyncio.Task[object]] = {}
        self._silent: OrderedDict[Key, float] = OrderedDict()
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def held(self, key: Key) -> Lease | None:
        """Return the lease that is kept for a sandbox and a credential, None if there is none that is fit to be used."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if self._clock() >= kept.until or not self._is_fit(kept.lease):
            del self._kept[key]
            return None
        return kept.lease

    async def lease(self, asked: Asked) -> Lease | None:
        """Return a lease for a request that was allowed, None if there is none to be had; never raises."""
        key = asked.key
        for _ in range(2):  # once more where the rules or the credential changed while control was asked
            lease = self.held(key)
            if lease is not None:
                return lease
            if self._clock() < self._silent.get(key, 0.0):
                return None
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = asyncio.get_running_loop().create_task(self._fly(asked))
            answer = await asyncio.shield(flight)  # others wait for it too
            if answer is not _FORGOTTEN:
                return answer if isinstance(answer, Lease) else None
        return None

    def forget(self, sandbox: str, credential: str | None = None) -> None:
        """Drop what is kept and what is being asked for of a sandbox, or of one credential of it; ask anew from now on."""
        for key in [key for key in (*self._kept, *self._flights) if _matches(key, sandbox, credential)]:
            self._kept.pop(key, None)
            self._flights.pop(key, None)
            self._silent.pop(key, None)

    def withdraw(self, lease_id: str) -> None:
        """Take back a lease by its id, and all of its series: they are given to no request any more, and stand for none that is
        under way."""
        series = series_of(lease_id)
        self._withdrawn[series] = None
        while len(self._withdrawn) > MOST:
            self._withdrawn.popitem(last=False)
        for key in [key for key, kept in self._kept.items() if kept.lease.series == series]:
            del self._kept[key]

    def stands(self, lease: Lease) -> bool:
        """Say whether a lease was not taken back. One that has merely expired does not end what was begun with it."""
        return lease.series not in self._withdrawn

    def _is_fit(self, lease: Lease) -> bool:
        left = lease.expires is None or lease.expires - self._wall() >= LEAST_LEFT
        return left and self.stands(lease)

    async def _fly(self, asked: Asked) -> object:
        """Ask, and keep what comes of it, unless it was forgotten in the meantime."""
        key = asked.key
        lease = await self._fetch(asked)
        if self._flights.get(key) is not asyncio.current_task():
            return _FORGOTTEN
        del self._flights[key]
        if lease is not None:
            self._kept[key] = _Kept(lease, self._clock() + KEEP)
            while len(self._kept) > MOST:
                self._kept.popitem(last=False)
        return lease

    async def _fetch(self, asked: Asked) -> Lease | None:
        """Ask control; total."""
        try:
            async with asyncio.timeout(TIMEOUT):
                lease = await self._ask(asked)
        except TimeoutError:
            self._silent[asked.key] = self._clock() + PAUSE
            while len(self._silent) > MOST:
                self._silent.popitem(last=False)
            return None
        except Exception as error:  # noqa: BLE001 # law 1: nothing is lent; what an error says may hold what was read
            print(f"egressd: worker: a lease was not to be had: {type(error).__name__}", file=sys.stderr)  # noqa: T201 -- stderr is talk
            return None
        if not isinstance(lease, Lease) or (lease.sandbox, lease.credential) != asked.key:
            return None
        return lease if self._is_fit(lease) else None


def _matches(key: Key, sandbox: str, credential: str | None) -> bool:
    return key[0] == sandbox and credential in (None, key[1])
