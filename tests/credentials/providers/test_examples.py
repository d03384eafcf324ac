"""The page on credentials shows sources as credentials.yaml takes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from egressd.policy.credential import Source, VaultAuth

PAGE = (Path(__file__).resolve().parents[3] / "docs/credentials.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SOURCES = [
    found["source"] for block in BLOCKS if "source" in (found := yaml.safe_load(block)) and len(found) == 1
]
AUTHS = [
    yaml.safe_load(line)["auth"]
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("auth:")
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: next(iter(source)))
def test_an_example_is_a_source(source: dict[str, Any]) -> None:
    Source.model_validate(source)


@pytest.mark.parametrize("auth", AUTHS, ids=lambda auth: next(iter(auth)))
def test_an_example_is_a_way_to_log_in(auth: dict[str, Any]) -> None:
    VaultAuth.model_validate(auth)


def test_every_kind_of_source_has_an_example() -> None:
    assert {kind for source in SOURCES for kind in source} == set(Source.model_fields)
