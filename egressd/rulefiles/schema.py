"""`python -m egressd.rulefiles.schema > rules/schema.json`: the JSON Schema of rule files, for editors."""

from __future__ import annotations

import json
import sys

from egressd.policy.model import json_schema


def schema_text() -> str:
    """Return the schema as the file holds it."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
