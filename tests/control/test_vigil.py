"""The vigil: what is not in place is told once, and the daemon is not ready until it is again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from egressd.control import vigil as vigils
from egressd.control.vigil import Vigil


def kept(monkeypatch: pytest.MonkeyPatch, *found: Any) -> list[tuple[bool, list[str]]]:
    """After each look of a vigil over one wiring: whether it is sound, and what was noted so far."""
    monkeypatch.setattr(vigils, "EVERY", 0)
    monkeypatch.setattr(vigils, "say", lambda text: None)
    notes: list[str] = []
    seen: list[tuple[bool, list[str]]] = []
    answers = iter(found)

    async def look() -> Any:
        if seen or notes or wiring.asked:
            seen.append((vigil.sound, list(notes)))
        wiring.asked = True
        answer = next(answers, None)
        if answer is None:
            raise asyncio.CancelledError
        if isinstance(answer, Exception):
            raise answer
        return answer

    wiring: Any = SimpleNamespace(name="gateway", look=look, asked=False)
    vigil = Vigil([wiring], notes.append)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(vigil.keep())
    return seen


def test_what_is_missing_is_told_once_and_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, back = "wiring gateway: not in place: a rule", "wiring gateway: in place again"
    assert kept(monkeypatch, [], ["a rule"], ["a rule"], [], []) == [
        (True, []),
        (False, [gone]),
        (False, [gone]),
        (True, [gone, back]),
        (True, [gone, back]),
    ]


def test_what_cannot_be_looked_at_is_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    [(sound, notes)] = kept(monkeypatch, RuntimeError("broken"))
    assert not sound
    assert notes == ["wiring gateway: not in place: RuntimeError: broken"]
