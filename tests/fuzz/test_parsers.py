"""Every parser under a fixed handful of hostile inputs, and under every input that fuzzing has ever found a fault with."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import CodeType

import pytest

from tests.fuzz.catalogue import TARGETS
from tests.fuzz.mutation import Mutator
from tests.fuzz.target import Target

FOUND = Path(__file__).parent / "found"
STEPS_A_BYTE = 60
STEPS_TO_BEGIN = 3000
"""Lines of egressd that a parser may run for an input: so many for each byte, and so many whatever it is."""


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_law_holds_for_inputs_of_chance(target: Target) -> None:
    mutator = Mutator(random.Random(4), target.words, target.most)
    for data in (b"", *target.seeds):
        target.check(data)
    for _ in range(target.quick):
        data = mutator.mutate(target.seeds)
        try:
            target.check(data)
        except Exception as error:
            raise AssertionError(f"python -m tests.fuzz {target.name}: {data!r}") from error


@pytest.mark.parametrize(
    "path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name[:20]}"
)
def test_what_fuzzing_found_stays_mended(path: Path) -> None:
    TARGETS[path.parent.name].check(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_work_is_bounded_by_the_length_of_the_input(target: Target) -> None:
    chance = random.Random(5)
    for _ in range(20):
        part = chance.choice((*target.seeds, *target.words)) or b"\0"
        begin = chance.choice(target.seeds)
        data = begin + part * (16 * 1024 // len(part))
        allowed = STEPS_A_BYTE * len(data) + STEPS_TO_BEGIN * 10
        assert _steps(target, data) <= allowed, (begin, part)
    for seed in target.seeds:
        assert _steps(target, seed) <= STEPS_A_BYTE * len(seed) + STEPS_TO_BEGIN * 10


def _steps(target: Target, data: bytes) -> int:
    """Count the lines of egressd that parsing runs: what a clock would say of them depends on who else is at work."""
    monitoring, tool, count = sys.monitoring, sys.monitoring.PROFILER_ID, 0
    ours = f"{Path(__file__).parents[2] / 'egressd'}/"

    def line(code: CodeType, _number: int) -> object:
        nonlocal count
        if not code.co_filename.startswith(ours):
            return monitoring.DISABLE
        count += 1
        return None

    target.parse(data)  # what is imported or compiled once is not counted
    monitoring.use_tool_id(tool, "egressd-steps")
    try:
        monitoring.register_callback(tool, monitoring.events.LINE, line)
        monitoring.set_events(tool, monitoring.events.LINE)
        target.parse(data)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count
