"""Policies that a worker gets are read a little at a time, once for all who live under them, and exactly as they were sent."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.policies import Policies, stepwise
from egressd.policy.compile import STEP, compile_policy, compile_steps
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate, from_lines

POLICY = EffectivePolicy(
    profile="a",
    owner="team",
    mode="observe",
    observe_until=dt.date(2027, 3, 31),
    limits=EntryLimits(requests=Rate(amount=3, seconds=60)),
    entries=(
        EffectiveEntry(id="one", place="a.yaml:1", effect="deny", hosts=("a.example.com", "*.b.example.com")),
        EffectiveEntry(
            id="two", place="a.yaml:9", effect="allow", hosts=("c.example.com",), because="a\nb\r\u2028"
        ),
    ),
)


def drained[T](steps: Generator[None, None, T]) -> tuple[T, int]:
    """What the steps return, and how many there were."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value, count
        count += 1


@given(st.lists(st.text(max_size=20), max_size=4), st.sampled_from(["enforce", "observe"]))
def test_a_policy_arrives_as_it_left(texts: list[str], mode: str) -> None:
    entries = tuple(
        EffectiveEntry(id=f"r{n}", place=text or "p", effect="allow", because=text, hosts=("a.example.com",))
        for n, text in enumerate(texts)
        if text.isprintable() or text.isascii()
    )
    sent = EffectivePolicy.model_validate({"profile": "p", "mode": mode, "entries": entries})
    read, steps = drained(from_lines(sent.lines()))
    assert read == sent
    assert read.digest() == sent.digest()
    assert steps == len(entries)


def test_a_policys_digest_is_its_own_after_it_was_copied_with_a_change() -> None:
    before = POLICY.digest()
    other = POLICY.model_copy(update={"mode": "enforce", "observe_until": None})
    assert other.digest() != before
    assert (
        other.model_copy(update={"mode": "observe", "observe_until": POLICY.observe_until}).digest() == before
    )


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{}", id="no profile"),
        pytest.param(POLICY.model_dump_json().encode(), id="entries in the first line"),
        pytest.param(POLICY.lines() + b"\n", id="an empty line"),
        pytest.param(POLICY.lines().replace(b'"effect":"deny"', b'"effect":"maybe"'), id="no effect"),
    ],
)
def test_what_is_no_policy_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"validation error|lines of their own"):
        drained(from_lines(payload))


def test_no_step_files_more_than_so_many_hosts() -> None:
    hosts = tuple(f"h{n}.example.com" for n in range(4 * STEP + 1))
    policy = EffectivePolicy(
        profile="p", entries=(EffectiveEntry(id="r", place="p:1", effect="allow", hosts=hosts),)
    )
    compiled, steps = drained(compile_steps(policy))
    assert steps == 5
    assert compiled.exact.keys() == set(hosts)


def test_others_have_their_turn_between_the_steps() -> None:
    turns = 0

    async def scenario() -> int:
        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        def steps() -> Generator[None, None, int]:
            while turns < 3:  # ends only if somebody else goes on meanwhile
                yield
            return turns

        task = asyncio.create_task(other())
        try:
            async with asyncio.timeout(60):
                return await stepwise(steps())
        finally:
            task.cancel()

    assert asyncio.run(scenario()) >= 3


def test_a_policy_that_somebody_lives_under_is_compiled_once_and_forgotten_with_the_last() -> None:
    async def scenario() -> None:
        policies = Policies()
        one = await policies.read(POLICY.lines())
        assert await policies.read(POLICY.lines()) is one
        assert one.digest == compile_policy(POLICY).digest
        del one
        assert not policies._known

    asyncio.run(scenario())
