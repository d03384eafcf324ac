"""The broker: one asking for many, fresh leases only, fast failures, and nothing left when a sandbox has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import SecretStr

from egressd.credentials import broker as broker_module
from egressd.credentials.broker import ANSWER, FAILED, IDLE, Broker, Unavailable
from egressd.credentials.lease import AwsKeys, Lease, Token
from egressd.credentials.providers.base import For, Minted, SourceFailed
from egressd.credentials.terms import LEAST_LEFT
from egressd.policy.credential import Credential, CredentialsFile

NOW = 1_800_000_000.0
CANARY = "canary-5c0ffee"


def definition(**changes: object) -> dict[str, object]:
    return {
        "for": [{"hosts": ["api.example.com"], "requests": ["ANY /**"]}],
        "source": {"env": "X"},
        "attach": {"bearer": True},
        **changes,
    }


def file(**definitions: dict[str, object]) -> CredentialsFile:
    return CredentialsFile.model_validate(
        {"schema": 1, "credentials": definitions or {"key": definition()}}, strict=False
    )


def token(text: str = CANARY) -> Token:
    return Token(value=SecretStr(text))


type Answer = Minted | BaseException | Callable[[], Awaitable[Minted]]


@dataclass
class Source:
    """Gives its answers in turn, the last one for good."""

    answers: list[Answer]
    minted: list[For] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    closed: int = 0

    async def mint(self, for_: For) -> Minted:
        self.minted.append(for_)
        answer = self.answers[min(len(self.minted), len(self.answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer

    async def close(self) -> None:
        self.closed += 1

    def giving(self, text: str = CANARY, left: float | None = 900.0, **more: Any) -> Minted:
        async def revoke() -> None:
            self.revoked.append(text)

        return Minted(token(text), NOW + left if left is not None else None, revoke, **more)


class Stand:
    """A broker with clocks that stand still, and what it told."""

    def __init__(self, *answers: Answer, definitions: CredentialsFile | None = None) -> None:
        self.source = Source(list(answers))
        self.sources: list[Source] = [self.source]
        self.wall, self.clock = NOW, 0.0
        self.told: list[str] = []
        self.broker = Broker(
            definitions or file(),
            wall=lambda: self.wall,
            clock=lambda: self.clock,
            provide=self._provide,
            tell=self.told.append,
        )
        self._provided = 0

    def _provide(self, _name: str, _said: Credential) -> Source:
        self._provided += 1
        if self._provided > len(self.sources):
            self.sources.append(Source(self.source.answers))
        return self.sources[self._provided - 1]

    def answer(self, *answers: Answer) -> None:
        self.source.answers[:] = [answers[0]] * len(self.source.minted) + list(answers)

    async def lease(self, sandbox: str = "sbx-1", name: str = "key") -> Lease:
        return await self.broker.lease(name, For(sandbox, {"task": sandbox}))

    async def unavailable(self, why: str = "", sandbox: str = "sbx-1", name: str = "key") -> None:
        with pytest.raises(Unavailable, match=why) as refused:
            await self.lease(sandbox, name)
        assert CANARY not in str(refused.value)

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.clock += seconds


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_everything_that_can_go_wrong_is_unavailable_and_says_nothing_of_the_secret() -> None:
    broken: list[tuple[BaseException, str]] = [
        (SourceFailed("status 503"), "status 503"),
        (ValueError(f"bad token {CANARY}"), "ValueError"),
        (KeyError(CANARY), "KeyError"),
        (OSError(5, CANARY), "OSError"),
    ]

    async def test() -> None:
        for error, why in broken:
            stand = Stand(error)
            await stand.unavailable(why)
            assert CANARY not in "".join(stand.told)
            assert stand.told == [f"credential key for sbx-1: not available: {why}"]
            await stand.broker.close()

    run(test())


@pytest.mark.parametrize(
    ("minted", "why"),
    [
        pytest.param(Minted(token(f"{CANARY}\r\nX: b")), "control character", id="a header of its own"),
        pytest.param(Minted(token(f"{CANARY}\n")), "newline", id="a newline behind"),
        pytest.param(Minted(token("")), "empty", id="nothing"),
        pytest.param(Minted(token(), NOW + LEAST_LEFT - 1), "less than", id="about to end"),
        pytest.param(Minted(token(), NOW - 1), "less than", id="over"),
        pytest.param(Minted(token(), float("nan")), "no time", id="an end that is no number"),
        pytest.param(Minted(token(), float("inf")), "no time", id="an end beyond all times"),
        pytest.param(
            Minted(AwsKeys(access_key_id="AKIA", secret_access_key=SecretStr(CANARY))),
            "sigv4",
            id="keys that the definition does not sign with",
        ),
    ],
)
def test_what_could_not_be_attached_is_not_lent(minted: Minted, why: str) -> None:
    async def test() -> None:
        stand = Stand(minted)
        await stand.unavailable(why)
        assert CANARY not in "".join(stand.told)

    run(test())


def test_a_lease_says_all_of_its_definition() -> None:
    said = definition(
        client_credentials="deny",
        slots=["x-other-key"],
        range=True,
        mask=["access_token"],
        token_requests=True,
    )

    async def test() -> None:
        source = Source([])
        stand = Stand(source.giving(), definitions=file(key=said))
        lease = await stand.broker.lease("key", For("sbx-1", {}), "dummy-1")
        assert (lease.credential, lease.sandbox, lease.expires) == ("key", "sbx-1", NOW + 900)
        assert (lease.client_credentials, lease.slots, lease.mask) == (
            "deny",
            ("x-other-key",),
            ("access_token",),
        )
        assert (lease.range, lease.token_requests, lease.placeholder) == (True, True, "dummy-1")
        assert lease.secrets() == (CANARY,)
        assert CANARY not in repr(lease)

    run(test())


def test_many_requests_are_one_asking_and_each_sandbox_has_its_own() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        source = Source([])

        async def slow() -> Minted:
            await gate.wait()
            return source.giving()

        stand = Stand(slow)
        waiting = [asyncio.ensure_future(stand.lease()) for _ in range(50)]
        await settle()
        gate.set()
        leases = await asyncio.gather(*waiting)
        assert len({lease.id for lease in leases}) == 1
        assert stand.source.minted == [For("sbx-1", {"task": "sbx-1"})]
        other = await stand.lease("sbx-2")
        assert other.id != leases[0].id
        assert other.sandbox == "sbx-2"
        assert len(stand.source.minted) == 2
        assert len(stand.sources) == 1, "one provider a definition"

    run(test())


def test_a_request_that_is_given_up_does_not_end_the_asking_for_the_others() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        source = Source([])

        async def slow() -> Minted:
            await gate.wait()
            return source.giving()

        stand = Stand(slow)
        first, second = (asyncio.ensure_future(stand.lease()) for _ in range(2))
        await settle()
        first.cancel()
        await settle()
        gate.set()
        assert (await second).secrets() == (CANARY,)

    run(test())


def test_an_old_lease_serves_while_its_successor_is_minted() -> None:
    async def test() -> None:
        stand = Stand()
        stand.answer(stand.source.giving("one"))
        first = await stand.lease()
        stand.pass_time(900 * 0.6)
        assert (await stand.lease()).id == first.id
        assert len(stand.source.minted) == 1
        gate = asyncio.Event()

        async def slow() -> Minted:
            await gate.wait()
            return stand.source.giving("two", 1800.0)

        stand.answer(slow)
        stand.pass_time(900 * 0.25)
        assert (await stand.lease()).id == first.id
        assert (await stand.lease()).id == first.id
        await settle()
        assert len(stand.source.minted) == 2
        gate.set()
        await settle()
        second = await stand.lease()
        assert (second.secrets(), second.expires) == (("two",), NOW + 1800)
        assert second.id != first.id

    run(test())


def test_a_refresh_that_fails_leaves_the_old_one_until_its_end_and_never_longer() -> None:
    async def test() -> None:
        stand = Stand()
        stand.answer(stand.source.giving())
        first = await stand.lease()
        stand.answer(SourceFailed("down"))
        stand.pass_time(900 - 60)
        for _ in range(5):
            assert (await stand.lease()).id == first.id
            await settle()
        assert len(stand.source.minted) == 2, "not asked again within a moment"
        stand.pass_time(FAILED)
        assert (await stand.lease()).id == first.id
        await settle()
        assert len(stand.source.minted) == 3
        stand.pass_time(60 - LEAST_LEFT)
        await stand.unavailable("down")
        stand.answer(stand.source.giving("new", 5000.0))
        stand.pass_time(FAILED)
        assert (await stand.lease()).secrets() == ("new",)
        assert stand.told[-1] == "credential key for sbx-1: available again"

    run(test())


def test_what_has_no_end_is_looked_at_again_and_not_given_when_it_is_gone() -> None:
    async def test() -> None:
        stand = Stand(Minted(token("one"), keep=1.0))
        first = await stand.lease()
        stand.pass_time(0.5)
        assert (await stand.lease()).id == first.id
        assert len(stand.source.minted) == 1
        stand.pass_time(1.0)
        assert (await stand.lease()).id == first.id, "the same secret is the same lease"
        assert len(stand.source.minted) == 2
        stand.answer(Minted(token("two"), keep=1.0))
        stand.pass_time(1.0)
        second = await stand.lease()
        assert second.secrets() == ("two",)
        assert second.id != first.id
        stand.answer(SourceFailed("gone"))
        stand.pass_time(1.0)
        await stand.unavailable("gone")

    run(test())


def test_a_failure_is_told_at_once_to_all_and_its_source_is_left_in_peace_for_a_moment() -> None:
    async def test() -> None:
        stand = Stand(SourceFailed("down"))
        for _ in range(20):
            await stand.unavailable("down")
        assert len(stand.source.minted) == 1
        stand.pass_time(FAILED)
        await stand.unavailable("down")
        assert len(stand.source.minted) == 2
        assert stand.told == ["credential key for sbx-1: not available: down"]
        stand.pass_time(60)
        await stand.unavailable("down")
        assert len(stand.told) == 2

    run(test())


def test_a_source_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "ANSWER", 0.05)

    async def test() -> None:
        gate = asyncio.Event()
        stand = Stand()

        async def slow() -> Minted:
            await gate.wait()
            return stand.source.giving()

        stand.answer(slow)
        await stand.unavailable("not answered yet")
        stand.pass_time(1.0)
        async with asyncio.timeout(0.04):
            await stand.unavailable("not answered yet")
        gate.set()
        await settle()
        assert (await stand.lease()).secrets() == (CANARY,), "what came late is there"
        assert len(stand.source.minted) == 1

    run(test())
    assert ANSWER < 5, "a worker waits for 5 seconds"


def test_a_source_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MINT", 0.02)

    async def test() -> None:
        async def never() -> Minted:
            await asyncio.Event().wait()
            raise AssertionError

        stand = Stand(never)
        await stand.unavailable("no answer within")
        stand.pass_time(FAILED)
        stand.answer(stand.source.giving())
        assert (await stand.lease()).secrets() == (CANARY,)

    run(test())


def test_a_lease_that_can_be_renewed_is_and_keeps_its_id() -> None:
    async def test() -> None:
        stand = Stand()
        renewals: list[Answer] = []

        async def renew() -> Minted:
            answer = renewals.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            assert isinstance(answer, Minted)
            return answer

        stand.answer(stand.source.giving("one", renew=renew))
        first = await stand.lease()
        renewals.append(Minted(token("one"), NOW + 1700))
        stand.pass_time(880)
        assert (await stand.lease()).id == first.id
        await settle()
        renewed = await stand.lease()
        assert (renewed.id, renewed.expires) == (first.id, NOW + 1700)
        assert len(stand.source.minted) == 1
        renewals.append(SourceFailed("no longer renewable"))
        stand.answer(stand.source.giving("two", 3000.0))
        stand.pass_time(800)
        await stand.lease()
        await settle()
        assert (await stand.lease()).secrets() == ("two",)
        await stand.broker.revoke("sbx-1")
        assert sorted(stand.source.revoked) == ["one", "two"], "what was superseded is taken back too"

    run(test())


def test_the_end_of_a_sandbox_takes_back_what_it_had_and_nothing_of_another() -> None:
    async def test() -> None:
        stand = Stand()
        stand.answer(stand.source.giving("one"), stand.source.giving("two"))
        await stand.lease("sbx-1")
        other = await stand.lease("sbx-2")
        await stand.broker.revoke("sbx-1")
        assert stand.source.revoked == ["one"]
        await stand.unavailable("has ended", "sbx-1")
        assert (await stand.lease("sbx-2")).id == other.id
        await stand.broker.close()
        assert sorted(stand.source.revoked) == ["one", "two"]
        assert stand.source.closed == 1
        await stand.unavailable("has ended", "sbx-3")

    run(test())


def test_what_a_source_gives_after_the_end_is_taken_back() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        stand = Stand()

        async def slow() -> Minted:
            await gate.wait()
            return stand.source.giving("late")

        stand.answer(slow)
        waiting = asyncio.ensure_future(stand.lease())
        await settle()
        ending = asyncio.ensure_future(stand.broker.revoke("sbx-1"))
        await settle()
        assert not ending.done(), "it is waited for"
        gate.set()
        await ending
        assert stand.source.revoked == ["late"]
        with pytest.raises(Unavailable):
            await waiting
        assert stand.told == []

    run(test())


def test_taking_back_is_bounded_and_its_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "REVOKE", 0.05)

    async def test() -> None:
        async def hang() -> None:
            await asyncio.Event().wait()

        async def fail() -> None:
            raise RuntimeError(CANARY)

        stand = Stand(Minted(token(), NOW + 900, hang), Minted(token(), NOW + 900, fail))
        await stand.lease("sbx-1")
        await stand.lease("sbx-2")
        async with asyncio.timeout(1):
            await stand.broker.revoke("sbx-1")
            await stand.broker.revoke("sbx-2")
        assert any("in time" in text or "TimeoutError" in text for text in stand.told)
        assert any("could not be taken back" in text and "RuntimeError" in text for text in stand.told)
        assert CANARY not in "".join(stand.told)
        await stand.broker.close()

    run(test())


def test_another_file_ends_what_it_changes_and_leaves_the_rest() -> None:
    async def test() -> None:
        stand = Stand(definitions=file(key=definition(), other=definition(attach={"header": "x-api-key"})))
        stand.answer(stand.source.giving("one"))
        stand.sources.append(Source([stand.source.giving("two")]))
        changed = await stand.lease(name="key")
        kept = await stand.lease(name="other")
        changed_now = definition(client_credentials="deny")
        ended = stand.broker.replace(file(key=changed_now, other=definition(attach={"header": "x-api-key"})))
        assert [lease.id for lease in ended] == [changed.id]
        await settle()
        assert stand.source.revoked == ["one"]
        assert (stand.sources[0].closed, stand.sources[1].closed) == (1, 0)
        assert (await stand.lease(name="other")).id == kept.id
        stand.sources.append(Source([stand.source.giving("three")]))
        again = await stand.lease(name="key")
        assert (again.secrets(), again.client_credentials) == (("three",), "deny")
        assert [lease.id for lease in stand.broker.replace(file(key=changed_now))] == [kept.id]
        await stand.unavailable("no such credential", name="other")

    run(test())


def test_another_file_ends_also_what_has_a_successor() -> None:
    """A stream under way may carry any lease that the definition ever gave."""

    async def test() -> None:
        stand = Stand()
        stand.answer(stand.source.giving("one"))
        first = await stand.lease()
        stand.pass_time(890)
        stand.answer(stand.source.giving("two", left=1800))
        second = await stand.lease()
        assert first.id != second.id
        (ended,) = stand.broker.replace(file(key=definition(range=True)))
        assert {first.series, second.series} == {ended.series}
        stand.sources.append(Source([stand.source.giving("three", left=1800)]))
        assert (await stand.lease()).series != ended.series

    run(test())


def test_what_is_being_minted_by_an_old_definition_is_not_lent() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        stand = Stand()

        async def slow() -> Minted:
            await gate.wait()
            return stand.source.giving("old")

        stand.answer(slow)
        stand.sources.append(Source([Minted(token("new"), NOW + 900)]))
        waiting = asyncio.ensure_future(stand.lease())
        await settle()
        assert stand.broker.replace(file(key=definition(range=True))) == []
        assert (await stand.lease()).secrets() == ("new",)
        gate.set()
        with pytest.raises(Unavailable, match="has changed"):
            await waiting
        await settle()
        assert stand.source.revoked == ["old"]
        assert stand.source.closed == 1, "closed when it had given back what it gave"
        assert (await stand.lease()).secrets() == ("new",)

    run(test())


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MOST", 2)

    async def test() -> None:
        stand = Stand()
        stand.answer(*(stand.source.giving(f"number {number}", 90_000.0) for number in range(9)))
        await stand.lease("sbx-1")
        stand.pass_time(IDLE / 2)
        await stand.lease("sbx-2")
        await stand.unavailable("2 leases are in use", "sbx-3")
        assert stand.source.revoked == ["number 2"]
        stand.pass_time(IDLE / 2)
        assert (await stand.lease("sbx-3")).secrets() == ("number 3",)
        await settle()
        assert stand.source.revoked == ["number 2", "number 0"]

    run(test())


def test_refreshes_of_what_was_minted_together_are_spread() -> None:
    from egressd.credentials.terms import refresh_at

    moments = {refresh_at(NOW + 3600, NOW) for _ in range(200)}
    assert len(moments) > 100
    assert all(NOW + 3600 * 0.69 < moment <= NOW + 3600 * 0.8 for moment in moments)
    assert all(NOW < refresh_at(NOW + life, NOW) < NOW + life for life in (13, 60, 100, 43_200))
    assert refresh_at(None, NOW) == float("inf")
