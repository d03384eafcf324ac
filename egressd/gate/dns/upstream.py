"""How a name is really resolved: only by the dialer, only for an allowed connection, only as configured.

Nothing of what the sandbox sent travels: a query is made from (name, type) alone, and a reply is used only
as far as a chain of aliases leads from the asked name (DNS-10). Never the search list, never the hosts
file, never getaddrinfo, no second path when the configured one fails (DNS-28).

The cache is shared by a worker's sandboxes. It holds addresses only, and it is asked only by a dial that
its own sandbox's policy has allowed and whose policy then judges each address: what one sandbox resolved
decides nothing for another (DNS-29).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from egressd.gate.dns.doh import DohLine
from egressd.gate.dns.dot import DotLine
from egressd.gate.dns.exchange import PADDED, PAYLOAD, exchange
from egressd.gate.dns.lines import Line, Lines, ReplyError, os_problem
from egressd.gate.dns.servers import RESOLV_CONF, Transport, parse_upstream
from egressd.gate.tls.stream import upstream_context
from egressd.policy.addresses import is_floor_name
from egressd.policy.attempt import Address, Name
from egressd.policy.names import BadHost, parse_name
from egressd.policy.reasons import Reason

MAX_HOPS = 8
"""Aliases followed from a name to its addresses, over all queries of one look-up."""
MAX_ADDRESSES = 16
"""Addresses kept of one type; more are of no use to a dial."""
MIN_TTL, MAX_TTL = 5.0, 300.0
"""Bounds of how long an answer is believed, in seconds (DNS-30)."""
CACHED = 1024
ROUNDS = 2
"""How often each server is asked before a look-up is given up."""
LATE_FAMILY = 0.25
"""Seconds that one family's addresses wait for the other's answer."""

_LINES: Final[dict[Transport, type[Line]]] = {"tls": DotLine, "https": DohLine}


@dataclass(frozen=True, slots=True)
class ResolveFailed:
    """Why a name has no address to dial; `detail` is for the record, in our words."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class _Found:
    addresses: tuple[Address, ...]
    ttl: float


def has_ipv6_route() -> bool:
    """Say whether this host would send to global IPv6 addresses; connecting a UDP socket sends nothing."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(("2000::1", 53))
    except OSError:
        return False
    return True


def warm() -> None:
    """Import all that dnspython imports on demand; call it before the worker loses sight of its files."""
    dns.rdata.load_all_types()  # type: ignore[no-untyped-call]  # dnspython left this one unannotated
    query = dns.message.make_query("warm.invalid", "A", use_edns=0, payload=PAYLOAD, pad=PADDED)
    query.to_wire()
    reply = dns.message.make_response(query)
    for kind, text in (("A", "192.0.2.1"), ("AAAA", "2001:db8::1"), ("SOA", ". . 1 1 1 1 1")):
        reply.answer.append(dns.rrset.from_text(query.question[0].name, 1, "IN", kind, text))
    dns.message.from_wire(reply.to_wire())
    "warm.invalid".encode("idna")  # how ssl takes the name of a server


class Resolver:
    """Resolves names at the configured upstream; one for a worker, used in one event loop.

    `upstream` is what `parse_upstream` takes (and raises); it is read once, here. `timeout` bounds a whole
    look-up, in seconds. `ca_file` is who vouches for the servers of `tls://` and `https://`, None the system; it
    is read here too (raises OSError or ssl.SSLError). `ipv6` says, at each look-up, whether AAAA is worth asking.
    """

    def __init__(
        self,
        upstream: str,
        timeout: float,
        *,
        ca_file: str | None = None,
        ipv6: Callable[[], bool] = has_ipv6_route,
        monotonic: Callable[[], float] = time.monotonic,
        resolv_conf: Path = RESOLV_CONF,
    ) -> None:
        self.timeout = timeout
        self._servers = parse_upstream(upstream, resolv_conf)
        self._lines = {
            server: Lines(server, line, upstream_context(ca_file, (line.alpn,)), timeout)
            for server in self._servers
            if (line := _LINES.get(server.transport)) is not None
        }
        self._ipv6 = ipv6
        self._monotonic = monotonic
        self._cache: OrderedDict[Name, tuple[float, tuple[Address, ...]]] = OrderedDict()
        self._running: dict[Name, asyncio.Task[tuple[Address, ...] | ResolveFailed]] = {}

    async def resolve(self, name: Name) -> tuple[Address, ...] | ResolveFailed:
        """Return the addresses of a name, at least one, A before AAAA; never raises but when cancelled."""
        held = self._cache.get(name)
        if held is not None and self._monotonic() < held[0]:
            self._cache.move_to_end(name)
            return held[1]
        task = self._running.get(name)
        if task is None:  # dials of one name at one time share one look-up
            task = asyncio.get_running_loop().create_task(self._look_up(name))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the look-ups that run, and the connections that are kept."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for lines in self._lines.values():
            await lines.close()

    async def _look_up(self, name: Name) -> tuple[Address, ...] | ResolveFailed:
        if not self._servers:
            return ResolveFailed(Reason.UPSTREAM_DNS, "no nameserver is configured")
        try:
            async with asyncio.timeout(self.timeout):
                found = await self._both_families(name)
        except TimeoutError:
            return ResolveFailed(Reason.UPSTREAM_DNS, "no answer in time")
        except Exception as error:  # noqa: BLE001 what dnspython raises on a hostile reply is no closed set
            return ResolveFailed(Reason.UPSTREAM_DNS, f"the look-up failed: {type(error).__name__}")
        if isinstance(found, ResolveFailed):
            return found
        self._cache[name] = (self._monotonic() + found.ttl, found.addresses)
        self._cache.move_to_end(name)
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return found.addresses

    async def _both_families(self, name: Name) -> _Found | ResolveFailed:
        """Ask A and AAAA in parallel; one family's addresses are enough when the other's do not come."""
        kinds = [dns.rdatatype.A] + ([dns.rdatatype.AAAA] if self._ipv6() else [])
        tasks = [asyncio.create_task(self._follow(name, kind)) for kind in kinds]
        try:
            patience = None
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                if any(isinstance(task.result(), _Found) for task in done):
                    patience = LATE_FAMILY
            results = [task.result() for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        found = [result for result in results if isinstance(result, _Found)]
        if found:
            addresses = tuple(address for result in found for address in result.addresses)
            return _Found(addresses, min(result.ttl for result in found))
        failures = [result for result in results if isinstance(result, ResolveFailed)]
        return failures[0]

    async def _follow(self, name: Name, kind: dns.rdatatype.RdataType) -> _Found | ResolveFailed:
        """Ask for one type and follow aliases, in the reply first, then by asking for where it leads."""
        at = dns.name.Name([*(label.encode("ascii") for label in name), b""])
        hops, ttl = 0, MAX_TTL
        while True:
            reply = await self._ask(at, kind)
            if isinstance(reply, ResolveFailed):
                return reply
            chain = _walk(reply, at, kind, MAX_HOPS - hops)
            ttl = min(ttl, chain.ttl)
            if chain.floor is not None:
                return ResolveFailed(chain.floor, "the name is an alias of one that is never resolved")
            if chain.addresses:
                return _Found(chain.addresses, max(ttl, MIN_TTL))
            if chain.cut:
                return ResolveFailed(Reason.UPSTREAM_DNS, f"more than {MAX_HOPS} aliases")
            if chain.hops == 0 or chain.final:
                return ResolveFailed(Reason.UPSTREAM_DNS, "the name has no address")
            hops += chain.hops
            at = chain.end

    async def _ask(
        self, name: dns.name.Name, kind: dns.rdatatype.RdataType
    ) -> dns.message.Message | ResolveFailed:
        """Ask the servers in turn until one answers; NXDOMAIN is an answer, SERVFAIL and silence are not."""
        # A little less than its share, so that the last silence is named before the whole look-up ends.
        patience = 0.95 * self.timeout / (ROUNDS * len(self._servers))
        problem = ""
        for server in self._servers * ROUNDS:
            try:
                async with asyncio.timeout(patience):
                    reply = await exchange(server, name, kind, self._lines.get(server))
            except TimeoutError:
                problem = f"{server} did not answer in time"
                continue
            except (OSError, ReplyError) as error:
                problem = f"{server}: {os_problem(error) if isinstance(error, OSError) else error}"
                continue
            rcode = reply.rcode()
            if rcode == dns.rcode.NXDOMAIN:
                return ResolveFailed(Reason.UPSTREAM_DNS, "NXDOMAIN")
            if rcode == dns.rcode.NOERROR:
                return reply
            problem = f"{server} answered {dns.rcode.to_text(rcode)}"
        return ResolveFailed(Reason.UPSTREAM_DNS, problem)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where a reply leads from a name: to `addresses`, or to an `end` after some `hops`.

    `final` says that nothing comes behind the end, `cut` that more aliases do than may be followed, `floor` why the end may
    not be looked at, whatever the reply says of it.
    """

    addresses: tuple[Address, ...]
    end: dns.name.Name
    hops: int
    ttl: float
    final: bool
    cut: bool
    floor: Reason | None = None


def _walk(
    reply: dns.message.Message, start: dns.name.Name, kind: dns.rdatatype.RdataType, limit: int
) -> _Chain:
    """Follow the aliases of `start` inside the answer section; records of any other owner do not exist."""
    at, ttl = start, MAX_TTL
    for hops in range(limit + 1):
        held = reply.get_rrset(reply.answer, at, dns.rdataclass.IN, kind)
        if held is not None:
            addresses = tuple(ip_address(rdata.address) for rdata in held)[:MAX_ADDRESSES]
            return _Chain(addresses, at, hops, min(ttl, held.ttl), final=True, cut=False)
        alias = reply.get_rrset(reply.answer, at, dns.rdataclass.IN, dns.rdatatype.CNAME)
        if alias is None or hops == limit:
            # An SOA record says that the end exists and has no address (RFC 2308 §2.2); without it, ask there.
            final = any(rrset.rdtype == dns.rdatatype.SOA for rrset in reply.authority)
            return _Chain((), at, hops, ttl, final, cut=alias is not None)
        at, ttl = alias[0].target, min(ttl, alias.ttl)
        if (floor := _floor(at)) is not None:
            return _Chain((), at, hops + 1, ttl, final=True, cut=False, floor=floor)
    raise AssertionError("unreachable: the last round returns")


def _floor(name: dns.name.Name) -> Reason | None:
    """Return why an alias may not be followed; one that is no name of ours is asked for as it is."""
    if any(b"." in label for label in name.labels):
        return None
    parsed = parse_name(b".".join(name.labels[:-1]))
    return None if isinstance(parsed, BadHost) else is_floor_name(parsed)
