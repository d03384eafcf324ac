"""As many `egressd run` as are asked for, in one process: `many_runs.py CONFIG COUNT AT_ONCE -- COMMAND`.

Each makes its own namespace and hands it to the daemon, as the verb does. Prints how long it took until all commands ran, and
then each one's exit status when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path

from egressd.control import peers
from egressd.control.attachment import Attachment
from egressd.control.config import load_config
from egressd.control.surroundings import Request


async def main(file: str, count: int, at_once: int, command: tuple[str, ...]) -> None:
    config = load_config({}, {}, file=Path(file))
    turn = asyncio.Semaphore(at_once)
    began = time.monotonic()
    running: list[asyncio.Task[int]] = []

    async def one(number: int) -> int:
        release = asyncio.Event()

        class Told(Attachment):
            async def _carry(self, namespace: object) -> int:
                release.set()
                return await super()._carry(namespace)  # type: ignore[arg-type]  # the very namespace that it made

        async with turn:
            sock = peers.connect(config.attach_socket, socket.SOCK_SEQPACKET)
            assert sock is not None
            request = Request(command, "lab", {"number": str(number)}, ready_timeout=60.0)
            made = asyncio.ensure_future(Told(request, config, os.environ, sock).run())
            started = asyncio.ensure_future(release.wait())
            await asyncio.wait({made, started}, return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if not made.done():
                ready.append(number)
        return await made

    ready: list[int] = []
    running = [asyncio.create_task(one(number)) for number in range(count)]
    while len(ready) < count and not any(task.done() for task in running):  # noqa: ASYNC110 -- two kinds of news
        await asyncio.sleep(0.01)
    seconds, own = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    # Each command runs on as the process that made its namespace, so that what it took is in its own account.
    took = sum(cpu_ms(pid) for pid in children())
    cpu = (own.ru_utime + own.ru_stime) * 1000
    say({"ready": len(ready), "seconds": seconds, "cpu": cpu, "children": took})
    done = await asyncio.gather(*running, return_exceptions=True)
    say({"statuses": [repr(one) if isinstance(one, BaseException) else one for one in done]})


def children() -> list[int]:
    """The processes that this one has started and that still run."""
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def cpu_ms(pid: int) -> float:
    """The processor time of a process and of its children that have ended (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * 1000 / os.sysconf("SC_CLK_TCK")


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), tuple(sys.argv[5:])))
