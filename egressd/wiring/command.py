"""A command that runs in a sandbox: bubblewrap's reports about it, signals to it, and its end."""

import asyncio
import contextlib
import json
import os
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from egressd.wiring.errors import WiringError

FORWARDED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip
_SIGNAL_DEADLINE: Final = 5.0
_END_DEADLINE: Final = 5.0
_COMMAND_INSIDE: Final = 2
"""bubblewrap's init is process 1 of the sandbox's pid namespace, the command is process 2."""


class Command:
    """What became of the maker: bubblewrap's outer process, which ends when the command ends.

    `report` is the reading end of the pipe given to bubblewrap as --json-status-fd; it is closed by `wait`.
    """

    def __init__(self, outer: asyncio.subprocess.Process, report: int) -> None:
        self._outer = outer
        self._report = report
        self._first: int | None = None
        self._deliveries: set[asyncio.Task[None]] = set()

    async def wait(self) -> int:
        """The command's exit status, 128 + N if signal N ended it. Raises WiringError if bubblewrap never started it."""
        code: int | None = None
        os.set_blocking(self._report, False)
        try:
            async for line in _lines(self._report):
                self._first = line.get("child-pid", self._first)
                code = line.get("exit-code", code)
        finally:
            os.close(self._report)
        ended = await self._outer.wait()
        for task in self._deliveries:
            task.cancel()
        if code is not None:
            return code
        if ended < 0:
            return 128 - ended
        raise WiringError(
            "bwrap", f"could not start the command (status {ended})", "its own message is above"
        )

    def signal(self, number: int) -> None:
        """Send a signal to the command, as soon as there is one."""
        task = asyncio.get_running_loop().create_task(self._deliver(number))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    async def gone(self) -> None:
        """Wait until the sandbox's first process, and so every process in it, has ended."""
        if self._first is None:
            return
        try:
            descriptor = os.pidfd_open(self._first)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(_END_DEADLINE):
                await readable(descriptor)
        except TimeoutError:
            return
        finally:
            os.close(descriptor)

    async def _deliver(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SIGNAL_DEADLINE
        while self._outer.returncode is None and loop.time() < deadline:
            process = self._process()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
                return
            await asyncio.sleep(0.005)

    def _process(self) -> int | None:
        """The command itself: signals go to it alone, as `docker run` sends them."""
        if self._first is None:
            return None
        try:
            listed = Path(f"/proc/{self._first}/task/{self._first}/children").read_text(encoding="utf-8")
            return next((int(pid) for pid in listed.split() if _number_inside(pid) == _COMMAND_INSIDE), None)
        except OSError:
            return None


def _number_inside(process: str) -> int:
    """A process's number in the innermost pid namespace it is in (proc(5), NSpid)."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return 0


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read without blocking."""
    look = select.poll()  # select(2) knows no descriptor above 1023
    look.register(descriptor, select.POLLIN)
    if look.poll(0):
        return
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not waiting.done():
            waiting.set_result(None)

    loop.add_reader(descriptor, ready)
    try:
        await waiting
    finally:
        loop.remove_reader(descriptor)


async def _lines(descriptor: int) -> AsyncIterator[dict[str, Any]]:
    """JSON objects, one a line, until the pipe's other end is closed."""
    held = b""
    while True:
        await readable(descriptor)
        data = os.read(descriptor, 4096)
        if not data:
            return
        *whole, held = (held + data).split(b"\n")
        for line in whole:
            if line.strip():
                yield json.loads(line)
