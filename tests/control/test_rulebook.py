"""Rules that are read anew are the same whoever reads them: a thread, or for a large folder another process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from egressd.control.config import Config, load_config
from egressd.control.rulebook import Rulebook, Taken, read_rules, reread_rules
from egressd.control.surroundings import BadInput
from tests.control.household import write_rules

CREDENTIALS = """\
schema: 1
credentials:
  key:
    for: [{hosts: [api.example.com], requests: ["ANY /v1/**"]}]
    source: {file: /run/secrets/key}
    attach: {header: x-api-key}
"""
KEYED = """\
schema: 1
profile: keyed
owner: tests
allow:
  - hosts: [api.example.com]
    requests: ["GET /v1/**"]
    credential: key
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = write_rules(tmp_path / "rules", a="a.example.com", b="b.example.com")
    with (folder / "profiles" / "a.yaml").open("a") as profile:
        profile.write("canary: {labels: {ring: first}, profile: b}\n")
    (folder / "profiles" / "keyed.yaml").write_text(KEYED)
    (tmp_path / "credentials.yaml").write_text(CREDENTIALS)
    file = tmp_path / "egressd.yaml"
    file.write_text("schema: 1\nrules: rules\ncredentials: credentials.yaml\n")
    return load_config({}, os.environ, file=file)


def read(config: Config, monkeypatch: pytest.MonkeyPatch, *, large: int) -> Rulebook:
    monkeypatch.setattr("egressd.control.rulebook.LARGE", large)
    return asyncio.run(reread_rules(config, os.environ))


def test_another_process_reads_what_a_thread_reads(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = read_rules(config, os.environ)
    theirs = read(config, monkeypatch, large=0)
    assert isinstance(theirs, Taken)
    assert theirs.profiles == ours.profiles == ["a", "b", "keyed"]
    assert theirs.digest == ours.digest == theirs.source.digest
    assert theirs.source == ours.source
    assert theirs.credentials == ours.credentials
    assert theirs.canaries == ours.canaries != {}
    assert theirs.credentials is not None
    assert [theirs.effective(name) for name in theirs.profiles] == [
        ours.effective(name) for name in ours.profiles
    ]


def test_a_small_folder_needs_no_process(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.control.rulebook._READER", "raise SystemExit(3)")
    assert read(config, monkeypatch, large=1_000_000).profiles == ["a", "b", "keyed"]


@pytest.mark.parametrize("large", [0, 1_000_000], ids=["another process", "a thread"])
def test_mistakes_are_told_by_place(config: Config, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    (config.rules / "profiles" / "a.yaml").write_text("schema: 1\nprofile: a\nallows: []\n")
    with pytest.raises(BadInput, match=r"profiles/a\.yaml:3:1: unknown_key") as told:
        read(config, monkeypatch, large=large)
    assert not told.value.passing


@pytest.mark.parametrize("large", [0, 1_000_000], ids=["another process", "a thread"])
def test_what_cannot_be_read_may_be_readable_a_moment_later(
    config: Config, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    config.credentials.unlink()
    with pytest.raises(BadInput, match=r"unreadable") as told:
        read(config, monkeypatch, large=large)
    assert told.value.passing


def test_a_process_that_fails_changes_nothing_and_is_tried_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egressd.control.rulebook._READER", "raise SystemExit(3)")
    with pytest.raises(BadInput, match="ended with 3") as told:
        read(config, monkeypatch, large=0)
    assert told.value.passing
