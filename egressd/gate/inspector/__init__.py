"""The inspector: judges HTTP, request by request, with mitmproxy's layers as the engine's engine."""

from __future__ import annotations

if not __debug__:  # the asserts of mitmproxy's layers are its checks of state: without them it goes on in states it cannot be in
    raise RuntimeError("egressd does not run with -O or PYTHONOPTIMIZE")

from egressd.gate.connection import Connection
from egressd.gate.inspector import patches
from egressd.gate.inspector.engine import Engine
from egressd.gate.inspector.http2.engine import Http2Engine
from egressd.gate.inspector.upstream import Opened, OpenFailed
from egressd.gate.inspector.warm import warm
from egressd.gate.tls.stream import ByteStream

__all__ = ["inspect", "warm"]

patches.apply()


async def inspect(
    connection: Connection,
    stream: ByteStream,
    first: bytes = b"",
    *,
    opened: Opened | OpenFailed | None = None,
) -> None:
    """Carry HTTP on an accepted stream until it ends; `first` is what was read from it before.

    Every request is judged and recorded on its own. A connection whose decision is not allowed has every
    request answered with that reason. Cancelling this cuts both sides at once.

    `opened` is what came of dialling early: the upstream of the connection's first request, or of all of them where the
    client has agreed to HTTP/2; it is ours from here on.
    """
    if stream.alpn == b"h2":
        assert not first
        await Http2Engine(connection, stream, opened).run()
    else:
        await Engine(connection, stream, opened).run(first)
