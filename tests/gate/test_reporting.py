"""Records over the channel: an allow waits for its batch, and a journal that fails denies."""

import asyncio
from typing import Any

import pytest

from egressd.gate.channel import MESSAGE_LIMIT, ChannelBroken
from egressd.gate.messages import Records
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.reporting import ChannelRecorder
from egressd.journal.record import Record


class FakeChannel:
    """Keeps what is sent; `broken` refuses it."""

    def __init__(self) -> None:
        self.sent: list[Records] = []
        self.broken = False
        self.pressed = 0

    def send(self, message: Any) -> None:
        if self.broken or len(message.model_dump_json()) > MESSAGE_LIMIT:
            raise ChannelBroken("closed")
        self.sent.append(message)

    def press(self) -> bool:
        self.pressed += 1
        return True


def record(number: int = 0, **more: Any) -> Record:
    return Record(event="decision", sandbox="s", attempt_id=f"a{number}", root_id="r", **more)


async def turn() -> None:
    """Let the loop run what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_commit_returns_when_its_batch_is_written_and_not_before() -> None:
    async def body() -> None:
        recorder, channel = ChannelRecorder(), FakeChannel()
        recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        waiting = asyncio.ensure_future(recorder.commit(record()))
        await turn()
        assert len(channel.sent) == 1
        assert not waiting.done()
        recorder.written(channel.sent[0].batch, ok=True)
        await waiting

    asyncio.run(body())


@pytest.mark.parametrize("failure", ["refused", "broken", "silent", "no channel"])
def test_every_way_the_journal_can_fail_is_audit_unavailable(failure: str) -> None:
    async def body() -> None:
        recorder, channel = ChannelRecorder(timeout=0.05), FakeChannel()
        channel.broken = failure == "broken"
        if failure != "no channel":
            recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        waiting = asyncio.ensure_future(recorder.commit(record()))
        await turn()
        if failure == "refused":
            recorder.written(channel.sent[0].batch, ok=False)
        with pytest.raises(AuditUnavailable):
            await waiting

    asyncio.run(body())


def test_what_one_turn_records_travels_together_within_the_limit() -> None:
    async def body() -> None:
        recorder, channel = ChannelRecorder(), FakeChannel()
        recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        for number in range(300):
            recorder.put(record(number, detail="\x1b" * 1000))
        await turn()
        ids = [fields["attempt_id"] for message in channel.sent for fields in message.records]
        assert ids == [f"a{number}" for number in range(300)]
        assert 1 < len(channel.sent) < 60

    asyncio.run(body())


def test_a_record_that_is_no_json_takes_no_other_with_it() -> None:
    async def body() -> None:
        recorder, channel = ChannelRecorder(timeout=0.05), FakeChannel()
        recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        recorder.put(record(1))
        unfit = asyncio.ensure_future(recorder.commit(record(2, status=b"200")))
        fit = asyncio.ensure_future(recorder.commit(record(3)))
        await turn()
        records = [fields for message in channel.sent for fields in message.records]
        assert [fields["event"] for fields in records] == ["decision", "lost", "decision"]
        assert [fields["attempt_id"] for fields in records[::2]] == ["a1", "a3"]
        assert records[1]["reason"] == "internal_error"
        for message in channel.sent:
            recorder.written(message.batch, ok=True)
        await fit
        with pytest.raises(AuditUnavailable):
            await unfit

    asyncio.run(body())


def test_a_turn_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        recorder, channel = ChannelRecorder(timeout=0.05), FakeChannel()
        recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "flush", lambda: 1 / 0)
            recorder.put(record(1))
            await turn()
        recorder.put(record(2))
        await turn()
        assert [fields["attempt_id"] for fields in channel.sent[0].records] == ["a1", "a2"]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("layer", "event", "at_once"),
    [
        ("request", "decision", 2),
        ("request", "end", 0),
        ("connection", "decision", 0),
        ("dns", "decision", 0),
    ],
)
def test_a_refused_request_is_recorded_before_it_is_answered(layer: Any, event: Any, at_once: int) -> None:
    """What was waiting goes with it, so that the order stays."""

    async def body() -> None:
        recorder, channel = ChannelRecorder(), FakeChannel()
        recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        recorder.put(Record(event="end", sandbox="s", attempt_id="a0", root_id="r", layer="request"))
        recorder.put(Record(event=event, sandbox="s", attempt_id="a1", root_id="r", layer=layer))
        assert sum(len(message.records) for message in channel.sent) == at_once
        await turn()
        assert [fields["attempt_id"] for message in channel.sent for fields in message.records] == [
            "a0",
            "a1",
        ]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("layer", "event", "pressed"),
    [
        ("request", "decision", 1),
        ("request", "end", 0),
        ("connection", "decision", 0),
        ("dns", "decision", 0),
    ],
)
def test_the_answer_of_a_refused_request_waits_until_the_kernel_has_its_record(
    layer: Any, event: Any, pressed: int
) -> None:
    async def body() -> None:
        recorder, channel = ChannelRecorder(), FakeChannel()
        recorder.attach(channel)  # type: ignore[arg-type]  # a fake
        recorder.put(Record(event=event, sandbox="s", attempt_id="a", root_id="r", layer=layer))
        assert (len(channel.sent), channel.pressed) == (pressed, pressed)

    asyncio.run(body())
