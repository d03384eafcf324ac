"""The process of a worker, started with nothing but its end of the channel.

Imports next to nothing itself: `egressd run` starts its first worker before it loads the rest of control, so that the two
import side by side.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Final

_START: Final = "import gc, sys; gc.disable(); from egressd.gate.worker import start; start(sys.argv[1:])"
"""What is imported at the start is never garbage; the worker turns the collector on when all is there."""
_ROOM: Final = 4 * 1024 * 1024
"""Bytes of a worker's messages, as many as the kernel lets be, that need not be read yet: they outlive the worker."""
_LOOK: Final = 0.05
"""Seconds between two questions whether it has ended, where there is no descriptor left to wait with."""


class WorkerProcess:
    """A worker that imports and then waits for its configuration on the other end of `channel`.

    Whoever takes `channel` owns it. The process ends when the channel's end is closed, when this process ends, or by `kill`.
    """

    def __init__(self) -> None:
        """Start it; raises OSError."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _START, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                )
        except BaseException:
            self.channel.close()
            raise
        self.pid = self._process.pid

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()

    async def wait(self) -> None:
        """Return once it has ended and is no zombie."""
        from egressd.wiring.command import readable  # by now all of control is loaded

        if self._process.returncode is not None:
            return
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # none to be had: ask now and then
            while self._process.poll() is None:  # noqa: ASYNC110 -- nothing tells of it without a descriptor
                await asyncio.sleep(_LOOK)
            return
        try:
            await readable(descriptor)
        finally:
            os.close(descriptor)
        self._process.wait()

    def discard(self) -> None:
        """End it here and now; does nothing to one that has ended."""
        self.channel.close()
        self._process.kill()
        self._process.wait()
