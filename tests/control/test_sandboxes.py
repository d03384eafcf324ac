"""What control keeps of a sandbox for the next worker."""

from __future__ import annotations

import json

import pytest

from egressd.control.sandboxes import SandboxState
from egressd.gate.limits import Level
from egressd.gate.payloads import read_levels
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate


def policy(**limits: Rate) -> EffectivePolicy:
    entry = EffectiveEntry(
        id="api",
        place="p:1",
        effect="allow",
        hosts=("a.example.com",),
        limits=EntryLimits.model_validate(limits),
    )
    return EffectivePolicy(profile="p", entries=(entry,))


def rate(amount: int) -> Rate:
    return Rate(amount=amount, seconds=60)


def levels(state: SandboxState, now: float) -> list[list[object]]:
    found: list[list[object]] = json.loads(state.levels_payload(now))
    return found


def test_levels_are_handed_on_with_their_age() -> None:
    state = SandboxState("sbx-1", policy(requests=rate(9), upload=rate(9)), [])
    state.keep_level("api", "requests", 5.0, 100.0)
    state.keep_level("api", "upload", -3.5, 101.0)
    state.keep_level("", "dns", 7.0, 99.0)
    assert levels(state, 104.0) == [
        ["api", "requests", 5.0, 4.0],
        ["api", "upload", -3.5, 3.0],
        ["", "dns", 7.0, 5.0],
    ]


def test_a_worker_reads_what_control_wrote() -> None:
    state = SandboxState("sbx-1", policy(requests=rate(9)), [])
    state.keep_level("api", "requests", -0.5, 100.0)
    assert read_levels(state.levels_payload(101.5)) == [Level("api", "requests", -0.5, 1.5)]
    assert read_levels(SandboxState("sbx-2", policy(), []).levels_payload(0.0)) == []


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b'[["api","bytes",1,1]]', b'[["api","requests",1]]', b'[["api","dns","x",1]]']
)
def test_what_are_no_levels_is_no_beginning(payload: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read_levels(payload)


def test_the_newest_level_counts() -> None:
    state = SandboxState("sbx-1", policy(requests=rate(9)), [])
    state.keep_level("api", "requests", 5.0, 100.0)
    state.keep_level("api", "requests", 4.0, 101.0)
    assert levels(state, 101.0) == [["api", "requests", 4.0, 0.0]]
    assert levels(state, 50.0) == [["api", "requests", 4.0, 0.0]], "no clock makes it younger than new"


def test_a_worker_cannot_have_more_kept_than_the_policy_limits() -> None:
    state = SandboxState("sbx-1", policy(requests=rate(9)), [])
    for n in range(1000):
        state.keep_level(f"made-up-{n}", "requests", 1.0, 0.0)
        state.keep_level("api", "download", 1.0, 0.0)
    assert state.levels == {}


def test_a_reload_forgets_what_is_no_longer_limited() -> None:
    state = SandboxState("sbx-1", policy(requests=rate(9), upload=rate(9)), [])
    state.keep_level("api", "requests", 5.0, 0.0)
    state.keep_level("api", "upload", 5.0, 0.0)
    state.policy = policy(upload=rate(3))
    state.keep_level("api", "upload", 2.0, 0.0)
    assert state.levels == {("api", "upload"): (2.0, 0.0)}


def test_levels_of_single_destinations_are_kept_beside_the_others_and_there_are_only_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("egressd.control.sandboxes.HOST_LEVELS", 2)
    state = SandboxState("sbx-1", policy(upload_per_host=rate(60), requests=rate(9)), [])
    state.keep_level("api", "upload_per_host", 50.0, 100.0, "a.example.com")
    state.keep_level("api", "upload_per_host", 0.0, 100.0, "b.example.com")
    state.keep_level("api", "requests", 4.0, 100.0)
    state.keep_level("api", "requests", 4.0, 100.0, "a.example.com")  # of which there is none
    state.keep_level("api", "upload_per_host", 4.0, 100.0)  # nor of this
    assert levels(state, 101.0) == [
        ["api", "requests", 4.0, 1.0],
        ["api", "upload_per_host", 50.0, 1.0, "a.example.com"],
        ["api", "upload_per_host", 0.0, 1.0, "b.example.com"],
    ]
    assert read_levels(state.levels_payload(101.0))[1] == Level(
        "api", "upload_per_host", 50.0, 1.0, "a.example.com"
    )
    state.keep_level("api", "upload_per_host", 1.0, 101.0, "c.example.com")  # one too many
    assert len(state.host_levels) == 2
    state.keep_level("api", "upload_per_host", 1.0, 110.0, "c.example.com")  # by now the first is full again
    assert sorted(host for _, host in state.host_levels) == ["b.example.com", "c.example.com"]
    state.policy = policy(requests=rate(9))
    state.keep_level("api", "requests", 3.0, 111.0)
    assert state.host_levels == {}


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("good.example.com", "10.0.0.1"),
        ("good.example.com", "198.18.0.3"),
        ("good.example.com", "198.18.65.0"),
        ("good.example.com", "x"),
        ("..", "198.18.1.0"),
        ("", "198.18.1.0"),
        ("UPPER.example.com ", "198.18.1.0"),
    ],
)
def test_a_pair_that_a_next_worker_could_not_read_is_not_kept(name: str, address: str) -> None:
    state = SandboxState("sbx-1", policy(), [])
    with pytest.raises(ValueError, match=r"pair|Expected|permitted"):
        state.keep_pair(name, address)
    assert state.pairs == {}
