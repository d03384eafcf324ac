"""What follows an upgrade to WebSocket: the layer that takes the place of the HTTP layer.

Both streams of frames are checked and passed on as they come; nothing of a message is kept. What comes back on an upgrade that
carries a credential passes through its veil.
"""

from __future__ import annotations

from typing import Final

from mitmproxy.connection import Client, Server
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.layer import CommandGenerator

from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.fields import onward_response
from egressd.gate.inspector.frameveil import FrameVeil
from egressd.gate.inspector.head import ResponseHead
from egressd.gate.inspector.messages import section
from egressd.gate.inspector.outcomes import Ended, Failed
from egressd.gate.inspector.veil import Veil
from egressd.gate.inspector.websocket import FrameCheck, check_answer, close_frame, farewell_code
from egressd.policy.reasons import WORDS, Reason


class PipeLayer:
    """The frames of one WebSocket, in both directions; to the engine also the side of the sandbox, as `SandboxSide` is."""

    begun: Final = True
    request_done: Final = True
    client_ended: Final = False
    trailers_dropped: Final = False
    buf: Final = b""
    retiring: bool = False
    upstream_unclean: bool = False
    """Of no meaning here: a WebSocket says itself when it ends."""

    def __init__(self, client: Client, server: Server, *, extended: bool, veil: Veil | None = None) -> None:
        """Both directions are between two frames. Those for the client pass through a `veil`, under which none is `extended`."""
        self._client, self._server = client, server
        self._up = FrameCheck(masked=True, extended=extended)
        self._down = FrameCheck(masked=False, extended=extended)
        self._veil = FrameVeil(veil) if veil is not None else None

    @property
    def sandbox_side(self) -> PipeLayer:
        """The side of the sandbox."""
        return self

    @property
    def framed(self) -> bool:
        """Whether a last word can be put in."""
        return (self._down.between or self._veil is not None) and not self._down.closing

    def last_word(self, reason: Reason) -> bytes:
        """Return the Close frame that tells the client why it ends, nothing where none can be put in."""
        if not self.framed:
            return b""
        return close_frame(farewell_code(reason), f"egressd: {WORDS[reason].says} (reason {reason.value})")

    def end_response(self) -> CommandGenerator[bool]:
        """No HTTP response is under way."""
        yield from ()
        return True

    def handle_event(self, event: events.Event) -> CommandGenerator[None]:
        """Pass on what came, unless something is wrong with it: then nothing of it."""
        if isinstance(event, events.DataReceived) and event.connection is self._client:
            problem = self._up.feed(event.data)
            if problem is None:
                yield commands.SendData(self._server, event.data)
            else:
                yield Failed(Reason.BAD_FRAMING, problem)
        elif isinstance(event, events.DataReceived):
            problem = self._down.feed(event.data)
            if problem is None:
                data = event.data if self._veil is None else self._veil.feed(event.data)
                yield commands.SendData(self._client, data)
            else:
                yield Failed(Reason.UPSTREAM_PROTOCOL, problem)
        elif isinstance(event, events.ConnectionClosed):
            orderly = self._up.closing or self._down.closing
            gone = Reason.CLIENT_CLOSED if event.connection is self._client else Reason.UPSTREAM_CLOSED
            detail = f"{self._up.frames} frames up, {self._down.frames} down"
            yield Ended(Reason.COMPLETED if orderly else gone, detail)


def upgrade(
    exchange: Exchange, head: ResponseHead, client: Client, server: Server
) -> tuple[PipeLayer, bytes] | str:
    """Return the layer that a 101 begins and the head that tells the client so, or why it is no answer to what was asked."""
    if exchange.offer is None:
        return "an upgrade that was not asked for"
    agreed = check_answer(exchange.offer, head.fields)
    if isinstance(agreed, str):
        return agreed
    veil, onward = exchange.veil, onward_response(head.fields)
    if veil is not None:
        if agreed.extended:
            return "frames that are coded could hide a credential"
        onward = veil.fields(onward)
    fields = (*onward, (b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"))
    layer = PipeLayer(client, server, extended=agreed.extended, veil=veil)
    return layer, section(b"HTTP/1.1 101 Switching Protocols", fields)
