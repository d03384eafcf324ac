"""The journal's writer against files, full disks, pipes nobody reads and other writers."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from egressd.journal.record import Record
from egressd.journal.writer import WAITING_LIMIT, BadRecord, Journal, JournalUnavailable


def a_record(detail: str = "", sandbox: str = "box", **fields: Any) -> dict[str, Any]:
    return Record(
        event="decision",
        sandbox=sandbox,
        attempt_id="a1",
        root_id="a1",
        layer="connection",
        verdict="deny",
        reason="not_allowed",
        detail=detail,
        **fields,
    ).as_dict()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def details(path: Path) -> list[str]:
    return [line["detail"] for line in lines(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "egressd" / "journal.jsonl"


@pytest.fixture
def open_journal() -> Iterator[Callable[..., Journal]]:
    journals: list[Journal] = []

    def make(target: Path | str, **options: Any) -> Journal:
        journals.append(Journal(target, **options))
        return journals[-1]

    yield make
    for journal in journals:
        journal.close()


type Open = Callable[..., Journal]


# --- files


def test_records_are_numbered_and_written_one_to_a_line(path: Path, open_journal: Open) -> None:
    journal = open_journal(path)
    assert journal.append([a_record("one"), a_record("two")]) == 2
    assert journal.append([a_record("three")]) == 3
    assert [(line["seq"], line["detail"]) for line in lines(path)] == [(1, "one"), (2, "two"), (3, "three")]


def test_nothing_to_append_writes_nothing(path: Path, open_journal: Open) -> None:
    assert open_journal(path).append([]) == 0
    assert path.read_bytes() == b""


def test_a_new_file_and_its_new_directories_are_their_owners_alone(path: Path, open_journal: Open) -> None:
    old = os.umask(0)
    try:
        open_journal(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_the_numbers_go_on_where_an_existing_file_ends(path: Path, open_journal: Open) -> None:
    open_journal(path).append([a_record("x" * 900)] * 40)
    assert open_journal(path).append([a_record()]) == 41


@pytest.mark.parametrize(
    ("before", "number"),
    [
        pytest.param(b'{"seq":7,"detail":"x"}\n{"seq":8,"det', 9, id="a line that a crash tore"),
        pytest.param(b'{"seq":7}\n' + b"\0" * 5_000_000, 2, id="a tail of zeros longer than we look back"),
        pytest.param(b'{"seq":"7"}\n[1]\n7\n{"seq":true}\n', 2, id="lines that are no records"),
        pytest.param(b'{"seq":3}\n{"seq":-9}\nnonsense\n', 5, id="a number below zero"),
        pytest.param(b"[" * 30_000 + b"\n", 2, id="a line nested deeper than any parser likes"),
    ],
)
def test_the_numbers_go_on_behind_whatever_stands_there(
    path: Path, open_journal: Open, before: bytes, number: int
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(before)
    assert open_journal(path).append([a_record("mine")]) == number
    written = path.read_bytes()
    assert written.startswith(before)
    said, mine = map(json.loads, written.splitlines()[-2:])
    assert (said["event"], said["seq"], mine["detail"]) == ("journal", number - 1, "mine")


def test_two_runs_share_one_file_and_one_numbering(path: Path, open_journal: Open) -> None:
    first, second = open_journal(path), open_journal(path)
    for turn in range(3):
        first.append([a_record(f"first {turn}")])
        second.append([a_record(f"second {turn}"), a_record()])
    assert [line["seq"] for line in lines(path)] == list(range(1, 10))


SHARING_PROGRAM = """
import sys
from egressd.journal.record import Record
from egressd.journal.writer import Journal
journal = Journal(sys.argv[1])
record = Record(event="end", sandbox="box", attempt_id="a", root_id="a", layer="dns", reason="completed")
for _ in range(150):
    journal.append([record.as_dict()])
"""


def test_runs_in_other_processes_neither_tear_a_line_nor_use_a_number_twice(path: Path) -> None:
    runs = [subprocess.Popen([sys.executable, "-c", SHARING_PROGRAM, str(path)]) for _ in range(2)]
    assert [run.wait(60) for run in runs] == [0, 0]
    assert [line["seq"] for line in lines(path)] == list(range(1, 301))


def test_a_lock_that_another_process_keeps_makes_the_journal_unavailable(
    path: Path, open_journal: Open
) -> None:
    journal = open_journal(path)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JournalUnavailable, match="lock"):
            journal.append([a_record("refused")])
    journal.append([a_record("written")])
    assert details(path) == ["records that the journal could not take", "written"]


def test_commit_waits_for_a_lock_without_holding_up_the_loop(path: Path, open_journal: Open) -> None:
    journal = open_journal(path, deadline=30)

    async def story() -> None:
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            waiting = asyncio.create_task(journal.commit([a_record("late")]))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting

    asyncio.run(story())
    assert details(path) == ["late"]


def test_a_file_that_was_removed_is_made_anew(path: Path, open_journal: Open) -> None:
    journal = open_journal(path)
    journal.append([a_record("gone")])
    path.unlink()
    assert journal.append([a_record("here")]) == 2
    assert details(path) == ["here"]


def test_reopen_follows_a_rotation_and_keeps_counting(path: Path, open_journal: Open) -> None:
    journal = open_journal(path)
    journal.append([a_record("old")])
    rotated = path.rename(path.with_suffix(".1"))
    journal.append([a_record("still old")])
    journal.reopen()
    assert journal.append([a_record("new")]) == 3
    assert details(rotated) == ["old", "still old"]
    assert details(path) == ["new"]


def test_reopen_that_fails_keeps_the_old_file(path: Path, open_journal: Open) -> None:
    journal = open_journal(path)
    rotated = path.rename(path.with_suffix(".1"))
    path.mkdir()
    with pytest.raises(JournalUnavailable):
        journal.reopen()
    journal.append([a_record("kept")])
    assert details(rotated) == ["kept"]


def test_what_a_worker_may_not_say_writes_nothing_of_its_batch_and_is_counted(
    path: Path, open_journal: Open
) -> None:
    journal = open_journal(path)
    with pytest.raises(BadRecord):
        journal.append([a_record(), a_record(sandbox="other")], allowed_sandboxes={"box"})
    assert path.read_bytes() == b""
    journal.append([a_record("sound")], allowed_sandboxes={"box"})
    lost, sound = lines(path)
    assert (lost["event"], lost["sandbox"], lost["count"]) == ("lost", "box", 2)
    assert lost["reason"] == "internal_error"
    assert (sound["detail"], sound["seq"]) == ("sound", 2)


# --- what is refused


def refuse(target: Path, words: str) -> None:
    with pytest.raises(JournalUnavailable, match=words):
        Journal(target)


def test_a_symbolic_link_is_refused_even_a_dangling_one(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    link = tmp_path / "journal.jsonl"
    link.symlink_to(target)
    refuse(link, "symbolic link")
    assert not target.exists()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "directory")


def test_a_file_that_anybody_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.touch()
    path.chmod(0o622)
    refuse(path, "anybody")


def test_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        refuse(path, "No such device")


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuse(tmp_path / "file" / "journal.jsonl", "Not a directory")


# --- full disks


def test_a_full_device_makes_it_unavailable(open_journal: Open) -> None:
    with pytest.raises(JournalUnavailable, match="No space left"):
        open_journal("/dev/full").append([a_record()])


def test_half_a_line_on_a_full_disk_stays_and_the_next_begins_on_a_new_line(
    path: Path, open_journal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(path)
    journal.append([a_record("before")])
    write = os.write

    def fills_up(fd: int, data: memoryview) -> int:
        if len(data) > 400:
            return write(fd, data[:400])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", fills_up)
        with pytest.raises(JournalUnavailable, match="No space left"):
            journal.append([a_record("torn " * 100, sandbox="other")])
    assert journal.append([a_record("after")]) == 4
    first, torn, said, lost, after = path.read_bytes().splitlines()
    assert json.loads(first)["detail"] == "before"
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(torn)
    assert json.loads(said)["torn"] == f"{len(torn)} {hashlib.sha256(torn).hexdigest()}"
    assert json.loads(lost) | {"sandbox": "other", "count": 1, "seq": 3} == json.loads(lost)
    assert json.loads(after)["detail"] == "after"


def test_a_short_write_is_completed(path: Path, open_journal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(path)
    write = os.write
    with monkeypatch.context() as short:
        short.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        journal.append([a_record("whole"), a_record("too")])
    assert details(path) == ["whole", "too"]


def test_of_a_batch_cut_by_a_full_disk_only_the_rest_is_lost(
    path: Path, open_journal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(path)
    write = os.write
    room = [700]

    def fills_up(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        out = write(fd, data[: room[0]])
        room[0] -= out
        return out

    with monkeypatch.context() as full:
        full.setattr(os, "write", fills_up)
        with pytest.raises(JournalUnavailable):
            journal.append([a_record("x" * 300)] * 4)
    journal.append([a_record("after")])
    texts = [line for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert [json.loads(text)["seq"] for text in texts] == [1, 2, 3, 4]
    assert json.loads(texts[2])["count"] == 3


# --- pipes


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "journal.fifo"
    os.mkfifo(path)
    return path


def drain(fd: int) -> bytes:
    data = b""
    while True:
        try:
            chunk = os.read(fd, 65_536)
        except BlockingIOError:
            return data
        if not chunk:
            return data
        data += chunk


def fill(journal: Journal) -> int:
    """Append until the pipe takes not even the smallest record; returns how many lines it took."""
    before = journal.seq
    for text in ("fill" * 100, ""):
        with pytest.raises(JournalUnavailable):
            append_for_ever(journal, text)
    return journal.seq - before


def append_for_ever(journal: Journal, text: str) -> None:
    for _ in range(10_000):
        journal.append([a_record(text)])


def test_a_fifo_without_a_reader_is_unavailable_from_the_start(fifo: Path) -> None:
    refuse(fifo, "No such device")


def test_a_reader_that_stops_reading_makes_it_unavailable_and_it_recovers_by_itself(
    fifo: Path, open_journal: Open
) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        journal = open_journal(fifo)
        taken = fill(journal)
        with pytest.raises(JournalUnavailable, match="keep up"):
            journal.append([a_record("refused")])
        seen = drain(reader)
        journal.append([a_record("taken")])
        seen += drain(reader)
    finally:
        os.close(reader)
    records = [json.loads(line) for line in seen.splitlines()]
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) == taken + 2
    assert sum(record.get("count", 0) for record in records) == 3
    assert records[-1]["detail"] == "taken"


def test_a_reader_that_left_makes_it_unavailable_until_another_comes(fifo: Path, open_journal: Open) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    journal = open_journal(fifo)
    os.close(reader)
    with pytest.raises(JournalUnavailable, match="Broken pipe"):
        journal.append([a_record()])
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        journal.append([a_record("back")])
        assert json.loads(drain(reader).splitlines()[-1])["detail"] == "back"
    finally:
        os.close(reader)


def test_commit_gives_a_slow_reader_time_and_the_loop_runs_on(fifo: Path, open_journal: Open) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    journal = open_journal(fifo, deadline=30)

    async def story() -> bytes:
        fill(journal)
        waiting = [asyncio.create_task(journal.commit([a_record(f"late {n}")])) for n in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        seen = await asyncio.to_thread(drain, reader)
        await asyncio.gather(*waiting)
        return seen + drain(reader)

    try:
        seen = asyncio.run(story())
    finally:
        os.close(reader)
    assert [json.loads(line)["detail"] for line in seen.splitlines()[-3:]] == ["late 0", "late 1", "late 2"]


def test_commit_gives_up_at_its_deadline(fifo: Path, open_journal: Open) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    journal = open_journal(fifo, deadline=0.02)
    try:
        fill(journal)
        with pytest.raises(JournalUnavailable, match="keep up"):
            asyncio.run(journal.commit([a_record()]))
    finally:
        os.close(reader)


def test_more_commits_than_may_wait_are_refused_at_once(fifo: Path, open_journal: Open) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    journal = open_journal(fifo, deadline=30)

    async def story() -> None:
        fill(journal)
        waiting = [asyncio.create_task(journal.commit([a_record()])) for _ in range(WAITING_LIMIT)]
        await asyncio.sleep(0)
        with pytest.raises(JournalUnavailable):
            await journal.commit([a_record()])
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        seen = drain(reader)
        journal.append([a_record()])
        seen += drain(reader)
        # the two that the full pipe refused, the one too many, and those whose sender went away
        assert sum(json.loads(line).get("count", 0) for line in seen.splitlines()) == WAITING_LIMIT + 3

    try:
        asyncio.run(story())
    finally:
        os.close(reader)


# --- standard output

STDOUT_PROGRAM = """
import os, sys
from egressd.journal.record import Record
from egressd.journal.writer import Journal, JournalUnavailable
journal = Journal("-")
record = Record(event="end", sandbox="box", attempt_id="a", root_id="a", layer="dns", reason="completed")
count = 0
try:
    while count < int(sys.argv[1]):
        journal.append([record.as_dict()])
        count += 1
except JournalUnavailable as error:
    print("unavailable:", error, file=sys.stderr)
print("inherited mode is blocking:", os.get_blocking(1), file=sys.stderr)
"""


def run_on(stdout: int | None, count: int, before: str = "") -> str:
    program = before + STDOUT_PROGRAM
    result = subprocess.run(
        [sys.executable, "-c", program, str(count)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stderr


# no second description can be opened where /proc is out of reach, as on a pipe made by another uid
NO_PROC = "import os\nos.open = lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, 'no'))\n"


@pytest.mark.parametrize("before", ["", NO_PROC], ids=["a pipe", "a pipe that cannot be opened anew"])
def test_a_blocked_pipe_on_standard_output_never_blocks_us(before: str) -> None:
    reader, writer = os.pipe()
    try:
        talk = run_on(writer, 100_000, before)
    finally:
        os.close(writer)
        data = b""
        while chunk := os.read(reader, 65_536):
            data += chunk
        os.close(reader)
    assert "its reader does not keep up" in talk
    assert "inherited mode is blocking: True" in talk
    assert [json.loads(line)["seq"] for line in data.splitlines()] == list(
        range(1, len(data.splitlines()) + 1)
    )


def test_a_socket_as_standard_output_takes_whole_lines_until_it_is_full() -> None:
    ours, theirs = socket.socketpair()
    received = bytearray()
    with ours, theirs:
        talk = run_on(theirs.fileno(), 100_000)
        theirs.close()
        while chunk := ours.recv(65_536):
            received += chunk
    assert "its reader does not keep up" in talk
    numbers = [json.loads(line)["seq"] for line in bytes(received).splitlines() if line.endswith(b"}")]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_file_as_standard_output_is_shared_with_whoever_else_prints(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as out:
        run_on(out.fileno(), 2, "print('hello', flush=True)\n")
        os.write(out.fileno(), b"bye\n")
    first, *records, last = path.read_bytes().splitlines()
    assert (first, last) == (b"hello", b"bye")
    assert [json.loads(line)["seq"] for line in records] == [1, 2]


def test_a_line_on_a_pipe_is_never_longer_than_a_pipe_takes_whole(fifo: Path, open_journal: Open) -> None:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        open_journal(fifo).append([a_record("😀" * 2000, path="\x1b" * 1000, query="é" * 1000)])
        (line,) = drain(reader).splitlines()
    finally:
        os.close(reader)
    assert len(line) < 4096
    assert "sha256" in json.loads(line)["detail"]
