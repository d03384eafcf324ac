"""What holds for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes an example slow, not wrong. In CI the same examples every time: a new failure there is a
# new fault, and chance is left to the runs of people who can look into it.
settings.register_profile(
    "egressd",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("egressd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, what needs root where there is none."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
