"""Copies of rules: what is kept, for how long, and that what is read back is what was kept."""

from __future__ import annotations

import gzip
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egressd.control import archive as module
from egressd.control.archive import MOST_KEPT, Archive, Passed, Unkept, in_force
from egressd.rulefiles.problems import Findings
from egressd.rulefiles.source import RuleSource
from tests.control.household import read, write_rules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_rules(tmp_path / "rules", a="a.example.com")


@pytest.fixture
def archive(tmp_path: Path, folder: Path) -> Archive:
    return Archive(tmp_path / "state", folder)


def keep(archive: Archive, now: float, host: str) -> str:
    rules = read(write_rules(archive.folder, a=host))
    archive.keep(rules.source, lambda: map(rules.effective, rules.profiles), now)
    return rules.digest


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "state" / "rules").iterdir())


def test_what_was_kept_is_read_back_as_it_was(archive: Archive, tmp_path: Path) -> None:
    digest = keep(archive, 1000.5, "a.example.com")
    rules = read(archive.folder)
    assert archive.read(digest).files == rules.source.files
    (one,) = archive.kept()
    assert (one.digest, one.adopted) == (digest, 1000.5)
    assert one.policies == {"a": rules.effective("a").digest()}
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_names_and_bytes_that_are_no_text_are_kept_too(archive: Archive) -> None:
    source = RuleSource({"lists/\udcff.txt": b"\xff\n", "organisation.yaml": b""}, str(archive.folder))
    archive.keep(source, tuple, 1.0)
    assert archive.read(source.digest) == source


def test_the_newest_come_first_and_the_oldest_go(archive: Archive, tmp_path: Path) -> None:
    digests = [keep(archive, float(n), f"h{n}.example.com") for n in range(1, MOST_KEPT + 4)]
    assert [one.digest for one in archive.kept()] == digests[:2:-1]
    assert len(files(tmp_path)) == MOST_KEPT
    again = keep(archive, 100.0, "h10.example.com")
    assert [one.digest for one in archive.kept()].count(again) == 1
    assert archive.kept()[0].digest == again
    keep(archive, 101.0, "h10.example.com")
    assert archive.kept()[0].adopted == 100.0, "what is in force already is not kept twice"


def test_each_folder_has_its_own_copies(archive: Archive, tmp_path: Path) -> None:
    other = Archive(tmp_path / "state", write_rules(tmp_path / "others", a="b.example.com"))
    mine, theirs = keep(archive, 1.0, "a.example.com"), keep(other, 2.0, "b.example.com")
    assert [one.digest for one in archive.kept()] == [mine]
    assert [one.digest for one in other.kept()] == [theirs]


def test_a_copy_is_found_by_its_digest_or_by_one_that_records_have(archive: Archive) -> None:
    first, second = keep(archive, 1.0, "a.example.com"), keep(archive, 2.0, "b.example.com")
    policy = archive.kept()[1].policies["a"]
    assert (
        archive.find(first).digest == archive.find(first[:6]).digest == archive.find(policy).digest == first
    )
    assert archive.before(second).digest == first
    for wanted in ("abc", "", "0000000000000000", "../../etc"):
        with pytest.raises(Unkept):
            archive.find(wanted)
    with pytest.raises(Unkept, match="no earlier"):
        archive.before(first)
    assert archive.before("not one that was kept").digest == second


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 2000), byte=st.binary(min_size=1, max_size=3), cut=st.booleans())
def test_a_damaged_copy_is_never_taken_for_a_whole_one(
    archive: Archive, tmp_path: Path, at: int, byte: bytes, cut: bool
) -> None:
    digest = keep(archive, 1.0, "a.example.com")
    whole = archive.read(digest)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    at %= len(content)
    path.write_bytes(content[:at] if cut else content[:at] + byte + content[at + len(byte) :])
    archive.kept()
    try:
        assert archive.read(digest) == whole
    except Unkept:
        pass
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]\n",
        b'{"format":1,"files":["00"],"lengths":[99999999999]}\n',
        b'{"format":1,"files":["zz"],"lengths":[1]}\n',
        b'{"format":1,"files":[1],"lengths":[1]}\n',
        b'{"format":1,"files":["00"],"lengths":[true]}\n',
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_copy_is_none(archive: Archive, tmp_path: Path, said: bytes) -> None:
    digest = keep(archive, 1.0, "a.example.com")
    (path,) = files(tmp_path)
    path.write_bytes(gzip.compress(said))
    assert archive.kept()[0].policies == {}
    with pytest.raises(Unkept):
        archive.read(digest)


def test_a_copy_that_is_a_link_is_not_followed(archive: Archive, tmp_path: Path) -> None:
    digest = keep(archive, 1.0, "a.example.com")
    (path,) = files(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unkept):
        archive.read(digest)


def test_a_folder_is_passed_over_until_it_changes(archive: Archive, tmp_path: Path) -> None:
    good, bad = keep(archive, 1.0, "good.example.com"), keep(archive, 2.0, "bad.example.com")
    archive.pass_over(Passed(bad, good, "uid 0"))
    assert forced(archive, tmp_path) == good
    keep(archive, 3.0, "bad.example.com")
    assert archive.passed() == Passed(bad, good, "uid 0"), "adopting the copy ends nothing"
    assert archive.kept()[0].digest == bad, "and does not make it the newest"
    fixed = keep(archive, 4.0, "fixed.example.com")
    assert archive.passed() is None
    assert forced(archive, tmp_path) == fixed
    keep(archive, 5.0, "bad.example.com")
    assert forced(archive, tmp_path) == bad, "what was passed over once is not for ever"


def test_a_folder_that_became_the_copy_is_read_again(archive: Archive) -> None:
    good, bad = keep(archive, 1.0, "good.example.com"), keep(archive, 2.0, "bad.example.com")
    archive.pass_over(Passed(bad, good, ""))
    keep(archive, 3.0, "good.example.com")
    assert archive.passed() is None


def test_rules_that_cannot_be_gone_back_to_are_a_problem_and_never_the_folder(
    archive: Archive, tmp_path: Path
) -> None:
    bad = keep(archive, 2.0, "bad.example.com")
    archive.pass_over(Passed(bad, "0" * 16, ""))
    findings = Findings(str(archive.folder))
    in_force(archive.folder, tmp_path / "state", findings)
    assert [problem.code.value for problem in findings.problems()] == ["unreadable"]


@pytest.mark.parametrize(
    "said", [b"", b"[]", b'{"folder":1}', b"\xff", b"[" * 4000, b'{"folder":"a","digest":"b"}']
)
def test_a_note_that_says_nothing_passes_nothing_over(archive: Archive, tmp_path: Path, said: bytes) -> None:
    digest = keep(archive, 1.0, "a.example.com")
    archive.pass_over(Passed("x", digest, ""))
    next((tmp_path / "state" / "rules").glob("*.back")).write_bytes(said)
    assert archive.passed() is None
    archive.pass_over(None)
    archive.pass_over(None)


def test_copies_take_no_more_room_than_they_may(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 600)
    for number in range(1, 8):
        newest = keep(archive, float(number), f"h{number}.example.com")
    assert archive.kept()[0].digest == newest
    assert sum(path.stat().st_size for path in files(tmp_path)[1:]) <= 600


def forced(archive: Archive, tmp_path: Path) -> str:
    return in_force(archive.folder, tmp_path / "state", Findings(str(archive.folder))).digest
