"""How a connection of a stock mitmproxy opens: what is spoken on it is said by its first bytes, judged, and nothing else is."""

# mypy: allow-untyped-calls
# (mitmproxy's layers are not annotated throughout)

from __future__ import annotations

from typing import Any, Final

from mitmproxy.proxy import commands, events, layers, mode_specs
from mitmproxy.proxy.layer import CommandGenerator, Layer, NextLayer
from mitmproxy.proxy.layers import modes
from mitmproxy.proxy.layers.http import HTTPMode

from egressd.gate.door.arrival import Http, Recogniser, Tls
from egressd.gate.inspector.stock.visitor import Visitor
from egressd.journal.record import clip
from egressd.policy.attempt import Decision
from egressd.policy.names import Authority, BadHost, parse_authority
from egressd.policy.reasons import Reason

_ACCESS_DENIED, _UNRECOGNIZED_NAME = 49, 112  # RFC 8446 §6
_MISMATCHES: Final = frozenset({Reason.SNI_MISMATCH, Reason.BAD_HOST, Reason.NON_ASCII_HOST})


class Refuse(Layer):
    """Says a last word and closes."""

    def __init__(self, context: Any, word: bytes = b"") -> None:
        """`word` is what the client is sent, such as a TLS alert."""
        super().__init__(context)
        self._word = word
        self._said = False

    def _handle_event(self, _: events.Event) -> CommandGenerator[None]:
        if self._said:
            return
        self._said = True
        if self._word:
            yield commands.SendData(self.context.client, self._word)
        yield commands.CloseConnection(self.context.client)


def layer_for(visitor: Visitor, nextlayer: NextLayer) -> Layer | None:
    """Return what is spoken on a connection: plain proxy requests, TLS or HTTP in a tunnel, else a refusal; None if not said yet.

    Where that takes a decision on the connection, it is made and written down.
    """
    context = nextlayer.context
    if not visitor.tunnel and isinstance(context.client.proxy_mode, mode_specs.RegularMode):
        if len(context.layers) != 1 or not isinstance(context.layers[0], modes.HttpProxy):
            return Refuse(context)
        if nextlayer.data_client()[:1] == b"\x16":
            visitor.decide(Decision("deny", Reason.UNKNOWN_PROTOCOL), "TLS to the proxy itself")
            return Refuse(context, _alert(_ACCESS_DENIED))
        return layers.HttpLayer(context, HTTPMode.regular)
    if context.client.tls_established:
        return layers.HttpLayer(context, HTTPMode.transparent)
    if not visitor.tunnel:
        authority = _socks_target(context.server.address)
        if isinstance(authority, BadHost):
            visitor.decide(Decision("deny", authority.reason), clip(authority.detail))
            return Refuse(context)
        visitor.lead_to(authority)
    return _arrived(visitor, nextlayer)


def _arrived(visitor: Visitor, nextlayer: NextLayer) -> Layer | None:
    """Judge the first bytes of a tunnel. A denied destination is told so inside: every request gets that page."""
    context = nextlayer.context
    arrival = Recogniser().read(nextlayer.data_client())
    if arrival is None:
        return None
    if isinstance(arrival, Http):
        visitor.decide(visitor.judge("http"))
        return layers.HttpLayer(context, HTTPMode.transparent)
    if not isinstance(arrival, Tls):
        visitor.decide(Decision("deny", arrival.reason), arrival.detail)
        return Refuse(context)
    decision = visitor.judge_hello(arrival)
    visitor.decide(decision, "ech" if arrival.hello.ech else None)
    if decision.reason in _MISMATCHES:
        return Refuse(context, _alert(_UNRECOGNIZED_NAME))
    outer = layers.ServerTLSLayer(context)
    outer.child_layer = layers.ClientTLSLayer(context)
    return outer


def _socks_target(address: tuple[Any, ...] | None) -> Authority | BadHost:
    """Return where a SOCKS client wants to go, from what mitmproxy has read of it."""
    if address is None:
        return BadHost(Reason.BAD_HOST, "no destination")
    return parse_authority(f"{_bracketed(str(address[0]))}:{address[1]}", None)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _alert(description: int) -> bytes:
    """A fatal TLS alert (RFC 8446 §5.1, §6)."""
    return bytes((21, 3, 3, 0, 2, 2, description))
