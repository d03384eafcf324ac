"""Queries ask the same of a record's fields, of its bytes and of the index."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.journal.index import Index, index_path
from egressd.journal.query import KEYS, Query, is_term, parse_query
from egressd.journal.reader import BadFilter, parse_line, read
from egressd.journal.record import FIELDS, timestamp, to_line

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
WEB = {"sandbox": "sbx-aaaa1111", "labels": {"name": "web", "task": "7"}}
JOB = {"sandbox": "sbx-bbbb2222"}


def a_record(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "time": timestamp(NOW - 100 + number),
        "schema": 1,
        "seq": number,
        "attempt_id": f"a{number}",
    } | fields


RECORDS = [
    a_record(1, event="decision", layer="request", verdict="allow", method="GET", host="a.pypi.org", path="/simple/x", **WEB),
    a_record(2, event="decision", layer="request", verdict="deny", reason="not_allowed", method="POST", host="x.io", **WEB),
    a_record(3, event="decision", layer="connection", verdict="deny", reason="ip_literal", address="192.0.2.7", port=443, **JOB),
    a_record(4, event="end", layer="request", method="GET", host="a.pypi.org", attempt="a1", bytes_up=5, status=200, **WEB),
    a_record(5, event="decision", layer="dns", verdict="allow", would_deny=True, host="pypi.org", address="198.18.1.0", **JOB),
    a_record(6, event="decision", layer="request", verdict="deny", host="a\u00e9", **JOB),
]  # fmt: skip


def asked(*words: str) -> Query:
    query = parse_query(words, NOW)
    assert isinstance(query, Query), query
    return query


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        pytest.param([], [1, 2, 3, 4, 5, 6], id="nothing asks for everything"),
        pytest.param(["sandbox:sbx-aaaa1111"], [1, 2, 4], id="a sandbox by its id"),
        pytest.param(["sandbox:sbx-bb"], [3, 5, 6], id="a sandbox by the beginning of its id"),
        pytest.param(["sandbox:web"], [1, 2, 4], id="a sandbox by a label"),
        pytest.param(["label:task=7"], [1, 2, 4], id="a label"),
        pytest.param(["label:task=8"], [], id="a label of another value"),
        pytest.param(["verdict:deny"], [2, 3, 6], id="a verdict"),
        pytest.param(["verdict:would-deny"], [5], id="what observe mode alone let through"),
        pytest.param(["host:*.io"], [2], id="what is below a name"),
        pytest.param(["host:pypi.org,x.io"], [2, 5], id="one of two hosts"),
        pytest.param(["host:192.0.2.7"], [3], id="an address that was dialled"),
        pytest.param(["host:198.18.1.0"], [5], id="an address that was dialled by a name"),
        pytest.param(["method:POST", "verdict:deny"], [2], id="two terms at once"),
        pytest.param(["path:/simple/*"], [1], id="a path with a star"),
        pytest.param(["port:443"], [3], id="a port"),
        pytest.param(["reason:ip_literal,not_allowed"], [2, 3], id="one of two reasons"),
        pytest.param(["id:a2"], [2], id="an attempt"),
        pytest.param(["since:98s"], [2, 3, 4, 5, 6], id="since a time, that included"),
        pytest.param(["until:98s"], [1], id="until a time, that not included"),
    ],
)
def test_terms(words: list[str], wanted: list[int], journal: Path) -> None:
    query = asked(*words)
    assert [record["seq"] for record in RECORDS if query.wants(record)] == wanted
    with journal.open("rb") as file:
        found = list(read(file, query, likely=query.likely))
        assert [line.fields["seq"] for line in found] == wanted
        index = Index(journal, file)
        lines = [parse_line(raw) for raw in index.lines(query, ends=False)]
        assert [line.fields["seq"] for line in lines if line and query.wants(line.fields)] == wanted
        with_ends = [json.loads(raw)["seq"] for raw in index.lines(query, ends=True)]
        assert set(wanted) <= set(with_ends) <= set(range(1, 7))
        index.close()


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("host:a b", "no host"),
        ("since:soon", "no age"),
        ("verdict:maybe", "one of allow"),
        ("port:x", "a number"),
        ("label:task", "NAME=VALUE"),
        ("color:red", "no such key"),
        ("sandbox:", "a value is wanted"),
    ],
)
def test_a_term_that_means_nothing_is_refused(word: str, words: str) -> None:
    found = parse_query([word], NOW)
    assert isinstance(found, BadFilter)
    assert words in found.problem


def test_a_word_is_a_term_by_its_key() -> None:
    assert is_term("host:a")
    assert not is_term("./host:a")
    assert not is_term("journal.jsonl")


@given(
    st.lists(st.sampled_from(KEYS).flatmap(lambda key: st.text(max_size=9).map(lambda text: f"{key}:{text}")))
)
def test_parsing_is_total(words: list[str]) -> None:
    parse_query(words, NOW)


TEXT = st.text("a1.*:é", max_size=3)
VALUES = st.none() | st.booleans() | st.integers() | TEXT | st.dictionaries(TEXT, TEXT)


@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
    st.sampled_from(
        ["sandbox:a", "verdict:deny", "host:a", "path:a*", "label:a=1", "reason:a,1", "since:1h", "port:1"]
    ),
)
def test_what_a_query_wants_is_likely_by_its_bytes(fields: dict[str, Any], word: str) -> None:
    query = asked(word)
    if query.wants(fields):
        assert query.likely(to_line(fields))


# --- the index


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(
        b"".join(map(to_line, RECORDS[:3])) + b"torn\n[1]\n" + b"".join(map(to_line, RECORDS[3:]))
    )
    return path


def numbers(path: Path, query: Query) -> Iterator[int]:
    with path.open("rb") as file:
        index = Index(path, file)
        yield from (json.loads(raw)["seq"] for raw in index.lines(query, ends=False))
        index.close()


def test_the_index_goes_on_where_it_ended(journal: Path) -> None:
    deny = asked("verdict:deny")
    assert list(numbers(journal, deny)) == [2, 3, 6]
    with journal.open("ab") as file:
        file.write(
            to_line(a_record(7, event="decision", verdict="deny", host="new.example", **WEB)) + b'{"half'
        )
    assert list(numbers(journal, deny)) == [2, 3, 6, 7]
    assert list(numbers(journal, asked("host:new.example"))) == [7]


@pytest.mark.parametrize("how", ["exchanged", "shortened", "changed", "spoiled"])
def test_an_index_of_another_file_is_made_anew(journal: Path, how: str) -> None:
    deny = asked("verdict:deny")
    assert list(numbers(journal, deny)) == [2, 3, 6]
    line = to_line(a_record(9, event="decision", verdict="deny"))
    match how:
        case "exchanged":
            journal.rename(journal.with_name("old"))
            journal.write_bytes(line)
        case "shortened":
            journal.write_bytes(line)
        case "changed":
            journal.write_bytes(line + b" " * (journal.stat().st_size - len(line)) + b"\n")
        case _:
            index_path(journal).write_bytes(b"no database" * 1000)
    assert list(numbers(journal, deny)) == ([2, 3, 6] if how == "spoiled" else [9])


def test_the_index_is_its_owners_alone(journal: Path) -> None:
    list(numbers(journal, asked()))
    assert index_path(journal).stat().st_mode & 0o777 == 0o600
    assert os.listdir(index_path(journal).parent) == ["journal.jsonl.index"]


def test_reading_by_bytes_still_reads_lines_of_others(journal: Path) -> None:
    foreign = io.BytesIO(b'{ "verdict" : "deny" }\n')
    query = asked("verdict:deny")
    assert [line.fields for line in read(foreign, query, likely=query.likely)] == [{"verdict": "deny"}]
