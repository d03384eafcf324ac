"""What is judged and what comes out: the attempts that `decide` takes and the `Decision` that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal

from egressd.policy.effective import EffectiveEntry, Treatment
from egressd.policy.reasons import Reason

type Name = tuple[str, ...]
"""A host name in normal form: its labels in order, lower case, without the root (`("api", "example", "com")`)."""

type Address = IPv4Address | IPv6Address
type Verdict = Literal["allow", "deny", "ask"]


@dataclass(frozen=True, slots=True)
class DnsQuestion:
    """A look-up: is there any connection to this name that the policy would allow?"""

    name: Name


@dataclass(frozen=True, slots=True)
class ConnectionAttempt:
    """A connection to a host and port before any request; scheme `tcp` is a raw relay."""

    host: Name | Address
    port: int
    scheme: Literal["https", "http", "tcp"]


@dataclass(frozen=True, slots=True)
class RequestAttempt:
    """One HTTP request: `target` is the origin-form as received (`/path?query`), `upgrade` the lower-case Upgrade token or None.

    `body` says whether the request carries one (a Content-Length above 0 or any Transfer-Encoding), `doh` whether it carries a
    DNS question or wants an answer to one. `redeemed` is the grant for one request that this one has been given, by its id.
    """

    host: Name | Address
    port: int
    scheme: Literal["https", "http"]
    method: str
    target: str
    upgrade: str | None = None
    body: bool = False
    doh: bool = False
    redeemed: str | None = None


type Attempt = DnsQuestion | ConnectionAttempt | RequestAttempt


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict on one attempt, why, and by which rule.

    `entry` is the entry that decided (its id and place go into the record), None for the default deny and the floor.
    `would_deny` marks what passes only because a profile or a rule observes: enforced, it would be denied for `would_reason`, by
    `would_entry` where a rule denies it. Where the reason is `observed`, nothing else lets it through. `grant` is the approval
    that allowed it, by its id, and `once` says that this one is for a single request.
    """

    verdict: Verdict
    reason: Reason
    entry: EffectiveEntry | None = None
    treatment: Treatment = "inspect"
    would_deny: bool = False
    would_reason: Reason | None = None
    would_entry: EffectiveEntry | None = None
    grant: str | None = None
    once: bool = False

    @property
    def allowed(self) -> bool:
        """Whether the attempt may go on."""
        return self.verdict == "allow"


DENIED = Decision("deny", Reason.INTERNAL_ERROR)
"""The value before any code has run (law 1)."""
