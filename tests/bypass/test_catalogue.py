"""Every known way round is held by a test that names it, or is listed here with what cannot be had."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
NOT_TESTED: dict[str, str] = {}
"""Ids of rows marked `partly` that cannot be tried on this kind of machine, each with the command that fails."""
_KINDS = "NAME|IP|META|DNS|TLS|HTTP|ENG|CRED|NET|CFG|LOG|DOS|POL|CMP"
_ID = re.compile(rf"\b(?:{_KINDS})-\d+\b")
_FUNCTION = re.compile(rf"def test_({_KINDS})_(\d+)(?:_and_(\d+))?_", re.IGNORECASE)


def catalogue() -> dict[str, bool]:
    """Id → whether the row is marked `partly`."""
    lines = [
        line.split() for line in (HERE / "catalogue.txt").read_text().splitlines() if not line.startswith("#")
    ]
    return {words[0]: "partly" in words for words in lines}


def named() -> set[str]:
    """The ids that tests name: those of this folder, and of the wirings' and clients' own tests."""
    root = HERE.parent
    files = [
        *HERE.glob("test_*.py"),
        *root.glob("e2e/test_*.py"),
        *root.glob("wiring/test_*.py"),
        *root.glob("clients/test_*.py"),
    ]
    found: set[str] = set()
    for text in (path.read_text() for path in files if path.name != "test_catalogue.py"):
        found.update(_ID.findall(text))
        for kind, *numbers in _FUNCTION.findall(text):
            found.update(f"{kind.upper()}-{number}" for number in numbers if number)
    return found


def test_every_row_is_held_by_a_test_or_said_to_be_out_of_reach() -> None:
    known = catalogue()
    assert len(known) == 264
    missing = sorted(known.keys() - named() - NOT_TESTED.keys())
    assert not missing, f"{len(missing)} rows without a test: {missing}"


def test_only_rows_that_need_more_than_a_machine_may_be_left_out() -> None:
    known = catalogue()
    assert [row for row in NOT_TESTED if not known[row]] == []


def test_no_test_names_a_row_that_does_not_exist() -> None:
    assert sorted(named() - catalogue().keys()) == []
