"""Limits of one sandbox: what its rules let pass in a time, counted connections, and repeats folded into counts.

What binds an attempt is found by the entry that allowed it (`gate.account`): its own limits and the profile's, each with its
buckets, which live as long as the sandbox does, over any number of connections, reloads of rules and deaths of workers.

Pure, like the buckets: every clock reading is handed in, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final, Literal, NamedTuple, Protocol

from egressd.gate.account import PROFILE, Account, Kind, Newcomers, Over
from egressd.gate.buckets import KeptBucket, TokenBucket
from egressd.gate.settings import Settings
from egressd.policy.attempt import Address, Name
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason

type Key = tuple[str, Kind]
"""Whose bucket it is, an entry's id or PROFILE, and what it counts. Entries of one service share their id, and so a bucket."""

type Keep = Callable[[str, Kind, float, str], None]
"""Told a bucket's level, by owner, kind and host (empty where it is not one host's), before what lies above it is spent."""

HOSTS: Final = 4_096
"""Hosts with buckets of their own; further ones share one, so that a sandbox cannot make as many as it likes."""
OTHERS: Final = "*"
_OVER_ALL: Final = "connections of the sandbox"

_PER_HOST: Final[tuple[Kind, ...]] = ("upload_per_host", "download_per_host")
_KINDS: Final[tuple[Kind, ...]] = (
    "requests",
    "upload",
    "download",
    *_PER_HOST,
    "new_hosts",
    "names",
    "new_connections",
)
_DNS: Final[Key] = (PROFILE, "dns")
_MINUTE = 60
_BURST_SECONDS = 2
"""Seconds' worth of new connections that may begin at once."""
_STAYS = 0.5
"""What of a bucket stays with open connections when a successor takes over."""


class Fold[K: Hashable]:
    """Folds repeats: the first of a kind in a window is recorded at once, the others are counted for later.

    Nothing is lost: firsts + the counts of `take` and `drain` = calls of `first`. Keys must come from a
    closed set (reason codes, channels), never from what a sandbox sent, or memory would grow with its
    imagination.
    """

    __slots__ = ("_counts", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: dict[K, tuple[float, int]] = {}

    def first(self, key: K, now: float) -> bool:
        """Return whether this is the first of its kind in its window; when it is not, it has been counted."""
        held = self._counts.get(key)
        if held is None:
            self._counts[key] = (now, 0)
            return True
        began, count = held
        self._counts[key] = (began, count + 1)
        return False

    def take(self, now: float) -> list[tuple[K, int]]:
        """Return and forget the repeats of every window that has ended, as (key, count ≥ 1)."""
        ended = [key for key, (began, _) in self._counts.items() if now - began >= self._seconds]
        counted = [(key, self._counts.pop(key)[1]) for key in ended]
        return [(key, count) for key, count in counted if count]

    def drain(self) -> list[tuple[K, int]]:
        """Return and forget all repeats, ended or not: for the end of the sandbox."""
        counted = [(key, count) for key, (_, count) in self._counts.items() if count]
        self._counts.clear()
        return counted

    def __bool__(self) -> bool:
        return bool(self._counts)


class Level(NamedTuple):
    """A bucket's level as control keeps it: `tokens` were told `age` seconds ago."""

    owner: str
    kind: Kind
    tokens: float
    age: float
    host: str = ""


def _kept_nowhere(*_: object) -> None:
    """A budget that no other process goes on with."""


class Room(Protocol):
    """What all sandboxes of a worker share: its descriptors."""

    def take(self, held: int) -> bool:
        """Take what a connection needs for a sandbox that has `held` of them; False where others need it more."""

    def give(self) -> None:
        """Give back what one connection had."""


class Budget:
    """What one sandbox may still use, in one worker; `keep` is told what the next worker has to know."""

    __slots__ = (
        "_accounts",
        "_begun",
        "_buckets",
        "_holders",
        "_hosts",
        "_keep",
        "_limit",
        "_newcomers",
        "_open",
        "_parted",
        "_places",
        "_policy",
        "_queries",
        "_room",
    )

    def __init__(self, settings: Settings, keep: Keep | None = None, room: Room | None = None) -> None:
        self._keep = keep or _kept_nowhere
        self._room = room
        self._begun = TokenBucket(_BURST_SECONDS * settings.new_connections_per_second, _BURST_SECONDS)
        self._limit = settings.connections
        self._open = 0
        self._parted = False
        self._queries = self._made(_DNS, Rate(amount=settings.dns_queries_per_minute, seconds=_MINUTE))
        self._buckets: dict[tuple[Key, str], KeptBucket] = {}
        self._hosts: set[str] = set()
        self._newcomers: dict[Key, Newcomers] = {}
        self._holders: dict[str, set[str]] = {}
        self._places: dict[str, list[str]] = {}
        self._policy: EffectivePolicy | None = None
        self._accounts: dict[tuple[int, str], tuple[EffectiveEntry | None, Account]] = {}

    # what control sets, whatever the rules say

    @property
    def open_connections(self) -> int:
        """How many connections hold a place now."""
        return self._open

    def connection(self, now: float) -> Over | None:
        """Take a place for a connection, or say why there is none; each that was taken is met by one `release`."""
        if self._open >= self._limit:
            return Over(Reason.TOO_MANY_CONNECTIONS, _OVER_ALL)
        if (wait := self._begun.wait(now)) > 0:
            return Over(Reason.RATE_LIMITED, "new connections of the sandbox", wait)
        if self._room is not None and not self._room.take(self._open):
            return Over(Reason.TOO_MANY_CONNECTIONS, "descriptors of the worker")
        self._begun.take(now)
        self._open += 1
        return None

    def release(self) -> None:
        """Give a place back; RuntimeError when none is taken, as a second release would widen the limit."""
        if self._open == 0:
            raise RuntimeError("a connection was released that was never counted")
        self._open -= 1
        if self._room is not None:
            self._room.give()

    def dns_query(self, now: float) -> bool:
        """Count one DNS query, well-formed or not; False when this sandbox has asked too much of late."""
        return self._queries.take(now)

    # what rules limit

    def account(
        self,
        now: float,
        policy: EffectivePolicy,
        entry: EffectiveEntry | None,
        host: Name | Address | None = None,
    ) -> Account:
        """Return what binds attempts that `entry` of `policy` allows; a policy other than the last is adopted.

        `host` is their destination, which the limits of one destination are kept by.
        """
        if policy is not self._policy:
            self.adopt(now, policy)
        wanted = host is not None and any(
            getattr(limits, kind) is not None
            for limits in (policy.limits, *([entry.limits] if entry is not None else []))
            for kind in _PER_HOST
        )
        of = self._own_or_others(format_host(host)) if wanted and host is not None else ""
        found = self._accounts.get((id(entry), of))
        if found is None or found[0] is not entry:
            found = (entry, Account(self, now, policy.limits, entry, of))
            self._accounts[id(entry), of] = found
        return found[1]

    def adopt(self, now: float, policy: EffectivePolicy) -> None:
        """Go on under another policy: levels stay, rates change, also for what is open.

        What the policy no longer limits is forgotten once it is full: a rule that is taken out and put back fills nothing.
        """
        self._policy = policy
        self._accounts.clear()
        rates = limited(policy) if self._buckets else {}
        for (key, host), bucket in tuple(self._buckets.items()):
            rate = rates.get(key)
            if rate is not None:
                bucket.resize(now, rate.amount, rate.seconds)
            elif bucket.level(now) >= bucket.amount:
                self._forget(key, host)

    def restore(self, now: float, policy: EffectivePolicy, levels: Iterable[Level]) -> None:
        """Go on from the levels of a worker that died; those that the policy knows nothing of are left out."""
        kept = tuple(levels)
        rates = limited(policy) if kept else {}
        for owner, kind, tokens, age, host in kept:
            if (owner, kind) == _DNS:
                self._queries.restore(now, tokens, age)
            elif (rate := rates.get((owner, kind))) is not None and bool(host) is (kind in _PER_HOST):
                of = self._own_or_others(host) if host else ""
                self._bucket(now, (owner, kind), rate, of).restore(now, tokens, age)

    def part(self, now: float, policy: EffectivePolicy) -> None:
        """Hand over to a successor: it goes on with one half of every bucket and its refill, what is open here with the other.

        So no more passes than one budget lets pass, while there are two. A bucket that is first used afterwards is empty here.
        """
        for key, rate in limited(policy).items():
            if key[1] not in _PER_HOST:
                self._bucket(now, key, rate)
        for bucket in self._buckets.values():
            bucket.part(now, _STAYS)
        self._queries.part(now, 0.0)
        self._parted = True

    def leave(self, connection: str) -> None:
        """Give back every place of a connection that is over."""
        for owner in self._places.pop(connection, ()):
            self._holders[owner].discard(connection)
            if not self._holders[owner]:
                del self._holders[owner]

    # for accounts

    def holds(self, owner: str, connection: str) -> bool:
        """Say whether a connection is used under this owner's limits already."""
        return connection in self._holders.get(owner, ())

    def is_full(self, owner: str, most: int) -> bool:
        """Say whether all places are taken."""
        return len(self._holders.get(owner, ())) >= most

    def join(self, owner: str, connection: str) -> None:
        """Note that a connection is used under this owner's limits."""
        holders = self._holders.setdefault(owner, set())
        if connection not in holders:
            holders.add(connection)
            self._places.setdefault(connection, []).append(owner)

    def buckets(
        self, now: float, owners: Iterable[tuple[str, EntryLimits]], kind: Kind, host: str = ""
    ) -> tuple[tuple[str, KeptBucket], ...]:
        """Return those buckets of one kind that the owners' limits ask for, with their owners."""
        rates = ((owner, getattr(limits, kind)) for owner, limits in owners)
        return tuple(
            (owner, self._bucket(now, (owner, kind), rate, host)) for owner, rate in rates if rate is not None
        )

    def newcomers(
        self, now: float, owners: Iterable[tuple[str, EntryLimits]], kind: Literal["new_hosts", "names"]
    ) -> tuple[tuple[str, Newcomers], ...]:
        """Return the names that the owners' limits ask to count, with their owners."""
        found = self.buckets(now, owners, kind)
        return tuple(
            (owner, self._newcomers.setdefault((owner, kind), Newcomers(bucket))) for owner, bucket in found
        )

    def _bucket(self, now: float, key: Key, rate: Rate, host: str = "") -> KeptBucket:
        bucket = self._buckets.get((key, host))
        if bucket is None:
            bucket = self._buckets[key, host] = self._made(key, rate, host)
        elif (bucket.amount, bucket.seconds) != (rate.amount, rate.seconds):
            bucket.resize(now, rate.amount, rate.seconds)
        return bucket

    def _made(self, key: Key, rate: Rate, host: str = "") -> KeptBucket:
        owner, kind = key
        keep = self._keep
        bucket = KeptBucket(rate.amount, rate.seconds, lambda tokens: keep(owner, kind, tokens, host))
        if self._parted:
            bucket.empty()
        return bucket

    def _own_or_others(self, host: str) -> str:
        """Return the host by which its buckets are kept: its own name, or OTHERS where there are too many."""
        if host in self._hosts:
            return host
        if len(self._hosts) >= HOSTS:
            return OTHERS
        if host != OTHERS:
            self._hosts.add(host)
        return host

    def _forget(self, key: Key, host: str) -> None:
        del self._buckets[key, host]
        self._newcomers.pop(key, None)


def limited(policy: EffectivePolicy) -> dict[Key, Rate]:
    """Return every bucket that a policy asks for, and its rate."""
    owners = [(PROFILE, policy.limits), *((entry.id, entry.limits) for entry in policy.entries)]
    return {
        (owner, kind): rate
        for owner, limits in owners
        for kind in _KINDS
        if (rate := getattr(limits, kind)) is not None
    }


def kept(policy: EffectivePolicy) -> frozenset[Key]:
    """Return every bucket of a sandbox under this policy that a next worker has to know the level of."""
    return frozenset((*limited(policy), _DNS))
