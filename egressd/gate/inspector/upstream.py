"""The way out for one exchange: dial where it is bound, at an address that its rule permits, and verify who answers."""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from egressd.gate.connection import Connection
from egressd.gate.dialer import DialFailed
from egressd.gate.inspector.binding import Bound
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.permission import Place
from egressd.gate.tls.stream import (
    ByteStream,
    SessionCache,
    TlsStream,
    UpstreamTlsError,
    connect_plain,
    connect_tls,
    upstream_context,
)
from egressd.policy.attempt import Address
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason

type Permits = Callable[[Address], Reason | None]

_TLS_REASONS: Final = {
    "certificate": Reason.UPSTREAM_TLS,
    "handshake": Reason.UPSTREAM_TLS,
    "timeout": Reason.UPSTREAM_TIMEOUT,
    "closed": Reason.UPSTREAM_CLOSED,
    "client_cert_wanted": Reason.UPSTREAM_WANTS_CLIENT_CERTIFICATE,
    "broken": Reason.UPSTREAM_TLS,
}
_SESSIONS: Final = SessionCache()


@dataclass(frozen=True, slots=True)
class Opened:
    """An upstream connection, ready for a request, at the address that was checked."""

    stream: ByteStream
    address: Place
    sandbox: str
    name: str
    port: int
    context: ssl.SSLContext | None

    @property
    def verified(self) -> bool:
        """Whether whoever is there has proved to be the judged name."""
        return self.context is not None and _verifies(self.context)

    def keep_session(self) -> None:
        """Keep the TLS session for the same sandbox's next connection to the same place; called when this one ends."""
        if not isinstance(self.stream, TlsStream) or self.context is None:
            return
        key = _session_key(self.sandbox, self.name, self.address, self.port, self.context)
        now = time.monotonic()
        if _SESSIONS.due(key, now):
            _SESSIONS.put(key, self.context, self.stream.session, self.stream.resumed, now)


@functools.lru_cache(maxsize=16)
def _verifies(context: ssl.SSLContext) -> bool:
    return context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """There is no upstream connection, and why; the detail is for the record alone."""

    reason: Reason
    detail: str


HTTP1: Final = ("http/1.1",)
HTTP2: Final = ("h2", "http/1.1")
"""What is offered to an upstream: the second where the client has offered it too."""


def trusted(ca_file: str | None, alpn: tuple[str, ...] = HTTP1) -> ssl.SSLContext:
    """Return the context that verifies upstreams; made once, while there is a file system to read certificates from."""
    return _contexts(ca_file)[alpn]


@functools.lru_cache(maxsize=4)
def _contexts(ca_file: str | None) -> dict[tuple[str, ...], ssl.SSLContext]:
    return {alpn: upstream_context(ca_file, alpn) for alpn in (HTTP1, HTTP2)}


def reason_of(error: Exception | None) -> Reason:
    """Return why an upstream stream was lost."""
    return _TLS_REASONS[error.kind] if isinstance(error, UpstreamTlsError) else Reason.UPSTREAM_CLOSED


async def open_upstream(exchange: Exchange) -> Opened | OpenFailed:
    """Dial the bound destination of an admitted exchange; for https, only a server that proves to be the judged name is used."""
    assert exchange.admitted
    assert exchange.bound is not None
    return await _open(exchange.connection, exchange.bound, exchange.permission, HTTP1)


async def open_early(connection: Connection, permits: Permits) -> Opened | OpenFailed:
    """Dial the destination of an allowed TLS connection before its client is answered, and learn by that what the server speaks.

    For the door, after the connection's record was written. No byte of HTTP is said before a request is admitted.
    """
    assert connection.decision.allowed
    assert connection.host is not None
    return await _open(
        connection, Bound(connection.host, connection.destination.port, "https"), permits, HTTP2
    )


def leads_to(opened: Opened, exchange: Exchange) -> bool:
    """Say whether an upstream that was opened early is the one for an admitted exchange, and still there."""
    bound = exchange.bound
    assert bound is not None
    here = (opened.name, opened.port) == (format_host(bound.host).strip("[]"), bound.port)
    alive = not opened.stream.closed and opened.stream.clean is None
    return here and alive and bound.scheme == "https" and exchange.permits(opened.address) is None


async def _open(
    connection: Connection, bound: Bound, permits: Permits, alpn: tuple[str, ...]
) -> Opened | OpenFailed:
    loop = asyncio.get_running_loop()
    services = connection.services
    dialed = await services.dialer.dial(bound.host, bound.port, permits)
    if isinstance(dialed, DialFailed):
        return OpenFailed(dialed.reason, dialed.detail)
    name = format_host(bound.host).strip("[]")
    if bound.scheme != "https":
        plain = await connect_plain(loop, dialed.sock)
        return Opened(plain, dialed.address, connection.sandbox.id, name, bound.port, None)
    context = trusted(services.settings.upstream_ca, alpn)
    key = _session_key(connection.sandbox.id, name, dialed.address, bound.port, context)
    session = _SESSIONS.get(key, context, time.monotonic())
    try:
        stream = await connect_tls(
            loop, dialed.sock, context, name, services.settings.handshake_timeout, session
        )
    except UpstreamTlsError as error:
        _SESSIONS.forget(key)
        return OpenFailed(reason_of(error), f"{error.kind}: {error.detail}" if error.detail else error.kind)
    return Opened(stream, dialed.address, connection.sandbox.id, name, bound.port, context)


def _session_key(
    sandbox: str, name: str, address: Place, port: int, context: ssl.SSLContext
) -> tuple[str, str, Place, int, int]:
    return (
        sandbox,
        name,
        address,
        port,
        id(context),
    )  # a session belongs to its context, as `SessionCache` checks
