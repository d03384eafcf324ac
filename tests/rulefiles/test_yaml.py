from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.model import ProfileFile
from egressd.rulefiles.document import Document
from egressd.rulefiles.problems import Code, Findings, Place, Problems
from egressd.rulefiles.scalars import Surprise, resolve
from egressd.rulefiles.yaml import MOST_DEPTH, load_document, load_model


def read(text: str | bytes) -> tuple[Document | None, list[Code]]:
    findings = Findings()
    content = text if isinstance(text, bytes) else text.encode()
    document = load_document(content, "a.yaml", findings)
    return document, [problem.code for problem in findings.problems()]


def places(text: str) -> list[tuple[int, int, Code]]:
    findings = Findings()
    load_document(text.encode(), "a.yaml", findings)
    return [(problem.line, problem.column, problem.code) for problem in findings.problems()]


SCALARS = [
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("443", 443),
    ("-1", -1),
    ("0", 0),
    ("0x1F", 31),
    ("1.5", 1.5),
    ("-1.5", -1.5),
    ("2027-03-31", "2027-03-31"),
    ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
    ("10.20.0.0/16", "10.20.0.0/16"),
    ("600/minute", "600/minute"),
    ("1.2.3", "1.2.3"),
    ("yesterday", "yesterday"),
    ("onward", "onward"),
    ("fd00:1::", "fd00:1::"),
    ("-", "-"),
    ("+x", "+x"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_a_plain_scalar_means_what_yaml_1_2_says(text: str, value: object) -> None:
    found = resolve(text)
    assert found == value
    assert type(found) is type(value)


WORDS = "0o17 1e3 1.5e3 -.5 yes No ON off y N 22:22 1:02:03.5 1_000 0x_1f 010 -007 00 01.5 0b11 -0x1f = .inf -.INF .NaN"
SURPRISES = [
    *WORDS.split(" "),
    "9" * 19,
    "5." + "5" * 20,
    "0x" + "1f" * 9,
    "0x" + "1f" * 40,
    f"{'1' * 70}.0e+5",
    "1" * 5000,
    "1:" * 100 + "1",
]


@pytest.mark.parametrize("text", SURPRISES)
def test_what_yaml_1_1_reads_otherwise_is_a_surprise_with_a_fix(text: str) -> None:
    found = resolve(text)
    assert isinstance(found, Surprise)
    assert found.fix


class Undated(yaml.CSafeLoader):
    """PyYAML's safe reader, but dates are texts, as in rules."""


Undated.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in held if not tag.endswith(":timestamp")]
    for first, held in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_every_short_text_like_a_number_is_what_pyyaml_reads_or_a_surprise(length: int) -> None:
    for letters in itertools.product("017-+.:_eox", repeat=length):
        text = "".join(letters)
        ours = resolve(text)
        try:
            theirs = yaml.load(f"a: {text}\n", Loader=Undated)["a"]
        except (yaml.YAMLError, ValueError):
            continue
        if not isinstance(ours, Surprise) and not isinstance(theirs, list | dict):
            assert (ours, type(ours)) == (theirs, type(theirs)), text


@given(st.text(max_size=80))
def test_resolving_is_total(text: str) -> None:
    resolve(text)


@pytest.mark.parametrize("text", ["on", "22:22", "010", "1_000", "null"])
def test_quotes_make_a_text_of_anything(text: str) -> None:
    document, codes = read(f'a: "{text}"')
    assert codes == []
    assert document is not None
    assert document.data == {"a": text}


def test_every_value_and_key_has_its_place() -> None:
    document, codes = read("# first\na:\n  - b: 'ü x'\n    c: {d: [1, zwei]}\n")
    assert codes == []
    assert document is not None
    assert document.place("a", 0, "b") == Place(3, 8)
    assert document.key_place("a", 0, "c") == Place(4, 5)
    assert document.place("a", 0, "c", "d", 1) == Place(4, 16)
    assert document.place("a", 0, "c", "nothing", "here") == Place(4, 8), "the nearest thing around it"


PROBLEMS: list[tuple[str, list[tuple[int, int, Code]]]] = [
    ("a: 1\nb: 2\na: 3\n", [(3, 1, Code.DUPLICATE_KEY)]),
    ('a: 1\n"a": 2\n', [(2, 1, Code.DUPLICATE_KEY)]),
    ("a: &x 1\nb: *x\n", [(1, 4, Code.ALIAS), (2, 4, Code.ALIAS)]),
    ("a: !!str 1\n", [(1, 4, Code.TAG)]),
    ("a: ! b\n", [(1, 4, Code.TAG)]),
    ("<<: {a: 1}\n", [(1, 1, Code.MERGE_KEY)]),
    ("? [a]\n: b\n", [(1, 3, Code.BAD_KEY)]),
    ("true: b\n", [(1, 1, Code.BAD_KEY)]),
    ("on: b\n", [(1, 1, Code.AMBIGUOUS_VALUE)]),
    ("~: b\n", [(1, 1, Code.BAD_KEY)]),
    ("a:\nb: 1\n", [(1, 3, Code.EMPTY_VALUE)]),
    ("a: [null]\n", [(1, 5, Code.EMPTY_VALUE)]),
    ("a: 1\n---\nb: 1\n", [(2, 1, Code.SEVERAL_DOCUMENTS)]),
    ("%YAML 1.2\n---\na: 1\n", [(1, 1, Code.DIRECTIVE)]),
    ("a:\n\tb: 1\n", [(2, 1, Code.TAB)]),
    ("a: [1\n", [(2, 1, Code.BAD_YAML)]),
    ("a: *.example.com\n", [(1, 5, Code.BAD_YAML)]),
    ("a: \x07\n", [(1, 1, Code.BAD_YAML)]),
    ("", [(1, 1, Code.EMPTY_FILE)]),
    ("# nothing\n---\n", [(1, 1, Code.EMPTY_FILE)]),
    (
        "a: no\nb: 010\nc: &d 1\n",
        [(1, 4, Code.AMBIGUOUS_VALUE), (2, 4, Code.AMBIGUOUS_VALUE), (3, 4, Code.ALIAS)],
    ),
]


@pytest.mark.parametrize(("text", "expected"), PROBLEMS, ids=[repr(text) for text, _ in PROBLEMS])
def test_a_doubtful_construct_is_a_problem_at_its_place(
    text: str, expected: list[tuple[int, int, Code]]
) -> None:
    assert places(text) == expected


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"a: caf\xe9\n", Code.NOT_UTF8),
        (b"a: \xed\xa0\x80\n", Code.NOT_UTF8),
        ("a: 1".encode("utf-16"), Code.BYTE_ORDER_MARK),
        (b"\xef\xbb\xbfa: 1\n", Code.BYTE_ORDER_MARK),
        (b"a: 1\n\x00", Code.BAD_YAML),
        ("a: 1 # one line to an editor\u2028b: 2\n".encode(), Code.BAD_YAML),
        ("a: 1 # one line to an editor\x85b: 2\n".encode(), Code.BAD_YAML),
        (b"a: 1 # overwritten on a terminal\rb: 2\n", Code.BAD_YAML),
    ],
)
def test_only_plain_utf8_is_read(content: bytes, code: Code) -> None:
    assert read(content)[1] == [code]


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> str:
        return "a: " + "[" * (depth - 1) + "1" + "]" * (depth - 1)

    assert read(nested(MOST_DEPTH))[1] == []
    assert read(nested(MOST_DEPTH + 1))[1] == [Code.TOO_DEEP]


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMBS = {
    "nine levels of aliases": LAUGHS,
    "brackets without end": "[" * 2_000_000,
    "braces without end": "{" * 2_000_000,
    "dashes without end": "- " * 1_000_000,
    "question marks without end": "? " * 1_000_000,
    "a number without end": "a: " + "9" * 4_000_000,
    "underscores without end": "a: 0" + "_" * 4_000_000,
    "colons without end": "a: 1" + ":1" * 2_000_000,
    "a tag": "a: !!python/object/apply:os.system ['true']",
    "the same key again and again": "a: 1\n" * 100_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_within_a_second(name: str) -> None:
    began = time.process_time()
    document, codes = read(BOMBS[name])
    assert document is None
    assert codes
    assert time.process_time() - began < 1


@given(
    st.one_of(
        st.binary(max_size=200), st.text(alphabet="ab:-[]{}&*!|>'\"%#?,\n\t 0", max_size=60).map(str.encode)
    )
)
def test_reading_is_total_and_never_silent(content: bytes) -> None:
    document, codes = read(content)
    assert (document is None) == bool(codes)


def test_a_model_is_read_from_a_file_or_its_problems_are(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("schema: 1\nprofile: p\n")
    good = load_model(path, ProfileFile)
    assert isinstance(good, ProfileFile)
    path.write_text("schema: 1\nprofil: p\n")
    bad = load_model(path, ProfileFile)
    assert isinstance(bad, Problems)
    assert [(problem.line, problem.column, problem.code) for problem in bad] == [
        (1, 1, Code.MISSING_KEY),
        (2, 1, Code.UNKNOWN_KEY),
    ]
    assert isinstance(load_model(tmp_path / "none.yaml", ProfileFile), Problems)
