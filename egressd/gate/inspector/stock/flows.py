"""A stock mitmproxy's flows as the policy needs them: whose exchange each is, what it was sent as, how much passes on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from mitmproxy.flow import Flow
from mitmproxy.http import HTTPFlow, Response

from egressd.gate.inspector.addon import EXCHANGE
from egressd.gate.inspector.exchange import Exchange

MAX_REFUSED_BODY: Final = 64 * 1024
"""mitmproxy answers after it has read the whole body; a longer one that is refused costs its connection instead."""


def held_exchange(flow: Flow) -> Exchange | None:
    """Return the exchange of a flow that was judged."""
    exchange = flow.metadata.get(EXCHANGE)
    return exchange if isinstance(exchange, Exchange) else None


def authority_of(host: str, port: int) -> bytes:
    """Return the authority as it was sent: mitmproxy decodes xn-- names. What does not survive that is left to be refused."""
    try:
        name = host.encode("idna")
        if name.decode("idna") != host:
            name = host.encode("utf-8", "surrogateescape")
    except (UnicodeError, OverflowError):  # the latter where Punycode spells a far too large code point
        name = host.encode("utf-8", "surrogateescape")
    return b"%s:%d" % (b"[%s]" % name if b":" in name else name, port)


def counted(exchange: Exchange, way: Literal["up", "down"]) -> Callable[[bytes], bytes]:
    """Return what passes on a piece of a body and counts it."""

    def passed(data: bytes) -> bytes:
        setattr(exchange, way, getattr(exchange, way) + len(data))
        return data

    return passed


def has_long_body(flow: HTTPFlow) -> bool:
    """Say whether a request has a body that is, or may be, longer than `MAX_REFUSED_BODY`."""
    headers = flow.request.headers
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > MAX_REFUSED_BODY


def bare_response() -> Response:
    """The response before any code has judged."""
    fields = {"content-type": "text/plain", "x-egressd-reason": "internal_error", "connection": "close"}
    return Response.make(502, b"egressd: denied (reason internal_error)\n", fields)
