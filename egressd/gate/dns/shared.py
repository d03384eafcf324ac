"""The resolver's sockets that many sandboxes share: each message goes to the resolver of the sandbox whose source it comes from.

DNS can carry no token, so the source is all there is to know a sandbox by; it is the sandbox's once it has used its token from
there, or from the start where the operator said so. Everybody else gets REFUSED, which is no longer than what was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from egressd.gate.dns import datagrams
from egressd.gate.dns import message as wire
from egressd.gate.dns.ledger import dropped
from egressd.gate.dns.server import DATAGRAM, DRAIN, DnsServer
from egressd.gate.strangers import Strangers, Stray
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

_LOOK: Final = 10.0
"""Seconds between a full drain, which is what a flood looks like, and asking the kernel what it dropped."""

type Find = Callable[[Address], DnsServer | None]
"""The resolver of the sandbox that a source belongs to."""


class SharedResolver:
    """One shared UDP socket, which it owns until `close`."""

    def __init__(self, sock: socket.socket, find: Find, strangers: Strangers) -> None:
        """Answer from now on, in the running loop."""
        self._sock = sock
        self._find = find
        self._strangers = strangers
        self._loop = asyncio.get_running_loop()
        self._dropped = dropped(sock)
        self._look: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        datagrams.ask_where(sock)
        self._loop.add_reader(sock, self._receive)

    def leave(self) -> None:
        """Let a successor read on: nothing is read to the end by `close` either."""
        self.close()

    def close(self) -> None:
        """Stop, and write down what the kernel dropped."""
        self._loop.remove_reader(self._sock)
        if self._look is not None:
            self._look.cancel()
        self._count_drops()
        self._sock.close()

    def _receive(self) -> None:
        for _ in range(DRAIN):
            try:
                datagram = datagrams.receive(self._sock, DATAGRAM)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # an ICMP error for an earlier reply
                continue
            source = datagram.source
            server = self._find(source)
            if server is not None:
                server.take(self._sock, datagram)
                continue
            self._strangers.note(Stray("dns", "dns-udp", Reason.UNKNOWN_SANDBOX, source))
            refused = wire.brief(datagram.message, wire.REFUSED)
            if refused is not None:
                self._send(refused, datagram)
        if self._look is None:
            self._look = self._loop.call_later(_LOOK, self._look_up)

    def _send(self, reply: bytes, datagram: datagrams.Datagram) -> None:
        try:
            datagrams.reply(self._sock, reply, datagram)
        except OSError:  # a full buffer, a closed port: it asks again
            return

    def _look_up(self) -> None:
        self._look = None
        self._count_drops()

    def _count_drops(self) -> None:
        now = dropped(self._sock)
        lost = (now - self._dropped) & 0xFFFF_FFFF
        self._dropped = now
        if lost:
            self._strangers.lose("dns-udp", lost)


def carry_shared(sock: socket.socket, find: Find, strangers: Strangers) -> None:
    """Give an accepted connection to the resolver of its sandbox; a stranger's is closed."""
    source: Address | None = None
    with contextlib.suppress(OSError):  # gone already
        source = datagrams.bare(sock.getpeername()[0])
    server = find(source) if source is not None else None
    if server is not None:
        server.carry(sock)
        return
    strangers.note(Stray("dns", "dns-tcp", Reason.UNKNOWN_SANDBOX, source))
    sock.close()
