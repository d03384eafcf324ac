"""`python -m egressd.rulefiles.schema > rules/schema.json`: the JSON Schema of rule files, for editors.

With `credentials` behind it, that of credentials.yaml: rules/credentials.schema.json.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from egressd.policy.credential import CredentialsFile
from egressd.policy.model import json_schema
from egressd.rulefiles import credentials_manual
from egressd.rulefiles.manual import annotate

CREDENTIALS = "credentials"


def schema_text(of: str = "rules") -> str:
    """Return the schema as the file holds it: that of rule files, or of `credentials`."""
    made = _credentials() if of == CREDENTIALS else annotate(json_schema())
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _credentials() -> dict[str, Any]:
    made = CredentialsFile.model_json_schema(by_alias=True)
    told = annotate(made, credentials_manual.SAYS, credentials_manual.EXAMPLES)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **told, "title": "egressd credentials.yaml"}


if __name__ == "__main__":
    sys.stdout.write(schema_text(*sys.argv[1:2]))
