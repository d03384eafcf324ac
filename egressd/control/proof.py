"""The proof that a sandbox's boundary holds: tried from inside, before anything of the sandbox runs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Final

from egressd.gate.denials import PROBE
from egressd.policy.effective import EffectivePolicy
from egressd.wiring import ruleset
from egressd.wiring.container import Container
from egressd.wiring.namespace import Namespace

_SYNTHETIC: Final = ip_network("198.18.0.0/15")
_EXPLAIN: Final = ip_address(ruleset.EXPLAIN)


class NotReady(Exception):
    """The boundary could not be proved from inside, so the command was not started."""


async def prove(namespace: Namespace | Container, policy: EffectivePolicy, dns_denied: str) -> None:
    """Try the boundary from inside; raises NotReady with what did not hold."""
    # Where names are only observed, any but one below the floor is let through.
    observing = policy.mode == "observe"
    below = "localhost" if observing else "invalid.test"
    denied = await namespace.probe_dns(f"{PROBE}{secrets.token_hex(8)}.{below}")
    explained = dns_denied == "explain" and not observing
    held = denied.addresses == (str(_EXPLAIN),) if explained else denied.rcode == 3
    if not held:
        raise NotReady(f"a denied name was answered with {denied.addresses or denied.error or denied.rcode}")
    allowed = next(iter(allowed_names(policy)), None)
    if allowed is None:
        return
    answer = await namespace.probe_dns(allowed)
    if not answer.addresses or not all(
        ip_address(a) in _SYNTHETIC and ip_address(a) != _EXPLAIN for a in answer.addresses
    ):
        raise NotReady(
            f"the allowed name {allowed} was answered with {answer.addresses or answer.error or answer.rcode}"
        )


def allowed_names(policy: EffectivePolicy) -> Sequence[str]:
    """Return the exact names that a policy certainly allows."""
    denied = {
        host
        for entry in policy.entries
        if entry.effect == "deny" and not entry.requests
        for host in entry.hosts
    }
    return [
        host
        for entry in policy.entries
        if entry.effect == "allow" and entry.mode == "enforce" and entry.expires is None
        for host in entry.hosts
        if not host.startswith("*") and host not in denied
    ]
