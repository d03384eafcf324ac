"""Sandboxes of one network at several workers: one worker has the network's listeners, and each connection goes to its own.

Whoever accepts a connection finds out whose it is. Control then looks for itself: the connection came by one of those listeners,
from the address that it keeps as that sandbox's, and nothing else is handed on. So a worker that has fallen can pass nothing off
as a sandbox's but what came from there; and no worker gets another's policy, names or credentials.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import socket
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal, Protocol

from egressd.control.sandboxes import SandboxListener, SandboxState
from egressd.control.sources import SharedListeners
from egressd.control.worker import Worker
from egressd.gate.channel import ChannelBroken
from egressd.gate.door.hops import bare, is_listed, read_networks
from egressd.gate.messages import Introduce, Introduced, Neighbour, Welcome

WAITING: Final = 512
"""Connections that wait for a worker which is being replaced."""
_PORTABLE: Final = frozenset({"explicit", "socks"})
"""What comes as connections alone. Datagrams and the packet log are read by whoever carries the sandboxes."""

type Refusal = Literal["revoked", "client_closed", "too_many_connections"]


class Host(Protocol):
    """Where a neighbour is carried."""

    def welcome(self, arrival: Arrival) -> None:
        """Have its worker take a connection, now or once there is one."""


def spreads(listeners: Sequence[SandboxListener]) -> bool:
    """Whether the sandboxes of these shared listeners can be at other workers than the listeners."""
    return bool(listeners) and all(listener.kind in _PORTABLE for listener in listeners)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A connection on its way from who accepted it to who carries its sandbox; it owns the socket until it is answered."""

    message: Introduce
    client: socket.socket
    by: Worker

    def answer(self, reason: Refusal | None) -> None:
        """Say that it was taken, or why nobody does."""
        self.client.close()
        with contextlib.suppress(ChannelBroken):  # it has died meanwhile, and what it held is closed
            self.by.channel.send(Introduced(introduction=self.message.introduction, reason=reason))


class Arrivals:
    """The connections of a post's own sandboxes that others accepted."""

    def __init__(self) -> None:
        """None has come."""
        self._waiting: deque[Arrival] = deque()

    def take(self, arrival: Arrival, worker: Worker | None) -> None:
        """Hand it to a worker that carries its sandbox, or keep it until there is one."""
        if worker is None or worker.lost or arrival.message.sandbox not in worker.given:
            if len(self._waiting) < WAITING:
                self._waiting.append(arrival)
            else:
                arrival.answer("too_many_connections")
            return
        message = arrival.message
        welcome = Welcome(
            sandbox=message.sandbox,
            way=message.way,
            source=message.source,
            data=message.data,
            greeted=message.greeted,
        )
        try:
            worker.channel.send(welcome, [arrival.client.fileno()])
        except ChannelBroken:  # it is dying: the next one
            self._waiting.append(arrival)
        except OSError:
            arrival.answer("too_many_connections")
        else:
            arrival.answer(None)

    def settle(self, worker: Worker | None, sandboxes: Collection[str]) -> None:
        """Hand a fresh worker what has waited for it; who is no sandbox of the post any more gets no answer from one."""
        waiting, self._waiting = self._waiting, deque()
        for arrival in waiting:
            if arrival.message.sandbox in sandboxes:
                self.take(arrival, worker)
            else:
                arrival.answer("revoked")


class Neighbours:
    """The sandboxes that come by a post's shared listeners, and where they are carried."""

    def __init__(self, shares: Mapping[str, SharedListeners]) -> None:
        """Nobody is. `shares` are the post's, as they are at any time."""
        self._shares = shares
        self._at: dict[str, tuple[SandboxState, Host]] = {}

    @property
    def states(self) -> Iterable[SandboxState]:
        """Every neighbour."""
        return [sandbox for sandbox, _ in self._at.values()]

    def enter(self, sandbox: SandboxState, host: Host) -> None:
        """Know a sandbox."""
        self._at[sandbox.id] = sandbox, host

    def leave(self, sandbox_id: str) -> None:
        """Know it no longer."""
        self._at.pop(sandbox_id, None)

    def find(self, sandbox_id: str) -> SandboxState | None:
        """Return a neighbour by its id."""
        return self._at[sandbox_id][0] if sandbox_id in self._at else None

    @staticmethod
    def tell(worker: Worker, sandbox: SandboxState) -> None:
        """Have a worker know a neighbour; raises OSError."""
        worker.given.add(sandbox.id)
        worker.tell(
            Neighbour(
                sandbox=sandbox.id, token=sandbox.token, source=sandbox.source, interface=sandbox.interface
            )
        )

    def introduce(self, worker: Worker, message: Introduce, fd: int) -> None:
        """Hand a neighbour its connection, which this closes in any case; raises ValueError for what no sound worker hands on."""
        try:
            client = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            raise ValueError("no socket") from None
        arrival = Arrival(message, client, worker)
        try:
            base64.b64decode(message.data, validate=True)
            sandbox, host = self._at.get(message.sandbox, (None, None))
            if sandbox is None or host is None:
                arrival.answer("revoked")
            elif sandbox.source != message.source:
                raise ValueError("a connection from where nobody is known")
            elif self._is_sound(client, message, sandbox.interface):
                host.welcome(arrival)
            else:
                arrival.answer("client_closed")
        except (ValueError, binascii.Error):
            client.close()
            raise

    def _is_sound(self, client: socket.socket, message: Introduce, interface: str) -> bool:
        """Whether it is a connection that came from there by one of the listeners; False where it has ended, else ValueError."""
        if (client.type, client.proto) != (socket.SOCK_STREAM, socket.IPPROTO_TCP):
            raise ValueError("no connection")
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ValueError("a listener")
        listeners = [
            each
            for share in self._shares.values()
            if share.interface == interface
            for each in share.listeners
            if each.kind == message.way
        ]
        local, source = client.getsockname(), ip_address(message.source)
        by = [each for each in listeners if _accepts(each.socket, local)]
        if not by:
            raise ValueError("a connection that came by none of the listeners")
        try:
            peer = bare(ip_address(client.getpeername()[0]))
        except OSError:  # reset since
            return False
        if peer != source and not any(is_listed(peer, read_networks(each.hops)) for each in by):
            raise ValueError("a connection from elsewhere")
        return True


def _accepts(listener: socket.socket, local: Sequence[object]) -> bool:
    """Whether what is connected at a local address may have been accepted by a listener."""
    bound = listener.getsockname()
    return bound[1] == local[1] and (bound[0] == local[0] or ip_address(bound[0]).is_unspecified)
