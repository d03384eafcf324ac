"""The proxy that many write first, where there is no egressd: it dials whatever it is asked for, as the C library reads it.

Without it, the probes of egressd's own proxy would have nothing to get through by, and could not be shown to fail.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
from contextlib import suppress

from egressd.verify.wire import PROXY

_HEAD = 65_536


def main() -> None:
    """Serve until the input ends; says `{}` when it listens."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(PROXY)
    listener.listen()
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_serve, args=(client,), daemon=True).start()


def _serve(client: socket.socket) -> None:
    with client, suppress(OSError, ValueError):
        client.settimeout(5)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD:
            part = client.recv(4096)
            if not part:
                return
            head += part
        method, target = head.split(None, 2)[:2]
        tunnel = method == b"CONNECT"
        where = target if tunnel else re.split(rb"[/?#]", target.split(b"://", 1)[-1], maxsplit=1)[0]
        host, _, port = where.rpartition(b":") if re.search(rb":\d+\Z", where) else (where, b"", b"80")
        with socket.create_connection((host.strip(b"[]").decode("latin-1"), int(port)), 1) as upstream:
            if tunnel:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                head = head.split(b"\r\n\r\n", 1)[1]
            upstream.sendall(head)
            threading.Thread(target=_pump, args=(client, upstream), daemon=True).start()
            _pump(upstream, client)
            client.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the other thread


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while True:
            part = source.recv(65_536)
            if not part:
                return
            sink.sendall(part)
