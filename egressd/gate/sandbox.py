"""One sandbox as its worker knows it: policy, names, budgets and live connections, none of them shared with another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from egressd.gate.denials import Denials
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.limits import Budget
from egressd.gate.standing import NOTHING, Standing
from egressd.policy.attempt import Address
from egressd.policy.compile import CompiledPolicy
from egressd.policy.reasons import Reason


class Live(Protocol):
    """Something open that a revocation must be able to end."""

    def cut(self, reason: Reason) -> None:
        """End it at once, on both sides, and see that its `end` record gives `reason`."""

    def retire(self) -> None:
        """Begin nothing new; what is open may go on to its end."""

    def rejudge(self, now: float) -> None:
        """Judge what is open again by the sandbox's policy at `now` (Unix seconds); cut what may no longer live."""


@dataclass(slots=True)
class Sandbox:
    """A workload's whole state in this worker; `policy` is swapped whole on reload and holds the sandbox's grants."""

    id: str
    policy: CompiledPolicy
    names: SyntheticNames
    budget: Budget
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    live: set[Live] = field(default_factory=set)
    revoked: bool = False
    retiring: bool = False
    """A successor carries it from now on; here only ends what is open."""
    placeholders: dict[str, str] = field(default_factory=dict)
    """What the sandbox holds in the place of a key, by credential."""
    signing: int = 0
    """Bytes of bodies that are kept to be signed."""
    denials: Denials = field(default_factory=Denials)
    standing: Standing = NOTHING
    """How its requests for access stand; the grants are in `policy` too."""
    own: tuple[Address, ...] | None = None
    """Where its names lead if not each to an address of its own: to these of egressd, or to the one that was asked (`()`)."""
