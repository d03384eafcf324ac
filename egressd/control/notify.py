"""What systemd is told (sd_notify(3)): a datagram to the socket that NOTIFY_SOCKET names; nothing where there is none."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

_TAKEN: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Tells the service manager how the daemon is; never raises. `watchdog` is how often it wants to hear, seconds, or None."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the variables out of the environment: no child may speak in this process's name."""
        address, usec, pid = (environ.pop(name, "") for name in _TAKEN)
        # A path, or a name without a place in the file system, which begins with NUL in the kernel's spelling.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        ours = pid in ("", str(os.getpid()))
        self.watchdog = int(usec) / 1e6 if ours and usec.isascii() and usec.isdigit() and int(usec) else None

    def tell(self, *fields: str) -> None:
        """Send `NAME=VALUE` fields: READY=1, STOPPING=1, WATCHDOG=1, STATUS=…"""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
        ):
            sock.setblocking(False)
            sock.sendto("\n".join(fields).encode("utf-8", "replace"), self._address)

    def reloading(self) -> None:
        """Say that a reload has begun; `tell("READY=1")` ends it."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
