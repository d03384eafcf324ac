"""Records of nobody: none is lost, and none costs memory without bound."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Address

import pytest

from egressd.gate import strangers
from egressd.gate.strangers import Strangers, Stray
from egressd.journal.record import NOBODY, Record
from egressd.policy.reasons import Reason


class Book:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, record: Record) -> None:
        self.records.append(record)

    async def commit(self, record: Record) -> None:
        raise AssertionError


def stray(last: int = 1, reason: Reason = Reason.BAD_PROXY_TOKEN) -> Stray:
    return Stray("connection", "connect", reason, IPv4Address(f"10.0.0.{last}"))


def test_the_first_is_written_and_its_repeats_are_counted() -> None:
    async def body() -> list[Record]:
        book = Book()
        met = Strangers(book)
        for _ in range(5):
            met.note(stray(), status=403)
        met.note(stray(2))
        met.flush()
        met.note(stray())
        met.flush()
        return book.records

    told = asyncio.run(body())
    assert [(record.source, record.count) for record in told] == [
        ("10.0.0.1", None), ("10.0.0.2", None), ("10.0.0.1", 4), ("10.0.0.1", None),
    ]  # fmt: skip
    assert {record.sandbox for record in told} == {NOBODY}
    assert told[0].status == 403


def test_a_flood_of_sources_is_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "LIVE", 4)

    async def body() -> tuple[list[Record], int]:
        book = Book()
        met = Strangers(book)
        for last in range(200):
            met.note(stray(last))
        live = len(met._live)
        met.flush()
        return book.records, live

    told, live = asyncio.run(body())
    assert live == 5
    assert sum(record.count or 1 for record in told) == 200
    assert len(told) == 6


def test_counts_are_written_when_their_window_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "WINDOW", 0.01)

    async def body() -> list[Record]:
        book = Book()
        met = Strangers(book)
        met.note(stray())
        met.note(stray())
        async with asyncio.timeout(5):
            while len(book.records) < 2:  # noqa: ASYNC110 -- plain state, nothing sets an event
                await asyncio.sleep(0.005)
        return book.records

    assert [record.count for record in asyncio.run(body())] == [None, 1]


def test_a_recorder_that_fails_lets_nobody_in() -> None:
    class Broken(Book):
        def put(self, record: Record) -> None:
            raise OSError

    async def body() -> None:
        met = Strangers(Broken())
        met.note(stray())
        met.lose("dns-udp", 3)
        met.flush()

    asyncio.run(body())


def test_what_the_kernel_dropped_is_told() -> None:
    book = Book()
    Strangers(book).lose("dns-udp", 3)
    [record] = book.records
    assert (record.event, record.count, record.verdict) == ("lost", 3, None)
