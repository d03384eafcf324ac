"""The process that reads a large folder of rules for control, and says what is in it on its standard output.

One line of JSON, and behind it what that line gives the lengths of: the credentials file, the policies as they travel, and the
files themselves. It has control's user and nothing else of it.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from egressd.control.archive import in_force
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Code, Findings, Problems
from egressd.rulefiles.yaml import read_bytes


def tell(loaded: Rules | Problems, credentials: bytes) -> bytes:
    """Return what control is told of rules that were read with this credentials file (empty for none)."""
    if isinstance(loaded, Problems):
        passing = any(problem.code is Code.UNREADABLE for problem in loaded)
        return json.dumps({"problem": str(loaded), "passing": passing}).encode() + b"\n"
    policies = {name: loaded.effective(name).lines() for name in loaded.profiles}
    parts = [credentials, *policies.values(), *loaded.source.files.values()]
    head = {
        "digest": loaded.digest,
        "credentials": loaded.credentials is not None,
        "profiles": list(policies),
        "canaries": {name: canary.model_dump() for name, canary in loaded.canaries.items()},
        "files": list(loaded.source.files),
        "lengths": [len(part) for part in parts],
    }
    return b"".join((json.dumps(head).encode(), b"\n", *parts))


def main() -> None:
    """Read the folder, the state directory beside it, and the credentials file unless it is empty, that the arguments name."""
    gc.disable()  # all that is made here is kept to the end, which is near
    folder, state_dir, name = sys.argv[1:4]
    findings = Findings(folder)
    source = in_force(Path(folder), Path(state_dir), findings)
    credentials = read_bytes(Path(name), name, findings) if name else None
    loaded: Rules | Problems = findings.problems()
    if not findings.count:
        loaded = load_source(source, credentials=credentials, credentials_name=name)
    sys.stdout.buffer.write(tell(loaded, credentials or b""))
