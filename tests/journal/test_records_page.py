"""docs/records.md is complete and true: every field, event and reason, and examples that control would write.

Run as a program, it writes the table of reasons into the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from egressd.journal.admission import admit
from egressd.journal.chain import GENESIS
from egressd.journal.reader import Filter
from egressd.journal.record import FIELDS
from egressd.journal.schema import schema
from egressd.policy.reasons import WORDS, Reason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "records.md"
TABLE = re.compile(r"(<!-- reasons: [^\n]*-->\n).*?(<!-- /reasons -->)", re.DOTALL)
EXAMPLE = re.compile(r"^```json\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
SECONDS_IN_2027 = 1_800_000_000.0


def table_of_reasons() -> str:
    lines = ["| reason | status | what the sandbox is told |", "|---|---|---|"]
    for reason in Reason:
        words = WORDS[reason]
        said = f"{words.says}. {words.hint}" if words.hint else words.says
        lines.append(f"| `{reason.value}` | {words.status} | {said} |")
    return "\n".join(lines) + "\n"


def rendered(page: str) -> str:
    return TABLE.sub(lambda match: match[1] + table_of_reasons() + match[2], page)


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def examples() -> list[dict[str, Any]]:
    return [json.loads(text) for text in EXAMPLE.findall(page())]


def test_the_table_of_reasons_is_the_code_s_own() -> None:
    assert page() == rendered(page()), f"run: python {Path(__file__).name}"


def test_the_table_of_fields_names_every_field_in_the_order_it_is_written() -> None:
    rows = page().split("## Fields")[1].split("## Events")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)) == FIELDS


def test_between_them_the_examples_use_every_field_event_layer_channel_and_verdict_but_ask() -> None:
    seen = [{key: value for key, value in each.items() if isinstance(value, str)} for each in examples()]
    assert {field for each in examples() for field in each} == set(FIELDS)
    assert {each["event"] for each in seen} == {
        "decision", "end", "lost", "sandbox", "policy", "approval", "alert", "head", "journal",
    }  # fmt: skip
    assert {each["layer"] for each in seen if "layer" in each} == {"dns", "connection", "request", "packet"}
    channels = {each["channel"] for each in seen if "channel" in each}
    ways = {"transparent", "connect", "absolute", "socks", "direct"}
    assert channels == ways | {"dns-udp", "dns-tcp", "nflog"}


@pytest.mark.parametrize("example", examples(), ids=lambda each: f"{each['seq']} {each['event']}")
def test_an_example_is_what_control_would_write(example: dict[str, Any]) -> None:
    chained = {key: value for key, value in example.items() if key in {"seq", "prev", "signature"}}
    sent = {key: value for key, value in example.items() if key not in chained}
    own = example["event"] not in {"decision", "end", "lost"}
    written = admit(sent, None if own else {example["sandbox"]}, SECONDS_IN_2027)
    assert written | chained | {"time": example["time"]} == example
    Draft202012Validator(schema()).validate({"prev": GENESIS, **example})
    assert list(example) == [field for field in FIELDS if field in example]
    assert Filter(sandbox=example["sandbox"]).wants(example)


if __name__ == "__main__":
    PAGE.write_text(rendered(page()), encoding="utf-8")
