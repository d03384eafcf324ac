"""What binds one attempt: the limits of the rule that allowed it and those of the profile, with the buckets that a budget keeps.

Pure: every clock reading is handed in, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from egressd.gate.buckets import PATIENCE, Meter, TokenBucket
from egressd.policy.attempt import Address, Name
from egressd.policy.effective import EffectiveEntry, EntryLimits
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason

if TYPE_CHECKING:  # it makes accounts
    from egressd.gate.limits import Budget

type Kind = Literal[
    "requests",
    "upload",
    "download",
    "upload_per_host",
    "download_per_host",
    "new_hosts",
    "names",
    "new_connections",
    "dns",
]
"""What a bucket counts; `dns` are the queries to the sandbox's resolver, a setting and no rule's limit."""

PROFILE: Final = ""
"""Whose a bucket is that is no entry's."""
KNOWN: Final = 16_384
"""Names that one limit of new hosts remembers; past it the oldest counts as new again."""


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

    __slots__ = (
        "_begun",
        "_budget",
        "_exact",
        "_hosts",
        "_names",
        "_places",
        "_requests",
        "_upload",
        "download",
        "upload",
    )

    def __init__(
        self, budget: Budget, now: float, profile: EntryLimits, entry: EffectiveEntry | None, host: str = ""
    ) -> None:
        """Buckets that the budget already has go on; `entry` is None where only observe mode allowed the attempt.

        `host` is the destination, where anything is limited by that.
        """
        owners = [(PROFILE, profile)]
        if entry is not None:
            owners.append((entry.id, entry.limits))
        self._budget = budget
        self._places = tuple((owner, limits.connections) for owner, limits in owners)
        self._requests = budget.buckets(now, owners, "requests")
        self._begun = dict(budget.buckets(now, owners, "new_connections"))
        up, down = budget.buckets(now, owners, "upload"), budget.buckets(now, owners, "download")
        self._upload = [(owner, "upload", bucket) for owner, bucket in up]
        if host:
            up = budget.buckets(now, owners, "upload_per_host", host)
            self._upload += [(owner, "upload_per_host", bucket) for owner, bucket in up]
            down += budget.buckets(now, owners, "download_per_host", host)
        wide = is_wide(entry)
        self._hosts = budget.newcomers(now, owners, "new_hosts") if wide else ()
        self._names = budget.newcomers(now, owners, "names") if wide else ()
        named = entry is not None and (self._hosts or self._names)
        self._exact = frozenset(entry.hosts if entry is not None and named else ())
        self.upload = Meter(bucket for _, _, bucket in self._upload)
        self.download = Meter(bucket for _, bucket in down)

    def connect(self, now: float, connection: str) -> Over | None:
        """Give an open connection (its attempt id) a place; it keeps it until the budget lets it `leave`."""
        joining = [(owner, most) for owner, most in self._places if not self._budget.holds(owner, connection)]
        for owner, most in joining:
            if most is not None and self._budget.is_full(owner, most):
                return Over(Reason.TOO_MANY_CONNECTIONS, _worded(owner, "connections"))
        begins = [(owner, self._begun[owner]) for owner, _ in joining if owner in self._begun]
        for owner, bucket in begins:
            if (wait := bucket.wait(now)) > 0:
                return Over(Reason.RATE_LIMITED, _worded(owner, "new_connections"), wait)
        for _, bucket in begins:
            bucket.take(now)
        for owner, _ in joining:
            self._budget.join(owner, connection)
        return None

    def name(self, now: float, name: Name) -> Over | None:
        """Count a name that is to get an address, and that nobody wrote down; what is over a limit costs nothing."""
        if not self._names or format_host(name) in self._exact:
            return None
        for owner, newcomers in self._names:
            if (wait := newcomers.wait(now, name)) > 0:
                return Over(Reason.DNS_BUDGET, _worded(owner, "names"), wait)
        for _, newcomers in self._names:
            newcomers.admit(now, name)
        return None

    def request(self, now: float, connection: str, host: Name | Address, size: int) -> Over | None:
        """Count one request, or one connection that is not read, to `host`; what is over a limit costs nothing.

        Of `size` bytes that are to go up first it is only seen to that they are there or come within PATIENCE.
        """
        over = self._over(now, host, size) or self.connect(now, connection)
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
        for owner, what, bucket in self._upload:
            if (wait := bucket.wait(now, size)) > PATIENCE:
                return Over(Reason.RATE_LIMITED, _worded(owner, what), wait)
        if self._counts(host):
            for owner, newcomers in self._hosts:
                if (wait := newcomers.wait(now, host)) > 0:
                    return Over(Reason.RATE_LIMITED, _worded(owner, "new_hosts"), wait)
        return None

    def _counts(self, host: Name | Address) -> bool:
        return bool(self._hosts) and format_host(host) not in self._exact


def is_wide(entry: EffectiveEntry | None) -> bool:
    """Whether an entry stands for names that nobody wrote down."""
    return entry is None or entry.public_web or any(host.startswith("*.") for host in entry.hosts)


def _worded(owner: str, what: str) -> str:
    return f"{what} of {f'rule {owner}' if owner != PROFILE else 'the profile'}"
