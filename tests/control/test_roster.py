"""The life of a sandbox in a daemon: whatever goes wrong, it ends gone, and nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egressd.control.api_schema import told
from egressd.control.estate import Estate, Remains, StateError
from egressd.control.lives import Life
from egressd.control.roster import Full, Wanted
from egressd.control.supervisor import WorkerFailed
from egressd.control.surroundings import BadInput
from egressd.control.wirings import NotWired
from egressd.wiring.errors import WiringError
from egressd.wiring.ruleset import Counted
from tests.control.household import NO_CREDENTIALS, House, Thing, read, until, write_rules

LAB = Wanted("lab", "explicit", {"task": "7"})


def live(house: House, scene: Callable[[House], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await scene(house)
        finally:
            await house.roster.end_all("drained")
            house.estate.close()

    asyncio.run(run())


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_sandbox_is_made_used_and_gone(house: House) -> None:
    async def scene(house: House) -> None:
        life = await house.roster.create(LAB)
        assert (life.stage, life.profile, life.labels) == ("ready", "lab", {"task": "7"})
        assert house.files() == [f"{life.id}.json"]
        assert house.carrier.carried.keys() == {life.id}
        await house.roster.end(life, "revoked", "uid 0")
        assert (life.stage, life.ending) == ("gone", "revoked")
        assert life.ended is not None
        assert house.files() == []
        assert house.carrier.removed == [(life.id, False)]
        assert (house.thing.made[life.id].halted, house.thing.made[life.id].closed) == ("revoked", 1)
        assert house.carrier.details(life.id) == ["ready", "revoked by uid 0"]
        assert house.roster.living == ()
        assert house.roster.find(life.id) is life

    live(house, scene)


def test_ids_and_generations_are_never_anothers_over_restarts_too(house: House, tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        first, second = await house.roster.create(LAB), await house.roster.create(LAB)
        await house.roster.end_all("revoked")
        third = await house.roster.create(LAB)
        assert len({first.id, second.id, third.id}) == 3
        assert first.generation < second.generation < third.generation
        house.estate.close()
        house.estate = Estate(tmp_path / "state")
        assert house.estate.next_generation() > third.generation

    live(house, scene)


def test_ending_twice_or_by_many_is_one_end(house: House) -> None:
    async def scene(house: House) -> None:
        life = await house.roster.create(LAB)
        await asyncio.gather(
            *(house.roster.end(life, "revoked") for _ in range(5)), house.roster.end_all("drained")
        )
        assert len(house.carrier.removed) == 1
        assert house.thing.made[life.id].closed == 1
        assert life.ending == "revoked"

    live(house, scene)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotWired("no such address", asked=True), NotWired),
        (WiringError("ip", "failed"), WiringError),
        (OSError(24, "no descriptors"), OSError),
    ],
)
def test_a_wiring_that_cannot_be_made_leaves_nothing(
    house: House, error: Exception, expected: type[Exception]
) -> None:
    async def scene(house: House) -> None:
        house.thing.error = error
        with pytest.raises(expected):
            await house.roster.create(LAB)
        assert house.roster.living == ()
        assert house.files() == []
        assert house.carrier.carried == {}

    live(house, scene)


def test_a_sandbox_that_no_worker_serves_is_taken_down(house: House) -> None:
    async def scene(house: House) -> None:
        house.carrier.fails = True
        with pytest.raises(WorkerFailed):
            await house.roster.create(LAB)
        assert house.carrier.carried == {}
        [made] = house.thing.made.values()
        assert made.closed == 1
        assert house.files() == []

    live(house, scene)


def test_a_source_has_one_owner_and_the_loser_takes_nothing_away(house: House) -> None:
    async def scene(house: House) -> None:
        wanted = replace(LAB, source="10.0.0.1")
        first = await house.roster.create(wanted)
        with pytest.raises(NotWired, match="another sandbox"):
            await house.roster.create(wanted)
        assert house.carrier.carried.keys() == {first.id}
        assert house.roster.comes_from("10.0.0.1")
        await house.roster.end(first, "revoked")
        second = await house.roster.create(wanted)
        assert second.generation > first.generation

    live(house, scene)


def test_a_sandbox_revoked_while_it_is_made_never_gets_ready(house: House) -> None:
    async def scene(house: House) -> None:
        house.thing.gate = asyncio.Event()
        creating = asyncio.create_task(house.roster.create(LAB))
        await until(lambda: house.roster.living)
        [life] = house.roster.living
        ending = asyncio.create_task(house.roster.end(life, "revoked"))
        await asyncio.sleep(0.02)
        assert not ending.done()  # what is half made is not left alone
        house.thing.gate.set()
        with pytest.raises(NotWired):
            await creating
        await ending
        assert house.thing.made[life.id].closed == 1
        assert house.carrier.carried == {}
        assert house.files() == []

    live(house, scene)


def test_a_sandbox_revoked_while_its_worker_takes_it_never_gets_ready(house: House) -> None:
    async def scene(house: House) -> None:
        house.carrier.slow = asyncio.Event()
        creating = asyncio.create_task(house.roster.create(LAB))
        await until(lambda: house.carrier.carried)
        [life] = house.roster.living
        await house.roster.end(life, "revoked")
        house.carrier.slow.set()
        with pytest.raises(NotWired):
            await creating
        assert "ready" not in house.carrier.details(life.id)

    live(house, scene)


def test_whoever_asked_may_go_away_while_it_is_made(house: House) -> None:
    async def scene(house: House) -> None:
        house.carrier.slow = asyncio.Event()
        creating = asyncio.create_task(house.roster.create(LAB))
        await until(lambda: house.carrier.carried)
        creating.cancel()
        house.carrier.slow.set()
        [life] = house.roster.living
        await until(lambda: life.stage == "ready")

    live(house, scene)


def test_there_are_never_more_than_there_may_be(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        made = await asyncio.gather(*(house.roster.create(LAB) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(one, Full) for one in made) == 2
        await house.roster.end_all("revoked")
        await house.roster.create(LAB)

    live(House(tmp_path, most=3), scene)


def test_who_is_draining_lets_nobody_in(house: House) -> None:
    async def scene(house: House) -> None:
        house.roster.closed = True
        with pytest.raises(Full):
            await house.roster.create(LAB)

    live(house, scene)


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (replace(LAB, profile="none"), BadInput),
        (replace(LAB, profile="../lab"), BadInput),
        (replace(LAB, wiring="gateway"), NotWired),
        (replace(LAB, wiring="namespace"), NotWired),
    ],
)
def test_what_is_not_there_cannot_be_asked_for(house: House, wanted: Wanted, error: type[Exception]) -> None:
    async def scene(house: House) -> None:
        with pytest.raises(error):
            await house.roster.create(wanted)
        assert house.roster.living == ()

    live(house, scene)


def test_a_time_to_live_ends_it(house: House) -> None:
    async def scene(house: House) -> None:
        life = await house.roster.create(replace(LAB, ttl=0.05))
        other = await house.roster.create(LAB)
        await until(lambda: life.stage == "gone")
        assert life.ending == "expired"
        assert other.stage == "ready"

    live(house, scene)


def test_either_clock_ends_a_time_to_live(house: House) -> None:
    async def scene(house: House) -> None:
        life = await house.roster.create(replace(LAB, ttl=1000))
        assert not life.expired()
        life.expires = life.created - 1  # the wall clock was set ahead
        assert life.expired()
        life.expires = life.created + 10_000  # and back
        life.until = 0.0
        assert life.expired()

    live(house, scene)


def test_what_a_killed_daemon_left_is_swept_by_its_wiring(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        id_ = "sbx-" + "0" * 20
        house.estate.note(Remains(id_, "gateway", "lab", {"chain": "x"}))
        assert await house.roster.sweep() == 1
        assert gateway.swept == [{"chain": "x"}]
        assert house.carrier.details(id_) == ["gone: its daemon was killed"]
        assert house.files() == []

    gateway = Thing("gateway")
    live(House(tmp_path, wirings=[gateway]), scene)


def test_what_cannot_be_swept_is_kept_for_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene(house: House) -> None:
        for number, wiring in enumerate(("gateway", "sidecar")):
            house.estate.note(Remains(f"sbx-{number:020x}", wiring, "lab", {"chain": "x"}))
        gateway.error = WiringError("iptables", "locked")
        assert await house.roster.sweep() == 0
        assert len(house.files()) == 2

    gateway = Thing("gateway")
    live(House(tmp_path, wirings=[gateway]), scene)
    assert capsys.readouterr().err.count("could not be taken down") == 2


def test_what_the_kernel_counted_is_held_against_the_records(house: House) -> None:
    async def scene(house: House) -> None:
        life = await house.roster.create(LAB)
        house.thing.made[life.id].counts = Counted(connections=2)
        await house.roster.end(life, "ended")
        [lost] = [record for record in house.carrier.records if record["event"] == "lost"]
        assert (lost["sandbox"], lost["count"], lost["layer"]) == (life.id, 2, "connection")

    live(house, scene)


def test_a_reload_reaches_everybody_or_nobody(house: House) -> None:
    async def scene(house: House) -> None:
        lab, other = await house.roster.create(LAB), await house.roster.create(replace(LAB, profile="other"))
        write_rules(house.rules, lab="new.example.com")
        await house.roster.adopt(read(house.rules), NO_CREDENTIALS)
        assert house.carrier.adopted == [{lab.id, other.id}]
        assert lab.keyring.policy.entries[0].hosts == ("new.example.com",)
        (house.rules / "profiles/other.yaml").unlink()
        write_rules(house.rules, lab="newer.example.com")
        with pytest.raises(BadInput, match=other.id):
            await house.roster.adopt(read(house.rules), NO_CREDENTIALS)
        assert len(house.carrier.adopted) == 1
        assert lab.keyring.policy.entries[0].hosts == ("new.example.com",)

    live(house, scene)


def test_labels_lead_to_the_canary_and_back_with_the_rules(house: House) -> None:
    async def scene(house: House) -> None:
        agent = house.rules / "profiles" / "lab.yaml"
        plain = agent.read_text()
        agent.write_text(plain + "canary: {labels: {ring: first}, profile: other}\n")
        await house.roster.adopt(read(house.rules), NO_CREDENTIALS)
        first = await house.roster.create(replace(LAB, labels={"ring": "first"}))
        last = await house.roster.create(LAB)
        assert [(life.profile, life.canary, life.keyring.policy.profile) for life in (first, last)] == [
            ("lab", "other", "other"),
            ("lab", None, "lab"),
        ]
        assert first.note("x")["profile"] == "other"
        assert told(first).canary == "other"
        agent.write_text(plain)
        await house.roster.adopt(read(house.rules), NO_CREDENTIALS)
        assert first.keyring.policy.profile == "lab"

    live(house, scene)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["create", "fail", "revoke", "all", "pause"]), max_size=25))
def test_whatever_is_done_in_whatever_order_nothing_is_left_of_the_gone(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    async def scene(house: House) -> None:
        running: list[asyncio.Task[Life | int]] = []
        for step in steps:
            house.carrier.fails = step == "fail"
            living = house.roster.living
            match step:
                case "create" | "fail":
                    running.append(asyncio.create_task(house.roster.create(LAB)))
                case "revoke" if living:
                    running.append(
                        asyncio.create_task(house.roster.end(living[len(running) % len(living)], "revoked"))
                    )
                case "all":
                    running.append(asyncio.create_task(house.roster.end_all("revoked")))
            if step != "all":
                await asyncio.sleep(0)
        await asyncio.gather(*running, return_exceptions=True)
        alive = {life.id for life in house.roster.living}
        assert house.carrier.carried.keys() == alive
        assert set(house.files()) == {f"{one}.json" for one in alive}
        assert all(life.stage == "ready" for life in house.roster.living)
        assert all((made.closed == 0) == (one in alive) for one, made in house.thing.made.items())

    live(House(tmp_path_factory.mktemp("house"), most=100), scene)


def test_one_folder_has_one_daemon(tmp_path: Path) -> None:
    first = Estate(tmp_path)
    with pytest.raises(StateError, match="another daemon"):
        Estate(tmp_path)
    first.close()
    Estate(tmp_path).close()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"traces": 7}', '{"wiring": {"a": 1}, "traces": {"b": []}}']
)
def test_a_file_of_remains_that_nobody_can_read_still_stands_for_its_sandbox(
    tmp_path: Path, content: str
) -> None:
    estate = Estate(tmp_path)
    (tmp_path / "sandboxes" / f"sbx-{'a' * 20}.json").write_text(content)
    (tmp_path / "sandboxes" / "half.new").write_text("x")
    [remains] = estate.remains()
    assert remains.id == f"sbx-{'a' * 20}"
    assert not (tmp_path / "sandboxes" / "half.new").exists()
    estate.close()


def test_an_id_is_never_a_path(tmp_path: Path) -> None:
    estate = Estate(tmp_path)
    for sandbox in ("../x", "sbx-", f"sbx-{'a' * 20}/..", ""):
        with pytest.raises(ValueError, match="no sandbox id"):
            estate.note(Remains(sandbox, "explicit", "lab", {}))
    estate.close()


@pytest.mark.parametrize("content", ["", "x", "-1", "99999999999999999999", "7"])
def test_the_number_of_starts_survives_whatever_is_in_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "starts").write_text(content)
    estate = Estate(tmp_path)
    assert 2**32 < estate.next_generation() < 2**53
    estate.close()
