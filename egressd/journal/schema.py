"""`python -m egressd.journal.schema > docs/record.schema.json`: the JSON Schema of a journal's line, for those who read it.

Made of the record itself and of what control admits, so that it cannot say anything else. `schema` in a record is the version of
what its fields mean; new fields may come within a version, and so readers ignore what they do not know.
"""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any, Final, get_args, get_type_hints

from egressd.journal.admission import CLOSED, IDENTIFIER, LABEL_COUNT, NEEDED, NUMBERS
from egressd.journal.record import FIELDS, SCHEMA, Record

_TIME: Final = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$"
_ALWAYS: Final = ("time", "schema", "seq", "event", "sandbox", "attempt_id", "root_id", "prev")
_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PATTERNS: Final = {
    "time": _TIME,
    "attempt_id": IDENTIFIER,
    "root_id": IDENTIFIER,
    "prev": "^[0-9a-f]{64}$",
    "key": "^[0-9a-f]{16}$",
    "torn": r"^\d+ [0-9a-f]{64}$",
    "signature": "^[A-Za-z0-9+/]{86}==$",
}


def schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12)."""
    hints = get_type_hints(Record)
    defaults = {field.name: field for field in dataclasses.fields(Record)}
    assert set(FIELDS) == defaults.keys()
    needed = [
        {
            "if": {"properties": {"event": {"const": event}}, "required": ["event"]},
            "then": {"required": sorted([*names, *(["signature"] if event == "head" else [])])},
        }
        for event, names in sorted(NEEDED.items())
        if names
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:egressd:record:{SCHEMA}",
        "title": f"egressd journal record, schema {SCHEMA}",
        "description": "One line of the journal. docs/records.md says what each field means.",
        "type": "object",
        "required": list(_ALWAYS),
        "properties": {name: _property(name, hints[name]) for name in FIELDS},
        "allOf": needed,
    }


def _property(name: str, hint: Any) -> dict[str, Any]:
    if name == "schema":
        return {"const": SCHEMA}
    if name == "seq":
        return {"type": "integer", "minimum": 1}
    if name in CLOSED:
        return {"enum": sorted(map(str, CLOSED[name]))}
    if name == "labels":
        return {
            "type": "object",
            "maxProperties": LABEL_COUNT,
            "additionalProperties": {"type": "string"},
        }
    if name in {"would_deny", "further"}:
        return {"const": True}
    kind = _TYPES[_plain(hint)]
    found: dict[str, Any] = {"type": kind}
    if name in NUMBERS:
        found["minimum"], found["maximum"] = NUMBERS[name]
    if name in _PATTERNS:
        found["pattern"] = _PATTERNS[name]
    return found


def _plain(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
    return hint if isinstance(hint, type) else str


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))  # noqa: T201 -- its output is the file
