"""Sandboxes with certain labels live under another profile."""

from __future__ import annotations

import pytest

from egressd.policy.model import Canary
from egressd.rulefiles.canary import lives_under

CANARIES = {"agent": Canary(labels={"ring": "first", "team": "a"}, profile="agent-next")}


@pytest.mark.parametrize(
    ("profile", "labels", "expected"),
    [
        pytest.param(
            "agent", {"ring": "first", "team": "a", "task": "7"}, "agent-next", id="every label fits"
        ),
        pytest.param("agent", {"ring": "first"}, "agent", id="one is missing"),
        pytest.param("agent", {"ring": "first", "team": "b"}, "agent", id="one has another value"),
        pytest.param("agent", {}, "agent", id="without labels"),
        pytest.param("other", {"ring": "first", "team": "a"}, "other", id="a profile without a canary"),
    ],
)
def test_who_lives_under_the_canary(profile: str, labels: dict[str, str], expected: str) -> None:
    assert lives_under(CANARIES, profile, labels) == expected
