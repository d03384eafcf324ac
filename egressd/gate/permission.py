"""May this be dialled: what a decision says of an address, and of one that nobody here knows. Pure.

The latter comes with an operator's proxy that is asked for names (`upstream.proxy.connect: name`): it resolves them itself. Where
no rule speaks of addresses that is all the same; where one does, the name is resolved here and the proxy asked for the address.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from egressd.policy.attempt import Address, Decision
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import permit_address
from egressd.policy.reasons import Reason


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Stands for the address of a host that was reached by its name, through a proxy."""

    def __str__(self) -> str:
        """Say what stands in an address' place."""
        return "by name"


UNPLACED: Final = Unplaced()

type Place = Address | Unplaced
"""Where an upstream connection leads."""


def read_place(text: str) -> Place:
    """Return the place that was written as `text`; raises ValueError."""
    return UNPLACED if text == str(UNPLACED) else ip_address(text)


def is_confined(policy: CompiledPolicy, decision: Decision) -> bool:
    """Say whether the addresses that this may go to must be known before it goes there.

    They must where rules speak of addresses, and where nobody wrote the name down, so that a sandbox could choose one that leads
    inside: then only a server that proves to be that name would do, and what is not read proves nothing.
    """
    entry = decision.entry
    if entry is None or entry.addresses or entry.public_web:
        return True
    verified = decision.treatment == "inspect" and entry.schemes == ("https",)
    if not verified and any(host.startswith("*.") for host in entry.hosts):
        return True
    return any(rule.is_deny for _, _, found in policy.networks for level in found.values() for rule in level)


def permit_place(
    policy: CompiledPolicy, decision: Decision, place: Place, *, port: int | None, now: float
) -> Reason | None:
    """Return why `place` may not be dialled for an attempt so decided, or None when it may (see `permit_address`)."""
    if not isinstance(place, Unplaced):
        return permit_address(policy, decision, place, port=port, now=now)
    if not decision.allowed:
        return decision.reason
    return Reason.ADDRESS_OUTSIDE_RULE if is_confined(policy, decision) else None


@dataclass(frozen=True, slots=True)
class Permission:
    """What one decision permits, for the dialer."""

    policy: CompiledPolicy
    decision: Decision
    port: int | None

    def __call__(self, place: Place) -> Reason | None:
        """Return why this may not be dialled now, None if it may."""
        return permit_place(self.policy, self.decision, place, port=self.port, now=time.time())

    @property
    def confined(self) -> bool:
        """Whether addresses must be known before anything is dialled."""
        return is_confined(self.policy, self.decision)
