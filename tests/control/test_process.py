"""A worker's process on its own: it waits to be configured, and ends with whoever started it."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from egressd.control.process import WorkerProcess

PATIENCE = 60.0


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_discarded_process_is_gone_at_once() -> None:
    process = WorkerProcess()
    process.discard()
    assert not exists(process.pid)
    process.discard()


def test_a_killed_process_is_waited_for() -> None:
    async def scenario() -> None:
        process = WorkerProcess()
        process.kill()
        await asyncio.wait_for(process.wait(), PATIENCE)
        assert not exists(process.pid)
        await process.wait()
        process.kill()
        process.channel.close()

    asyncio.run(scenario())


def test_a_killed_process_is_waited_for_where_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        process = WorkerProcess()
        monkeypatch.setattr(os, "pidfd_open", none_left)
        process.kill()
        await asyncio.wait_for(process.wait(), PATIENCE)
        assert not exists(process.pid)
        process.channel.close()

    asyncio.run(scenario())


def test_a_process_that_nobody_configures_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        process = WorkerProcess()
        process.channel.close()
        await asyncio.wait_for(process.wait(), PATIENCE)
        assert not exists(process.pid)

    asyncio.run(scenario())
    assert capfd.readouterr() == ("", "")


def test_it_holds_nothing_but_its_end_of_the_channel(tmp_path: Path) -> None:
    kept = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(kept, True)
    process = WorkerProcess()
    try:
        deadline = time.monotonic() + PATIENCE
        while b"egressd" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
        held = {os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
        assert str(tmp_path) not in held
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert {entry.partition(b"=")[0] for entry in environment if entry} == {b"PATH", b"LANG"}
    finally:
        process.discard()
        os.close(kept)


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "--help"], ["log", "run"], ["run", "--profile", "p", "--config", "/nowhere", "--", "true"]],
    ids=["without a profile", "asked for help", "another verb", "with a file that is not there"],
)  # fmt: skip
def test_a_process_that_was_started_on_a_guess_says_nothing_and_ends(arguments: list[str]) -> None:
    """Both streams are read to their end, which is not there before the last process that holds them has ended."""
    ran = subprocess.run(
        [sys.executable, "-m", "egressd", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode in {0, 1, 2, 3, 125}
    assert "Traceback" not in ran.stderr
