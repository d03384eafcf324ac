"""The journal as control keeps it: signed, tended, its sinks fed, its alerts raised."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from egressd.control.config import Config, ConfigError, load_config
from egressd.control.journaling import Keeper
from egressd.control.recording import Recording
from egressd.journal.record import Record
from egressd.journal.verification import Verification

DEADLINE = 30


def configured(folder: Path, more: str = "") -> Config:
    file = folder / "egressd.yaml"
    file.write_text(f"schema: 1\njournal: journal.jsonl\nstate_dir: state\n{more}", encoding="utf-8")
    return load_config({}, {}, file=file)


def tried(host: str) -> dict[str, object]:
    record = Record(event="decision", sandbox="box", attempt_id="a", root_id="a", layer="request", host=host)
    record.verdict, record.reason = "deny", "floor_metadata"
    return record.as_dict()


def test_a_sink_gets_what_the_journal_has_alerts_and_the_last_head_too(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.settimeout(DEADLINE)
        daemon.bind(str(tmp_path / "log"))
        config = configured(tmp_path, f"sinks: {{syslog: {{address: 'unix:{tmp_path}/log'}}}}\n")

        async def story() -> None:
            keeper = Keeper(config, has_stdout=False)
            recording = Recording(keeper.journal)
            assert recording.append([tried("metadata.internal")] * 2, {"box"}, "w1")
            await keeper.close()

        asyncio.run(story())
        events = [json.loads(daemon.recv(65_536).partition(b" - {")[2].join([b"{", b""])) for _ in range(4)]
    assert [event["event"] for event in events] == ["decision", "decision", "alert", "head"]
    assert (events[2]["alert"], events[2]["host"], events[2]["root_id"]) == (
        "metadata",
        "metadata.internal",
        "a",
    )
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == events
    walk = Verification({})
    for line in lines:
        walk.feed(line, "-")
    assert walk.end().is_sound


def test_the_journal_is_signed_after_a_while_without_a_further_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egressd.control.journaling._LOOK", 0.01)
    config = configured(tmp_path)

    async def story() -> None:
        keeper = Keeper(config, has_stdout=False)
        keeper.journal._terms = type(keeper.journal._terms)(sign_seconds=0.0, fsync="interval")
        keeper.journal.append([tried("a")])
        signed = asyncio.Event()
        keeper.journal.hear(lambda _lines: signed.set())
        async with asyncio.timeout(DEADLINE):
            await signed.wait()
        await keeper.close()

    asyncio.run(story())
    assert json.loads((tmp_path / "journal.jsonl").read_bytes().splitlines()[1])["event"] == "head"


def test_a_state_directory_that_cannot_be_used_costs_the_signature_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("no directory")
    config = configured(tmp_path)

    async def story() -> None:
        keeper = Keeper(config, has_stdout=False)
        keeper.journal.append([tried("a")])
        await keeper.close()

    asyncio.run(story())
    assert "the journal is not signed: " in capsys.readouterr().err
    assert len((tmp_path / "journal.jsonl").read_bytes().splitlines()) == 1


def test_standard_output_is_the_command_s_where_a_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, "sinks: {stdout: ocsf}\n")

    async def story() -> None:
        await Keeper(config, has_stdout=False).close()

    asyncio.run(story())
    assert "standard output is the command's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("sinks: {syslog: {address: 'http://a'}}\n", "sinks.syslog.address"),
        ("sinks: {stdout: maybe}\n", "one of: off, record, ocsf"),
        ("record: {on_full: drop}\n", "one of: deny, drop-and-count"),
        ("record: {max_size: -1}\n", "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(tmp_path, more)


def test_a_journal_on_standard_output_has_no_second_one_beside_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the journal itself"):
        load_config({"journal": "-"}, {"EGRESSD_SINKS_STDOUT": "record"}, file=configured(tmp_path).file)


def test_the_rotated_files_are_hidden_from_sandboxes_like_the_journal(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert tmp_path / "journal.jsonl.d" in config.private_paths()
    assert os.fspath(config.state_dir) == str(tmp_path / "state")
