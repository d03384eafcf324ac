"""Changes of rule files are seen however they come."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import watchfiles
from watchfiles._rust_notify import WatchfilesRustInternalError

from egressd.control import watch
from egressd.control.watch import Marks, changes, marks


def seen(directory: Path, known: Marks, act: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether a change is told after `act`."""

    async def body() -> bool:
        stream = changes(directory, known)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        act()
        done, _ = await asyncio.wait({first}, timeout=seconds)
        if not done:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()
        return bool(done)

    return asyncio.run(body())


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch, "LOOK", 0.2)
    directory = tmp_path / "rules"
    (directory / "profiles").mkdir(parents=True)
    (directory / "profiles" / "a.yaml").write_text("schema: 1\n")
    return directory


def test_a_change_before_the_watch_was_set_is_seen(rules: Path) -> None:
    known = marks(rules)
    (rules / "profiles" / "a.yaml").write_text("schema: 1\nprofile: a\n")
    assert seen(rules, known, lambda: None)


@pytest.mark.parametrize("how", ["write", "rename over it", "new file", "remove", "same length, same time"])
def test_a_change_is_seen(rules: Path, how: str) -> None:
    file = rules / "profiles" / "a.yaml"

    def act() -> None:
        if how == "write":
            file.write_text("schema: 1\nowner: me\n")
        elif how == "rename over it":
            (rules / "new").write_text("schema: 1\n")
            (rules / "new").rename(file)
        elif how == "new file":
            (rules / "profiles" / "b.yaml").write_text("x")
        elif how == "remove":
            file.unlink()
        else:
            stat = file.stat()
            file.write_text("schema: 2\n")
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert seen(rules, marks(rules), act)


def test_a_swapped_link_is_seen(rules: Path, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    (tmp_path / "v1" / "a.yaml").write_text("1")
    (tmp_path / "v2" / "a.yaml").write_text("2")
    (tmp_path / "data").symlink_to("v1")
    (rules / "lists").symlink_to(tmp_path / "data")

    def act() -> None:
        (tmp_path / "next").symlink_to("v2")
        (tmp_path / "next").rename(tmp_path / "data")

    assert seen(rules, marks(rules), act)


def test_a_directory_that_goes_and_comes_back_is_still_watched(rules: Path, tmp_path: Path) -> None:
    known = marks(rules)
    rules.rename(tmp_path / "away")
    assert seen(rules, known, lambda: None)
    assert seen(rules, (), lambda: (tmp_path / "away").rename(rules))


def test_quiet_files_tell_nothing(rules: Path) -> None:
    assert not seen(rules, marks(rules), lambda: None, seconds=0.6)


def test_half_a_save_is_not_told(rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a file may be a whole one that allows more."""
    monkeypatch.setattr(watch, "QUIET", 0.3)
    file = rules / "profiles" / "a.yaml"

    async def body() -> list[str]:
        stream = changes(rules, marks(rules))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        for part in ("allow:\n", "- hosts: [a.com]\n", "deny:\n", "- hosts: [b.a.com]\n"):
            with file.open("a") as out:
                out.write(part)
            await asyncio.sleep(0.15)
            assert not first.done()
        await asyncio.wait_for(first, 5)
        await stream.aclose()
        return file.read_text().splitlines()

    assert len(asyncio.run(body())) == 5


def test_files_that_never_rest_are_told_at_last(rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "QUIET", 0.02)

    async def body() -> None:
        stream = changes(rules, marks(rules))
        first = asyncio.ensure_future(anext(stream))
        for n in range(1000):
            (rules / "profiles" / "a.yaml").write_text(str(n))
            await asyncio.sleep(0.005)
            if first.done():
                break
        await asyncio.wait_for(first, 5)
        await stream.aclose()

    asyncio.run(body())


def test_after_the_directory_was_exchanged_notices_are_followed_again(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange() -> None:
        shutil.copytree(rules, tmp_path / "new")
        (tmp_path / "new" / "profiles" / "a.yaml").write_text("new")
        rules.rename(tmp_path / "old")
        (tmp_path / "new").rename(rules)

    async def body() -> None:
        stream = changes(rules, marks(rules))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        exchange()
        await asyncio.wait_for(first, 5)
        second = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        monkeypatch.setattr(watch, "LOOK", 60.0)
        await asyncio.sleep(0.5)  # the look that was under way
        (rules / "profiles" / "a.yaml").write_text("newer")
        await asyncio.wait_for(second, 5)
        await stream.aclose()

    asyncio.run(body())


@pytest.mark.parametrize(
    "error", [OSError(28, "no watches"), RuntimeError("no thread"), WatchfilesRustInternalError("no fd")]
)
def test_where_nothing_can_be_watched_the_files_are_looked_at(
    rules: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(watchfiles, "awatch", none_left)
    assert seen(
        rules, marks(rules), lambda: (rules / "profiles" / "a.yaml").write_text("schema: 1\nowner: me\n")
    )
