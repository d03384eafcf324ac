"""Rules of an arena changed while its sandboxes live by them."""

from __future__ import annotations

from typing import Any

from egressd.lab.stand import Stand
from tests.bypass.arena import Arena
from tests.e2e.conftest import until

Policies = list[dict[str, Any]]
ASK = "say(shown(tls({0!r}, 443, get('/n', {0!r}), {0!r})))"
"""Code that asks a host for something."""


def policies(stand: Stand, mark: int, seconds: float = 60.0) -> Policies:
    """What A and B's control made of a change: their `policy` records since `mark`."""
    found: Policies = []

    def come() -> bool:
        found[:] = [record for record in stand.records()[mark:] if record["event"] == "policy"]
        return len({record["sandbox"] for record in found}) == 2

    until(come, seconds, "both sandboxes' policy records")
    return found


def adopt(arena: Arena, text: str) -> None:
    """Put rules in force in both sandboxes."""
    mark = len(arena.stand.records())
    arena.stand.profile.write_text(text)
    assert {record["detail"] for record in policies(arena.stand, mark)} == {"adopted"}


def in_force(stand: Stand) -> set[str]:
    """The policies that the running sandboxes live by, by their last records."""
    latest = {
        record["sandbox"]: record for record in stand.records() if record["event"] in ("sandbox", "policy")
    }
    return {record["policy"] for record in latest.values() if record.get("detail") != "gone"}
