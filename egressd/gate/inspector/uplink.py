"""The upstream of an HTTP/1 connection: opened for an admitted exchange, and closed to bytes of any other.

This is the one place that the engine's bytes leave by, so what must hold for them is checked here once more, whatever the
layers believe: the exchange is admitted, and one that carries a credential goes to a host that has proved its name.
"""

from __future__ import annotations

from mitmproxy.connection import Connection as AnyConnection
from mitmproxy.connection import ConnectionState
from mitmproxy.connection import Server as ServerConnection

from egressd.gate.inspector.conduit import Conduit
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.upstream import Opened, OpenFailed, leads_to, open_upstream
from egressd.policy.reasons import Reason


class Uplink:
    """At most one upstream at a time; `server` is it in mitmproxy's terms, while the layers may use it."""

    def __init__(self, conduit: Conduit, opened: Opened | OpenFailed | None) -> None:
        """`opened` is the upstream of the first exchange, if one was dialled early."""
        self.server: ServerConnection | None = None
        self._conduit = conduit
        self._opened = opened

    async def open(self, exchange: Exchange) -> Opened | OpenFailed:
        """Return the upstream of an admitted exchange: what was dialled early if it is that, else a new one."""
        opened = self._take_opened(exchange) or await open_upstream(exchange)
        if isinstance(opened, Opened) and exchange.lease is not None and not opened.verified:
            opened.stream.abort()
            return OpenFailed(Reason.CREDENTIAL_NEEDS_TLS, "the upstream is not verified")
        return opened

    def _take_opened(self, exchange: Exchange) -> Opened | OpenFailed | None:
        """Return what was dialled early, once, if it is where the exchange is bound and may go."""
        opened, self._opened = self._opened, None
        if isinstance(opened, Opened) and not leads_to(opened, exchange):
            opened.stream.close()
            return None
        return opened

    def adopt(self, server: ServerConnection, opened: Opened, exchange: Exchange) -> None:
        """Take an upstream that was opened for an exchange, and begin to read from it."""
        exchange.upstream = opened.address
        server.state = ConnectionState.OPEN
        server.peername = (str(opened.address), opened.port)
        server.alpn, server.cipher = opened.stream.alpn, opened.stream.cipher
        self.server = server
        self._conduit.adopt(opened)

    def send(self, exchange: Exchange | None, connection: AnyConnection, data: bytes) -> None:
        """Have bytes of an exchange written upstream; RuntimeError for those that nothing lets out.

        Those for an upstream that is gone are dropped.
        """
        if exchange is None or not exchange.admitted:
            raise RuntimeError("bytes for the upstream of a request that is not admitted")
        if connection is not self.server:
            return
        upstream = self._conduit.upstream
        if exchange.lease is not None and upstream is not None and not upstream.verified:
            raise RuntimeError("a credential for an upstream that is not verified")
        exchange.up += len(data)
        self._conduit.to_upstream(data)

    def ended(self) -> ServerConnection | None:
        """Note that the upstream sends no more; returns it, None if that was known."""
        server = self.server
        if server is None or server.state is ConnectionState.CLOSED:
            return None
        server.state = ConnectionState.CLOSED
        return server

    def drop(self) -> None:
        """Let the upstream go; what was not yet written to it is lost."""
        if self.server is not None:
            self.server.state = ConnectionState.CLOSED
            self.server = None
        self._conduit.drop_upstream()

    def release(self) -> None:
        """Let go of what was dialled early, if it was never used."""
        opened, self._opened = self._opened, None
        if isinstance(opened, Opened):
            opened.stream.close()
