"""A worker's questions: each gets its own answer, and what is no answer is no lease."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine

import pytest
from pydantic import SecretStr, ValidationError

from egressd.credentials.lease import Lease, Token
from egressd.gate.borrowing import Borrowing
from egressd.gate.channel import ChannelBroken, sealed
from egressd.gate.leases import Asked
from egressd.gate.messages import TARGET_LIMIT, Ask, Lent
from egressd.policy.credential import Attach

CANARY = "canary-5c0ffee"


def asked(target: str = "/v1/x") -> Asked:
    return Asked("sbx-1", "key", "GET", "https", "api.example.com", 443, target)


def lease(number: int) -> Lease:
    material = Token(value=SecretStr(f"{CANARY}-{number}"))
    return Lease(
        id=f"lease-{number}", credential="key", sandbox="sbx-1", material=material, attach=Attach(bearer=True)
    )


def payload(number: int) -> int:
    return sealed(lease(number).model_dump_json().encode())


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_answers_find_their_questions_in_any_order() -> None:
    async def test() -> None:
        sent: list[Ask] = []
        borrowing = Borrowing()
        borrowing.attach(sent.append)
        waiting = [asyncio.ensure_future(borrowing.ask(asked(f"/v1/{number}"))) for number in range(3)]
        await asyncio.sleep(0)
        assert [question.target for question in sent] == ["/v1/0", "/v1/1", "/v1/2"]
        borrowing.lent(Lent(ticket=sent[2].ticket, ok=True), [payload(2)])
        borrowing.lent(Lent(ticket=sent[0].ticket, ok=False), [])
        borrowing.lent(Lent(ticket=sent[1].ticket, ok=True), [payload(1)])
        assert await asyncio.gather(*waiting) == [None, lease(1), lease(2)]

    run(test())


def test_an_answer_that_nobody_waits_for_is_dropped_with_its_descriptor() -> None:
    async def test() -> None:
        borrowing = Borrowing()
        sent: list[Ask] = []
        borrowing.attach(sent.append)
        waiting = asyncio.ensure_future(borrowing.ask(asked()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for ticket in (sent[0].ticket, 99):
            descriptor = payload(1)
            borrowing.lent(Lent(ticket=ticket, ok=True), [descriptor])
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)

    run(test())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"id": "canary-5c0ffee"}', id="half a lease"),
        pytest.param(b"\xff" + CANARY.encode(), id="no text"),
    ],
)
def test_a_payload_that_is_no_lease_ends_the_channel_without_being_shown(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^lent$") as broken:
        Borrowing().lent(Lent(ticket=1, ok=True), [sealed(content)])
    assert broken.value.__suppress_context__


@pytest.mark.parametrize(("ok", "count"), [(True, 0), (True, 2), (False, 1)])
def test_exactly_the_descriptors_that_were_spoken_of(ok: bool, count: int) -> None:
    descriptors = [payload(number) for number in range(count)]
    with pytest.raises(ValueError, match="lent"):
        Borrowing().lent(Lent(ticket=1, ok=ok), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)  # the channel's: it closes what a message that ends it has brought


def test_without_a_channel_or_with_a_request_too_long_there_is_no_lease() -> None:
    async def test() -> None:
        borrowing = Borrowing()
        assert await borrowing.ask(asked()) is None

        def broken(_question: Ask) -> None:
            raise ChannelBroken("closed")

        borrowing.attach(broken)
        with pytest.raises(ChannelBroken):
            await borrowing.ask(asked())
        with pytest.raises(ValidationError):
            await borrowing.ask(asked("/" + "x" * TARGET_LIMIT))
        assert not borrowing._open

    run(test())
