"""How a journal is kept: rotated and removed, signed, on the disk, and what a full disk does to it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from egressd.journal import schema
from egressd.journal.heads import KeyUnusable, Signer, key_id, public_key_path, read_public_key
from egressd.journal.record import Record
from egressd.journal.rotation import Terms, closed_at, folder_of, rotated_files
from egressd.journal.tip import parse, tip_path
from egressd.journal.verification import Outcome, Verification
from egressd.journal.writer import Journal, JournalUnavailable

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


def a_record(detail: str = "") -> dict[str, Any]:
    record = Record(
        event="decision", sandbox="box", attempt_id="a1", root_id="a1", layer="dns", detail=detail
    )
    record.verdict, record.reason, record.host = "deny", "not_allowed", "example.com"
    return record.as_dict()


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Kept:
    """A folder with a journal, its state and a clock; opens journals and closes them."""

    def __init__(self, folder: Path) -> None:
        self.path, self.state, self.clock = folder / "journal.jsonl", folder / "state", Clock()
        self.journals: list[Journal] = []

    def open(self, **terms: Any) -> Journal:
        self.journals.append(Journal(self.path, clock=self.clock, state=self.state, terms=Terms(**terms)))
        return self.journals[-1]

    def lines(self) -> list[tuple[bytes, str]]:
        files = [*rotated_files(self.path), self.path]
        return [(line, f"{file.name}:1") for file in files for line in file.read_bytes().splitlines()]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line, _ in self.lines()]

    def verify(self) -> Outcome:
        public = read_public_key(public_key_path(self.state))
        walk = Verification({key_id(public): public})
        for line, place in self.lines():
            walk.feed(line, place)
        return walk.end(parse(tip_path(self.state, self.path).read_bytes()))


def tend(journal: Journal) -> None:
    """Have the journal do what time asks for, to its end: a loop waits for its threads."""

    async def story() -> None:
        journal.tend()

    asyncio.run(story())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    for journal in kept.journals:
        journal.close()


# --- the schema


def test_the_schema_in_the_docs_is_the_one_of_the_code() -> None:
    told = json.loads((ROOT / "docs" / "record.schema.json").read_text(encoding="utf-8"))
    assert told == schema.schema(), "run: python -m egressd.journal.schema > docs/record.schema.json"
    jsonschema.Draft202012Validator.check_schema(told)


def test_every_line_that_is_written_fits_the_schema(kept: Kept) -> None:
    kept.path.write_bytes(b'{"time":"20')
    journal = kept.open(sign_lines=3)
    journal.append([a_record(str(n)) for n in range(4)])
    journal.close()
    kept.journals.clear()
    validator = jsonschema.Draft202012Validator(schema.schema())
    records = [json.loads(line) for line in kept.path.read_bytes().splitlines()[1:]]
    assert [record["event"] for record in records] == ["journal", *["decision"] * 4, "head"]
    for record in records:
        validator.validate(record)
    assert not validator.is_valid(records[1] | {"verdict": "maybe"})


# --- rotation


def test_a_file_over_its_size_is_closed_with_a_head_and_the_chain_goes_on_in_the_next(kept: Kept) -> None:
    journal = kept.open(max_size=2000)
    for n in range(20):
        journal.append([a_record(str(n))])
        kept.clock.now += 1
    journal.close()
    kept.journals.clear()
    files = rotated_files(kept.path)
    assert len(files) >= 2
    assert [json.loads(file.read_bytes().splitlines()[-1])["event"] for file in files] == ["head"] * len(
        files
    )
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in (*files, kept.path))
    assert stat.S_IMODE(folder_of(kept.path).stat().st_mode) == 0o700
    outcome = kept.verify()
    assert outcome.is_sound
    assert not outcome.notes
    assert [r["seq"] for r in kept.records()] == list(range(1, outcome.last.seq + 1))


def test_a_file_is_closed_once_its_first_line_is_old_over_a_restart_too(kept: Kept) -> None:
    kept.open(max_age=3600).append([a_record("old")])
    kept.clock.now += 3500
    journal = kept.open(max_age=3600)
    journal.append([a_record("not yet")])
    assert not rotated_files(kept.path)
    kept.clock.now += 200
    journal.append([a_record("new")])
    assert len(rotated_files(kept.path)) == 1
    assert [r["detail"] for r in map(json.loads, kept.path.read_bytes().splitlines())] == ["new"]


def test_rotated_files_that_are_too_many_are_removed_and_the_journal_says_which(kept: Kept) -> None:
    journal = kept.open(max_size=1, max_files=2)
    for n in range(6):
        journal.append([a_record(str(n))])
        kept.clock.now += 1
    tend(journal)
    assert len(rotated_files(kept.path)) == 2 + 1  # what it says of them began another
    removed = [r["detail"] for r in kept.records() if r["event"] == "journal"]
    assert removed
    assert all(detail.startswith("removed by retention: 20270115T0800") for detail in removed)
    outcome = kept.verify()
    assert outcome.is_sound
    assert ["by its retention" in note for note in outcome.notes] == [True]
    rotated_files(kept.path)[0].unlink()
    assert [finding.kind for finding in kept.verify().findings] == ["beginning"]


def test_rotated_files_that_are_too_old_are_removed(kept: Kept) -> None:
    journal = kept.open(max_size=1, retain=100)
    for n in range(4):
        journal.append([a_record(str(n))])
        kept.clock.now += 90
    tend(journal)
    closed = [closed_at(path.name) for path in rotated_files(kept.path)]
    assert closed == [NOW + 270, NOW + 360]  # what it says of them began another


def test_two_runs_share_a_journal_that_one_of_them_rotates(kept: Kept) -> None:
    one, other = kept.open(max_size=4000), kept.open()
    for n in range(15):
        one.append([a_record(f"one {n}")])
        other.append([a_record(f"other {n}")])
    assert rotated_files(kept.path)
    assert [r["seq"] for r in kept.records()] == list(range(1, other.seq + 1))
    assert kept.verify().is_sound


def test_a_run_that_opened_a_file_just_before_another_rotated_it_writes_to_the_new_one(kept: Kept) -> None:
    one = kept.open(max_size=1)
    one.append([a_record("old")])
    other = kept.open()
    one.append([a_record("new")])
    other.append([a_record("new too")])
    assert [json.loads(line)["detail"] for line in kept.path.read_bytes().splitlines()] == ["new", "new too"]
    assert kept.verify().is_sound


def test_a_folder_that_cannot_be_made_stops_the_rotation_and_not_the_journal(kept: Kept) -> None:
    journal = kept.open(max_size=500)
    folder_of(kept.path).rmdir()
    folder_of(kept.path).write_text("in the way")
    for n in range(4):
        journal.append([a_record(str(n))])
    details = [
        r["detail"] for r in map(json.loads, kept.path.read_bytes().splitlines()) if r["event"] == "journal"
    ]
    assert len(details) == 1
    assert details[0].startswith("not rotated: ")


# --- the end of the file


def test_a_run_after_a_rotation_from_outside_goes_on_from_what_was_written_last(kept: Kept) -> None:
    kept.open().append([a_record("before")])
    kept.path.rename(kept.path.with_name("moved"))
    kept.open().append([a_record("after")])
    (after,) = map(json.loads, kept.path.read_bytes().splitlines())
    assert after["seq"] == 2


def test_an_end_that_was_cut_off_while_nobody_looked_is_told_by_the_next_run(kept: Kept) -> None:
    journal = kept.open()
    journal.append([a_record(str(n)) for n in range(5)])
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(b"".join(lines[:3]))
    kept.open().append([a_record("after")])
    told = kept.records()[3]
    assert (told["seq"], told["event"]) == (6, "journal")
    assert told["detail"].startswith("the file ends with line 3; lines to 5 had been written")
    assert [finding.words for finding in kept.verify().findings] == [
        "lines 4 to 5 are missing before this one"
    ]


# --- heads


def test_a_head_is_signed_after_so_many_lines_or_seconds_and_at_the_end(kept: Kept) -> None:
    journal = kept.open(sign_lines=4, sign_seconds=10)
    journal.append([a_record(str(n)) for n in range(4)])
    journal.append([a_record("one more")])
    tend(journal)
    kept.clock.now += 10
    tend(journal)
    tend(journal)
    journal.append([a_record("the last")])
    journal.close()
    kept.journals.clear()
    assert [r["seq"] for r in kept.records() if r["event"] == "head"] == [5, 7, 9]
    assert kept.verify().signed_to == 9


def test_the_key_is_its_owners_alone_and_stays_the_same(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert Signer(state).id == Signer(state).id == key_id(read_public_key(public_key_path(state)))
    assert stat.S_IMODE((state / "journal.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in state.iterdir()) == ["journal.key", "journal.pub"]


@pytest.mark.parametrize(
    "spoil", [lambda p: p.chmod(0o640), lambda p: p.write_text("no key")], ids=["open to others", "no key"]
)
def test_a_key_that_cannot_be_trusted_is_not_used(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    Signer(tmp_path)
    spoil(tmp_path / "journal.key")
    with pytest.raises(KeyUnusable, match=r"journal\.key"):
        Signer(tmp_path)


# --- the disk


def test_each_record_is_on_the_disk_before_anything_goes_by_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(kept.path.read_bytes().count(b"\n")))
    journal = kept.open(fsync="each")

    async def story() -> None:
        await asyncio.gather(*(journal.commit([a_record(str(n))]) for n in range(20)))

    asyncio.run(story())
    assert synced[-1] == 20
    assert len(synced) <= 3  # those that wait at once wait for the same
    journal.append([a_record("by itself")])
    assert synced[-1] == 21


def test_a_disk_that_does_not_keep_a_record_denies_what_waits_for_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    journal = kept.open(fsync="each")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        with pytest.raises(JournalUnavailable, match="Input/output error"):
            asyncio.run(journal.commit([a_record()]))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 64 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(journal: Journal) -> None:
    for n in range(2000):
        journal.append([a_record(f"{n} " + "x" * 500)])


@pytest.mark.root
def test_a_full_disk_denies_and_what_was_missed_is_counted_once_there_is_room(
    tiny: Path, tmp_path: Path
) -> None:
    ballast = tiny / "ballast"
    ballast.write_bytes(b"x" * 8192)
    journal = Journal(tiny / "journal.jsonl", state=tmp_path / "state")
    with pytest.raises(JournalUnavailable, match="No space left"):
        fill(journal)
    for _ in range(3):
        with pytest.raises(JournalUnavailable, match="No space left"):
            journal.append([a_record("y" * 500)])
    ballast.unlink()
    journal.append([a_record("after")])
    journal.close()
    kept = Kept(tmp_path)
    kept.path = tiny / "journal.jsonl"
    records = [json.loads(line) for line, _ in kept.lines() if line.endswith(b"}")]
    assert [r["count"] for r in records if r["event"] == "lost"] == [4]
    assert kept.verify().is_sound


@pytest.mark.root
def test_on_a_full_disk_an_operator_may_choose_to_go_on_and_count(tiny: Path, tmp_path: Path) -> None:
    ballast = tiny / "ballast"
    ballast.write_bytes(b"x" * 8192)
    journal = Journal(tiny / "journal.jsonl", state=tmp_path / "state", terms=Terms(on_full="drop-and-count"))
    fill(journal)
    assert asyncio.run(journal.commit([a_record("dropped too")])) == journal.seq
    assert journal.dropped > 1000
    dropped = journal.dropped
    ballast.unlink()
    journal.append([a_record("after")])
    journal.close()
    lines = (tiny / "journal.jsonl").read_bytes().splitlines()
    assert sum(r.get("count", 0) for r in map(json.loads, (n for n in lines if n.endswith(b"}")))) == dropped
    with pytest.raises(JournalUnavailable):  # only a full disk is gone on from
        Journal(tiny, terms=Terms(on_full="drop-and-count"))
