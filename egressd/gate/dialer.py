"""The dialer: the only code that opens a connection to the outside for a sandbox.

A name is resolved once, every address is judged, and exactly the addresses that passed are dialled (law 4);
the socket's peer is compared with the address once more. Addresses of this host are refused whatever a rule
says (law 5, IP-16). No environment variable is read: no proxy of the operator's shell takes part; the one that is
configured (`via`) is asked for the address that was judged, or where the operator has it so for the name.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import chain, zip_longest
from typing import Protocol

from egressd.gate.dns.upstream import ResolveFailed
from egressd.gate.permission import UNPLACED, Place
from egressd.policy.attempt import Address, Name
from egressd.policy.names import format_name
from egressd.policy.reasons import Reason

STAGGER = 0.25
"""Seconds before the next address is tried beside the ones under way (RFC 8305 §8)."""
SLACK = 1.0
"""Seconds that a whole dial may take beyond its look-up's and its connecting's own bounds."""

type Permit = Callable[[Address], Reason | None]
"""Answers None for an address that may be dialled. One that has an attribute `confined` (see `permission`) which is false
leaves it to an operator's proxy to resolve the name."""


class Tunnels(Protocol):
    """What the dialer needs of the operator's proxy."""

    by_name: bool

    async def by_address(
        self, addresses: list[Address], port: int
    ) -> tuple[socket.socket, Address] | DialFailed:
        """Return a tunnel to one of the addresses."""

    async def tunnel(self, host: str, port: int) -> socket.socket | tuple[DialFailed, int]:
        """Return a tunnel to a host by its name."""


class Resolves(Protocol):
    """What the dialer needs of a resolver."""

    timeout: float

    async def resolve(self, name: Name) -> tuple[Address, ...] | ResolveFailed:
        """Return all addresses of a name, or why there is none."""


@dataclass(frozen=True, slots=True)
class Dialed:
    """A connected, non-blocking TCP socket with TCP_NODELAY, owned by who receives it, and where it leads."""

    sock: socket.socket
    address: Place


@dataclass(frozen=True, slots=True)
class DialFailed:
    """Why there is no connection; `detail` is for the record (it may name addresses), never for the sandbox."""

    reason: Reason
    detail: str


class Dialer:
    """Dials names and addresses that a policy has allowed.

    `connect_timeout` bounds all connecting of one dial, in seconds, after a look-up that is bounded by the
    resolver's own. `own_addresses` are this host's as control knows them, `own` says it of any address by a
    live look; what either calls own is not dialled. `via` is the operator's proxy, if everything goes through one.
    """

    def __init__(
        self,
        resolver: Resolves,
        connect_timeout: float,
        *,
        own_addresses: Collection[str] = (),
        own: Callable[[Address], bool] | None = None,
        via: Tunnels | None = None,
    ) -> None:
        self._via = via
        self._resolver = resolver
        self._connect_timeout = connect_timeout
        self._own = own or OwnAddresses(own_addresses)

    async def dial(self, host: Name | Address, port: int, permit: Permit) -> Dialed | DialFailed:
        """Connect to a host that was allowed, at an address that `permit` and the floor let pass.

        `permit` answers None for an address that may be dialled. Never raises but when cancelled: an error
        in any part is a failed dial (law 1).
        """
        if not 0 < port < 65_536:
            return DialFailed(Reason.BAD_PORT, "a port that is none")
        try:
            # A resolver that overruns its own bound must not hold the dial.
            async with asyncio.timeout(self._resolver.timeout + self._connect_timeout + SLACK):
                return await self._dial(host, port, permit)
        except TimeoutError:
            return DialFailed(Reason.UPSTREAM_TIMEOUT, "the whole dial took too long")
        except Exception as error:  # noqa: BLE001 law 1: what could not be judged is not dialled
            return DialFailed(Reason.INTERNAL_ERROR, type(error).__name__)

    async def _dial(self, host: Name | Address, port: int, permit: Permit) -> Dialed | DialFailed:
        if isinstance(host, tuple):
            if self._via is not None and self._via.by_name and not getattr(permit, "confined", True):
                return await self._by_name(self._via, host, port)
            found = await self._resolver.resolve(host)
            if isinstance(found, ResolveFailed):
                return DialFailed(found.reason, found.detail)
        else:
            found = (host,)
        passed: list[Address] = []
        refused: list[tuple[Address, Reason]] = []
        for address in dict.fromkeys(found):
            reason = self._judge(address, permit)
            if reason is None:
                passed.append(address)
            else:
                refused.append((address, reason))
        if passed and self._via is not None:
            return await self._by_address(self._via, passed, port)
        if passed:
            return await self._connect(interleave(passed), port)
        if refused:
            listed = ", ".join(f"{address} {reason.value}" for address, reason in refused)
            return DialFailed(refused[0][1], f"no address may be dialled: {listed}")
        return DialFailed(Reason.UPSTREAM_DNS, "the name has no address")

    async def _by_address(self, via: Tunnels, addresses: list[Address], port: int) -> Dialed | DialFailed:
        try:
            async with asyncio.timeout(self._connect_timeout):
                opened = await via.by_address(addresses, port)
        except TimeoutError:
            return DialFailed(Reason.UPSTREAM_TIMEOUT, "the proxy did not answer in time")
        return opened if isinstance(opened, DialFailed) else Dialed(*opened)

    async def _by_name(self, via: Tunnels, name: Name, port: int) -> Dialed | DialFailed:
        try:
            async with asyncio.timeout(self._connect_timeout):
                opened = await via.tunnel(format_name(name), port)
        except TimeoutError:
            return DialFailed(Reason.UPSTREAM_TIMEOUT, "the proxy did not answer in time")
        return opened[0] if isinstance(opened, tuple) else Dialed(opened, UNPLACED)

    def _judge(self, address: Address, permit: Permit) -> Reason | None:
        """Return why an address may not be dialled. The rule's own reason tells more, so it is asked first."""
        reason = permit(address)
        if reason is not None:
            return reason
        return Reason.FLOOR_OWN_ADDRESS if self._own(address) else None

    async def _connect(self, addresses: Sequence[Address], port: int) -> Dialed | DialFailed:
        failures: list[Failure] = []
        late = False
        try:
            async with asyncio.timeout(self._connect_timeout):
                dialed = await race(addresses, port, failures)
                if dialed is not None:
                    return dialed
        except TimeoutError:
            late = True
        told = [f"{failure.address} {describe(failure.error)}" for failure in failures]
        if late:
            failed = {failure.address for failure in failures}
            told += [f"{address} silent" for address in addresses if address not in failed]
        late = late or all(isinstance(failure.error, TimeoutError) for failure in failures)
        return DialFailed(
            Reason.UPSTREAM_TIMEOUT if late else Reason.UPSTREAM_UNREACHABLE,
            f"port {port}: {', '.join(told)}",
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """One address that could not be connected to, and the error."""

    address: Address
    error: BaseException


def interleave(addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses with the families taking turns, IPv6 first, each in its own order (RFC 8305 §4)."""
    six = [address for address in addresses if isinstance(address, IPv6Address)]
    four = [address for address in addresses if isinstance(address, IPv4Address)]
    return [address for address in chain.from_iterable(zip_longest(six, four)) if address is not None]


async def race(addresses: Sequence[Address], port: int, failures: list[Failure]) -> Dialed | None:
    """Return the first connection that stands, trying the addresses staggered (RFC 8305 §5); None when all fail.

    What failed is added to `failures`. No socket but the one returned outlives the call, however it ends.
    """
    tasks: dict[asyncio.Task[Dialed], Address] = {}
    won: asyncio.Task[Dialed] | None = None
    remaining = list(addresses)
    try:
        waiting: set[asyncio.Task[Dialed]] = set()
        while won is None and (remaining or waiting):
            if remaining:
                address = remaining.pop(0)
                task = asyncio.create_task(connect(address, port))
                tasks[task] = address
                waiting.add(task)
            done, waiting = await asyncio.wait(
                waiting, timeout=STAGGER if remaining else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    won = won or task
                else:
                    failures.append(Failure(tasks[task], error))
    finally:
        for task in tasks:
            if task is not won:
                task.cancel()
                # Run also for one that connected in the very moment of its cancellation, or beside the
                # winner.
                task.add_done_callback(_discard)
    return won.result() if won is not None else None


async def connect(address: Address, port: int) -> Dialed:
    """Return a connection to exactly this address; raises OSError. The text of an address is never resolved."""
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
        peer = sock.getpeername()
        if ip_address(peer[0]) != address or peer[1] != port:
            raise OSError(errno.EPROTO, "connected to another address")
    except BaseException:
        sock.close()
        raise
    return Dialed(sock, address)


def _discard(task: asyncio.Task[Dialed]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().sock.close()


def describe(error: BaseException) -> str:
    """Return in a word or two why a connection failed."""
    match error:
        case ConnectionRefusedError():
            return "refused"
        case TimeoutError():
            return "timed out"
        case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH | errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT):
            return "unreachable"
        case OSError(errno=int() as number):
            return errno.errorcode.get(number, str(number))
    return type(error).__name__


class OwnAddresses:
    """Says whether an address is one of this host's, by asking the kernel each time and by a given list.

    Where the kernel lets anybody bind any address (net.ipv4.ip_nonlocal_bind, an any-IP route) it cannot be
    asked and the list alone decides; without a list that raises ValueError, since every address might then
    be own.
    """

    def __init__(self, listed: Collection[str] = ()) -> None:
        self._listed = frozenset(_bare(ip_address(text)) for text in listed)
        # Documentation addresses (RFC 5737, RFC 3849): no host has them.
        self._blind = {
            version
            for version, text in ((4, "192.0.2.1"), (6, "2001:db8::1"))
            if is_own_address(ip_address(text))
        }
        if self._blind and not self._listed:
            raise ValueError("this host lets any address be bound, so its own addresses must be listed")

    def __call__(self, address: Address) -> bool:
        """Return whether `address`, or the IPv4 address mapped into it, is this host's."""
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        if mapped is not None:
            return self(mapped)
        if _bare(address) in self._listed:
            return True
        return address.version not in self._blind and is_own_address(address)


def is_own_address(address: Address) -> bool:
    """Return whether the kernel lets a UDP socket be bound to the address: it does for this host's only.

    Live, and nothing is sent. An error other than "not mine" counts as own, so that it is not dialled.
    """
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _bare(address: Address) -> Address:
    """Return the address without its zone."""
    return IPv6Address(int(address)) if isinstance(address, IPv6Address) else address
