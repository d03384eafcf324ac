"""What a stock mitmproxy needs to be told, and has to be kept from: the parts of `addons/egress.py` that are mitmproxy's.

mitmproxy's switches can open, skip or rewrite requests behind an addon's back, so all that could is held at one value; and it
lacks ways to say some things, so they are said here. Nothing of this is used by the engine.
"""

# mypy: allow-untyped-calls
# (mitmproxy's options and layers are not annotated throughout)

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final, Literal

from mitmproxy.flow import Flow
from mitmproxy.http import HTTPFlow, Response
from mitmproxy.options import Options
from mitmproxy.proxy import commands, events, mode_specs
from mitmproxy.proxy.layer import CommandGenerator, Layer

from egressd.gate.inspector.exchange import Exchange
from egressd.policy.names import Authority, BadHost, parse_authority
from egressd.policy.reasons import Reason

SET: Final[dict[str, Any]] = {
    "connection_strategy": "lazy",  # eager connects before anything was judged
    "http2": False,  # several requests at a time on one connection: a dial could not be told whose it is
    "http3": False,
    "onboarding": False,
    "rawtcp": False,
}
"""What mitmproxy is set to when this file is loaded."""

GUARDED: Final[dict[str, Any]] = SET | {
    # what opens, skips or rewrites a request after it was judged
    **dict.fromkeys(("ignore_hosts", "allow_hosts", "tcp_hosts", "udp_hosts"), ()),
    **dict.fromkeys(("map_remote", "map_local", "modify_headers", "modify_body"), ()),
    **dict.fromkeys(("client_replay", "server_replay"), ()),
    **dict.fromkeys(("client_certs", "upstream_auth", "stickyauth", "stickycookie"), None),
    "keep_host_header": False,
    # what believes anybody, or everybody
    "ssl_insecure": False,
    "validate_inbound_headers": True,
    "emudhra": False,
    "emudhra_old": False,
    # streaming before the addon has spoken
    "stream_large_bodies": None,
}
"""What mitmproxy must be set to, or nothing is carried. config.yaml and `--set` can say otherwise; then it does not start."""

MAX_REFUSED_BODY: Final = 64 * 1024
"""mitmproxy answers after it has read the whole body; a longer one that is refused costs its connection instead."""

EXCHANGE: Final = "egressd"
"""Where a flow's metadata hold its exchange."""

ALERT_ACCESS_DENIED, ALERT_UNRECOGNIZED_NAME = 49, 112
_MODES: Final = (mode_specs.RegularMode, mode_specs.Socks5Mode)


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


def end_process(why: str) -> None:
    """End at once: every moment without the policy is an open proxy's."""
    print(f"egressd: {why}, so mitmproxy ends", file=sys.stderr, flush=True)  # noqa: T201 # the log may be off
    os._exit(1)


def unguarded(options: Options) -> str | None:
    """Return the first guarded option that is not as it must be, None when all are."""
    for name, wanted in GUARDED.items():
        value = getattr(options, name)
        if (tuple(value) if wanted == () else value) != wanted:
            return f"{name}={value!r}; it must be {wanted!r}"
    for text in options.mode:
        if not isinstance(mode_specs.ProxyMode.parse(text), _MODES):
            return f"mode={text}; only regular and socks5 say which name a connection is for"
    return None


def held_exchange(flow: Flow) -> Exchange | None:
    """Return the exchange of a flow that was judged."""
    exchange = flow.metadata.get(EXCHANGE)
    return exchange if isinstance(exchange, Exchange) else None


def socks_target(address: tuple[Any, ...] | None) -> Authority | BadHost:
    """Return where a SOCKS client wants to go, from what mitmproxy has read of it."""
    if address is None:
        return BadHost(Reason.BAD_HOST, "no destination")
    return parse_authority(f"{_bracketed(str(address[0]))}:{address[1]}", None)


def authority_of(host: str, port: int) -> bytes:
    """Return the authority as it was sent: mitmproxy decodes xn-- names. What does not survive that is left to be refused."""
    try:
        name = host.encode("idna")
        if name.decode("idna") != host:
            name = host.encode("utf-8", "surrogateescape")
    except (UnicodeError, OverflowError):  # the latter where Punycode spells a far too large code point
        name = host.encode("utf-8", "surrogateescape")
    return b"%s:%d" % (b"[%s]" % name if b":" in name else name, port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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


def alert(description: int) -> bytes:
    """A fatal TLS alert (RFC 8446 §5.1, §6)."""
    return bytes((21, 3, 3, 0, 2, 2, description))


def bare_response() -> Response:
    """The response before any code has judged."""
    fields = {"content-type": "text/plain", "x-egressd-reason": "internal_error", "connection": "close"}
    return Response.make(502, b"egressd: denied (reason internal_error)\n", fields)
