"""The broker: holds the sources of credentials and gives leases of what they mint, in the control process alone.

A lease is kept for one credential and one sandbox. A source is asked once for however many requests wait; before a lease ends it
is asked again, in the background while the old one still serves; one that is past its time, or whose time is unknown and whose
source no longer answers, is never given. Every failure is `Unavailable`, told fast: who waits does so for `ANSWER` seconds at
most, from when the source was asked. Nothing here ever puts a secret into a text.

Whoever asks is to be judged before: the broker knows sandboxes by their names only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from egressd.credentials.lease import Lease
from egressd.credentials.providers.base import For, Minted, Provider, SourceFailed, provider_of
from egressd.credentials.terms import LEAST_LEFT, check, lease_of, refresh_at
from egressd.policy.credential import Credential, CredentialsFile

ANSWER: Final = 4.0
"""Seconds after the source was asked in which it has to answer whoever waits; a worker waits for 5."""
MINT: Final = 65.0
"""Seconds that a source may take altogether: a later request finds what came too late for this one. A command may have 60."""
FAILED: Final = 1.0
"""Seconds in which a source that has failed is not asked again."""
REVOKE: Final = 5.0
"""Seconds that taking back everything of one sandbox may take."""
MOST: Final = 16_384
"""Leases kept. At the limit one that was not asked for lately is given back; where all are in use there is no new one."""
IDLE: Final = 120.0
"""Seconds without being asked for after which a lease may be given back to make room."""
REMEMBERED: Final = 4096
"""Sandboxes that have ended and are remembered, for what still asks in their name; the oldest are forgotten."""
TELL_AGAIN: Final = 60.0
"""Seconds between two complaints about the same credential."""

type Key = tuple[str, str]
"""Credential and sandbox."""


class Unavailable(Exception):
    """There is no lease; the text says why, to the operator, and holds no secret."""


def say(text: str) -> None:
    """Tell the operator; what nobody hears any more is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(f"egressd: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- stderr is talk


@dataclass(slots=True)
class _Definition:
    """One credential as the file has it, and its provider; `series` begins the ids of its leases, `last` is the newest one."""

    said: Credential
    provider: Provider
    series: str = field(default_factory=lambda: f"lease-{secrets.token_hex(8)}")
    last: Lease | None = None


@dataclass(slots=True)
class _Kept:
    """What was minted for one sandbox, and the lease that is given of it. Times: `look` and `used` monotonic."""

    lease: Lease
    minted: Minted
    definition: _Definition
    refresh: float
    """Unix seconds from when on a successor is minted; infinite where the source does not say when it ends."""
    look: float
    """When the source is asked whether it still gives the same, where it does not say when that ends."""
    used: float


@dataclass(slots=True, eq=False)
class _Flight:
    """One asking of a source that is under way; `task` is set as soon as there is one."""

    definition: _Definition
    began: float
    task: asyncio.Task[Lease] = field(init=False)
    unwanted: bool = False
    """The sandbox has ended or the credential has changed meanwhile: what comes is given back."""


@dataclass(frozen=True, slots=True)
class _Superseded:
    """What has a successor, may still be under way somewhere, and is to be taken back with the rest."""

    name: str
    minted: Minted


@dataclass(slots=True)
class _Trouble:
    text: str
    until: float
    told: float = field(default=float("-inf"))


class Broker:
    """The credentials of one file and what is lent of them. Belongs to one event loop."""

    def __init__(
        self,
        file: CredentialsFile,
        *,
        ca_bundle: str | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        provide: Callable[[str, Credential], Provider] | None = None,
        tell: Callable[[str], None] = say,
    ) -> None:
        """Nothing is opened or asked before the first `lease`. `ca_bundle` is for the servers of sources."""
        self._provide = provide or (lambda name, said: provider_of(name, said.source, ca_bundle))
        self._wall, self._clock, self._tell = wall, clock, tell
        self._said = dict(file.credentials)
        self._definitions: dict[str, _Definition] = {}
        self._kept: dict[Key, _Kept] = {}
        self._flights: dict[Key, _Flight] = {}
        self._troubles: dict[Key, _Trouble] = {}
        self._superseded: dict[str, list[_Superseded]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def names(self) -> Collection[str]:
        """The credentials that there are."""
        return self._said.keys()

    async def lease(self, name: str, for_: For, placeholder: str | None = None) -> Lease:
        """Return a lease of the credential for the sandbox that has at least LEAST_LEFT seconds; raises Unavailable.

        `placeholder` is what the sandbox holds in its place, where it does.
        """
        key = (name, for_.sandbox)
        if self._closed or for_.sandbox in self._ended:
            raise Unavailable("the sandbox has ended")
        said = self._said.get(name)
        if said is None:
            raise Unavailable("there is no such credential")
        kept = self._kept.get(key)
        if kept is not None and self._serves(kept):
            kept.used = self._clock()
            if self._wall() >= kept.refresh and self._rested(key):
                self._fly(key, said, for_, placeholder)
            return kept.lease
        return await self._wait(key, said, for_, placeholder)

    def _serves(self, kept: _Kept) -> bool:
        expires = kept.lease.expires
        if expires is None:
            return self._clock() < kept.look
        return expires - self._wall() >= LEAST_LEFT

    def _rested(self, key: Key) -> bool:
        trouble = self._troubles.get(key)
        return trouble is None or self._clock() >= trouble.until

    async def _wait(self, key: Key, said: Credential, for_: For, placeholder: str | None) -> Lease:
        flight = self._flights.get(key)
        if flight is None:
            if not self._rested(key):
                raise Unavailable(self._troubles[key].text)
            flight = self._fly(key, said, for_, placeholder)
        left = flight.began + ANSWER - self._clock()
        done, _ = await asyncio.wait({flight.task}, timeout=max(left, 0.0))
        if not done:
            self._complain(key, "its source has not answered yet")
            raise Unavailable("its source has not answered yet")
        if flight.task.cancelled():
            raise Unavailable("it was given up")
        return flight.task.result()

    # asking the source

    def _fly(self, key: Key, said: Credential, for_: For, placeholder: str | None) -> _Flight:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(self._defined(key, said), self._clock())
            flight.task = asyncio.get_running_loop().create_task(self._land(key, flight, for_, placeholder))
            flight.task.add_done_callback(_seen)
        return flight

    def _defined(self, key: Key, said: Credential) -> _Definition:
        definition = self._definitions.get(key[0])
        if definition is None:
            try:
                definition = _Definition(said, self._provide(key[0], said))
            except Exception as error:  # noqa: BLE001 -- as below
                raise self._failed(key, None, error) from None
            self._definitions[key[0]] = definition
        return definition

    async def _land(self, key: Key, flight: _Flight, for_: For, placeholder: str | None) -> Lease:
        """Ask the source and keep what it gives; raises Unavailable."""
        before = self._kept.get(key)
        minted: Minted | None = None
        try:
            async with asyncio.timeout(MINT):
                minted = await _next(before, flight.definition, for_)
            if flight.unwanted:
                raise SourceFailed("the sandbox has ended, or the credential has changed")
            lease = self._keep(key, flight.definition, minted, before, placeholder)
        except TimeoutError:
            raise self._failed(key, flight, SourceFailed(f"no answer within {MINT:.0f} s")) from None
        except Exception as error:  # noqa: BLE001 -- whatever a library raises, its text may hold what was read
            if minted is not None:
                await self._take_back([minted])
            raise self._failed(key, flight, error) from None
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
        if self._troubles.pop(key, None) is not None:
            self._tell(f"credential {key[0]} for {key[1]}: available again")
        return lease

    def _keep(
        self,
        key: Key,
        definition: _Definition,
        minted: Minted,
        before: _Kept | None,
        placeholder: str | None,
    ) -> Lease:
        """Keep what was minted; returns its lease, raises SourceFailed where it cannot be lent."""
        now, wall = self._clock(), self._wall()
        check(minted, definition.said, wall)
        if before is None:
            self._make_room()
            lease_id = f"{definition.series}.{secrets.token_hex(6)}"
        elif before.minted.material == minted.material:
            lease_id = before.lease.id
            revoke, renew = minted.revoke or before.minted.revoke, minted.renew or before.minted.renew
            minted = dataclasses.replace(minted, revoke=revoke, renew=renew)
        else:
            lease_id = f"{definition.series}.{secrets.token_hex(6)}"
            self._supersede(key, before, wall)
        lease = lease_of(lease_id, *key, definition.said, minted, placeholder)
        definition.last = lease
        refresh = refresh_at(lease.expires, wall)
        self._kept[key] = _Kept(lease, minted, definition, refresh, now + minted.keep, now)
        return lease

    def _supersede(self, key: Key, before: _Kept, wall: float) -> None:
        if before.minted.revoke is None:
            return
        older = self._superseded.setdefault(key[1], [])
        older[:] = [one for one in older if one.minted.expires is None or one.minted.expires > wall]
        older.append(_Superseded(key[0], before.minted))

    def _make_room(self) -> None:
        if len(self._kept) < MOST:
            return
        key = min(self._kept, key=lambda key: self._kept[key].used)
        if self._clock() - self._kept[key].used < IDLE:
            raise SourceFailed(f"{MOST} leases are in use")
        self._task(self._take_back([self._kept.pop(key).minted]))

    # trouble

    def _failed(self, key: Key, flight: _Flight | None, error: Exception) -> Unavailable:
        """Note that a source gave nothing, tell the operator, and return what waiters are told."""
        text = str(error) if isinstance(error, SourceFailed) else type(error).__name__
        if flight is None or not flight.unwanted:
            self._complain(key, text)
            self._troubles[key].until = self._clock() + FAILED
        return Unavailable(text)

    def _complain(self, key: Key, text: str) -> None:
        now = self._clock()
        trouble = self._troubles.setdefault(key, _Trouble(text, now))
        if trouble.text != text or now - trouble.told >= TELL_AGAIN:
            trouble.text, trouble.told = text, now
            self._tell(f"credential {key[0]} for {key[1]}: not available: {text}")

    # the end of leases

    def replace(self, file: CredentialsFile) -> list[Lease]:
        """Go by another file from now on; return one lease of each definition that it changes or no longer has.

        All of their series end: those too that have a successor and may still be under way. What a definition that stays has
        lent goes on.
        """
        before, self._said = self._said, dict(file.credentials)
        changed = {name for name, said in before.items() if self._said.get(name) != said}
        ended = [self._kept.pop(key) for key in list(self._kept) if key[0] in changed]
        flights = [self._flights.pop(key) for key in list(self._flights) if key[0] in changed]
        for flight in flights:
            flight.unwanted = True
        minted = [kept.minted for kept in ended]
        for older in self._superseded.values():
            minted += [one.minted for one in older if one.name in changed]
            older[:] = [one for one in older if one.name not in changed]
        for key in [key for key in self._troubles if key[0] in changed]:
            del self._troubles[key]
        gone = [self._definitions.pop(name) for name in changed if name in self._definitions]
        self._task(self._retire(minted, {flight.task for flight in flights}, [one.provider for one in gone]))
        return [one.last for one in gone if one.last is not None]

    async def revoke(self, sandbox: str) -> None:
        """End everything lent to a sandbox, which never gets anything again, and take it back at its source.

        Returns within REVOKE seconds; what could not be taken back is told, and ends by its own time.
        """
        self._ended[sandbox] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        flights = [flight for key, flight in self._flights.items() if key[1] == sandbox]
        for flight in flights:
            flight.unwanted = True
        minted = [self._kept.pop(key).minted for key in list(self._kept) if key[1] == sandbox]
        minted += [one.minted for one in self._superseded.pop(sandbox, [])]
        for key in [key for key in self._troubles if key[1] == sandbox]:
            del self._troubles[key]
        try:
            async with asyncio.timeout(REVOKE):
                await self._retire(minted, {flight.task for flight in flights}, ())
        except TimeoutError:
            self._tell(f"not everything lent to {sandbox} could be taken back in time; it ends by itself")

    async def close(self) -> None:
        """End everything lent to anybody, and the sources; returns within a few seconds."""
        self._closed = True
        sandboxes = {key[1] for key in (*self._kept, *self._flights)} | self._superseded.keys()
        await asyncio.gather(*(self.revoke(sandbox) for sandbox in sandboxes))
        left = {*self._tasks, *(flight.task for flight in self._flights.values())}
        if left:
            await asyncio.wait(left, timeout=REVOKE)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REVOKE):
                await self._retire((), set(), [one.provider for one in self._definitions.values()])

    async def _take_back(self, minted: Collection[Minted]) -> None:
        calls = [one.revoke for one in minted if one.revoke is not None]
        for result in await asyncio.gather(*map(_in_time, calls), return_exceptions=True):
            if isinstance(result, BaseException):
                text = str(result) if isinstance(result, SourceFailed) else type(result).__name__
                self._tell(f"a credential could not be taken back at its source, and ends by itself: {text}")

    async def _retire(
        self, minted: Collection[Minted], flights: set[asyncio.Task[Lease]], providers: Collection[Provider]
    ) -> None:
        """Take back what there is and what is still to come, and then close what it came from."""
        await self._take_back(minted)
        if flights:
            await asyncio.wait(flights)
        await asyncio.gather(*(one.close() for one in providers), return_exceptions=True)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _next(before: _Kept | None, definition: _Definition, for_: For) -> Minted:
    """Renew what there is where its source can do that and it still lives, or mint another."""
    if before is not None and before.minted.renew is not None and before.definition is definition:
        with contextlib.suppress(SourceFailed):
            return await before.minted.renew()
    return await definition.provider.mint(for_)


async def _in_time(call: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(REVOKE):
        await call()


def _seen(task: asyncio.Task[Lease]) -> None:
    """A background refresh has nobody who reads its exception; it was told where it happened."""
    if not task.cancelled():
        task.exception()
