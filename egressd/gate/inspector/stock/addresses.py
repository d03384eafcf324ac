"""Where a request that a stock mitmproxy carries may be dialled (law 4): one address, resolved once and judged."""

from __future__ import annotations

from egressd.gate.dialer import OwnAddresses
from egressd.gate.dns.upstream import ResolveFailed, Resolver
from egressd.gate.inspector.exchange import Exchange
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason


class Addresses:
    """The resolver, once it is known, and the addresses that are this machine's own."""

    def __init__(self) -> None:
        """Only literal addresses can be judged before there is a `resolver`."""
        self.resolver: Resolver | None = None
        self._own = OwnAddresses()

    async def of(self, exchange: Exchange) -> Address | Reason:
        """Resolve where an exchange is bound, and return the first address that its rule permits, or why there is none."""
        assert exchange.bound is not None
        host = exchange.bound.host
        found: tuple[Address, ...] | ResolveFailed = () if isinstance(host, tuple) else (host,)
        if isinstance(host, tuple):
            assert self.resolver is not None
            found = await self.resolver.resolve(host)
        if isinstance(found, ResolveFailed):
            return found.reason
        refused: Reason | None = None
        for address in sorted(found, key=lambda each: each.version):
            reason = exchange.permits(address)
            if reason is None and self._own(address):
                reason = Reason.FLOOR_OWN_ADDRESS
            if reason is None:
                return address
            refused = refused or reason
        return refused or Reason.UPSTREAM_DNS
