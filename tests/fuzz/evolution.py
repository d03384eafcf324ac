"""Fuzzing where atheris is not: mutate what has reached new lines of egressd, keep what reaches more.

Lines are counted by sys.monitoring (PEP 669), which tells of each line once and then costs nothing.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from tests.fuzz.mutation import Mutator
from tests.fuzz.target import Target

HANG = 10
"""Seconds of CPU in which one input must be done with."""

_TOOL = sys.monitoring.COVERAGE_ID


class Hang(BaseException):
    """An input took longer than HANG seconds."""


class Lines:
    """The lines of egressd that were reached since it was entered."""

    def __init__(self) -> None:
        self.count = 0
        self._ours = f"{Path(__file__).parents[2] / 'egressd'}/"

    def __enter__(self) -> Lines:
        sys.monitoring.use_tool_id(_TOOL, "egressd-fuzz")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._reached)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)
        sys.monitoring.restart_events()
        return self

    def __exit__(self, *_: object) -> None:
        sys.monitoring.set_events(_TOOL, 0)
        sys.monitoring.free_tool_id(_TOOL)

    def _reached(self, code: CodeType, _line: int) -> object:
        self.count += code.co_filename.startswith(self._ours)
        return sys.monitoring.DISABLE


def evolve(
    target: Target, seconds: float, corpus: list[bytes], progress: Callable[[int, int, int], None]
) -> tuple[int, bytes | None, BaseException | None]:
    """Fuzz for so long; returns how many inputs were tried, and the one that broke a law with what it raised.

    `progress` is called each half minute with inputs, lines and kept inputs. New inputs are added to `corpus`.
    """
    mutator = Mutator(random.Random(), target.words, target.most)
    began = told = time.monotonic()
    tried, waiting = 0, list(corpus)
    previous = signal.signal(signal.SIGVTALRM, _hang)
    try:
        with Lines() as lines:
            while (now := time.monotonic()) - began < seconds or waiting:
                data, known = waiting.pop() if waiting else mutator.mutate(corpus), lines.count
                tried += 1
                signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
                try:
                    target.check(data)
                except (Exception, Hang) as error:  # noqa: BLE001 whatever it is, it is a finding
                    return tried, data, error
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                if lines.count > known and data not in corpus:
                    corpus.append(data)
                if now - told >= 30:
                    told = now
                    progress(tried, lines.count, len(corpus))
            progress(tried, lines.count, len(corpus))
    finally:
        signal.signal(signal.SIGVTALRM, previous)
    return tried, None, None


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise Hang(f"more than {HANG} seconds of CPU")
