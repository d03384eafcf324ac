"""Synthetic addresses: one address stands for one name for as long as the sandbox lives.

The address tells any later connection, TLS or not, which name it was meant for, and no query has to leave
for a name before a connection to it was allowed. A pair is answered only after control has stored it
(`reserve`, store, `confirm`), so that a new worker, which gets them back by `restore`, never gives an
address that a client may still hold to another name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network

from egressd.gate import internal
from egressd.policy.attempt import Address, Name
from egressd.policy.reasons import Reason

RANGE = IPv4Network("198.18.0.0/15")
"""Benchmarking addresses (RFC 2544): egressd's inner ones lie here, so no rule and no upstream answer may."""

FIRST = IPv4Address("198.18.1.0")
LAST = IPv4Address("198.18.64.255")
CAPACITY = int(LAST) - int(FIRST) + 1


class SyntheticNames:
    """The names of one sandbox and their addresses; at most `cap`, at most 16,384.

    Pending pairs (reserved, not yet confirmed as stored) hold their address, but `address_of` and `name_of`
    do not see them.
    """

    def __init__(self, cap: int = CAPACITY) -> None:
        if not 0 < cap <= CAPACITY:
            raise ValueError(f"a sandbox has 1 to {CAPACITY} names, not {cap}")
        self._cap = cap
        self._next = int(FIRST)
        self._addresses: dict[Name, IPv4Address] = {}
        self._names: dict[IPv4Address, Name] = {}
        self._pending: dict[Name, IPv4Address] = {}
        self._roots: dict[Name, str] = {}

    def __len__(self) -> int:
        return len(self._addresses) + len(self._pending)

    def address_of(self, name: Name) -> IPv4Address | None:
        """Return the stored address of a name."""
        return self._addresses.get(name)

    def name_of(self, address: Address) -> Name | None:
        """Return the name that a stored address stands for; None inside `RANGE` is `synthetic_unmapped`."""
        return self._names.get(address) if isinstance(address, IPv4Address) else None

    def reserve(self, name: Name) -> IPv4Address | Reason:
        """Return the name's address, fresh and pending if it had none; `dns_budget` when none is left."""
        held = self._addresses.get(name) or self._pending.get(name)
        if held is not None:
            return held
        if len(self) >= self._cap or self._next > int(LAST):
            return Reason.DNS_BUDGET
        address = IPv4Address(self._next)
        self._next += 1
        self._pending[name] = address
        return address

    def confirm(self, name: Name) -> None:
        """Make a reserved pair visible, now that it is stored; a name that is not pending stays as it is."""
        address = self._pending.pop(name, None)
        if address is not None:
            self._addresses[name] = address
            self._names[address] = name

    def restore(self, pairs: Iterable[tuple[Name, IPv4Address]]) -> None:
        """Take over stored pairs from control; ValueError, and no change, when they contradict each other."""
        addresses = dict(self._addresses)
        names = dict(self._names)
        for name, address in pairs:
            if not FIRST <= address <= LAST:
                raise ValueError(f"{address} is no synthetic address")
            if addresses.setdefault(name, address) != address or names.setdefault(address, name) != name:
                raise ValueError(f"{address} cannot stand for {'.'.join(name)}: one of the two is taken")
        if any(address in names for address in self._pending.values()):
            raise ValueError("pairs are restored before the first query, not after")
        self._addresses, self._names = addresses, names
        # Above everything ever handed out: no address is given again, even if pairs between were never
        # stored.
        self._next = max([self._next, *(int(address) + 1 for address in names)])

    def pairs(self) -> Iterator[tuple[Name, IPv4Address]]:
        """Yield the stored pairs in the order they were made."""
        yield from self._addresses.items()

    def touch(self, name: Name, root_id: str) -> None:
        """Remember the latest query for a stored name or our own, so that a connection to it joins that query's root."""
        if name in self._addresses or name == internal.NAME:
            self._roots[name] = root_id

    def note(self, name: Name, root_id: str) -> None:
        """Remember the latest query for a name that has no address of its own, because every name leads to egressd's.

        Of `cap` names, the one that was asked for longest ago is forgotten first.
        """
        self._roots.pop(name, None)
        self._roots[name] = root_id
        if len(self._roots) > self._cap:
            del self._roots[next(iter(self._roots))]

    def root_of(self, name: Name) -> str | None:
        """Return the root id of the latest query for a name; None before any, also in a new worker."""
        return self._roots.get(name)
