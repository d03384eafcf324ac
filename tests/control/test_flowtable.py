"""A full table of connections is told by the kernel's own count, once for what was dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from egressd.control.flowtable import STATISTICS, FlowTable, dropped
from tests.control.fleet import fleet, until

NAMES = "entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop icmp_error"


def table(*drops: int) -> str:
    row = "00000010  00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 {:08x} 00000000 00000000"
    return "\n".join((NAMES, *(row.format(drop) for drop in drops))) + "\n"


def test_every_processor_counts() -> None:
    assert dropped(table(1, 0, 255)) == 256


@pytest.mark.parametrize(
    "text", ["", "\n", "entries found\n1 2\n", f"{NAMES}\nrubbish\n", f"{NAMES}\n{'zz ' * 13}\n"]
)
def test_what_is_no_such_table_counts_nothing(text: str) -> None:
    assert dropped(text) == 0


def test_what_was_dropped_is_recorded_once_and_what_was_before_is_nobody_s() -> None:
    said = [table(7), table(7), table(9, 1), table(9, 1), table(2), table(3)]
    flows = FlowTable(lambda: said.pop(0))
    looks = [flows.look() for _ in range(5)]
    assert [record.count if record is not None else None for record in looks] == [None, 3, None, None, 1]
    [first, _] = [record for record in looks if record is not None]
    assert (first.event, first.reason, first.layer, first.sandbox) == (
        "lost",
        "conntrack_full",
        "packet",
        "unknown",
    )


def test_a_host_without_conntrack_has_no_full_table() -> None:
    def read() -> str:
        raise FileNotFoundError

    assert FlowTable(read).look() is None


def test_this_kernels_own_table_can_be_read() -> None:
    if not STATISTICS.exists():
        pytest.skip("no conntrack in this kernel")
    assert "drop" in STATISTICS.read_text().split("\n")[0].split()
    assert dropped(STATISTICS.read_text()) >= 0


def test_it_is_written_down_while_workers_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("egressd.control.supervisor._RENEW_LOOK", 0.05)
    statistics = tmp_path / "nf_conntrack"
    statistics.write_text(table(0))
    monkeypatch.setattr("egressd.control.flowtable.STATISTICS", statistics)

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            await made.box()
            statistics.write_text(table(40, 2))
            await until(lambda: made.records(event="lost", reason="conntrack_full"), "the record")
            assert [record["count"] for record in made.records(reason="conntrack_full")] == [42]

    asyncio.run(scenario())
    assert "42 packets were dropped" in capsys.readouterr().err
