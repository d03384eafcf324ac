"""What the door itself says to a client, when nobody behind it will: TLS alerts, and last words that arrive."""

from __future__ import annotations

import asyncio
import socket

from egressd.gate.tls.hello import ClientHello
from egressd.gate.tls.leaves import HTTP1, HTTP2

ALERT_ACCESS_DENIED = 49
ALERT_INTERNAL_ERROR = 80
ALERT_UNRECOGNIZED_NAME = 112
ALERT_NO_APPLICATION_PROTOCOL = 120
"""RFC 8446 §6, RFC 6066 §3, RFC 7301 §3.2."""


def alert(description: int) -> bytes:
    """Return the plaintext record of a fatal TLS alert (RFC 8446 §5.1, §6)."""
    return bytes((21, 3, 3, 0, 2, 2, description))


def answered_in(hello: ClientHello) -> str:
    """Return the protocol in which a client is told something without an upstream: HTTP/2 if it offers nothing else."""
    return HTTP2 if HTTP2.encode("ascii") in hello.alpn and HTTP1.encode("ascii") not in hello.alpn else HTTP1


async def last_word(sock: socket.socket, data: bytes) -> bool:
    """Send a last word so that it arrives: half-close, then drain, since unread bytes make the close a reset.

    Returns whether it was sent; the socket must then be closed without a reset.
    """
    loop = asyncio.get_running_loop()
    said = False
    try:
        async with asyncio.timeout(1.0):
            await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            said = True
            for _ in range(16):
                if not await loop.sock_recv(sock, 4096):
                    break
    except (OSError, TimeoutError):
        return said
    return said
