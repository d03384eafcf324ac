"""The packet log: what a sandbox's firewall dropped, as records, repeats counted (law 8).

The first packet of a kind is written at once; the same again within `WINDOW` seconds is counted and written when the window
closes.
Kinds are bounded: past `KINDS` open ones, further kinds are counted under one record without a destination. What the
kernel could not deliver (ENOBUFS) shows in the rules' own counters, which control reconciles.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from egressd.gate.dns.gatekeeper import EXPLAIN
from egressd.gate.packets import DroppedPacket, Malformed, overran, parse_nflog
from egressd.gate.recorder import Recorder
from egressd.gate.sandbox import Sandbox
from egressd.gate.strangers import Strangers, Stray
from egressd.journal.record import Record, new_id
from egressd.policy.addresses import classify
from egressd.policy.attempt import Address, Name
from egressd.policy.names import format_name
from egressd.policy.reasons import Reason

WINDOW = 1.0
KINDS = 256
_BURST = 256
"""Most packets taken in one wake-up."""
_LAST_BURSTS = 256
"""Most bursts at the end, should a sandbox not stop sending."""
_PROTOCOLS = {
    1: "icmp",
    2: "igmp",
    6: "tcp",
    17: "udp",
    33: "dccp",
    47: "gre",
    58: "icmpv6",
    132: "sctp",
    136: "udplite",
}
"""Assigned Internet Protocol Numbers (IANA) that a sandbox is likely to try; others are written as their number."""

FORGED = "egressd-source"
"""The prefix of packets whose source does not belong where they came from (`wiring.gateway_rules.SOURCE_PREFIX`)."""

type _Kind = tuple[int, str, int | None]


@dataclass(slots=True)
class _Count:
    attempt_id: str
    seen: int


class _Reader:
    """Reads an NFLOG socket, already bound to its group, on the running loop; owns it until `close`."""

    def __init__(self, sock: socket.socket, take: Callable[[DroppedPacket], None]) -> None:
        self._sock = sock
        self._take = take
        self._loop = asyncio.get_running_loop()
        self.overruns = 0
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """Read what the kernel still holds, close the socket."""
        self.drain()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def leave(self) -> None:
        """Close the socket; what the kernel still holds is for whoever has it too."""
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def drain(self) -> None:
        """Read what the kernel holds now."""
        for _ in range(_LAST_BURSTS):
            if not self._readable():
                break

    def _readable(self) -> bool:
        """Take what the kernel holds; returns whether there may be more."""
        for _ in range(_BURST):
            try:
                datagram = self._sock.recv(64 * 1024)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self.overruns += overran(error)
                return True
            packets = parse_nflog(datagram)
            if isinstance(packets, Malformed):
                packets = (DroppedPacket(0, 0, "", "", None, None, None, None, None, packets.size, ""),)
            for packet in packets:
                self._take(packet)
        return True


class PacketCounts:
    """What was refused of one sandbox's packets: counts them and writes the records."""

    def __init__(self, sandbox: Sandbox, recorder: Recorder) -> None:
        """Nothing was refused yet."""
        self._sandbox = sandbox
        self._recorder = recorder
        self._counts: dict[_Kind, _Count] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, packet: DroppedPacket) -> None:
        """Write down or count one packet."""
        kind: _Kind = (packet.protocol, packet.destination, packet.destination_port)
        if kind not in self._counts and len(self._counts) >= KINDS:
            kind = (packet.protocol, "", None)
        if (count := self._counts.get(kind)) is not None:
            count.seen += 1
            return
        count = self._counts[kind] = _Count(new_id(), 0)
        self._write(kind, count.attempt_id, 1)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW, self.flush)

    def flush(self) -> None:
        """Write every count now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = self._counts, {}
        for kind, count in counts.items():
            if count.seen:
                self._write(kind, count.attempt_id, count.seen)

    def _judge(self, destination: str) -> tuple[Reason, Name | None]:
        """Why the packet was refused, and the name that its destination stands for."""
        try:
            address = ip_address(destination)
        except ValueError:  # the header could not be read, or the kinds ran over
            return Reason.PROTOCOL_NOT_ALLOWED, None
        name = self._sandbox.names.name_of(address)
        found = classify(address)
        if name is not None or address == EXPLAIN or found.kind != "floor" or found.reason is None:
            # QUIC to a name, mostly: it is the protocol that is refused, whatever address we gave the name.
            return Reason.PROTOCOL_NOT_ALLOWED, name
        return found.reason, None

    def _write(self, kind: _Kind, root_id: str, packets: int) -> None:
        protocol, destination, port = kind
        reason, name = self._judge(destination)
        policy = self._sandbox.policy
        self._recorder.put(
            Record(
                event="decision",
                sandbox=self._sandbox.id,
                attempt_id=new_id(),
                root_id=root_id,
                layer="packet",
                channel="nflog",
                verdict="deny",
                reason=reason.value,
                profile=policy.profile,
                policy=policy.digest,
                labels=self._sandbox.labels or None,
                traceparent=self._sandbox.traceparent,
                host=format_name(name) if name is not None else None,
                protocol=_PROTOCOLS.get(protocol, str(protocol)),
                address=destination or None,
                port=port,
                count=packets,
            )
        )


class PacketLog:
    """The packet log of a sandbox that has one of its own; `close` writes what is counted."""

    def __init__(self, sock: socket.socket, counts: PacketCounts) -> None:
        """Take over the netlink socket, already bound to its group."""
        self._counts = counts
        self._reader = _Reader(sock, counts.take)

    def close(self) -> None:
        """Read what the kernel still holds, write every count, close the socket."""
        self._reader.close()
        self._counts.flush()

    def leave(self) -> None:
        """Let a successor read on, and write every count."""
        self._reader.leave()
        self._counts.flush()


class SharedPacketLog:
    """The packet log of an interface with many sandboxes behind it: each packet is its source's, or nobody's.

    Nobody's is also what had a source that did not belong where it came from: whoever sent it, it was not that sandbox.
    """

    def __init__(
        self, sock: socket.socket, find: Callable[[Address], PacketCounts | None], strangers: Strangers
    ) -> None:
        """Take over the netlink socket, already bound to its group."""
        self._find = find
        self._strangers = strangers
        self._reader = _Reader(sock, self._take)

    def drain(self) -> None:
        """Read what the kernel holds now: what comes later is not that of a sandbox that has left by then."""
        self._reader.drain()

    def close(self) -> None:
        """Read what the kernel still holds, close the socket."""
        self._reader.close()

    def leave(self) -> None:
        """Let a successor read on."""
        self._reader.leave()

    def _take(self, packet: DroppedPacket) -> None:
        try:
            source = ip_address(packet.source)
        except ValueError:  # no IP header that could be read
            self._strangers.note(Stray("packet", "nflog", Reason.UNKNOWN_SANDBOX))
            return
        counts = self._find(source)
        if packet.prefix == FORGED:
            reason = Reason.UNKNOWN_SANDBOX if counts is None else Reason.SPOOFED_SOURCE
            self._strangers.note(Stray("packet", "nflog", reason, source))
        elif counts is None:
            self._strangers.note(Stray("packet", "nflog", Reason.UNKNOWN_SANDBOX, source))
        else:
            counts.take(packet)
