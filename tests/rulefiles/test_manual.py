"""The schemas that editors use describe every key, with examples that are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from egressd.rulefiles import credentials_manual, manual
from egressd.rulefiles.schema import CREDENTIALS, schema_text

SCHEMAS = {name: json.loads(schema_text(name)) for name in ("rules", CREDENTIALS)}


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for part, definition in [("", schema), *schema["$defs"].items()]:
        for key, shown in definition.get("properties", {}).items():
            yield part, key, shown


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_key_is_described_with_examples(name: str) -> None:
    bare = [
        (part, key)
        for part, key, shown in keys(SCHEMAS[name])
        if not shown.get("description") or not shown.get("examples")
    ]
    assert bare == []


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_example_fits_its_key(name: str) -> None:
    definitions = SCHEMAS[name]["$defs"]
    wrong = [
        (part, key, example)
        for part, key, shown in keys(SCHEMAS[name])
        for example in shown["examples"]
        if not Draft202012Validator({"$defs": definitions, **shown}).is_valid(example)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("rules", manual.SAYS),
        ("rules", manual.EXAMPLES),
        (CREDENTIALS, credentials_manual.SAYS),
        (CREDENTIALS, credentials_manual.EXAMPLES),
    ],
    ids=["rules: words", "rules: examples", "credentials: words", "credentials: examples"],
)
def test_nothing_is_described_that_there_is_not(name: str, table: dict[str, object]) -> None:
    there = {key for _, key, _ in keys(SCHEMAS[name])} | {
        f"{part}.{key}" for part, key, _ in keys(SCHEMAS[name])
    }
    assert set(table) - there == set()
