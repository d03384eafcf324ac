"""Drills of the journal (LOG-05): its lock, its file, its reader, its disk fail while traffic runs, and are well again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from tests.bypass.arena import Arena, Driver
from tests.bypass.drill import OK, accounted, works
from tests.bypass.processes import limited
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e


def refused_meanwhile(arena: Arena, mark: int, *, count: int = 3, seconds: float = 8.0) -> None:
    """While the journal fails, nothing gets out, and the client is told why."""
    arena.lab.forget()
    for _ in range(count):
        said = arena.a.run(OK.format(seconds), 15)
        assert "200 OK" not in said
        assert "503" in said or "gaierror" in said or "Error" in said, said
    assert arena.lab.requests() == []
    assert [f for f in arena.lab.packets("host") if f.protocol == "tcp"] == []
    accounted(arena.lab, arena.stand, mark)


def test_another_process_holds_the_journals_lock(drilled: Arena) -> None:
    mark = len(drilled.stand.records())
    with drilled.stand.journal.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused_meanwhile(drilled, mark)
    works(drilled.a)
    until(
        lambda: drilled.stand.records(event="lost", reason="audit_unavailable"), 5, "what was lost is counted"
    )
    drilled.life_goes_on()


def test_a_reader_of_the_journal_that_stops_reading(drilled: Arena) -> None:
    """LOG-05: the journal is a FIFO; when its reader sleeps, nothing gets out, and nothing waits for ever."""
    stand = drilled.stand
    pipe = stand.directory / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stand.lab.rootless is False and os.geteuid() == 0:
            os.chmod(pipe, 0o600)
        with drilled.another("--journal", str(pipe)) as driver:
            heard = [os.read(reader, 1 << 20)]
            assert "200 OK" in driver.run(OK.format(3))
            filling = "for n in range(400): dns(f'n{n}.evil-lab.com', seconds=0.05)"
            driver.run(filling, 40)  # nobody reads: 64 KiB are soon full
            drilled.lab.forget()
            began = time.monotonic()
            said = driver.run(OK.format(8), 15)
            assert "200 OK" not in said
            assert time.monotonic() - began < 14
            assert drilled.lab.requests() == []
            assert "200 OK" in drilled.b.run(OK.format(3)), "another egressd with another journal"
            with contextlib.suppress(BlockingIOError):
                while True:
                    heard.append(os.read(reader, 1 << 20))
            until(lambda: _drained(reader, heard) and "200 OK" in driver.run(OK.format(3)), 15, "it recovers")
    finally:
        os.close(reader)


def _drained(reader: int, heard: list[bytes]) -> bool:
    with contextlib.suppress(BlockingIOError):
        heard.append(os.read(reader, 1 << 20))
    return True


@pytest.mark.parametrize("how", ["removed", "renamed", "emptied", "its folder removed"])
def test_the_journal_is_taken_away(drilled: Arena, how: str) -> None:
    """LOG-05: rotated by whoever, it goes on in a new file; without a place to write, nothing gets out."""
    stand = drilled.stand
    place = stand.directory / f"log {how}"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    journal = place / "journal.jsonl"
    with drilled.another("--journal", str(journal)) as driver:
        works(driver)
        drilled.lab.forget()
        if how == "removed":
            journal.unlink()
        elif how == "renamed":
            journal.rename(place / "journal.1")
        elif how == "emptied":
            journal.write_bytes(b"")
        else:
            journal.unlink()
            journal.with_name("journal.jsonl.d").rmdir()
            place.rmdir()
            stand.directory.chmod(0o555)
        try:
            said = driver.run(OK.format(3), 15)
            if how == "its folder removed" and os.geteuid() != 0:
                assert "200 OK" not in said
                assert drilled.lab.requests() == []
        finally:
            stand.directory.chmod(0o755)
            place.mkdir(exist_ok=True, mode=0o777)
        works(driver)
        written = sum(
            path.read_text().count('"layer":"request"') for path in place.iterdir() if path.is_file()
        )
        assert written >= len(drilled.lab.requests())


def test_the_disk_fills_while_traffic_runs_and_has_room_again(drilled: Arena) -> None:
    """LOG-05, by the limit on a file's size: what does not fit is lost and counted, at most half a line stays."""
    journal = drilled.stand.directory / "own.jsonl"
    with drilled.another("--journal", str(journal)) as driver:
        works(driver)
        drilled.lab.forget()
        with limited(driver.process.pid, resource.RLIMIT_FSIZE, journal.stat().st_size + 700):
            statuses = ["200 OK" in driver.run(OK.format(8), 15) for _ in range(3)]
            assert not any(statuses[1:])
            assert len(drilled.lab.requests(host="api.lab-origin.com")) == statuses.count(True)
            assert "200 OK" in drilled.b.run(OK.format(3)), "another control, without such a limit"
        works(driver)
        lines = journal.read_text().splitlines()
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(lines) - len(whole) <= 1
    assert [record["count"] for record in whole if record["event"] == "lost"]
    numbers = [record["seq"] for record in whole]
    assert numbers == list(range(1, len(whole) + 1))


@pytest.mark.root
def test_a_full_file_system_has_room_again(drilled: Arena) -> None:
    """LOG-05, on a tmpfs of 64 kB; tests/e2e/test_drills.py shows what is refused on it, this how it goes on."""
    lab, stand = drilled.lab, drilled.stand
    small = stand.directory / "small"
    small.mkdir()
    mount = f"mount --make-rprivate / && mount -t tmpfs -o size=64k,mode=0777 none {small}"
    argv = stand.argv(
        ["/usr/bin/python3", str(stand.workspace / "inside.py")], ["--journal", str(small / "j")]
    )
    process = lab.popen_host(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *argv],
        cwd=str(stand.workspace),
        stdin=subprocess.PIPE,
    )
    driver = Driver(process)
    try:
        works(driver)
        inside = Path(f"/proc/{process.pid}/root") / str(small).lstrip("/")
        with contextlib.suppress(OSError):
            (inside / "filler").write_bytes(b"x" * 65536)
        lab.forget()
        statuses = ["200 OK" in driver.run(OK.format(8), 15) for _ in range(6)]
        assert not statuses[-1], "what is left of a page is soon full"
        assert len(lab.requests()) == statuses.count(True)
        (inside / "filler").unlink()
        works(driver)
        assert '"event":"lost"' in (inside / "j").read_text()
    finally:
        driver.close()
