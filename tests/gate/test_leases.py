"""The leases of a worker: kept while they are fit, asked for once, and none at all when anything goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from pydantic import SecretStr

from egressd.credentials.lease import Lease, Token
from egressd.gate import leases as leases_module
from egressd.gate.leases import KEEP, LEAST_LEFT, PAUSE, Asked, Leases
from egressd.policy.credential import Attach

NOW = 1_800_000_000.0


def asked(sandbox: str = "sb-1", credential: str = "key") -> Asked:
    return Asked(sandbox, credential, "GET", "https", "api.example.com", 443, "/v1/x")


def lent(
    number: int = 0, sandbox: str = "sb-1", credential: str = "key", expires: float | None = NOW + 600
) -> Lease:
    material = Token(value=SecretStr(f"s3cr3t-{number}"))
    return Lease(
        id=f"l-{number}",
        credential=credential,
        sandbox=sandbox,
        material=material,
        attach=Attach(bearer=True),
        expires=expires,
    )


class Control:
    """Answers in turn; a callable answers itself, an exception is raised. Counts what it was asked."""

    def __init__(
        self, *answers: Lease | BaseException | Callable[[], Awaitable[Lease | None]] | None
    ) -> None:
        self.answers = list(answers)
        self.asked: list[Asked] = []
        self.wall = NOW
        self.clock = 0.0
        self.leases = Leases(self.answer, wall=lambda: self.wall, clock=lambda: self.clock)

    async def answer(self, question: Asked) -> Lease | None:
        self.asked.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(bounded())


def test_a_lease_is_asked_for_once_and_kept() -> None:
    async def test() -> None:
        control = Control(lent())
        assert await control.leases.lease(asked()) is await control.leases.lease(asked())
        assert control.leases.held(("sb-1", "key")) is not None
        assert control.asked == [asked()]

    run(test())


def test_many_who_ask_at_once_make_one_question() -> None:
    async def test() -> None:
        control = Control(lent())
        found = await asyncio.gather(*(control.leases.lease(asked()) for _ in range(50)))
        assert {lease.id for lease in found if lease} == {"l-0"}
        assert len(found) == 50
        assert len(control.asked) == 1

    run(test())


def test_one_who_gives_up_does_not_end_it_for_the_others() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow() -> Lease:
            await go.wait()
            return lent()

        control = Control(slow)
        first = asyncio.create_task(control.leases.lease(asked()))
        second = asyncio.create_task(control.leases.lease(asked()))
        await asyncio.sleep(0)
        first.cancel()
        go.set()
        lease = await second
        assert lease is not None
        assert len(control.asked) == 1

    run(test())


def test_sandboxes_and_credentials_do_not_share() -> None:
    async def test() -> None:
        control = Control(lent(1), lent(2, sandbox="sb-2"), lent(3, credential="other"))
        first = await control.leases.lease(asked())
        second = await control.leases.lease(asked("sb-2"))
        third = await control.leases.lease(asked("sb-1", "other"))
        assert [lease.id for lease in (first, second, third) if lease] == ["l-1", "l-2", "l-3"]

    run(test())


@pytest.mark.parametrize(
    ("wall", "clock", "questions"),
    [
        pytest.param(600 - LEAST_LEFT, 1.0, 1, id="as long as it has its least left"),
        pytest.param(600 - LEAST_LEFT + 1, 1.0, 2, id="not near its end"),
        pytest.param(700, 1.0, 2, id="not when it has expired"),
        pytest.param(1, KEEP - 1, 1, id="for a while"),
        pytest.param(1, KEEP, 2, id="not without asking again"),
    ],
)
def test_a_kept_lease_is_served(wall: float, clock: float, questions: int) -> None:
    async def test() -> None:
        control = Control(lent(), lent(1, expires=None))
        await control.leases.lease(asked())
        control.wall, control.clock = NOW + wall, clock
        assert await control.leases.lease(asked()) is not None
        assert len(control.asked) == questions

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="control says no"),
        pytest.param(lent(expires=NOW + LEAST_LEFT - 0.1), id="it is near its end already"),
        pytest.param(lent(sandbox="sb-2"), id="it is another sandbox's"),
        pytest.param(lent(credential="other"), id="it is another credential"),
        pytest.param(RuntimeError("s3cr3t-0"), id="asking raises"),
        pytest.param(OSError(), id="control has gone"),
    ],
)
def test_there_is_none(answer: Lease | BaseException | None, capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        control = Control(answer, lent())
        assert await control.leases.lease(asked()) is None
        assert control.leases.held(("sb-1", "key")) is None
        assert await control.leases.lease(asked()) is not None, "it recovers by itself"

    run(test())
    assert "s3cr3t" not in capfd.readouterr().err


def test_control_that_hangs_is_given_up_on_and_left_alone_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases_module, "TIMEOUT", 0.01)

    async def test() -> None:
        async def hangs() -> Lease | None:
            await asyncio.Event().wait()
            return None

        control = Control(hangs, lent())
        assert await control.leases.lease(asked()) is None
        assert await control.leases.lease(asked()) is None
        assert len(control.asked) == 1
        control.clock = PAUSE
        assert await control.leases.lease(asked()) is not None

    run(test())


def test_what_is_forgotten_is_asked_for_anew_even_when_it_is_on_its_way() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow() -> Lease:
            await go.wait()
            return lent(1)

        control = Control(slow, lent(2), lent(3), lent(4, sandbox="sb-2"))
        waiting = asyncio.create_task(control.leases.lease(asked()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        control.leases.forget("sb-1")
        go.set()
        lease = await waiting
        assert lease is not None
        assert lease.id == "l-2", "the one before was lent under other rules"
        control.leases.forget("sb-1", "other")
        assert control.leases.held(("sb-1", "key")) is lease
        control.leases.forget("sb-1", "key")
        assert (await control.leases.lease(asked())) != lease

    run(test())


def test_a_lease_that_is_taken_back_stands_no_more() -> None:
    async def test() -> None:
        control = Control(lent(1), lent(1), lent(2))
        lease = await control.leases.lease(asked())
        assert lease is not None
        assert control.leases.stands(lease)
        control.wall = NOW + 700
        assert control.leases.stands(lease), "that it expires does not end what was begun"
        control.wall = NOW
        control.leases.withdraw("l-1")
        assert not control.leases.stands(lease)
        assert control.leases.held(("sb-1", "key")) is None
        assert await control.leases.lease(asked()) is None, "lent again, it is no better"
        assert await control.leases.lease(asked()) is not None

    run(test())


def test_with_a_lease_all_of_its_series_is_taken_back() -> None:
    """What is under way may go by one that has long had a successor, which this worker may never have seen."""

    async def test() -> None:
        control = Control(*(lent().model_copy(update={"id": name}) for name in ("lease-a.1", "lease-ab.1")))
        old = await control.leases.lease(asked())
        control.leases.forget("sb-1")
        other = await control.leases.lease(asked())
        assert old is not None
        assert other is not None
        control.leases.withdraw("lease-a.2")
        assert (control.leases.stands(old), control.leases.stands(other)) == (False, True)

    run(test())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "MOST", 3)

    async def test() -> None:
        control = Control(*(lent(number, sandbox=f"sb-{number}") for number in range(5)))
        for number in range(5):
            await control.leases.lease(asked(f"sb-{number}"))
            control.leases.withdraw(f"x-{number}")
        held = [number for number in range(5) if control.leases.held((f"sb-{number}", "key"))]
        assert held == [2, 3, 4]

    run(test())
