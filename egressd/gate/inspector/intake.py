"""What an upstream has said, fed on in pieces no larger than limits, a reader and a veil can take."""

from __future__ import annotations

import asyncio
from typing import Protocol

from mitmproxy.proxy import events

from egressd.gate.inspector.conduit import Conduit
from egressd.gate.inspector.http1.sandbox_side import SandboxSide
from egressd.gate.inspector.pace import Pace
from egressd.gate.inspector.pipe import PipeLayer
from egressd.gate.inspector.turn import Turn
from egressd.gate.inspector.uplink import Uplink
from egressd.gate.inspector.veil import TURN, Veil

_HEAD_END = b"\r\n\r\n"


class Owner(Protocol):
    """Who is fed."""

    @property
    def sandbox_side(self) -> SandboxSide | PipeLayer:
        """Who speaks to the sandbox."""

    def is_open(self) -> bool:
        """Whether anything is still taken."""

    def feed(self, event: events.Event | None = None) -> None:
        """Take an event, and do all that follows of it and of those that wait."""

    def go_on(self) -> None:
        """Ask again: there may be room for what waits."""


class Intake:
    """The way down of one connection, from what its upstream says to what its layer is fed."""

    def __init__(self, owner: Owner, conduit: Conduit, pace: Pace, turn: Turn, uplink: Uplink) -> None:
        """Nothing waits."""
        self._owner = owner
        self._conduit = conduit
        self._pace = pace
        self._turn = turn
        self._uplink = uplink
        self._loop = asyncio.get_running_loop()

    def take(self, data: bytes = b"") -> None:
        """Feed what the limits let pass, of what waited and of `data` behind it."""
        data = self._pace.downward(data)
        if self._turn.veil is not None:
            self._sip(data)
            return
        self._turn.came(len(data))
        server = self._uplink.server
        self._owner.feed(events.DataReceived(server, data) if data and server is not None else None)

    def _sip(self, data: bytes) -> None:
        """Feed by small pieces what may be coded, and keep what the client cannot take what it stands for of."""
        at, veil = 0, self._turn.veil
        enough = veil.undone + TURN if veil is not None else 0
        while at < len(data) and (server := self._uplink.server) is not None and self._owner.is_open():
            if self._conduit.client.paused:
                self._pace.keep(data[at:])
                break
            veil = self._turn.veil
            if veil is not None and veil.undone >= enough:
                self._pace.keep(data[at:])
                self._loop.call_soon(self._owner.go_on)
                break
            piece = data[at:] if veil is None else data[at : self._sip_end(veil, data, at)]
            at += len(piece)
            self._turn.came(len(piece))
            self._owner.feed(events.DataReceived(server, piece))
        self._owner.feed()

    def _sip_end(self, veil: Veil, data: bytes, at: int) -> int:
        """Return where the next piece ends: only a body may be coded, and the head that says so is no part of one."""
        if self._owner.sandbox_side.begun:
            return at + veil.sip if veil.inflates else len(data)
        head = data.find(_HEAD_END, at)
        return (head + len(_HEAD_END) if head >= 0 else at) + veil.sip
