"""What is written down of one sandbox's DNS queries: one record each, floods as counts, the kernel's drops.

Queries sent = records found, counts included (law 8).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from egressd.gate.dns.gatekeeper import Plan
from egressd.gate.limits import Fold
from egressd.gate.recorder import Recorder
from egressd.gate.sandbox import Sandbox
from egressd.journal.record import Record, new_id
from egressd.policy.attempt import Decision
from egressd.policy.names import format_name
from egressd.policy.reasons import Reason


@dataclass(frozen=True, slots=True)
class Way:
    """How a message came. `further`: over a TCP connection that has a record already."""

    channel: Literal["dns-udp", "dns-tcp"]
    further: bool = False


UDP = Way("dns-udp")
TCP = Way("dns-tcp")
TCP_FURTHER = Way("dns-tcp", further=True)

type Kind = tuple[Reason, Way, str]
"""What is folded together: reason, way, and a detail in fixed words (a closed set: see Fold)."""

WINDOW = 10.0
"""Seconds over which repeats are folded into one record."""

# asm-generic/socket.h; nine 32-bit counters, of which the last is SK_MEMINFO_DROPS (linux/sock_diag.h).
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("=9I")


class Ledger:
    """Makes the records and hands them to the recorder; counts live in one event loop until `close`."""

    def __init__(self, sandbox: Sandbox, recorder: Recorder, monotonic: Callable[[], float]) -> None:
        self._sandbox = sandbox
        self._recorder = recorder
        self._monotonic = monotonic
        self._fold: Fold[Kind] = Fold(WINDOW)
        self._timer: asyncio.TimerHandle | None = None
        self._drops: dict[socket.socket, int] = {}
        self._closed = False

    def record(self, plan: Plan, way: Way) -> Record:
        """Return the decision record of one query, its own root."""
        sandbox = self._sandbox
        attempt = new_id()
        record = Record(
            event="decision",
            sandbox=sandbox.id,
            attempt_id=attempt,
            root_id=attempt,
            layer="dns",
            channel=way.channel,
            further=way.further or None,
            profile=sandbox.policy.profile,
            policy=sandbox.policy.digest,
            labels=sandbox.labels or None,
            traceparent=sandbox.traceparent,
            host=format_name(plan.name) if plan.name is not None else None,
            host_raw=plan.host_raw,
            qtype=plan.qtype,
            detail=plan.outcome or None,
        ).decided(plan.decision)
        record.treatment = None  # nothing is carried
        return record

    def write(self, record: Record) -> None:
        """Hand over a record on which a reply depends; raises what the recorder raises."""
        self._recorder.put(record)

    async def commit(self, record: Record) -> None:
        """Hand over a record and return once it is written; raises AuditUnavailable."""
        await self._recorder.commit(record)

    def note(self, record: Record) -> None:
        """Hand over the record of a denial that stands whatever becomes of the record; never raises."""
        with contextlib.suppress(Exception):
            self._recorder.put(record)

    def count(self, kind: Kind, known: Callable[[], Plan] | None = None) -> None:
        """Write down the first of a kind in a window, with the name that `known` tells; count the others."""
        if self._fold.first(kind, self._monotonic()):
            record = self._bare(kind)
            if known is not None:
                plan = known()
                record.host = format_name(plan.name) if plan.name is not None else None
                record.host_raw, record.qtype = plan.host_raw, plan.qtype
            self.note(record)
        self.arm()

    def watch(self, sock: socket.socket) -> None:
        """Account from now on for the datagrams that the kernel drops at this socket."""
        self._drops[sock] = dropped(sock)

    def unwatch(self) -> None:
        """Account for what the kernel dropped so far; from now on somebody else does."""
        self._write_counts([])
        self._drops.clear()

    def arm(self) -> None:
        """See to it that counts and drops are written within a window from now."""
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)

    def close(self) -> None:
        """Write what is still counted; the watched sockets must still be open."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        self._write_counts(self._fold.drain())

    def _end_window(self) -> None:
        self._timer = None
        self._write_counts(self._fold.take(self._monotonic()))
        if self._fold:
            self.arm()

    def _write_counts(self, counts: list[tuple[Kind, int]]) -> None:
        for kind, count in counts:
            record = self._bare(kind)
            record.count = count
            self.note(record)
        for sock, before in self._drops.items():
            self._drops[sock] = now = dropped(sock)
            lost = (now - before) & 0xFFFF_FFFF
            if lost:
                record = self._bare((Reason.DNS_BUDGET, UDP, "queries that the kernel dropped unread"))
                record.event = "lost"
                record.count = lost
                self.note(record)

    def _bare(self, kind: Kind) -> Record:
        reason, way, detail = kind
        return self.record(Plan("drop", detail, Decision("deny", reason)), way)


def dropped(sock: socket.socket) -> int:
    """Return how many datagrams the kernel ever dropped at a socket, modulo 2³²; 0 where it does not tell."""
    try:
        counters = sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        return int(_MEMINFO.unpack(counters)[8])
    except (OSError, struct.error):
        return 0
