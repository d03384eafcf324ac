"""Policies as a worker gets them: read and compiled in small steps, so that whoever is carried meanwhile waits for none of it.

A policy of 100,000 hosts takes a third of a second of one core. In one piece that is a pause in everybody's traffic; in steps
it is one of some milliseconds, many times. No thread does it: one that reads holds the interpreter just as long.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections.abc import Generator
from typing import Final

from egressd.policy.compile import CompiledPolicy, compile_steps
from egressd.policy.effective import from_lines

SLICE: Final = 0.002
"""Seconds of steps between two looks at anybody else."""


async def stepwise[T](steps: Generator[None, None, T]) -> T:
    """Return what the steps return, the loop's other work done between them; raises what they raise."""
    began = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value
        if time.perf_counter() - began >= SLICE:
            await asyncio.sleep(0)
            began = time.perf_counter()


class Policies:
    """The policies that some sandbox lives under, each compiled once however many do; one is compiled at a time, in order."""

    def __init__(self) -> None:
        """None is known."""
        self._known: weakref.WeakValueDictionary[bytes, CompiledPolicy] = weakref.WeakValueDictionary()

    async def read(self, payload: bytes) -> CompiledPolicy:
        """Return the policy that `EffectivePolicy.lines` wrote, compiled; raises ValueError."""
        name = hashlib.sha256(payload).digest()
        known = self._known.get(name)
        if known is None:
            effective = await stepwise(from_lines(payload))
            known = self._known[name] = await stepwise(compile_steps(effective))
        return known
