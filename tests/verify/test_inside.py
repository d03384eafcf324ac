"""The runner: whatever a probe does, it is an outcome."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from egressd.verify import inside
from egressd.verify.kernel import ChildDied, in_child
from egressd.verify.probe import PROBES, Outcome, Probe, held
from egressd.verify.scene import Scene

SCENE = Scene({})
Attempt = Callable[[Scene], Outcome]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Attempt], Outcome]:
    def make(attempt: Attempt) -> Outcome:
        monkeypatch.setitem(PROBES, "x", Probe("x", "works", "", "", "", attempt))
        return inside.made("x", SCENE, 0.5)

    return make


def test_an_outcome_is_told(probed: Callable[[Attempt], Outcome]) -> None:
    assert probed(lambda _: held("all")) == Outcome("held", "all")


def test_an_exception_is_no_success(probed: Callable[[Attempt], Outcome]) -> None:
    def broken(_: Scene) -> Outcome:
        raise RuntimeError("no\x1b")

    assert probed(broken) == Outcome("not tried", "broke off: RuntimeError: no?")


def test_a_death_is_no_success(probed: Callable[[Attempt], Outcome]) -> None:
    def dies(_: Scene) -> Outcome:
        os.kill(os.getpid(), signal.SIGKILL)
        return held("never")

    assert probed(dies).detail.startswith("broke off: the probe ended without a word")


def test_what_takes_too_long_is_ended(probed: Callable[[Attempt], Outcome]) -> None:
    def waits(_: Scene) -> Outcome:
        time.sleep(60)
        return held("never")

    began = time.monotonic()
    assert probed(waits) == Outcome("not tried", "broke off: not done after 0.5 s")
    assert time.monotonic() - began < 5


def test_a_verdict_that_there_is_not_is_none(probed: Callable[[Attempt], Outcome]) -> None:
    assert probed(lambda _: Outcome("splendid", "x")).verdict == "not tried"


def test_nothing_of_a_probe_stays_with_the_next(probed: Callable[[Attempt], Outcome]) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def leaves(_: Scene) -> Outcome:
        os.chdir("/proc")
        os.environ["LEFT"] = "behind"
        os.open("/", os.O_RDONLY)
        return held("")

    here = os.getcwd()
    probed(leaves)
    assert os.getcwd() == here
    assert "LEFT" not in os.environ
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_says_what_it_found_or_how_it_ended() -> None:
    assert in_child(lambda: "found") == "found"
    assert in_child(lambda: None) is None
    with pytest.raises(ChildDied, match="ended by signal 9"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
