"""A worker that was taken over: control believes it of its own sandboxes at most, lives on, and serves everybody else.

The attacks are made by a real worker, isolated and confined, that does what its sandbox asks on its page (hostile.py).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from egressd.control.lending import Lending
from egressd.credentials.broker import Broker
from egressd.credentials.providers.base import For, Minted
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectivePolicy
from tests.control import hostile
from tests.control.fleet import PATIENCE, POLICY, Box, Fleet, descriptors, fleet, until

FORGED = "forged.example.com"
FILE = CredentialsFile.model_validate(
    {
        "schema": 1,
        "credentials": {
            "key": {
                "for": [{"hosts": ["*.example.com"], "requests": ["GET /**"]}],
                "source": {"env": "KEY"},
                "attach": {"bearer": True},
            }
        },
    }
)
LENT = POLICY.model_copy(
    update={
        "entries": (
            POLICY.entries[0].model_copy(
                update={"hosts": ("api.example.com",), "requests": ("GET /**",), "credential": "key"}
            ),
        )
    }
)


@pytest.fixture(autouse=True)
def _fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.control.process._START", hostile.START)


class Field:
    """Two workers with a sandbox each: the first one falls, the second one is the neighbour."""

    def __init__(self, made: Fleet, fallen: Box, neighbour: Box) -> None:
        self.made, self.fallen, self.neighbour = made, fallen, neighbour
        self.attacked, self.pid = made.supervisor.worker_pids

    async def attack(self, name: str, word: str = "") -> str:
        """Have the first worker do it; what it says of that, nothing where it was ended for it."""
        self.attacked = self.made.supervisor.worker_pids[0]
        try:
            return (await self.fallen.get(f"/attack/{name}?{word}", seconds=PATIENCE))[1]
        except (OSError, IndexError):
            return ""

    async def held(self) -> None:
        """The neighbour was served throughout, by the worker it always had."""
        assert (await self.neighbour.get())[0] == 200
        assert await self.neighbour.name("api.example.com") == "198.18.1.0"
        assert self.made.supervisor.worker_pids[1] == self.pid

    async def ended(self, deaths: int = 1) -> None:
        """The fallen one was ended, and its sandbox is served by a sound successor."""
        await until(lambda: self.made.supervisor.deaths >= deaths, "the end of the fallen worker")
        gone = (None, self.attacked)
        await until(lambda: self.made.supervisor.worker_pids[0] not in gone, "a successor")
        assert (await self.fallen.get(seconds=PATIENCE))[0] == 200
        assert (await self.fallen.name("api.example.com")).startswith("198.18.")
        await self.held()


def on(path: Path, scenario: Any, policy: EffectivePolicy = POLICY, **options: Any) -> None:
    async def stage() -> None:
        async with fleet(path, workers=2, **options) as made:
            await scenario(Field(made, await made.box(policy), await made.box(policy)))

    asyncio.run(asyncio.wait_for(stage(), 2 * PATIENCE))


def test_what_no_sound_worker_says_ends_it_and_nobody_else(tmp_path: Path) -> None:
    async def scenario(field: Field) -> None:
        neighbour = field.neighbour.id
        attacks = (
            ("record", neighbour),
            ("record", "sbx-00000000000000000000"),
            ("pair", neighbour),
            ("malformed", "ff00ff00"),
            ("malformed", b'{"type": "configure"}'.hex()),
            ("oversized", ""),
        )
        for deaths, (name, word) in enumerate(attacks, 1):
            await field.attack(name, word)
            await field.ended(deaths)
        assert field.neighbour.state.pairs == {"api.example.com": "198.18.1.0"}
        assert field.made.records(host=FORGED) == []
        assert not field.made.said

    on(tmp_path, scenario)


def test_what_it_may_not_say_more_softly_either(tmp_path: Path) -> None:
    async def scenario(field: Field) -> None:
        attacks = (
            ("spent", field.neighbour.id),
            ("poison", "..bad,198.18.9.9"),
            ("poison", "good.example.com,10.0.0.1"),
            ("poison", "good.example.com,x"),
            ("names", ""),
            ("descriptors", "1,64"),
        )
        for deaths, (name, word) in enumerate(attacks, 1):
            await field.attack(name, word)
            await field.ended(deaths)
        assert all(tokens >= 0 for tokens, _ in field.neighbour.state.levels.values())

    on(tmp_path, scenario)


def test_its_lies_about_what_it_has_done_cost_itself_alone(tmp_path: Path) -> None:
    async def scenario(field: Field) -> None:
        assert await field.attack("lies", field.neighbour.id) == "done\n"
        assert await field.attack("claim", field.neighbour.id) == "done\n"
        await field.held()
        assert field.neighbour.state.source is None
        await field.made.supervisor.remove(field.neighbour.id)
        assert field.made.records(event="sandbox", sandbox=field.neighbour.id, detail="gone")

    on(tmp_path, scenario)


class Source:
    def __init__(self) -> None:
        self.minted: list[For] = []

    async def mint(self, for_: For) -> Minted:
        self.minted.append(for_)
        await asyncio.sleep(0)
        raise AssertionError("not to be reached")

    async def close(self) -> None:
        """Nothing is open."""


def test_it_gets_no_credential_for_another_sandbox_or_another_host(tmp_path: Path) -> None:
    source = Source()
    lending = Lending(Broker(FILE, provide=lambda *_: source), FILE)

    async def scenario(field: Field) -> None:
        for name, word in (
            ("ask", field.neighbour.id),
            ("ask", "sbx-of-nobody"),
            ("elsewhere", field.fallen.id),
        ):
            assert await field.attack(name, word) == "done\n"
        await field.held()
        assert source.minted == []

    on(tmp_path, scenario, LENT, lending=lending)


def test_floods_of_messages_keep_nobody_from_being_served(tmp_path: Path) -> None:
    async def scenario(field: Field) -> None:
        waits: list[float] = []
        for name, word in (("flood", "60000"), ("journal_flood", "8000"), ("questions", "20000")):
            attack = asyncio.create_task(field.attack(name, word))
            while not attack.done():
                began = time.monotonic()
                assert (await field.neighbour.get())[0] == 200
                assert await field.neighbour.name("api.example.com") == "198.18.1.0"
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.01)
            await attack
        assert len(waits) > 10
        assert sorted(waits)[len(waits) // 2] < 0.5
        await field.held()

    on(tmp_path, scenario)


def test_descriptors_that_it_sends_are_closed_at_once(tmp_path: Path) -> None:
    async def scenario(field: Field) -> None:
        assert (await field.neighbour.get())[0] == 200
        before = descriptors()
        # OSError: more are on their way than the kernel lets one user have (ETOOMANYREFS), where control is slow
        assert await field.attack("descriptors", "2000,32") in ("done\n", "OSError\n")
        await until(lambda: descriptors() <= before + 2, "their end")
        await field.held()

    on(tmp_path, scenario)


def test_it_reaches_neither_programs_nor_files(tmp_path: Path) -> None:
    async def scenario(field: Field) -> None:
        for path in (
            field.made.journal,
            tmp_path / "ca" / "ca.key",
            Path("/etc/passwd"),
            Path("/proc/1/environ"),
        ):
            assert await field.attack("files", str(path)) == "FileNotFoundError\n"
        assert field.made.supervisor.deaths == 0
        await field.attack("program")
        await field.ended()

    on(tmp_path, scenario)


def test_one_that_reads_nothing_more_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.channel.QUEUE_LIMIT", 500)

    async def scenario(field: Field) -> None:
        await field.attack("questions", "20000")
        await field.ended()

    on(tmp_path, scenario)
