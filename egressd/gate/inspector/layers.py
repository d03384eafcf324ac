"""The HTTP layer with our connections in it: who speaks to the sandbox, and which upstream a request gets.

Nothing of TLS, tunnels or the guessing of protocols lies below it. The upstream of a request is where its exchange is bound and
nothing else: the address that mitmproxy would take from the flow is only checked to be that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from mitmproxy.connection import Client, ConnectionState
from mitmproxy.connection import Server as ServerConnection
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator
from mitmproxy.proxy.layers.http import (
    GetHttpConnection,
    GetHttpConnectionCompleted,
    HttpClient,
    HttpLayer,
    HTTPMode,
    HttpStream,
    RegisterHttpConnection,
)

from egressd.gate.connection import Connection
from egressd.gate.inspector.addon import exchange_of
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.http1.origin_side import OriginSide
from egressd.gate.inspector.http1.sandbox_side import SandboxSide
from egressd.gate.permission import read_place
from egressd.gate.tls.stream import ByteStream
from egressd.policy.names import format_host


@dataclass(frozen=True, slots=True)
class Options:
    """What the HTTP layers read of mitmproxy's options, and no more: no Master, no file, nothing to set.

    A name that is not here raises where it is read, which ends the flow: an option that a later version of
    mitmproxy adds is looked at before it does anything.
    """

    body_size_limit: str | None = None
    stream_large_bodies: str | None = None
    """Never set: with it, mitmproxy streams a body before the addon has spoken."""
    store_streamed_bodies: bool = False
    validate_inbound_headers: bool = True
    keep_host_header: bool = False
    websocket: bool = False
    rawtcp: bool = False
    connection_strategy: str = "lazy"
    proxy_debug: bool = False
    normalize_outbound_headers: bool = True
    http2_ping_keepalive: int = 0
    http_connect_send_host_header: bool = True


OPTIONS = Options()


class Upstream(HttpClient):
    """Opens an upstream connection and speaks HTTP/1.1 on it."""

    def __init__(self, context: Context, credential: str | None) -> None:
        """`context.server` is the connection to open; `credential` goes with every request on it, or none with any."""
        super().__init__(context)
        self.credential = credential
        self.http = OriginSide(context)

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        error = yield commands.OpenConnection(self.context.server)
        if not error:
            self.child_layer = self.http
            self._handle_event = self.http.handle_event  # type: ignore[method-assign]  # as mitmproxy's own does
            yield from self.http.handle_event(event)
        yield RegisterHttpConnection(self.context.server, error)


class InspectorLayer(HttpLayer):
    """mitmproxy's HTTP layer for one connection of a sandbox."""

    def __init__(self, context: Context, head_bytes: int) -> None:
        """`context.client` is the sandbox's connection; `context.server` names where it leads and is never opened itself."""
        super().__init__(context, HTTPMode.transparent)
        self.sandbox_side = SandboxSide(context.fork(), head_bytes)
        self.connections[context.client] = self.sandbox_side
        self._upstream: Upstream | None = None
        self._unclean = False

    @property
    def upstream_unclean(self) -> bool:
        """Whether the upstream went without saying that it had said everything: then its silence ends no body."""
        return self._unclean

    @upstream_unclean.setter
    def upstream_unclean(self, unclean: bool) -> None:
        self._unclean = unclean
        if self._upstream is not None:
            self._upstream.http.unclean = unclean

    def get_connection(self, event: GetHttpConnection, *, reuse: bool = True) -> CommandGenerator[None]:  # noqa: ARG002 # asked for by HTTP/2 clients alone
        """Give a request its upstream: the open one if it leads to the same place and may still be used, else a new one."""
        stream = self.command_sources[event]
        assert isinstance(stream, HttpStream)
        exchange = exchange_of(stream.flow)
        assert exchange.admitted
        assert exchange.bound is not None
        bound = exchange.bound
        address = (format_host(bound.host).strip("[]"), bound.port)
        secure = bound.scheme == "https"
        if (event.address, event.tls) != (address, secure) or event.via or event.transport_protocol != "tcp":
            raise ValueError("the flow leads elsewhere than its exchange")
        if self._upstream is not None:
            server = self._upstream.context.server
            if self._usable(exchange, address, secure):
                self._upstream.http.exchange = exchange
                del self.command_sources[event]
                yield from self.event_to_child(stream, GetHttpConnectionCompleted(event, (server, None)))
                return
            self._upstream = None
            if server.connected:
                yield commands.CloseConnection(server)
            self.connections.pop(server, None)
        context = self.context.fork()
        context.server = ServerConnection(
            address=address, transport_protocol="tcp", tls=secure, sni=address[0] if secure else None
        )
        upstream = self._upstream = Upstream(context, exchange.credential)
        upstream.http.exchange = exchange
        self.connections[context.server] = upstream
        self.waiting_for_establishment[context.server].append(event)
        yield from self.event_to_child(upstream, events.Start())

    def _usable(self, exchange: Exchange, address: tuple[str, int], secure: bool) -> bool:
        """Whether the open upstream serves this exchange: same place, idle, and at an address that its own rule permits.

        Never with another credential: some origins take a connection for whoever was authenticated on it (Negotiate), and what
        one answer has left on it must not reach the sandbox unmasked as the next.
        """
        assert self._upstream is not None
        server = self._upstream.context.server
        if (
            not (server.connected and self._upstream.http.idle)
            or self._upstream.credential != exchange.credential
        ):
            return False
        if server.address != address or server.tls != secure or server.peername is None:
            return False
        peer = read_place(server.peername[0])
        if exchange.permits(peer) is not None:
            return False
        exchange.upstream = peer
        return True


def client_of(connection: Connection, stream: ByteStream) -> Client:
    """The sandbox's side in mitmproxy's terms. Peer addresses are never identity here, so there are none."""
    return Client(
        peername=("sandbox", 0),
        sockname=("egressd", connection.destination.port),
        state=ConnectionState.OPEN,
        tls=connection.tls,
        sni=connection.sni,
        alpn=stream.alpn,
        cipher=stream.cipher,
    )


def context_of(connection: Connection, client: Client) -> Context:
    """What the layers are told: who asks, and where the connection leads if no request says otherwise."""
    context = Context(client, OPTIONS)  # type: ignore[arg-type]  # a view of what the layers read, as said there
    host = format_host(connection.host).strip("[]") if connection.host is not None else ""
    context.server.address = (host, connection.destination.port)
    context.server.tls = connection.tls
    return context
