"""Limits of one sandbox: what its rules let pass in a time, counted connections, and repeats folded into counts.

What binds an attempt is found by the entry that allowed it: its own limits and the profile's, each with its buckets, which
live as long as the sandbox does, over any number of connections, reloads of rules and deaths of workers.

Pure, like the buckets: every clock reading is handed in, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from egressd.gate.buckets import PATIENCE, KeptBucket, Meter, TokenBucket
from egressd.gate.settings import Settings
from egressd.policy.attempt import Address, Name
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason

type Kind = Literal["requests", "upload", "download", "new_hosts", "dns"]
"""What a bucket counts; `dns` are the queries to the sandbox's resolver, a setting and no rule's limit."""

type Key = tuple[str, Kind]
"""Whose bucket it is, an entry's id or PROFILE, and what it counts. Entries of one service share their id, and so a bucket."""

type Keep = Callable[[str, Kind, float], None]
"""Told a bucket's level, by owner and kind, before what lies above it is spent."""

PROFILE: Final = ""
KNOWN: Final = 16_384
"""Names that one limit of new hosts remembers; past it the oldest counts as new again."""

_KINDS: Final[tuple[Kind, ...]] = ("requests", "upload", "download", "new_hosts")
_DNS: Final[Key] = (PROFILE, "dns")
_MINUTE = 60
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


@dataclass(frozen=True, slots=True)
class Over:
    """An attempt that is over a limit: which one (for the record), and the seconds until there is room again."""

    reason: Reason
    limit: str
    wait: float = math.inf

    @property
    def retry_after(self) -> int | None:
        """See the function of that name."""
        return retry_after(self.wait)


def retry_after(wait: float) -> int | None:
    """Return a wait in the whole seconds of Retry-After (RFC 9110 §10.2.3), None where no wait helps or nobody knows it."""
    return max(1, math.ceil(wait)) if math.isfinite(wait) else None


class Newcomers:
    """The names that were first connected to within the time of one limit of new hosts."""

    __slots__ = ("_bucket", "_since")

    def __init__(self, bucket: TokenBucket) -> None:
        self._bucket = bucket
        self._since: dict[Name | Address, float] = {}

    def wait(self, now: float, host: Name | Address) -> float:
        """Return the seconds until `host` may be connected to: 0 for one that is known."""
        return 0.0 if self._knows(now, host) else self._bucket.wait(now)

    def admit(self, now: float, host: Name | Address) -> None:
        """Count `host`, unless it is known; from now on it is, until the limit's time has passed."""
        if self._knows(now, host):
            return
        self._bucket.take(now)
        self._since.pop(host, None)
        self._since[host] = now
        if len(self._since) > KNOWN:
            del self._since[next(iter(self._since))]

    def _knows(self, now: float, host: Name | Address) -> bool:
        since = self._since.get(host)
        return since is not None and now - since < self._bucket.seconds


class Account:
    """What binds one attempt: the limits of the entry that allowed it, and those of the profile."""

    __slots__ = ("_budget", "_exact", "_hosts", "_places", "_requests", "_upload", "download", "upload")

    def __init__(
        self, budget: Budget, now: float, profile: EntryLimits, entry: EffectiveEntry | None
    ) -> None:
        """Buckets that the budget already has go on; `entry` is None where only observe mode allowed the attempt."""
        owners = [(PROFILE, profile)]
        if entry is not None:
            owners.append((entry.id, entry.limits))
        self._budget = budget
        self._places = tuple((owner, limits.connections) for owner, limits in owners)
        self._requests = budget.buckets(now, owners, "requests")
        self._upload = budget.buckets(now, owners, "upload")
        self._hosts = budget.newcomers(now, owners) if _is_wide(entry) else ()
        self._exact = frozenset(entry.hosts if entry is not None and self._hosts else ())
        self.upload = Meter(bucket for _, bucket in self._upload)
        self.download = Meter(bucket for _, bucket in budget.buckets(now, owners, "download"))

    def connect(self, connection: str) -> Over | None:
        """Give an open connection (its attempt id) a place; it keeps it until the budget lets it `leave`."""
        for owner, most in self._places:
            if most is not None and self._budget.is_full(owner, most, connection):
                return Over(Reason.TOO_MANY_CONNECTIONS, _worded(owner, "connections"))
        for owner, _ in self._places:
            self._budget.join(owner, connection)
        return None

    def request(self, now: float, connection: str, host: Name | Address, size: int) -> Over | None:
        """Count one request, or one connection that is not read, to `host`; what is over a limit costs nothing.

        Of `size` bytes that are to go up first it is only seen to that they are there or come within PATIENCE.
        """
        over = self._over(now, host, size) or self.connect(connection)
        if over is not None:
            return over
        for _, bucket in self._requests:
            bucket.take(now)
        if self._counts(host):
            for _, newcomers in self._hosts:
                newcomers.admit(now, host)
        return None

    def _over(self, now: float, host: Name | Address, size: int) -> Over | None:
        for owner, bucket in self._requests:
            if (wait := bucket.wait(now)) > 0:
                return Over(Reason.RATE_LIMITED, _worded(owner, "requests"), wait)
        for owner, bucket in self._upload:
            if (wait := bucket.wait(now, size)) > PATIENCE:
                return Over(Reason.RATE_LIMITED, _worded(owner, "upload"), wait)
        if self._counts(host):
            for owner, newcomers in self._hosts:
                if (wait := newcomers.wait(now, host)) > 0:
                    return Over(Reason.RATE_LIMITED, _worded(owner, "new_hosts"), wait)
        return None

    def _counts(self, host: Name | Address) -> bool:
        return bool(self._hosts) and format_host(host) not in self._exact


def _kept_nowhere(*_: object) -> None:
    """A budget that no other process goes on with."""


def _is_wide(entry: EffectiveEntry | None) -> bool:
    """Whether an entry stands for names that nobody wrote down."""
    return entry is None or entry.public_web or any(host.startswith("*.") for host in entry.hosts)


def _worded(owner: str, what: str) -> str:
    return f"{what} of {f'rule {owner}' if owner != PROFILE else 'the profile'}"


class Budget:
    """What one sandbox may still use, in one worker; `keep` is told what the next worker has to know."""

    __slots__ = (
        "_accounts",
        "_buckets",
        "_holders",
        "_keep",
        "_limit",
        "_newcomers",
        "_open",
        "_parted",
        "_places",
        "_policy",
        "_queries",
    )

    def __init__(self, settings: Settings, keep: Keep | None = None) -> None:
        self._keep = keep or _kept_nowhere
        self._limit = settings.connections
        self._open = 0
        self._parted = False
        self._queries = self._made(_DNS, Rate(amount=settings.dns_queries_per_minute, seconds=_MINUTE))
        self._buckets: dict[Key, KeptBucket] = {}
        self._newcomers: dict[str, Newcomers] = {}
        self._holders: dict[str, set[str]] = {}
        self._places: dict[str, list[str]] = {}
        self._policy: EffectivePolicy | None = None
        self._accounts: dict[int, tuple[EffectiveEntry | None, Account]] = {}

    # what control sets, whatever the rules say

    @property
    def open_connections(self) -> int:
        """How many connections hold a place now."""
        return self._open

    def connection(self) -> bool:
        """Take a place for a connection, False when all are taken; each True is met by one `release`."""
        if self._open >= self._limit:
            return False
        self._open += 1
        return True

    def release(self) -> None:
        """Give a place back; RuntimeError when none is taken, as a second release would widen the limit."""
        if self._open == 0:
            raise RuntimeError("a connection was released that was never counted")
        self._open -= 1

    def dns_query(self, now: float) -> bool:
        """Count one DNS query, well-formed or not; False when this sandbox has asked too much of late."""
        return self._queries.take(now)

    # what rules limit

    def account(self, now: float, policy: EffectivePolicy, entry: EffectiveEntry | None) -> Account:
        """Return what binds attempts that `entry` of `policy` allows; a policy other than the last is adopted."""
        if policy is not self._policy:
            self.adopt(now, policy)
        found = self._accounts.get(id(entry))
        if found is None or found[0] is not entry:
            found = self._accounts[id(entry)] = (entry, Account(self, now, policy.limits, entry))
        return found[1]

    def adopt(self, now: float, policy: EffectivePolicy) -> None:
        """Go on under another policy: levels stay, rates change, also for what is open.

        What the policy no longer limits is forgotten once it is full: a rule that is taken out and put back fills nothing.
        """
        self._policy = policy
        self._accounts.clear()
        rates = limited(policy) if self._buckets else {}
        for key, bucket in tuple(self._buckets.items()):
            rate = rates.get(key)
            if rate is not None:
                bucket.resize(now, rate.amount, rate.seconds)
            elif bucket.level(now) >= bucket.amount:
                self._forget(key)

    def restore(self, now: float, policy: EffectivePolicy, levels: Iterable[Level]) -> None:
        """Go on from the levels of a worker that died; those that the policy knows nothing of are left out."""
        kept = tuple(levels)
        rates = limited(policy) if kept else {}
        for owner, kind, tokens, age in kept:
            if (owner, kind) == _DNS:
                self._queries.restore(now, tokens, age)
            elif (rate := rates.get((owner, kind))) is not None:
                self._bucket(now, (owner, kind), rate).restore(now, tokens, age)

    def part(self, now: float, policy: EffectivePolicy) -> None:
        """Hand over to a successor: it goes on with one half of every bucket and its refill, what is open here with the other.

        So no more passes than one budget lets pass, while there are two. A bucket that is first used afterwards is empty here.
        """
        for key, rate in limited(policy).items():
            self._bucket(now, key, rate).part(now, _STAYS)
        self._queries.part(now, 0.0)
        self._parted = True

    def leave(self, connection: str) -> None:
        """Give back every place of a connection that is over."""
        for owner in self._places.pop(connection, ()):
            self._holders[owner].discard(connection)
            if not self._holders[owner]:
                del self._holders[owner]

    # for accounts

    def is_full(self, owner: str, most: int, connection: str) -> bool:
        """Say whether all places are taken, and none of them by this connection."""
        holders = self._holders.get(owner, ())
        return connection not in holders and len(holders) >= most

    def join(self, owner: str, connection: str) -> None:
        """Note that a connection is used under this owner's limits."""
        holders = self._holders.setdefault(owner, set())
        if connection not in holders:
            holders.add(connection)
            self._places.setdefault(connection, []).append(owner)

    def buckets(
        self, now: float, owners: Iterable[tuple[str, EntryLimits]], kind: Kind
    ) -> tuple[tuple[str, KeptBucket], ...]:
        """Return those buckets of one kind that the owners' limits ask for, with their owners."""
        rates = ((owner, getattr(limits, kind)) for owner, limits in owners)
        return tuple(
            (owner, self._bucket(now, (owner, kind), rate)) for owner, rate in rates if rate is not None
        )

    def newcomers(
        self, now: float, owners: Iterable[tuple[str, EntryLimits]]
    ) -> tuple[tuple[str, Newcomers], ...]:
        """Return the new hosts that the owners' limits ask to count, with their owners."""
        found = self.buckets(now, owners, "new_hosts")
        return tuple((owner, self._newcomers.setdefault(owner, Newcomers(bucket))) for owner, bucket in found)

    def _bucket(self, now: float, key: Key, rate: Rate) -> KeptBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._made(key, rate)
        elif (bucket.amount, bucket.seconds) != (rate.amount, rate.seconds):
            bucket.resize(now, rate.amount, rate.seconds)
        return bucket

    def _made(self, key: Key, rate: Rate) -> KeptBucket:
        owner, kind = key
        keep = self._keep
        bucket = KeptBucket(rate.amount, rate.seconds, lambda tokens: keep(owner, kind, tokens))
        if self._parted:
            bucket.empty()
        return bucket

    def _forget(self, key: Key) -> None:
        del self._buckets[key]
        owner, kind = key
        if kind == "new_hosts":
            self._newcomers.pop(owner, None)


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
