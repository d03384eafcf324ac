"""Going back to kept rules: for everybody or for nobody, and over a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from egressd.control.archive import Passed, Unkept
from egressd.control.roster import Wanted
from egressd.control.supervisor import WorkerFailed
from egressd.control.surroundings import BadInput
from tests.control.household import House

LAB = Wanted("lab", "explicit")


def live(folder: Path, scene: Callable[[House], Awaitable[None]]) -> None:
    async def run() -> None:
        house = House(folder)
        try:
            await scene(house)
        finally:
            await house.roster.end_all("drained")
            house.estate.close()

    asyncio.run(run())


def test_everybody_lives_under_the_rules_before(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        good = await house.adopt(1.0, lab="good.example.com")
        life = await house.roster.create(LAB)
        bad = await house.adopt(2.0, lab="bad.example.com")
        back = await house.roll_back(None, "uid 0 pid 1")
        assert (back.digest, back.before, back.notes) == (good, bad, [])
        assert life.keyring.policy.entries[0].hosts == ("good.example.com",)
        assert house.roster.rules.digest == good
        assert house.archive.passed() == Passed(bad, good, "uid 0 pid 1")
        forward = await house.roll_back(bad[:8], "uid 0 pid 1")
        assert forward.digest == bad
        assert house.archive.passed() is None, "the folder is in force again"

    live(tmp_path, scene)


def test_going_back_twice_goes_further_back(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        digests = [await house.adopt(float(n), lab=f"h{n}.example.com") for n in range(1, 4)]
        assert (await house.roll_back(None, "")).digest == digests[1]
        assert (await house.roll_back(None, "")).digest == digests[0]
        with pytest.raises(Unkept):
            await house.roll_back(None, "")

    live(tmp_path, scene)


def test_where_somebody_cannot_live_under_them_nothing_changes(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        await house.adopt(1.0, lab="good.example.com")
        bad = await house.adopt(2.0, fresh="fresh.example.com")
        await house.roster.create(replace(LAB, profile="fresh"))
        with pytest.raises(BadInput, match="no profile 'fresh'"):
            await house.roll_back(None, "")
        assert house.roster.rules.digest == bad
        assert house.archive.passed() is None

    live(tmp_path, scene)


def test_a_worker_that_fails_has_its_successor_under_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(house: House) -> None:
        good = await house.adopt(1.0, lab="good.example.com")
        bad = await house.adopt(2.0, lab="bad.example.com")

        async def fails(policies: object) -> None:
            raise WorkerFailed("it died")

        monkeypatch.setattr(house.carrier, "adopt", fails)
        with pytest.raises(WorkerFailed):
            await house.roll_back(None, "")
        monkeypatch.undo()
        assert house.roster.rules.digest == good
        assert house.archive.passed() == Passed(bad, good, "")

    live(tmp_path, scene)
