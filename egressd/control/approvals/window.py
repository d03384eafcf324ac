"""Where people answer a run that stands alone: a control socket of its own, beside the daemon's, with the approvals alone.

It is made once the command runs, so that nobody waits for it, and goes with the run. A sandbox does not see it where it usually
is, and is not heard wherever it were: who is in a pid namespace of his own may not speak (`peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from egressd.control import peers
from egressd.control.approvals.office import Office
from egressd.control.config import Config
from egressd.control.estate import StateError
from egressd.control.voice import say

_MARK: Final = "-run-"
_LATER: Final = 1.0
"""Seconds after which a command is one that somebody may be asked about."""
_SETTLED: Final = 60.0
"""Seconds after which a socket that nobody listens at is one that was left."""


def place_of(control_socket: Path, sandbox: str) -> Path:
    """Return where a run that stands alone listens."""
    return control_socket.with_name(f"{control_socket.stem}{_MARK}{sandbox}{control_socket.suffix}")


def places(control_socket: Path) -> Iterator[Path]:
    """Yield where runs that stand alone may listen; some may have been killed."""
    with contextlib.suppress(OSError):
        yield from sorted(
            control_socket.parent.glob(f"{control_socket.stem}{_MARK}sbx-*{control_socket.suffix}")
        )


def _sweep(control_socket: Path) -> None:
    """Take away the sockets of runs that were killed; one that was made just now may not be listened at yet."""
    for path in places(control_socket):
        with contextlib.suppress(OSError):
            if abs(time.time() - path.lstat().st_mtime) < _SETTLED:
                continue
            found = peers.connect(path, socket.SOCK_STREAM)
            if found is None:
                path.unlink()
            else:
                found.close()


async def serve_alone(config: Config, sandbox: str, office: Office, *, asks: bool) -> None:
    """Serve until cancelled. Where there can be no socket nobody can approve: told if the rules ask, and the run goes on."""
    path = place_of(config.control_socket, sandbox)
    _sweep(config.control_socket)
    await asyncio.sleep(_LATER)  # a short command does not wait for what it has no use for
    # aiohttp takes a tenth of a second to import, in which control would answer nobody.
    module = await asyncio.to_thread(importlib.import_module, "egressd.control.api_server")
    server = module.ApiServer()
    try:
        sock = peers.listen(path, socket.SOCK_STREAM)
    except StateError as error:
        if asks:
            say(f"nobody can approve anything for this run: {error}")
        return
    try:
        await server.start_alone(office, sock)
        await asyncio.Event().wait()
    finally:
        path.unlink(missing_ok=True)
        await server.stop()
        sock.close()
