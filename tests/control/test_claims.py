"""A worker that claims a source: control keeps it once, for its own sandbox, and believes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from egressd.control.desk import Desk
from egressd.control.hearing import Hearing
from egressd.control.recording import Recording
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import Sources
from egressd.gate.messages import Claim, Claimed
from egressd.journal.writer import Journal
from egressd.policy.effective import EffectivePolicy

POLICY = EffectivePolicy(profile="p", entries=())


class Scene:
    """A post with two sandboxes, and what its worker is told."""

    def __init__(self, path: Path, sources: Sources | None = None) -> None:
        self.journal = path / "journal.jsonl"
        self.told: list[Claimed] = []
        worker: Any = SimpleNamespace(channel=SimpleNamespace(send=self.told.append))
        self.states = {name: SandboxState(name, POLICY, ()) for name in ("sbx-a", "sbx-b")}
        post: Any = SimpleNamespace(sandboxes=self.states, worker=worker, workers=(worker,))
        recording = Recording(Journal(self.journal))
        self._hearing = Hearing(post, recording, Desk(None), sources or Sources(), self._never)
        self._worker = worker

    def _never(self, _work: Any) -> None:
        raise AssertionError("a claim is answered at once")

    def claim(self, sandbox: str, source: str) -> bool:
        message = Claim(claim=len(self.told) + 1, sandbox=sandbox, source=source)
        self._hearing.hear(self._worker, message, [])
        assert self.told[-1].claim == message.claim
        return self.told[-1].ok

    def bound(self) -> list[tuple[str, str]]:
        if not self.journal.exists():
            return []
        records = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [(record["sandbox"], record["source"]) for record in records]


def test_a_first_source_is_kept_and_written_down_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.claim("sbx-a", "172.30.0.3")
    assert scene.claim("sbx-a", "172.30.0.3")
    assert scene.states["sbx-a"].source == "172.30.0.3"
    assert scene.bound() == [("sbx-a", "172.30.0.3")]


def test_nothing_else_is(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.claim("sbx-a", "172.30.0.3")
    assert not scene.claim("sbx-a", "172.30.0.4")  # it has one
    assert not scene.claim("sbx-b", "172.30.0.3")  # another has it
    assert not scene.claim("sbx-of-another-worker", "172.30.0.9")
    assert scene.states["sbx-b"].source is None
    assert scene.bound() == [("sbx-a", "172.30.0.3")]
    with pytest.raises(ValueError, match="another spelling"):
        scene.claim("sbx-b", "::ffff:172.30.0.9")


def test_a_source_is_one_sandbox_s_over_all_workers(tmp_path: Path) -> None:
    sources = Sources()
    (tmp_path / "two").mkdir()
    one, two = Scene(tmp_path, sources), Scene(tmp_path / "two", sources)
    assert one.claim("sbx-a", "172.30.0.3")
    assert not two.claim("sbx-b", "172.30.0.3")
