"""The accept loop: takes connections from a sandbox's listening sockets, fairly and within its budget."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_BURST = 16
"""Most connections taken in one wake-up, so that one sandbox's flood does not hold the loop."""
_LAST_BURSTS = 256
"""Most bursts at the end, should a sandbox not stop connecting."""
_REST = 0.1
"""Seconds without accepting after the process ran out of descriptors or memory; the backlog keeps what waits."""


class Acceptor:
    """Accepts from one listening socket made inside a sandbox and starts a task for each connection.

    `carry(sock)` owns the accepted, non-blocking socket. `close` stops accepting and cancels nothing that runs.
    """

    def __init__(
        self, listener: socket.socket, carry: Callable[[socket.socket], Coroutine[Any, Any, None]]
    ) -> None:
        """Start accepting on the running loop; `listener` is closed by `close`."""
        self._listener = listener
        self._carry = carry
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = True
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Take what waits in the backlog, so that it is recorded, and close this process's socket (control keeps its own)."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._listener)
            for _ in range(_LAST_BURSTS):
                if not self._accept():
                    break
            self._listener.close()

    def leave(self) -> None:
        """Stop accepting and let what waits in the backlog wait: whoever has the same listener takes it."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _accept(self) -> bool:
        """Take the connections that wait; returns whether there may be more."""
        for _ in range(_BURST):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                if error.errno in _OUT_OF and self._open:
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_REST, self._resume)
                return False
            sock.setblocking(False)
            # A listener made with protocol 0 would leave TCP_NODELAY off on what it accepts: 44 ms a request.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._carry(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return True

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener, self._accept)
