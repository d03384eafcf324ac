"""Workers: a sandbox belongs to exactly one, which may die or be replaced; nobody else notices, and nobody is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from egressd.control.sources import SharedListeners
from egressd.control.worker import WorkerFailed
from egressd.gate.payloads import read_levels
from egressd.policy.effective import EffectiveEntry
from tests.control.fleet import PATIENCE, POLICY, Box, Fleet, descriptors, fleet, until


def run(scenario: object) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE))  # type: ignore[arg-type] # a coroutine, said shortly


async def begun(box: Box) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection in the middle of its first request, which its worker has accepted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
    writer.write(b"GET http://egressd.internal/ HT")
    await served(box)  # accepted later, so that the other one is too
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> None:
    """A connection that was cut ends by a reset, as nothing on it is whole."""
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 10)


async def served(box: Box) -> None:
    assert (await box.get())[0] == 200


def test_sandboxes_are_spread_and_each_has_one_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, workers=2) as made:
            boxes = [await made.box() for _ in range(4)]
            posts = made.supervisor._posts
            assert [len(post.sandboxes) for post in posts] == [2, 2]
            assert len(set(made.supervisor.worker_pids)) == 2
            for box in boxes:
                await served(box)

    run(scenario())


def test_a_dead_workers_sandboxes_move_with_names_and_budgets_and_others_do_not_notice(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, workers=2) as made:
            one, two = await made.box(), await made.box()
            first = await one.name("api.example.com")
            assert first == "198.18.1.0"
            assert await one.name("a.wild.example.com") == "198.18.1.1"
            one.state.keep_level("api", "requests", 7.0, asyncio.get_running_loop().time())
            dead, other = made.supervisor.worker_pids
            assert dead is not None
            os.kill(dead, signal.SIGKILL)
            await until(lambda: made.supervisor.worker_pids[0] != dead, "its end")
            waiting = asyncio.create_task(one.get(seconds=PATIENCE))  # in the backlog meanwhile
            await served(two)
            assert not waiting.done()
            assert (await waiting)[0] == 200
            assert await one.name("b.wild.example.com") == "198.18.1.2"
            assert await one.name("api.example.com") == first
            assert made.supervisor.worker_pids[1] == other
            assert made.supervisor.deaths == 1
            kept = {
                (level.owner, level.kind): level.tokens
                for level in read_levels(one.state.levels_payload(0.0))
            }
            assert kept["api", "requests"] == 7.0
            assert kept["", "dns"] < 6000

    run(scenario())


def test_a_worker_that_cannot_be_kept_is_complained_of_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egressd.control.post._RESTARTS", 2)
    monkeypatch.setattr("egressd.control.post._LONG_PAUSE", 0.1)

    async def scenario() -> None:
        async with fleet(tmp_path, workers=2) as made:
            one, two = await made.box(), await made.box()
            for _ in range(2):
                pid = made.supervisor.worker_pids[0]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                while made.supervisor.worker_pids[0] in (None, pid) and not made.said:  # noqa: ASYNC110 -- either tells
                    await asyncio.sleep(0.02)
            await until(lambda: made.said, "the complaint")
            await served(two)
            monkeypatch.setattr("egressd.control.post._RESTARTS", 8)
            await until(lambda: made.supervisor.worker_pids[0], "another try")
            await served(one)

    run(scenario())


class Client:
    """Asks without a pause, for pages and for names that nobody asked for before."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.asked = self.failed = 0
        self.over = False
        self.tasks = [asyncio.create_task(self._pages()), asyncio.create_task(self._names())]

    async def _pages(self) -> None:
        while not self.over:
            self.count((await self.box.get(seconds=PATIENCE))[0] == 200)

    async def _names(self) -> None:
        while not self.over:
            self.count((await self.box.name(f"n{self.asked}.wild.example.com")).startswith("198.18."))
            await asyncio.sleep(0.005)

    def count(self, good: bool) -> None:
        self.asked += 1
        self.failed += not good

    async def end(self) -> None:
        self.over = True
        await asyncio.gather(*self.tasks)


def test_workers_are_replaced_without_a_refused_connection_or_a_lost_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, workers=2) as made:
            boxes = [await made.box(), await made.box()]
            clients = [Client(box) for box in boxes]
            await until(lambda: all(client.asked > 20 for client in clients), "work")
            before = made.supervisor.worker_pids
            for _ in range(2):
                await made.supervisor.roll(5.0)
            marks = [client.asked for client in clients]
            await until(
                lambda: all(client.asked > mark + 20 for client, mark in zip(clients, marks, strict=True)),
                "work afterwards",
            )
            for client in clients:
                await client.end()
                assert client.failed == 0
            assert not set(before) & set(made.supervisor.worker_pids)
            assert made.supervisor.deaths == 0
            names = boxes[0].state.pairs
            assert len(set(names.values())) == len(names)
            await until(
                lambda: not any(post._leaving for post in made.supervisor._posts), "the old ones' end"
            )
            assert all(not exists(pid) for pid in before if pid is not None)
        told = made.records(event="decision", layer="request", verdict="allow")
        assert len(told) == len(made.records(event="end", layer="request"))
        assert not made.records(reason="worker_died")

    run(scenario())


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_what_is_open_in_a_worker_that_steps_aside_ends_in_its_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            box = await made.box()
            reader, writer = await begun(box)
            await made.supervisor.roll(0.2)
            await ended(reader)
            writer.close()
            await served(box)
        ends = [record["reason"] for record in made.records(event="end", layer="connection")]
        assert "worker_died" not in ends

    run(scenario())


def test_an_old_worker_that_dies_while_it_steps_aside_costs_its_own_connections_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            box = await made.box()
            _, writer = await begun(box)
            old = made.supervisor.worker_pid
            assert old is not None
            await made.supervisor.roll(30.0)
            assert exists(old)
            os.kill(old, signal.SIGKILL)
            await until(lambda: not exists(old), "its end")
            await served(box)
            assert made.supervisor.worker_pid not in (None, old)
            writer.close()

    run(scenario())


def test_a_worker_that_does_not_step_aside_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.control.post._STEP_TIMEOUT", 0.5)

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            box = await made.box()
            old = made.supervisor.worker_pid
            assert old is not None
            os.kill(old, signal.SIGSTOP)
            await made.supervisor.roll(1.0)
            await served(box)
            await until(lambda: not exists(old), "the old one's end")

    run(scenario())


def test_rules_and_revocations_reach_a_worker_that_steps_aside_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            box, other = await made.box(), await made.box()
            reader, writer = await begun(box)
            await made.supervisor.roll(30.0)
            await made.supervisor.adopt({other.id: other.state.policy.model_copy(update={"profile": "q"})})
            began = asyncio.get_running_loop().time()
            await made.supervisor.remove(box.id)
            await ended(reader)
            assert asyncio.get_running_loop().time() - began < 1.0
            writer.close()
            assert "profile q" in " ".join((await other.get("/whoami"))[1].replace(":", "").split())

    run(scenario())


def test_a_successor_that_cannot_start_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            box = await made.box()
            old = made.supervisor.worker_pid
            monkeypatch.setattr("egressd.control.process._START", "import sys; sys.exit(3)")
            with pytest.raises(WorkerFailed):
                await made.supervisor.roll(1.0)
            assert made.supervisor.worker_pid == old
            await served(box)

    run(scenario())


def test_shared_listeners_are_where_their_sandboxes_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, workers=2) as made:
            shared = Box()
            for interface in ("", "br1", "br2"):
                await made.supervisor.share(SharedListeners(f"s{interface}", (), interface))
            homes = made.supervisor._networks
            assert len({id(post) for post in homes.values()}) == 2
            shared.state.interface, shared.state.source = "br1", "10.0.0.7"
            await made.supervisor.add(shared.state)
            assert made.supervisor._at[shared.id] is homes["br1"]
            await made.supervisor.unshare("sbr2")

    run(scenario())


def test_many_sandboxes_are_handed_over_with_few_descriptors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            boxes = [await made.box() for _ in range(60)]
            base = descriptors()
            most = 0

            async def look() -> None:
                nonlocal most
                while True:
                    most = max(most, descriptors())
                    await asyncio.sleep(0)

            looking = asyncio.create_task(look())
            await made.supervisor.roll(1.0)
            looking.cancel()
            assert most - base < 150
            for box in boxes[::10]:
                await served(box)
            await asyncio.gather(*(made.supervisor.remove(box.id) for box in boxes))
            assert made.supervisor._at == {}

    run(scenario())


def test_nothing_is_left_of_a_supervisor_that_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = descriptors()
        async with fleet(tmp_path, workers=2) as made:
            await made.box()
            pids = made.supervisor.worker_pids
            await made.supervisor.roll(5.0)
            pids += made.supervisor.worker_pids
        assert not any(exists(pid) for pid in pids if pid is not None)
        assert descriptors() <= before + 1  # the journal
        assert isinstance(made, Fleet)

    run(scenario())


LARGE = POLICY.model_copy(
    update={
        "entries": (
            *POLICY.entries,
            EffectiveEntry(
                id="many",
                place="p.yaml:9",
                effect="allow",
                hosts=tuple(f"h{number}.many.example.com" for number in range(20_000)),
            ),
        )
    }
)
"""A policy that is not read in a moment."""


def test_what_comes_while_a_policy_is_read_keeps_its_order(tmp_path: Path) -> None:
    """Whoever is ended before that is never carried, who comes after is, and rules that came last are in force."""

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            first = await made.box()
            ended_early, second = Box(LARGE), Box(LARGE)
            adding = [asyncio.create_task(made.supervisor.add(box.state)) for box in (ended_early, second)]
            await asyncio.sleep(0)
            await made.supervisor.remove(ended_early.id)
            await asyncio.gather(*adding)
            await made.supervisor.adopt({first.id: LARGE})
            await made.supervisor.adopt({first.id: POLICY})
            assert await second.name("h7.many.example.com") == "198.18.1.0"
            assert not (await first.name("h7.many.example.com")).startswith("198.18.1.")
            with pytest.raises(ConnectionRefusedError):
                await ended_early.get()
            await asyncio.gather(
                *(made.supervisor.adopt({second.id: policy}) for policy in (POLICY, LARGE, POLICY))
            )
            await until(lambda: second.state.policy is POLICY, "the last")
            assert not (await second.name("h8.many.example.com")).startswith("198.18.1.")

    run(scenario())


def test_who_is_not_carried_yet_when_a_worker_is_replaced_is_carried_by_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            await made.box()
            boxes = [Box(LARGE.model_copy(update={"owner": str(number)})) for number in range(4)]
            adding = [asyncio.create_task(made.supervisor.add(box.state)) for box in boxes]
            await made.supervisor.roll(5)
            await asyncio.gather(*adding)
            for box in boxes:
                await served(box)

    run(scenario())
