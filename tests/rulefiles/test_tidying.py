from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.rulefiles.problems import Findings, Problems
from egressd.rulefiles.tidying import Refused, tidy
from egressd.rulefiles.yaml import load_document

FIRST = "# yaml-language-server: $schema=../schema.json\n"


@pytest.mark.parametrize(
    ("given_", "made"),
    [
        ("a: 1  \r\n\r\n\r\n\r\nb: 2 # why\t", f"{FIRST}a: 1\n\nb: 2 # why\n"),
        (f"{FIRST}a: 1\n\n\n", f"{FIRST}a: 1\n"),
        (f"# of ours\n{FIRST}a: 1\n", f"# of ours\n{FIRST}a: 1\n"),
        (f'{FIRST}a: "x # no comment"  \n', f'{FIRST}a: "x # no comment"\n'),
    ],
    ids=[
        "what editors leave behind",
        "blank lines at the end",
        "a comment before the schema",
        "a # in a text",
    ],
)
def test_only_what_says_nothing_is_taken_away(given_: str, made: str) -> None:
    assert tidy(given_.encode(), "profiles/a.yaml", "../schema.json") == made.encode()
    assert tidy(made.encode(), "profiles/a.yaml", "../schema.json") == made.encode()


def test_a_list_keeps_its_comments_and_gets_no_schema() -> None:
    assert (
        tidy(b"a.example # why \n\n\n\nb.example", "lists/x.txt", "../schema.json")
        == b"a.example # why\n\nb.example\n"
    )


def test_blanks_that_belong_to_a_text_are_left_with_the_whole_file() -> None:
    assert tidy(b"a: |\n  x  \n  y\n", "a.yaml", None) == Refused(
        "blanks at the end of a line belong to a text in it"
    )


def test_a_file_that_cannot_be_read_is_left_with_its_problems() -> None:
    problems = tidy(b"a: [\n", "a.yaml", None)
    assert isinstance(problems, Problems)
    assert len(problems)


@given(st.text(st.sampled_from("ab: #-[]'\"|>\n\r\t \\{},&*1"), max_size=60))
def test_whatever_it_makes_says_the_same(text: str) -> None:
    made = tidy(text.encode(), "a.yaml", "../schema.json")
    if isinstance(made, bytes):
        before, after = (load_document(each, "a.yaml", Findings()) for each in (text.encode(), made))
        assert before is not None
        assert after is not None
        assert before.data == after.data
        assert tidy(made, "a.yaml", "../schema.json") == made
