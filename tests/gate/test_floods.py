"""Refusals over a limit, folded: as many as there were, in few records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from egressd.gate import floods
from egressd.gate.floods import Folding
from egressd.journal.record import Record, new_id
from egressd.policy.reasons import Reason


class Recorder:
    """Keeps records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, record: Record) -> None:
        self.records.append(record)

    async def commit(self, record: Record) -> None:
        self.records.append(record)

    def counted(self) -> int:
        return sum(record.count or 1 for record in self.records if record.event == "decision")


def decision(reason: Reason = Reason.RATE_LIMITED, **changes: object) -> Record:
    fields: dict[str, object] = {
        "layer": "request",
        "verdict": "deny",
        "rule": "api",
        "host": "a.example.com",
    }
    attempt = new_id()
    return Record(
        event="decision",
        sandbox="sbx-1",
        attempt_id=attempt,
        root_id=attempt,
        reason=reason.value,
        **(fields | changes),  # type: ignore[arg-type]  # what a test names fits
    )


def end_of(record: Record) -> Record:
    return Record(
        event="end", sandbox="sbx-1", attempt_id=record.attempt_id, root_id=record.root_id, layer="request"
    )


def played(body: Callable[[Folding, Recorder], Awaitable[None]], window: float = 60.0) -> Recorder:
    recorder = Recorder()

    async def run() -> None:
        folding = Folding(recorder)
        await body(folding, recorder)
        folding.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floods, "WINDOW", window)
        asyncio.run(run())
    return recorder


def test_a_flood_is_one_record_and_one_count() -> None:
    async def body(folding: Folding, recorder: Recorder) -> None:
        for n in range(100):
            folding.put(decision(host=f"{n}.example.com", path=f"/{n}", method="GET"))

    first, rest = played(body).records
    assert (first.host, first.path, first.count) == ("0.example.com", "/0", None)
    assert (rest.count, rest.root_id, rest.rule, rest.reason) == (99, first.attempt_id, "api", "rate_limited")
    assert (rest.host, rest.path, rest.method) == (None, None, None), "they are not all the first's"
    assert rest.attempt_id != first.attempt_id


def test_every_kind_has_a_record_of_its_own() -> None:
    kinds = [
        decision(),
        decision(rule="other"),
        decision(Reason.TOO_MANY_CONNECTIONS),
        decision(layer="connection"),
        decision(detail="requests of the profile"),
    ]

    async def body(folding: Folding, recorder: Recorder) -> None:
        for record in (*kinds, *kinds):
            folding.put(record)
        assert recorder.records == kinds

    recorder = played(body)
    assert len(recorder.records) == 10
    assert recorder.counted() == 10


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(decision(Reason.NOT_ALLOWED), id="another reason"),
        pytest.param(decision(verdict="allow"), id="an allow"),
        pytest.param(decision(layer="dns"), id="a query, which DNS folds itself"),
        pytest.param(end_of(decision()), id="an end"),
    ],
)
def test_what_is_not_a_refusal_over_a_limit_is_handed_on(record: Record) -> None:
    async def body(folding: Folding, recorder: Recorder) -> None:
        for _ in range(3):
            folding.put(record)
        await folding.commit(record)

    assert played(body).records == [record] * 4


def test_an_attempt_that_was_only_counted_has_no_end() -> None:
    first, second = decision(), decision()

    async def body(folding: Folding, recorder: Recorder) -> None:
        for record in (first, second, end_of(second), end_of(first)):
            folding.put(record)

    recorder = played(body)
    assert [record.attempt_id for record in recorder.records if record.event == "end"] == [first.attempt_id]
    assert recorder.counted() == 2


def test_a_window_ends_by_itself_and_the_next_begins_with_a_record() -> None:
    async def body(folding: Folding, recorder: Recorder) -> None:
        async with asyncio.timeout(5):
            folding.put(decision())
            folding.put(decision())
            while len(recorder.records) < 2 or folding._fold:  # noqa: ASYNC110 -- a record knows no event
                await asyncio.sleep(0.005)
            folding.put(decision())
            assert [record.count for record in recorder.records] == [None, 1, None]

    played(body, window=0.02)


def test_after_the_end_nothing_is_held_back() -> None:
    async def body(folding: Folding, recorder: Recorder) -> None:
        folding.put(decision())
        folding.put(decision())
        folding.close()
        folding.put(decision())
        assert [record.count for record in recorder.records] == [None, 1, None]

    played(body)
