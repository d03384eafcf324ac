"""A worker's questions for approvals: each gets its own answer, few are asked, and what is no answer is no approval."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from egressd.gate import asking as module
from egressd.gate.asking import MET, MOST_OPEN, PLEAS, Asking, hint_of
from egressd.gate.channel import ChannelBroken
from egressd.gate.messages import Petition, Petitioned, Plea, Redeem, Redeemed
from egressd.policy.attempt import ConnectionAttempt, RequestAttempt

BOX = "sbx-1"
REFUND = RequestAttempt(("pay", "test"), 443, "https", "POST", "/v1/refunds?order=9")

type Reply = Callable[[Any], None]


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


class Control:
    """Answers each question by `reply`, or not at all."""

    def __init__(self, asking: Asking, reply: Callable[[Any], Any] | None = None) -> None:
        self.heard: list[Any] = []
        self._asking, self._reply = asking, reply
        asking.attach(self.hear)

    def hear(self, message: Petition | Plea | Redeem) -> None:
        self.heard.append(message)
        answer = self._reply(message) if self._reply is not None else None
        if answer is not None:
            asyncio.get_running_loop().call_soon(self._asking.heard, answer)


def waiting(message: Any) -> Petitioned:
    return Petitioned(ticket=message.ticket, state="waiting", approval=f"apr-{message.ticket}")


def test_a_petition_names_the_request_without_its_query() -> None:
    async def test() -> None:
        asking = Asking()
        control = Control(asking, waiting)
        answer = await asking.petition(BOX, REFUND, opaque=False)
        assert answer is not None
        assert answer.approval == "apr-1"
        [asked] = control.heard
        assert (asked.method, asked.scheme, asked.host, asked.port, asked.path) == (
            "POST",
            "https",
            "pay.test",
            443,
            "/v1/refunds",
        )
        upgrade = RequestAttempt(("pay", "test"), 443, "https", "GET", "/live", upgrade="websocket")
        await asking.petition(BOX, upgrade, opaque=False)
        await asking.petition(BOX, REFUND, opaque=True)
        assert [(each.method, each.path, each.opaque) for each in control.heard[1:]] == [
            ("WEBSOCKET", "/live", False),
            ("", "", True),
        ]

    run(test())


@pytest.mark.parametrize("how", ["nobody", "gone", "broken", "another"])
def test_whatever_goes_wrong_is_no_approval(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)

    def reply(message: Any) -> Any:
        if how == "gone":
            raise ChannelBroken("closed")
        if how == "broken":
            raise RuntimeError("secret words")
        return Redeemed(ticket=message.ticket + 1, ok=True)

    async def test() -> None:
        asking = Asking()
        if how != "nobody":
            Control(asking, reply)
        assert await asking.petition(BOX, REFUND, opaque=False) is None
        assert await asking.redeem(BOX, "gnt-1", "a1") is False
        asking.mention(BOX, ConnectionAttempt(("db", "test"), 5432, "tcp")) if how != "broken" else None

    run(test())
    assert "secret words" not in capsys.readouterr().err


def test_an_answer_of_the_wrong_kind_is_none() -> None:
    async def test() -> None:
        asking = Asking()
        Control(asking, waiting)
        assert await asking.redeem(BOX, "gnt-1", "a1") is False

    run(test())


def test_what_does_not_fit_a_message_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        asking = Asking()
        control = Control(asking, waiting)
        long = RequestAttempt(("pay", "test"), 443, "https", "POST", "/" * 20_000)
        assert await asking.petition(BOX, long, opaque=False) is None
        assert control.heard == []

    run(test())
    assert "ValidationError" in capsys.readouterr().err


def test_one_sandbox_asks_only_so_often_and_no_other_notices() -> None:
    async def test() -> None:
        asking = Asking(clock=lambda: 0.0)
        control = Control(asking, waiting)
        for _ in range(int(MET[0]) + 5):
            await asking.petition(BOX, REFUND, opaque=False)
        assert len(control.heard) == MET[0]
        assert await asking.petition("sbx-2", REFUND, opaque=False) is not None
        assert [asking.wait_to_plead(BOX) == 0.0 for _ in range(int(PLEAS[0]) + 1)] == [True] * PLEAS[0] + [
            False
        ]
        asking.forget(BOX)
        assert await asking.petition(BOX, REFUND, opaque=False) is not None

    run(test())


def test_only_so_many_questions_of_a_sandbox_are_open() -> None:
    async def test() -> None:
        asking = Asking()
        control = Control(asking)
        tasks = [asyncio.ensure_future(asking.redeem(BOX, "gnt-1", str(n))) for n in range(MOST_OPEN + 3)]
        await asyncio.sleep(0)
        assert len(control.heard) == MOST_OPEN
        for message in control.heard:
            asking.heard(Redeemed(ticket=message.ticket, ok=True))
        assert (await asyncio.gather(*tasks)).count(True) == MOST_OPEN

    run(test())


def test_who_is_held_goes_on_when_it_is_settled_or_time_is_up() -> None:
    async def test() -> None:
        asking, state = Asking(), {"settled": False}
        held = asyncio.ensure_future(asking.hold(BOX, lambda: state["settled"], 30))
        await asyncio.sleep(0)
        asking.moved(BOX)
        await asyncio.sleep(0)
        assert not held.done()
        state["settled"] = True
        asking.moved("sbx-2")
        asking.moved(BOX)
        await held
        await asking.hold(BOX, lambda: False, 0.01)

    run(test())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "could not be put to a person now"),
        (Petitioned(ticket=1, state="waiting", approval="apr-1"), "apr-1"),
        (Petitioned(ticket=1, state="approved"), "send the same request again"),
        (Petitioned(ticket=1, state="denied"), "Do not ask again"),
        (Petitioned(ticket=1, state="refused", detail="too many wait"), "too many wait"),
    ],
    ids=["nobody", "waiting", "approved", "denied", "refused"],
)  # fmt: skip
def test_whoever_is_refused_is_told_what_to_do(answer: Petitioned | None, said: str) -> None:
    assert said in hint_of(answer)
    assert hint_of(answer).isascii()
