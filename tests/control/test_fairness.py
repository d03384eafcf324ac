"""One sandbox that takes all it can get, and another one in the same worker, which is served meanwhile.

What is asserted is generous: that nobody starves. How long the other one waits is with the report (`-s` shows it).
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from egressd.gate.settings import Settings
from tests.control.fleet import PATIENCE, Box, Fleet, fleet, until

GREEDY = r"""
import contextlib, socket, sys, time
port, way, most = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
said = b"GET http://egressd.internal/ HTTP/1.1\r\nHost: egressd.internal\r\n"
said += {"ask": b"\r\n", "hold": b"X: " + b"x" * 60000}[way]
held, count, told = [], 0, False
while True:
    with contextlib.suppress(OSError):
        sock = socket.create_connection(("127.0.0.1", port), 1)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.send(said)
        held.append(sock)
        count += 1
    while len(held) > most:
        held.pop(0).close()
    if way == "hold" and len(held) == most:
        print("held", flush=True)
        time.sleep(1000)
    if count == 200 and not told:
        told = True
        print("busy", flush=True)
"""


@contextlib.asynccontextmanager
async def greedy(box: Box, way: str, most: int = 100) -> AsyncIterator[None]:
    """A client of a sandbox that does one thing as fast as it can; begins once it is at it."""
    argv = [sys.executable, "-I", "-c", GREEDY, str(box.port), way, str(most)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 -- started before anything is timed
        assert process.stdout is not None
        try:
            assert await asyncio.to_thread(process.stdout.readline) in (b"busy\n", b"held\n")
            yield
        finally:
            process.kill()


async def waits(box: Box, seconds: float = 1.5, least: int = 20) -> list[float]:
    """How long a page and a name take, one after the other for a while, sorted."""
    found: list[float] = []
    over = time.monotonic() + seconds
    while time.monotonic() < over or len(found) < least:
        began = time.monotonic()
        assert (await box.get(seconds=PATIENCE))[0] == 200
        assert await box.name("api.example.com", seconds=PATIENCE) == "198.18.1.0"
        found.append((time.monotonic() - began) * 1000)
        await asyncio.sleep(0.02)  # it stays within its own budget, however fast the machine is
    return sorted(found)


def play(path: Path, scenario: Any, **options: Any) -> None:
    async def stage() -> None:
        async with fleet(path, workers=1, **options) as made:
            await scenario(made, await made.box(), await made.box())

    asyncio.run(asyncio.wait_for(stage(), 2 * PATIENCE))


def told(record_property: Any, **each: list[float]) -> None:
    for name, found in each.items():
        figures = {f"{name}_p{part}": found[len(found) * part // 100] for part in (50, 99)}
        for figure, value in figures.items():
            record_property(figure, round(value, 1))
        print(" ".join(f"{figure}={value:.1f}ms" for figure, value in figures.items()))  # noqa: T201 -- as above


@pytest.mark.timeout(300)
def test_one_that_connects_as_fast_as_it_can_does_not_hold_the_worker_for_another(
    tmp_path: Path, record_property: Any
) -> None:
    async def scenario(made: Fleet, taker: Box, other: Box) -> None:
        alone = await waits(other)
        async with greedy(taker, "ask"):
            beside = await waits(other)
        told(record_property, alone=alone, beside=beside)
        assert beside[len(beside) // 2] < 5_000
        assert made.supervisor.deaths == 0
        await until(lambda: refused(made, taker, "rate_limited"), "the word of its refusal")
        assert not refused(made, other)

    play(tmp_path, scenario, settings=Settings(new_connections_per_second=100))


@pytest.mark.timeout(300)
def test_one_that_takes_every_descriptor_leaves_another_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    start = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700)); "
    from egressd.control import process

    monkeypatch.setattr("egressd.control.process._START", start + process._START)

    async def scenario(made: Fleet, taker: Box, other: Box) -> None:
        async with greedy(taker, "hold", 400):
            told(record_property, beside=await waits(other))
            assert refused(made, taker, "too_many_connections")
            assert not refused(made, other)
        assert made.supervisor.deaths == 0
        assert (await taker.get(seconds=PATIENCE))[0] == 200

    play(tmp_path, scenario)


@pytest.mark.timeout(300)
def test_one_that_has_as_much_kept_as_it_can_costs_the_worker_little(
    tmp_path: Path, record_property: Any
) -> None:
    async def scenario(made: Fleet, taker: Box, other: Box) -> None:
        pid = made.supervisor.worker_pid
        assert pid is not None
        before = resident_mib(pid)
        async with greedy(taker, "hold", 600):
            told(record_property, beside=await waits(other))
            more = resident_mib(pid) - before
        record_property("more_mib", more)
        print(f"more={more}MiB")  # noqa: T201 -- as above
        assert more < 200, "512 connections with 64 KiB of a head each"
        assert made.supervisor.deaths == 0

    play(tmp_path, scenario, settings=Settings(new_connections_per_second=1000))


def refused(made: Fleet, box: Box, reason: str | None = None) -> list[dict[str, Any]]:
    found = made.records(sandbox=box.id, verdict="deny")
    return [record for record in found if reason in (None, record["reason"])]


def resident_mib(pid: int) -> int:
    """What a worker has in memory: that of the innermost process of those below it."""
    while below := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(below[0])
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) // 1024
