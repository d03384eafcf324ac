"""What every probe has to be, and how outcomes are put."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.verify import inside
from egressd.verify.probe import (
    HELD,
    OPEN,
    PARTS,
    PROBES,
    UNTRIED,
    Outcome,
    broke_off,
    in_order,
    judged,
    listed,
    safe,
    word,
)

FOLDER = Path(inside.__file__).parent


def decorated(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(each, ast.Call) and getattr(each.func, "id", "") == "probe"
        for each in function.decorator_list
    )


def test_every_function_that_is_given_a_scene_and_says_an_outcome_is_a_probe() -> None:
    """One that lost its decorator would never be made, and nobody would see it."""
    for module in inside.MODULES:
        assert module.__file__ is not None
        for node in ast.parse(Path(module.__file__).read_text()).body:
            public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if (
                public
                and isinstance(node, ast.FunctionDef)
                and ast.unparse(node.returns or ast.Constant(None)) == "Outcome"
            ):
                assert decorated(node), f"{module.__name__}.{node.name}"
                assert node.name.replace("_", "-") in PROBES


def test_every_module_of_probes_is_imported() -> None:
    holding = {
        path.stem for path in FOLDER.glob("*.py") if re.search(r"^@probe\(", path.read_text(), re.MULTILINE)
    }
    assert holding == {module.__name__.rpartition(".")[2] for module in inside.MODULES}


def test_the_order_is_by_part_and_begins_with_what_must_work() -> None:
    parts = [PARTS.index(probe.part) for probe in in_order()]
    assert parts == sorted(parts)
    assert in_order()[0].name == "allowed-request"


@pytest.mark.parametrize(
    ("tries", "verdict", "detail"),
    [
        pytest.param([None, None], HELD, "2 tries", id="all were stopped"),
        pytest.param([None, "a", "b"], OPEN, "a; b", id="some got through"),
        pytest.param(list("abcdefghij"), OPEN, "a; b; c; d; and 2 more", id="a few are enough"),
        pytest.param([], UNTRIED, "there is nothing here to try it on", id="nothing was tried"),
        pytest.param(
            ["a\x1b[31m\n\u202e"], OPEN, "a?[31m??", id="what got through is no terminal's language"
        ),
    ],
)
def test_many_tries_are_one_outcome(tries: list[str | None], verdict: str, detail: str) -> None:
    assert judged(tries, "tries") == Outcome(verdict, detail)


def slow(*found: str | None) -> Iterator[str | None]:
    for each in found:
        time.sleep(0.02)
        yield each


def test_what_time_did_not_suffice_for_is_not_said_to_hold() -> None:
    assert judged(slow(None, None, None), "tries", 0.01).detail.startswith(
        "broke off: not done after 1 tries"
    )
    assert judged(slow(None, None, None), "tries", 0.01).verdict == UNTRIED
    assert judged(slow("through", None), "tries", 0.01) == Outcome(OPEN, "through")


def test_after_enough_nothing_more_is_tried() -> None:
    def tries() -> Iterator[str]:
        yield from ("through",) * 6
        raise AssertionError("a seventh")

    assert judged(tries(), "tries").verdict == OPEN


@given(st.text())
def test_what_is_said_is_printable_and_short(text: str) -> None:
    said = safe(text)
    assert said.isascii()
    assert said.isprintable()
    assert len(said) <= 300
    assert broke_off(text).detail.startswith("broke off: ")


def test_a_list_says_how_many_more() -> None:
    assert listed(["a", "b"]) == "a; b"
    assert listed(list("abcdef")) == "a; b; c; d; and 2 more"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (PermissionError(1, "x"), "EPERM"),
        (TimeoutError(), "TimeoutError"),
        (OSError(99999, "x"), "OSError"),
    ],
)
def test_an_error_has_a_name(error: OSError, name: str) -> None:
    assert word(error) == name
